"""Muon against NumPy float64, singular values, and optax; and that the mesh does not change its bits."""
from __future__ import annotations

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.optim import masks, muon, optimizers

LENGTHS = Lengths(num_examples=370, batch_size=37, total_steps=100)
F32 = schema.Muon(dtype=schema.DType.F32)
SHAPES = {'backbone/blocks/attn/query/kernel': (2, 12, 2, 4), 'backbone/blocks/attn/query/bias': (2, 2, 4),
          'backbone/blocks/attn/out/kernel': (2, 2, 4, 12), 'backbone/blocks/mlp/up/kernel': (2, 12, 40),
          'backbone/blocks/mlp/down/kernel': (2, 40, 12), 'head/kernel': (12, 7), 'head/bias': (7,)}
MATRIX = {'backbone/blocks/attn/query/kernel': (12, 8), 'backbone/blocks/attn/out/kernel': (8, 12),
          'backbone/blocks/mlp/up/kernel': (12, 40), 'backbone/blocks/mlp/down/kernel': (40, 12)}


def tree(seed: int) -> dict[str, object]:
  rng = np.random.default_rng(seed)
  return trees.unflatten({k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()})


def updates(config: schema.Muon, num_steps: int) -> dict[str, np.ndarray]:
  """The last of some updates, before learning rate and decay."""
  transformation = muon.muon(config, matrices=masks.find_matrices(tree(0)))
  state, update = transformation.init(tree(0)), jax.jit(transformation.update)
  for step in range(num_steps):
    found, state = update(tree(step), state)
  return {k: np.asarray(v, np.float64) for k, v in trees.flatten(found).items()}


def iterate(x: np.ndarray, polynomials: tuple[tuple[float, float, float], ...]) -> np.ndarray:
  """U p(S) V^T by a decomposition instead of products of matrices."""
  u, s, v = np.linalg.svd(x / np.linalg.norm(x), full_matrices=False)
  for a, b, c in polynomials:
    s = a * s + b * s**3 + c * s**5
  return (u * s) @ v


@pytest.mark.parametrize('scale', schema.MuonScale)
@pytest.mark.parametrize('polynomials', schema.NewtonSchulz)
def test_an_update_is_the_polynomial_of_the_singular_values_of_each_layer(
    polynomials: schema.NewtonSchulz, scale: schema.MuonScale) -> None:
  config = dataclasses.replace(F32, polynomials=polynomials, scale=scale, momentum=.8)
  got = updates(config, 3)
  for name, (rows, columns) in MATRIX.items():
    for layer in range(2):
      grads = [np.asarray(trees.flatten(tree(step))[name][layer], np.float64).reshape(rows, columns)
               for step in range(3)]
      mean = .2 * (.8**2 * grads[0] + .8 * grads[1] + grads[2])
      want = iterate(.8 * mean + .2 * grads[2], muon.POLYNOMIALS[polynomials])
      want *= .2 * max(rows, columns)**.5 if scale is schema.MuonScale.RMS else max(1, columns / rows)**.5
      np.testing.assert_allclose(got[name][layer].reshape(rows, columns), want, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(('polynomials', 'least', 'most'), [('keller', .68, 1.14), ('dion', .97, 1.04)])
def test_singular_values_become_about_one(polynomials: str, least: float, most: float) -> None:
  x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 48)), jnp.float32)
  values = np.linalg.svd(muon.newton_schulz(x, muon.POLYNOMIALS[schema.NewtonSchulz(polynomials)]), compute_uv=False)
  assert least < values.min() and values.max() < most
  assert not np.asarray(muon.newton_schulz(0. * x, muon.POLYNOMIALS[schema.NewtonSchulz.KELLER])).any()


