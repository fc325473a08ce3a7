"""ViTs of torchvision, `vit_b_16` and others.

Differs from torchvision: positions for other sizes of images are resized as in timm, and not with the corners aligned.
"""
from __future__ import annotations

from vit_jax.config.schema import Gelu, Interpolation
from vit_jax.weights.families.record import Changed, Family, Files, Tensors, renamed
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import CONV, SAME, Entry, Table, joined, layer, norm

_OURS, _BLOCK = 'backbone/blocks', 'encoder.layers.encoder_layer_{i}'
TABLE: Table = (
    *layer('backbone/stem', 'conv_proj', layout=CONV), Entry('backbone/cls', 'class_token', SAME),
    Entry('backbone/positions', 'encoder.pos_embedding', SAME),
    *norm(f'{_OURS}/norm1', f'{_BLOCK}.ln_1'), *norm(f'{_OURS}/norm2', f'{_BLOCK}.ln_2'),
    *joined(f'{_OURS}/attn', f'{_BLOCK}.self_attention'),
    *layer(f'{_OURS}/mlp/up', f'{_BLOCK}.mlp.0'), *layer(f'{_OURS}/mlp/down', f'{_BLOCK}.mlp.3'),
    *norm('backbone/norm', 'encoder.ln'), *layer('head', 'heads.head'), *layer('head/pre_logits', 'heads.pre_logits'))


def _change(tensors: Tensors) -> Changed:
  """Returns the tensors with the names of MLPs since torchvision 0.13."""
  return renamed(tensors, (r'\.mlp\.linear_1\.', '.mlp.0.'), (r'\.mlp\.linear_2\.', '.mlp.3.')), ()


FAMILY = Family(
    'torchvision', 'torchvision ViT', '`vit_b_16` and others, as `state_dict`',
    files=(Files('file', lambda t: {'conv_proj.weight', 'class_token', 'encoder.pos_embedding'} <= t.keys(), TABLE,
                 Hints(gelu=Gelu.EXACT, norm_eps=1e-6), change=_change),),
    images={**NORMS['imagenet'], **PILLOW, 'interpolation': Interpolation.BILINEAR, 'resize': .875})
