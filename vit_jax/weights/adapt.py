"""Adapts weights to the network of a run, which may differ in resolution, patch size, pooling or classes.

Every change follows a rule, which the report names. A tensor that is unused or missing without a rule is an error.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import LastNorm, SinCos
from vit_jax.config.schema.data import RGB
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Params, PyTree
from vit_jax.models.rivals import mixer
from vit_jax.weights import resize, tables
from vit_jax.weights.infer import Leaves
from vit_jax.weights.network import Line, Report, Weights, describe, setting

BACKBONE, POSITIONS, STEM = 'backbone/', 'backbone/positions', 'backbone/stem/kernel'
NORM = 'backbone/norm/'
NUMERICS = ('gelu', 'norm.eps', 'norm_eps')
"""Settings that shapes do not determine, and that must agree with the weights."""
NEW = ((r'head/pre_logits/.*', 'a new head'), (r'(head|head_dist)/.*', 'a new head, zeros'),
       (r'backbone/cls', 'the weights pool without a class token'),
       (r'backbone/dist', 'the weights have no distillation token'),
       (r'backbone/pool/.*', 'the weights pool without attention'),
       (r'(decoder|(patch_)?projector|aux|predict|text|logits)(/.*)?|mask_token', "of the run's objective"))
"""Parameters of a run that may be reinitialized, and why; the first pattern counts."""
SIZES = ('width', 'depth', 'heads', 'mlp.hidden', 'registers')
"""Settings that are advised where the shapes of tensors differ."""


class Adapted(NamedTuple):
  """Parameters for a run; the report names those that are missing and are reinitialized."""
  params: Params
  state: PyTree
  report: Report


class Target(NamedTuple):
  """The network that the weights are adapted to.

  model, image_px: of the run.
  like: arrays or shapes of all parameters of the run, including keys other than `backbone` and `head`.
  class_names: of the run; the head is only kept if the weights have the same classes in the same order. None = the
    head is always kept.
  place: of the settings of the network in the config, for messages.
  """
  model: schema.Model
  image_px: tuple[int, int]
  like: Params
  class_names: tuple[str, ...] | None
  place: str = 'model'


def adapt(weights: Weights, target: Target) -> Adapted:
  """Returns the parameters of a run, taken from weights.

  Args:
    weights: the loaded weights.
    target: the network of the run; `target.model.position_resize` selects how position embeddings are resized.

  Raises:
    UserError: lists every tensor that is unused or missing without a rule, and every setting that must agree with
      the weights and does not.
  """
  leaves = {name: np.asarray(leaf) for name, leaf in trees.flatten(weights.params).items()}
  lines: list[Line] = []
  for step in (_resize_patches, _resize_positions, _change_channels, _grow_mixer, _drop, _drop_norm):
    leaves, more = step(leaves, weights, target)
    lines += more
  wanted = trees.flatten(target.like)
  if target.class_names is not None:
    lines += _by_rule('new', NEW, [name for name in wanted if name not in leaves])
  new = {line.name for line in lines if line.what == 'new'}
  needed = trees.unflatten({name: leaf for name, leaf in wanted.items() if name not in new})
  problems = _differing_numerics(weights.model, target)
  if differences := trees.difference(trees.unflatten(leaves), needed, found_name='the weights', wanted_name='the run'):
    problems += [line.strip() for line in tables.listed(differences.splitlines(), most=16)]
    problems.append(_advice(weights.model, target))
  if problems:
    raise UserError(f'{weights.source} ({describe(weights.model)}) does not fit this run ({describe(target.model)}):\n'
                    + '\n'.join(f'  {problem}' for problem in problems))
  changed = {line.name for line in lines}
  taken = [Line(name, 'taken') for name in leaves if name not in changed]
  return Adapted(trees.unflatten(leaves), weights.state, Report((*taken, *lines)))


def _differing_numerics(found: schema.Model, target: Target) -> list[str]:
  """Returns the problems with settings of `NUMERICS`, of those that both networks have."""
  problems = []
  for name in NUMERICS:
    expected, value = (getattr(x, 'value', x) for x in (setting(found, name), setting(target.model, name)))
    if expected is not None and value is not None and expected != value:
      path = f'{target.place}.{name}'
      problems.append(f'{path}: expected {expected}, as in the weights, got {value}. Set --config.{path}={expected}.')
  return problems


def _advice(found: schema.Model, target: Target) -> str:
  """Returns what to do about tensors of other shapes: the settings of the network that differ from the weights."""
  changes = [f'--config.{target.place}.{name}={value}' for name in SIZES
             if (value := setting(found, name)) is not None and value != setting(target.model, name)]
  if type(found) is not type(target.model) or not changes:
    return f'Use weights of the network of this run, or set {target.place} to that of the weights.'
  return f'Use weights of the network of this run, or set {" ".join(changes)}.'


# The steps of `adapt`: each returns the leaves, and a line for each one that it changed

_Changed = tuple[Leaves, list[Line]]


def _resize_patches(leaves: Leaves, _: Weights, target: Target) -> _Changed:
  """Returns the leaves with a patch kernel of the run's patch size, if patches are cut from the image itself."""
  stem, new = getattr(target.model, 'stem', schema.PatchStem()), getattr(target.model, 'patch', 0)
  kernel = leaves.get(STEM)
  if kernel is None or not new or kernel.shape[2] != 3 or kernel.shape[0] == new or not isinstance(
      stem, schema.PatchStem):
    return leaves, []
  rule = f'patches of {kernel.shape[0]} to {new} px, by pseudo-inverse'
  return {**leaves, STEM: resize.patches(kernel, new)}, [Line(STEM, 'resized', rule)]


