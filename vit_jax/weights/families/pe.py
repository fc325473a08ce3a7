"""The Perception Encoder: files of its authors, which have the names of CLIP, and of timm."""
from __future__ import annotations

from vit_jax.config.schema import ByIndex, Gelu, Interpolation, PositionResize
from vit_jax.weights.families import timm
from vit_jax.weights.families.record import Family, License, Tensors
from vit_jax.weights.hints import OWN_GRID, Hints
from vit_jax.weights.preprocess import NORMS, PILLOW


def _hints(tensors: Tensors) -> Hints:
  has_cls, has_pool = 'cls_token' in tensors, 'attn_pool.latent' in tensors
  own = {'positions.base': 10_000., 'positions.coordinates': ByIndex(OWN_GRID, float(has_cls))}
  return Hints(gelu=Gelu.EXACT, norm_eps=1e-5, settings=own | ({'pool.heads': 8} if has_pool else {}),
               pool='' if has_pool else 'patches' if has_cls else 'mean')


FAMILY = Family(
    'pe', 'Perception Encoder', 'files of the authors; timm',
    files=(timm.vit(lambda t: {'patch_embed.proj.weight', 'norm_pre.weight'} <= t.keys() and (
        'attn_pool.latent' in t or 'norm.weight' not in t), _hints),),
    images={**NORMS['half'], **PILLOW, 'interpolation': Interpolation.BILINEAR, 'resize': 0},
    position_resize=PositionResize.BILINEAR, licenses=(License(r'facebook/PE-.*|timm/vit_pe_.*', 'Apache-2.0'),))
