"""Networks: from images to features and logits. The only package that knows Flax."""
