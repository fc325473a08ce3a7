"""SigLIP and SigLIP 2: files of transformers; those of big_vision and timm have the tensors of other ViTs there."""
from __future__ import annotations

import math

from vit_jax.config.schema import Gelu, Map, PositionResize
from vit_jax.core.errors import UserError
from vit_jax.weights.families import clip, transformers
from vit_jax.weights.families.record import Changed, Family, Files, Kind, License, Tensors
from vit_jax.weights.hints import Hints

_PATCHES = 'embeddings.patch_embedding.weight'


def _hints(tensors: Tensors) -> Hints:
  return Hints(gelu=Gelu.TANH, norm_eps=1e-6,
               position_resize=PositionResize.BILINEAR_ANTIALIAS if tensors[_PATCHES].ndim == 2 else None)


def _change(tensors: Tensors) -> Changed:
  """Returns the tensors of SigLIP 2 for images of any size (NaFlex) with its patch embedding as a convolution.

  Its rows are the pixels of a patch, row by row, with the channels last.
  """
  if tensors[_PATCHES].ndim != 2:
    return tensors, ()
  width, inputs = tensors[_PATCHES].shape
  side = math.isqrt(inputs // 3)
  if 3 * side * side != inputs:
    raise UserError(f'{_PATCHES} has the shape {[width, inputs]}, expected the pixels of square patches of three '
                    'channels')
  return {**tensors, _PATCHES: tensors[_PATCHES].reshape(width, side, side, 3).transpose(0, 3, 1, 2)}, ()


_DEFAULTS = {'num_attention_heads': 0, 'hidden_act': 'gelu_pytorch_tanh', 'layer_norm_eps': 1e-6}
FAMILY = Family(
    'siglip', 'SigLIP, SigLIP 2', '`.npz` of big_vision; transformers; timm',
    files=(Files('transformers', lambda t: _PATCHES in t and 'pre_layrnorm.weight' not in t, clip.TRANSFORMERS, _hints,
                 change=_change),),
    kinds=(Kind('siglip_vision_model', ('SiglipVisionModel', ''),
                lambda m, weights, changed: not weights.num_classes and changed == {'pool'} and m.pool == Map(),
                lambda _: clip.TRANSFORMERS, transformers.tower_config, lambda tensors, _: tensors),),
    config_defaults={
        **dict.fromkeys(('siglip', 'siglip_vision_model'), _DEFAULTS),
        **dict.fromkeys(('siglip2', 'siglip2_vision_model'), {**_DEFAULTS, 'num_patches': 256, 'patch_size': 16})},
    licenses=(License(r'(google|timm)/\w*siglip.*', 'Apache-2.0'),))
