"""Files and folders are written completely or not at all, and what others made is never touched."""
from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from vit_jax.core import files
from vit_jax.core.errors import TemporaryError, UserError


def plan(tmp_path: pathlib.Path, text: str = '{"seed": 1}') -> files.Unfinished:
  return files.Unfinished(tmp_path / 'set', text, {'a-0', 'a-1', 'info.json'})


def tree(folder: pathlib.Path) -> dict[str, bytes | str]:
  return {str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
          for path in sorted(folder.rglob('*')) if path.is_symlink() or path.is_file()}


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'x'
  files.replace(path, b'one')
  with pytest.raises(KeyboardInterrupt), files.replacing(path) as part:
    part.write_bytes(b'tw')
    raise KeyboardInterrupt
  assert tree(tmp_path) == {'x': b'one'}
  files.replace(path, b'two')
  assert tree(tmp_path) == {'x': b'two'}


@pytest.mark.parametrize('links', [True, False])
def test_what_is_there_is_not_published_over(links: bool, tmp_path: pathlib.Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
  if not links:
    monkeypatch.setattr(os, 'link', lambda *_: (_ for _ in ()).throw(OSError(95, 'Operation not supported')))
  (tmp_path / 'mine').write_bytes(b'mine')
  (tmp_path / 'link').symlink_to('nothing')
  for name in ('mine', 'link'):
    part = tmp_path / 'part'
    part.write_bytes(b'new')
    with pytest.raises(FileExistsError):
      files.publish(part, tmp_path / name)
  before = {name: x for name, x in tree(tmp_path).items() if name != 'part'}
  files.publish(part, tmp_path / 'new')
  assert tree(tmp_path) == {**before, 'new': b'new'} and before == {'mine': b'mine', 'link': 'nothing'}
  part.mkdir()
  with pytest.raises(OSError):
    files.publish(part, tmp_path / 'mine')


def test_unfinished_files_are_found_again_and_become_the_folder(tmp_path: pathlib.Path) -> None:
  with plan(tmp_path).open() as part:
    (part / 'a-0').write_bytes(b'0')
    (part / 'a-0.done').write_bytes(b'{}')
    files.temporary_path(part).write_bytes(b'half of a killed process')
  with plan(tmp_path).open() as part:
    assert sorted(os.listdir(part)) == ['a-0', 'a-0.done', 'plan.json']
    plan(tmp_path).complete({'a-0'})
  assert tree(tmp_path) == {'set/a-0': b'0'} and not plan(tmp_path).folder.exists()


def test_an_empty_folder_is_not_kept_after_an_error(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='no images'), plan(tmp_path).open():
    raise UserError('no images')
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('made', ['a folder', 'an empty folder', 'a file', 'a link', 'a link as plan', 'another plan',
                                  'a file among ours', 'a folder among ours'])
def test_what_others_made_at_the_name_of_the_folder_is_left_alone(made: str, tmp_path: pathlib.Path) -> None:
  folder, elsewhere = plan(tmp_path).folder, tmp_path / 'elsewhere'
  elsewhere.mkdir()
  (elsewhere / 'plan.json').write_text('{"seed": 1}')
  if made in ('a folder', 'an empty folder', 'a link as plan', 'another plan'):
    folder.mkdir()
  if made == 'a folder':
    (folder / 'thesis.txt').write_text('mine')
  elif made == 'a file':
    folder.write_text('mine')
  elif made == 'a link':
    folder.symlink_to(elsewhere)
  elif made == 'a link as plan':
    (folder / 'plan.json').symlink_to(elsewhere / 'plan.json')
  elif made == 'another plan':
    (folder / 'plan.json').write_text('{}')
  elif made.endswith('among ours'):
    with plan(tmp_path).open():
      (folder / 'thesis.txt').write_text('mine') if made.startswith('a file') else (folder / 'thesis').mkdir()
  before = tree(tmp_path)
  said = (r'--to=.*/set: expected .*\.part to have only unfinished files of this command, got (thesis|a file or folder)'
          r'.*\. Move it away, or choose')
  with pytest.raises(UserError, match=said), plan(tmp_path).open():
    pass
  assert tree(tmp_path) == before and os.path.lexists(folder)


def test_a_second_process_is_refused_or_joins(tmp_path: pathlib.Path) -> None:
  with plan(tmp_path).open() as part:
    (part / 'a-0').write_bytes(b'0')
    said = 'set: expected no other process to write it, got one.* Wait for it'
    for other in (plan(tmp_path), plan(tmp_path, '{"seed": 2}')):
      with pytest.raises(UserError, match=said), other.open():
        pass
    assert tree(part) == {'a-0': b'0', 'plan.json': b'{"seed": 1}'}
  with plan(tmp_path).open(joins=True), plan(tmp_path).open(joins=True) as part:
    assert part == plan(tmp_path).folder
  with plan(tmp_path, '{"seed": 2}').open():
    pass
  assert (part / 'a-0').read_bytes() == b'0'


def test_the_last_of_several_processes_is_alone(tmp_path: pathlib.Path) -> None:
  one, other = plan(tmp_path), plan(tmp_path)
  with one.open(joins=True), other.alone() as is_last:
    assert not is_last
  with one.alone() as is_last, other.alone() as second:
    assert is_last and not second
    with pytest.raises(UserError, match='expected no other process to write it'), other.open():
      pass
    one.complete({'a-0'})
  with one.alone() as is_last:
    assert not is_last and (tmp_path / 'set').is_dir()


def test_a_killed_process_leaves_what_the_next_one_takes(tmp_path: pathlib.Path) -> None:
  code = f"""import os, pathlib, signal
from vit_jax.core import files
with files.Unfinished(pathlib.Path({str(tmp_path / 'set')!r}), '{{"seed": 1}}', {{'a-0', 'a-1'}}).open() as part:
  files.replace(part / 'a-0', b'0')
  files.temporary_path(part).write_bytes(b'half')
  os.kill(os.getpid(), signal.SIGKILL)"""
  assert subprocess.run([sys.executable, '-c', code]).returncode == -signal.SIGKILL
  with plan(tmp_path).open() as part:
    assert tree(part) == {'a-0': b'0', 'plan.json': b'{"seed": 1}'}


@pytest.mark.parametrize('error', [13, 30, 28])
def test_a_parent_that_cannot_be_written_is_named(error: int, tmp_path: pathlib.Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
  def fail(*_: object, **__: object) -> None:
    raise OSError(error, os.strerror(error), 'x')
  monkeypatch.setattr(os, 'mkdir', fail)
  with pytest.raises((UserError, TemporaryError), match=f'set: expected to write it, got "{os.strerror(error)}'), plan(
      tmp_path).open():
    pass
  assert not list(tmp_path.iterdir())


def test_a_folder_with_other_files_than_its_successor_is_not_replaced(tmp_path: pathlib.Path) -> None:
  def write(*names: str) -> None:
    with files.staged(tmp_path) as part:
      (part / 'out').mkdir()
      for name in names:
        (part / 'out' / name).write_text('new')
      files.publish_all(part, tmp_path, overwrite=True, is_ours=lambda path: path.name == 'README.md')
  write('a', 'README.md')
  (tmp_path / 'out' / 'thesis.txt').write_text('mine')
  with pytest.raises(UserError, match='out: expected a folder that has only what this command replaces, got thesis'):
    write('a')
  (tmp_path / 'out' / 'thesis.txt').unlink()
  write('a')
  assert tree(tmp_path) == {'out/a': b'new'}
