"""ViT-L/16 pre-trained on ImageNet-21k for 90 epochs, as released with the ViT paper.

Data:     ImageNet-21k as a folder of classes: 14.2 M images, 21,841 classes.
Source:   arXiv 2010.11929, Table 3 (lr 1e-3, decay 0.03, linear, dropout 0.1; no clipping): vit_paper.py.
Differs:  As vit_paper.py.
Run:      python -m vit_jax.main --config=configs/vit_l16_i21k.py --config.data.source=folder:PATH
          --config.model.dtype=bfloat16
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_l16_i21k.py --topology=v3:8x8
          --config.model.dtype=bfloat16
          2026-11-21, compiled without the hardware, not measured on a TPU. Step time, MFU, hours and core-days exclude
          collectives, whose times are summed without any overlap.
          topology           devices  peak GiB        step ms  collectives   MFU        steps   hours  core-days
          v3:8x8                 128   4.16 of 15.48    497.6         33.1   38.6%    311,948    43.1        230
          The table was made with clipping at norm 1 and has not been renewed.
Expected: the paper reports 85.15 % on ImageNet after fine-tuning at 384 px (85.30 % at 512 px with
          averaged weights), and 0.23k TPUv3-core-days, where its Table 3 gives 30 or 90 epochs. Not run here.
"""
from vit_jax.config import files
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run."""
  s.parse_arg(arguments)
  changes = {'name': 'vit_l16_i21k', 'model.init': s.Init.VISION_TRANSFORMER}
  return s.replaced(files.load('vit_paper:L/16,i21k', []), changes)
