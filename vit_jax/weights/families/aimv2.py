"""AIMv2: files of its authors, of transformers and of timm."""
from __future__ import annotations

from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import Frequencies, Learned, Mean, PositionResize, QkvBias, SinCos
from vit_jax.weights.families import timm
from vit_jax.weights.families.record import Changed, Family, Files, Kind, License, Tensors, dropping, renamed
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Weights
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import table

TRANSFORMERS = table("""
    backbone/stem | embeddings.patch_embed | conv
    backbone/stem_norm | embeddings.rms_norm | norm
    backbone/positions | embeddings.position_embedding.weight | rows
    backbone/blocks/attn/{query,key,value,out} | encoder.layers.{i}.attention.{q,k,v,out}_proj | dense
    backbone/blocks/{norm1,norm2} | encoder.layers.{i}.{rms_norm1,rms_norm2} | norm
    backbone/blocks/mlp/{gate,up,down} | encoder.layers.{i}.ffn.{gate,up,down}_proj | dense
    backbone/norm | rms_norm | norm
""")
_FIXED = SinCos(Frequencies.MAE)


def _to_timm(tensors: Tensors) -> Changed:
  if not any(name.startswith(('preprocessor.', 'trunk.')) for name in tensors):
    return tensors, ()
  return renamed(
      tensors, (r'^preprocessor\.patchifier\.', 'patch_embed.'), (r'^preprocessor\.pos_embed$', 'pos_embed'),
      (r'^trunk\.', ''), (r'^post_trunk_norm\.', 'norm.'), (r'\.norm_([12])\.', r'.norm\1.'),
      (r'\.mlp\.fc1\.', '.mlp.fc1_g.'), (r'\.mlp\.fc3\.', '.mlp.fc1_x.')), ()


def _hints(tensors: Tensors) -> Hints:
  fixed = {} if 'embeddings.position_embedding.weight' in tensors else {'positions': _FIXED}
  return Hints(norm_eps=1e-5, settings=fixed, pool='mean')


def _change(tensors: Tensors) -> Changed:
  return dropping(tensors, {r'head\..*': 'a pool without a projection of its query, which no network here has'})


def _holds(m: schema.ViT, weights: Weights, changed: frozenset[str]) -> bool:
  needed, bias = {'norm', 'stem.norm', 'mlp', 'pool'}, m.attention.qkv_bias
  return not weights.num_classes and m.pool == Mean() and bias is not QkvBias.QUERY_VALUE and (
      isinstance(m.positions, Learned) or m.positions == _FIXED) and (bias is QkvBias.ALL) == m.attention.out_bias and (
          needed <= changed <= {*needed, 'positions', 'attention.qkv_bias', 'attention.out_bias', 'mlp.bias'})


def _config(m: schema.ViT, _: Weights) -> dict[str, Any]:
  return {'rms_norm_eps': m.norm.eps, 'intermediate_size': m.mlp.hidden, 'mlp_bias': m.mlp.bias, 'use_head': False,
          'qkv_bias': m.attention.qkv_bias is QkvBias.ALL, 'is_native': m.positions == _FIXED}


FAMILY = Family(
    'aimv2', 'AIMv2', 'files of the authors; transformers; timm',
    files=(Files('transformers', lambda t: 'embeddings.patch_embed.weight' in t, TRANSFORMERS, _hints, change=_change),
           timm.vit(lambda t: {'patch_embed.proj.weight', 'patch_embed.norm.weight'} <= t.keys() and (
               'blocks.0.norm1.bias' not in t), Hints(norm_eps=1e-5))),
    kinds=(Kind('aimv2_vision_model', ('Aimv2VisionModel', ''), _holds, lambda _: TRANSFORMERS, _config,
                lambda tensors, _: tensors),),
    config_defaults={kind: {'hidden_act': 'silu'} for kind in ('aimv2', 'aimv2_vision_model')},
    images={**NORMS['clip'], **PILLOW, 'resize': 1.}, position_resize=PositionResize.BICUBIC, to_timm=_to_timm,
    licenses=(License(r'(apple|timm)/aimv2.*', 'Apple ASCL or AMLR'),))
