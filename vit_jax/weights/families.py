"""Detects the family of a file's tensors; renames and drops tensors so that the family's table of names applies.

Only `positions` changes values; its rules are in the report.
"""
from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Gelu
from vit_jax.core.errors import UserError
from vit_jax.weights import families_huggingface, families_scenic, families_timm, names, names_families, tables
from vit_jax.weights.hints import Hints
from vit_jax.weights.infer import Leaves
from vit_jax.weights.renaming import Recognized, Tensors, distinct, dropping, renamed, without_fixed
from vit_jax.weights.report import Line

STEM = {'stem_std_eps': 0., 'stem_var_eps': 1e-8, 'stem_norm_eps': 1e-5}
"""Epsilons of standardized kernels and of GroupNorm in timm, where those of the authors' programs differ."""
JAX = Hints(gelu=Gelu.TANH, norm_eps=1e-6)     # vision_transformer and big_vision: flax's defaults
TORCH = Hints(gelu=Gelu.EXACT, norm_eps=1e-6, settings=STEM)  # timm, DeiT, MAE, DINO

UNKNOWN_PARTS = {
    r'fc_norm\.': 'it normalizes tokens and their mean; networks here do one of these',
    r'.*\.relative_position\w*|rel_pos\w*': 'it is a BEiT, which has relative positions of its own',
    r'.*rope.*': 'it has rotary positions of a kind that no network here has',
    r'stages\..*running_mean': 'it is a ResNet with BatchNorm; that of BiT has GroupNorm',
}
"""Reasons why some tensors are not supported, by pattern of their names."""


def recognize(tensors: Tensors) -> Recognized:
  """Returns the family of a file, detected from the names of its tensors.

  Raises:
    UserError: the names belong to no family.
  """
  for place in (_of_bit, families_scenic.recognize, _of_flax, families_huggingface.recognize, _of_timm):
    if found := place(tensors):
      return found
  shown = ', '.join(sorted(tensors)[:6])
  raise UserError(f'its {len(tensors)} tensors are named as in no known family ({", ".join(names.FAMILIES)}): {shown}')


def reasons(left: list[str]) -> list[str]:
  """Returns the known reasons why unused tensors are not supported."""
  return [reason for pattern, reason in UNKNOWN_PARTS.items() if any(re.match(pattern, name) for name in left)]


# vision_transformer and big_vision

_FLAX_DROPS = {
    r'opt/(?!target/).*|chrono/.*|step|state/.*': 'of training: optimizer state and counters',
    r'params/(txt/.*|t|b|bias_init|temperature)': 'of the text tower',
}
_BLOCK = r'^(Transformer/encoderblock_\d+)/'


def _of_flax(tensors: Tensors) -> Recognized | None:
  if not any('/' in name for name in tensors):
    return None
  kept, dropped = dropping(tensors, _FLAX_DROPS)
  kept = renamed(kept, (r'^opt/target/', ''), (r'^params/(img/)?', ''))
  if any(name.startswith('MixerBlock_') for name in kept):
    return Recognized('vision_transformer', names.FLAX_MIXER, kept, dropped, JAX)
  if 'embedding/kernel' not in kept:
    return None
  kept = _unstacked(renamed(kept, (r'^(probe$|MlpBlock_0/|MultiHeadDotProductAttention_0/|LayerNorm_0/)',
                                    r'MAPHead_0/\1')))
  if 'Transformer/posembed_input/pos_embedding' in kept:
    kept = renamed(kept, (_BLOCK + 'MultiHeadDotProductAttention_0', r'\1/MultiHeadDotProductAttention_1'),
                    (_BLOCK + 'LayerNorm_1', r'\1/LayerNorm_2'), (_BLOCK + 'MlpBlock_0', r'\1/MlpBlock_3'))
    return Recognized('vision_transformer', names.VISION_TRANSFORMER, kept, dropped, JAX)
  kept = renamed(kept, (_BLOCK + 'MultiHeadDotProductAttention_1', r'\1/MultiHeadDotProductAttention_0'),
                  (_BLOCK + 'LayerNorm_2', r'\1/LayerNorm_1'), (_BLOCK + 'MlpBlock_3', r'\1/MlpBlock_0'))
  return Recognized('big_vision', names.BIG_VISION, kept, dropped, JAX)


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


