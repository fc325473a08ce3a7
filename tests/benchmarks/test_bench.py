"""`benchmarks.bench`: what is timed, the table, and ratios to other programs."""
from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
import single

from benchmarks import bench, bench_parts, peers, timing
from vit_jax.config import files, schema
from vit_jax.core.errors import UserError
from vit_jax.jobs import build
from vit_jax.models import cost

TINY = ['--config=bench', '--config.image_px=16,16', '--config.model.patch=8', '--config.model.width=16',
        '--config.model.depth=1', '--config.model.heads=2', '--config.model.mlp.hidden=16', '--config.batch_size=8',
        '--config.data.num_classes=3', '--config.data.recipe.eval_resize_px=16']
@pytest.fixture(autouse=True)
def soon_done(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """Turns as short as can be, a large product that is not, and one device."""
  monkeypatch.setattr(timing, 'MIN_S', .001)
  monkeypatch.setattr(timing, 'PAUSE_S', 0.)
  monkeypatch.setitem(bench_parts.MATMUL_SIDE, 'cpu', 64)
  with single.one_device():
    yield


def test_flops_are_those_of_the_models_cost() -> None:
  config = files.load('bench', [one.removeprefix('--config.') for one in TINY[1:]])
  *_, parts = build.open_run(config, build.open_data(config))
  # By hand: 4 patches of 192 values and a class token at width 16, an MLP of 16, 3 classes.
  tokens = 4 * 192 * 16 + 5 * 4 * 16 * 16 + 2 * 5 * 5 * 16 + 5 * 2 * 16 * 16 + 16 * 3
  assert bench_parts.count_flops(parts, num_classes=3) == {
      'forward': 16 * tokens, **dict.fromkeys(('gradient', 'step', 'together', 'loop', 'logged loop'), 48 * tokens)}


@pytest.mark.parametrize(('words', 'said'), [
    (['--px=16,no'], "--px: expected whole numbers with commas, each 1 to 65,535, got '16,no'."),
    (['--px=16,20'], 'patch'),
    (['--turns=0'], '--turns: expected at least 1, got 0.'),
    (['--flags=cublsa'], '--flags: expected some of '),
    (['--models=Q/16'], 'Q/16'),
    (['--parts=step,stop'], '--parts: expected some of forward, gradient, step, input, together, loop, logged loop, '
                            'got stop.'),
])
def test_what_cannot_be_timed_is_said(words: list[str], said: str, caplog: pytest.LogCaptureFixture,
                                      capsys: pytest.CaptureFixture[str]) -> None:
  assert bench.main([*TINY, *words]) == 2
  assert said in capsys.readouterr().err + caplog.text


@pytest.mark.slow(reason='builds, compiles and times a run: 10 s of CPU')
def test_parts_are_timed_although_steps_take_the_buffers_of_what_is_evaluated(tmp_path: pathlib.Path) -> None:
  assert bench.main([*TINY, '--turns=1', f'--to={tmp_path}']) == 0
  parts = json.loads((tmp_path / 'bench.json').read_text())['networks'][0]['parts']
  assert {one['part'] for one in parts} == set(bench.PARTS)


class Sized:
  """In place of a run: its parts do nothing, and their FLOPs are those of the forward pass at the config's size."""
  compiled, num_classes, matmul_flops = bench_parts.Compiled(1., 1., 1), 3, 1.

  def __init__(self, config: schema.Config) -> None:
    self.config = config

  def parts(self) -> dict[str, timing.Part]:
    return dict.fromkeys((*bench.PARTS, bench_parts.MATMUL), lambda count: timing.Spent(.1, .1))

  def flops(self) -> dict[str, float]:
    return {'forward': sum(cost.forward(self.config.model, self.config.image_px, head=self.config.head,
                                        num_classes=3).flops.values())}

  def close(self) -> None:
    pass


def test_networks_are_timed_at_each_size_and_drawn(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(bench_parts, 'Own', Sized)
  assert bench.main([*TINY, '--px=24,16', '--turns=1', f'--to={tmp_path}']) == 0
  found = json.loads((tmp_path / 'bench.json').read_text())['networks']
  assert [(one['model'], one['px']) for one in found] == [('ViT-S/16 at 24 px', 24), ('ViT-S/16 at 16 px', 16)]
  assert found[0]['parts'][0]['flops'] > 2 * found[1]['parts'][0]['flops']
  assert (tmp_path / 'sizes.png').read_bytes()[:4] == b'\x89PNG' and 'ViT-S/16 at 24 px' in capsys.readouterr().out


def test_only_chosen_parts_are_timed_of_all_programs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(bench_parts, 'Own', Sized)
  monkeypatch.setattr(peers, 'Peers', Slower)
  for chosen, found in (('step', {'step', 'step of other 1.0'}), ('input,forward', {'input', 'forward'})):
    to = tmp_path / chosen
    assert bench.main([*TINY, '--turns=1', f'--parts={chosen}', f'--to={to}']) == 0
    parts = json.loads((to / 'bench.json').read_text())['networks'][0]['parts']
    assert {one['part'] for one in parts} == found
  assert bench.main([*TINY, '--px=24,16', '--turns=1', '--parts=step', f'--to={tmp_path}']) == 0
  assert not (tmp_path / 'sizes.png').exists()


class Slower(peers.Peers):
  """A program whose steps take twice the time and four times the processor time of ours."""

  @contextlib.contextmanager
  def opened(self, config: schema.Config, num_classes: int) -> Iterator[dict[str, timing.Part]]:
    assert (config.batch_size, num_classes) == (8, 3)
    yield {'step of other 1.0': lambda count: timing.Spent(.2, .4)}


def test_ratios_are_shown_beside_another_program_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(bench_parts, 'Own', Sized)
  assert bench.main([*TINY, '--turns=2']) == 0
  assert 'faster' not in capsys.readouterr().out
  monkeypatch.setattr(peers, 'Peers', Slower)
  assert bench.main([*TINY, '--turns=2', f'--to={tmp_path}']) == 0
  assert capsys.readouterr().out.count('ours is faster') == (2 if jax.default_backend() == 'cpu' else 1)
  parts = {one['part']: one for one in json.loads((tmp_path / 'bench.json').read_text())['networks'][0]['parts']}
  assert set(parts) == {*bench.PARTS, 'step of other 1.0'}
  assert (parts['step']['ratio'], parts['step']['processor_ratio']) == (None, None)
  other = parts['step of other 1.0']
  assert (other['ratio'], other['processor_ratio']) == pytest.approx((2., 4.))


def test_turns_are_taken_in_order_after_a_pause_and_a_call_is_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
  seen: list[tuple[str, float]] = []
  monkeypatch.setattr(timing, 'PAUSE_S', .25)
  monkeypatch.setattr(timing, 'MIN_S', .5)
  monkeypatch.setattr(timing.time, 'sleep', lambda seconds: seen.append(('pause', seconds)))

  def part(name: str, seconds: float) -> timing.Part:
    def run(count: int) -> timing.Spent:
      seen.append((name, count))
      return timing.Spent(count * seconds, 3 * count * seconds)
    return run

  found = timing.take_turns({'a': part('a', .1), 'b': part('b', 2.)}, turns=2)
  assert found == {'a': [pytest.approx((.1, .3))] * 2, 'b': [(2., 6.)] * 2}
  assert seen[4:] == [('pause', .25), ('a', 5), ('pause', .25), ('b', 1)] * 2


@pytest.mark.slow(reason='2 s: releases all that was compiled')
def test_a_step_is_compiled_anew_and_then_read_from_the_cache() -> None:
  events: list[str] = []
  heard = {'/jax/compilation_cache/cache_misses': 'miss', '/jax/compilation_cache/cache_hits': 'hit'}

  def listen(event: str, **_: object) -> None:
    events.extend([heard[event]] if event in heard else [])

  multiply = jax.jit(lambda x: jnp.sin(x @ x))
  jax.monitoring.register_event_listener(listen)
  try:
    found = bench_parts.measure_compilation(lambda: multiply.lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)))
  finally:
    jax.monitoring.unregister_event_listener(listen)
  assert events == ['miss', 'hit'] and found.cold_s > 0 and found.cached_s > 0


@pytest.mark.slow(reason='4 s: a run is built for each size')
def test_the_largest_batch_fits_and_twice_as_much_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
  config = files.load('bench', [one.removeprefix('--config.') for one in TINY[1:]])
  needs = iter([100, 200, 800])
  with monkeypatch.context() as patch:
    patch.setattr(bench_parts, '_step_bytes', lambda config: next(needs))
    patch.setattr(bench_parts, '_device_bytes', lambda: 500.)
    assert bench_parts.largest_batch(config) == 16
  monkeypatch.setattr(bench_parts, '_device_bytes', lambda: 1_000.)
  with pytest.raises(UserError, match='expected a batch that fits in .* per device, got 8'):
    bench_parts.largest_batch(config)