def _resize_positions(leaves: Leaves, weights: Weights, target: Target) -> _Changed:
  """Returns the leaves with position embeddings for the grid and the tokens of the run's ViT."""
  old, new = weights.model, target.model
  lines: list[Line] = []
  if not isinstance(old, schema.ViT) or not isinstance(new, schema.ViT):
    return leaves, []
  if not isinstance(new.positions, schema.Learned) or new.positions.at is not schema.PositionsAt.STEM:
    return _drop_fixed_positions(leaves, weights, new)
  old_grid, new_grid = ((px[0] // model.patch, px[1] // model.patch)
                        for model, px in ((old, weights.preprocess.image_px), (new, target.image_px)))
  if POSITIONS in leaves:
    tokens, patches = np.split(leaves[POSITIONS][0], [old.num_first])
  elif isinstance(old.positions, SinCos):
    tokens, patches = np.zeros((old.num_first, old.width), np.float32), resize.fixed(old.positions, old_grid, old.width)
    lines.append(Line(POSITIONS, 'resized', f'from the fixed {old.positions.frequencies.value} ones of the weights'))
  else:
    return leaves, []
  rules = []
  if old.num_first != new.num_first:
    is_fewer = new.num_first < old.num_first
    more, fewer = (old.pool, new.pool) if is_fewer else (new.pool, old.pool)
    names = ['class token'] if more.class_token and not fewer.class_token else []
    names += ['distillation token'] if more.distillation and not fewer.distillation else []
    rules.append(f'{"without the rows of" if is_fewer else "zeros for"} {" and ".join(names)}')
  if old_grid != new_grid:
    how = new.positions.resize
    patches = resize.positions(patches, old_grid, new_grid, how)
    rules.append(f'{old_grid[0]} x {old_grid[1]} to {new_grid[0]} x {new_grid[1]} tokens, {how.value}')
  num_kept = min(old.num_first, new.num_first)
  zeros = np.zeros((new.num_first - num_kept, tokens.shape[1]), np.float32)
  if rules:
    lines.append(Line(POSITIONS, 'resized' if old_grid != new_grid else 'folded', '; '.join(rules)))
  return {**leaves, POSITIONS: np.concatenate([tokens[:num_kept], zeros, patches])[None]}, lines


def _drop_fixed_positions(leaves: Leaves, weights: Weights, model: schema.ViT) -> _Changed:
  """Returns the leaves without a position table that equals the run's fixed one; MAE's files contain it."""
  if not isinstance(model.positions, SinCos) or POSITIONS not in leaves:
    return leaves, []
  assert isinstance(weights.model, schema.ViT)
  h, w = (px // weights.model.patch for px in weights.preprocess.image_px)
  table = resize.fixed(model.positions, (h, w), model.width)
  tokens, patches = np.split(leaves[POSITIONS][0], [weights.model.num_first])
  if patches.shape != table.shape or np.abs(patches - table).max() > 1e-4 or np.any(tokens):
    return leaves, []
  rule = f'the same as the fixed {model.positions.frequencies.value} ones of the run'
  return _without(leaves, [Line(POSITIONS, 'dropped', rule)])


def _by_rule(what: str, rules: Sequence[tuple[str, str]], names: Iterable[str]) -> list[Line]:
  """Returns a line for each name that a rule (pattern, reason) matches, with the reason of the first one."""
  reasons = {name: [reason for pattern, reason in rules if re.fullmatch(pattern, name)] for name in names}
  return [Line(name, what, matching[0]) for name, matching in reasons.items() if matching]


def _without(leaves: Leaves, lines: list[Line]) -> _Changed:
  """Returns the leaves without those that the lines name."""
  names = {line.name for line in lines}
  return {name: leaf for name, leaf in leaves.items() if name not in names}, lines


def _change_channels(leaves: Leaves, _: Weights, target: Target) -> _Changed:
  """Returns the leaves with kernels of RGB images for the channels of the run, if it has others."""
  changed, lines, wanted = dict(leaves), [], trees.flatten(target.like)
  for name, leaf in leaves.items():
    if name not in wanted or not leaf.ndim == wanted[name].ndim == 4:
      continue
    *others, num, width = wanted[name].shape
    if leaf.shape == (*others, RGB, width) and num != RGB:
      changed[name] = resize.channels(leaf, num)
      how = '1: their sum' if num == 1 else f'{num}: repeated, times 3 / {num}'
      lines.append(Line(name, 'resized', f'3 channels to {how}'))
  return changed, lines


def _grow_mixer(leaves: Leaves, weights: Weights, target: Target) -> _Changed:
  """Returns the leaves of a Mixer for an image whose sides are integer multiples of the original ones."""
  if not isinstance(weights.model, schema.Mixer) or not isinstance(target.model, schema.Mixer):
    return leaves, []
  grid, new = ((px[0] // model.patch, px[1] // model.patch) for model, px in (
      (weights.model, weights.preprocess.image_px), (target.model, target.image_px)))
  times = new[0] // grid[0], new[1] // grid[1]
  if grid == new or (grid[0] * times[0], grid[1] * times[1]) != new:
    return leaves, []  # the difference is reported with all others
  backbone = trees.unflatten({name.removeprefix(BACKBONE): leaf for name, leaf in leaves.items()
                              if name.startswith(BACKBONE)})
  grown = {BACKBONE + name: np.asarray(leaf)
           for name, leaf in trees.flatten(mixer.grow(backbone, grid, times=times)).items()}
  rule = f'{times[0]} x {times[1]} copies on the diagonal, for {new[0]} x {new[1]} tokens'
  return {**leaves, **grown}, [Line(name, 'resized', rule) for name in grown if grown[name].shape != leaves[name].shape]


def _drop(leaves: Leaves, weights: Weights, target: Target) -> _Changed:
  """Returns the leaves without those that a rule drops for this run."""
  wanted, heads = trees.flatten(target.like), r'(head|head_dist)(/.*)?'
  rules = [(r'decoder/.*|mask_token', 'the run reconstructs no images'),
           (r'((patch_)?projector|aux|predict|text|logits)(/.*)?', 'of another objective'),
           (r'backbone/cls', 'the run pools without a class token'),
           (r'backbone/dist|head_dist/.*', 'the run has no distillation token'),
           (r'backbone/pool/.*', 'the run pools without attention'),
           (r'head/pre_logits/.*', 'the run has a linear head' if 'head/kernel' in wanted else 'the run has no head'),
           (heads, 'the run has no head')]
  lines = _by_rule('dropped', rules, [name for name in leaves if name not in wanted])
  has_head = any(re.fullmatch(heads, name) for name in wanted)
  if has_head and not _keeps_head(leaves, wanted, weights, target):
    rule = 'a new head: it has another form'
    if not weights.class_names:
      rule = f'a new head: the {weights.num_classes:,} classes of the weights have no names'
    elif target.class_names is not None and weights.class_names != target.class_names:
      rule = f'a new head: {weights.num_classes:,} other classes than the {len(target.class_names):,} of the run'
    dropped = {line.name for line in lines}
    lines += [Line(name, 'dropped', rule) for name in leaves if re.fullmatch(heads, name) and name not in dropped]
  return _without(leaves, lines)


def _keeps_head(leaves: Leaves, wanted: Leaves, weights: Weights, target: Target) -> bool:
  """Whether the weights have a complete head of the run's form, and its classes."""
  if target.class_names is None:
    return True
  names = [name for name in wanted if name.startswith(('head/', 'head_dist/'))]
  has_form = bool(names) and all(name in leaves and leaves[name].shape == wanted[name].shape for name in names)
  return has_form and weights.class_names == target.class_names


def _drop_norm(leaves: Leaves, weights: Weights, target: Target) -> _Changed:
  """Returns the leaves without the last norm if only one network normalizes the mean of the tokens: it is new then.

  MAE's fine-tuning does so.
  """
  was_pooled, is_pooled = (getattr(m, 'last_norm', None) is LastNorm.POOLED for m in (weights.model, target.model))
  if was_pooled == is_pooled or target.class_names is None:
    return leaves, []
  what = 'the mean of the tokens' if is_pooled else 'each token'
  return _without(leaves, [Line(name, 'new', f'the run normalizes {what}, the weights do not') for name in leaves
                           if name.startswith(NORM)])


def preprocessing_differs(weights: Weights, recipe: schema.Recipe) -> list[str]:
  """Returns one sentence for each difference between the run's preprocessing and that of the weights."""
  p = weights.preprocess
  if weights.channels != recipe.channels:
    return []  # the statistics of other channels
  pairs = {'mean': (p.mean, tuple(recipe.mean)), 'std': (p.std, tuple(recipe.std))}
  return [f'data.recipe.{name}: expected {own}, as for the weights, got {now}. Set '
          f'--config.data.recipe.{name}={",".join(map(str, own))}.' for name, (own, now) in pairs.items()
          if not np.allclose(own, now, atol=1e-3)]
