"""Explains errors of the operating system and of storage, with advice for the user.

Libraries report such errors in many ways: as an `OSError`, as a status code or an error number in a text, or as the
cause of another error. The functions here decide whether a file counts as damaged. Imports only `core.errors`.
"""
from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

from vit_jax.core.errors import TemporaryError, UserError

_SPACE = 'Free some space, or choose another disk.'
_RIGHTS = 'Change the permissions, or choose another path.'
_MEMORY = 'Free memory, or use more or larger devices.'
_DEVICE = 'Check the disk, the connection to the storage and the devices.'
_PATH = 'Check the path: it is not an ordinary file.'
ADVICE = {
    errno.ENOSPC: _SPACE, errno.EDQUOT: _SPACE, errno.EFBIG: _SPACE, errno.EACCES: _RIGHTS, errno.EPERM: _RIGHTS,
    errno.EROFS: 'The file system is read-only. Choose another path.',
    errno.ENOENT: 'Check the path.',
    errno.ENOTDIR: 'Check the path: a part of it that should be a directory is a file.',
    errno.EISDIR: 'Check the path: it should be a file.',
    errno.EEXIST: 'Choose another path, or remove what is there.',
    errno.ENAMETOOLONG: 'Choose a shorter name.',
    errno.ELOOP: 'Check the path: symbolic links form a circle.',
    errno.EINVAL: 'Check the path.',
    errno.EMFILE: 'Raise the limit on open files with "ulimit -n 65536".',
    errno.ENFILE: 'The system has too many open files. End other programs.',
    errno.EIO: 'The disk or network file system reports an error. Check it.',
    errno.ESTALE: 'The network file system lost this file. Start the command again.',
    errno.ENOTCONN: 'The network file system is not connected. Mount it again.',
    errno.ENXIO: _PATH, errno.ENODEV: _PATH, errno.ESPIPE: _PATH, errno.ENOMEM: _MEMORY,
    errno.EAGAIN: 'The system allows no more processes or threads. End other programs, or use fewer workers.',
}
"""Error numbers with advice for the user."""
_OF_FILES = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EEXIST,
             errno.ENOTEMPTY)
"""Error numbers of a file that is missing or is not of the expected type."""
_STATUS = {'RESOURCE_EXHAUSTED': _MEMORY, 'PERMISSION_DENIED': _RIGHTS, 'UNAUTHENTICATED': _RIGHTS,
           'UNAVAILABLE': _DEVICE, 'DEADLINE_EXCEEDED': _DEVICE}
"""Status codes of XLA and TensorStore that do not concern the content of a file."""
TEMPORARY = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED,
             errno.ECONNABORTED, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EBUSY)
"""Error numbers of storage and networks after which the same operation may succeed."""
_TEMPORARY_TEXT = re.compile(r'\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED)\b|'
                             r'\b(HTTP|status|code)\D{0,12}(408|429|50[0234])\b')
_NUMBER = re.compile(r"\[Errno (\d+)\]|os_error_code='(\d+)'")
_TAIL = re.compile(r' \[(?:os_error_code|tensorstore_spec|source locations)=')
_JAX = ('JaxRuntimeError', 'XlaRuntimeError')
_CLIENTS = ('gcsfs', 'aiohttp', 'tensorflow', 'google', 'requests', 'urllib3')
"""Packages that access object storage; their errors say nothing about the content of a file."""


class Damaged(Exception):
  """The content of a file cannot be used, or the file does not exist; the text says why."""


class Obstacle(UserError):
  """The system prevents reading or writing a file, whose content may be valid."""


def find(error: BaseException) -> str:
  """Returns advice about an error of the system; '' if the file itself is the cause."""
  for one in chain(error, with_context=True):
    if advice := _advice(one):
      return advice
  return ''


def first_line(error: BaseException) -> str:
  """Returns the first line of the first cause of an error, at most 300 characters."""
  *_, cause = chain(error, with_context=True)
  text = str(cause).strip() or type(cause).__name__
  if (number := _find_number(text)) is not None and number not in _OF_FILES:
    return os.strerror(number)
  text = _TAIL.split(text.splitlines()[0])[0]
  return re.sub(r'^\[Errno \d+\] ', '', text)[:300]


def reading(what: str, error: BaseException) -> Damaged | Obstacle:
  """Returns the error to raise instead of one that occurred while reading `what`."""
  if advice := find(error):
    return Obstacle(f'{what}: expected to read it, got {first_line(error)}. {advice} Then run the same command '
                    'again; nothing was changed.')
  return Damaged(first_line(error))


def writing(what: str, error: BaseException) -> Obstacle:
  """Returns the error to raise instead of one that occurred while writing `what`."""
  advice = find(error) or 'Move away what is there.'
  return Obstacle(f'{what}: expected to write it, got {first_line(error)}. {advice} Then run the same command again.')


def is_temporary(error: BaseException) -> bool:
  """Returns whether the same operation may succeed later: storage or a network failed, not the content of a file."""
  for one in chain(error, with_context=False):
    if isinstance(one, TemporaryError | TimeoutError | ConnectionError):
      return True
    if isinstance(one, UserError):
      return False
    number = one.errno if isinstance(one, OSError) and one.errno is not None else _find_number(str(one))
    if number in TEMPORARY or _TEMPORARY_TEXT.search(str(one)):
      return True
  return False


def chain(error: BaseException, *, with_context: bool) -> Iterator[BaseException]:
  """Yields an error and its causes, outermost first; `with_context` includes errors that were being handled then."""
  seen: list[BaseException] = []
  now: BaseException | None = error
  while now is not None and not any(now is one for one in seen):
    seen.append(now)
    yield now
    context = None if now.__suppress_context__ or not with_context else now.__context__
    now = now.__cause__ or context


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
  return '' if number in _OF_FILES else ADVICE.get(number, _DEVICE)


def _of_text(text: str) -> str:
  """Returns the advice for a text such as TensorStore's `PERMISSION_DENIED: … [os_error_code='13']`."""
  if (number := _find_number(text)) is not None:
    return _of_number(number)
  for status, advice in _STATUS.items():
    if re.match(rf'{status}\b', text):
      return advice
  return ''


def _find_number(text: str) -> int | None:
  found = _NUMBER.search(text)
  return int(found[1] or found[2]) if found else None
