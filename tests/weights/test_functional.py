"""A network as a pure function and as an NNX module: the same bits, gradients, steps, shardings and files."""
from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import loaded
import numpy as np
import optax
import pytest
from flax import nnx

import vit_jax.nnx
from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Params
from vit_jax.inspect.model import Model
from vit_jax.models import heads
from vit_jax.objectives.supervised import Supervised
from vit_jax.parallel import mesh as meshes
from vit_jax.weights import inference

IMAGE = np.random.default_rng(0).normal(size=(4, *loaded.PX, 3)).astype(np.float32)
LABEL = np.array([0, 2, 1, 2])


@functools.cache
def network(name: str) -> Model:
  return Model(loaded.weights(name), batch_size=4)


def loss_of(logits: Array | None) -> Array:
  assert logits is not None
  return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(LABEL)).mean()


@pytest.mark.parametrize('name', ['vit', 'deit', 'map', 'bit', 'mixer', 'efficientnet'])
def test_the_function_computes_what_the_model_computes(name: str) -> None:
  model = network(name)
  params, apply = model.functional()
  found = jax.jit(apply)(params, IMAGE)
  images = list(np.random.default_rng(1).integers(0, 256, (4, *loaded.PX, 3), np.uint8))
  normalized = model.normalize(np.stack([model.prepare(image) for image in images]))
  rtol = 1e-5 if name == 'efficientnet' else 0  # its running statistics are constants of the program
  np.testing.assert_allclose(jax.jit(apply)(params, normalized).logits, model.logits(images), rtol=rtol, atol=rtol)
  assert found.logits is not None and found.logits.shape == (4, loaded.CLASSES)
  assert set(params) == {'backbone', 'head'} | ({'head_dist'} if name == 'deit' else set())
  nothing, pooled = model.functional(num_classes=0)
  assert set(nothing) == {'backbone'} and jax.jit(pooled)(nothing, IMAGE).logits is None


def test_a_new_head_is_that_of_the_seed() -> None:
  params, apply = network('deit').functional(num_classes=3, seed=1)
  assert params['head']['kernel'].shape == params['head_dist']['kernel'].shape == (32, 3)
  assert apply(params, IMAGE).logits.shape == (4, 3)  # type: ignore[union-attr]
  again, _ = network('deit').functional(num_classes=3, seed=1)
  assert trees.digest(again) == trees.digest(params)
  np.testing.assert_array_equal(params['backbone']['blocks']['attn']['query']['kernel'],
                                network('deit').weights.params['backbone']['blocks']['attn']['query']['kernel'])


def test_dropout_of_training_depends_on_the_key() -> None:
  found = loaded.weights('vit')
  model = Model(found._replace(model=schema.replaced(found.model, {'dropout': .5})))
  params, apply = model.functional()
  first, other = (jax.jit(apply, static_argnames='train')(params, IMAGE, train=True, key=jax.random.key(k)).logits
                  for k in (0, 1))
  assert not np.array_equal(first, other)
  np.testing.assert_array_equal(jax.jit(apply)(params, IMAGE).logits, jax.jit(network('vit').functional()[1])(
      params, IMAGE).logits)


def test_running_statistics_are_only_evaluated() -> None:
  params, apply = network('efficientnet').functional()
  with pytest.raises(UserError, match='expected a network without BatchNorm for train=True'):
    apply(params, IMAGE, train=True, key=jax.random.key(0))


def sgd_step(params: Params, apply: inference.Function) -> Params:
  gradients = jax.jit(jax.grad(lambda p: loss_of(apply(p, IMAGE, train=True, key=jax.random.key(0)).logits)))(params)
  found: Params = jax.tree.map(lambda p, g: p - .1 * g, params, gradients)
  return found


def test_one_step_is_that_of_the_training_objective() -> None:
  found = loaded.weights('vit')
  params, apply = network('vit').functional()
  objective = Supervised(inference.backbone(found), heads.build(found.head, found.model), num_classes=loaded.CLASSES,
                         loss=schema.Loss.SOFTMAX, label_smoothing=0.)
  batch = {'image': jnp.asarray(IMAGE), 'label': jnp.asarray(LABEL, jnp.int32), 'mask': jnp.ones(4)}

  def loss(p: Params) -> Array:
    return objective.loss(p, {}, batch, jax.random.key(0), jnp.int32(0)).loss.value

  wanted = jax.tree.map(lambda p, g: p - .1 * g, params, jax.jit(jax.grad(loss))(params))
  for name, leaf in trees.flatten(sgd_step(params, apply)).items():
    np.testing.assert_allclose(leaf, trees.flatten(wanted)[name], rtol=1e-6, atol=1e-7, err_msg=name)


