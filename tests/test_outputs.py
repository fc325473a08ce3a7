"""Every job that writes leaves alone what a person has at its target, and beside it."""
from __future__ import annotations

import fcntl
import io
import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.weights import made
from vit_jax import main
from vit_jax.data import prepare
from vit_jax.evaluate import embedding
from vit_jax.inspect import many_images
from vit_jax.weights import loading

pytestmark = pytest.mark.usefixtures('one_device')
RUN = {'config.json': '{\n  "type": "Config"', 'metrics.jsonl': '{"step": 1, "train/loss": 1.0}\n'}
JOBS = {
    'embed to a file': ('x.npz', 'embed --weights=vit --config.batch_size=2 --to={to} {images}'),
    'embed to a folder': ('x', 'embed --weights=vit --config.batch_size=2 --to={to} {images}'),
    'prepare': ('x', 'prepare --data=folder:{images} --to={to}'),
    'predict a table': ('x.csv', 'predict --weights=vit --to={to} {images}'),
    'predict overlays': ('0.png', 'predict --weights=vit --overlay --to={parent} {images}/train/a/0.png'),
    'inspect': ('report.html', 'inspect --weights=vit --to={parent} {images}/train/a/0.png'),
    'inspect numbers': ('numbers.csv', 'inspect --weights=vit --to={parent} {images}/train/a/0.png'),
    'inspect tokens': ('report.html', 'inspect --weights=vit --dense --to={parent} {images}/train/a/0.png'),
    'convert to a file': ('x.npz', 'convert --weights=vit --to={to}'),
    'convert to a folder': ('x', 'convert --weights=vit --to={to}'),
    'convert beside': ('x.npz.json', 'convert --weights=vit --to={parent}/x.npz'),
    'export': ('x.stablehlo', 'export --weights=vit --to={to}'),
    'record': ('x.json', 'record {run} --claim=x --to={to}'),
    'report': ('x.html', 'report --workdir={run} --to={to}'),
    'evaluate classes': ('x.csv', 'evaluate --weights=vit --config.data.source=folder:{images} --csv={to}'),
    'evaluate': ('report.html', 'evaluate --weights=vit --config.data.source=folder:{images} --workdir={parent}'),
    'average': ('checkpoints', 'average --config=digits --workdir={run} --last=2 --to={parent}'),
    'average beside a config': ('config.json', 'average --config=digits --workdir={run} --last=2 --to={parent}'),
    'train': ('report.html', 'train --config=digits --workdir={parent}'),
    'train in a folder of weights': ('config.json', 'train --config=digits --workdir={parent}'),
    'train with a lock': ('.lock', 'train --config=digits --workdir={parent}'),
    'plan': ('report.html', 'plan --config=digits --topology=cpu:1 --to={parent}'),
}
"""A file or folder that a job writes, and the command."""
WHOLE = ('embed to a file', 'embed to a folder', 'prepare', 'convert to a file', 'convert to a folder')


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(loading, 'load', lambda where, **_: made.network())
  monkeypatch.setattr(loading, 'text', lambda found: 'what was loaded')
  monkeypatch.setattr(embedding, 'SHARD_EXAMPLES', 2)
  monkeypatch.setattr(embedding, 'SHARDS', 1)
  monkeypatch.setattr(many_images, 'BATCH', 2)


