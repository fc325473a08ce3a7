"""Which settings of optimiser, schedule, loss and training go together. Asked by `check.py` alone."""
from __future__ import annotations

import re
from collections.abc import Iterator

from vit_jax.config import durations, schema
from vit_jax.core.errors import UserError

METRICS = ('ece', 'class_mean')
"""What `TopK.metrics` may name."""

ALWAYS = ('top1', 'top5', 'nll')
"""What every `TopK` measures."""

ENDED = (schema.Decay.COSINE, schema.Decay.LINEAR)
"""Decays that reach `end_lr` by themselves."""


def faults(c: schema.Config) -> Iterator[str]:
  """What is wrong, each with its value and what would be right."""
  yield from _optimizer(c.optimizer)
  yield from _schedule(c.optimizer.schedule)
  for i, rule in enumerate(c.optimizer.rules):
    yield from _rule(f'optimizer.rules[{i}]', rule, c.optimizer)
  yield from _train(c)
  for name, one in c.evals.items():
    unknown = [m for m in one.metrics if m not in METRICS] if isinstance(one, schema.TopK) else []
    if unknown:
      yield (f'evals.{name}.metrics: unknown {", ".join(unknown)}; beside top1, top5 and nll there are: '
             f'{", ".join(METRICS)}')


def _optimizer(o: schema.Optimizer) -> Iterator[str]:
  clips = {name: getattr(o, name) for name in ('clip_norm', 'clip_tensor', 'clip_adaptive')}
  if sum(value > 0 for value in clips.values()) > 1:
    both = ', '.join(f'optimizer.{name}={value}' for name, value in clips.items() if value > 0)
    yield f'{both}: each clips what another has clipped; want one of them, and 0 for the others'
  if o.layer_decay == 1 and o.layer_groups is not schema.LayerGroups.MAE:
    yield f'optimizer.layer_groups={o.layer_groups.value} changes nothing with optimizer.layer_decay=1 (off)'
  by = getattr(o, 'decay_by', None)
  if by is schema.DecayBy.GRADIENT and not isinstance(o, schema.Sgd):
    yield (f'optimizer.decay_by: expected lr or schedule for {type(o).__name__}, whose weight decay is decoupled, got '
           'gradient. Set one of these, or take the optimizer Adam or Sgd.')
  if isinstance(o, schema.Sgd) and by is not schema.DecayBy.GRADIENT and not o.weight_decay:
    yield (f'optimizer.weight_decay: expected a positive number with optimizer.decay_by={o.decay_by.value}, got 0. Set '
           'optimizer.weight_decay, or optimizer.decay_by=gradient.')
  if by is schema.DecayBy.SCHEDULE and o.lr == 0:
    yield 'optimizer.decay_by=schedule divides the schedule by its peak, but optimizer.lr=0; want a positive lr'
  for name in ('weight_decay_mask', 'trust_ratio_mask'):
    for pattern in getattr(o, name, ()):
      yield from _pattern(f'optimizer.{name}', pattern)
  if o.weight_decay and not o.weight_decay_mask:
    yield f'optimizer.weight_decay={o.weight_decay} decays nothing with optimizer.weight_decay_mask=()'
  if o.weight_decay == 0 and o.weight_decay_ramp != schema.Ramp():
    yield 'optimizer.weight_decay_ramp changes nothing with optimizer.weight_decay=0'


