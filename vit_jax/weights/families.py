"""Detects the family of a file's tensors; renames and drops tensors so that the family's table of names applies.

Only `positions` changes values; its rules are in the report.
"""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Gelu
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.models.vit.positions import sincos2d_mae
from vit_jax.weights import names, tables
from vit_jax.weights.infer import Hints, Leaves
from vit_jax.weights.names import Table
from vit_jax.weights.report import Line

Tensors = dict[str, HostArray]
JAX = Hints(gelu=Gelu.TANH, norm_eps=1e-6)     # vision_transformer and big_vision: flax's defaults
TORCH = Hints(gelu=Gelu.EXACT, norm_eps=1e-6)  # timm, DeiT, MAE, DINO
HF = Hints(gelu=Gelu.EXACT, norm_eps=1e-12)    # ViTConfig's defaults


class Recognised(NamedTuple):
  """A file's tensors under the names of its family's table.

  hints: defaults of the family, which sidecars of the file and `--model` override.
  """
  family: str
  table: Table
  tensors: Tensors
  dropped: tuple[Line, ...]
  hints: Hints


UNKNOWN_PARTS = {
    r'fc_norm\.': 'it normalises tokens and their mean; networks here do one of these',
    r'norm_pre\.': 'it has a norm before the first block, as CLIP has; no network here has one',
    r'.*\.(q_bias|v_bias|relative_position\w*)|rel_pos\w*': 'it is a BEiT, whose attention has other biases',
    r'.*rope.*': 'it has rotary positions, which no network here has',
    r'stages\..*running_mean': 'it is a ResNet with BatchNorm; that of BiT has GroupNorm',
}
"""Reasons why some tensors are not supported, by pattern of their names."""


def recognise(tensors: Tensors) -> Recognised:
  """Returns the family of a file, detected from the names of its tensors.

  Raises:
    UserError: the names belong to no family.
  """
  for place in (_of_bit, _of_flax, _of_huggingface, _of_timm):
    if found := place(tensors):
      return found
  shown = ', '.join(sorted(tensors)[:6])
  raise UserError(f'its {len(tensors)} tensors are named as in no known family ({", ".join(names.FAMILIES)}): {shown}')


def reasons(left: list[str]) -> list[str]:
  """Returns the known reasons why unused tensors are not supported."""
  return [reason for pattern, reason in UNKNOWN_PARTS.items() if any(re.match(pattern, name) for name in left)]


def _dropping(tensors: Tensors, rules: Mapping[str, str]) -> tuple[Tensors, tuple[Line, ...]]:
  """Returns the tensors without those that a rule (pattern of the name, reason) drops."""
  lines = [Line(name, 'dropped', reason) for name in tensors for pattern, reason in rules.items()
           if re.fullmatch(pattern, name)]
  gone = {line.name for line in lines}
  return {name: x for name, x in tensors.items() if name not in gone}, tuple(lines)


def _renamed(tensors: Tensors, *rules: tuple[str, str]) -> Tensors:
  """Returns the tensors with the patterns of the rules replaced in their names, in the order of the rules."""
  def rename(name: str) -> str:
    for pattern, new in rules:
      name = re.sub(pattern, new, name)
    return name

  return _distinct(tensors, rename)


