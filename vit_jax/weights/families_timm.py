"""Detects CLIP, DINOv3, AIMv2, EVA-02, RoPE-ViT and the Perception Encoder in files with the names of timm, and in
those of their authors, which are renamed to these first.
"""
from __future__ import annotations

import re
from typing import Any

import numpy as np

from vit_jax.config.schema import Gelu, Pool, RotaryPlaces
from vit_jax.core.types import HostArray
from vit_jax.weights.hints import Hints
from vit_jax.weights.report import Line

Tensors = dict[str, HostArray]

_CLIP_NAMES = (  # OpenAI's and open_clip's names, those of the Perception Encoder, and what timm has for them
    (r'^(visual|vision_encoder)\.(trunk\.)?', ''), (r'^conv1\.', 'patch_embed.proj.'),
    (r'^positional_embedding$', 'pos_embed'), (r'^class_embedding$', 'cls_token'), (r'^ln_pre\.', 'norm_pre.'),
    (r'^ln_post\.', 'norm.'),
    (r'^transformer\.resblocks\.', 'blocks.'), (r'\.ln_(\d)\.', r'.norm\1.'), (r'\.ls_(\d)\.gamma$', r'.gamma_\1'),
    (r'(\d\.attn)\.in_proj_', r'\1.qkv.'), (r'(\d\.attn)\.out_proj\.', r'\1.proj.'), (r'\.mlp\.c_fc\.', '.mlp.fc1.'),
    (r'\.mlp\.c_proj\.', '.mlp.fc2.'), (r'^attn_pool\.probe$', 'attn_pool.latent'),
    (r'^attn_pool\.attn\.out_proj\.', 'attn_pool.proj.'), (r'^attn_pool\.layernorm\.', 'attn_pool.norm.'),
    (r'^attn_pool\.mlp\.c_fc\.', 'attn_pool.mlp.fc1.'), (r'^attn_pool\.mlp\.c_proj\.', 'attn_pool.mlp.fc2.'))
_AIM_NAMES = (
    (r'^preprocessor\.patchifier\.', 'patch_embed.'), (r'^preprocessor\.pos_embed$', 'pos_embed'), (r'^trunk\.', ''),
    (r'^post_trunk_norm\.', 'norm.'), (r'\.norm_([12])\.', r'.norm\1.'), (r'\.mlp\.fc1\.', '.mlp.fc1_g.'),
    (r'\.mlp\.fc3\.', '.mlp.fc1_x.'))
_EVA_NAMES = (
    (r'\.mlp\.ffn_ln\.', '.mlp.norm.'), (r'\.attn\.inner_attn_ln\.', '.attn.norm.'), (r'\.mlp\.w12\.', '.mlp.fc1.'),
    (r'\.mlp\.w1\.', '.mlp.fc1_g.'), (r'\.mlp\.w2\.', '.mlp.fc1_x.'), (r'\.mlp\.w3\.', '.mlp.fc2.'),
    (r'^storage_tokens$', 'reg_token'), (r'\.mlp\.c_fc\.', '.mlp.fc1.'), (r'\.mlp\.c_proj\.', '.mlp.fc2.'))

FREQUENCIES = 'rope.freqs'

TEXT = {
    r'(text|text_encoder)\..*|logit_scale|logit_bias|token_embedding\..*|text_projection|transformer\.resblocks\..*|'
    r'ln_final\..*|attn_mask|input_resolution|context_length|vocab_size|positional_embedding|temperature':
        'of the text tower'}
"""In a file whose visual tower has a prefix."""
DROPS = {
    r'rope\.(?!freqs$).*|.*\.rope\.(?!freqs$).*|rope_embed\..*': 'of rotary positions, which the network computes',
    r'local_cls_norm\..*|projectors\..*': 'of pre-training with local crops',
}


def is_tower(tensors: Tensors) -> bool:
  """Whether the visual network has a prefix, beside which there may be a text tower."""
  return any(name.startswith(('visual.', 'vision_encoder.')) for name in tensors)


def renamed(name: str, tensors: Tensors) -> str:
  """Returns timm's name of a tensor that has the name of a family's authors."""
  rules: tuple[tuple[str, str], ...] = _EVA_NAMES
  if is_tower(tensors) or {'conv1.weight', 'ln_pre.weight'} <= tensors.keys():
    rules = (*_CLIP_NAMES, *rules)
  elif any(k.startswith(('preprocessor.', 'trunk.')) for k in tensors):
    rules = _AIM_NAMES
  for pattern, new in rules:
    name = re.sub(pattern, new, name)
  return name


