"""Adapts weights to the network of a run, which may differ in resolution, patch size, pooling or classes.

Every change follows a rule, which the report names. A tensor that is unused or missing without a rule is an error.
"""
from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import LastNorm, SinCos
from vit_jax.config.schema.data import RGB
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Params, PyTree
from vit_jax.models.rivals import mixer
from vit_jax.weights import infer, resize, tables
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
  wanted = trees.flatten(target.like)
  numerics = [(f'{target.place}.{name}', *(_plain(setting(m, name)) for m in (weights.model, target.model)))
              for name in NUMERICS]
  problems = [f'{name}: expected {a}, as in the weights, got {b}. Set --config.{name}={a}.'
              for name, a, b in numerics if a is not None and b is not None and a != b]
  lines: list[Line] = []
  if isinstance(weights.model, schema.ViT) and isinstance(target.model, schema.ViT):
    leaves, more = _resized(leaves, weights, target.model, target)
    lines += more
  elif STEM in leaves and STEM in wanted and leaves[STEM].shape != wanted[STEM].shape:
    leaves, more = _patches(leaves, target.model)
    lines += more
  leaves, more = _channels(leaves, wanted)
  lines += more
  if isinstance(weights.model, schema.Mixer) and isinstance(target.model, schema.Mixer):
    leaves, more = _grown(leaves, weights, target)
    lines += more
  leaves, more = _dropped(leaves, wanted, weights, target)
  lines += more
  keeps_all = target.class_names is None
  was_pooled, is_pooled = (getattr(m, 'last_norm', None) is LastNorm.POOLED for m in (weights.model, target.model))
  if was_pooled != is_pooled and not keeps_all:  # one normalizes the mean of the tokens: new, as in MAE's fine-tuning
    what = 'the mean of the tokens' if is_pooled else 'each token'
    lines += [Line(name, 'new', f'the run normalizes {what}, the weights do not') for name in leaves
              if name.startswith(NORM)]
    leaves = {name: leaf for name, leaf in leaves.items() if not name.startswith(NORM)}
  lines += [Line(name, 'new', rule) for name in wanted if name not in leaves and not keeps_all
            for rule in [rule for pattern, rule in NEW if re.fullmatch(pattern, name)][:1]]
  explained = {line.name for line in lines if line.what == 'new'}
  needed = trees.unflatten({name: leaf for name, leaf in wanted.items() if name not in explained})
  if differences := trees.difference(trees.unflatten(leaves), needed, found_name='the weights', wanted_name='the run'):
    problems += [line.strip() for line in tables.listed(differences.splitlines(), most=16)]
    problems.append(_advice(weights.model, target))
  if problems:
    raise UserError(f'{weights.source} ({describe(weights.model)}) does not fit this run ({describe(target.model)}):\n'
                    + '\n'.join(f'  {problem}' for problem in problems))
  changed = {line.name for line in lines}
  taken = [Line(name, 'taken') for name in leaves if name not in changed]
  return Adapted(trees.unflatten(leaves), weights.state, Report((*taken, *lines)))


def _advice(found: schema.Model, target: Target) -> str:
  """Returns what to do about tensors of other shapes: the settings of the network that differ from the weights."""
  changes = [f'--config.{target.place}.{name}={own}' for name in SIZES
             if (own := setting(found, name)) is not None and own != setting(target.model, name)]
  if type(found) is not type(target.model) or not changes:
    return f'Use weights of the network of this run, or set {target.place} to that of the weights.'
  return f'Use weights of the network of this run, or set {" ".join(changes)}.'


def _plain(value: object) -> object:
  return getattr(value, 'value', value)


