"""Checks a config before anything is allocated: one error that lists every problem.

Types and ranges of single settings are declared in the schema (`schema/ranges.py`); here and in `*_options.py` is
what several settings must satisfy together. What only the data or the devices can tell (class counts, divisibility
by the mesh) is checked where it is known, in `jobs/build.py` and `parallel/mesh.py`.
"""
from __future__ import annotations

from collections.abc import Iterator

from vit_jax.config import schema
from vit_jax.config.schema import checks, ranges
from vit_jax.core.errors import UserError


def check(config: schema.Config) -> None:
  """Raises UserError with all problems of a config, one a line."""
  if found := problems(config):
    raise UserError(f'The config {checks.shown(config.name)} has {len(found)} problem{"s" * (len(found) > 1)}:\n'
                    + '\n'.join(f'  {problem}' for problem in found))


def check_model(model: schema.Model, image_px: tuple[int, int]) -> None:
  """Raises UserError with all problems of the settings of a network for images of `image_px`, one a line."""
  if found := problems(schema.Config(model=model, image_px=image_px), of='model'):
    raise UserError('\n'.join(found))


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
  yield from _model(c)


def _model(c: schema.Config) -> Iterator[str]:
  if c.model.has_batch_norm and c.train.accumulate > 1:
    yield (f'train.accumulate={c.train.accumulate} would give the BatchNorm of the model the statistics of a part of '
           'the batch; want train.accumulate=1')
