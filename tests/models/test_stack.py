"""Tests of running stacked layers: scanned or unrolled, with or without rematerialization."""
from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config import schema
from vit_jax.config.schema import Execution, Remat
from vit_jax.core import trees
from vit_jax.core.types import Array, Key, Params
from vit_jax.models import stack
from vit_jax.models.vit import vit

OTHERS = [(e, r) for e in Execution for r in Remat
          if 'auto' not in (e.value, r.value) and (e, r) != (Execution.UNROLLED, Remat.NONE)]


def loss_of(settings: schema.ViT) -> Callable[[Params, Array], Array]:
  """A scalar that depends on all parameters, with dropout and stochastic depth on."""
  backbone = vit.build(settings, (16, 24))

  def loss(params: Params, image: Array) -> Array:
    key = jax.random.key(7, impl='unsafe_rbg')  # compiles faster than the default
    features, _ = backbone.apply(params, {}, image, train=True, key=key)
    return jnp.sin(features.pooled).sum() + jnp.square(features.tokens).mean()

  return loss


def compiled(settings: schema.ViT) -> Callable[[Params, Array], tuple[Array, Params]]:
  """Value and gradient of the loss."""
  return jax.jit(jax.value_and_grad(loss_of(settings)))


@pytest.fixture(scope='module')
def expected() -> tuple[schema.ViT, Params, Array, Array, Params]:
  settings = schema.ViT(patch=8, width=32, depth=2, heads=4, mlp=schema.Mlp(48), dropout=.1, drop_path=.3)
  image = jax.random.normal(jax.random.key(0), (6, 16, 24, 3))
  shapes, _ = jax.eval_shape(vit.build(settings, (16, 24)).init, jax.random.key(1), image)
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: jax.device_put(np.float32(.2 * rng.normal(size=x.shape))), shapes)
  with jax.numpy_dtype_promotion('strict'), jax.numpy_rank_promotion('raise'):
    value, gradient = compiled(settings)(params, image)
  return settings, params, image, value, gradient


@pytest.mark.slow(reason='4 s each: two networks; how layers are run is below')
@pytest.mark.parametrize('execution, remat', [
    (Execution.SCAN, Remat.NAMES), *(pytest.param(*one, marks=pytest.mark.slow(reason='3 s')) for one in OTHERS
                                     if one != (Execution.SCAN, Remat.NAMES))])
def test_execution_and_remat_change_neither_output_nor_gradient(
    expected: tuple[schema.ViT, Params, Array, Array, Params], execution: Execution, remat: Remat) -> None:
  settings, params, image, value, gradient = expected
  other = dataclasses.replace(settings, execution=execution, remat=remat)
  other_value, other_gradient = compiled(other)(params, image)
  np.testing.assert_allclose(other_value, value, rtol=1e-5)
  for name, leaf in trees.flatten(gradient).items():
    np.testing.assert_allclose(
        trees.flatten(other_gradient)[name], leaf, rtol=1e-3, atol=1e-5, err_msg=name)


WAYS: dict[str, dict[str, object]] = {
    'scan': {'execution': Execution.SCAN, 'remat': Remat.NONE},
    'scan, names': {'execution': Execution.SCAN, 'remat': Remat.NAMES},
    'unrolled, full': {'execution': Execution.UNROLLED, 'remat': Remat.FULL},
    'unrolled, qkv, one full': {'execution': Execution.UNROLLED, 'remat': Remat.QKV, 'full_remat': 1},
    'scan, mlp, two full': {'execution': Execution.SCAN, 'remat': Remat.MLP, 'full_remat': 2},
    'scan by two': {'execution': Execution.SCAN, 'remat': Remat.NONE, 'unroll': 2}}


def through_three_layers(**way: object) -> Callable[[Params, Array, Array], tuple[Array, Params]]:
  """Value and gradient of three layers with the names of a block, a drop-path rate and a key each."""
  def layer(one: Params, x: Array, rate: Array | None, key: Key | None) -> tuple[Array, stack.Sums]:
    hidden = checkpoint_name(jnp.tanh(x @ one['kernel']), 'mlp')
    noise = jax.random.uniform(key, x.shape)
    return checkpoint_name(x + jnp.sin(hidden) * noise * (1. - rate), 'residual'), {'square': jnp.square(hidden).sum()}

  def total(params: Params, x: Array, rates: Array) -> Array:
    keys = jax.random.split(jax.random.key(0, impl='unsafe_rbg'), 3)
    y, sums = stack.run(layer, params, x, ready=lambda p: jax.tree.map(lambda k: 2. * k, p), rates=rates, keys=keys,
                        **way)
    return jnp.square(y).sum() + sums['square']

  return jax.jit(jax.value_and_grad(total))


