"""The names of parameters in files of CLIP, SigLIP, DINOv3, AIMv2, EVA-02 and the Perception Encoder.

Files of timm are read with `READ_TIMM`, which has all names of its two classes of ViTs; `timm` returns the names under
which one of them expects a certain network. Files of transformers have one table each, used in both directions.
"""
from __future__ import annotations

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Norm, RotaryPlaces
from vit_jax.weights.layouts import CONV, SAME, Entry, Layout, Table, layer, norm
from vit_jax.weights.names import TIMM, TIMM_SWIGLU

_BLOCKS = 'backbone/blocks'
_ROW = Layout(lambda x: x.reshape(1, 1, -1), lambda x: x.reshape(-1))
"""A vector `[D]`; here `[1, 1, D]`."""
_ROWS = Layout(lambda x: x[None], lambda x: x[0])
"""A table `[M, D]`; here `[1, M, D]`."""

_TIMM_EXTRA: Table = (
    *norm('backbone/norm_before', 'norm_pre'), *norm('backbone/stem_norm', 'patch_embed.norm'),
    Entry(f'{_BLOCKS}/attn/frequencies', 'blocks.{i}.rope.freqs', SAME),
    *norm(f'{_BLOCKS}/attn/norm', 'blocks.{i}.attn.norm'), *norm(f'{_BLOCKS}/mlp/norm', 'blocks.{i}.mlp.norm'),
)
_SCALES = tuple(Entry(f'{_BLOCKS}/scale{n}', f'blocks.{{i}}.gamma_{n}', SAME) for n in (1, 2))
_SPLIT_QKV = tuple(entry for name, letter in (('query', 'q'), ('key', 'k'), ('value', 'v'))
                   for entry in layer(f'{_BLOCKS}/attn/{name}', f'blocks.{{i}}.attn.{letter}_proj'))
_APART = (Entry(f'{_BLOCKS}/attn/query/bias', 'blocks.{i}.attn.q_bias', SAME),
          Entry(f'{_BLOCKS}/attn/value/bias', 'blocks.{i}.attn.v_bias', SAME))
_UNPACKED = (*layer(f'{_BLOCKS}/mlp/gate', 'blocks.{i}.mlp.fc1_g'), *layer(f'{_BLOCKS}/mlp/up', 'blocks.{i}.mlp.fc1_x'))
_OURS_QKV = tuple(f'{_BLOCKS}/attn/{name}/' for name in ('query', 'key', 'value'))

READ_TIMM: Table = (*TIMM, *_TIMM_EXTRA, *_SCALES, *_SPLIT_QKV, *_APART, *_UNPACKED)
READ_TIMM_PACKED: Table = (*TIMM_SWIGLU, *_TIMM_EXTRA, *_SCALES, *_SPLIT_QKV, *_APART)
"""With gate and value of the MLP in one matrix."""


def timm(model: schema.ViT) -> Table:
  """Returns the names under which timm expects this network."""
  is_eva = model.positions.is_rotary
  is_packed = model.swiglu and model.norm is Norm.LAYER and not model.mlp_norm and (
      model.rotary_places is not RotaryPlaces.UNIT)
  table = TIMM_SWIGLU if is_packed else TIMM
  if model.swiglu and not is_packed:
    table = (*(entry for entry in table if not entry.ours.startswith(f'{_BLOCKS}/mlp/up')), *_UNPACKED)
  if is_eva:
    table = (*(entry for entry in table if '/scale' not in entry.ours or 'blocks' not in entry.ours
               or not entry.theirs.endswith('.gamma')), *_SCALES)
  if is_eva and model.mlp_norm:
    table = (*(entry for entry in table if not entry.ours.startswith(_OURS_QKV)), *_SPLIT_QKV)
  elif is_eva and model.qkv_bias and not model.key_bias:
    table = (*(entry for entry in table if not (entry.ours.startswith(_OURS_QKV) and entry.ours.endswith('bias'))),
             *_APART)
  return (*table, *_TIMM_EXTRA)


