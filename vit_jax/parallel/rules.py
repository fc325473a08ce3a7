"""Where every parameter lies on the mesh: a table of path rules, outside the models.

Strict both ways: a parameter without a rule and a rule that decides nothing are errors. Optimiser state,
averages and teachers follow the parameter whose path they end in.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.config import schema
from vit_jax.config.schema import Pool, Positions, PositionsAt
from vit_jax.core import trees
from vit_jax.core.types import PyTree

Rule = tuple[str, tuple[str | None, ...]]

VIT: tuple[Rule, ...] = (
    ('backbone/stem/kernel', (None, None, None, 'fsdp')),                              # [P, P, 3, D]
    ('backbone/blocks/(.*/)?attn/(query|key|value)/kernel', (None, 'fsdp', 'tensor', None)),  # [L, D, A, K]
    ('backbone/blocks/(.*/)?attn/(query|key|value)/bias', (None, 'tensor', None)),            # [L, A, K]
    ('backbone/blocks/(.*/)?attn/out/kernel', (None, 'tensor', None, 'fsdp')),                # [L, A, K, D]
    ('backbone/blocks/(.*/)?mlp/(up|gate)/kernel', (None, 'fsdp', 'tensor')),                 # [L, D, F]
    ('backbone/blocks/(.*/)?mlp/(up|gate)/bias', (None, 'tensor')),                           # [L, F]
    ('backbone/blocks/(.*/)?mlp/down/kernel', (None, 'tensor', 'fsdp')),                      # [L, F, D]
    ('backbone/(cls|positions|stem/bias|norm/.*|blocks/(.*/)?norm[12]/.*|blocks/.*/(out|down)/bias)', ()),
)
"""Megatron's split of attention and MLP over `tensor`, the other side of each matrix over `fsdp`."""

REGISTERS: Rule = ('backbone/registers', ())
POSITIONS_2D: Rule = ('backbone/positions/(row|column)', ())
POSITIONS_IN_BLOCKS: Rule = ('backbone/blocks/positions(/(row|column))?', ())
RELATIVE: Rule = ('backbone/blocks/attn/relative', (None, None, 'tensor', None))  # [L, 2N - 1, A, K]
QK_NORM: Rule = ('backbone/blocks/(.*/)?attn/(query|key)_norm/(scale|bias)', ())
LAYER_SCALE: Rule = ('backbone/blocks/(.*/)?scale[12]', ())
POOL: tuple[Rule, ...] = (
    ('backbone/pool/attn/(query|key|value)/kernel', ('fsdp', 'tensor', None)),  # [D, A, K]
    ('backbone/pool/attn/(query|key|value)/bias', ('tensor', None)),            # [A, K]
    ('backbone/pool/attn/out/kernel', ('tensor', None, 'fsdp')),                # [A, K, D]
    ('backbone/pool/mlp/up/kernel', ('fsdp', 'tensor')),                        # [D, F]
    ('backbone/pool/mlp/up/bias', ('tensor',)),                                 # [F]
    ('backbone/pool/mlp/down/kernel', ('tensor', 'fsdp')),                      # [F, D]
    ('backbone/pool/(probe|norm/.*|.*/(out|down)/bias)', ()),
)


def vit(model: schema.ViT) -> list[Rule]:
  """The rules of a ViT: those of all, and those of its options."""
  is_learned2d, in_blocks = model.positions is Positions.LEARNED2D, model.positions_at is PositionsAt.LAYERS
  optional = {
      REGISTERS: model.registers > 0, QK_NORM: model.qk_norm, LAYER_SCALE: model.layer_scale > 0,
      POSITIONS_2D: is_learned2d and not in_blocks, POSITIONS_IN_BLOCKS: in_blocks,
      RELATIVE: model.positions is Positions.RELATIVE, **dict.fromkeys(POOL, model.pool is Pool.MAP)}
  return [*VIT, *(rule for rule, is_used in optional.items() if is_used)]


HEAD: tuple[Rule, ...] = (
    ('head/kernel', ('fsdp', 'tensor')),  # [D, C]
    ('head/bias', ('tensor',)),           # [C]
)
PRE_LOGITS: tuple[Rule, ...] = (
    ('head/pre_logits/kernel', ('fsdp', 'tensor')),  # [D, D]
    ('head/pre_logits/bias', ('tensor',)),           # [D]
)


def param_specs(params: PyTree, rules: Sequence[Rule], mesh: Mesh) -> PyTree:
  """A PartitionSpec for every parameter.

  An axis that does not divide its dimension is left out: that dimension stays whole.
  """
  matched = trees.match_rules(params, [(pattern, _Spec(spec)) for pattern, spec in rules], what='sharding')
  return jax.tree.map(lambda spec, leaf: _fit(spec.axes, leaf.shape, mesh), matched, params,
                      is_leaf=lambda x: isinstance(x, _Spec))


class _Spec:
  """A spec as one leaf, so that trees of specs are not taken apart."""

  def __init__(self, axes: tuple[str | None, ...]):
    self.axes = axes


def _fit(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  assert len(axes) in (0, len(shape)), f'spec {axes} for an array of shape {shape}'
  return PartitionSpec(*(axis if axis and size % mesh.shape[axis] == 0 and mesh.shape[axis] > 1 else None
                         for axis, size in zip(axes, shape, strict=False)))


def follow_specs(tree: PyTree, params: PyTree, specs: PyTree) -> PyTree:
  """Specs for optimiser state or `extra`.

  A leaf whose path ends in a parameter's path and has its shape takes that parameter's spec; anything
  else (counters, centres, running statistics) stays whole on every device.
  """
  by_name = {name: (leaf.shape, spec) for (name, leaf), spec in zip(
      trees.flatten(params).items(),
      jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)), strict=True)}

  def follow(name: str, leaf: Any) -> PartitionSpec:
    parts = name.split('/')
    for i in range(len(parts)):
      found = by_name.get('/'.join(parts[i:]))
      if found and found[0] == leaf.shape:
        return found[1]
    return PartitionSpec()

  return trees.map_named(follow, tree)


def shardings(specs: PyTree, mesh: Mesh) -> PyTree:
  """NamedSharding for each PartitionSpec."""
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs,
                      is_leaf=lambda x: isinstance(x, PartitionSpec))


def bytes_per_device(tree: PyTree, specs: PyTree, mesh: Mesh) -> int:
  """Bytes that one device holds of a tree laid out by `specs`."""
  placed = shardings(specs, mesh)
  sizes = jax.tree.map(lambda x, s: int(np.prod(s.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize,
                       tree, placed)
  return sum(jax.tree.leaves(sizes))
