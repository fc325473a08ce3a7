"""The job that writes ArrayRecord shards: bytes and labels, kills, and what is refused."""
from __future__ import annotations

import concurrent.futures
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
from etils import epath

from tests.data.images import encode, random_image
from vit_jax import main
from vit_jax.config import schema
from vit_jax.core import files
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import loader, opening, order
from vit_jax.data import prepare as writing
from vit_jax.data.formats import array_record, tfds_build
from vit_jax.data.image import decode, headers
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import first_label, read_one
from vit_jax.jobs import prepare

CLASSES = ('ant', 'bee', 'cow', 'dog', 'elk', 'fox', 'gnu')


@pytest.fixture
def images(tmp_path: pathlib.Path) -> pathlib.Path:
  """37 training and 11 validation pictures, of 12 x 15 px or more, in seven classes."""
  for split, num in (('train', 37), ('val', 11)):
    for i in range(num):
      path = tmp_path / 'images' / split / CLASSES[i % 7] / f'{i:02d}.jpg'
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(encode(random_image(i, height=12 + i, width=15 + i), '.jpg'))
  return tmp_path / 'images'


def run(images: pathlib.Path, to: pathlib.Path, **flags: Any) -> int:
  return prepare.run(to, **{'data': f'folder:{images}', **flags})


def open_all(where: object, **fields: object) -> opening.Sources:
  return opening.open_sources(schema.Data(source=f'array_record:{where}', **fields), image_px=(8, 8))


