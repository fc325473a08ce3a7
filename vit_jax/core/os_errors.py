"""Reading and writing that fails: whether the system is the reason, or what the file holds.

A library reports both in many ways: as an `OSError`, as a status code or an error number in a text, as the cause of
another error. What is said here decides whether a file counts as damaged. Imports nothing of the project but errors.
"""
from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

from vit_jax.core.errors import UserError

_SPACE = 'Make room on that disk'
_RIGHTS = 'Give this user the right to read and write there'
_FILES = 'Raise the limit of open files, for example with `ulimit -n 65536`'
_MEMORY = 'Free memory, or use more or larger devices'
_DEVICE = 'Check the disk, the connection to the storage and the devices'
_ADVICE = {
    errno.ENOSPC: _SPACE, errno.EDQUOT: _SPACE, errno.EFBIG: _SPACE,
    errno.EACCES: _RIGHTS, errno.EPERM: _RIGHTS, errno.EROFS: _RIGHTS,
    errno.EMFILE: _FILES, errno.ENFILE: _FILES, errno.ENOMEM: _MEMORY}
_OF_FILES = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EEXIST,
             errno.ENOTEMPTY)
"""Error numbers of a file that is missing, or is something else than it should be."""
_STATUS = {'RESOURCE_EXHAUSTED': _MEMORY, 'PERMISSION_DENIED': _RIGHTS, 'UNAUTHENTICATED': _RIGHTS,
           'UNAVAILABLE': _DEVICE, 'DEADLINE_EXCEEDED': _DEVICE}
"""Status codes of XLA and TensorStore that say nothing of a file."""
_NUMBER = re.compile(r"\[Errno (\d+)\]|os_error_code='(\d+)'")
_TAIL = re.compile(r' \[(?:os_error_code|tensorstore_spec|source locations)=')
_JAX = ('JaxRuntimeError', 'XlaRuntimeError')
_CLIENTS = ('gcsfs', 'aiohttp', 'tensorflow', 'google', 'requests', 'urllib3')
"""Packages that reach object storage; what they raise says nothing of a file, but that it is not there."""


class Damaged(Exception):
  """What a file holds cannot be used, or it is not there; the text says why."""


class Obstacle(UserError):
  """The system does not let a file be read or written; nothing is known of what the file holds."""


def find(error: BaseException) -> str:
  """What a person should do about the system's part in an error; '' if it is the file that is wrong."""
  for one in _chain(error):
    if advice := _advice(one):
      return advice
  return ''


def first_line(error: BaseException) -> str:
  """The line of an error that says most: that of its first cause, of at most 300 characters."""
  *_, cause = _chain(error)
  text = str(cause).strip() or type(cause).__name__
  if (number := _find_number(text)) is not None and number not in _OF_FILES:
    return os.strerror(number)
  text = _TAIL.split(text.splitlines()[0])[0]
  return re.sub(r'^\[Errno \d+\] ', '', text)[:300]


def reading(what: str, error: BaseException) -> Damaged | Obstacle:
  """The error to raise for one that reading `what` has raised."""
  if advice := find(error):
    return Obstacle(f'{what}: expected to read it, got {first_line(error)}. {advice}, then run the same command '
                    'again; nothing was changed.')
  return Damaged(first_line(error))


def writing(what: str, error: BaseException) -> Obstacle:
  """The error to raise for one that writing `what` has raised."""
  advice = find(error) or 'Move away what is there'
  return Obstacle(f'{what}: expected to write it, got {first_line(error)}. {advice}, then run the same command again.')


def _chain(error: BaseException) -> Iterator[BaseException]:
  """An error and what caused it."""
  seen: list[BaseException] = []
  now: BaseException | None = error
  while now is not None and now not in seen:
    seen.append(now)
    yield now
    now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)


def _advice(error: BaseException) -> str:
  if isinstance(error, MemoryError):
    return _MEMORY
  if isinstance(error, OSError) and error.errno is not None:
    return _of_number(error.errno)
  if isinstance(error, OSError):
    return '' if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError) else _of_text(str(error))
  is_elsewhere = type(error).__name__ in _JAX or type(error).__module__.split('.')[0] in _CLIENTS
  return _of_text(str(error)) or (_DEVICE if is_elsewhere else '')


def _of_number(number: int) -> str:
  return '' if number in _OF_FILES else _ADVICE.get(number, _DEVICE)


def _of_text(text: str) -> str:
  """As TensorStore writes it: `PERMISSION_DENIED: … Permission denied [os_error_code='13']`."""
  if (number := _find_number(text)) is not None:
    return _of_number(number)
  for status, advice in _STATUS.items():
    if re.match(rf'{status}\b', text):
      return advice
  return ''


def _find_number(text: str) -> int | None:
  found = _NUMBER.search(text)
  return int(found[1] or found[2]) if found else None
