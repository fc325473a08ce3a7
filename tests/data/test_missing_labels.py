"""Files without the labels that are expected: messages list what they have instead, by `check`."""
from __future__ import annotations

import io
import pathlib
import tarfile

import pytest

from tests.data.images import encode, random_image
from vit_jax import main
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.source import read_one, warn_once
from vit_jax.jobs import prepare

NUM = 6
PICTURES = [encode(random_image(i)) for i in range(NUM)]
Members = list[tuple[str, bytes]]


def images(form: str) -> Members:
  return [(form.format(i=i, name=('cat', 'dog')[i % 2]), one) for i, one in enumerate(PICTURES)]


def labels(form: str, text: str) -> Members:
  return [(form.format(i=i), (text % (i % 2) if '%' in text else text).encode()) for i in range(NUM)]


def beside(first: Members, second: Members) -> Members:
  return [one for pair in zip(first, second, strict=True) for one in pair]


def write(path: pathlib.Path, members: Members) -> None:
  with tarfile.open(path, 'w') as file:
    for name, content in members:
      info = tarfile.TarInfo(name)
      info.size = len(content)
      file.addfile(info, io.BytesIO(content))


def check(source: str, capsys: pytest.CaptureFixture[str]) -> str:
  assert main.run(['check', '--config=from_folder', f'--config.data.source={source}']) == 2
  return capsys.readouterr().err


@pytest.mark.parametrize(('members', 'says'), [
    (images('{i}.png') + labels('{i}.cls', '%d'), "has 0.png, 0.cls ('0'). A label belongs to the image beside it with "
     'the same name up to the first dot, such as 0.cls. Write the members of an example one after the other'),
    (beside(images('{i}/input.png'), labels('{i}/output.cls', '%d')), "has 0/input.png, 0/output.cls ('0'). A label "
     'belongs to the image beside it with the same name up to the first dot, such as 0/input.cls.'),
    (images('train/{name}/{i}.png'), 'has train/cat/0.png. Names of folders are not read as labels: unpack the arc'),
    (beside(images('{i}.png'), labels('{i}.label.txt', 'cat')), "has 0.png, 0.label.txt ('cat'). Set data.label_col"),
    (beside(images('{i}.png'), labels('{i}.json', '{"class": %d, "site": 3}')), '0.json (fields: class, site). Set'),
    (beside(images('{i}.png'), labels('{i}.cls', 'cat')), "0.cls ('cat'). A label in .cls is a whole number; a name"),
    (beside(images('{i}.png'), labels('{i}.cls', '7')), "6 images all have the class '7'"),
], ids=['apart', 'other keys', 'folders', 'other extension', 'other field', 'a name', 'one class'])
def test_a_tar_without_labels_is_refused_with_what_it_has(
    members: Members, says: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  warn_once.cache_clear()
  for split in ('train', 'test'):
    write(tmp_path / f'{split}-0.tar', members)
  assert says in check(f'wds:{tmp_path}', capsys)


@pytest.mark.parametrize(('path', 'columns', 'says'), [
    ('train.parquet', {'Label': [0, 1] * 3}, 'train.parquet has the columns image (binary), Label (int64). Set'),
    ('train.parquet', {'fine_label': [0] * 6, 'coarse_label': [1] * 6}, 'fine_label (int64), coarse_label (int64)'),
    ('label=cat/train.parquet', {}, 'has the columns image (binary). Folders such as label=cat are not read as')])
def test_parquet_without_labels_is_refused_with_its_columns(
    path: str, columns: dict[str, list[int]], says: str, tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str]) -> None:
  pq, pa = pytest.importorskip('pyarrow.parquet'), pytest.importorskip('pyarrow')
  (tmp_path / path).parent.mkdir(exist_ok=True)
  for name in (path, path.replace('train', 'test')):
    pq.write_table(pa.table({'image': PICTURES, **columns}), tmp_path / name)
  assert says in check(f'parquet:{tmp_path}', capsys)


@pytest.mark.parametrize(('kind', 'name', 'says'), [
    ('wds', 'train.tar.gz', 'got train.tar.gz. Decompress them'), ('parquet', 'a.csv', 'got a.csv. Correct the path')])
def test_a_folder_without_files_of_the_kind_is_refused_with_those_that_are_there(
    kind: str, name: str, says: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / name).write_bytes(b'x')
  assert says in check(f'{kind}:{tmp_path}', capsys)


def test_a_warning_of_a_source_is_printed_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  warn_once.cache_clear()
  for split in ('train', 'test'):
    write(tmp_path / f'{split}-0.tar', images('{i}.png'))
  for _ in range(3):
    data = schema.Data(source=f'wds:{tmp_path}')
    assert opening.open_sources(data, image_px=(8, 8)).class_names == ('unlabeled',)
  assert sum('has no .cls beside an image' in one.message for one in caplog.records) == 1


def test_a_prepared_split_with_one_label_each_keeps_it_beside_one_with_several(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'in').mkdir()
  write(tmp_path / 'in' / 'train.tar', beside(images('{i}.png'), labels('{i}.json', '{"label": "c%d"}')))
  write(tmp_path / 'in' / 'test.tar', beside(images('{i}.png'), labels('{i}.json', '{"label": ["c1", "c0"]}')))
  assert prepare.run(tmp_path / 'set', data=f'wds:{tmp_path}/in') == 0
  data = schema.Data(source=f'array_record:{tmp_path}/set', max_labels=2)
  found = opening.open_sources(data, image_px=(8, 8))
  assert {found.train.labels(row) for row in range(NUM)} == {(0,), (1,)}
  assert {read_one(found.train, row).image: found.train.labels(row) for row in range(NUM)} == {
      one: (i % 2,) for i, one in enumerate(PICTURES)}
  assert {read_one(found.eval, row).labels for row in range(NUM)} == {(1, 0)}


@pytest.mark.parametrize('splits', [('train', 'test'), ('test', 'train')])
def test_a_split_without_labels_is_not_prepared_with_the_classes_of_another(
    tmp_path: pathlib.Path, splits: tuple[str, ...]) -> None:
  pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
  (tmp_path / 'in').mkdir()
  for split, names in (('train', ['cat', 'dog'] * (NUM // 2)), ('test', [None] * NUM)):
    column = pa.array([{'bytes': one, 'path': None} for one in PICTURES])
    pq.write_table(pa.table({'image': column, 'label': pa.array(names, pa.string())}),
                   tmp_path / 'in' / f'{split}.parquet')
  with pytest.raises(UserError, match='expected splits with the same classes, .*cat, dog only in train.* Leave out'):
    prepare.run(tmp_path / 'set', data=f'parquet:{tmp_path}/in', splits=splits)
  assert not (tmp_path / 'set').exists()
  assert prepare.run(tmp_path / 'set', data=f'parquet:{tmp_path}/in', splits=('train',)) == 0
