from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.core import trees
from vit_jax.core.types import Array, PyTree

TREE = {'a': {'kernel': np.arange(6, dtype=np.float32).reshape(2, 3)}, 'blocks': {'b': np.ones((3, 2), np.float32)}}


def test_names_join_keys_and_come_back() -> None:
  flat = trees.flatten(TREE)
  assert list(flat) == ['a/kernel', 'blocks/b']
  assert jax.tree.all(jax.tree.map(np.array_equal, trees.unflatten(flat), TREE))


def test_a_function_is_traced_once_for_leaves_of_equal_shapes_and_the_program_stays_the_same() -> None:
  tree = {'a': np.ones((2, 3), np.float32), 'b': np.ones((2, 3), np.float32), 'c': np.ones(4, np.float32)}
  calls = []

  def program(map_leaves: Callable[..., Any], factor: Array, tree: PyTree) -> PyTree:
    def one(x: Array, y: Array) -> Array:
      calls.append(x.shape)
      return x * factor + .1 * y

    return map_leaves(one, tree, tree)

  compiled = jax.jit(program, static_argnums=0)
  texts = [compiled.lower(each, 2., tree).as_text() for each in (trees.map_once, jax.tree.map)]
  assert texts[0] == texts[1] and calls == [(2, 3), (4,), (2, 3), (2, 3), (4,)]


def test_leaves_below_blocks_are_stacked() -> None:
  assert trees.is_stacked('x/blocks/attn/kernel') and not trees.is_stacked('blocks') and not trees.is_stacked('a/b')


def test_difference_names_missing_extra_and_changed_leaves() -> None:
  other = {'a': {'kernel': np.zeros((2, 4), np.float32)}, 'c': np.zeros(1, np.float32)}
  text = trees.difference(TREE, other, found_name='file', wanted_name='model')
  assert '~ a/kernel: float32[2, 3] in file, float32[2, 4] in model' in text
  assert '+ blocks/b float32[3, 2]: only in file' in text and '- c float32[1]: only in model' in text
  assert trees.difference(TREE, TREE, found_name='x', wanted_name='y') == ''


def test_digest_is_the_same_on_the_host_and_for_any_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
  tree = {'x': jnp.arange(64., dtype=jnp.float32).reshape(8, 8), 'y': jnp.ones(16, jnp.bfloat16),
          'z': {'bool': jnp.asarray([True, False]), 'scalar': jnp.asarray(-7), 'byte': jnp.arange(5, dtype=jnp.uint8)}}
  want = trees.digest(tree)
  assert want == trees.digest(jax.device_get(tree))
  monkeypatch.setattr(trees, '_MAX_HOST_ELEMENTS', 0)  # from here on by the devices
  mesh = jax.make_mesh((4, 2), ('a', 'b'))
  assert trees.digest(tree) == want
  for spec in (PartitionSpec('a', 'b'), PartitionSpec('b'), PartitionSpec(None, 'a')):
    placed = {**tree, 'x': jax.device_put(tree['x'], NamedSharding(mesh, spec))}
    assert trees.digest(placed) == want


@pytest.mark.parametrize('dtype', [np.float32, jnp.bfloat16, np.int32, np.uint8, np.bool_])
def test_digest_changes_with_one_bit_a_swap_a_name_or_a_dtype(dtype: type) -> None:
  values = np.array([[0, 1, 1], [0, 0, 1]], dtype)
  tree = {'x': jnp.asarray(values)}
  flipped, swapped = values.copy(), values[::-1].copy()
  flipped[1, 1] = 1
  digests = [trees.digest({'x': jnp.asarray(v)}) for v in (values, flipped, swapped, values.reshape(3, 2))]
  digests += [trees.digest({'z': jnp.asarray(values)}), trees.digest({**tree, 'w': jnp.zeros(1)})]
  assert len(set(digests)) == len(digests)
  assert trees.digest({'x': jnp.asarray(values.copy())}) == digests[0]


def test_digest_tells_minus_zero_and_nan_payloads_apart() -> None:
  zero, minus = jnp.zeros(3), -jnp.zeros(3)
  assert trees.digest({'x': zero}) != trees.digest({'x': minus})
  nan = np.array([0x7fc00000], np.uint32).view(np.float32)
  other = np.array([0x7fc00001], np.uint32).view(np.float32)
  assert trees.digest({'x': jnp.asarray(nan)}) != trees.digest({'x': jnp.asarray(other)})


def test_counts() -> None:
  assert trees.num_elements(TREE) == 12 and trees.num_bytes(TREE) == 48
