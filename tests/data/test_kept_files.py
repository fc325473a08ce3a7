"""What is kept between starts is used as it was written, or made again; changed data are seen, whatever their times."""
from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.data import packed, parquets
from vit_jax.config import schema
from vit_jax.data import content as contents
from vit_jax.data import index, opening
from vit_jax.data.formats import listing
from vit_jax.data.source import Source, first_label, read_one, take_first
from vit_jax.jobs import resume

FOUND = packed.examples(14)
LONG_AGO_NS = 10**18


def write_folder(folder: pathlib.Path) -> None:
  for one in FOUND:
    path = folder / 'train' / packed.NAMES[one.label] / f'{one.key}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(one.image)


def write_listed(folder: pathlib.Path) -> None:
  write_folder(folder)
  names = {'image,label', *(f'train/{packed.NAMES[e.label]}/{e.key}.png,{packed.NAMES[e.label]}' for e in FOUND)}
  (folder / 'labels.csv').write_text('\n'.join(sorted(names)) + '\n')


FORMATS: dict[str, Callable[[pathlib.Path], None]] = {
    'wds': lambda folder: packed.write_tars(folder, 'train', FOUND),
    'tfrecord': lambda folder: packed.write_tfrecords(folder, 'train', FOUND),
    'parquet': lambda folder: parquets.write(folder, 'train', FOUND), 'folder': write_folder}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(listing, 'MIN_KEPT_FILES', 1)


@pytest.fixture(params=FORMATS)
def data(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> schema.Data:
  folder = tmp_path / 'set'
  FORMATS[request.param](folder)
  for path in folder.rglob('*'):  # a folder that has just changed is not kept
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
  os.utime(folder, ns=(LONG_AGO_NS, LONG_AGO_NS))
  return schema.Data(source=f'{request.param}:{folder}', holdout=.2)


def opened(data: schema.Data) -> Source:
  return opening.open_split(data, 'train', image_px=(8, 8))


def content(source: Source) -> list[Any]:
  return [source.digest, *((read_one(source, i).image, first_label(source, i)) for i in range(len(source)))]


def kept_files(tmp_path: pathlib.Path) -> list[pathlib.Path]:
  return [path for path in sorted(tmp_path.rglob('*')) if path.suffix in ('.arrays', '.order')
          or path.parent.name == index.FOLDER and path.is_file()]


def test_a_kept_file_with_any_changed_bit_is_made_again(data: schema.Data, tmp_path: pathlib.Path) -> None:
  expected = content(opened(data))
  files = kept_files(tmp_path)
  assert files
  for path in files:
    good = path.read_bytes()
    for at in np.unique(np.linspace(0, len(good) - 1, 30).astype(int)).tolist():
      path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1:])
      assert content(opened(data)) == expected, (path.name, at)
      again, = [one for one in kept_files(tmp_path) if one == path]
      assert len(again.read_bytes()) == len(good)
      path.write_bytes(good)


def test_the_index_of_other_files_is_not_used(tmp_path: pathlib.Path) -> None:
  sources = []
  for name in ('a', 'b'):
    packed.write_tars(tmp_path / name, 'train', packed.examples(14, first=14 * (name == 'b')))
    sources.append(schema.Data(source=f'wds:{tmp_path / name}'))
  expected = [content(opened(one)) for one in sources]
  (a,), (b,) = ((tmp_path / name / index.FOLDER).glob('*.arrow') for name in ('a', 'b'))
  b.write_bytes(a.read_bytes())
  assert content(opened(sources[1])) == expected[1]


@pytest.mark.parametrize('kind', ['wds', 'tfrecord'])
def test_labels_that_change_with_size_and_time_kept_are_seen(kind: str, tmp_path: pathlib.Path) -> None:
  FORMATS[kind](tmp_path / 'set')
  source = schema.Data(source=f'{kind}:{tmp_path / "set"}')
  before = opened(source)
  digest, label = before.digest, first_label(before, 0)
  others = [e._replace(label=(e.label + 1) % 3) for e in FOUND]
  times = {path: path.stat().st_mtime_ns for path in (tmp_path / 'set').iterdir() if path.is_file()}
  sizes = {path: path.stat().st_size for path in times}
  {'wds': packed.write_tars, 'tfrecord': packed.write_tfrecords}[kind](tmp_path / 'set', 'train', others)
  for path, time_ns in times.items():
    os.utime(path, ns=(time_ns, time_ns))
  assert sizes == {path: path.stat().st_size for path in times}
  after = opened(source)
  assert after.digest != digest and first_label(after, 0) == label + 1


@pytest.mark.parametrize('kind', [*FORMATS, 'listed', 'prepared'])
def test_a_resumed_run_names_files_that_were_written_since(kind: str, tmp_path: pathlib.Path,
                                                          caplog: pytest.LogCaptureFixture) -> None:
  if kind == 'prepared':
    from vit_jax.data import prepare
    write_folder(tmp_path / 'images')
    own = schema.Data(source=f'folder:{tmp_path / "images"}', holdout=.2)
    prepare.write({'train': opened(own)}, tmp_path / 'set', prepare.Settings(0, 92, 2, 0), name_of=str,
                  run=prepare.LocalRunner())
  else:
    {**FORMATS, 'listed': write_listed}[kind](tmp_path / 'set')
  source = {'listed': 'folder', 'prepared': 'array_record'}.get(kind, kind)
  train = opened(schema.Data(source=f'{source}:{tmp_path / "set"}', holdout=.2))
  parts = {'train': take_first(train, 9), 'eval': train}
  for path in contents.file_paths(train):
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
  meta = {'files': {name: list(contents.describe_files(one)) for name, one in parts.items()}}
  caplog.clear()
  resume.warn_of_files(meta, parts)
  resume.warn_of_files({}, parts)  # of an earlier version
  assert not caplog.messages
  path = contents.file_paths(train)[0]
  os.utime(path, ns=(LONG_AGO_NS + 1, LONG_AGO_NS + 1))
  resume.warn_of_files(meta, parts)
  [said] = caplog.messages
  assert said.count(f'newer files, 1: {os.path.basename(path)}') == 2 and f'  eval ({train.name})' in said
  os.utime(path, ns=(LONG_AGO_NS - 1, LONG_AGO_NS - 1))
  resume.warn_of_files(meta, parts)
  assert 'files with other sizes or times, such as copies' in caplog.messages[-1]


def test_images_in_memory_have_no_files() -> None:
  train = opening.open_split(schema.Data(source='digits'), 'train', image_px=(8, 8))
  assert contents.file_paths(train) == [] and contents.describe_files(train).newest_ns == 0
