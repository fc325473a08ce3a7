"""Checks a config before anything is allocated: one error that lists every problem.

Types and ranges of single settings are declared with the settings (`schema/ranges.py`); each settings dataclass checks
its combinations of settings (`schema/checks.py`). What depends on the data or the devices (class counts, divisibility
by the mesh) is checked where these are known, in `jobs/build.py` and `parallel/mesh.py`.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import checks, ranges
from vit_jax.core.errors import UserError


def check(config: schema.Config) -> None:
  """Raises UserError with all problems of a config, one a line."""
  if texts := problems(config):
    raise UserError(f'The config {checks.shown(config.name)} has {len(texts)} problem{"s" * (len(texts) > 1)}:\n'
                    + '\n'.join(f'  {text}' for text in texts))


def check_model(model: schema.Model, image_px: tuple[int, int]) -> None:
  """Raises UserError with all problems of the settings of a network for images of `image_px`, one a line."""
  if texts := problems(schema.Config(model=model, image_px=image_px), of='model'):
    raise UserError('\n'.join(texts))


def problems(config: schema.Config, *, of: str = '') -> list[str]:
  """Returns all problems of a config: values of a wrong type or out of range, and settings that do not go together.

  The latter are looked for with every wrong value replaced by its default, and what they say about these is left out.

  Args:
    config: the complete run.
    of: the dotted path of a part, such as `model`: only problems that this part and the parts of it report.
  """
  wrong = [problem for prefix, part in ranges.walk(config) if _is_inside(prefix, of)
           for problem in ranges.problems(part, prefix)]
  if not wrong:
    return list(dict.fromkeys(map(_shortened, combinations(config, of=of))))
  others = [_shortened(text) for text in combinations(repaired(config), of=of)
            if not any(_names(text, problem.name) for problem in wrong)]
  return [*map(str, wrong), *dict.fromkeys(others)]


def _names(text: str, setting: str) -> bool:
  """Returns whether a text names a setting such as `model.mlp`, as `model.mlp` or `mlp`, or `model.mlp.width` in it."""
  words = [word.rstrip('.') for word in re.findall(r'[^\s=:,;()\'"]+', text.replace('--config.', ''))]
  return any(f'.{setting}'.endswith(f'.{word}') or _is_inside(word, setting) for word in words)


def _shortened(text: str) -> str:
  """Returns the beginning and the end of a very long problem."""
  return text if len(text) <= 1000 else f'{text[:400]} … {text[-400:]}'


def combinations(config: schema.Config, *, of: str = '') -> Iterator[str]:
  """Yields problems of settings that do not go together, in a config whose single settings are valid."""
  for prefix, part in ranges.walk(config):
    if _is_inside(prefix, of):
      yield from checks.combinations(part, config, prefix.rstrip('.'))
  if not of and not config.mesh.slices:
    yield from _slices_problems(config)


def _is_inside(prefix: str, part: str) -> bool:
  """Returns whether a prefix of `walk`, such as `model.stem.`, is that of a part such as `model`, or of one in it."""
  return not part or prefix.startswith((f'{part}.', f'{part}['))


def repaired(value: Any) -> Any:
  """Returns a copy of settings in which those with a wrong value have their defaults, also in all parts."""
  if isinstance(value, Mapping):
    return {key: repaired(part) for key, part in value.items()}
  if isinstance(value, tuple):
    return tuple(map(repaired, value))
  if not dataclasses.is_dataclass(value) or isinstance(value, type):
    return value
  wrong = {problem.name for problem in ranges.problems(value)}
  return type(value)(**{field.name: checks.default_of(field) if field.name in wrong
                        else repaired(getattr(value, field.name)) for field in dataclasses.fields(value)})


def _slices_problems(config: schema.Config) -> Iterator[str]:
  """Yields why a run could not continue on fewer slices: more microbatches would change its results."""
  on_one_slice = schema.replaced(config, {'mesh.slices': 1})
  with_more = schema.replaced(on_one_slice, {'train.accumulate': 2 * config.train.microbatches,
                                             'batch_size': 2 * config.batch_size})
  known = set(combinations(on_one_slice))
  reasons = [problem for problem in combinations(with_more) if problem not in known]
  if rho := config.train.sam.rho:
    reasons.append(f'train.sam.rho={rho:g}: each microbatch has a perturbation of its own')
  if getattr(config.objective, 'mix_token', False):
    reasons.append('objective.mix_token=True: each microbatch mixes its own images')
  for reason in reasons:
    yield checks.problem('mesh.slices', 'the number of slices, as the results depend on the number of microbatches',
                         0, f'With 0 a run on fewer slices has more of them. {reason.rstrip(".")}.')
