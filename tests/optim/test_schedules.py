"""Schedules against their formulas."""
from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from vit_jax.config import check, files, schema
from vit_jax.config.durations import Lengths
from vit_jax.core.errors import UserError
from vit_jax.optim import schedules

Decay = schema.Decay
LENGTHS = Lengths(num_examples=370, batch_size=37, total_steps=110)


def build(decay: schema.Decay, end: float = 0., **more: object) -> schedules.Schedule:
  settings = schema.Schedule(decay=decay, end_lr=end, warmup='10 steps', **more)
  return schedules.build(settings, peak=2., lengths=LENGTHS)


@pytest.mark.parametrize('decay', Decay)
def test_the_first_update_moves_and_the_warm_up_is_linear(decay: schema.Decay) -> None:
  rate = build(decay)
  assert [float(rate(s)) for s in (0, 4, 9)] == pytest.approx([2 / 11, 10 / 11, 20 / 11])
  assert float(rate(10)) == pytest.approx(2.)


@pytest.mark.parametrize('step', [10, 37, 60, 109])
def test_decay_follows_the_formula(step: int) -> None:
  t = (step - 10) / 100
  want = {Decay.COSINE: .1 + 1.9 * (1 + math.cos(math.pi * t)) / 2, Decay.LINEAR: .1 + 1.9 * (1 - t)}
  for decay, value in want.items():
    assert float(build(decay, .1)(step)) == pytest.approx(value, rel=1e-5)
  assert float(build(Decay.RSQRT, timescale='25 steps')(step)) == pytest.approx(2 / math.sqrt(1 + (step - 10) / 25))
  assert float(build(Decay.CONSTANT)(step)) == 2.


def test_steps_drop_at_and_after_each_moment() -> None:
  rate = build(Decay.STEPS, milestones=('20 steps', '5 epochs', '90 steps'), gamma=.5)
  assert [float(rate(s)) for s in (19, 20, 49, 50, 89, 90, 109)] == pytest.approx([2, 1, 1, .5, .5, .25, .25])


def test_exponential_decay_is_a_staircase_from_the_start_of_the_run() -> None:
  rate = build(Decay.EXPONENTIAL, gamma=.5, every='20 steps')  # tf.train.exponential_decay(staircase=True)
  assert [float(rate(s)) for s in (10, 19, 20, 39, 40, 109)] == pytest.approx([2, 2, 1, 1, .5, 2 / 2**5])
  assert float(rate(9)) == pytest.approx(20 / 11)  # the warm-up takes its place


def test_cosine_and_linear_can_stay_at_their_end() -> None:
  for decay in (Decay.COSINE, Decay.LINEAR):
    held, shorter = build(decay, .1, hold='30 steps'), build(decay, .1)
    assert float(held(45)) == pytest.approx({Decay.COSINE: 1.05, Decay.LINEAR: 1.05}[decay])  # half of 70 after 10
    assert [float(held(s)) for s in (80, 95, 109)] == pytest.approx([.1] * 3) and float(shorter(80)) > .1
  with pytest.raises(UserError, match=r"schedule.hold: expected less than the run \(110 steps\) .* got '100 steps'"):
    build(Decay.COSINE, hold='100 steps')


def test_a_cooldown_is_linear_to_the_end_rate_whatever_came_before() -> None:
  stable = build(Decay.CONSTANT, .2, cooldown='20 steps')
  assert [float(stable(s)) for s in (89, 90, 100, 110, 500)] == pytest.approx([2, 2, 1.1, .2, .2])
  slow = build(Decay.RSQRT, cooldown='20 steps', timescale='25 steps')
  plain = build(Decay.RSQRT, timescale='25 steps')
  assert float(slow(89)) == pytest.approx(float(plain(89)))
  assert float(slow(105)) == pytest.approx(float(plain(105)) / 4)


def test_lengths_are_read_in_any_unit() -> None:
  a = build(Decay.CONSTANT, cooldown='740 examples')
  b = schedules.build(schema.Schedule(Decay.CONSTANT, warmup='1 epoch', cooldown='18.1818 %'), peak=2., lengths=LENGTHS)
  assert [float(a(s)) for s in (3, 50, 95, 103)] == pytest.approx([float(b(s)) for s in (3, 50, 95, 103)])


def test_after_the_end_the_rate_stays_at_its_end() -> None:
  assert float(build(Decay.LINEAR, .1)(500)) == pytest.approx(.1)


def test_no_warm_up_starts_at_the_peak() -> None:
  rate = schedules.build(schema.Schedule(Decay.COSINE, warmup='0 steps'), peak=3., lengths=LENGTHS)
  assert float(rate(0)) == pytest.approx(3.)


@pytest.mark.parametrize(('settings', 'said'), [
    (schema.Schedule(Decay.CONSTANT, warmup='60 %', cooldown='60 steps'),
     r"warmup: expected at most the run \(110 steps\) .*cooldown='60 steps' \(60\), got '60 %' \(66\)"),
    (schema.Schedule(Decay.STEPS, milestones=('50 steps', '20 steps')), r'expected ascending ones .* steps \[50, 20\]'),
    (schema.Schedule(Decay.STEPS, warmup='10 steps', milestones=('5 steps',)), r'the end of the warm-up \(step 10\)'),
    (schema.Schedule(Decay.STEPS, milestones=('200 steps',)), r'to before the end of the run \(110\)'),
])
def test_moments_out_of_order_are_refused(settings: schema.Schedule, said: str) -> None:
  with pytest.raises(UserError, match=said):
    schedules.build(settings, peak=1., lengths=LENGTHS)


