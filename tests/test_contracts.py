"""The contracts of `core/contracts.py`, tried with fakes through the real train step: no case is special to it."""
from __future__ import annotations

import ast
import functools
import pathlib

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.models.vit import vit
from vit_jax.objectives.ema import Ema, Growing
from vit_jax.objectives.supervised import Supervised
from vit_jax.train import loop, step

DATA = programs.batch()


def classifier(backbone: object) -> Supervised:
  return Supervised(backbone, fakes.LinearHead(), num_classes=7, loss=schema.Loss.SOFTMAX, label_smoothing=.1)


TASKS = {
    'mae': fakes.FakeMae,
    'dino': fakes.FakeDino,
    'batchnorm': lambda: classifier(fakes.BatchNormNet()),
    'ema of batchnorm': lambda: Ema(classifier(fakes.BatchNormNet()), Growing(.9)),
    'ema of dino': lambda: Ema(fakes.FakeDino(), Growing(.9)),
}


@functools.cache
def after(task: str, settings: str, *, accumulate: int = 1, num_steps: int = 3) -> tuple[object, object]:
  mesh = programs.MESHES[settings]
  program = programs.build(TASKS[task](), fakes.normalize, mesh, like=DATA,
                           accumulate=accumulate)
  state, metrics = programs.run(program, mesh, DATA, num_steps)
  return state, metrics.means


@pytest.mark.quick('ema of batchnorm', reason='1 s: two programs')
@pytest.mark.parametrize('task', TASKS)
def test_a_fake_task_takes_the_same_steps_on_any_mesh(task: str) -> None:
  want = after(task, 'one')
  assert int(want[0].step) == 3
  programs.assert_close(after(task, 'data=2,fsdp=2,tensor=2'), want)


def test_stats_are_summed_over_microbatches_and_devices_so_accumulation_is_exact() -> None:
  want, got = after('dino', 'one'), after('dino', 'data=8', accumulate=4)
  programs.assert_close(got, want)
  assert np.abs(want[0].extra['center']).max() > 0


@pytest.mark.slow(reason='3 s: three programs; tests/train/test_randomness.py has seeds and microbatches')
def test_random_masks_repeat_with_the_seed_and_differ_with_the_number_of_microbatches() -> None:
  one, again = after('mae', 'one'), after.__wrapped__('mae', 'one')
  programs.assert_close(one, again, rtol=0, atol=0)
  split = after('mae', 'one', accumulate=4)
  assert float(one[1]['loss'].sum) != float(split[1]['loss'].sum)


@pytest.mark.slow(reason='1 s: another program')
def test_running_statistics_reach_the_views() -> None:
  state, _ = after('ema of batchnorm', 'data=8')
  assert np.abs(state.extra['inner']['model_state']['mean']).max() > 0
  views = TASKS['ema of batchnorm']().views()
  image = jnp.asarray(DATA['image'][:3], jnp.float32)
  outs = jax.jit(lambda: {name: view.predict(view.select(state.params, state.extra), image)
                          for name, view in views.items()})()
  assert set(outs) == {'student', 'ema'} and outs['ema'].logits.shape == (3, 7)
  assert not np.allclose(outs['student'].logits, outs['ema'].logits)


@pytest.mark.slow(reason='1 s; tests/models/test_vit.py has blocks one by one')
def test_attention_is_captured_block_by_block_and_changes_nothing() -> None:
  net = vit.build(schema.ViT(patch=4, width=16, depth=2, heads=2, mlp=schema.Mlp(32), pool=schema.Mean(),
                             execution=schema.Execution.SCAN), (8, 8))
  image = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
  params, _ = programs.draw(jax.eval_shape(net.init, jax.random.key(0), image))
  params['norm'] = {'scale': np.ones(16, np.float32), 'bias': np.zeros(16, np.float32)}

  @jax.jit
  def run() -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    want, _ = net.apply(params, {}, image, train=False, key=None)
    tokens, maps = net.embed(params, image) + net.positions(params, (2, 2))[None], []
    for i in range(2):
      tokens, captured = net.block(params, tokens, layer=i, capture=True)
      maps.append(captured['attention'])
    return want.tokens, tokens, maps

  want, tokens, maps = map(jax.device_get, run())
  assert all(m.shape == (2, 2, 4, 4) for m in maps)
  np.testing.assert_allclose(np.stack(maps).sum(-1), 1., rtol=1e-5)
  mean, var = tokens.mean(-1, keepdims=True), tokens.var(-1, keepdims=True)
  normed = (tokens - mean) / np.sqrt(var + 1e-6)
  np.testing.assert_allclose(normed, want, rtol=1e-4, atol=1e-5)


def test_step_and_loop_know_no_task() -> None:
  for module in (step, loop):
    text = pathlib.Path(module.__file__).read_text()
    names = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    assert not names & {'Supervised', 'Ema', 'Mae', 'Dino', 'isinstance'}, module.__name__
    assert 'vit_jax.objectives' not in text and 'vit_jax.models' not in text and 'vit_jax.evaluate' not in text
