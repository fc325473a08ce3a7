"""ViT-L/16 from scratch on ImageNet-1k for 300 epochs, as in the ViT paper.

Data:     TFDS `imagenet2012`: 1,281,167 training and 50,000 validation images, 1,000 classes.
Source:   arXiv 2010.11929, Table 3 (lr 3e-3, decay 0.3, cosine, dropout 0.1, clipping at norm 1): vit_paper.py.
Differs:  As vit_paper.py.
Run:      python -m vit_jax.main --config=configs/vit_l16_i1k.py --workdir=runs/vit_l16_i1k
          --config.model.dtype=bfloat16
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_l16_i1k.py --topology=v3:8x8
          --config.model.dtype=bfloat16
          2026-11-21, compiled without the hardware, not measured on a TPU. Step time, MFU, hours and core-days exclude
          collectives, whose times are summed without any overlap. To save memory, set
          --config.model.remat=mlp, and --config.model.full_remat=4 to save nothing of the first 4 blocks.
          topology           devices  peak GiB        step ms  collectives   MFU        steps   hours  core-days
          v3:8x8                 128   4.12 of 15.48    496.7         29.9   38.7%     93,835    12.9         69
          The table was made with a linear head and has not been renewed.
Expected: the paper reports 76.53 % after fine-tuning at 384 px: less than B/16, as the dataset is small. Not run here.
"""
from vit_jax.config import files
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run."""
  s.parse_arg(arguments)
  changes = {'name': 'vit_l16_i1k', 'model.init': s.Init.VISION_TRANSFORMER}
  return s.replaced(files.load('vit_paper:L/16,i1k', []), changes)
