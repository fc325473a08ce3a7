"""ViTs with rotary positions: RoPE-ViT, EVA-02 and EVA-02-CLIP, the Perception Encoder, and the order of channels.

Here channel j of a head, of K channels, is rotated with channel `j + K / 2`; the first K / 4 pairs are rotated by the
column of the patch, the others by the row. Queries and keys of a file whose program pairs other channels are reordered
when they are read and written (`reordered`): their products stay the same, and every bit is kept.
"""
from __future__ import annotations

import re

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import ByIndex, Gelu, Interpolation, PositionResize
from vit_jax.core.types import HostArray
from vit_jax.weights.families import record, timm
from vit_jax.weights.families.record import Changed, Family, License, Tensors
from vit_jax.weights.grids import NONE
from vit_jax.weights.hints import OWN_GRID, Hints
from vit_jax.weights.preprocess import NORMS, PILLOW


def _frequencies_by_block(tensors: Tensors) -> Changed:
  """Returns the tensors with the learned frequencies of all blocks, `[2, L, A, K / 2]`, as one tensor per block."""
  frequencies = tensors.get('rope.freqs')
  if frequencies is None or frequencies.ndim != 4:
    return Changed(tensors)
  by_block = {f'blocks.{i}.rope.freqs': frequencies[:, i] for i in range(frequencies.shape[1])}
  return Changed({name: x for name, x in tensors.items() if name != 'rope.freqs'} | by_block)


def _is_rope_vit(tensors: Tensors) -> bool:
  if not {'patch_embed.proj.weight', 'blocks.0.gamma_1', 'blocks.0.attn.qkv.weight'} <= tensors.keys():
    return False
  # With a table of positions alone it may be DeiT III, and the name decides.
  return 'pos_embed' not in tensors or 'blocks.0.rope.freqs' in tensors


_GRID_OF_16 = {'positions.base': 10_000., 'positions.coordinates': ByIndex(16)}
"""Positions of patches are scaled to a grid of 16 x 16 patches."""


def _rope_vit_hints(tensors: Tensors) -> Hints:
  """Returns the hints; only the networks with a class token have frequencies that no grid scales."""
  positions = {'positions.base': 100.} if 'cls_token' in tensors else _GRID_OF_16
  return Hints(gelu=Gelu.EXACT, norm_eps=1e-6, settings=positions)


ROPE_VIT = Family(
    'rope_vit', 'RoPE-ViT', 'timm, with fixed and with learned frequencies',
    files=(timm.vit(_is_rope_vit, _rope_vit_hints, label='timm', first_rows=(NONE,)),), to_timm=_frequencies_by_block,
    licenses=(License(r'timm/vit_\w+_rope_\w*\.naver_in1k', 'Apache-2.0'),))


def _eva02_to_timm(tensors: Tensors) -> Changed:
  """Renames inner norms and the matrices of gated MLPs, whose names DINOv2 and DINOv3 have too."""
  tensors = record.renamed(
      tensors, (r'\.mlp\.ffn_ln\.', '.mlp.norm.'), (r'\.attn\.inner_attn_ln\.', '.attn.norm.'),
      (r'\.mlp\.w12\.', '.mlp.fc1.'), (r'\.mlp\.w1\.', '.mlp.fc1_g.'), (r'\.mlp\.w2\.', '.mlp.fc1_x.'),
      (r'\.mlp\.w3\.', '.mlp.fc2.'), (r'\.mlp\.c_fc\.', '.mlp.fc1.'), (r'\.mlp\.c_proj\.', '.mlp.fc2.'))
  if 'blocks.0.attn.q_proj.weight' in tensors:
    tensors = record.renamed(tensors, (r'\.attn\.([qv])_bias$', r'.attn.\1_proj.bias'))
  return Changed(tensors)


def _is_eva02(tensors: Tensors) -> bool:
  is_gated = 'blocks.0.mlp.fc1_g.weight' in tensors or timm.is_packed(tensors)
  return is_gated and {'patch_embed.proj.weight', 'pos_embed'} <= tensors.keys() and bool(
      {'blocks.0.attn.q_proj.weight', 'blocks.0.attn.q_bias'} & tensors.keys())


