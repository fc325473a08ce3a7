"""Which parameters are matrices is stated where they are made, and the optimizers go by it and not by names."""
from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core import axes, trees
from vit_jax.core.errors import UserError
from vit_jax.models.layers import param
from vit_jax.optim import optimizers

LENGTHS = Lengths(num_examples=100, batch_size=10, total_steps=10)
EXPERTS = 'blocks/mlp/experts'


class Experts(nn.Module):
  """A layer of three experts, none of whose parameters is called `kernel`."""
  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    matrices = param(self, 'experts', nn.initializers.normal(), (3, x.shape[-1], 5), (None, 'embed', 'mlp'),
                     matrix=(1, 1))
    gains = param(self, 'gains', nn.initializers.ones, (3, 5), (None, 'mlp'))
    return (jnp.einsum('bd,edf->ebf', x, matrices) * gains[:, None]).sum(0)


def init(module: type[nn.Module] = Experts) -> object:
  """Returns the parameters of two layers."""
  def layer(key: jax.Array) -> object:
    return {'mlp': module().init(key, jnp.ones((1, 4)))['params']}

  return {'blocks': jax.vmap(layer)(jax.random.split(jax.random.key(0), 2))}


def moved(settings: optimizers.Kind) -> dict[str, np.ndarray]:
  """Returns by how much each parameter moves in a step of learning rate 1 with these gradients."""
  params, matrices = init(), axes.matrices(axes.trace(init)[1])
  optimizer = optimizers.build(settings, lambda step: jnp.ones(()), lengths=LENGTHS)
  grads = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32), params)
  updates, _ = optimizer.update(grads, optimizer.init(params, matrices), params, step=jnp.asarray(0),
                                grad_norm=jnp.ones(()), matrices=matrices)
  return {name: np.asarray(leaf, np.float64) for name, leaf in trees.flatten(updates).items()}


def test_a_matrix_is_stated_where_a_parameter_is_made() -> None:
  assert axes.matrices(axes.trace(init)[1]) == {EXPERTS: (1, 1)}
  assert axes.matrices(axes.trace(lambda: init(nn.remat(Experts)))[1]) == {EXPERTS: (1, 1)}
  assert axes.trace(init)[1]['blocks']['mlp']['experts'].names == ('layers', None, 'embed', 'mlp')


@pytest.mark.parametrize('matrix', [(1, 0), (2, 2)])
def test_a_matrix_has_inputs_and_outputs_among_the_axes_of_its_parameter(matrix: tuple[int, int]) -> None:
  with pytest.raises(UserError, match=r'matrix: expected numbers of input and output axes of a parameter of shape'):
    axes.labelled(jnp.ones((2, 3, 4)), (None, None, None), matrix)


def test_weight_decay_is_of_all_matrices_whatever_their_names() -> None:
  params = {name: np.asarray(leaf) for name, leaf in trees.flatten(init()).items()}
  plain, decayed = (moved(schema.Sgd(weight_decay=decay, momentum=0., decay_by=schema.DecayBy.LR))
                    for decay in (0., .1))
  np.testing.assert_allclose(decayed[EXPERTS] - plain[EXPERTS], -.1 * params[EXPERTS], atol=1e-6)
  np.testing.assert_array_equal(decayed['blocks/mlp/gains'], plain['blocks/mlp/gains'])


def test_lars_has_a_trust_ratio_for_each_expert() -> None:
  params = np.asarray(trees.flatten(init())[EXPERTS], np.float64)
  got, plain = (moved(kind)[EXPERTS] for kind in (
      schema.Lars(momentum=0., trust_coefficient=1.), schema.Sgd(momentum=0.)))
  norm = lambda x: np.sqrt((x ** 2).sum((2, 3), keepdims=True))
  np.testing.assert_allclose(got, plain * norm(params) / norm(plain), rtol=1e-5)


def test_adaptive_clipping_goes_by_the_outputs_of_each_expert() -> None:
  params = np.asarray(trees.flatten(init())[EXPERTS], np.float64)
  got, plain = (moved(schema.Sgd(momentum=0., clip_adaptive=ratio))[EXPERTS] for ratio in (.01, 0.))
  norm = lambda x: np.sqrt((x ** 2).sum(2, keepdims=True))
  limit = .01 * np.maximum(norm(params), 1e-3)
  np.testing.assert_allclose(got, plain * np.minimum(1., limit / norm(plain)), rtol=1e-5)


def test_muon_takes_the_experts_of_all_layers_as_matrices() -> None:
  got = moved(schema.Muon(dtype=schema.DType.F32, scale=schema.MuonScale.SHAPE))[EXPERTS]
  for at in np.ndindex(2, 3):
    assert np.all(np.abs(np.linalg.svd(got[at], compute_uv=False) - 1.) < .35), at
