"""A folder with the rules of a mounted bucket, without FUSE: a file exists in the version of its last close or sync.

gcsfuse uploads a file when it is closed or synced. If the host is lost, files that are open for writing are in the
bucket as they were at their last close or sync, or not at all. `install` keeps that version of each such file of the
process, in a folder beside; `lose_host`, called after the process was killed, puts it back.

  python tests/mounted.py FOLDER KILLED_AT --job=train …    the program, with FOLDER as such a mount

The program kills itself after the step KILLED_AT (0 = never), once a checkpoint of this start is complete.
"""
from __future__ import annotations

import builtins
import io
import os
import pathlib
import signal
import sys
import time
import urllib.parse
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
ABSENT = b'\0 no such file'
Folder = str | os.PathLike[str]
_open, _fsync = builtins.open, os.fsync


class _Open:
  """A file that is open for writing."""

  def __init__(self, file: Any, path: str) -> None:
    self._file, self._path = file, path

  def __getattr__(self, name: str) -> Any:
    return getattr(self._file, name)

  def __enter__(self) -> _Open:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    is_open = not self._file.closed
    self._file.close()
    if is_open:
      os.unlink(self._path)


def kept(folder: Folder) -> pathlib.Path:
  """Where versions of open files are."""
  return pathlib.Path(f'{os.fspath(folder)}.kept')


def install(folder: Folder) -> None:
  """Keeps the last closed or synced versions of files in `folder` that this process opens for writing."""
  root, beside = os.path.realpath(folder), kept(folder)
  beside.mkdir(exist_ok=True)

  def keep(path: str) -> str:
    version = beside / urllib.parse.quote(path, safe='')
    part = version.with_suffix('.part')
    part.write_bytes(pathlib.Path(path).read_bytes() if os.path.exists(path) else ABSENT)
    part.replace(version)
    return os.fspath(version)

  def opened(file: Any, mode: str = 'r', *args: Any, **named: Any) -> Any:
    path = os.path.realpath(os.fspath(file)) if isinstance(file, str | os.PathLike) else ''
    if not path.startswith(root + '/') or not set(mode) & set('wax+'):
      return _open(file, mode, *args, **named)
    version = keep(path)
    try:
      return _Open(_open(file, mode, *args, **named), version)
    except OSError:
      os.unlink(version)
      raise

  def synced(number: int) -> None:
    _fsync(number)
    path = os.readlink(f'/proc/self/fd/{number}')
    if (beside / urllib.parse.quote(path, safe='')).exists():
      keep(path)

  builtins.open = io.open = opened
  os.fsync = synced  # type: ignore[assignment]


def lose_host(folder: Folder) -> list[str]:
  """Puts back the last closed or synced versions of files that a killed process had open; returns their names."""
  found = []
  for version in sorted(kept(folder).iterdir()):
    path, content = pathlib.Path(urllib.parse.unquote(version.name)), version.read_bytes()
    if version.suffix != '.part':
      found.append(path.name)
      path.unlink(missing_ok=True) if content == ABSENT else path.write_bytes(content)
    version.unlink()
  return found


def table(folder: Folder, kind: str = 'fuse.gcsfuse') -> pathlib.Path:
  """Writes a table of mounts that has `folder`, as in `/proc/self/mountinfo`."""
  path = pathlib.Path(f'{os.fspath(folder)}.mounts')
  name = os.path.realpath(folder).replace(' ', '\\040')
  path.write_text(f'1 0 8:1 / / rw shared:1 - ext4 /dev/vda rw\n2 1 0:9 / {name} rw,nosuid - {kind} my-bucket rw\n')
  return path


def kill_after(step: int, workdir: pathlib.Path) -> None:
  """Makes the record end this process by SIGKILL behind its row of a step, once a new checkpoint is complete."""
  from vit_jax.record import writer
  write, checkpoints = writer.Writer.write, workdir / 'checkpoints'

  def names() -> set[str]:
    return {p.name for p in checkpoints.iterdir() if p.name.isdigit()} if checkpoints.is_dir() else set()

  before = names()

  def written(self: Any, at: int, values: Any) -> None:
    write(self, at, values)
    if at >= step:
      until = time.monotonic() + 60
      while not names() - before and time.monotonic() < until:
        time.sleep(.01)
      os.kill(os.getpid(), signal.SIGKILL)

  writer.Writer.write = written  # type: ignore[method-assign]


if __name__ == '__main__':
  sys.path.insert(0, str(ROOT))
  mount, killed_at, *words = sys.argv[1:]
  os.makedirs(mount, exist_ok=True)
  install(mount)
  from vit_jax import main
  from vit_jax.record import storage
  storage.MOUNTS = str(table(mount))
  if int(killed_at):
    kill_after(int(killed_at), pathlib.Path(next(word for word in words if '--workdir=' in word).split('=', 1)[1]))
  sys.exit(main.run(words))