def _of_bit(tensors: Tensors) -> Recognized | None:
  is_one = 'resnet/root_block/standardized_conv2d/kernel' in tensors
  return Recognized('bit', names.BIT, tensors, (), Hints()) if is_one else None


# timm, DeiT, MAE, DINO, DINOv2

_TIMM_DROPS = {r'head\.(mlp|last_layer)\..*': 'the projection head of self-supervision'}


def _of_timm(tensors: Tensors) -> Recognized | None:
  kept = tensors
  for prefix in ('_orig_mod.', 'module.', 'model.', 'backbone.', 'encoder.', 'teacher.backbone.'):
    if any(name.startswith(prefix) for name in kept) and not {'cls_token', 'patch_embed.proj.weight'} & kept.keys():
      kept = distinct(kept, lambda name, prefix=prefix: name.removeprefix(prefix))  # type: ignore[misc]
  if 'stem.proj.weight' in kept and any('.mlp_tokens.' in name for name in kept):
    return Recognized('timm', names.TIMM_MIXER, kept, (), TORCH)
  kept, counters = dropping(kept, {r'.*\.num_batches_tracked': 'a counter'})
  if 'stem.conv.weight' in kept and 'stages.0.blocks.0.conv1.weight' in kept:
    return Recognized('timm', names.TIMM_BIT, kept, counters, Hints(settings=STEM))
  if 'conv_stem.weight' in kept:
    return Recognized('efficientnet', names.TIMM_EFFICIENTNET, kept, counters, Hints())
  of_text = families_timm.TEXT if families_timm.is_tower(kept) else {}
  kept, rotations = dropping(kept, families_timm.DROPS | of_text)
  authors = kept
  kept = distinct(kept, functools.partial(families_timm.renamed, tensors=kept))
  kept, reshaped = families_timm.reshaped(kept)
  if 'patch_embed.proj.weight' not in kept:
    return None
  known, family = families_timm.hints(kept), _branch(kept)
  if known:
    family = 'timm' if authors.keys() <= {*kept, 'head.bias'} else known[0]  # its authors have names of their own
  kept, dropped = dropping(kept, _TIMM_DROPS | ({} if 'decoder_embed.weight' in kept else {
      'mask_token': 'of pre-training with hidden patches'}))
  kept = renamed(kept, (r'^register_tokens', 'reg_token'), (r'^blocks\.\d+\.(\d+)\.', r'blocks.\1.'),
                  (r'\.mlp\.w12\.', '.mlp.fc1.'), (r'\.mlp\.w3\.', '.mlp.fc2.'),
                  (r'^patch_embed\.backbone\.(conv|norm)\.', r'patch_embed.backbone.stem.\1.'))
  after = 'fc_norm.weight' in kept and 'norm.weight' not in kept
  kept = renamed(kept, (r'^fc_norm\.', 'norm.')) if after else kept
  kept, more = without_fixed(kept, 'decoder_pos_embed')
  table = names_families.READ_TIMM_PACKED if _is_gated(kept) else names_families.READ_TIMM
  own = known[1] if known else TORCH
  return Recognized(family, table, kept, counters + rotations + reshaped + dropped + more,
                    own._replace(norm_after_pool=after))


def _branch(tensors: Tensors) -> str:
  """Returns which program with timm's names wrote the file; the default normalization of images depends on it."""
  if 'decoder_embed.weight' in tensors or {'fc_norm.weight', 'cls_token'} <= tensors.keys():
    return 'mae'
  if any(name.startswith('head.last_layer') for name in tensors):
    return 'dino'
  if 'register_tokens' in tensors and tensors['register_tokens'].shape[1:2] == (1,):
    return 'tips'
  if 'register_tokens' in tensors or ('mask_token' in tensors and 'blocks.0.ls1.gamma' in tensors):
    return 'dinov2'
  return 'timm'


def _is_gated(tensors: Tensors) -> bool:
  """Whether the first matrix of an MLP has twice as many outputs as the second one has inputs."""
  up, down = (tensors.get(f'blocks.0.mlp.{name}.weight') for name in ('fc1', 'fc2'))
  return up is not None and down is not None and up.ndim == down.ndim == 2 and up.shape[0] == 2 * down.shape[1]


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