@pytest.fixture
def command(tmp_path: pathlib.Path) -> Any:
  """Returns the words of a job, and the path that it would write."""
  for i in range(6):
    path = tmp_path / 'images' / ('train', 'test')[i // 4] / 'ab'[i % 2] / f'{i}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(i).integers(0, 256, (20, 20, 3), np.uint8)).save(path)
  (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
  for name, text in RUN.items():
    (tmp_path / 'run' / name).write_text(text)
  (tmp_path / 'out').mkdir()

  def words(job: str) -> tuple[list[str], pathlib.Path]:
    name, line = JOBS[job]
    to = tmp_path / 'out' / name
    return line.format(to=to, parent=to.parent, images=tmp_path / 'images', run=tmp_path / 'run').split(), to
  return words


def tree(folder: pathlib.Path) -> dict[str, bytes | str]:
  """All files and links in a folder, with their content."""
  return {str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
          for path in sorted(folder.rglob('*')) if path.is_symlink() or path.is_file()}


@pytest.mark.parametrize('kind', ['a file', 'a folder', 'a link to a file', 'a link to a folder', 'a link to nothing'])
@pytest.mark.parametrize('job', JOBS)
def test_what_a_person_has_at_the_target_stays(job: str, kind: str, command: Any, tmp_path: pathlib.Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
  words, to = command(job)
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'thesis.txt').write_text('mine')
  if kind == 'a file':
    to.write_text('mine')
  elif kind == 'a folder':
    to.mkdir()
    (to / 'thesis.txt').write_text('mine')
  else:
    to.symlink_to(tmp_path / {'a link to a file': 'mine/thesis.txt', 'a link to a folder': 'mine',
                              'a link to nothing': 'none'}[kind])
  before = tree(tmp_path / 'out'), tree(tmp_path / 'mine')
  assert main.run(words) == 2
  assert (tree(tmp_path / 'out'), tree(tmp_path / 'mine')) == before and not (tmp_path / 'none').exists()
  said = capsys.readouterr().err
  assert f'{to.name}' in said or f'{to.parent}' in said
  assert 'expected' in said and 'Traceback' not in said


@pytest.mark.parametrize('job', WHOLE)
def test_what_a_person_has_beside_the_target_stays(job: str, command: Any, tmp_path: pathlib.Path) -> None:
  words, to = command(job)
  mine = tmp_path / 'out'
  for name in (f'{to.name}.part', f'.{to.name}.part', f'{to.name}.0123456789ab.part', '.vit_jax-0123456789abcdef.part',
               f'{to.name}.half', f'{to.name}.tmp', '.export', 'plan.json'):
    (mine / name).mkdir()
    (mine / name / 'thesis.txt').write_text('mine')
    (mine / name / 'features-00000-of-00002.npz').write_text('mine')
  before = tree(mine)
  assert main.run(words) == 0
  after = tree(mine)
  assert {name: after[name] for name in before} == before and to.exists()
  new = {path.split('/')[0] for path in after} - {path.split('/')[0] for path in before}
  assert new <= {to.name, f'{to.name}.json', f'{to.name}.md'}


def interrupted(job: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
  """Runs a job up to its second shard."""
  where, name = (prepare, 'write_shard') if job == 'prepare' else (embedding, '_write_shard')
  real, calls = getattr(where, name), list[int]()

  def write(*args: Any) -> Any:
    calls.append(0)
    if len(calls) == 2:
      raise KeyboardInterrupt
    return real(*args)
  with monkeypatch.context() as patch:
    patch.setattr(where, name, write)
    assert main.run(words) == 130


@pytest.mark.parametrize('job', WHOLE[:3])
def test_unfinished_files_are_taken_by_the_same_command_alone(
    job: str, command: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
  words, to = command(job)
  other = [*words, '--seed=5' if job == 'prepare' else '--what=probabilities']
  interrupted(job, other, monkeypatch)
  [theirs] = to.parent.glob('*.part')
  begun = tree(theirs)
  interrupted(job, words, monkeypatch)
  assert f'{theirs} has unfinished files of a command with other settings, which are kept.' in caplog.text
  [part] = set(to.parent.glob('*.part')) - {theirs}
  (part / 'thesis.txt').write_text('mine')
  assert main.run(words) == 2 and (part / 'thesis.txt').read_text() == 'mine' and not to.exists()
  assert f'{part} to have only unfinished files of this command, got thesis.txt' in capsys.readouterr().err
  (part / 'thesis.txt').unlink()
  for one in (part, theirs):
    with open(one / 'plan.json', 'r+b') as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      assert main.run(words) == 2
      assert f'--to={to}: expected no other process to write it, got one' in capsys.readouterr().err
  assert main.run(words) == 0 and to.exists()
  assert tree(theirs) == begun and list(to.parent.glob('*.part')) == [theirs]


@pytest.mark.parametrize('job', JOBS)
def test_a_folder_that_cannot_be_written_is_an_error(job: str, command: Any,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
  words, to = command(job)
  to.parent.chmod(0o500)
  if os.access(to.parent, os.W_OK):
    pytest.skip('root may write everywhere')
  try:
    assert main.run(words) == 2
  finally:
    to.parent.chmod(0o700)
  assert 'Traceback' not in capsys.readouterr().err and not list(to.parent.iterdir())


def test_overlays_and_pages_are_replaced_when_asked(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
  words, to = command('predict overlays')
  to.write_text('mine')
  assert main.run([*words, '--overwrite']) == 0
  assert Image.open(io.BytesIO(to.read_bytes())).format == 'PNG'
  words, to = command('report')
  to.write_text('mine')
  assert main.run([*words, '--overwrite']) in (0, 2) and to.read_text().startswith('<!DOCTYPE html>')
  to.unlink()
  to.mkdir()
  assert main.run([*words, '--overwrite']) == 2 and 'Move it away, or choose another.' in capsys.readouterr().err


def test_shards_that_changed_while_others_were_made_are_made_again(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  words, to = command('embed to a file')
  interrupted('embed', words, monkeypatch)
  [shard] = to.parent.glob('*.part/features-00000-*.parquet')
  content = bytearray(shard.read_bytes())
  content[-40] ^= 1
  shard.write_bytes(content)
  assert main.run(words) == 75 and not to.exists()
  assert 'expected the SHA-256' in capsys.readouterr().err
  assert main.run(words) == 0 and json.loads(str(np.load(to)['info']))['num_rows'] == 6
