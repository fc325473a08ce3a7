"""Which settings of optimiser, schedule, loss and training go together. Asked by `check.py` alone."""
from __future__ import annotations

from collections.abc import Iterator

from vit_jax.config import durations, schema
from vit_jax.core.errors import UserError

METRICS = ('ece', 'class_mean')
"""What `TopK.metrics` may name."""

ALWAYS = ('top1', 'top5', 'nll')
"""What every `TopK` measures."""


def faults(c: schema.Config) -> Iterator[str]:
  """What is wrong, each with its value and what would be right."""
  yield from _train(c)
  for name, one in c.evals.items():
    unknown = [m for m in one.metrics if m not in METRICS] if isinstance(one, schema.TopK) else []
    if unknown:
      yield (f'evals.{name}.metrics: unknown {", ".join(unknown)}; beside top1, top5 and nll there are: '
             f'{", ".join(METRICS)}')


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
