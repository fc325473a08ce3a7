"""Features of a split, and the store they are kept in: whole, of these weights, and of nothing else."""
from __future__ import annotations

import logging
import mmap
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from tests.evaluate import rows
from vit_jax.core.errors import UserError
from vit_jax.evaluate import store
from vit_jax.evaluate.features import Layout, Rows, Store

FEATURES, LABEL = rows.clusters(37, classes=3, width=5, seed=0)


def by_example(split: rows.Split, scale: float = 1.) -> np.ndarray:
  """The features in the order of the source, from all parts; every example once."""
  found = np.full(FEATURES.shape, np.nan, np.float32)
  table = split.table(rows.weights(scale))
  for part in table:
    good = part.mask > 0
    assert np.isnan(found[part.example[good]]).all()
    found[part.example[good]] = part.features[good]
    np.testing.assert_array_equal(part.label[good], LABEL[part.example[good]])
  return found


@pytest.mark.parametrize(('size', 'mesh'), [(6, 'one'), (40, 'one'), (8, 'data=8'), (16, 'data=2,tensor=4')])
@pytest.mark.parametrize('kept', ['in memory', 'on disk'])
def test_every_example_is_there_once(size: int, mesh: str, kept: str, tmp_path: pathlib.Path) -> None:
  folder = tmp_path if kept == 'on disk' else None
  split = rows.split(rows.Loader(FEATURES, LABEL, size), mesh, folder=folder)
  np.testing.assert_array_equal(by_example(split), FEATURES)


def test_placed_rows_are_the_split_with_padding_beyond_its_end() -> None:
  split = rows.split(rows.Loader(FEATURES, LABEL, 16), 'data=2,tensor=4')
  table = split.table(rows.weights())
  placed = split.place(table, 16, 32)  # a part has 24 rows
  assert placed['features'].shape == (2, 16, 5) and placed['mask'].shape == (2, 16)
  layout = Layout(37, 16, 2, (0, 1))
  for part in range(2):
    examples = layout.examples(part)[16:24]
    good = examples < 37
    np.testing.assert_array_equal(np.asarray(placed['example'])[part, :8][good], examples[good])
    np.testing.assert_array_equal(np.asarray(placed['features'])[part, :8][good], FEATURES[examples[good]])
    np.testing.assert_array_equal(placed['mask'][part], np.r_[good, np.zeros(8)])


def test_a_layout_says_where_examples_are() -> None:
  layout = Layout(37, 12, 3, (0, 1, 2))
  every = np.concatenate([layout.examples(part) for part in range(3)])
  assert sorted(every) == list(range(48)) and layout.num_rows == 16
  for part in range(3):
    parts, places = layout.find(layout.examples(part))
    assert (parts == part).all() and (places == np.arange(16)).all()


def test_features_are_taken_once_for_all_evaluations_of_a_job() -> None:
  loader, shared = rows.Loader(FEATURES, LABEL, 6), Store(None)
  one, two = (rows.split(loader, store=shared) for _ in range(2))
  assert one.table(rows.weights()) is two.table(rows.weights()) and loader.passes == 1
  two.table(rows.weights(2.))
  assert loader.passes == 2
  rows.split(loader, store=shared, reader='another').table(rows.weights(2.))
  assert loader.passes == 3


def is_mapped(array: object) -> bool:
  """Whether the values of an array are in a mapped file, whatever it is a view of."""
  while array is not None and not isinstance(array, mmap.mmap):
    array = array.obj if isinstance(array, memoryview) else getattr(array, 'base', None)
  return array is not None


def test_the_next_job_reads_them_from_disk_mapped(tmp_path: pathlib.Path) -> None:
  by_example(rows.split(rows.Loader(FEATURES, LABEL, 8), 'data=8', folder=tmp_path))
  again = rows.Loader(FEATURES, LABEL, 8)
  split = rows.split(again, 'data=8', folder=tmp_path)
  np.testing.assert_array_equal(by_example(split), FEATURES)
  assert again.passes == 0 and is_mapped(split.table(rows.weights())[0].features)