def test_a_rate_for_256_examples_is_scaled_to_the_batch() -> None:
  assert schedules.peak_rate(schema.AdamW(lr=1.5e-4, base_batch_size=256), batch_size=4096) == pytest.approx(2.4e-3)
  assert schedules.peak_rate(schema.AdamW(lr=1.5e-4), batch_size=4096) == 1.5e-4


@pytest.mark.parametrize('curve', schema.Curve)
def test_a_ramp_moves_between_its_moments_and_stays_outside_them(curve: schema.Curve) -> None:
  value = schedules.ramp(schema.Ramp(1., 10., begin='10 steps', until='50 steps', curve=curve), lengths=LENGTHS)
  t = .25 if curve is schema.Curve.LINEAR else (1 - math.cos(math.pi / 4)) / 2
  assert [float(value(s)) for s in (0, 10, 20, 50, 109)] == pytest.approx([1, 1, 1 + 9 * t, 10, 10])


def test_a_ramp_of_no_length_jumps_and_one_that_runs_backwards_is_refused() -> None:
  value = schedules.ramp(schema.Ramp(1., 0., begin='7 steps', until='7 steps'), lengths=LENGTHS)
  assert [float(value(s)) for s in (6, 7)] == [1, 0]
  with pytest.raises(UserError, match=r"after its start at '50 %' \(55 steps\), got '7 steps' \(7\)"):
    schedules.ramp(schema.Ramp(begin='50 %', until='7 steps'), lengths=LENGTHS)


FORMS = {'from_zero': {'warmup_form': schema.Warmup.FROM_ZERO}, 'linspace': {'warmup_form': schema.Warmup.LINSPACE}}
TIMM = {**FORMS['from_zero'], 'warmup_lr': .01, 'decay_from_start': True, 'stairs': '1 epoch', 'end_lr': .1}
PROGRAMS: dict[str, tuple[schema.Decay, dict[str, Any]]] = {  # of the recipes of these programs
    'deit': (Decay.COSINE, TIMM | {'lag': '1 epoch'}), 'token_label': (Decay.COSINE, TIMM | {'hold': '3 epochs'}),
    'dino': (Decay.COSINE, FORMS['linspace'] | {'end_lr': .1}),
    'mae': (Decay.COSINE, FORMS['from_zero'] | {'end_lr': .1}),
    'big_vision_cosine': (Decay.COSINE, FORMS['from_zero']),
    'big_vision_linear': (Decay.LINEAR, FORMS['from_zero'] | {'end_lr': .1}),
    'big_vision_rsqrt': (Decay.RSQRT, FORMS['from_zero'] | {'timescale': '25 steps', 'cooldown': '60 steps'}),
    'vision_transformer': (Decay.COSINE, FORMS['from_zero'])}
GOLDEN = json.loads(pathlib.Path(__file__).with_name('golden_schedules.json').read_text())


@pytest.mark.parametrize('program', PROGRAMS)
def test_every_rate_is_that_of_the_program(program: str) -> None:
  """40 epochs of 10 steps, 5 of warm-up, from `make_golden_schedules.py`."""
  decay, settings = PROGRAMS[program]
  rate = schedules.build(schema.Schedule(decay, warmup='5 epochs', **settings), peak=2.,
                         lengths=Lengths(num_examples=100, batch_size=10, total_steps=400))
  want = np.array(GOLDEN[program])
  got = jax.jit(rate)(np.arange(0, 400, 400 // len(want)))
  np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)  # cosines in f32, of numbers up to 2


def test_bit_hyperrule_warms_up_and_drops_as_its_program() -> None:
  schedule = files.load('bit_hyperrule:own,examples=1000,side=500', []).optimizer.schedule
  rate = schedules.build(schedule, peak=2., lengths=Lengths(num_examples=1000, batch_size=512, total_steps=500))
  np.testing.assert_allclose(jax.jit(rate)(np.arange(500)), GOLDEN['big_transfer'], rtol=1e-6)


def test_the_temperature_of_dino_rises_once_an_epoch() -> None:
  ramp = files.load('dino_i1k:B/8', []).objective.teacher_temperature
  shorter = dataclasses.replace(ramp, until='29 epochs')  # the program's was made with 30 of warm-up
  value = schedules.ramp(shorter, lengths=Lengths(num_examples=100, batch_size=10, total_steps=400))
  np.testing.assert_allclose([float(value(step)) for step in range(9, 400, 10)], GOLDEN['dino_temperature'], rtol=1e-6)
  assert ramp.until == '49 epochs' and ramp.stairs == '1 epoch'


@pytest.mark.parametrize(('changes', 'setting'), [
    (['warmup=0 steps', 'warmup_lr=1e-6'], 'warmup_lr'), (['warmup=0 steps', 'warmup_form=linspace'], 'warmup_form'),
    (['decay=rsqrt', 'warmup=5 steps', 'decay_from_start=true'], 'decay_from_start')])
def test_settings_of_a_warm_up_that_is_not_there_are_refused(changes: list[str], setting: str) -> None:
  config = files.load('digits', [f'optimizer.schedule.{change}' for change in changes])
  assert any(f'schedule.{setting}: ' in text for text in check.problems(config))
