"""Traces of chosen steps: which steps are in them, when they begin and end, what is refused."""
from __future__ import annotations

import contextlib
import functools
import pathlib
import socket

import jax
import jax.numpy as jnp
import pytest

from vit_jax.config import durations
from vit_jax.core.errors import UserError
from vit_jax.train import loop, profile
from vit_jax.train.state import Norms, Packed, StepMetrics, TrainState, pack


@functools.cache
def metrics() -> Packed:
  return pack(StepMetrics({}, jnp.zeros(()), Norms({}, {}, {}), jnp.asarray(True)))


class Clock:
  def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Tracer:
  """Stands in for the profiler: notes the step at which it begins and ends."""

  def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
    self.calls: list[tuple[str, int]] = []
    self.step = 0
    monkeypatch.setattr(jax.profiler, 'start_trace', lambda *a, **k: self.calls.append(('begin', self.step)))
    monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: self.calls.append(('end', self.step)))

  def step_fn(self, state: TrainState, batch: dict) -> tuple[TrainState, Packed]:
    self.step += 1
    return state._replace(step=jnp.asarray(self.step)), metrics()


def run(tracer: Tracer, steps: str, *, start: int = 0, total: int = 11, stop: int = 99, process_index: int = 0) -> None:
  tracer.step = start
  hook = profile.Profile('x', durations.parse_steps(steps), start=start, total=total, process_index=process_index)
  with hook as tracing:
    loop.run(tracing.mark(tracer.step_fn), TrainState(jnp.asarray(start), {}, {}, {}), iter([{}] * 99), start=start,
             total=total, hooks=[tracing], clock=Clock(), should_stop=lambda step: 'asked' if step == stop else '')


@pytest.mark.parametrize(('steps', 'start', 'want'), [
    ('4..6', 0, [('begin', 3), ('end', 6)]),
    ('2..2', 0, [('begin', 1), ('end', 2)]),
    ('1..3', 0, [('begin', 0), ('end', 3)]),
    ('9..11', 0, [('begin', 8), ('end', 11)]),
    ('4..6', 3, [('begin', 3), ('end', 6)]),
    ('4..6', 5, [('begin', 5), ('end', 6)]),
    ('4..6', 6, []),
    ('', 0, []),
])
def test_exactly_the_named_steps_are_traced_as_far_as_they_are_done(
    steps: str, start: int, want: list, monkeypatch: pytest.MonkeyPatch) -> None:
  tracer = Tracer(monkeypatch)
  run(tracer, steps, start=start)
  assert tracer.calls == want


def test_a_run_that_stops_early_ends_its_trace_and_says_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  tracer = Tracer(monkeypatch)
  with caplog.at_level('INFO'):
    run(tracer, '4..9', stop=5)
  assert tracer.calls == [('begin', 3), ('end', 5)]
  assert 'Profile of steps 4 to 5: tensorboard --logdir=x' in caplog.text


def test_steps_that_were_done_before_are_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  with caplog.at_level('INFO'):
    run(Tracer(monkeypatch), '4..6', start=7)
  assert 'No profile: steps 4 to 6 were done before.' in caplog.text


def test_another_process_traces_nothing_and_refuses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
  tracer = Tracer(monkeypatch)
  run(tracer, '4..6', process_index=1)
  assert not tracer.calls
  for process in (0, 1):
    with pytest.raises(UserError, match=r'profile: expected steps from 1 to 11, the end of the run, got 4..12'):
      run(tracer, '4..12', process_index=process)


@pytest.mark.parametrize('text', ['100', '0..3', '7..3', '3-7', '1..', 'a..b'])
def test_what_is_no_range_is_refused_with_what_one_looks_like(text: str) -> None:
  with pytest.raises(UserError, match=f"expected first..last, from 1 and in order, such as '100..105', got '{text}'"):
    durations.parse_steps(text)


def test_the_profiler_leaves_a_trace_that_names_the_steps(tmp_path: pathlib.Path) -> None:
  compute = jax.jit(lambda x: x @ x)

  def step_fn(state: TrainState, batch: dict) -> tuple[TrainState, Packed]:
    compute(jnp.ones((17, 17))).block_until_ready()
    return state, metrics()

  with profile.Profile(tmp_path, (2, 3), start=0, total=5, process_index=0) as tracing:
    loop.run(tracing.mark(step_fn), TrainState(jnp.asarray(0), {}, {}, {}), iter([{}] * 9), start=0, total=5,
             hooks=[tracing], clock=Clock(), should_stop=lambda step: '')
  found, = tmp_path.glob('plugins/profile/*/*.xplane.pb')
  data = jax.profiler.ProfileData.from_file(str(found))
  events = [e for plane in data.planes for line in plane.lines for e in line.events if e.name == 'train']
  assert sorted(dict(e.stats)['step_num'] for e in events) == [2, 3]


def test_the_profiler_listens_while_the_run_trains_and_not_on_a_port_of_another(tmp_path: pathlib.Path) -> None:
  with socket.socket() as other:
    other.bind(('', 0))
    port = other.getsockname()[1]
    said = rf'train.profile_port: expected a port that is free .*, got {port} for process 1'
    with pytest.raises(UserError, match=said), profile.served(port - 1, 1):
      pass
  with profile.served(port, 0):
    socket.create_connection(('localhost', port), 10).close()
  with pytest.raises(ConnectionRefusedError):
    socket.create_connection(('localhost', port), 10)
  with pytest.raises(UserError, match=r'got 65536 for process 1: it is above 65,535'), profile.served(65_535, 1):
    pass
