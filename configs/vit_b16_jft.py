"""ViT-B/16 pre-trained on JFT-300M for 7 epochs, as in Table 5 of the ViT paper.

Data:     JFT-300M, which is internal to Google; vit_paper.py has what to set for other data.
Source:   arXiv 2010.11929, Table 3 (lr 8e-4, decay 0.1, linear, dropout 0; no clipping) and section 3.1: vit_paper.py.
Differs:  As vit_paper.py.
Run:      python -m vit_jax.main --config=configs/vit_b16_jft.py --workdir=runs/vit_b16_jft
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_b16_jft.py --topology=v3:8x8
          2026-11-21, compiled without the hardware, not measured on a TPU. Step time, MFU, hours and core-days exclude
          collectives, whose times are summed without any overlap.
          topology           devices  peak GiB        step ms  collectives   MFU        steps   hours  core-days
          v3:8x8                 128   2.89 of 15.48    129.0          6.5   42.5%    517,822    18.6         99
          The table was made with a linear head and with clipping at norm 1 and has not been renewed.
Expected: the paper reports 84.15 % on ImageNet after fine-tuning at 384 px. Not run here.
"""
from vit_jax.config import files
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run."""
  s.parse_arg(arguments)
  changes = {'name': 'vit_b16_jft', 'model.init': s.Init.VISION_TRANSFORMER}
  return s.replaced(files.load('vit_paper:B/16,jft', []), changes)
