"""One set of images in every format: the same batches bit for bit, for any number of hosts, and from any step on."""
from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable

import numpy as np
import pytest

from tests.data import packed, parquets
from vit_jax.config import schema
from vit_jax.core.types import Batch, Shard
from vit_jax.data import content
from vit_jax.data.pipeline import loader, order
from vit_jax.data.source import Source, Subset
from vit_jax.data.sources import opening
from vit_jax.jobs import prepare

FOUND = packed.examples(41)
BATCH = 8
FORMATS = ('folder', 'array_record', 'parquet', 'wds')


@pytest.fixture(scope='module')
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
  """Opens the images in a format, in the order of the folder; labels are names."""
  root = tmp_path_factory.mktemp('formats')
  for key, image, label in FOUND:
    path = root / 'folder' / 'train' / packed.NAMES[label] / f'{key}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image)
  folder = opening.open_split(schema.Data(source=f'folder:{root}/folder'), 'train', image_px=(8, 8))
  in_order = [packed.Example(pathlib.Path(folder.describe(i)).stem, folder[i].image, folder.label(i))
              for i in range(len(folder))]
  packed.write_tars(root / 'wds', 'train', in_order)
  parquets.write(root / 'parquet', 'train', in_order)
  prepare.run(root / 'array_record', data=f'wds:{root}/wds', label_column='json/label', splits=['train'])

  def open_format(name: str) -> Source:
    settings = {'wds': {'label_column': 'json/label'}}.get(name, {})
    source = opening.open_split(schema.Data(source=f'{name}:{root}/{name}', **settings), 'train', image_px=(8, 8))
    if name != 'array_record':
      return source
    stored = order.shuffled(np.arange(len(source)), num_examples=len(source), seed=0)  # as `prepare` stores them
    return Subset(source, np.argsort(stored), name=source.name)
  return open_format


def batches(source: Source, hosts: int, numbers: range) -> list[Batch]:
  """Global batches, of which each host makes its rows, begun anew at the first step."""
  parts = []
  for host in range(hosts):
    made = loader.train_loader(
        source, recipe=schema.Recipe(flip=True), image_px=(8, 10), batch_size=BATCH, seed=3,
        shard=Shard((host,), hosts), workers=0, threads=2, in_memory=False, max_bad_images=0)
    parts.append([{k: np.array(v) for k, v in b.items()}
                  for b in itertools.islice(made.batches(numbers.start), len(numbers))])
    made.close()
  return [{k: np.concatenate([part[i][k] for part in parts]) for k in parts[0][0]} for i in range(len(numbers))]


def check_same(found: list[Batch], expected: list[Batch]) -> None:
  for one, other in zip(found, expected, strict=True):
    assert one.keys() == other.keys()
    for name in one:
      np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize('name', FORMATS)
def test_every_format_gives_the_batches_of_the_folder_from_any_step_on_and_for_any_number_of_hosts(
    name: str, opened: Callable[[str], Source]) -> None:
  whole = batches(opened('folder'), 1, range(12))  # two epochs and a half
  check_same(batches(opened(name), 1, range(12)), whole)
  check_same(batches(opened(name), 2, range(7, 12)), whole[7:])
  check_same(batches(opened(name), 4, range(9, 12)), whole[9:])


@pytest.mark.parametrize('name', FORMATS)
def test_every_format_has_the_content_of_the_folder(name: str, opened: Callable[[str], Source]) -> None:
  assert content.read(opened(name)) == content.read(opened('folder'))
  assert opened(name).class_names == packed.NAMES


def test_prepared_examples_keep_names_without_the_folder(opened: Callable[[str], Source]) -> None:
  source = opened('array_record')
  names = {source.describe(i).rpartition('(')[2] for i in range(len(source))}
  assert '/' in (first := min(names)) and first.startswith('set-train-000.tar/') and len(names) == len(FOUND)
