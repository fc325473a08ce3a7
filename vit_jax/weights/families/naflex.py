"""NaFlexViT of timm: ViTs for images at their own aspect, whose patches are embedded by a matrix."""
from __future__ import annotations

import math

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, PositionResize
from vit_jax.weights.families import timm
from vit_jax.weights.families.record import Changed, Clues, Family, Tensors, renamed, with_patch_kernel
from vit_jax.weights.grids import NONE
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import NORMS, PILLOW

_PATCHES, _POSITIONS = 'embeds.proj.weight', 'embeds.pos_embed'


def _is_siglip(tensors: Tensors) -> bool:
  return 'attn_pool.latent' in tensors and 'embeds.reg_token' not in tensors


def _hints(tensors: Tensors) -> Hints:
  """Returns the hints; the two networks that pool by attention differ in their registers, see timm/naflexvit.py."""
  found = timm.HINTS._replace(gelu=Gelu.TANH, position_resize=PositionResize.BILINEAR_ANTIALIAS) if (
      _is_siglip(tensors)) else timm.HINTS
  positions, patches = tensors.get(_POSITIONS), tensors[_PATCHES]
  if positions is None or positions.ndim != 4:
    return found
  side = math.isqrt(patches.shape[-1] // 3) if patches.ndim == 2 else patches.shape[-1]
  return found._replace(image_px=(positions.shape[1] * side, positions.shape[2] * side))


def _rename(tensors: Tensors) -> Changed:
  """Returns the tensors under the names of timm's other ViTs, with the patch embedding as a convolution.

  Positions are `[1, h, w, D]` in the file.
  """
  tensors, positions = dict(with_patch_kernel(tensors, _PATCHES)), tensors.get(_POSITIONS)
  if positions is not None and positions.ndim == 4:
    tensors[_POSITIONS] = positions.reshape(1, -1, positions.shape[-1])
  return renamed(tensors, (r'^embeds\.proj\.', 'patch_embed.proj.'),
                 (r'^embeds\.(pos_embed|cls_token|reg_token)$', r'\1')), ()


def _warn(model: schema.Model, clues: Clues) -> list[str]:
  """Returns a warning if no name says which of two networks with the same tensors this is."""
  if not isinstance(model, schema.ViT) or not isinstance(model.pool, schema.Mean) or (
      any('naflexvit' in name for name in clues.names)):
    return []
  square = PositionResize.BICUBIC_ANTIALIAS_SQUARE.value
  return ['how it resizes positions for images that are not square is a guess: for networks that timm names par set '
          f'--model=position_resize={square}']


FAMILY = Family(
    'naflex', 'NaFlexViT', 'timm: `naflexvit_*` with learned positions, not the factorized ones of `parfac`',
    files=(timm.vit(lambda t: _PATCHES in t, _hints, rename=_rename, warn=_warn, first=(NONE,)),),
    images={**NORMS['half'], **PILLOW, 'resize': 1.},
    unsupported={
        r'embeds\.pos_embed_[xy]': 'it has factorized positions, the sum of one for the row and one for the column'})
