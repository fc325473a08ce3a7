"""What the schema says about each setting."""
import dataclasses
from dataclasses import field

import pytest

from vit_jax.config import describe, engine, overrides, schema
from vit_jax.config.schema import checks, ranges


@dataclasses.dataclass
class Part(checks.Settings):
  """A part with settings of its own."""
  # of the first line,
  # and the second
  first: float = ranges.ranged(.5, ranges.BELOW_1)
  crop_px: tuple[int, int] = ranges.ranged((8, 8), ranges.PX)  # height, width
  plain: str = ''


@dataclasses.dataclass
class Whole(checks.Settings):
  part: Part = field(default_factory=lambda: Part(first=.25))
  span: str = ranges.duration('', off=True)


def by_name(config: object) -> dict[str, describe.Described]:
  return {one.name: one for one in describe.settings(config)}


def test_comments_above_and_beside_a_setting_say_what_it_means() -> None:
  assert describe.comments(Part) == {
      'first': 'of the first line, and the second', 'crop_px': 'height, width', 'plain': ''}


def test_the_default_is_that_of_the_part_around() -> None:
  found = by_name(Whole(part=Part(first=.75)))['part.first']
  assert (found.value, found.default, found.allowed, found.type) == (.75, .25, '0 to below 1', 'number')


def test_units_and_lengths_are_said() -> None:
  found = by_name(Whole())
  assert (found['part.crop_px'].unit, found['part.crop_px'].type) == ('px', '2 whole numbers with commas')
  assert found['span'].type == 'length' and "or '' for off" in found['span'].allowed and '%' in found['span'].unit


@pytest.mark.parametrize('config', [
    schema.Config(), schema.Config(model=schema.Mixer(), optimizer=schema.Sgd(), evals={'a': schema.Knn()})])
def test_every_setting_that_can_be_overridden_is_described_once(config: schema.Config) -> None:
  names, of_parts = [one.name for one in describe.settings(config)], dict(engine.walk(config))
  assert [name for name in names if name not in of_parts] == [one.name for one in engine.fields(config)]
  assert {name for name in names if name in of_parts} == {name for name, kind in of_parts.items() if engine.kinds(kind)}


def test_the_shown_value_can_be_given_on_the_command_line() -> None:
  config = schema.Config()
  for one in describe.settings(config):
    if one.value not in ((), ''):
      assert overrides.changed({'': config}, [f'{one.name}={describe.text(one.value)}']) == {'': config}, one.name
