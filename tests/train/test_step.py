"""The train step: masks, numbers that are not finite, norms."""
from __future__ import annotations

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.core.types import Batch
from vit_jax.objectives.ema import Ema
from vit_jax.objectives.supervised import Supervised
from vit_jax.train import diagnose, loop, step

DATA = programs.batch(size=8)
ONE = programs.MESHES['one']
RULES = (('.*kernel', ('fsdp', 'tensor')), ('.*', ()))
PLACED = DATA['image'].astype(np.float32)


def task(loss: schema.Loss = schema.Loss.SOFTMAX) -> Supervised:
  return Supervised(fakes.PlainNet(), fakes.LinearHead(), num_classes=7, loss=loss, label_smoothing=0.)


def program(objective: object, settings: schema.Mesh = ONE, *, accumulate: int = 1, data: Batch = DATA) -> step.Program:
  return programs.build(objective, fakes.normalise, settings, rules=RULES, like=data, accumulate=accumulate)


@pytest.mark.quick('4', reason='1 s: another program')
@pytest.mark.parametrize('accumulate', [1, 4])
def test_masked_rows_change_nothing_even_if_they_are_nan(accumulate: int) -> None:
  rows = 12
  data = {**programs.batch(size=rows), 'mask': np.ones(rows, np.float32)}
  data['mask'][[0, 3, 4, 5]] = 0
  kept = {k: v[data['mask'] > 0] for k, v in data.items()}
  poisoned = {**data, 'image': data['image'].astype(np.float32)}
  poisoned['image'][0] = 3e38
  got, metrics = programs.run(program(task(), accumulate=accumulate, data=poisoned), ONE, poisoned)
  want, _ = programs.run(program(task(), data=kept), ONE, kept)
  assert float(metrics.means['loss'].weight) == 8 and bool(metrics.ok)
  programs.assert_close(got.params, want.params)


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
  built = program(Ema(task(), .9), mesh, data=data)
  before = jax.device_get(built.init_fn())
  state, metrics = programs.run(built, mesh, data)
  assert not bool(metrics.ok) and int(state.step) == 1
  programs.assert_close(state._replace(step=before.step), before, rtol=0, atol=0)
  assert set(step.nonfinite_paths(metrics.norms.grad)) >= {'backbone/kernel', 'head/bias'}
  assert step.nonfinite_paths(metrics.norms.param) == []


@pytest.mark.quick('data=8', reason='1 s: another program')
@pytest.mark.parametrize('settings', ['one', 'data=8'])
def test_diagnosis_names_the_example(settings: str) -> None:
  mesh, data = programs.MESHES[settings], bad_batch()
  built = program(task(), mesh, data=data)
  placed = programs.meshes.put_batch(data, programs.mesh(mesh), programs.Shard((0,), 1))
  state, metrics = built.step_fn(built.init_fn(), placed)
  far = 2_999_999_990  # beyond 32 bits, which is all that devices have
  find = diagnose.build(task(), fakes.normalise, 'picture{}'.format,
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


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not() -> None:
  states = [programs.run(programs.build(task(), fakes.normalise, ONE, rules=RULES, like=DATA, seed=seed), ONE, DATA)[0]
            for seed in (0, 0, 1)]
  programs.assert_close(states[0], states[1], rtol=0, atol=0)
  assert not np.array_equal(states[0].params['head']['kernel'], states[2].params['head']['kernel'])
