"""ViT-B/16 pre-trained on ImageNet-21k for 90 epochs, as released with the ViT paper.

Data:     ImageNet-21k as a folder of classes: 14.2 M images, 21,841 classes.
Source:   arXiv 2010.11929, Table 3 (lr 1e-3, decay 0.03, linear, dropout 0.1; no clipping): vit_paper.py.
Differs:  As vit_paper.py.
Run:      python -m vit_jax.main --config=configs/vit_b16_i21k.py --config.data.source=folder:PATH
          --config.model.dtype=bfloat16
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_b16_i21k.py --topology=v3:8x8
          --config.model.dtype=bfloat16
          2026-11-21, compiled without the hardware, not measured on a TPU. Step time, MFU, hours and core-days exclude
          collectives, whose times are summed without any overlap.
          topology           devices  peak GiB        step ms  collectives   MFU        steps   hours  core-days
          v3:8x8                 128   2.94 of 15.48    193.4          6.8   28.4%    311,948    16.8         89
          The table was made with clipping at norm 1 and has not been renewed.
Expected: the paper reports 83.97 % on ImageNet after fine-tuning at 384 px. Not run here.
"""
from vit_jax.config import files
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run."""
  s.parse_arg(arguments)
  changes = {'name': 'vit_b16_i21k', 'model.init': s.Init.VISION_TRANSFORMER}
  return s.replaced(files.load('vit_paper:B/16,i21k', []), changes)