def _schedule(s: schema.Schedule) -> Iterator[str]:
  steps = schema.Decay.STEPS
  if s.cooldown:
    if s.decay in ENDED:
      yield (f'optimizer.schedule.cooldown={s.cooldown!r}: decay={s.decay.value} reaches end_lr by itself; want no '
             'cooldown, or decay rsqrt, steps or constant')
  elif s.end_lr and s.decay not in ENDED:
    yield (f'optimizer.schedule.end_lr={s.end_lr} is never reached by decay={s.decay.value} without a cooldown; want a '
           'cooldown, or end_lr=0')
  if s.hold and s.decay not in ENDED:
    yield (f'optimizer.schedule.hold: expected none with decay={s.decay.value}, got {s.hold!r}. It is for cosine and '
           'linear, which reach end_lr; set a cooldown instead.')
  if bool(s.milestones) != (s.decay is steps):
    yield (f'optimizer.schedule.milestones={s.milestones} with decay={s.decay.value}; set them for decay=steps alone')
  usual = schema.Schedule()
  exponential = schema.Decay.EXPONENTIAL
  for name, decays in (('timescale', (schema.Decay.RSQRT,)), ('gamma', (steps, exponential)),
                       ('every', (exponential,))):
    if getattr(s, name) != getattr(usual, name) and s.decay not in decays:
      yield (f'optimizer.schedule.{name}={getattr(s, name)} changes nothing with decay={s.decay.value}; it is of '
             f'decay={" or ".join(decay.value for decay in decays)}')


def _rule(name: str, rule: schema.PathRule, o: schema.Optimizer) -> Iterator[str]:
  yield from _pattern(f'{name}.paths', rule.paths)
  if rule.weight_decay != 1. and o.weight_decay == 0:
    yield f'{name}.weight_decay={rule.weight_decay} is a factor of optimizer.weight_decay=0; want a positive one there'


def _pattern(name: str, text: str) -> Iterator[str]:
  try:
    re.compile(text)
  except re.error as error:
    yield f'{name}={text!r} is no regular expression: {error}'


def metric_faults(name: str, text: str, c: schema.Config) -> Iterator[str]:
  """What is wrong with `EVALUATION/METRIC[@VIEW]`, the name of a number that an evaluation of the config measures."""
  evaluation, _, rest = text.partition('/')
  metric, _, view = rest.partition('@')
  measured = c.evals.get(evaluation)
  if measured is None:
    yield (f'{name}={text!r} is measured by no evaluation; want EVALUATION/METRIC with one of: '
           f'{", ".join(c.evals) or "(none configured)"}')
    return
  if isinstance(measured, schema.TopK) and metric not in (*ALWAYS, *measured.metrics):
    yield (f'{name}={text!r}: evals.{evaluation} measures {", ".join((*ALWAYS, *measured.metrics))}; want one of them, '
           f'or {metric or "METRIC"} in evals.{evaluation}.metrics')
  if view == 'ema' and not c.train.ema:
    yield f'{name}={text!r} is of the average, but train.ema=0 keeps none'
  if view == 'student':
    yield f'{name}={text!r}: numbers of the raw weights have no @; want {evaluation}/{metric}'
  elif measured.views and (view or 'student') not in measured.views:
    yield f'{name}={text!r}: evals.{evaluation}.views={",".join(measured.views)} leaves {view or "student"} out'


def _train(c: schema.Config) -> Iterator[str]:
  sam, stop, s = c.train.sam, c.train.early_stop, c.optimizer.schedule
  if not sam.rho and (sam.alpha or sam.rho_end >= 0):
    yield f'train.sam.alpha={sam.alpha} and rho_end={sam.rho_end} change nothing with train.sam.rho=0 (off)'
  if sam.rho and sam.rho_end > sam.rho:
    yield f'train.sam.rho_end={sam.rho_end} is above train.sam.rho={sam.rho}; want it to fall with the learning rate'
  if sam.rho and sam.rho_end >= 0 and s.decay is schema.Decay.CONSTANT and not s.cooldown:
    yield f'train.sam.rho_end={sam.rho_end} is never reached: rho follows the learning rate, and that is constant'
  if not c.train.ema and c.train.ema_warmup is not schema.EmaWarmup.RATIO:
    yield f'train.ema_warmup={c.train.ema_warmup.value} changes nothing with train.ema=0 (off)'
  if stop.metric:
    yield from metric_faults('train.early_stop.metric', stop.metric, c)
  elif stop != schema.EarlyStop():
    yield (f'train.early_stop.patience={stop.patience} and min_delta={stop.min_delta} change nothing without '
           'train.early_stop.metric; want one such as test/top1')
  yield from _profile(c)


def _profile(c: schema.Config) -> Iterator[str]:
  try:
    durations.parse_steps(c.train.profile)
  except UserError as error:
    yield f'train.profile: {error}'