def _distinct(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
  """Returns the tensors under new names. Raises UserError if two tensors get the same name."""
  found: Tensors = {}
  for name, x in tensors.items():
    if (new := rename(name)) in found:
      raise UserError(f'two of its tensors mean {new}, one of them {name}')
    found[new] = x
  return found


# vision_transformer and big_vision

_FLAX_DROPS = {
    r'opt/(?!target/).*|chrono/.*|step|state/.*': 'of training: optimiser state and counters',
    r'params/(txt/.*|t|b|bias_init|temperature)': 'of the text tower',
}
_BLOCK = r'^(Transformer/encoderblock_\d+)/'


def _of_flax(tensors: Tensors) -> Recognised | None:
  if not any('/' in name for name in tensors):
    return None
  kept, dropped = _dropping(tensors, _FLAX_DROPS)
  kept = _renamed(kept, (r'^opt/target/', ''), (r'^params/(img/)?', ''))
  if any(name.startswith('MixerBlock_') for name in kept):
    return Recognised('vision_transformer', names.FLAX_MIXER, kept, dropped, JAX)
  if 'embedding/kernel' not in kept:
    return None
  kept = _unstacked(_renamed(kept, (r'^(probe$|MlpBlock_0/|MultiHeadDotProductAttention_0/|LayerNorm_0/)',
                                    r'MAPHead_0/\1')))
  if 'Transformer/posembed_input/pos_embedding' in kept:
    kept = _renamed(kept, (_BLOCK + 'MultiHeadDotProductAttention_0', r'\1/MultiHeadDotProductAttention_1'),
                    (_BLOCK + 'LayerNorm_1', r'\1/LayerNorm_2'), (_BLOCK + 'MlpBlock_0', r'\1/MlpBlock_3'))
    return Recognised('vision_transformer', names.VISION_TRANSFORMER, kept, dropped, JAX)
  kept = _renamed(kept, (_BLOCK + 'MultiHeadDotProductAttention_1', r'\1/MultiHeadDotProductAttention_0'),
                  (_BLOCK + 'LayerNorm_2', r'\1/LayerNorm_1'), (_BLOCK + 'MlpBlock_3', r'\1/MlpBlock_0'))
  return Recognised('big_vision', names.BIG_VISION, kept, dropped, JAX)


def _unstacked(tensors: Tensors) -> Tensors:
  """Returns the tensors of scanned blocks (`encoderblock/`, depth is axis 0) as one tensor per block."""
  found = {}
  for name, tensor in tensors.items():
    before, is_stacked, after = name.partition('Transformer/encoderblock/')
    if not is_stacked:
      found[name] = tensor
      continue
    if not tensor.ndim or tensor.shape[0] > tables.MOST_LAYERS:
      raise UserError(f'{name} has the shape {list(tensor.shape)}, expected up to {tables.MOST_LAYERS:,} layers first')
    for i, layer in enumerate(tensor):
      found[f'{before}Transformer/encoderblock_{i}/{after}'] = layer
  return found


def _of_bit(tensors: Tensors) -> Recognised | None:
  is_one = 'resnet/root_block/standardized_conv2d/kernel' in tensors
  return Recognised('bit', names.BIT, tensors, (), Hints()) if is_one else None


# transformers

_HF_PREFIX = r'^(vit|deit|dinov2|dinov2_with_registers|vit_mae)\.'
_HF_DROPS = {
    r'pooler\.dense\..*': 'a pooler that classification does not use',
    r'embeddings\.mask_token': 'of pre-training with hidden patches',
    r'decoder\.0\..*': 'of pre-training with hidden patches',
}
_HF_BLOCK = r'^((?:encoder\.layer|decoder\.decoder_layers)\.\d+)\.'


def _of_huggingface(tensors: Tensors) -> Recognised | None:
  kept = _renamed(tensors, (_HF_PREFIX, ''), (r'^cls_classifier', 'classifier'), (r'^layers\.', 'encoder.layer.'),
                  (r'^decoder\.decoder_encoder\.layer\.', 'decoder.decoder_layers.'))  # saved by transformers 5.23
  if 'embeddings.patch_embeddings.projection.weight' not in kept:
    return None
  kept = _renamed(
      kept, *((_HF_BLOCK + rf'attention\.{new}_proj', rf'\1.attention.attention.{old}')
              for new, old in (('q', 'query'), ('k', 'key'), ('v', 'value'))),
      (_HF_BLOCK + r'attention\.o_proj', r'\1.attention.output.dense'))
  is_dino = any('.layer_scale1.' in name for name in kept)
  kept, dropped = _dropping(kept, _HF_DROPS)
  if not is_dino:
    kept = _renamed(kept, (_HF_BLOCK + r'mlp\.fc1', r'\1.intermediate.dense'),
                    (_HF_BLOCK + r'mlp\.fc2', r'\1.output.dense'))
    kept, more = _without_fixed(kept, 'decoder.decoder_pos_embed')
    return Recognised('huggingface', names.HUGGINGFACE, kept, dropped + more, HF)
  width = kept['embeddings.patch_embeddings.projection.weight'].shape[:1]
  if 'classifier.weight' in kept and width and kept['classifier.weight'].shape[-1:] == (2 * width[0],):
    kept, more = _dropping(kept, {r'classifier\..*': 'this head reads class token and mean patch side by side; no head '
                                                     'here does'})
    dropped += more
  kept = _gates_joined(kept)
  is_gated = any('.mlp.weights_in.' in name for name in kept)
  table = names.HUGGINGFACE_DINO_SWIGLU if is_gated else names.HUGGINGFACE_DINO
  return Recognised('huggingface', table, kept, dropped, HF._replace(norm_eps=1e-6))


def _gates_joined(tensors: Tensors) -> Tensors:
  """Returns the tensors with gate and value of each SwiGLU MLP joined, as transformers saves them."""
  found = {}
  for name, tensor in tensors.items():
    if '.mlp.gate_proj.' in name and (up := tensors.get(name.replace('gate_proj', 'up_proj'))) is not None:
      if up.shape != tensor.shape or not up.ndim:
        raise UserError(f'{name} has the shape {list(tensor.shape)}, its up_proj {list(up.shape)}')
      found[name.replace('gate_proj', 'weights_in')] = np.concatenate([tensor, up])
    elif '.mlp.up_proj.' not in name:
      found[name.replace('.mlp.down_proj.', '.mlp.weights_out.')] = tensor
  return found


# timm, DeiT, MAE, DINO, DINOv2

_TIMM_DROPS = {r'head\.(mlp|last_layer)\..*': 'the projection head of self-supervision'}


def _of_timm(tensors: Tensors) -> Recognised | None:
  kept = tensors
  for prefix in ('_orig_mod.', 'module.', 'model.', 'backbone.', 'encoder.', 'teacher.backbone.'):
    if any(name.startswith(prefix) for name in kept) and not {'cls_token', 'patch_embed.proj.weight'} & kept.keys():
      kept = _distinct(kept, lambda name, prefix=prefix: name.removeprefix(prefix))  # type: ignore[misc]
  if 'stem.proj.weight' in kept and any('.mlp_tokens.' in name for name in kept):
    return Recognised('timm', names.TIMM_MIXER, kept, (), TORCH)
  kept, counters = _dropping(kept, {r'.*\.num_batches_tracked': 'a counter'})
  if 'stem.conv.weight' in kept and 'stages.0.blocks.0.conv1.weight' in kept:
    return Recognised('timm', names.TIMM_BIT, kept, counters, Hints())
  if 'conv_stem.weight' in kept:
    return Recognised('efficientnet', names.TIMM_EFFICIENTNET, kept, counters, Hints())
  if 'patch_embed.proj.weight' not in kept:
    return None
  family = _branch(kept)
  kept, dropped = _dropping(kept, _TIMM_DROPS | ({} if 'decoder_embed.weight' in kept else {
      'mask_token': 'of pre-training with hidden patches'}))
  kept = _renamed(kept, (r'^register_tokens', 'reg_token'), (r'^blocks\.\d+\.(\d+)\.', r'blocks.\1.'),
                  (r'\.mlp\.w12\.', '.mlp.fc1.'), (r'\.mlp\.w3\.', '.mlp.fc2.'),
                  (r'^patch_embed\.backbone\.(conv|norm)\.', r'patch_embed.backbone.stem.\1.'))
  after = 'fc_norm.weight' in kept and 'norm.weight' not in kept
  kept = _renamed(kept, (r'^fc_norm\.', 'norm.')) if after else kept
  kept, more = _without_fixed(kept, 'decoder_pos_embed')
  table = names.TIMM_SWIGLU if _is_gated(kept) else names.TIMM
  return Recognised(family, table, kept, dropped + more, TORCH._replace(norm_after_pool=after))


def _branch(tensors: Tensors) -> str:
  """Returns which program with timm's names wrote the file; the default normalization of images depends on it."""
  if 'decoder_embed.weight' in tensors or {'fc_norm.weight', 'cls_token'} <= tensors.keys():
    return 'mae'
  if any(name.startswith('head.last_layer') for name in tensors):
    return 'dino'
  if 'register_tokens' in tensors or ('mask_token' in tensors and 'blocks.0.ls1.gamma' in tensors):
    return 'dinov2'
  return 'timm'


def _is_gated(tensors: Tensors) -> bool:
  """Whether the first matrix of an MLP has twice as many outputs as the second one has inputs."""
  up, down = (tensors.get(f'blocks.0.mlp.{name}.weight') for name in ('fc1', 'fc2'))
  return up is not None and down is not None and up.ndim == down.ndim == 2 and up.shape[0] == 2 * down.shape[1]


def _without_fixed(tensors: Tensors, name: str) -> tuple[Tensors, tuple[Line, ...]]:
  """Returns the tensors without the positions of MAE's decoder, which the network computes.

  Raises:
    UserError: the positions differ from the computed ones.
  """
  if name not in tensors:
    return tensors, ()
  table_MD = tensors[name][0] if tensors[name].ndim == 3 and len(tensors[name]) == 1 else np.zeros((0, 0))
  side, width = math.isqrt(max(len(table_MD) - 1, 0)), table_MD.shape[1]
  wanted = sincos2d_mae((side, side), width) if width and width % 4 == 0 else np.zeros((0, 0))
  if not wanted.size or wanted.shape != table_MD[1:].shape or np.any(table_MD[0]) or not (
      np.abs(table_MD[1:] - wanted).max() <= 1e-4):
    raise UserError(f'{name} is not the fixed 2-D sine-cosine table of MAE, which decoders here have')
  return ({k: v for k, v in tensors.items() if k != name},
          (Line(name, 'dropped', 'the same as what is computed here'),))


def positions(leaves: Leaves, model: schema.ViT, fits: Callable[[int], bool]) -> tuple[Leaves, tuple[Line, ...]]:
  """Returns the leaves with position rows for the class and distillation tokens and without rows for registers.

  Args:
    leaves: with `backbone/positions` as in the file.
    model: the network's settings.
    fits: whether a number of patch tokens forms a grid.
  """
  name, registers = 'backbone/positions', model.registers
  if name not in leaves:
    return leaves, ()
  table, num_first = leaves[name], (model.pool.has_class_token) + model.distilled
  rows = table.shape[1]
  if fits(rows - num_first):
    return leaves, ()
  if num_first and fits(rows):
    padded = np.concatenate([np.zeros((1, num_first, table.shape[2]), table.dtype), table], axis=1)
    return {**leaves, name: padded}, (Line(name, 'folded', f'the file has none for the first {num_first}: zeros'),)
  if registers and fits(rows - num_first - registers):
    own = table[:, num_first:num_first + registers]
    kept = np.concatenate([table[:, :num_first], table[:, num_first + registers:]], axis=1)
    return ({**leaves, name: kept, 'backbone/registers': leaves['backbone/registers'] + own},
            (Line('backbone/registers', 'folded', 'their positions are added to them'),))
  return leaves, ()