def _resized(leaves: Leaves, weights: Weights, model: schema.ViT, target: Target) -> tuple[Leaves, list[Line]]:
  """Returns the leaves with patch kernel and position embeddings resized for the run's ViT."""
  assert isinstance(weights.model, schema.ViT)
  leaves, lines = _patches(leaves, model)
  old, rows = weights.model, (weights.model.num_first, model.num_first)
  if not isinstance(model.positions, schema.Learned) or model.positions.at is not schema.PositionsAt.STEM:
    return _fixed(leaves, model, weights, lines)
  grids = [(px[0] // s.patch, px[1] // s.patch)
           for s, px in ((old, weights.preprocess.image_px), (model, target.image_px))]
  if POSITIONS in leaves:
    own_grid = infer.grid(leaves[POSITIONS].shape[1] - rows[0], old.patch, weights.preprocess.image_px)
    first, patches = leaves[POSITIONS][0, :rows[0]], leaves[POSITIONS][0, rows[0]:]
  elif isinstance(old.positions, SinCos):
    own_grid, first = grids[0], np.zeros((rows[0], old.width), np.float32)
    patches = resize.fixed(old.positions, own_grid, old.width)
    lines.append(Line(POSITIONS, 'resized', f'from the fixed {old.positions.frequencies.value} ones of the weights'))
  else:
    return leaves, lines
  how = model.positions.resize
  more, less = (old.pool, model.pool) if rows[0] > rows[1] else (model.pool, old.pool)
  tokens = ' and '.join(name for name, is_extra in (
      ('class token', more.class_token and not less.class_token),
      ('distillation token', more.distillation and not less.distillation)) if is_extra)
  rule = [f'without the rows of {tokens}' if rows[0] > rows[1] else f'zeros for {tokens}'] if rows[0] != rows[1] else []
  if own_grid != grids[1]:
    patches = resize.positions(patches, own_grid, grids[1], how)
    rule.append(f'{own_grid[0]} x {own_grid[1]} to {grids[1][0]} x {grids[1][1]} tokens, {how.value}')
  kept = np.zeros((rows[1], first.shape[1]), np.float32)
  kept[:min(rows)] = first[:min(rows)]
  leaves = {**leaves, POSITIONS: np.concatenate([kept, patches])[None]}
  return leaves, lines + ([Line(POSITIONS, 'resized' if own_grid != grids[1] else 'folded', '; '.join(rule))]
                          if rule else [])


def _fixed(leaves: Leaves, model: schema.ViT, weights: Weights, lines: list[Line]) -> tuple[Leaves, list[Line]]:
  """Returns the leaves without a position table that equals the run's fixed one; MAE's files contain it."""
  if not isinstance(model.positions, SinCos) or POSITIONS not in leaves:
    return leaves, lines
  assert isinstance(weights.model, schema.ViT)
  h, w = (px // weights.model.patch for px in weights.preprocess.image_px)
  table, first = resize.fixed(model.positions, (h, w), model.width), weights.model.num_first
  own = leaves[POSITIONS][0, first:]
  if own.shape != table.shape or np.abs(own - table).max() > 1e-4 or np.any(leaves[POSITIONS][0, :first]):
    return leaves, lines
  what = f'the same as the fixed {model.positions.frequencies.value} ones of the run'
  return ({name: leaf for name, leaf in leaves.items() if name != POSITIONS},
          [*lines, Line(POSITIONS, 'dropped', what)])


def _patches(leaves: Leaves, model: schema.Model) -> tuple[Leaves, list[Line]]:
  """Returns the leaves with a patch kernel of the run's patch size, if patches are cut from the image itself."""
  stem, new = getattr(model, 'stem', schema.PatchStem()), getattr(model, 'patch', 0)
  kernel = leaves.get(STEM)
  if kernel is None or kernel.shape[2] != 3 or not isinstance(stem, schema.PatchStem) or kernel.shape[0] == new:
    return leaves, []
  return ({**leaves, STEM: resize.patches(kernel, new)},
          [Line(STEM, 'resized', f'patches of {kernel.shape[0]} to {new} px, by pseudo-inverse')])


def _channels(leaves: Leaves, wanted: Leaves) -> tuple[Leaves, list[Line]]:
  """Returns the leaves with kernels of RGB images for the channels of the run, if it has others."""
  found = {name: new.shape[2] for name, leaf in leaves.items() if (new := wanted.get(name)) is not None
           and leaf.ndim == new.ndim == 4 and leaf.shape[2] == RGB != new.shape[2]
           and leaf.shape[:2] == new.shape[:2] and leaf.shape[3] == new.shape[3]}
  return ({**leaves, **{name: resize.channels(leaves[name], num) for name, num in found.items()}},
          [Line(name, 'resized', '3 channels to 1: their sum' if num == 1 else
                f'3 channels to {num}: repeated, times 3 / {num}') for name, num in found.items()])


def _grown(leaves: Leaves, weights: Weights, target: Target) -> tuple[Leaves, list[Line]]:
  """Returns the leaves of a Mixer for an image whose sides are integer multiples of the original ones."""
  assert isinstance(weights.model, schema.Mixer) and isinstance(target.model, schema.Mixer)
  grid, new = ((px[0] // model.patch, px[1] // model.patch) for model, px in (
      (weights.model, weights.preprocess.image_px), (target.model, target.image_px)))
  times = new[0] // grid[0], new[1] // grid[1]
  if grid == new or (grid[0] * times[0], grid[1] * times[1]) != new:
    return leaves, []  # the difference is reported with all others
  backbone = trees.unflatten({name.removeprefix(BACKBONE): leaf for name, leaf in leaves.items()
                              if name.startswith(BACKBONE)})
  grown = {BACKBONE + name: np.asarray(leaf) for name, leaf in trees.flatten(mixer.grow(backbone, grid, times=times)
                                                                             ).items()}
  rule = f'{times[0]} x {times[1]} copies on the diagonal, for {new[0]} x {new[1]} tokens'
  return {**leaves, **grown}, [Line(name, 'resized', rule) for name in grown if grown[name].shape != leaves[name].shape]


def _dropped(leaves: Leaves, wanted: Leaves, weights: Weights, target: Target) -> tuple[Leaves, list[Line]]:
  """Returns the leaves without those that a rule drops for this run."""
  heads = r'(head|head_dist)(/.*)?'
  rules = [(r'decoder/.*|mask_token', 'the run reconstructs no images'),
           (r'((patch_)?projector|aux|predict|text|logits)(/.*)?', 'of another objective'),
           (r'backbone/cls', 'the run pools without a class token'),
           (r'backbone/dist|head_dist/.*', 'the run has no distillation token'),
           (r'backbone/pool/.*', 'the run pools without attention'),
           (r'head/pre_logits/.*', 'the run has a linear head' if 'head/kernel' in wanted else 'the run has no head'),
           (heads, 'the run has no head')]
  lines = [Line(name, 'dropped', next(rule for pattern, rule in rules if re.fullmatch(pattern, name)))
           for name in leaves if name not in wanted and any(re.fullmatch(p, name) for p, _ in rules)]
  own = [name for name in wanted if name.startswith(('head/', 'head_dist/'))]
  keeps_head = target.class_names is None or (weights.class_names == target.class_names and bool(own) and all(
      name in leaves and leaves[name].shape == wanted[name].shape for name in own))
  if any(re.fullmatch(heads, name) for name in wanted) and not keeps_head:  # which is incomplete, or of other classes
    gone = {line.name for line in lines}
    rule = 'a new head: it has another form'
    if not weights.class_names:
      rule = f'a new head: the {weights.num_classes:,} classes of the weights have no names'
    elif target.class_names is not None and weights.class_names != target.class_names:
      rule = f'a new head: {weights.num_classes:,} other classes than the {len(target.class_names):,} of the run'
    lines += [Line(name, 'dropped', rule) for name in leaves if re.fullmatch(heads, name) and name not in gone]
  gone = {line.name for line in lines}
  return {name: leaf for name, leaf in leaves.items() if name not in gone}, lines


def preprocessing_differs(weights: Weights, recipe: schema.Recipe) -> list[str]:
  """Returns one sentence for each difference between the run's preprocessing and that of the weights."""
  p = weights.preprocess
  if weights.channels != recipe.channels:
    return []  # the statistics of other channels
  pairs = {'mean': (p.mean, tuple(recipe.mean)), 'std': (p.std, tuple(recipe.std))}
  return [f'data.recipe.{name}: expected {own}, as for the weights, got {now}. Set '
          f'--config.data.recipe.{name}={",".join(map(str, own))}.' for name, (own, now) in pairs.items()
          if not np.allclose(own, now, atol=1e-3)]
