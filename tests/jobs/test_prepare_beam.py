"""Shards by a runner of Apache Beam: the bytes of the local command, on local folders and in object storage."""
from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import beams
import buckets
import pytest

from tests.data.images import encode, random_image
from vit_jax import main
from vit_jax.config import schema
from vit_jax.data import beam as runners
from vit_jax.data import opening, prepare


@pytest.fixture
def images(tmp_path: pathlib.Path) -> pathlib.Path:
  for split, num in (('train', 37), ('val', 11)):
    for i in range(num):
      path = tmp_path / 'images' / split / ('ant', 'bee', 'cow')[i % 3] / f'{i:02d}.jpg'
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(encode(random_image(i, height=12 + i, width=15 + i), '.jpg'))
  (tmp_path / 'images' / 'train' / 'ant' / 'x.jpg').write_text('no image')
  return tmp_path / 'images'


@pytest.fixture(autouse=True)
def beam(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(sys.modules, 'apache_beam', beams.module())
  monkeypatch.setattr(runners, '_splits_by_digests', {})
  beams.COUNTED.clear()
  beams.OPTIONS.clear()


def command(images: pathlib.Path, to: object, *words: str) -> list[str]:
  return ['prepare', f'--data=folder:{images}', f'--to={to}', '--shards=5', '--splits=train,val', *words]


def content(folder: pathlib.Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_bytes_are_those_of_the_local_command(images: pathlib.Path, tmp_path: pathlib.Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(command(images, tmp_path / 'here')) == 0
  assert main.run(command(images, tmp_path / 'there', '--runner=FlinkRunner',
                          '--runner_options=--parallelism=4 --x="a b"')) == 0
  assert content(tmp_path / 'there') == content(tmp_path / 'here') and len(content(tmp_path / 'here')) == 12
  assert beams.OPTIONS == [['--runner=FlinkRunner', '--parallelism=4', '--x=a b']]
  assert beams.COUNTED['vit_jax/shards'] == 12  # two elements were processed twice
  assert 'train 37, val 11 images' in capsys.readouterr().out
  assert main.run(command(images, tmp_path / 'there', '--runner=DirectRunner')) == 0
  assert 'Already in' in capsys.readouterr().out and len(beams.OPTIONS) == 1


def test_an_interrupted_pipeline_goes_on_with_the_shards_that_are_missing(
    images: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  assert main.run(command(images, tmp_path / 'here')) == 0
  real, written = prepare.write_shard, list[str]()

  def write(job: prepare.Job, *arguments: object) -> object:
    if len(written) == 4:
      raise KeyboardInterrupt
    written.append(job.file)
    return real(job, *arguments)  # type: ignore[arg-type]

  monkeypatch.setattr(prepare, 'write_shard', write)
  assert main.run(command(images, tmp_path / 'there', '--runner=DirectRunner')) == 130
  assert not (tmp_path / 'there').exists() and len(list(tmp_path.glob('there.*.part/*.done'))) == 4
  before = set(written)
  [part] = tmp_path.glob('there.*.part')
  (part / f'{written[0]}.done').write_text('{')  # damaged: this shard is written again
  written[:] = []
  monkeypatch.setattr(prepare, 'write_shard', lambda job: (written.append(job.file), real(job))[1])
  assert main.run(command(images, tmp_path / 'there', '--runner=DirectRunner')) == 0
  assert len(written) == 7 and len(set(written) & before) == 1
  assert content(tmp_path / 'there') == content(tmp_path / 'here')


def test_shards_are_written_to_object_storage(images: pathlib.Path, tmp_path: pathlib.Path,
                                              bucket: buckets.Server) -> None:
  assert main.run(command(images, tmp_path / 'here')) == 0
  assert main.run(command(images, 'gs://mine/set', '--runner=DirectRunner')) == 0
  assert {name: bucket.read(f'gs://mine/set/{name}') for name in bucket.names('gs://mine/set')} == content(
      tmp_path / 'here')


def test_other_content_is_left_alone(images: pathlib.Path, tmp_path: pathlib.Path,
                                     capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(command(images, tmp_path / 'set', '--runner=DirectRunner')) == 0
  before = content(tmp_path / 'set')
  assert main.run(command(images, tmp_path / 'set', '--runner=DirectRunner', '--short_px=9')) == 2
  assert 'got one with a dataset prepared with other settings' in capsys.readouterr().err
  assert content(tmp_path / 'set') == before
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'notes').touch()
  assert main.run(command(images, tmp_path / 'mine', '--runner=DirectRunner')) == 2
  assert [path.name for path in (tmp_path / 'mine').iterdir()] == ['notes']


def test_workers_must_see_the_same_files(images: pathlib.Path, tmp_path: pathlib.Path,
                                         monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  real = prepare._count_shards

  def count(split: str, *arguments: object) -> int:
    (images / 'train' / 'ant' / f'{split}.jpg').write_bytes(encode(random_image(99, height=20, width=20), '.jpg'))
    return real(split, *arguments)  # type: ignore[arg-type]

  monkeypatch.setattr(prepare, '_count_shards', count)
  assert main.run(command(images, tmp_path / 'set', '--runner=DirectRunner')) == 2
  assert '--data: expected the same files for every worker, got others on' in capsys.readouterr().err


@pytest.mark.parametrize(('words', 'error'), [
    (['--runner_options=--x=1'], '--runner_options: expected --runner as well'),
    (['--runner=DataflowRunner'], '--runner: expected a runner of Apache Beam, and in --runner_options its options, '
     'got DataflowRunner: "Pipeline has validations errors: Missing required option: project.". Correct the flags.'),
    (['--runner=DirectRunner', "--runner_options=--x='a b"], 'got DirectRunner: "No closing quotation". Correct'),
    (['--runner=DirectRunner', '--processes=2'], '--processes: expected no number with --runner, got 2'),
    (['--to=gs://a/b'], '--to: expected a folder of this machine, got gs://a/b. With --runner=DirectRunner')])
def test_flags_that_do_not_fit_are_named(words: list[str], error: str, images: pathlib.Path, tmp_path: pathlib.Path,
                                         bucket: buckets.Server, capsys: pytest.CaptureFixture[str]) -> None:
  given = [word for word in command(images, tmp_path / 'set') if not words[0].startswith('--to') or '--to' not in word]
  assert main.run([*given, *words]) == 2
  assert error in capsys.readouterr().err


def test_a_missing_package_is_named(images: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setitem(sys.modules, 'apache_beam', None)
  assert main.run(command(images, tmp_path / 'set', '--runner=DirectRunner')) == 2
  assert '--runner: expected the Python package apache_beam, got none. Run: pip install' in (
      capsys.readouterr().err)


@pytest.mark.slow(reason='starts workers of Apache Beam')
@pytest.mark.skipif(importlib.util.find_spec('apache_beam') is None, reason='apache_beam is not installed')
def test_the_real_runner_writes_the_same_bytes(images: pathlib.Path, tmp_path: pathlib.Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.delitem(sys.modules, 'apache_beam')
  assert main.run(command(images, tmp_path / 'here')) == 0
  options = '--runner_options=--direct_num_workers=2 --direct_running_mode=multi_processing'
  assert main.run(command(images, tmp_path / 'there', '--runner=DirectRunner', options)) == 0
  assert content(tmp_path / 'there') == content(tmp_path / 'here')
  assert json.loads(content(tmp_path / 'there')['info.json'])['made']['num_shards'] == 5


def test_a_dataset_in_object_storage_is_prepared_again(images: pathlib.Path, tmp_path: pathlib.Path,
                                                       bucket: buckets.Server) -> None:
  """With another size of the images, from one folder of a bucket to another."""
  assert main.run(command(images, 'gs://mine/set', '--runner=DirectRunner')) == 0
  words = ['prepare', '--splits=train,val', '--shards=2', '--short_px=16']
  assert main.run([*words, '--data=array_record:gs://mine/set', '--to=gs://mine/small', '--runner=DirectRunner']) == 0
  assert main.run(command(images, tmp_path / 'set')) == 0
  assert main.run([*words, f'--data=array_record:{tmp_path / "set"}', f'--to={tmp_path / "small"}']) == 0
  (tmp_path / 'fetched').mkdir()
  for name in bucket.names('gs://mine/small'):
    (tmp_path / 'fetched' / name).write_bytes(bucket.read(f'gs://mine/small/{name}'))
  there, here = (opening.open_split(schema.Data(source=f'array_record:{tmp_path / name}'), 'train', image_px=(8, 8))
                 for name in ('fetched', 'small'))
  assert len(there) == len(here) == 37 and there.class_names == here.class_names
  assert list(there.read(range(37))) == list(here.read(range(37)))
