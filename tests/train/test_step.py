"""The train step: masks, numbers that are not finite, norms."""
from __future__ import annotations

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.core.axes import labelled
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Params
from vit_jax.objectives.ema import Ema, Growing
from vit_jax.objectives.supervised import Supervised
from vit_jax.train import diagnose, grad_cache, loop, step
from vit_jax.train.state import TrainState

DATA = programs.batch(size=8)
ONE = programs.MESHES['one']
PLACED = DATA['image'].astype(np.float32)


def task(loss: schema.Loss = schema.Loss.SOFTMAX) -> Supervised:
  return Supervised(fakes.PlainNet(), fakes.LinearHead(), num_classes=7, loss=loss, label_smoothing=0.)


def program(objective: object, settings: schema.Mesh = ONE, *, accumulate: int = 1, data: Batch = DATA,
            optimizer: schema.Sgd | None = None) -> step.Program:
  return programs.build(objective, fakes.normalize, settings, like=data, accumulate=accumulate,
                        optimizer=optimizer)


@pytest.mark.quick('4', reason='1 s: another program')
@pytest.mark.parametrize('accumulate', [1, 4])
def test_masked_rows_change_nothing_even_if_they_are_nan(accumulate: int) -> None:
  rows = 12
  data = {**programs.batch(size=rows), 'mask': np.ones(rows, np.float32)}
  data['mask'][[0, 3, 4, 5]] = 0
  kept = {k: v[data['mask'] > 0] for k, v in data.items()}
  poisoned = {**data, 'image': data['image'].astype(np.float32)}
  poisoned['image'][0] = 3e38
  plain = schema.Sgd(weight_decay=0., clip_norm=0.)  # a limit on the gradient would hide its scale
  got, metrics = programs.run(program(task(), accumulate=accumulate, data=poisoned, optimizer=plain), ONE, poisoned)
  want, _ = programs.run(program(task(), data=kept, optimizer=plain), ONE, kept)
  assert float(metrics.means['loss'].weight) == 8 and bool(metrics.ok)
  programs.assert_close(got.params, want.params)


def test_augmentation_and_loss_have_keys_of_their_own_at_every_step() -> None:
  prepared = step.preparing(lambda batch, key, step: {'key': jax.random.key_data(key)}, 0)
  keys = [(batch['key'], jax.random.key_data(key)) for batch, key in (prepared({}, jnp.asarray(i)) for i in (0, 1))]
  assert len({tuple(one.tolist()) for pair in keys for one in pair}) == 4


class Line:
  """The gradient of its loss is the mean of `x` over the rows that count."""

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    return LossOut(weighted_mean(params['w'] * batch['x'], batch['mask']), {}, {})


def test_the_gradient_is_the_mean_over_the_rows_that_count_for_any_number_of_microbatches() -> None:
  batch = {'x': jnp.arange(8.), 'mask': jnp.array([1., 1., 0., 1., 0., 0., 1., 0.])}
  state = TrainState(jnp.zeros((), jnp.int32), {'w': jnp.ones(())}, {}, {})
  for accumulate in (1, 2, 4, 8):
    _, grads = step._gradients(Line(), state, batch, jax.random.key(0), accumulate)
    assert float(grads['w']) == pytest.approx((0. + 1. + 3. + 6.) / 4., rel=1e-6)


@pytest.mark.quick('Loss.SOFTMAX', reason='1 s: another program')
@pytest.mark.parametrize('loss', schema.Loss)
def test_a_constant_batch_is_learned(loss: schema.Loss) -> None:
  built = program(task(loss))
  _, first = programs.run(built, ONE, DATA)
  _, last = programs.run(built, ONE, DATA, 40)
  assert last.means['loss'].value < .2 * first.means['loss'].value
  assert float(last.means['accuracy'].value) == 1.


def bad_batch() -> Batch:
  data = {**DATA, 'image': DATA['image'].astype(np.float32)}
  data['image'][5] = np.nan
  return data


@pytest.mark.quick('data=8', reason='1 s: another program')
@pytest.mark.parametrize('settings', ['one', 'data=8'])
def test_a_step_that_is_not_finite_updates_nothing_but_the_count(settings: str) -> None:
  mesh, data = programs.MESHES[settings], bad_batch()
  built = program(Ema(task(), Growing(.9)), mesh, data=data)
  before = jax.device_get(built.init_fn())
  state, metrics = programs.run(built, mesh, data)
  assert not bool(metrics.ok) and int(state.step) == 1
  programs.assert_close(state._replace(step=before.step), before, rtol=0, atol=0)
  assert set(step.nonfinite_paths(metrics.norms.grad)) >= {'backbone/kernel', 'head/bias'}
  assert step.nonfinite_paths(metrics.norms.param) == []


