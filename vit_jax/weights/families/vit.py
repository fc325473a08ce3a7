"""Plain ViTs and all others in files of timm that no other record describes, and ViTs of transformers."""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.weights.families import timm, transformers
from vit_jax.weights.families.record import Clues, Family, Files, Kind, License


def _warn(model: schema.Model, clues: Clues) -> list[str]:
  if clues.has_gelu or not isinstance(model, schema.ViT) or model.pool != schema.Map() or not (
      isinstance(model.mlp, schema.Mlp) and isinstance(model.positions, schema.Learned)):
    return []
  return ['its GELU is a guess: exact. Some of the published SigLIPs have another: set --model=gelu=tanh for these']


FAMILY = Family(
    'vit', 'ViT', 'timm, hybrids too; transformers, both layouts of names',
    files=(
        Files('transformers', lambda t: transformers.is_older(t, has_scales=False), transformers.VIT,
              transformers.HINTS, change=transformers.change_vit),
        timm.vit(lambda t: 'patch_embed.proj.weight' in t, label='timm', formats=('timm',), warn=_warn)),
    kinds=(Kind('vit', ('ViTModel', 'ViTForImageClassification'),
                lambda m, weights, _: transformers.is_plain(m, weights), lambda _: transformers.VIT,
                transformers.vit_config, transformers.under('vit')),),
    unsupported={
        r'fc_norm\.': 'it normalizes tokens and their mean; networks here do one of these',
        r'.*\.relative_position\w*|rel_pos\w*': 'it is a BEiT, which has relative positions of its own',
        r'.*rope.*': 'it has rotary positions of a kind that no network here has'},
    licenses=(License(r'timm/(vit|deit3?|tf_efficientnet|resnetv2|mixer)_\w+\.(augreg|orig|sam|fb|goog)\w*',
                      'Apache-2.0'),))