def test_bytes_labels_and_names_come_back_in_another_order(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  assert run(images, tmp_path / 'set', shards=3) == 0
  opened = open_all(tmp_path / 'set')
  stored = opening.open_sources(schema.Data(source=f'folder:{images}'), image_px=(8, 8))
  assert opened.class_names == CLASSES
  for new, old in ((opened.train, stored.train), (opened.eval, stored.eval)):
    rows = list(new.read(range(len(new))))
    assert {r.image: r.label for r in rows} == {r.image: r.label for r in old.read(range(len(old)))}
    assert [r.image for r in rows] != [r.image for r in old.read(range(len(old)))]
    assert [first_label(new, i) for i in range(len(new))] == [r.label for r in rows]
    for i in range(len(new)):
      name = new.describe(i).partition(' (')[2].rstrip(')')
      assert (images / name).read_bytes() == rows[i].image
  assert opened.train.describe(3).startswith(f'array_record:{tmp_path}/set/train[3] (train/')


def test_the_seed_says_the_order_and_shards_are_even(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  for name, seed in (('a', 0), ('b', 0), ('c', 5)):
    run(images, tmp_path / name, seed=seed, shards=3)
  a, b, c = (open_all(tmp_path / n).train for n in 'abc')
  rows = [[record.image for record in s.read(range(37))] for s in (a, b, c)]
  assert rows[0] == rows[1] and rows[0] != rows[2]
  assert a.digest == b.digest != c.digest
  listed = array_record.read_info(tmp_path / 'a').splits
  assert [s.num_examples for s in listed['train']] == [13, 12, 12] and sorted(listed) == ['train', 'val']
  part = open_all(tmp_path / 'a' / '*-0000[12]-of-*', eval_split='train').train
  assert [read_one(part, i).image for i in range(24)] == rows[0][13:]
  (tmp_path / 'a').rename(tmp_path / 'a[1]')
  assert open_all(tmp_path / 'a[1]').train.digest == a.digest


def test_the_checksums_are_those_of_the_files(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  run(images, tmp_path / 'set')
  for line in (tmp_path / 'set' / 'SHA256SUMS').read_text().splitlines():
    digest, name = line.split('  ')
    assert hashlib.sha256((tmp_path / 'set' / name).read_bytes()).hexdigest() == digest
  subprocess.run(['sha256sum', '-c', 'SHA256SUMS'], cwd=tmp_path / 'set', check=True, capture_output=True)
  left = {p.name.split('-')[0] for p in (tmp_path / 'set').iterdir()}
  assert left == {'info.json', 'SHA256SUMS', 'train', 'val'}


def test_shrinking_keeps_small_pictures_and_damaged_files(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  damaged = next((images / 'train').rglob('*.jpg')).read_bytes()[:-20]
  (images / 'train' / 'ant' / 'bad.jpg').write_bytes(damaged)
  run(images, tmp_path / 'set', short_px=20, quality=95)
  train = open_all(tmp_path / 'set').train
  for i in range(len(train)):
    name = train.describe(i).partition(' (')[2].rstrip(')')
    if name.endswith('bad.jpg'):
      assert read_one(train, i).image == damaged
      continue
    number = int(pathlib.Path(name).stem)
    new, old = decode.decode(read_one(train, i).image), decode.decode((images / name).read_bytes())
    if number <= 8:
      assert read_one(train, i).image == (images / name).read_bytes()
    else:
      assert new.shape == (20, round((15 + number) * 20 / (12 + number)), 3)
      small = cv2.resize(old, new.shape[1::-1], interpolation=cv2.INTER_AREA)
      assert abs(new.astype(int) - small).mean() < 6  # JPEG of a colorful picture, colors at half the resolution


def test_a_damaged_record_counts_as_a_bad_image(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  run(images, tmp_path / 'set', shards=2)
  whole = open_all(tmp_path / 'set').train
  path = tmp_path / 'set' / 'train-00001-of-00002.array_record'
  damaged = bytearray(path.read_bytes())
  damaged[3_000] ^= 1  # in the record of an image
  path.write_bytes(damaged)
  source = open_all(tmp_path / 'set').train
  fit = transforms.eval_transform(schema.Recipe(), (8, 8))
  [(bad, reason)] = [(i, reason) for i in range(37) if (reason := loader.reason_bad(source, i, fit))]
  assert f'record {bad - 19} of {path} is damaged: Corrupted' in reason
  assert source.describe(bad) == f'array_record:{tmp_path}/set/train[{bad}]'
  assert read_one(source, bad + 1) == read_one(whole, bad + 1)
  assert np.flatnonzero(loader.decode_all(source, fit, threads=2)['bad']).tolist() == [bad]


def test_a_damaged_description_is_named(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  run(images, tmp_path / 'set')
  path = tmp_path / 'set' / 'info.json'
  content = path.read_text()
  for damaged in ('', content[:-50], '[]', content.replace('num_bytes', 'bytes'), content.replace('"splits"', '"s"'),
                  content.replace('"file": "', '"file": "../'), content.replace('"file": "', '"file": "/')):
    path.write_text(damaged)
    with pytest.raises(UserError, match=f'{path}.*: expected .*, got .* damaged: copy it'):
      open_all(tmp_path / 'set')


def test_shrinking_keeps_the_orientation(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  path = images / 'train' / 'ant' / '35.jpg'
  path.write_bytes(headers.write_orientation(path.read_bytes(), 6))
  run(images, tmp_path / 'set', short_px=20)
  train = open_all(tmp_path / 'set').train
  found = {train.describe(i).partition(' (')[2].rstrip(')'): read_one(train, i).image for i in range(len(train))}
  turned = {name for name, image in found.items() if decode.find_orientation(image) != 1}
  assert turned == {'train/ant/35.jpg'}
  assert decode.find_orientation(found['train/ant/35.jpg']) == 6
  assert decode.decode(found['train/ant/35.jpg']).shape == (20, 21, 3)


def test_a_killed_run_leaves_no_set_and_is_gone_on_with(images: pathlib.Path, tmp_path: pathlib.Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
  run(images, tmp_path / 'whole', shards=4)
  write, calls = writing.write_records, []

  def dying(path: pathlib.Path, job: writing.Job, on_written: Callable[[int], None], threads: int) -> Any:
    calls.append(job.file)
    if len(calls) == 3:
      path.write_bytes(b'half a shard')
      raise KeyboardInterrupt
    return write(path, job, on_written, threads)
  monkeypatch.setattr(writing, 'write_records', dying)
  with pytest.raises(KeyboardInterrupt):
    run(images, tmp_path / 'set', shards=4)
  assert not (tmp_path / 'set').exists()
  with pytest.raises(UserError, match=r'/set: expected a prepared dataset, got no info.json. .*/set\.\w+\.part is not '
                                      'finished: run the same vit-jax prepare again'):
    open_all(tmp_path / 'set')
  calls[:] = ['x', 'y', 'z']
  run(images, tmp_path / 'set', shards=4)
  assert [c.split('-')[1] for c in calls[3:7]] == ['00002', '00003', '00000', '00001']  # two of train were done
  one, two = open_all(tmp_path / 'whole').train, open_all(tmp_path / 'set').train
  assert list(one.read(range(37))) == list(two.read(range(37))) and one.digest == two.digest
  assert not list(tmp_path.glob('*.part'))


def content(folder: pathlib.Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_are_bounded_in_records_and_bytes(images: pathlib.Path, tmp_path: pathlib.Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(writing, 'SHARD_RECORDS', 10)
  run(images, tmp_path / 'set')
  splits = array_record.read_info(tmp_path / 'set').splits
  assert [s.num_examples for s in splits['train']] == [10, 9, 9, 9] and len(splits['val']) == 2
  monkeypatch.setattr(writing, 'SHARD_BYTES', 2_000)
  run(images, tmp_path / 'bytes')
  assert len(array_record.read_info(tmp_path / 'bytes').splits['train']) > 4


def test_hosts_write_shares_of_the_shards_and_the_last_one_completes_the_dataset(
    images: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  run(images, tmp_path / 'alone', shards=6)
  write, writers, both, met = writing.write_records, dict[str, int](), threading.Barrier(2), list[bool]()

  def slowly(path: pathlib.Path, job: writing.Job, on_written: Callable[[int], None], threads: int) -> Any:
    assert job.file not in writers  # no shard is written twice
    writers[job.file] = threading.get_ident()
    if not met:
      both.wait(10)
      met.append(True)
    return write(path, job, on_written, threads)
  monkeypatch.setattr(writing, 'write_records', slowly)
  words = {'shards': 6}
  met.append(True)
  assert run(images, tmp_path / 'set', share=(2, 3), **words) == 0
  assert f'Share 2/3 of {tmp_path}/set is written' in capsys.readouterr().out and not (tmp_path / 'set').exists()
  met.clear()
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    assert [one.result() for one in [pool.submit(run, images, tmp_path / 'set', share=(number, 3), **words)
                                     for number in range(2)]] == [0, 0]
  assert len(writers) == 12 and len(set(writers.values())) == 3
  assert content(tmp_path / 'set') == content(tmp_path / 'alone') and not list(tmp_path.glob('*.part'))
  assert run(images, tmp_path / 'set', share=(0, 3), **words) == 0 and 'Already in' in capsys.readouterr().out


def test_a_missing_image_is_an_error_of_a_share_too(images: pathlib.Path, tmp_path: pathlib.Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
  def fail(*_: object) -> Any:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), 'lost.png')
  monkeypatch.setattr(writing, 'write_records', fail)
  for share in ((0, 1), (0, 3)):
    with pytest.raises((OSError, UserError), match='No such file'):
      run(images, tmp_path / 'set', shards=6, share=share)


@pytest.mark.parametrize('error', [errno.ENOSPC, errno.EACCES])
def test_an_error_of_the_disk_is_not_called_one_of_locks(
    images: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
  def fail(*_: object) -> None:
    raise OSError(error, os.strerror(error), 'plan.json')

  with monkeypatch.context() as patch:
    patch.setattr(files.Unfinished, '_create', fail)
    with pytest.raises((UserError, TemporaryError), match=fr'set: expected to write it, got "{os.strerror(error)}'):
      run(images, tmp_path / 'set')
  monkeypatch.setattr(fcntl, 'flock', fail)
  with pytest.raises((UserError, TemporaryError), match=r'expected a file system with locks \(flock\), got'):
    run(images, tmp_path / 'set')
  error = errno.ENOLCK  # a mount without locks; the same command would fail again
  with pytest.raises(UserError, match=r'expected a file system with locks \(flock\), got "No locks available"'):
    run(images, tmp_path / 'set')


def test_splits_and_classes_that_are_not_written_are_named(images: pathlib.Path, tmp_path: pathlib.Path,
                                                           caplog: pytest.LogCaptureFixture) -> None:
  shutil.copytree(images / 'train', images / 'test')
  run(images, tmp_path / 'set')
  assert f'folder:{images} has other splits, which are left out: val. Set --splits=test,train,val to' in caplog.text
  assert 'expected folders of classes' not in caplog.text
  shutil.copytree(images / 'train', tmp_path / 'years' / '2019')
  shutil.copytree(images / 'train', tmp_path / 'years' / '2020')
  with pytest.raises(UserError, match='expected folders of classes, got folders with the same folders in each: 2019, '
                     '2020 have .* set --classes=FILE'):
    run(tmp_path / 'years', tmp_path / 'other')
  (tmp_path / 'list.txt').write_text('2019\n2020\n')
  run(tmp_path / 'years', tmp_path / 'other', classes=str(tmp_path / 'list.txt'))


def test_a_split_without_examples_is_named(tmp_path: pathlib.Path) -> None:
  settings = writing.Settings(short_px=0, quality=90, num_shards=0, seed=0)
  source = type('Empty', (), {'name': 'x', 'digest': 'x', 'class_names': ('a',), '__len__': lambda self: 0})()
  with pytest.raises(UserError, match='--data: expected at least one example in the split train, got none'):
    writing.write({'train': source}, tmp_path / 'to', settings, name_of=str, run=writing.LocalRunner())


def test_another_process_with_other_settings_is_no_partner(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  said = 'set: expected no other process to write it, got one with other settings'
  with files.Unfinished(tmp_path / 'set', '{"seed": 5}', ()).open() as part, pytest.raises(UserError, match=said):
    run(images, tmp_path / 'set')
  assert run(images, tmp_path / 'set') == 0 and (part / 'plan.json').read_text() == '{"seed": 5}'  # it has ended


@pytest.mark.slow(reason='30 s: starts processes four times')
def test_processes_that_are_killed_leave_what_another_start_completes(images: pathlib.Path,
                                                                      tmp_path: pathlib.Path) -> None:
  run(images, tmp_path / 'alone', shards=9)
  command = [sys.executable, '-m', 'vit_jax.main', '--job=prepare', f'--data=folder:{images}', f'--to={tmp_path}/set',
             '--shards=9', '--processes=2']
  running = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
  while running.poll() is None and not list(tmp_path.glob('set.*.part/*.done')):
    time.sleep(0.01)
  os.killpg(running.pid, signal.SIGKILL)
  running.wait()
  assert not (tmp_path / 'set').exists()
  done = subprocess.run(command, check=True, capture_output=True, text=True)
  assert 'Written to' in done.stdout and '48 of 48 images' in done.stdout
  assert content(tmp_path / 'set') == content(tmp_path / 'alone')


def test_unfinished_shards_with_other_settings_are_kept_and_named(
    images: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture) -> None:
  with monkeypatch.context() as patch:
    patch.setattr(writing.storage, 'write_bytes', lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
      run(images, tmp_path / 'set', seed=1)
  [part] = tmp_path.glob('set.*.part')
  before = content(part)
  run(images, tmp_path / 'set', seed=2)
  assert f'{part} has unfinished files of a command with other settings, which are kept.' in caplog.text
  assert content(part) == before
  run(images, tmp_path / 'other', seed=2)
  assert open_all(tmp_path / 'set').train.digest == open_all(tmp_path / 'other').train.digest


def test_a_finished_set_is_left_alone(images: pathlib.Path, tmp_path: pathlib.Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:
  run(images, tmp_path / 'set')
  before = {p: p.stat().st_mtime_ns for p in (tmp_path / 'set').iterdir()}
  assert run(images, tmp_path / 'set') == 0
  assert 'Already in' in capsys.readouterr().out
  assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / 'set').iterdir()}
  with pytest.raises(UserError, match='set: expected a new folder, got one with a dataset prepared with other'):
    run(images, tmp_path / 'set', seed=9)
  with pytest.raises(UserError, match='images: expected a new folder, got one with other content'):
    run(images, images)


def test_a_shard_that_is_not_whole_is_named(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  run(images, tmp_path / 'set', shards=2)
  [first, second] = sorted((tmp_path / 'set').glob('train-*'))
  first.write_bytes(first.read_bytes()[:-5])
  second.unlink()
  with pytest.raises(UserError, match='2 shards have changed: train-00000-of-00002.array_record: expected .* bytes, '
                                      'got .* bytes; train-00001-of-00002.array_record: .*, got no file'):
    open_all(tmp_path / 'set')


def test_any_source_can_be_prepared_also_one_without_files(tmp_path: pathlib.Path) -> None:
  prepare.run(tmp_path / 'set', data='digits')
  source = opening.open_split(schema.Data(source=f'array_record:{tmp_path / "set"}'), 'test', image_px=(8, 8))
  digits = opening.open_split(schema.Data(), 'test', image_px=(8, 8))
  stored = order.Shuffled(len(digits), 0)(np.arange(len(digits))).tolist()
  assert source.class_names == digits.class_names
  for index in range(0, len(source), 50):
    np.testing.assert_array_equal(decode.decode(read_one(source, index).image),
                                  decode.decode(read_one(digits, stored[index]).image))
    assert read_one(source, index).label == read_one(digits, stored[index]).label


@pytest.mark.parametrize(('flags', 'said'), [
    ({'quality': 50}, '--quality: expected --short_px as well'),
    ({'data': ''}, '--data: expected images to write as shards, got none'),
    ({'data': 'mix:1*digits,1*synthetic'}, '--data: expected one source of images with classes, such as folder:PATH'),
    ({'data': 'masks:x'}, "got 'masks:x'. Prepare the sources of a mixture one by one."),
    ({'splits': ['train[:5]']}, '--splits: expected names of complete splits, got train[:5]'),
    ({'share': (1, 2), 'runner': 'DirectRunner'}, '--share: expected no share with --runner, got 1/2'),
    ({'splits': ['tran']}, "expected one of train, val, got 'tran'"),
    ({'weights': 'x', 'seed': 3}, '--data: expected no flag of shards with --config, got one. Remove it.\n--seed:'),
    ({'weights': 'x', 'data': ''}, 'both --config and --weights, which label maps need, got one'),
])
def test_flags_that_do_not_go_together_are_refused(images: pathlib.Path, tmp_path: pathlib.Path, flags: dict[str, Any],
                                                   said: str) -> None:
  with pytest.raises(UserError) as error:
    run(images, tmp_path / 'set', **flags)
  assert said in str(error.value)
  assert not (tmp_path / 'set').exists() and not list(tmp_path.glob('*.part'))


def test_an_address_is_refused_by_name_wherever_a_path_is_given(images: pathlib.Path, tmp_path: pathlib.Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(tmp_path)
  refused = 'expected a folder of this machine, got the address gs://b/x. Mount it'
  with pytest.raises(UserError, match='--to: expected a folder of this machine, got gs://b/x. With --runner='):
    run(images, epath.Path('gs://b/x'))  # type: ignore[arg-type]
  for where, flags in (('--data', {'data': 'folder:gs://b/x'}),
                       ('data_dir', {'data': 'tfds:animals', 'data_dir': 'gs://b/x'})):
    with pytest.raises(UserError, match=f'{where}.*: {refused}'):
      prepare.run(tmp_path / 'set', **flags, build=lambda *_, **__: pytest.fail('it was built'))
  for data in (schema.Data(source='array_record:az://b/x'), schema.Data(source='folder:gs://b/x'),
               schema.Data(source='tfds:animals', data_dir='gs://b/x'),
               schema.Data(source='vtab:svhn', data_dir='gs://b/x')):
    with pytest.raises(UserError, match=refused.replace('gs://b/x. Mount it', '(gs://b/x. Mount|az://b/x. Copy) it')):
      opening.open_split(data, 'train', image_px=(8, 8))
  with pytest.raises(UserError, match=f'data.pseudo.labels: {refused}'):
    opening.open_sources(schema.Data(source='digits', pseudo=schema.Pseudo(source='digits', labels='gs://b/x')),
                         image_px=(8, 8))
  assert [p.name for p in tmp_path.iterdir()] == ['images']


def test_the_command_line_reaches_the_job(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  assert main.run(['--job=prepare', f'--data=folder:{images}', f'--to={tmp_path}/set', '--shards=2']) == 0
  assert len(open_all(tmp_path / 'set').train) == 37


@pytest.mark.slow(reason='1 s: starts a program')
def test_a_tfds_set_that_is_not_there_is_built_in_another_process(tmp_path: pathlib.Path) -> None:
  built = []
  flags = {'to': tmp_path / 'set', 'data': 'tfds:plants', 'data_dir': str(tmp_path)}
  with pytest.raises(UserError, match='tfds:plants is not prepared'):
    prepare.run(**flags, build=lambda name, data_dir: built.append((name, data_dir)))
  assert built == [('plants', str(tmp_path))]
  with pytest.raises(UserError, match='tfds:plants: expected to prepare it in .*, got exit status 1; see'):
    prepare.run(**flags)


def test_a_builder_that_lacks_tensorflow_says_what_to_install(monkeypatch: pytest.MonkeyPatch,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
  import tensorflow_datasets as tfds

  def builder(name: str, **_: object) -> object:
    def fail() -> None:
      raise ModuleNotFoundError("No module named 'tensorflow'", name='tensorflow')
    return types.SimpleNamespace(download_and_prepare=fail)
  monkeypatch.setattr(tfds, 'builder', builder)
  assert tfds_build.main(['plants', '/nowhere']) == tfds_build.MISSING
  said = capsys.readouterr().err
  assert 'tfds:plants needs the Python module tensorflow, which is not installed' in said
  assert "pip install 'tensorflow>=" in said


def test_a_builder_leaves_no_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  import tensorflow_datasets as tfds
  made = []

  def builder(name: str, **_: object) -> object:
    made.append(pathlib.Path(tempfile.mkdtemp('tfds')))  # as the constructor does
    return types.SimpleNamespace(download_and_prepare=lambda: None)
  monkeypatch.setattr(tfds, 'builder', builder)
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  assert tfds_build.main(['plants', '/nowhere']) == 0
  assert made[0].is_relative_to(tmp_path) and not [*tmp_path.iterdir()] and tempfile.gettempdir() == str(tmp_path)


def test_a_set_of_another_format_is_refused(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  run(images, tmp_path / 'set')
  info = json.loads((tmp_path / 'set' / 'info.json').read_text())
  (tmp_path / 'set' / 'info.json').write_text(json.dumps(info | {'format': 'vit_jax images 9'}))
  with pytest.raises(UserError, match="expected the format 'vit_jax images 1', got 'vit_jax images 9'"):
    open_all(tmp_path / 'set')


def test_what_is_not_an_image_is_left_out(images: pathlib.Path, tmp_path: pathlib.Path,
                                          caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
  bomb = bytearray(encode(random_image(0), '.png'))
  bomb[16:24] = b'\x7f\xff\xff\xff' * 2  # width and height of the header
  bad = {'text.jpg': b'root:x:0:0', 'empty.jpg': b'', 'html.png': b'<html></html>', 'bomb.png': bytes(bomb),
         'zero.png': bytes(bomb[:16]) + bytes(8) + bytes(bomb[24:]), 'cut.jpg': b'\xff\xd8\xff', 'ten.gif': b'GIF89a'}
  for name, content in bad.items():
    (images / 'train' / 'ant' / name).write_bytes(content)
  with open(images / 'train' / 'ant' / 'large.jpg', 'wb') as file:
    file.truncate(2 * 10**9)
  for short_px in (0, 8):
    caplog.clear()
    to = tmp_path / f'set{short_px}'
    assert run(images, to, short_px=short_px, shards=3) == 0
    assert 'train 37, val 11 images' in capsys.readouterr().out
    assert '8 of the 45 images of train were left out, as the image or its label cannot be used; ' in caplog.text
    source = open_all(to).train
    assert len(source) == 37 and not any(name in source.describe(i) for i in range(37) for name in bad)
    assert f'{images}/train/ant/large.jpg is left out: the file has 2,000,000,000 bytes' in caplog.text
  assert run(images, tmp_path / 'set0', shards=3) == 0  # the same command again


def test_a_split_without_an_image_is_an_error(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  for path in (images / 'val').rglob('*.jpg'):
    path.write_bytes(b'text')
  with pytest.raises(UserError, match='expected images in the split val, got 11 files whose image or label'):
    run(images, tmp_path / 'set')
  assert not (tmp_path / 'set').exists()


def test_nothing_outside_of_the_folder_becomes_a_record(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  secret = tmp_path / 'secret.jpg'
  secret.write_bytes(encode(random_image(5), '.jpg'))
  (images / 'train' / 'ant' / 'link.jpg').symlink_to(secret)
  run(images, tmp_path / 'own')
  run(images, tmp_path / 'linked', follow_links=True)
  for name, num in (('own', 37), ('linked', 38)):
    source = open_all(tmp_path / name).train
    assert len(source) == num
    assert any(read_one(source, i).image == secret.read_bytes() for i in range(num)) == (name == 'linked')


def test_a_very_long_image_is_kept_as_it_is(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  """Its JPEG would be longer than that format allows."""
  long = encode(np.zeros((4, 60_000, 3), np.uint8), '.png')
  (images / 'train' / 'ant' / 'long.png').write_bytes(long)
  assert writing.encode(long, writing.Settings(3, 90, 0, 0))[:2] == b'\xff\xd8'
  longer = encode(np.zeros((2, 200_000, 3), np.uint8), '.png')
  assert writing.encode(longer, writing.Settings(1, 90, 0, 0)) == longer
