"""The tasks of VTAB: which examples are in which split, and which class an example has."""
from __future__ import annotations

import pathlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.data import vtab_sets
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.formats import tfds as tfds_source
from vit_jax.data.formats import vtab
from vit_jax.data.formats.vtab import DATASETS, TASKS, find_bin
from vit_jax.data.image import decode
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Source, first_label, read_one
from vit_jax.recipes.vtab import GROUPS

pytest.importorskip('tensorflow_datasets')

SIZES = {  # train, val and test as published (arXiv 1910.04867, Table 1 and the authors' data)
    'caltech101': (2754, 306, 6084), 'cifar100': (45_000, 5000, 10_000), 'dtd': (1880, 1880, 1880),
    'flowers102': (1020, 1020, 6149), 'pets': (2944, 736, 3669), 'sun397': (76_128, 10_875, 21_750),
    'svhn': (65_931, 7326, 26_032), 'patch_camelyon': (262_144, 32_768, 32_768), 'eurosat': (16_200, 5400, 5400),
    'resisc45': (18_900, 6300, 6300), 'retinopathy': (35_126, 10_906, 42_670), 'clevr/count': (63_000, 7000, 15_000),
    'clevr/distance': (63_000, 7000, 15_000), 'dmlab': (65_550, 22_628, 22_735), 'kitti/distance': (6347, 423, 711),
    'dsprites/x_position': (589_824, 73_728, 73_728), 'dsprites/orientation': (589_824, 73_728, 73_728),
    'smallnorb/azimuth': (24_300, 12_150, 12_150), 'smallnorb/elevation': (24_300, 12_150, 12_150)}
CLASSES = (102, 100, 47, 102, 37, 397, 10, 2, 10, 45, 5, 8, 6, 6, 4, 16, 16, 18, 9)
SMALL = 10  # examples of each stored split


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  root = tmp_path_factory.mktemp('vtab')
  for dataset, fixture in vtab_sets.FIXTURES.items():
    vtab_sets.write(dataset, root, dict.fromkeys(fixture.published, SMALL))
  return root


def open_split(data_dir: pathlib.Path, task: str, split: str) -> Source:
  return opening.open_split(schema.Data(source=f'vtab:{task}', data_dir=str(data_dir)), split, image_px=(8, 8))


def test_there_are_nineteen_tasks_in_three_groups() -> None:
  assert list(TASKS) == list(SIZES) and [task.num_classes for task in TASKS.values()] == list(CLASSES)
  assert [sum(task.group == group for task in TASKS.values()) for group in GROUPS] == [7, 4, 8]
  assert set(vtab_sets.FIXTURES) == set(DATASETS) == {task.dataset for task in TASKS.values()}


@pytest.mark.parametrize('task', TASKS)
def test_splits_have_the_published_sizes_and_share_nothing(task: str) -> None:
  own, counts = DATASETS[TASKS[task].dataset], vtab_sets.FIXTURES[TASKS[task].dataset].published
  found = {split: vtab.find_ranges(own, counts, split=split) for split in vtab.SPLITS}
  sizes = {split: sum(len(rows) for _, rows in ranges) for split, ranges in found.items()}
  train, val, test = SIZES[task]
  assert sizes == {'train': train, 'val': val, 'test': test, 'trainval': train + val, 'train800': 800, 'val200': 200,
                   'train800val200': 1000}
  [one], [two], [three] = found['train'], found['val'], found['test']
  for (a, rows), (b, others) in ((one, two), (one, three), (two, three)):
    assert a != b or rows.stop <= others.start or others.stop <= rows.start
  assert found['train800val200'] == [(one[0], one[1][:800]), (two[0], two[1][:200])]


@pytest.mark.parametrize('task', TASKS)
def test_an_example_has_the_class_that_its_features_say(task: str, data_dir: pathlib.Path) -> None:
  rule = vtab_sets.FIXTURES[TASKS[task].dataset].classes[task]
  seen = set()
  for number, split in enumerate(vtab_sets.FIXTURES[TASKS[task].dataset].published):
    stored = vtab.VtabSource(_dataset(data_dir, TASKS[task].dataset), split, task=TASKS[task])
    labels = sorted(first_label(stored, i) for i in range(len(stored)))  # files have an order of their own
    assert labels == sorted(rule(i) for i in range(number * SMALL, number * SMALL + SMALL))
    seen |= set(labels)
    assert all(read_one(stored, i).label == first_label(stored, i) for i in (0, SMALL - 1))
  assert seen <= set(range(TASKS[task].num_classes)) and len(seen) > 1


@pytest.mark.parametrize(('task', 'wrong'), [
    ('pets', {'label': [37]}), ('pets', {'label': [float('inf')]}), ('pets', {'label': [b'3']}),
    ('pets', {'label': [2.7]}), ('pets', {'label': []}), ('pets', {}),
    ('dsprites/x_position', {'label_x_position': [32]}),
    ('clevr/count', {'objects/size': [0, 1]}), ('clevr/distance', {'objects/pixel_coords': [float('nan')] * 3}),
    ('clevr/distance', {'objects/pixel_coords': []}), ('kitti/distance', {'objects/type': [b'Car']}),
    ('kitti/distance', {'objects/type': [float('inf')], 'objects/location': [0.] * 3}),
    ('kitti/distance', {'objects/type': [0], 'objects/location': [float('nan')] * 3})], ids=str)