@functools.cache
def plainly() -> tuple[Params, Array, Array, Array, Params]:
  """Parameters, input and rates of three layers, and what they give one after the other."""
  rng = np.random.default_rng(0)
  params = {'kernel': rng.normal(size=(3, 4, 4)).astype(np.float32)}
  x, rates = rng.normal(size=(5, 4)).astype(np.float32), np.array([.1, .3, .6], np.float32)
  return params, x, rates, *through_three_layers(execution=Execution.UNROLLED, remat=Remat.NONE)(params, x, rates)


@pytest.mark.quick('scan, names', 'unrolled, qkv, one full', 'scan by two', reason='0.4 s each: a program')
@pytest.mark.parametrize('way', WAYS)
def test_layers_are_run_alike_however_they_are_run(way: str) -> None:
  params, x, rates, value, gradient = plainly()
  assert min(float(np.abs(layer).max()) for layer in gradient['kernel']) > .1
  other, found = through_three_layers(**WAYS[way])(params, x, rates)
  # Sums of at most 20 terms, and twice three layers of some ten operations, each rounded by 2^-24.
  np.testing.assert_allclose(other, value, rtol=80 * 2.**-24)
  np.testing.assert_allclose(found['kernel'], gradient['kernel'], rtol=0,
                             atol=80 * 2.**-24 * float(np.abs(gradient['kernel']).max()))


def test_the_gradient_of_unstacking_is_one_concatenation() -> None:
  def loss(tree: Params) -> Array:
    return jnp.stack([i * jnp.sin(layer['w']).sum() for i, layer in enumerate(stack.unstack(tree))]).sum()

  jaxpr = str(jax.make_jaxpr(jax.grad(loss))({'w': jnp.ones((5, 3, 2))}))
  assert jaxpr.count('concatenate[') == 1
  assert 'pad[' not in jaxpr and 'scatter' not in jaxpr and 'dynamic_update_slice' not in jaxpr


def test_unstacking_gives_the_layers_in_order_each_a_stack_of_one() -> None:
  stacked: Params = {'a': jnp.arange(12.).reshape(4, 3), 'b': {'c': jnp.arange(4.)}}
  layers = stack.unstack(stacked)
  assert len(layers) == 4
  for i, layer in enumerate(layers):
    np.testing.assert_array_equal(layer['a'], stacked['a'][i:i + 1])
    np.testing.assert_array_equal(layer['b']['c'], stacked['b']['c'][i:i + 1])


def saved_rows(settings: schema.ViT) -> Counter[int]:
  """Sizes of one row of the activations that autodiff keeps, blocks only: 2 layers less 1 layer."""

  def leaves(depth: int) -> Counter[int]:
    loss = loss_of(dataclasses.replace(settings, depth=depth))
    backbone = vit.build(dataclasses.replace(settings, depth=depth), (16, 24))
    image = jax.ShapeDtypeStruct((6, 16, 24, 3), jnp.float32)
    params, _ = jax.eval_shape(backbone.init, jax.random.key(0), image)
    kept = jax.eval_shape(lambda p, x: jax.vjp(lambda p: loss(p, x), p)[1], params, image)
    rows = 6 * 7  # images times tokens
    return Counter(leaf.size // rows for leaf in jax.tree.leaves(kept) if leaf.shape[:1] == (6,))

  return leaves(2) - leaves(1)


@pytest.mark.quick('Remat.NAMES-rows3', reason='1 s: another program')
@pytest.mark.parametrize('remat, rows', [
    (Remat.FULL, {32: 1}),             # the block's input
    (Remat.MLP, {32: 1, 48: 1}),       # and the MLP pre-activation
    (Remat.QKV, {32: 4, 48: 1}),       # and query, key, value
    (Remat.NAMES, {32: 6, 48: 1}),     # and query, key, value, attention output, residual
])
def test_remat_saves_what_its_name_says_and_nothing_more(
    tiny: schema.ViT, remat: Remat, rows: dict[int, int]) -> None:
  assert saved_rows(dataclasses.replace(tiny, remat=remat, execution=Execution.UNROLLED)) == rows