def test_the_orthogonal_mean_of_ten_gradients_is_that_of_optax() -> None:
  """Without the look ahead: optax corrects its two terms for their start at zero, each by a factor of its own."""
  names = [k for k, (rows, _) in MATRIX.items() if len(SHAPES[k]) == 3]
  theirs = optax.contrib.scale_by_muon(
      nesterov=False, beta=.95, eps=0., weight_dimension_numbers=lambda tree: jax.tree.map(
          lambda _: optax.contrib.MuonDimensionNumbers(0, -1), tree))
  means = {k: jnp.zeros_like(trees.flatten(tree(0))[k][0]) for k in names}
  state = theirs.init(means)
  for step in range(10):
    grads = {k: trees.flatten(tree(step))[k][0] for k in names}
    want, state = theirs.update(grads, state)
    means = {k: .95 * means[k] + .05 * grads[k] for k in names}
  for k in names:
    is_tall = means[k].shape[0] > means[k].shape[1]
    got = muon.newton_schulz(means[k].T if is_tall else means[k], muon.POLYNOMIALS[schema.NewtonSchulz.KELLER])
    np.testing.assert_allclose(got.T if is_tall else got, want[k], atol=5e-5, err_msg=k)


def test_what_is_no_matrix_of_a_block_moves_as_by_adamw() -> None:
  got = updates(F32, 3)
  adam = optax.scale_by_adam(.9, .95, 1e-8)
  rest = {k: v for k, v in trees.flatten(tree(0)).items() if k not in MATRIX}
  state = adam.init(rest)
  for step in range(3):
    want, state = adam.update({k: trees.flatten(tree(step))[k] for k in rest}, state)
  for k in rest:
    np.testing.assert_allclose(got[k], want[k], rtol=1e-5, err_msg=k)


def test_the_root_mean_square_of_an_update_is_that_of_adamw() -> None:
  assert .15 < np.sqrt(np.square(updates(F32, 1)['backbone/blocks/mlp/up/kernel']).mean()) < .25


def test_gradients_that_are_not_finite_leave_the_state() -> None:
  transformation = muon.muon(F32, matrices=masks.find_matrices(tree(0)))
  _, before = transformation.update(tree(0), transformation.init(tree(0)))
  bad = jax.tree.map(lambda x: x * jnp.nan, tree(1))
  _, after = jax.jit(transformation.update)(bad, before, ok=jnp.asarray(False))
  for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    np.testing.assert_array_equal(a, b)


def test_patterns_of_what_is_no_matrix_are_refused() -> None:
  def build(*matrices: str) -> object:
    config = dataclasses.replace(F32, matrices=matrices)
    return optimizers.build(config, lambda step: jnp.asarray(.1), lengths=LENGTHS).init(tree(0))
  with pytest.raises(UserError, match=r"optimizer.matrices: expected patterns of matrices, got 'head/bias'"):
    build('head/.*')
  with pytest.raises(UserError, match=r"optimizer.matrices: 'block/.*' matches no parameter"):
    build('block/.*')


def test_patterns_may_name_what_nothing_states_to_be_a_matrix() -> None:
  """Such as the adapters of LoRA: the last axis is the output."""
  grads = {'blocks': {'mlp': {'up': {'lora_a': jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 3)))}}}}
  config = dataclasses.replace(F32, matrices=('.*/lora_a',))
  transformation = muon.muon(config, matrices={})
  found, _ = transformation.update(grads, transformation.init(grads))
  for layer in np.asarray(found['blocks']['mlp']['up']['lora_a'], np.float64):
    values = np.linalg.svd(layer / (.2 * 12 ** .5), compute_uv=False)
    assert np.all(np.abs(values - 1.) < .35)


