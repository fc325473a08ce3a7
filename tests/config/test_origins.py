"""The lines of a config file that set its settings."""
from __future__ import annotations

import pathlib

import pytest

from vit_jax.config import files, origins, schema

CONFIG = """import copy
import dataclasses
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

PLAIN = s.AdamW(lr=.5,
                b1=.8)

def get_config() -> s.Config:
  config = s.Config(
      name='mine',
      model=dataclasses.replace(sizes.model('DeiT-III-B/16'), depth=2),
      optimizer=copy.deepcopy(PLAIN))
  config.train.ema = .5
  config.optimizer.schedule = s.Schedule(s.Decay.COSINE)
  return config
"""


@pytest.fixture
def found(tmp_path: pathlib.Path) -> tuple[schema.Config, origins.Origins]:
  path = tmp_path / 'mine.py'
  path.write_text(CONFIG)
  watched = origins.Origins()
  config = watched.watch(lambda: files.read(str(path)))
  assert isinstance(config, schema.Config)
  return config, watched


def test_a_setting_has_the_line_that_names_it(found: tuple[schema.Config, origins.Origins]) -> None:
  config, watched = found
  lines = {name: watched.of(part, name) for part, name in (
      (config, 'name'), (config.model, 'depth'), (config.optimizer, 'lr'), (config.optimizer, 'b1'),
      (config.train, 'ema'), (config.optimizer, 'schedule'))}
  assert {name: str(line) for name, line in lines.items()} == {
      'name': 'mine.py:11', 'depth': 'mine.py:12', 'lr': 'mine.py:6', 'b1': 'mine.py:7', 'ema': 'mine.py:14',
      'schedule': 'mine.py:15'}
  assert all(line is not None and line.is_named for line in lines.values())


def test_what_another_module_sets_has_the_line_that_calls_it(found: tuple[schema.Config, origins.Origins]) -> None:
  config, watched = found
  assert isinstance(config.model, schema.ViT)
  line = watched.of(config.model.block, 'layer_scale')
  assert line is not None and (line.number, line.is_named) == (12, False)
  decay = watched.of(config.optimizer.schedule, 'decay')
  assert decay is not None and (decay.number, decay.is_named) == (15, False)  # given by its place


def test_parts_that_are_defaults_have_no_line(found: tuple[schema.Config, origins.Origins]) -> None:
  config, watched = found
  assert watched.of(config.data, 'source') is None and watched.of(config.data.recipe, 'crop') is None
  assert watched.of(config.train, 'log_every') is None