@pytest.mark.parametrize(('size', 'mesh'), [(6, 'one'), (16, 'data=2,tensor=4')])
def test_other_batches_and_devices_read_them_too(size: int, mesh: str, tmp_path: pathlib.Path) -> None:
  by_example(rows.split(rows.Loader(FEATURES, LABEL, 8, bad=(4, 36)), 'data=8', folder=tmp_path))
  again = rows.Loader(FEATURES, LABEL, size)
  found = by_example(rows.split(again, mesh, folder=tmp_path))
  assert again.passes == 0 and np.flatnonzero(np.isnan(found[:, 0])).tolist() == [4, 36]
  good = ~np.isnan(found)
  np.testing.assert_array_equal(found[good], FEATURES[good])


def test_only_the_newest_weights_stay_on_disk(tmp_path: pathlib.Path) -> None:
  split = rows.split(rows.Loader(FEATURES, LABEL, 6), folder=tmp_path)
  for scale in (1., 2., 3.):
    np.testing.assert_array_equal(by_example(split, scale), FEATURES * np.float32(scale))
  assert len([path for path in tmp_path.rglob('*') if path.is_file()]) == len(list(tmp_path.glob('*/*'))) == 1


def only(folder: pathlib.Path) -> pathlib.Path:
  [path] = folder.rglob('*.parquet')
  return path


@pytest.mark.parametrize('how', ['flipped', 'cut', 'missing'])
def test_damaged_or_partial_features_are_taken_again(how: str, tmp_path: pathlib.Path,
                                                     caplog: pytest.LogCaptureFixture) -> None:
  by_example(rows.split(rows.Loader(FEATURES, LABEL, 6), folder=tmp_path))
  path = only(tmp_path)
  content = bytearray(path.read_bytes())
  match how:
    case 'missing':
      path.unlink()
    case 'cut':
      path.write_bytes(content[:-20])
    case _:
      content[100] ^= 1
      path.write_bytes(content)
  again = rows.Loader(FEATURES, LABEL, 6)
  with caplog.at_level(logging.WARNING):
    np.testing.assert_array_equal(by_example(rows.split(again, folder=tmp_path)), FEATURES)
  assert again.passes == 1 and ('are damaged and computed again' in caplog.text) is (how != 'missing')


def part_batches(layout: Layout) -> Iterator[Rows]:
  """The rows of the parts of one process, batch by batch."""
  examples = np.stack([layout.examples(part) for part in layout.parts])
  for start in range(0, layout.num_rows, layout.size):
    at = examples[:, start:start + layout.size]
    is_example = at < layout.num_examples
    index = np.where(is_example, at, 0)
    yield Rows(FEATURES[index], LABEL[index].astype(np.int32), at.astype(np.int32), is_example.astype(np.float32))


def test_hosts_with_disks_of_their_own_find_their_parts(tmp_path: pathlib.Path) -> None:
  identity, weights = {'data': 'a'}, 'f' * 64
  for part in range(2):
    layout = Layout(37, 12, 2, (part,))
    host = tmp_path / f'host{part}'
    made = Store(host).make(identity, weights, layout, part_batches(layout))
    found = Store(host).find(identity, weights, layout)
    assert found is not None and len(found) == 1
    for ours, theirs in zip(found[0], made[0], strict=True):
      np.testing.assert_array_equal(ours[made[0].mask > 0], theirs[made[0].mask > 0])
    assert Store(host).find(identity, weights, Layout(37, 12, 2, (1 - part,))) is None
  # On one disk all parts are those of everybody; and a set of parts that two processes have is one file.
  for path in (tmp_path / 'host1').rglob('*.parquet'):
    shutil.copy(path, next((tmp_path / 'host0').rglob('*.parquet')).parent)
  assert Store(tmp_path / 'host0').find(identity, weights, Layout(37, 37, 1, (0,))) is not None


