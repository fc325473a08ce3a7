"""ViT-B/16 pre-trained on JFT-300M for 7 epochs, as in Table 5 of the ViT paper.

Data:     JFT-300M: 303 M images, 18,291 classes, several an image (data.max_labels). It is Google's own: point
          --config.data.source at your data, or at `synthetic`, and set data.num_examples and data.num_classes to match.
Source:   arXiv 2010.11929, Table 3 (lr 8e-4, decay 0.1, linear, dropout 0; no clipping, which its caption has for
          ImageNet alone) and section 3.1 (a hidden layer with tanh in the head of pre-training); sigmoid loss and head
          bias -10 as in the released code.
Run:      python -m vit_jax.main --config=configs/vit_b16_jft.py:mesh=v3:16x16 --workdir=runs/vit_b16_jft
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_b16_jft.py:mesh=v3:16x16 --topology=v3:16x16
          2026-11-21, compiled for hardware that was not there, not measured on a TPU. Step, MFU, hours and core-days
          without collectives; those one after the other, hidden behind nothing.
          topology           devices  peak GiB        step ms  collectives   MFU        steps   hours  core-days
          v3:8x8                 128   2.89 of 15.48    129.0          6.5   42.5%    517,822    18.6         99
          The table was made with a linear head and with clipping at norm 1, and was not made again without these.
Expected: the paper reports 84.15 % on ImageNet after fine-tuning at 384 px. Not run here.
"""
from vit_jax.config import layout
from vit_jax.config import schema as s
from vit_jax.recipes import pretrain

MESHES = {
    'v3:8x8': layout.Placement(),
    'v3:16x16': layout.Placement(fsdp=8),
    'v5e:8x8': layout.Placement(),
    'gpu:8': layout.Placement(accumulate=2),
}


def get_config(arguments: str = '') -> s.Config:
  """The run; `mesh=v3:16x16` lays it out for that slice."""
  return pretrain.jft('vit_b16_jft', 'B/16', epochs=7, lr=8e-4, arguments=arguments, meshes=MESHES)
