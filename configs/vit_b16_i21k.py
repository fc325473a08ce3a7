"""ViT-B/16 pre-trained on ImageNet-21k for 90 epochs, as released with the ViT paper.

Data:     ImageNet-21k as a folder of classes: 14.2 M images, 21,841 classes. The published heads have 21,843
          outputs, two of them for classes without images.
Source:   arXiv 2010.11929, Table 3 (lr 1e-3, decay 0.03, linear, dropout 0.1; no clipping, which its caption has for
          ImageNet alone); sigmoid loss, head bias -10 and a tanh layer before the logits as in the released weights.
Run:      python -m vit_jax.main --config=configs/vit_b16_i21k.py:mesh=v3:8x8 --config.data.source=folder:PATH
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_b16_i21k.py:mesh=v3:8x8 --topology=v3:8x8
          2026-11-21, compiled for hardware that was not there, not measured on a TPU. Step, MFU, hours and core-days
          without collectives; those one after the other, hidden behind nothing.
          topology           devices  peak GiB        step ms  collectives   MFU        steps   hours  core-days
          v3:8x8                 128   2.94 of 15.48    193.4          6.8   28.4%    311,948    16.8         89
          The table was made with clipping at norm 1, and was not made again without it.
Expected: the paper reports 83.97 % on ImageNet after fine-tuning at 384 px. Not run here.
"""
from vit_jax.config import layout
from vit_jax.config import schema as s
from vit_jax.recipes import pretrain

MESHES = {
    'v3:2x2': layout.Placement(accumulate=8),
    'v3:8x8': layout.Placement(),
    'v3:16x16': layout.Placement(fsdp=8),
    'v5e:8x8': layout.Placement(),
    'gpu:8': layout.Placement(accumulate=2),
}


def get_config(arguments: str = '') -> s.Config:
  """The run; `mesh=v3:8x8` lays it out for that slice."""
  return pretrain.i21k('vit_b16_i21k', 'B/16', arguments=arguments, meshes=MESHES)