def reshaped(tensors: Tensors) -> tuple[Tensors, tuple[Line, ...]]:
  """Returns the tensors with the shapes and parts that timm has: tables of three axes, pools and biases in parts."""
  found, lines, is_tower = {}, [], 'norm_pre.weight' in tensors
  for name, x in tensors.items():
    if name == 'cls_token' and x.ndim == 1 and is_tower:
      found[name] = x[None, None]
    elif not x.ndim:
      found[name] = x
    elif name == FREQUENCIES and x.ndim == 4:
      found |= {f'blocks.{i}.{name}': x[:, i] for i in range(x.shape[1])}
    elif name == 'pos_embed' and x.ndim == 2 and is_tower:
      found[name] = x[None]
    elif name == 'proj' and x.ndim == 2 and is_tower:
      found['head.weight'] = x.T
    elif place := re.fullmatch(r'attn_pool\.attn\.in_proj_(weight|bias)', name):
      query, rest = np.split(x, [len(x) // 3])
      found |= {f'attn_pool.q.{place[1]}': query, f'attn_pool.kv.{place[1]}': rest}
    elif name.endswith('.attn.qkv.bias') and (mask := f'{name}_mask') in tensors and len(x) % 3 == 0:
      query, _, value = np.split(x, 3)
      found |= {name.replace('qkv.bias', 'q_bias'): query, name.replace('qkv.bias', 'v_bias'): value}
      lines.append(Line(mask, 'dropped', 'it hides the bias of the keys, which the network does not have'))
    elif not name.endswith('.attn.qkv.bias_mask'):
      found[name] = x
  if 'blocks.0.attn.q_proj.weight' in found:
    found = {re.sub(r'\.attn\.([qv])_bias$', r'.attn.\1_proj.bias', name): x for name, x in found.items()}
  is_projection = is_tower and 'head.bias' in found and not np.any(found['head.bias'])
  if is_projection:
    del found['head.bias']
    lines.append(Line('head.bias', 'dropped', 'zeros: the head is a projection'))
  return found, tuple(lines)


def joined(tensors: Tensors) -> Tensors:
  """Returns the tensors with the frequencies of all blocks as one, `[2, L, A, K / 2]`, as timm has them."""
  own = {name: x for name, x in tensors.items() if name.endswith(f'.{FREQUENCIES}')}
  whole = np.stack([own[f'blocks.{i}.{FREQUENCIES}'] for i in range(len(own))], axis=1)
  return {**{name: x for name, x in tensors.items() if name not in own}, FREQUENCIES: whole}


def hints(tensors: Tensors) -> tuple[str, Hints] | None:
  """Returns the family of tensors with timm's names, and what its networks have that tensors do not show.

  None for the older families.
  """
  index: dict[str, Any] = {'rotary_base': 10_000.}
  is_split = 'blocks.0.attn.q_proj.weight' in tensors
  has_rows, has_cls = 'pos_embed' in tensors, 'cls_token' in tensors
  if 'patch_embed.norm.weight' in tensors and 'blocks.0.norm1.bias' not in tensors:
    return 'aimv2', Hints(norm_eps=1e-5)
  if 'norm_pre.weight' in tensors and ('attn_pool.latent' in tensors or 'norm.weight' not in tensors):
    own = {**index, 'rotary_grid': -1, 'rotary_offset': float(has_cls)}
    own |= {'pool_heads': 8} if 'attn_pool.latent' in tensors else {}
    return 'pe', Hints(gelu=Gelu.EXACT, norm_eps=1e-5, settings=own, pool=None if 'attn_pool.latent' in tensors else
                       Pool.PATCHES if has_cls else Pool.MEAN)
  if 'norm_pre.weight' in tensors:
    return 'clip', Hints(gelu=Gelu.EXACT, norm_eps=1e-5)
  if not has_rows and has_cls and 'reg_token' in tensors:
    return 'dinov3', Hints(gelu=Gelu.EXACT, norm_eps=1e-5,
                           settings={'rotary_base': 100., 'rotary_places': RotaryPlaces.UNIT})
  if 'blocks.0.gamma_1' in tensors and 'blocks.0.attn.qkv.weight' in tensors and (
      not has_rows or 'blocks.0.rope.freqs' in tensors):  # with a table alone it may be DeiT III, and the name decides
    own = {'rotary_base': 100.} if has_cls else {**index, 'rotary_grid': 16}
    return 'timm', Hints(gelu=Gelu.EXACT, norm_eps=1e-6, settings=own)
  is_gated = 'blocks.0.mlp.fc1_g.weight' in tensors or _is_packed(tensors)
  if has_rows and is_gated and (is_split or 'blocks.0.attn.q_bias' in tensors):
    return 'eva02', Hints(gelu=Gelu.EXACT, norm_eps=1e-6, settings={**index, 'rotary_grid': 16})
  return None


def _is_packed(tensors: Tensors) -> bool:
  up, down = (tensors.get(f'blocks.0.mlp.{name}.weight') for name in ('fc1', 'fc2'))
  return up is not None and down is not None and up.ndim == down.ndim == 2 and up.shape[0] == 2 * down.shape[1]