def test_files_of_earlier_versions_make_room(tmp_path: pathlib.Path) -> None:
  identity, layout = {'data': 'a'}, Layout(37, 12, 2, (0, 1))
  Store(tmp_path).make(identity, 'f' * 64, layout, part_batches(layout))
  folder = next(tmp_path.rglob('*.parquet')).parent
  for ending in ('.features.npy', '.rows.npy', '.json'):
    (folder / f'00000-of-00001{ending}').write_bytes(b'old')
  Store(tmp_path).make(identity, 'e' * 64, layout, part_batches(layout))
  assert [path.suffix for path in tmp_path.rglob('*') if path.is_file()] == ['.parquet']


def test_features_of_other_weights_are_refused(tmp_path: pathlib.Path) -> None:
  rows.split(rows.Loader(FEATURES, LABEL, 6), folder=tmp_path / 'a').table(rows.weights(2.))
  split = rows.split(rows.Loader(FEATURES, LABEL, 6), folder=tmp_path / 'b')
  split.table(rows.weights())
  shutil.copy(only(tmp_path / 'a'), only(tmp_path / 'b'))
  with pytest.raises(UserError, match=r'that its folder is named after, got others \(weights differ\). Remove '):
    rows.split(rows.Loader(FEATURES, LABEL, 6), folder=tmp_path / 'b').table(rows.weights())


def test_features_of_other_data_in_a_folder_of_this_name_are_refused(tmp_path: pathlib.Path) -> None:
  rows.split(rows.Loader(FEATURES, LABEL, 6), folder=tmp_path / 'a', name='elsewhere').table(rows.weights())
  rows.split(rows.Loader(FEATURES, LABEL, 6), folder=tmp_path / 'b').table(rows.weights())
  shutil.copy(only(tmp_path / 'a'), only(tmp_path / 'b'))
  with pytest.raises(UserError, match=r'that its folder is named after, got others \(data differ'):
    rows.split(rows.Loader(FEATURES, LABEL, 6), folder=tmp_path / 'b').table(rows.weights())


def test_the_files_of_a_run_are_read_as_those_of_embed(tmp_path: pathlib.Path) -> None:
  by_example(rows.split(rows.Loader(FEATURES, LABEL, 6, bad=(4,)), folder=tmp_path))
  written = store.open_complete(only(tmp_path))
  assert written.info['num_rows'] == 36 and written.info['num_bad'] == 1
  again = rows.Loader(FEATURES, LABEL, 8)
  found = by_example(rows.split(again, store=Store(None, [written.path])))
  assert again.passes == 0 and np.flatnonzero(np.isnan(found[:, 0])).tolist() == [4]


def test_weights_that_are_not_finite_are_named_and_nothing_is_kept(tmp_path: pathlib.Path) -> None:
  split = rows.split(rows.Loader(FEATURES, LABEL, 6), folder=tmp_path, name='evals.knn')
  with pytest.raises(UserError, match='evals.knn: expected finite outputs, got others for 6 images of a batch: these '
                                      'weights hold nan or inf: backbone/scale. Use others, such as'):
    split.table(rows.weights(float('nan')))
  assert not [path for path in tmp_path.rglob('*') if path.is_file()]


def test_features_that_overflow_are_told_from_bad_weights() -> None:
  huge = np.full((5, 2), 3e38, np.float32)
  with pytest.raises(UserError, match='got others for 5 images of a batch: all weights are finite'):
    rows.split(rows.Loader(huge, np.zeros(5, np.int32), 6)).table(rows.weights(10.))


def test_a_split_without_examples_is_refused() -> None:
  with pytest.raises(UserError, match='evals.knn: expected a split with at least one example'):
    rows.split(rows.Loader(FEATURES[:0], LABEL[:0], 6), name='evals.knn')
  with pytest.raises(UserError, match='has a label or a caption, got none among 3'):
    rows.split(rows.Loader(FEATURES[:3], LABEL[:3], 6, bad=(0, 1, 2))).table(rows.weights())
