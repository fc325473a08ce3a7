"""Checks a config before anything is allocated: one error that lists every problem.

Types and ranges of single settings are declared in the schema (`schema/ranges.py`); here and in `*_options.py` is
what several settings must satisfy together. What only the data or the devices can tell (class counts, divisibility
by the mesh) is checked where it is known, in `jobs/build.py` and `parallel/mesh.py`.
"""
from __future__ import annotations

from collections.abc import Iterator

from vit_jax.config import (
    evaluations,
    model_options,
    pseudo_options,
    recipe_options,
    schema,
    training_options,
)
from vit_jax.config.schema import checks, ranges
from vit_jax.core.errors import UserError

VIEWS = ('student', 'ema', 'teacher')
"""Networks of a run, by the names of its views."""


def check(config: schema.Config) -> None:
  """Raises UserError with all problems of a config, one a line."""
  if found := problems(config):
    raise UserError(f'The config {checks.shown(config.name)} has {len(found)} problem{"s" * (len(found) > 1)}:\n'
                    + '\n'.join(f'  {problem}' for problem in found))


def problems(config: schema.Config, *, of: str = '') -> list[str]:
  """All problems of a config: values of a wrong type or out of range, and settings that do not go together.

  Args:
    config: the complete run.
    of: the dotted path of a part, such as `model`: only problems that this part and the parts of it report.
  """
  return ranges.all_problems(config, lambda sound: _together(sound, of), of=of)


def _together(c: schema.Config, of: str) -> Iterator[str]:
  for prefix, part in ranges.walk(c):
    if hasattr(part, 'problems') and ranges.is_inside(prefix, of):
      yield from part.problems(c, prefix.rstrip('.'))
  if of:
    return
  for part in (_run, _model, _data, _optimizer, _checkpoints, _evals):
    yield from part(c)


def _run(c: schema.Config) -> Iterator[str]:
  if c.batch_size % c.train.accumulate:
    yield f'batch_size={c.batch_size} is not a multiple of train.accumulate={c.train.accumulate}'
  yield from _init(c)


def _init(c: schema.Config) -> Iterator[str]:
  if c.init_view not in ('', *VIEWS):
    yield f'init_view={c.init_view!r} is not known; want {", ".join(VIEWS)}, or nothing'
  if not c.init_from and c.init_view:
    yield f"init_view: expected '' without init_from, got {c.init_view!r}. Set init_from=RUN, whose view it is."


def _model(c: schema.Config) -> Iterator[str]:
  yield from model_options.faults(c.model, c.image_px)
  if isinstance(c.objective, schema.Distill):
    yield from (f'objective.teacher.{fault}' for fault in model_options.faults(c.objective.teacher.model, c.image_px))
  if model_options.has_statistics(c.model) and c.train.accumulate > 1:
    yield (f'train.accumulate={c.train.accumulate} would give the BatchNorm of the model the statistics of a part of '
           'the batch; want train.accumulate=1')
  if c.optimizer.layer_decay != 1 and isinstance(c.model, schema.ResNet | schema.EfficientNet):
    yield (f'optimizer.layer_decay={c.optimizer.layer_decay} counts blocks, which model {type(c.model).__name__} has '
           'not; want 1')


def _data(c: schema.Config) -> Iterator[str]:
  d, r = c.data, c.data.recipe
  if r.mixup and c.batch_size % 2:
    yield f'batch_size={c.batch_size} is odd, but mixup mixes pairs; want an even batch'
  if r.eval_resize_px and r.eval_resize_px < max(c.image_px):
    yield f'data.recipe.eval_resize_px={r.eval_resize_px} is smaller than image_px={c.image_px}'
  if d.in_memory is schema.InMemory.YES and r.crop is not schema.Crop.RESIZE:
    yield (f'data.in_memory=yes holds images of one size, but data.recipe.crop={r.crop.value} crops from the stored '
           'picture; want data.recipe.crop=resize or data.in_memory=no')
  if d.decode is schema.Decode.CROP and (r.crop is schema.Crop.RESIZE or r.views.on):
    yield ('data.decode=crop decodes what one random crop shows, but '
           + ('data.recipe.views takes several of each picture' if r.views.on else 'data.recipe.crop=resize crops none')
           + '; want data.decode=full')
  read = [d.source, *(e.source for e in c.evals.values())]
  if d.data_dir and not any(kind in source for source in read for kind in ('tfds:', 'vtab:')):
    yield (f'data.data_dir={d.data_dir!r} is where sets of TFDS lie, but data.source={d.source!r} is none; want no '
           'data_dir')
  if d.in_memory is schema.InMemory.YES and d.workers:
    yield f'data.workers={d.workers} have nothing to do with data.in_memory=yes; want workers=0'
  yield from recipe_options.faults(c)
  yield from pseudo_options.faults(c)


def _optimizer(c: schema.Config) -> Iterator[str]:
  o = c.optimizer
  peak = o.lr * c.batch_size / o.base_batch_size if o.base_batch_size else o.lr
  if o.schedule.end_lr > peak:
    yield (f'optimizer.schedule.end_lr: expected at most {peak:g}, the peak that optimizer.lr={o.lr} gives, got '
           f'{o.schedule.end_lr}.')
  yield from training_options.faults(c)


def _checkpoints(c: schema.Config) -> Iterator[str]:
  if c.checkpoints.keep_best:
    yield from training_options.metric_faults('checkpoints.keep_best', c.checkpoints.keep_best, c)


def _evals(c: schema.Config) -> Iterator[str]:
  for name, e in c.evals.items():
    for view in e.views:
      if view == 'ema' and not c.train.ema:
        yield f'evals.{name}.views names ema, but train.ema=0 keeps no moving average'
  yield from evaluations.faults(c)
