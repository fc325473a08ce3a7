"""Networks that the papers compare Vision Transformers with; `resnet` also makes the stem of the hybrids."""
