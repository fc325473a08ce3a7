"""Layers held apart: names, values, gradients, and that nothing is left of it in a compiled program."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.core import trees, unstacked


def tree() -> dict[str, object]:
  rng = np.random.default_rng(0)
  return {'blocks': {'kernel': jax.device_put(np.float32(rng.normal(size=(3, 5, 7)))), 'bias': jnp.arange(3.)},
          'head': {'kernel': jax.device_put(np.float32(rng.normal(size=(7, 2))))},
          'trained': {'blocks': {'kernel': jnp.ones((3, 2))}}}


def test_joined_is_what_was_split() -> None:
  split = unstacked.split(tree(), but='trained')
  assert [type(x).__name__ for x in (split['blocks']['kernel'], split['trained']['blocks']['kernel'])] == [
      'Layers', 'ArrayImpl']
  assert [x.shape for x in split['blocks']['kernel'].layers] == [(1, 5, 7)] * 3
  joined = unstacked.join(split)
  assert jax.tree.structure(joined) == jax.tree.structure(tree())
  jax.tree.map(np.testing.assert_array_equal, joined, tree())
  again = unstacked.split(split, but='trained')
  assert jax.tree.structure(again) == jax.tree.structure(split)


def test_a_layer_has_the_name_of_its_stack_and_a_number() -> None:
  paths = jax.tree_util.tree_leaves_with_path(unstacked.split({'blocks': tree()['blocks']}))
  assert [(trees.path_name(path), unstacked.numbers(path, leaf)) for path, leaf in paths] == [
      (name, (range(i, i + 1), 3)) for name in ('blocks/bias', 'blocks/kernel') for i in range(3)]
  stacked = jax.tree_util.tree_leaves_with_path({'blocks': {'bias': jnp.arange(3.)}})
  assert unstacked.numbers(*stacked[0]) == (range(3), 3)
  with pytest.raises(AssertionError, match='several leaves of one name'):
    trees.flatten(unstacked.split(tree()))


def test_values_are_repeated_for_each_layer() -> None:
  values = jax.tree.map(lambda x: x.ndim, tree())
  got = unstacked.follow(values, jax.eval_shape(unstacked.split, tree()))
  assert got['blocks']['kernel'].layers == (3, 3, 3) and got['head']['kernel'] == 2


def test_a_model_that_cuts_the_stack_again_copies_nothing() -> None:
  def loss(split: dict[str, object]) -> jax.Array:
    x = jnp.ones((4, 6))
    for kernel in jax.lax.split(unstacked.join(split)['blocks']['kernel'], (1, 1, 1)):
      x = jnp.tanh(x @ kernel[0])
    return x.sum()

  split = unstacked.split({'blocks': {'kernel': jnp.ones((3, 6, 6))}})
  text = jax.jit(jax.grad(loss)).lower(split).compile().as_text()
  assert 'concatenate' not in text and 'f32[3,6,6]' not in text