def test_the_module_is_the_function_bit_for_bit_and_trains_as_it_does() -> None:
  module = vit_jax.nnx.Network(network('vit'))
  params, apply = network('vit').functional()
  np.testing.assert_array_equal(nnx.jit(lambda n, x: n(x).logits)(module, IMAGE), jax.jit(apply)(params, IMAGE).logits)
  optimizer = nnx.Optimizer(module, optax.sgd(.1), wrt=nnx.Param)

  @nnx.jit
  def train(module: vit_jax.nnx.Network, optimizer: nnx.Optimizer[vit_jax.nnx.Network]) -> None:
    optimizer.update(module, nnx.grad(lambda n: loss_of(n(IMAGE, train=True, key=jax.random.key(0)).logits))(module))

  train(module, optimizer)
  changed = sgd_step(params, apply)
  for name, leaf in trees.flatten(module.pure_params()).items():
    np.testing.assert_allclose(leaf, trees.flatten(changed)[name], rtol=1e-6, atol=1e-7, err_msg=name)
  definition, state = nnx.split(module)
  merged = nnx.merge(definition, state)
  np.testing.assert_array_equal(merged(IMAGE).logits, module(IMAGE).logits)
  assert {'/'.join(map(str, path)) for path, _ in nnx.to_flat_state(state)} == {
      f'params/{name}' for name in trees.flatten(params)}


def test_trained_parameters_become_a_file_and_come_back(tmp_path: pathlib.Path) -> None:
  params, apply = network('vit').functional(num_classes=3)
  trained = jax.tree.map(lambda x: x + .25, params)
  assert network('vit').save(tmp_path / 'x.safetensors', params=trained) == []
  back = vit_jax.load(tmp_path / 'x.safetensors', model='heads=4')
  assert back.weights.num_classes == 3
  assert trees.digest(back.functional()[0]) == trees.digest(trained)
  del trained['backbone']['blocks']['attn']
  with pytest.raises(UserError, match=r'params: expected the parameters of .*, got others:\n  - blocks/attn'):
    network('vit').save(tmp_path / 'y.safetensors', params=trained)
  module = vit_jax.nnx.Network(network('vit'), num_classes=3)
  module.save(tmp_path / 'z.safetensors')
  assert vit_jax.nnx.load(tmp_path / 'z.safetensors', model='heads=4')(IMAGE).logits.shape == (4, 3)


def test_shardings_are_those_of_training_on_any_mesh() -> None:
  params, apply = network('vit').functional()
  found = {}
  for names, sizes in ((('fsdp',), (2,)), (('data', 'tensor'), (2, 2)), (('tensor', 'fsdp'), (2, 2))):
    mesh = jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
    shardings = apply.shardings(mesh)
    placed = jax.device_put(params, shardings)
    np.testing.assert_allclose(jax.jit(apply)(placed, IMAGE).logits, jax.jit(apply)(params, IMAGE).logits, rtol=1e-5,
                               atol=1e-5)
    found[names] = shardings['backbone']['blocks']['mlp']['up']['kernel'].spec
  assert found == {('fsdp',): jax.P(None, 'fsdp', None), ('data', 'tensor'): jax.P(None, None, 'tensor'),
                   ('tensor', 'fsdp'): jax.P(None, 'fsdp', 'tensor')}
  assert set(meshes.AXES) == {'data', 'fsdp', 'tensor'}
  with pytest.raises(UserError, match='mesh: expected the axes data, fsdp, tensor or some of them, got model'):
    apply.shardings(jax.make_mesh((2,), ('model',), axis_types=(jax.sharding.AxisType.Auto,)))


def test_an_image_that_is_no_batch_and_pixels_that_are_not_normalized_are_errors() -> None:
  params, apply = network('vit').functional()
  with pytest.raises(AssertionError, match='rank'):
    apply(params, IMAGE[0])
  with pytest.raises(AssertionError, match='uint8'):
    jax.jit(apply)(params, np.zeros(IMAGE.shape, np.uint8))
