"""Phases, rates and goodput, with a hand-moved time."""
from __future__ import annotations

import pytest

from vit_jax.record import clock as clock_lib
from vit_jax.record.reader import Event


class Time:
  """Seconds that pass only when told to."""

  def __init__(self) -> None:
    self.now = 100.

  def __call__(self) -> float:
    return self.now


def make() -> tuple[clock_lib.Clock, Time]:
  time = Time()
  return clock_lib.Clock(6, 30., 100., now=time), time


def run_steps(clock: clock_lib.Clock, time: Time, *, steps: int, seconds: float) -> None:
  for _ in range(steps):
    time.now += seconds
    clock.tick()


def test_rates_count_steps_and_data_waits_but_not_evaluations_and_checkpoints() -> None:
  clock, time = make()
  with clock.phase('compile'):
    time.now += 50
  run_steps(clock, time, steps=1, seconds=70.)
  assert clock.take_rates() is None
  run_steps(clock, time, steps=3, seconds=2.)
  with clock.phase('data_wait'):
    time.now += 3
  with clock.phase('evaluate'):
    time.now += 1000
  rates = clock.take_rates()
  assert rates is not None
  assert rates.step_s == pytest.approx(3.)
  assert rates.images_per_s == pytest.approx(2.)
  assert rates.mfu == pytest.approx(.1)  # 30 FLOPs in 3 s on 100 FLOP/s


def test_processor_seconds_of_training_are_those_of_steps_and_data_waits() -> None:
  time, processor = Time(), Time()
  clock = clock_lib.Clock(6, 30., 100., now=time, processor=processor)
  processor.now += 7000.  # before the first step
  clock.tick()
  for phase, spent in (('compile', 1000.), ('data_wait', 3.), ('evaluate', 500.), ('data_wait', 4.)):
    with clock.phase(phase):
      processor.now += spent
    processor.now += 20.
  found = clock.goodput()
  assert found.training_processor_s == pytest.approx(3. + 4. + 4 * 20.) and found.processor_s > 0


def test_costs_are_summed_over_the_starts_and_not_known_if_one_of_them_did_not_record_them() -> None:
  def noted(step: int, spent: float) -> Event:
    return {**note(step, step=spent), 'total_s': spent, 'processor_s': 2 * spent, 'training_processor_s': spent}
  events = [start(), noted(0, 1.), noted(7, 5.), start(7), noted(9, 3.)]
  events = [{**one, 'devices': 8} if one['event'] == 'start' else one for one in events]
  assert clock_lib.sum_starts(events)[1:] == (8., 1., 16., 8.) and clock_lib.count_starts(events) == 2
  assert clock_lib.device_s(events) == 64.
  for odd in ([start(9)], [start(9), note(9, step=3.)]):  # killed at once, and of an older version
    assert clock_lib.sum_starts([*events, *odd]).processor_s is None


def test_rates_are_of_the_window_since_the_last_call() -> None:
  clock, time = make()
  run_steps(clock, time, steps=2, seconds=5.)
  clock.take_rates()
  assert clock.take_rates() is None
  run_steps(clock, time, steps=2, seconds=1.)
  rates = clock.take_rates()
  assert rates is not None and rates.step_s == pytest.approx(1.)


@pytest.mark.parametrize(('flops', 'peak'), [(30., None), (0., 100.)])
def test_mfu_is_none_when_peak_or_cost_is_unknown(flops: float, peak: float | None) -> None:
  time = Time()
  clock = clock_lib.Clock(6, flops, peak, now=time)
  run_steps(clock, time, steps=2, seconds=1.)
  rates = clock.take_rates()
  assert rates is not None and rates.mfu is None


def test_nested_phases_do_not_count_time_twice() -> None:
  clock, time = make()
  with clock.phase('evaluate'):
    time.now += 1
    with clock.phase('compile'):
      time.now += 10
    time.now += 2
  goodput = clock.goodput()
  assert goodput.seconds == {'step': 0., 'evaluate': 3., 'compile': 10.}
  assert goodput.total_s == 13.


def test_a_phase_ends_when_its_body_fails() -> None:
  clock, time = make()
  with pytest.raises(KeyError), clock.phase('checkpoint'):
    time.now += 1
    raise KeyError
  run_steps(clock, time, steps=1, seconds=4.)
  assert clock.goodput().seconds == {'step': 4., 'checkpoint': 1.}


def test_goodput_adds_up() -> None:
  clock, time = make()
  assert clock.goodput().fraction == 0.
  clock.charge('startup', 7.)
  with clock.phase('startup'):
    time.now += 3
  run_steps(clock, time, steps=12, seconds=1.)
  goodput = clock.goodput()
  assert goodput.seconds == {'step': 12., 'startup': 10.}
  assert goodput.total_s == pytest.approx(sum(goodput.seconds.values()))
  assert goodput.fraction == pytest.approx(12 / 22)


def test_time_left_expects_evaluations_again_but_no_compilation_and_no_first_step() -> None:
  clock, time = make()
  assert clock.time_left_s(10) is None
  with clock.phase('compile'):
    time.now += 500
  with clock.phase('data_wait'):
    time.now += 20
  run_steps(clock, time, steps=1, seconds=30.)
  assert clock.time_left_s(10) is None
  run_steps(clock, time, steps=4, seconds=1.)
  with clock.phase('evaluate'):
    time.now += 4
  assert clock.time_left_s(10) == pytest.approx(20.)


