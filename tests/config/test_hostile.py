"""Hostile values in every setting: each is refused with a message that names the setting, or is a config that builds.

Nothing is compiled. The seeds are fixed.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import random
from typing import Any

import jax
import pytest

from vit_jax.config import check, engine, files, overrides, schema
from vit_jax.config.schema import ranges
from vit_jax.core.errors import UserError
from vit_jax.jobs import build

TEXTS = ('0', '-1', 'nan', 'inf', '-inf', '1e400', '1' + '0' * 30, '9' * 5000, '1e-60', '1e300', '', ' ', 'word', '½',
         '\0', 'x' * 10_000, '0.5', '1', '2', '-0.0', 'None', 'true', '(', '[1,2', '1,2', '1,2,3', '0 steps',
         '-3 epochs', '1e400 steps', '9' * 5000 + ' epochs', '300 %', '{}', '__import__("os")',
         '\ud800', '0x10', '1_000', '/')
"""What a person may write behind `--config.NAME=`."""
VALUES = (0, -1, 1, .5, math.nan, math.inf, -math.inf, 1e300, 1e-60, 10**30, 10**400, 10**5000, True, None, '', 'word',
          '\0', b'x', (), (0,), (math.nan,), (1, 2), [], {}, object, schema.ClassToken(), schema.ViT, schema.ViT(), len)
"""What a config file may set."""
SPECS = ('digits', 'finetune:B/16,cifar10', 'dino_cifar10', 'mae_cifar10', 'noisy_student:cifar10,source=folder:x',
         'finetune_sweep:B/16,cifar10', 'distill_cifar10', 'token_label_i1k', 'mixer_i1k', 'evaluate', 'features')


@functools.cache
def first_run(spec: str) -> schema.Config:
  """The config, or the first one of a study."""
  return next(iter(files.load_study(spec, []).runs.values()))


def judge(spec: str, name: str, text: str) -> schema.Config | None:
  """The config with an override where it is accepted; what refuses it must name the setting, briefly."""
  try:
    config = overrides.changed({'': first_run(spec)}, [f'{name}={text}'])['']
    check.check(config)
  except UserError as error:
    message = str(error)
    assert len(message) < 4000 and '\0' not in message, message[:300]
    assert any(part in message for part in name.split('.')[-2:]), f'{name}={text[:40]!r}: {message[:300]}'
    return None
  return config


def cases(spec: str, most: int, seed: int = 0) -> list[tuple[str, str]]:
  """Settings and texts, drawn."""
  found = [(setting.name, text) for setting in engine.fields(first_run(spec)) for text in TEXTS]
  return random.Random(seed).sample(found, most)


def test_hostile_overrides_of_digits_are_refused_or_accepted() -> None:
  accepted = [config for name, text in cases('digits', 100) if (config := judge('digits', name, text))]
  assert 5 < len(accepted) < 80


@pytest.mark.slow(reason='about 3 s each: 100 overrides, each parsed three times')
@pytest.mark.parametrize('spec', SPECS)
def test_settings_of_every_config_take_hostile_overrides(spec: str) -> None:
  for name, text in cases(spec, 100, seed=SPECS.index(spec)):
    judge(spec, name, text)


@pytest.mark.parametrize(('spec', 'most'), [('digits', 150), *(
    pytest.param(spec, 300, marks=pytest.mark.slow(reason='about 3 s each')) for spec in SPECS)])
def test_settings_of_a_config_file_take_hostile_values(spec: str, most: int) -> None:
  config = first_run(spec)
  places = [(prefix, field.name, value) for prefix, part in ranges.walk(config) for field in dataclasses.fields(part)
            for value in VALUES]
  num_refused = 0
  for prefix, name, value in random.Random(SPECS.index(spec)).sample(places, most):
    found = check.problems(replaced(config, prefix, name, value))
    num_refused += bool(found)
    assert all(len(problem) < 1000 for problem in found)
  assert num_refused > most / 2


def replaced(config: Any, prefix: str, name: str, value: Any) -> Any:
  """The config with one setting of the part at `prefix` replaced."""
  if not prefix:
    return dataclasses.replace(config, **{name: value})
  first, _, rest = prefix.partition('.')
  first, _, index = first.rstrip(']').partition('[')
  inner = getattr(config, first)
  if isinstance(inner, dict):
    key, _, rest = rest.partition('.')
    new: Any = inner | {key: replaced(inner[key], rest, name, value)}
  elif index:
    new = (*inner[:int(index)], replaced(inner[int(index)], rest, name, value), *inner[int(index) + 1:])
  else:
    new = replaced(inner, rest, name, value)
  return dataclasses.replace(config, **{first: new})


def builds(config: schema.Config) -> bool:
  """Whether the run can be built, without memory for its arrays; False where it is refused with a message."""
  try:
    mesh, _ = build.open_mesh(dataclasses.replace(config, mesh=schema.Mesh()))
    parts = build.parts(config, mesh=mesh, num_examples=config.data.num_examples or 1437, num_classes=10,
                        in_memory=False)
    jax.tree.map(lambda leaf: leaf.shape, parts.program.abstract_state)
  except UserError:
    return False
  return True


@pytest.mark.slow(reason='about 40 s: 50 builds')
def test_a_sample_of_what_is_accepted_builds() -> None:
  chosen = [(spec, *case) for spec in SPECS[:4] for case in cases(spec, 150, seed=1)]
  random.Random(1).shuffle(chosen)
  built = refused = 0
  for spec, name, text in chosen:
    if built + refused == 50:
      break
    if (config := judge(spec, name, text)) and config != first_run(spec):
      config = dataclasses.replace(config, model=small(config.model))
      if check.problems(config):
        continue
      is_built = builds(config)
      built, refused = built + is_built, refused + (not is_built)
  assert built > 33, (built, refused)


def small(model: schema.Model) -> schema.Model:
  """Few blocks, which compile no faster but trace so."""
  if not isinstance(model, schema.ViT):
    return model
  return dataclasses.replace(model, depth=min(model.depth, 2), full_remat=min(model.full_remat, 1))
