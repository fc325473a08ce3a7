"""ViTs of torchvision, `vit_b_16` and others.

Differs from torchvision: positions for other sizes of images are resized as in timm, and not with the corners aligned.
"""
from __future__ import annotations

from vit_jax.config.schema import Gelu, Interpolation
from vit_jax.weights.families.record import Changed, Family, Files, Tensors, renamed
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import table

TABLE = table("""
    backbone/stem | conv_proj | conv
    backbone/{cls,positions} | {class_token,encoder.pos_embedding} | same
    backbone/blocks/{norm1,norm2} | encoder.layers.encoder_layer_{i}.{ln_1,ln_2} | norm
    backbone/blocks/attn/{query,key,value} |
        encoder.layers.encoder_layer_{i}.self_attention.{in_proj[0/3],in_proj[1/3],in_proj[2/3]} | packed
    backbone/blocks/attn/out | encoder.layers.encoder_layer_{i}.self_attention.out_proj | dense
    backbone/blocks/mlp/{up,down} | encoder.layers.encoder_layer_{i}.mlp.{0,3} | dense
    backbone/norm | encoder.ln | norm
    {head,head/pre_logits} | heads.{head,pre_logits} | dense
""")


def _change(tensors: Tensors) -> Changed:
  """Returns the tensors with the names of MLPs since torchvision 0.13."""
  return renamed(tensors, (r'\.mlp\.linear_1\.', '.mlp.0.'), (r'\.mlp\.linear_2\.', '.mlp.3.')), ()


FAMILY = Family(
    'torchvision', 'torchvision ViT', '`vit_b_16` and others, as `state_dict`',
    files=(Files('file', lambda t: {'conv_proj.weight', 'class_token', 'encoder.pos_embedding'} <= t.keys(), TABLE,
                 Hints(gelu=Gelu.EXACT, norm_eps=1e-6), change=_change),),
    images={**NORMS['imagenet'], **PILLOW, 'interpolation': Interpolation.BILINEAR, 'resize': .875})