def _tower_block(theirs: str) -> list[Entry]:
  ours = _BLOCKS
  return [*(entry for name, letter in (('query', 'q'), ('key', 'k'), ('value', 'v'), ('out', 'out'))
            for entry in layer(f'{ours}/attn/{name}', f'{theirs}.self_attn.{letter}_proj')),
          *norm(f'{ours}/norm1', f'{theirs}.layer_norm1'), *norm(f'{ours}/norm2', f'{theirs}.layer_norm2'),
          *layer(f'{ours}/mlp/up', f'{theirs}.mlp.fc1'), *layer(f'{ours}/mlp/down', f'{theirs}.mlp.fc2')]


def _probe(theirs: str) -> list[Entry]:
  """Returns the entries of PyTorch's own attention layer, with query, key and value in one matrix."""
  def joined(name: str, part: int) -> list[Entry]:
    weight, bias = layer(f'backbone/pool/attn/{name}', '', part=(part, 3))
    return [weight._replace(theirs=f'{theirs}.in_proj_weight'), bias._replace(theirs=f'{theirs}.in_proj_bias')]

  return [*joined('query', 0), *joined('key', 1), *joined('value', 2),
          *layer('backbone/pool/attn/out', f'{theirs}.out_proj')]


HUGGINGFACE_TOWER: Table = (
    Entry('backbone/cls', 'embeddings.class_embedding', _ROW),
    *layer('backbone/stem', 'embeddings.patch_embedding', layout=CONV),
    Entry('backbone/positions', 'embeddings.position_embedding.weight', _ROWS),
    *norm('backbone/norm_before', 'pre_layrnorm'), *norm('backbone/norm', 'post_layernorm'),
    *_tower_block('encoder.layers.{i}'),
    Entry('backbone/pool/probe', 'head.probe', SAME), *_probe('head.attention'),
    *norm('backbone/pool/norm', 'head.layernorm'),
    *layer('backbone/pool/mlp/up', 'head.mlp.fc1'), *layer('backbone/pool/mlp/down', 'head.mlp.fc2'),
    Entry('head/kernel', 'visual_projection.weight', Layout(np.transpose, np.transpose)),
)
"""CLIP and SigLIP, without the prefix `vision_model.`."""


def _named_block(theirs: str, *, attn: str, out: str, mlp: str, norms: str) -> list[Entry]:
  """Returns the entries of a block whose MLP has `up_proj`, `down_proj` and, if it is gated, `gate_proj`."""
  names = (('query', 'q_proj'), ('key', 'k_proj'), ('value', 'v_proj'), ('out', out))
  return [*(entry for ours, name in names for entry in layer(f'{_BLOCKS}/attn/{ours}', f'{theirs}.{attn}.{name}')),
          *norm(f'{_BLOCKS}/norm1', f'{theirs}.{norms}1'), *norm(f'{_BLOCKS}/norm2', f'{theirs}.{norms}2'),
          *(entry for name in ('gate', 'up', 'down')
            for entry in layer(f'{_BLOCKS}/mlp/{name}', f'{theirs}.{mlp}.{name}_proj'))]


HUGGINGFACE_DINOV3: Table = (
    Entry('backbone/cls', 'embeddings.cls_token', SAME),
    Entry('backbone/registers', 'embeddings.register_tokens', SAME),
    *layer('backbone/stem', 'embeddings.patch_embeddings', layout=CONV),
    *_named_block('layer.{i}', attn='attention', out='o_proj', mlp='mlp', norms='norm'),
    *(Entry(f'{_BLOCKS}/scale{n}', f'layer.{{i}}.layer_scale{n}.lambda1', SAME) for n in (1, 2)),
    *norm('backbone/norm', 'norm'),
)
HUGGINGFACE_AIMV2: Table = (
    *layer('backbone/stem', 'embeddings.patch_embed', layout=CONV), *norm('backbone/stem_norm', 'embeddings.rms_norm'),
    Entry('backbone/positions', 'embeddings.position_embedding.weight', _ROWS),
    *_named_block('encoder.layers.{i}', attn='attention', out='out_proj', mlp='ffn', norms='rms_norm'),
    *norm('backbone/norm', 'rms_norm'),
)
