"""The benchmark of recipes."""
from __future__ import annotations

import pathlib

import pytest

from tests.data.pictures import encode, picture
from vit_jax import main
from vit_jax.config import check, schema
from vit_jax.data.image import jpeg_crop
from vit_jax.data.pipeline import speed
from vit_jax.data.source import Record


class Pictures:
  """A source of five pictures that counts what is read."""
  name, class_names, digest = 'pictures', ('0',), ''

  def __init__(self) -> None:
    self.read: list[int] = []

  def __len__(self) -> int:
    return 5

  def __getitem__(self, index: int) -> Record:
    self.read.append(index)
    return Record(encode(picture(index)), 0)

  def label(self, index: int) -> int:
    return 0

  def describe(self, index: int) -> str:
    return str(index)


def test_every_recipe_is_measured_on_every_set_in_turns() -> None:
  sets = {'a': Pictures(), 'b': Pictures()}
  found = speed.measure(sets, turns=3, chunk=2, image_px=(16, 16))
  assert set(found) == {'a', 'b'} and set(found['a']) == set(found['b'])
  assert set(found['a']) - {speed.PARTIAL} == set(speed.RECIPES)
  assert (speed.PARTIAL in found['a']) == jpeg_crop.is_installed()
  assert all(0 < s.least <= s.median <= s.most for speeds in found.values() for s in speeds.values())
  assert {s.ratio for s in found['a'].values()} == {1.} and all(s.ratio > 0 for s in found['b'].values())
  assert sets['a'].read == sets['b'].read
  assert len(sets['a'].read) == (3 + 1) * 2 * (len(speed.RECIPES) + jpeg_crop.is_installed())


def test_its_recipes_are_ones_that_may_be_trained_with() -> None:
  for recipe in speed.RECIPES.values():
    if not recipe.views.on:
      check.check(schema.Config(data=schema.Data(recipe=recipe)))


def test_folders_of_pictures_and_of_shards_are_told_apart(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  for split in ('train', 'test'):
    (tmp_path / 'pictures' / split / 'one').mkdir(parents=True)
    for i in range(3):
      (tmp_path / 'pictures' / split / 'one' / f'{i}.png').write_bytes(encode(picture(i)))
  pictures, shards = str(tmp_path / 'pictures'), str(tmp_path / 'shards')
  assert main.run(['prepare', f'--data=folder:{pictures}', f'--to={shards}']) == 0
  assert speed.open_set(pictures).name.startswith('folder:')
  assert speed.open_set(shards).name.startswith('array_record:')
  monkeypatch.setattr(speed, 'RECIPES', {'crop and flip': schema.Recipe()})
  monkeypatch.setattr(jpeg_crop, 'is_installed', lambda: False)
  capsys.readouterr()
  assert speed.main([pictures, shards]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [lines[0], lines[3]] == [pictures, shards] and lines[2].endswith('1.00')
  assert lines[2].startswith('crop and flip') and len(lines[5].split()) == 3 + 4


def test_a_folder_that_is_not_there_is_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert speed.main([]) == speed.main([str(tmp_path / 'no')]) == 2
  assert f'there is no folder {tmp_path}/no' in capsys.readouterr().err