def test_a_record_without_a_class_of_the_task_counts_as_a_bad_image(
    task: str, wrong: dict[str, list[Any]], data_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  dataset = TASKS[task].dataset
  split = next(iter(vtab_sets.FIXTURES[dataset].published))
  stored = vtab.VtabSource(_dataset(data_dir, dataset), split, task=TASKS[task])
  monkeypatch.setattr(stored, 'features', lambda row: wrong)
  with pytest.raises(BadImage, match='^the record: expected '):
    stored.labels(0)


def _dataset(data_dir: pathlib.Path, dataset: str) -> tfds_source.Dataset:
  return tfds_source.read(tfds_source.find(dataset, data_dir=str(data_dir)))


def test_a_depth_on_an_edge_is_in_the_bin_below() -> None:
  assert [find_bin(x, (0., 8., 8.5)) for x in (.1, 8., 8.1, 8.5, 8.6)] == [0, 0, 1, 1, 2]


def test_pictures_come_as_they_are_stored_but_masks_as_black_and_white(data_dir: pathlib.Path) -> None:
  pets = read_one(open_split(data_dir, 'pets', 'test'), 0).image
  assert isinstance(pets, bytes) and decode.decode(pets).shape == (12, 15, 3)
  sprite = decode.decode(read_one(open_split(data_dir, 'dsprites/orientation', 'train'), 3).image)
  assert sprite.shape == (16, 16, 3) and set(np.unique(sprite)) == {0, 255}
  norb = decode.decode(read_one(open_split(data_dir, 'smallnorb/azimuth', 'test'), 3).image)
  assert norb.shape == (16, 16, 3) and (norb[..., 0] == norb[..., 2]).all()


def test_a_split_is_parts_of_what_is_stored(data_dir: pathlib.Path) -> None:
  whole = open_split(data_dir, 'eurosat', 'trainval')
  assert len(whole) == 8 and whole.name == 'vtab:eurosat/trainval' and len(whole.class_names) == 10
  test = open_split(data_dir, 'eurosat', 'test')
  assert [test.describe(i) for i in range(2)] == ['vtab:eurosat/train[8]', 'vtab:eurosat/train[9]']
  both = open_split(data_dir, 'smallnorb/elevation', 'trainval')
  assert len(both) == 15 and both.describe(14) == 'vtab:smallnorb/elevation/test[4]'
  copy = pickle.loads(pickle.dumps(whole))
  assert read_one(copy, 7) == read_one(whole, 7) and copy.class_names == whole.class_names
  assert whole.digest != test.digest != open_split(data_dir, 'smallnorb/azimuth', 'trainval').digest


def test_a_set_that_is_too_small_is_refused(data_dir: pathlib.Path) -> None:
  with pytest.raises(UserError, match='train800val200: expected 800 examples of train, got 9'):
    open_split(data_dir, 'caltech101', 'train800val200')


@pytest.mark.parametrize('task', TASKS)
def test_a_set_that_is_not_there_is_told_how_to_get(task: str, tmp_path: pathlib.Path) -> None:
  dataset = TASKS[task].dataset
  manual = dataset.startswith(('resisc45', 'diabetic'))
  with pytest.raises(UserError) as raised:
    open_split(tmp_path, task, 'train800')
  text = str(raised.value)
  assert text.startswith(f'VTAB task {task}: tfds:{dataset} is not prepared in {tmp_path}. To prepare it')
  assert text.endswith(f'python -m vit_jax.data.formats.tfds_build {dataset} {tmp_path}')
  assert ('manually' in text and f'into {tmp_path}/downloads/manual; then' in text) is manual


def test_the_command_that_prepares_a_set_quotes_its_folder(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=f"tfds_build eurosat/.* '{tmp_path}/my sets'$"):
    open_split(tmp_path / 'my sets', 'eurosat', 'train')


def test_an_unknown_task_gets_the_nearest_one() -> None:
  with pytest.raises(UserError, match=r"task: expected one of cal.*, got 'clevr/counts'. Did you mean clevr/count\?"):
    opening.open_split(schema.Data(source='vtab:clevr/counts'), 'train', image_px=(8, 8))


@pytest.mark.slow(reason='2 s: starts a program; tests/data/test_tfds.py has the reader')
def test_tensorflow_is_not_imported(data_dir: pathlib.Path) -> None:
  code = ('import sys\nfrom vit_jax.config import schema\nfrom vit_jax.data import opening\n'
          f'data = schema.Data(source="vtab:kitti/distance", data_dir={str(data_dir)!r})\n'
          'next(iter(opening.open_split(data, "train", image_px=(8, 8)).read([0])))\n'
          'assert "tensorflow" not in sys.modules')
  subprocess.run([sys.executable, '-c', code], check=True, timeout=120)
