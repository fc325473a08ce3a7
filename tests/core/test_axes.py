"""Logical axes survive what creates parameters, and are no part of the compiled program."""
from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from vit_jax.core import axes
from vit_jax.core.axes import labelled
from vit_jax.core.errors import UserError
from vit_jax.models.layers import param


class Norm(nn.Module):
  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return x * param(self, 'scale', nn.initializers.ones, (x.shape[-1],), ('embed',))[None]


class Remat(nn.Module):
  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return nn.remat(Norm)(name='norm')(x)


def names(function: Any, *args: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf.names, axes.trace(function, *args)[1])


def drawn(key: jax.Array) -> dict[str, jax.Array]:
  return {'kernel': labelled(jax.random.normal(key, (3, 4)), ('embed', 'mlp')),
          'bias': labelled(jnp.zeros(4), ('mlp',))}


def test_a_stack_of_layers_has_one_more_axis_in_front() -> None:
  found = names(lambda: jax.vmap(drawn)(jax.random.split(jax.random.key(0), 5)))
  assert found == {'kernel': ('layers', 'embed', 'mlp'), 'bias': ('layers', 'mlp')}


def test_a_stack_along_another_axis_has_its_axes_in_order() -> None:
  def last(key: jax.Array) -> jax.Array:
    return labelled(jnp.stack([jax.random.normal(key, (3,)), jnp.zeros(3)]), (None, 'heads'))

  assert names(lambda: jax.vmap(last)(jax.random.split(jax.random.key(0), 5))) == ('layers', None, 'heads')
  assert names(lambda: jax.vmap(last, out_axes=2)(jax.random.split(jax.random.key(0), 5))) == (None, 'heads', 'layers')


def test_axes_survive_rematerialized_modules_and_compiled_functions() -> None:
  assert names(lambda: Remat().init(jax.random.key(0), jnp.ones((1, 6)))) == {'params': {'norm': {'scale': ('embed',)}}}
  assert names(jax.jit(drawn), jax.random.key(0)) == {'kernel': ('embed', 'mlp'), 'bias': ('mlp',)}


def test_what_was_computed_from_a_parameter_has_no_axes() -> None:
  assert names(lambda: (jnp.zeros(3), labelled(jnp.zeros(3), ('mlp',)) + 1.)) == (None, None)


def test_the_last_axes_that_are_stated_count() -> None:
  assert names(lambda: labelled(labelled(jnp.zeros(3), ('mlp',)), ('embed',))) == ('embed',)


def test_the_compiled_program_and_the_values_are_those_without_axes() -> None:
  def plain(key: jax.Array) -> dict[str, jax.Array]:
    return {'kernel': jax.random.normal(key, (3, 4)), 'bias': jnp.zeros(4)}

  texts = [jax.jit(jax.vmap(f)).lower(jax.random.split(jax.random.key(0), 5)).as_text() for f in (drawn, plain)]
  assert texts[0] == texts[1].replace('@jit_plain', '@jit_drawn')
  assert isinstance(drawn(jax.random.key(0))['kernel'], jax.Array)


def test_a_later_program_of_the_same_function_is_not_traced_again() -> None:
  count = 0

  def init() -> jax.Array:
    nonlocal count
    count += 1
    return labelled(jnp.zeros(3), ('mlp',))

  axes.trace(init)
  jax.jit(init, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))()
  assert count == 1


def test_names_may_stand_for_the_axes_of_another_parameter() -> None:
  labels = {'kernel': axes.Axes(('layers', 'embed', 'mlp')),
            'lora_a': axes.Axes(('layers', *axes.of_dimensions('kernel', [1]), 'rank'))}
  assert axes.resolved(labels)['lora_a'].names == ('layers', 'embed', 'rank')


def test_axes_of_another_number_are_refused_where_the_parameter_is_created() -> None:
  with pytest.raises(UserError, match=r"expected 2 for a parameter of shape \(3, 4\), got \('embed',\)"):
    labelled(jnp.zeros((3, 4)), ('embed',))
