"""DINOv3: files of its authors, of transformers and of timm."""
from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, QkvBias, UnitInterval
from vit_jax.weights.families import timm
from vit_jax.weights.families.record import Changed, Family, Files, Kind, License, Tensors, renamed
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Line, Weights, layer_scale
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import table

HINTS = Hints(gelu=Gelu.EXACT, norm_eps=1e-5, settings={
    'positions.base': 100., 'positions.coordinates': UnitInterval()})

TRANSFORMERS = table("""
    backbone/{cls,registers} | embeddings.{cls_token,register_tokens} | same
    backbone/stem | embeddings.patch_embeddings | conv
    backbone/blocks/attn/{query,key,value,out} | layer.{i}.attention.{q,k,v,o}_proj | dense
    backbone/blocks/{norm1,norm2} | layer.{i}.{norm1,norm2} | norm
    backbone/blocks/mlp/{gate,up,down} | layer.{i}.mlp.{gate,up,down}_proj | dense
    backbone/blocks/{scale1,scale2} | layer.{i}.{layer_scale1,layer_scale2}.lambda1 | same
    backbone/norm | norm | norm
""")


def _to_timm(tensors: Tensors) -> Changed:
  """Renames registers and gates of the authors; drops the bias of the keys, which the authors hide by a mask."""
  tensors = renamed(tensors, (r'^storage_tokens$', 'reg_token'))
  found: Tensors = {}
  lines = []
  for name, x in tensors.items():
    mask = f'{name}_mask'
    if name.endswith('.attn.qkv.bias') and mask in tensors and x.ndim and len(x) % 3 == 0:
      query, _, value = np.split(x, 3)
      found |= {name.replace('qkv.bias', 'q_bias'): query, name.replace('qkv.bias', 'v_bias'): value}
      lines.append(Line(mask, 'dropped', 'it hides the bias of the keys, which the network does not have'))
    elif not name.endswith('.attn.qkv.bias_mask'):
      found[name] = x
  return found, tuple(lines)


def _config(m: schema.ViT, _: Weights) -> dict[str, Any]:
  bias = m.attention.qkv_bias
  return {'layer_norm_eps': m.norm.eps, 'intermediate_size': m.mlp.hidden,
          'use_gated_mlp': isinstance(m.mlp, schema.SwiGlu), 'num_register_tokens': m.registers,
          'layerscale_value': layer_scale(m), 'rope_theta': getattr(m.positions, 'base', 0.),
          'query_bias': bias is not QkvBias.NONE, 'key_bias': bias is QkvBias.ALL,
          'value_bias': bias is not QkvBias.NONE, 'proj_bias': m.attention.out_bias, 'mlp_bias': m.mlp.bias}


def _holds(m: schema.ViT, weights: Weights, changed: frozenset[str]) -> bool:
  needed = {'positions', 'block.layer_scale', 'registers'}
  return not weights.num_classes and isinstance(getattr(m.positions, 'coordinates', None), UnitInterval) and (
      needed <= changed <= {*needed, 'attention.qkv_bias', 'mlp', 'mlp.bias', 'attention.out_bias'})


def _finish(tensors: Tensors, _: Weights) -> Tensors:
  width = tensors['embeddings.cls_token'].shape[-1]
  return tensors | {'embeddings.mask_token': np.zeros((1, 1, width), np.float32)}


FAMILY = Family(
    'dinov3', 'DINOv3', 'files of the authors; transformers; timm',
    files=(Files('transformers', lambda t: 'embeddings.patch_embeddings.weight' in t, TRANSFORMERS, HINTS),
           timm.vit(lambda t: {'patch_embed.proj.weight', 'cls_token', 'reg_token'} <= t.keys() and (
               'pos_embed' not in t), HINTS)),
    kinds=(Kind('dinov3_vit', ('DINOv3ViTModel', 'DINOv3ViTModel'), _holds, lambda _: TRANSFORMERS, _config, _finish),),
    config_defaults={'dinov3_vit': {'layer_norm_eps': 1e-5, 'rope_theta': 100.}},
    images={**NORMS['imagenet'], **PILLOW, 'resize': 1.}, to_timm=_to_timm,
    timm_drops={r'rope\.(?!freqs$).*|.*\.rope\.(?!freqs$).*|rope_embed\..*':
                'of rotary positions, which the network computes',
                r'local_cls_norm\..*|projectors\..*': 'of pre-training with local crops'},
    licenses=(License(r'facebook/dinov3-.*', 'DINOv3 License', True),
              License(r'timm/vit_\w+_dinov3.*', 'DINOv3 License')))
