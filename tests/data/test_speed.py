"""The benchmark of recipes."""
from __future__ import annotations

import pathlib

import pytest

from tests.data.pictures import encode, picture
from vit_jax.config import check, schema
from vit_jax.data import speed
from vit_jax.data.sources import Record


def test_every_recipe_is_measured_in_turns() -> None:
  found = speed.measure([Record(encode(picture(0)), 0)], turns=3, chunk=2, image_px=(16, 16))
  assert set(found) == set(speed.RECIPES)
  assert all(0 < s.least <= s.median <= s.most for s in found.values())


def test_its_recipes_are_ones_that_may_be_trained_with() -> None:
  for recipe in speed.RECIPES.values():
    if not recipe.views.on:
      check.check(schema.Config(data=schema.Data(recipe=recipe)))


def test_a_folder_that_is_not_there_is_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert speed.main([]) == speed.main([str(tmp_path / 'no')]) == 2
  assert f'there is no folder {tmp_path}/no' in capsys.readouterr().err
