"""The run directory: one writer, the config that made it, and small JSON files written whole or not at all."""
from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import jax

from vit_jax.config import json_files, schema
from vit_jax.core import os_errors
from vit_jax.core.errors import UserError
from vit_jax.jobs.lease import Lease
from vit_jax.record import storage

log = logging.getLogger('vit_jax.jobs')


def hold(workdir: storage.PathLike) -> Lock | Lease:
  """Holds a run directory for one run, for a `with` statement.

  Raises:
    UserError: if another process holds it, or the directory cannot be written.
  """
  return Lock(workdir) if storage.is_local(workdir) else Lease(workdir)


class Lock:
  """Holds a local run directory; the system lets go of it when the process ends, however it ends.

  A new directory is taken away again if a person's mistake ends the run before it has done anything.

  Raises:
    UserError: if another process holds it, or the directory cannot be written.
  """

  def __init__(self, workdir: storage.PathLike):
    self._workdir, self._is_new = os.fspath(workdir), not os.path.exists(workdir)
    try:
      os.makedirs(workdir, exist_ok=True)
      self._file = open(os.path.join(workdir, '.lock'), 'a+')
      self._take()
    except OSError as error:
      raise UserError(f'--workdir={workdir}: expected a folder that can be written, got {error.strerror}. '
                      f'{os_errors.find(error) or "Use a folder that this user may write to"}, then run the same '
                      'command again.') from error

  def _take(self) -> None:
    """Locks the file, and writes this process's number into it."""
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self._file.seek(0)
      holder = self._file.read().strip() or 'unknown'
      self._file.close()
      raise UserError(f'--workdir={self._workdir} is in use by another run (process {holder}); wait for it, stop it, '
                      'or use another --workdir') from None
    self._file.seek(0)
    self._file.truncate()
    os.write(self._file.fileno(), str(os.getpid()).encode())

  def __enter__(self) -> Lock:
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    if self._is_new and isinstance(error, UserError) and _holds_nothing(self._workdir):
      shutil.rmtree(self._workdir, ignore_errors=True)
    self._file.close()


def _holds_nothing(workdir: str) -> bool:
  """Whether a run directory has only what every start writes before there is anything to lose."""
  found = set(os.listdir(workdir))
  return found <= {'.lock', 'config.json', 'checkpoints'} and not (
      'checkpoints' in found and os.listdir(os.path.join(workdir, 'checkpoints')))


def write_json(path: storage.PathLike, content: Mapping[str, Any]) -> None:
  """Replaces a JSON file at once; only process 0 writes."""
  write_text(path, json.dumps(content, indent=2) + '\n')


def write_text(path: storage.PathLike, text: str) -> None:
  """Replaces a text file at once; only process 0 writes."""
  write_bytes(path, text.encode())


def write_bytes(path: storage.PathLike, content: bytes) -> None:
  """Replaces a file at once; only process 0 writes.

  Raises:
    UserError: it cannot be written, as on a full disk.
  """
  if jax.process_index():
    return
  try:
    storage.write_bytes(path, content)
  except storage.faults() as error:
    raise os_errors.writing(os.fspath(path), error) from error


def write_config(workdir: storage.Path, config: schema.Config) -> None:
  """Writes `config.json`, and warns of settings that differ from those the run was started with."""
  path = workdir / 'config.json'
  if not jax.process_index() and path.exists():
    _compare(path, config)
  write_text(path, json_files.to_json(config))


def _compare(path: storage.Path, config: schema.Config) -> None:
  try:
    changed = changes(json.loads(path.read_text()), config)
  except (ValueError, RecursionError, IsADirectoryError) as error:
    log.warning('%s is damaged (%s), and is replaced by the config of this command.', path,
                os_errors.first_line(error))
    return
  except OSError as error:
    raise os_errors.reading(str(path), error) from error
  if changed:
    log.warning('The config is not the one this run was started with:\n%s', '\n'.join(changed))


def changes(before: Any, config: schema.Config) -> list[str]:
  """Lines that say which settings of `config` are not those of `before`, a config as JSON has it."""
  old, new = _flat(before), _flat(json.loads(json_files.to_json(config)))
  return [f'  {name}: {old.get(name)} -> {new.get(name)}' for name in sorted(old.keys() | new.keys())
          if old.get(name) != new.get(name)]


def _flat(tree: Any, prefix: str = '') -> dict[str, Any]:
  if not isinstance(tree, dict):
    return {prefix: tree}
  return {k: v for name, child in tree.items() for k, v in _flat(child, f'{prefix}.{name}'.strip('.')).items()}
