"""Sizes of the ViT's rivals by their published names: BiT, MLP-Mixer, EfficientNet.

Sources: BiT (arXiv 1912.11370, section 3.2; R200x3 in the ViT paper, Table 6); MLP-Mixer (arXiv 2105.01601,
Table 1); EfficientNet's authors' code (B0 to B8, L2), Noisy Student (arXiv 1911.04252, Table 7).
"""
from __future__ import annotations

import re
from collections.abc import Mapping

from vit_jax.config import schema
from vit_jax.core.errors import UserError

RESNET = {'R50': (3, 4, 6, 3), 'R101': (3, 4, 23, 3), 'R152': (3, 8, 36, 3), 'R200': (3, 24, 36, 3)}
"""Units a stage; a width factor multiplies all channels."""

MIXER = {  # width, depth, hidden widths of the MLPs over tokens and channels
    'S': (512, 8, 256, 2048), 'B': (768, 12, 384, 3072), 'L': (1024, 24, 512, 4096), 'H': (1280, 32, 640, 5120)}

EFFICIENTNET = {  # factors of width and depth, image side in px, dropout
    'B0': (1., 1., 224, .2), 'B1': (1., 1.1, 240, .2), 'B2': (1.1, 1.2, 260, .3), 'B3': (1.2, 1.4, 300, .3),
    'B4': (1.4, 1.8, 380, .4), 'B5': (1.6, 2.2, 456, .4), 'B6': (1.8, 2.6, 528, .5), 'B7': (2., 3.1, 600, .5),
    'B8': (2.2, 3.6, 672, .5), 'L2': (4.3, 5.3, 800, .5)}


def resnet(name: str) -> schema.ResNet:
  """Settings of a BiT by name: `R50x1`, `R152x4`; any width factor.

  Raises:
    UserError: lists the known depths.
  """
  found = re.fullmatch(r'(R\d+)x(\d+)', name)
  if not found or found[1] not in RESNET or int(found[2]) < 1:
    raise UserError(f'Unknown ResNet {name!r}: want DEPTHxFACTOR such as R50x1, with DEPTH one of {" ".join(RESNET)} '
                    'and FACTOR that of its channels.')
  return schema.ResNet(layers=RESNET[found[1]], width=64 * int(found[2]))


def mixer(name: str) -> schema.Mixer:
  """Settings of a Mixer by name: `B/16`; any patch side in pixels.

  Raises:
    UserError: lists the known sizes.
  """
  found = re.fullmatch(r'([A-Z])[/_](\d+)', name)
  if not found or found[1] not in MIXER or int(found[2]) < 1:
    raise UserError(f'Unknown Mixer {name!r}: want SIZE/PATCH such as B/16, with SIZE one of {" ".join(MIXER)} '
                    'and PATCH in pixels.')
  width, depth, tokens_mlp, channels_mlp = MIXER[found[1]]
  return schema.Mixer(patch=int(found[2]), width=width, depth=depth, tokens_mlp=tokens_mlp, channels_mlp=channels_mlp)


def efficientnet(name: str) -> schema.EfficientNet:
  """Settings of an EfficientNet by name: `B0` to `B8`, `L2`.

  Raises:
    UserError: lists the known sizes.
  """
  width, depth, _, dropout = _known(name, EFFICIENTNET)
  return schema.EfficientNet(width_factor=width, depth_factor=depth, dropout=dropout)


def efficientnet_px(name: str) -> int:
  """Side of the images that an EfficientNet was made for.

  Raises:
    UserError: lists the known sizes.
  """
  return _known(name, EFFICIENTNET)[2]


def _known(name: str, table: Mapping[str, tuple[float, float, int, float]]) -> tuple[float, float, int, float]:
  if name not in table:
    raise UserError(f'Unknown EfficientNet {name!r}: want one of {" ".join(table)}.')
  return table[name]