def test_time_left_counts_a_first_evaluation_that_compiled_like_the_later_ones() -> None:
  clock, time = make()
  with clock.phase('data_wait'):  # before the first step: not counted at all
    time.now += 20
  run_steps(clock, time, steps=1, seconds=1.)
  left = []
  for seconds in (30., 4., 6.):
    run_steps(clock, time, steps=5, seconds=1.)
    with clock.phase('evaluate'):
      time.now += seconds
    left.append(clock.time_left_s(30))
  with clock.phase('data_wait'):
    time.now += 0.
  assert left == pytest.approx([30 * 35 / 5, 30 * (10 + 2 * 4) / 10, 30 * (15 + 5 + 4 + 6) / 15])
  assert clock.time_left_s(30) == left[-1]


def test_a_phase_may_not_take_a_name_the_clock_derives() -> None:
  clock, _ = make()
  with pytest.raises(ValueError, match="phase 'step' is what the clock derives itself"), clock.phase('step'):
    pass


@pytest.mark.parametrize(('kind', 'flops'), [
  ('TPU v2', 22.5e12), ('TPU v3', 61.5e12), ('TPU v4', 275e12), ('TPU v4 lite', 138e12),
  ('TPU v5 lite', 197e12), ('TPU v5e', 197e12), ('TPU v5', 459e12), ('TPU v5p', 459e12),
  ('TPU v6 lite', 918e12), ('TPU v6e', 918e12), ('NVIDIA A100-SXM4-40GB', 312e12),
  ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA H100 PCIe', 756e12), ('NVIDIA H200', 989e12)])
def test_peaks_of_known_devices(kind: str, flops: float) -> None:
  assert clock_lib.find_peak_flops(kind, 3) == 3 * flops


def test_peak_of_an_unknown_device_is_none() -> None:
  assert clock_lib.find_peak_flops('cpu', 8) is None


def start(resumed_from: int | None = None) -> Event:
  return {'event': 'start', 'resumed_from': resumed_from}


def note(at: int, **seconds: object) -> Event:
  return {'event': 'goodput', 'step': at, 'seconds': seconds}


FIRST = [start(), note(1, startup=10., compile=20., step=1., data_wait=0.), {'event': 'checkpoint', 'step': 4},
         note(4, startup=10., compile=20., step=4., data_wait=1., checkpoint=2.),
         note(7, startup=10., compile=25., step=7., data_wait=1.5, checkpoint=2., evaluate=6.)]
SECOND = [start(4), note(5, startup=8., compile=3., step=1.), note(9, startup=8., compile=3., step=5., checkpoint=2.)]


def test_a_start_counts_with_what_it_noted_last() -> None:
  found = clock_lib.sum_starts(FIRST)
  assert found.seconds == {'startup': 10., 'compile': 25., 'step': 7., 'data_wait': 1.5, 'checkpoint': 2.,
                           'evaluate': 6.}
  assert found.total_s == 51.5 and found.fraction == pytest.approx(7 / 51.5)


def test_what_came_after_the_step_resumed_from_is_lost_but_preparations_are_not() -> None:
  found = clock_lib.sum_starts([*FIRST, *SECOND])
  assert found.seconds == {'startup': 18., 'compile': 28., 'step': 9., 'data_wait': 1., 'checkpoint': 4.,
                           'evaluate': 0., 'lost': 3. + .5 + 6.}
  assert found.total_s == 51.5 + 18. and found.fraction == pytest.approx(9 / 69.5)


def test_a_start_from_further_back_loses_of_all_starts_before_it() -> None:
  found = clock_lib.sum_starts([*FIRST, *SECOND, start(1), note(3, startup=5., step=2.)])
  assert found.seconds['step'] == 1. + 0. + 2.
  assert found.seconds['lost'] == (6. + 1.5 + 2. + 6.) + (5. + 2.)
  assert found.seconds['startup'] == 10. + 8. + 5.


def test_a_kill_before_the_first_checkpoint_loses_all_but_preparations() -> None:
  found = clock_lib.sum_starts([*FIRST, start(None), note(2, startup=9., step=2.)])
  assert found.seconds['step'] == 2. and found.seconds['lost'] == 7. + 1.5 + 2. + 6.


def test_a_run_that_stopped_when_asked_or_was_done_loses_nothing() -> None:
  found = clock_lib.sum_starts([*FIRST, start(7), note(9, step=3.), start(9), note(9, startup=4., evaluate=1.)])
  assert 'lost' not in found.seconds and found.seconds['step'] == 10.


def test_steps_and_seconds_lost_are_told_at_the_next_start() -> None:
  assert clock_lib.find_lost(FIRST, resumed_from=4) == (3, 9.5)
  assert clock_lib.find_lost(FIRST, resumed_from=7) == clock_lib.find_lost(FIRST, resumed_from=8) == (0, 0.)
  assert clock_lib.find_lost([*FIRST, *SECOND], resumed_from=4) == (5, 7.)
  assert clock_lib.find_lost([], resumed_from=4) == (0, 0.)


def test_a_damaged_record_counts_with_what_can_be_read() -> None:
  events = [note(1, step=5.), start(), note(2, step='nan', compile=None, data_wait=2.), {'event': 'goodput'}]
  assert clock_lib.sum_starts(events[:3]).seconds == {'step': 0., 'compile': 0., 'data_wait': 2.}
  assert clock_lib.sum_starts(events).seconds == {}
  assert clock_lib.sum_starts([{'event': 'goodput', 'seconds': [1]}]) == ({}, 0, 0., None, None)
