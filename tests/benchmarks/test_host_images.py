"""The benchmark of recipes."""
from __future__ import annotations

import pathlib

import pytest

from benchmarks import host_images
from tests.data.images import encode, random_image
from vit_jax import main
from vit_jax.config import check, schema
from vit_jax.data.image import jpeg
from vit_jax.data.source import Record, Rows


class Images(Rows):
  """A source of five images that records what is read."""
  name, class_names, digest = 'images', ('0',), ''

  def __init__(self) -> None:
    self.found: list[int] = []

  def __len__(self) -> int:
    return 5

  def example(self, row: int) -> Record:
    self.found.append(row)
    return Record(encode(random_image(row)), (0,))

  def labels(self, row: int) -> tuple[int, ...]:
    return (0,)

  def describe(self, index: int) -> str:
    return str(index)


def test_every_recipe_is_measured_on_every_dataset_interleaved() -> None:
  sets = {'a': Images(), 'b': Images()}
  found = host_images.measure(sets, rounds=3, chunk=2, image_px=(16, 16))
  assert set(found) == {'a', 'b'} and set(found['a']) == set(found['b'])
  assert set(found['a']) - {host_images.PARTIAL} == set(host_images.RECIPES)
  assert (host_images.PARTIAL in found['a']) == jpeg.is_installed()
  assert all(0 < s.smallest <= s.median <= s.largest for speeds in found.values() for s in speeds.values())
  assert {s.ratio for s in found['a'].values()} == {1.} and all(s.ratio > 0 for s in found['b'].values())
  assert sets['a'].found == sets['b'].found
  assert len(sets['a'].found) == (3 + 1) * 2 * (len(host_images.RECIPES) + jpeg.is_installed())


def test_its_recipes_are_valid_for_training() -> None:
  plain = [recipe for recipe in host_images.RECIPES.values() if not recipe.views.on]
  assert plain
  for recipe in plain:
    check.check(schema.Config(data=schema.Data(recipe=recipe)))


def test_folders_of_images_and_of_shards_are_distinguished(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  for split in ('train', 'test'):
    (tmp_path / 'images' / split / 'one').mkdir(parents=True)
    for i in range(3):
      (tmp_path / 'images' / split / 'one' / f'{i}.png').write_bytes(encode(random_image(i)))
  images, shards = str(tmp_path / 'images'), str(tmp_path / 'shards')
  assert main.run(['prepare', f'--data=folder:{images}', f'--to={shards}']) == 0
  assert host_images.open_set(images).name.startswith('folder:')
  assert host_images.open_set(shards).name.startswith('array_record:')
  monkeypatch.setattr(host_images, 'RECIPES', {'crop and flip': schema.Recipe()})
  monkeypatch.setattr(jpeg, 'is_installed', lambda: False)
  capsys.readouterr()
  assert host_images.main([images, shards]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [lines[0], lines[3]] == [images, shards] and lines[2].endswith('1.00')
  assert lines[2].startswith('crop and flip') and len(lines[5].split()) == 3 + 4


def test_a_missing_folder_is_named_in_the_error(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert host_images.main([]) == host_images.main(['--help']) == host_images.main([str(tmp_path / 'no')]) == 2
  assert f'{tmp_path}/no: expected a folder with' in capsys.readouterr().err
