"""MoCo v3: checkpoints of its authors, with two encoders and their heads."""
from __future__ import annotations

from vit_jax.config.schema import Interpolation
from vit_jax.weights.families import timm
from vit_jax.weights.families.record import Changed, Family, Tensors, dropping, renamed
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import NORMS, PILLOW

_ENCODER = 'module.base_encoder.'
_HEADS = {384: 12}
"""By width, where the size with this width has another number (arXiv 2104.02057, section 5)."""


def _rename(tensors: Tensors) -> Changed:
  """Returns the encoder that the authors evaluate, under the names of timm."""
  kept, dropped = dropping(tensors, {
      r'module\.momentum_encoder\..*': 'the average of the encoder, which the authors do not evaluate',
      r'module\.(base_encoder\.head|predictor)\..*': 'of pre-training: projection and prediction'})
  return renamed(kept, (r'^module\.base_encoder\.', '')), dropped


def _hints(tensors: Tensors) -> Hints:
  return timm.HINTS._replace(heads=_HEADS.get(tensors[f'{_ENCODER}cls_token'].shape[-1], 0))


FAMILY = Family(
    'moco', 'MoCo v3', '`.pth.tar` of the authors',
    files=(timm.vit(lambda t: f'{_ENCODER}cls_token' in t, _hints, rename=_rename),),
    images={**NORMS['imagenet'], **PILLOW, 'interpolation': Interpolation.BILINEAR, 'resize': .875})