def test_each_matrix_of_a_stack_of_experts_is_made_orthogonal() -> None:
  experts = {'backbone/blocks/mlp/experts': (2, 3, 12, 20)}  # two layers of three experts
  rng = np.random.default_rng(0)
  grads = trees.unflatten({k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in experts.items()})
  transformation = muon.muon(F32, matrices={'backbone/blocks/mlp/experts': (1, 1)})
  found, _ = transformation.update(grads, transformation.init(grads))
  got = np.asarray(found['backbone']['blocks']['mlp']['experts'], np.float64)
  for at in np.ndindex(2, 3):
    x = .0975 * np.asarray(grads['backbone']['blocks']['mlp']['experts'][at], np.float64)
    want = .2 * 20**.5 * iterate(x, muon.POLYNOMIALS[schema.NewtonSchulz.KELLER])
    np.testing.assert_allclose(got[at], want, atol=2e-5)


@pytest.mark.parametrize('length', ['3 steps', '100 %'])
def test_matrices_may_be_frozen(length: str) -> None:
  rules = (schema.PathRule('backbone/.*', frozen_until=length),)
  frozen = optimizers.build(dataclasses.replace(F32, rules=rules), lambda step: jnp.asarray(.1), lengths=LENGTHS)
  plain = optimizers.build(F32, lambda step: jnp.asarray(.1), lengths=LENGTHS)
  params, update = tree(0), jax.jit(frozen.update)
  state = frozen.init(params)
  for step in range(4):
    found, state = update(tree(step), state, params, step=jnp.asarray(step), grad_norm=jnp.ones(()))
    moved = {name for name, u in trees.flatten(found).items() if np.any(u)}
    assert moved == ({'head/kernel', 'head/bias'} if step < 3 or length == '100 %' else set(SHAPES))
  if length == '3 steps':
    first, _ = plain.update(tree(3), plain.init(params), params, step=jnp.asarray(0), grad_norm=jnp.ones(()))
    chex.assert_trees_all_close(found['backbone'], first['backbone'], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('shape', [(8, 1, 1), (2, 4, 1), (1, 2, 4), (2, 2, 2)])
def test_the_mesh_does_not_change_a_bit(shape: tuple[int, int, int]) -> None:
  """A matrix is made orthogonal on one device, by the same operations."""
  x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 16, 48)), jnp.float32)
  tree_of = {'blocks': {'up': {'kernel': x}, 'down': {'kernel': x.swapaxes(1, 2)}}}
  transformation = muon.muon(F32, matrices=masks.find_matrices(tree_of))
  alone, _ = jax.jit(transformation.update)(tree_of, transformation.init(tree_of))
  mesh = programs.mesh(schema.Mesh(*shape))
  spec = jax.sharding.PartitionSpec(None, 'fsdp', 'tensor')
  placed = jax.device_put(tree_of, jax.sharding.NamedSharding(mesh, spec))
  with jax.sharding.set_mesh(mesh):
    together, _ = jax.jit(transformation.update)(placed, transformation.init(placed))
  for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(('shape', 'want'), [((1, 8, 1), {'all-to-all'}), ((1, 4, 2), {'all-to-all'}),
                                             ((2, 4, 1), {'all-to-all', 'all-gather'}), ((8, 1, 1), {'all-gather'})])
def test_matrices_are_exchanged_and_sent_whole_only_along_data(shape: tuple[int, int, int], want: set[str]) -> None:
  """Gathering each matrix on every device would send `fsdp * tensor` times as much."""
  mesh = programs.mesh(schema.Mesh(*shape))
  at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, 'fsdp', 'tensor'))
  tree_of = {'blocks': {name: {'kernel': jax.ShapeDtypeStruct((24, 16, 32), jnp.float32, sharding=at)}
                        for name in ('up', 'gate')}}
  transformation = muon.muon(F32, matrices=masks.find_matrices(tree_of))
  state = muon.MuonState(tree_of, jax.eval_shape(transformation.init, tree_of).rest)
  with jax.sharding.set_mesh(mesh):
    placed = jax.tree.map(lambda x: x.sharding, tree_of)
    compiled = jax.jit(transformation.update, out_shardings=(placed, None)).lower(tree_of, state).compile()
  names = 'all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute'
  assert set(re.findall(rf' ({names})(?:-start)?\(', compiled.as_text())) == want
