"""Every number of a config has a declared range, is finite, and is checked for itself."""
from __future__ import annotations

import dataclasses
import enum
import math
import typing

import options
import pytest

from vit_jax.config import check, durations, files, schema
from vit_jax.config.schema import ranges
from vit_jax.core.errors import UserError

FIELDS = [(kind, field) for kind in options.classes() for field in dataclasses.fields(kind)]


def kinds(declared: object) -> set[type]:
  """The plain types in a declaration such as `tuple[float, ...]`."""
  found = {kind for part in typing.get_args(declared) for kind in kinds(part)}
  return found | ({declared} if isinstance(declared, type) and not found else set())


def test_every_number_of_the_schema_has_a_range_that_holds_its_default() -> None:
  numeric = [(kind, field) for kind, field in FIELDS if kinds(field.type) & {int, float}]
  assert len(numeric) > 150
  for kind, field in numeric:
    allowed = field.metadata.get('allowed')
    assert isinstance(allowed, ranges.Range), f'{kind.__name__}.{field.name} has no range; declare it with ranged()'
    assert -math.inf < allowed.low < allowed.high < math.inf
    values = field.default if isinstance(field.default, tuple) else (field.default,)
    assert all(allowed.has(value) for value in values), f'{kind.__name__}.{field.name}'


def test_every_length_of_time_is_declared_as_one() -> None:
  """Texts whose default is a duration, and those that are off with '' but take one."""
  off = {'cooldown', 'hold', 'frozen_until', 'keep_every', 'local', 'histograms', 'stairs', 'lag', 'refresh'}
  for kind, field in FIELDS:
    texts = field.default if isinstance(field.default, tuple) else (field.default,)
    is_one = field.name in off or field.name == 'milestones' or any(map(is_duration, texts))
    assert is_one == isinstance(field.metadata.get('allowed'), ranges.Span), f'{kind.__name__}.{field.name}'


def is_duration(text: object) -> bool:
  try:
    return isinstance(text, str) and bool(durations.parse(text))
  except UserError:
    return False


def test_the_defaults_of_all_parts_have_no_problems() -> None:
  for kind in options.classes():
    given = {'paths': '.*'} if kind is schema.PathRule else {}
    assert not [*ranges.problems(kind(**given))], kind.__name__


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf, 1e300, 10**400, 1e-60, '0.1', None, True, [1.]])
def test_no_number_may_be_infinite_or_out_of_float32_or_something_else(value: object) -> None:
  [problem] = check.problems(schema.Config(optimizer=schema.AdamW(lr=value)))
  assert problem.startswith('optimizer.lr: expected ')


@pytest.mark.parametrize(('config', 'said'), [
    (schema.Config(optimizer=schema.AdamW(weight_decay=math.nan)),
     'optimizer.weight_decay: expected at least 0, and finite, got nan.'),
    (schema.Config(data=schema.Data(recipe=schema.Recipe(mixup=math.inf))),
     'data.recipe.mixup: expected at least 0, and finite, got inf.'),
    (schema.Config(length='0 steps'), "length: expected more than 0 steps, got '0 steps'."),
    (schema.Config(length='1e400 steps'), 'length: expected at most 2,147,483,647 steps, got'),
    (schema.Config(length='9' * 5000 + ' steps'), 'length: expected at most 2,147,483,647 steps, got'),
    (schema.Config(length=7), 'length: expected text, got 7.'),
    (schema.Config(name='a\0'), "name: expected text without NUL characters, got 'a\\x00'."),
    (schema.Config(train=schema.Train(log_every='0 steps')), 'train.log_every: expected more than 0 steps'),
    (schema.Config(batch_size=2**31), 'batch_size: expected at least 1, and at most 2,147,483,647 (int32)'),
    (schema.Config(seed=10**5000), 'seed: expected 0 to 4294967295, got an integer of 16,610 bits.'),
    (schema.Config(seed=1.5), 'seed: expected a whole number, got 1.5.'),
    (schema.Config(batch_size=True), 'batch_size: expected a whole number, got True.'),
    (schema.Config(image_px=(32,)), 'image_px: expected a tuple of 2 values, got (32,).'),
    (schema.Config(image_px=[32, 32]), 'image_px: expected a tuple of 2 values, got [32, 32].'),
    (schema.Config(model=schema.ViT(patch=0)), 'model.patch: expected 1 to 65535 px, got 0.'),
    (schema.Config(model=schema.ViT(gelu='tanh')), 'model.gelu: expected one of Gelu.TANH, Gelu.EXACT'),
    (schema.Config(model='S/16'), "model: expected ViT or ResNet or Mixer or EfficientNet or AxialResNet, got 'S/16'."),
    (schema.Config(evals={'x': 3}), 'evals: expected TopK or Real or'),
    (schema.Config(evals=[]), 'evals: expected a dict with names as keys, got [].'),
    (schema.Config(evals={'x': schema.Knn(temperature=0.)}), 'evals.x.temperature: expected more than 0, got 0.0.'),
    (schema.Config(optimizer=schema.AdamW(rules=(schema.PathRule('x', schema.Ramp(end=-1.)),))),
     'optimizer.rules[0].lr.end: expected at least 0, got -1.0.'),
    (schema.Config(optimizer=schema.AdamW(weight_decay_mask=('a', 3))),
     'optimizer.weight_decay_mask: expected a tuple, each text'),
], ids=lambda x: x[:40] if isinstance(x, str) else '')
def test_each_setting_is_named_with_what_it_may_be(config: schema.Config, said: str) -> None:
  [problem] = check.problems(config)
  assert problem.startswith(said)


def test_what_does_not_go_together_is_listed_beside_ranges_but_not_blamed_for_them() -> None:
  found = check.problems(schema.Config(
      batch_size=-1, train=schema.Train(accumulate=3), model=schema.ViT(heads=5),
      optimizer=schema.AdamW(lr=math.nan, b1=2., schedule=schema.Schedule(
          schema.Decay.COSINE, end_lr=1.))))
  assert [text.split(':')[0] for text in found] == [
      'batch_size', 'optimizer.lr', 'optimizer.b1', 'model.width']


def test_a_choice_is_not_a_number_with_a_range() -> None:
  assert not [field for _, field in FIELDS if isinstance(field.type, type) and issubclass(field.type, enum.Enum)
              and 'allowed' in field.metadata]


def test_repaired_settings_have_no_problems_and_keep_the_rest() -> None:
  config = schema.Config(seed=-1, batch_size=24, evals={'a': schema.Knn(every='x', limit=7)})
  assert check.repaired(config) == schema.Config(batch_size=24, evals={'a': schema.Knn(limit=7)})


@pytest.mark.parametrize(('allowed', 'text'), [
    (ranges.COUNT, 'at least 1'), (ranges.NOT_NEGATIVE, 'at least 0'), (ranges.POSITIVE, 'more than 0'),
    (ranges.SHARE, '0 to 1'), (ranges.BELOW_1, '0 to below 1'), (ranges.INSIDE, 'more than 0 to below 1'),
    (ranges.ANY, 'a finite number'), (ranges.Range(0, 9, also=(-1,), unit='px'), '0 to 9 px, or -1')])
def test_a_range_says_what_it_allows(allowed: ranges.Range, text: str) -> None:
  assert str(allowed) == text


def test_zero_means_off_where_it_did() -> None:
  config = files.load('digits', ['evals.test.every=0 steps', 'checkpoints.every=0 steps',
                                 'optimizer.schedule.warmup=0 steps'])
  assert not check.problems(config)
