"""DINOv3: files of its authors, of transformers and of timm."""
from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, RotaryPlaces
from vit_jax.weights.families import timm, transformers
from vit_jax.weights.families.record import Changed, Family, Files, Kind, License, Tensors, renamed
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Weights
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.report import Line
from vit_jax.weights.tables import CONV, SAME, Entry, Table, layer, norm

HINTS = Hints(gelu=Gelu.EXACT, norm_eps=1e-5, settings={'rotary_base': 100., 'rotary_places': RotaryPlaces.UNIT})

TRANSFORMERS: Table = (
    Entry('backbone/cls', 'embeddings.cls_token', SAME),
    Entry('backbone/registers', 'embeddings.register_tokens', SAME),
    *layer('backbone/stem', 'embeddings.patch_embeddings', layout=CONV),
    *transformers.block('layer.{i}', attn='attention', out='o_proj', mlp='mlp', norms='norm'),
    *(Entry(f'backbone/blocks/scale{n}', f'layer.{{i}}.layer_scale{n}.lambda1', SAME) for n in (1, 2)),
    *norm('backbone/norm', 'norm'),
)


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
  return {'layer_norm_eps': m.norm_eps, 'intermediate_size': m.mlp, 'use_gated_mlp': m.swiglu,
          'num_register_tokens': m.registers, 'layerscale_value': m.layer_scale, 'rope_theta': m.rotary_base,
          'query_bias': m.qkv_bias, 'key_bias': m.qkv_bias and m.key_bias, 'value_bias': m.qkv_bias,
          'proj_bias': m.out_bias, 'mlp_bias': m.mlp_bias}


def _holds(m: schema.ViT, weights: Weights, changed: frozenset[str]) -> bool:
  needed = {'positions', 'layer_scale', 'registers'}
  return not weights.num_classes and m.rotary_places is RotaryPlaces.UNIT and (
      needed <= changed <= {*needed, 'key_bias', 'qkv_bias', 'swiglu', 'mlp_bias', 'out_bias'})


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