EVA02 = Family(
    'eva02', 'EVA-02, EVA-02-CLIP', 'files of the authors; timm',
    files=(timm.vit(_is_eva02, Hints(gelu=Gelu.EXACT, norm_eps=1e-6, settings=_GRID_OF_16)),),
    images={**NORMS['clip'], **PILLOW, 'resize': 1.}, position_resize=PositionResize.BICUBIC, to_timm=_eva02_to_timm,
    licenses=(License(r'timm/eva02_.*', 'MIT'),))


def _pe_hints(tensors: Tensors) -> Hints:
  """Returns the hints; patches are numbered on the grid of their own table, after a class token."""
  has_cls = 'cls_token' in tensors
  settings = {'positions.base': 10_000., 'positions.coordinates': ByIndex(OWN_GRID, float(has_cls))}
  if 'attn_pool.latent' in tensors:
    return Hints(gelu=Gelu.EXACT, norm_eps=1e-5, settings={**settings, 'pool.heads': 8})
  return Hints(gelu=Gelu.EXACT, norm_eps=1e-5, settings=settings, pool='patches' if has_cls else 'mean')


def _is_pe(tensors: Tensors) -> bool:
  return {'patch_embed.proj.weight', 'norm_pre.weight'} <= tensors.keys() and (
      'attn_pool.latent' in tensors or 'norm.weight' not in tensors)


PE = Family(
    'pe', 'Perception Encoder', 'files of the authors; timm',
    files=(timm.vit(_is_pe, _pe_hints),),
    images={**NORMS['half'], **PILLOW, 'interpolation': Interpolation.BILINEAR, 'resize': 0},
    position_resize=PositionResize.BILINEAR, licenses=(License(r'facebook/PE-.*|timm/vit_pe_.*', 'Apache-2.0'),))

# The order of the channels of a head

_HALVES_YX, _PAIRS_YX, _PAIRS_XY, _PAIRS = 'halves_yx', 'pairs_yx', 'pairs_xy', 'pairs'
"""DINOv3: channel j with j + K / 2, rows first. EVA-02: neighbors, rows first. Perception Encoder, and RoPE-ViT with
numbers that no grid scales: columns first. With learned frequencies: neighbors, each pair with its own."""
_ROTATED = r'backbone/blocks/attn/(query|key)(_norm)?/(kernel|bias|scale)'


def _order(model: schema.Model) -> str:
  """Returns the order that files of other programs have for this network; '' if nothing is rotated."""
  if not isinstance(model, schema.ViT) or not isinstance(model.positions, schema.Rotary):
    return ''
  if isinstance(model.positions.coordinates, schema.UnitInterval):
    return _HALVES_YX
  if model.positions.mixed:
    return _PAIRS
  return _PAIRS_XY if model.norm_before or not model.positions.coordinates.grid else _PAIRS_YX


def _channels_in_file(width: int, order: str) -> HostArray:
  """Returns for each of the `width` channels of a head here its number in a file with this order, `[width]` int."""
  quarter = width // 4
  numbers = np.arange(quarter)
  if order == _PAIRS:
    even = 2 * np.arange(2 * quarter)
    return np.concatenate([even, even + 1])
  if order == _HALVES_YX:
    first_half = np.concatenate([numbers + quarter, numbers])
    return np.concatenate([first_half, first_half + 2 * quarter])
  columns_and_rows = [numbers, numbers + quarter] if order == _PAIRS_XY else [numbers + quarter, numbers]
  even = 2 * np.concatenate(columns_and_rows)
  return np.concatenate([even, even + 1])


def reordered(leaves: Tensors, model: schema.Model, *, to_file: bool = False) -> Tensors:
  """Returns the leaves with the channels of queries and keys as here, or with `to_file` as in files.

  Args:
    leaves: attention kernels split into heads, `[L, D, A, K]`.
    model: settings of the network; without rotary positions nothing is reordered.
    to_file: from here to the file.
  """
  order = _order(model)
  if not order:
    return leaves
  result = dict(leaves)
  for name, leaf in leaves.items():
    if re.fullmatch(_ROTATED, name):
      in_file = _channels_in_file(leaf.shape[-1], order)
      result[name] = np.ascontiguousarray(leaf[..., np.argsort(in_file) if to_file else in_file])
  return result