class Root:
  """The loss is the root of a sum of weighted pixels: at black its value is 0, and its gradient is not finite."""

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    return {'weight': labelled(jnp.array([2., 1., 2.]), (None,))}, {'seen': jnp.zeros(())}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    return LossOut(weighted_mean(jnp.sqrt(batch['image'].mean((1, 2)) @ params['weight'])), {}, jnp.ones(()))

  def after_update(self, params: Params, extra: Extra, stats: Array, step: Array) -> Extra:
    return {'seen': extra['seen'] + stats}


class Bare(Root):
  """An objective of one's own whose parameter states no axes."""

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    return {'weight': jnp.zeros(3)}, {}


def test_a_parameter_of_any_objective_without_logical_axes_is_refused_with_its_path() -> None:
  with pytest.raises(UserError, match='\n  weight: expected logical axes, got none'):
    programs.build(Bare(), lambda batch, key, step: batch, ONE, like={'image': np.zeros((4, 2, 2, 3), np.float32)})


def test_a_gradient_that_is_not_finite_stops_an_update_although_the_loss_is_finite() -> None:
  black = {'image': np.zeros((4, 2, 2, 3), np.float32)}
  built = programs.build(Root(), lambda batch, key, step: batch, ONE, like=black)
  state, metrics = programs.run(built, ONE, black)
  assert float(metrics.means['loss'].value) == 0. and not np.isfinite(metrics.grad_norm) and not metrics.ok
  assert state.params['weight'].tolist() == [2., 1., 2.] and float(state.extra['seen']) == 0. and state.step == 1
  state, metrics = programs.run(built, ONE, {'image': np.ones((4, 2, 2, 3), np.float32)})
  assert metrics.ok and float(state.extra['seen']) == 1.
  # The gradient is 1 / (2 sqrt(5)) in all three numbers, and the rate .1: in f32, of numbers up to 2.
  assert float(metrics.norms.param['weight']) == pytest.approx(3., rel=1e-6)
  assert float(metrics.norms.update['weight']) == pytest.approx(.1 * np.sqrt(3 / 20), rel=1e-5)
  assert float(metrics.norms.grad['weight']) == pytest.approx(np.sqrt(3 / 20), rel=1e-6)


@pytest.mark.quick('data=8', reason='1 s: another program')
@pytest.mark.parametrize('settings', ['one', 'data=8'])
def test_diagnosis_names_the_example(settings: str) -> None:
  mesh, data = programs.MESHES[settings], bad_batch()
  built = program(task(), mesh, data=data)
  placed = programs.meshes.put_batch(data, programs.mesh(mesh), programs.Shard((0,), 1))
  state, metrics = built.step_fn(built.init_fn(), placed)
  far = 2_999_999_990  # beyond 32 bits, which is all that devices have
  find = diagnose.build(task(), fakes.normalize, 'picture{}'.format,
                        lambda step: np.arange(len(data['image'])) + far + step, mesh=programs.mesh(mesh), seed=0)
  named = f'{far + 5} (index {far + 5})'
  assert find(loop.Done(1, metrics.unpack(), placed, state)) == [f'picture{named}']


def test_norms_are_a_number_a_leaf_and_one_a_layer_for_stacked_leaves() -> None:
  tree = {'blocks': {'k': jnp.arange(24.).reshape(2, 3, 4)}, 'b': jnp.array([3., 4.])}
  got = step._squares(tree)
  assert float(got['b']) == 25 and got['blocks/k'].shape == (2,)
  np.testing.assert_allclose(got['blocks/k'], np.square(np.arange(24.).reshape(2, 12)).sum(-1))
  assert step.nonfinite_paths({'a': np.float32(1), 'b': np.float32(np.inf), 'c': np.array([0, np.nan, 1])}) == [
      'b', 'c (layer 1)']


def test_microbatches_take_turns_so_that_rows_stay_on_their_devices() -> None:
  rows = grad_cache.divided({'index': jnp.arange(12)}, 3)['index']
  assert rows.tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]  # of two devices, each has half of every one


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not() -> None:
  built = [programs.build(task(), fakes.normalize, ONE, like=DATA, seed=seed) for seed in (0, 1)]
  states = [programs.run(built[seed], ONE, DATA)[0] for seed in (0, 0, 1)]
  programs.assert_close(states[0], states[1], rtol=0, atol=0)
  assert not np.array_equal(states[0].params['head']['kernel'], states[2].params['head']['kernel'])
