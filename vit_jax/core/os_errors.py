"""Explains errors of the operating system and of storage, with advice for the user.

Libraries report such errors in many ways: as an `OSError`, as a status code or an error number in a text, or as the
cause of another error. The functions here decide whether a file counts as damaged, and whether the person has to change
something (`UserError`, exit status 2) or the same command may succeed later (`TemporaryError`, 75). Imports only
`core.errors`.
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
_EAI_AGAIN = -3  # socket.EAI_AGAIN of Linux: no answer from a name server
TEMPORARY = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED,
             errno.ECONNABORTED, errno.EPIPE, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN,
             errno.ENETRESET, errno.ESHUTDOWN, _EAI_AGAIN, errno.EBUSY, errno.ENOLCK, errno.ENOSPC, errno.EDQUOT)
"""Error numbers of storage and networks after which the same operation may succeed."""
TEMPORARY_HTTP = (408, 425, 429, 500, 502, 503, 504)
_TEMPORARY_TEXT = re.compile(r'\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED)\b|'
                             r'\b(HTTP|status|code)\D{0,12}(408|429|50[0234])\b|'
                             r'No space left on device|Disk quota exceeded')
_LOST_PEER = re.compile(
    r'\bgloo\b.*(closed|reset|timed? ?out|failed|refused|aborted)|coordination service|heartbeat|'
    r'connection closed by (remote )?peer|\bbarrier\b.*(timed out|failed|aborted)|'
    r'\bNCCL\b.*(remote process|network error|system error|timed? ?out|aborted)|nccl(Remote|System)Error|'
    r'TPU initialization failed|observed errors are: \[(network|power|hardware)\]', re.I | re.S)
"""Messages of JAX and its libraries in the processes that remain when another process of a run ends, or when a device
or the network between hosts fails: gloo, the coordination service, NCCL, and libtpu (openxla.org/xla/errors, E0200)."""
_LOST_DEVICE = re.compile(r'\bslice\b.*(health|unhealthy|failed)|\bICI\b.*(link|fail|error|unhealthy|down)|'
                          r'megascale.*(timed? ?out|error|failed)', re.I | re.S)
"""Words of libtpu about the links between chips and slices; they count in errors of XLA's runtime alone."""
_NUMBER = re.compile(r"\[Errno (\d+)\]|os_error_code='(\d+)'")
_TAIL = re.compile(r' \[(?:os_error_code|tensorstore_spec|source locations)=')
_JAX = ('JaxRuntimeError', 'XlaRuntimeError')
_CLIENTS = ('gcsfs', 'aiohttp', 'tensorflow', 'google', 'requests', 'urllib3')
"""Packages that access object storage; their errors say nothing about the content of a file."""
_REFUSAL = re.compile(r'NotFound|Forbidden|Permission|Unauthenticated|Credential|Invalid|Precondition|OutOfRange|'
                      r'DataLoss|AlreadyExists|Unimplemented|ResourceExhausted')
"""Names of errors of those packages after which repeating does not help."""


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


def reading(what: str, error: BaseException) -> Damaged | Obstacle | TemporaryError:
  """Returns the error to raise instead of one that occurred while reading `what`."""
  if advice := find(error):
    return _kind(error)(f'{what}: expected to read it, got {first_line(error)}. {advice} Then run the same command '
                        'again; nothing was changed.')
  return Damaged(first_line(error))


def writing(what: str, error: BaseException) -> Obstacle | TemporaryError:
  """Returns the error to raise instead of one that occurred while writing `what`."""
  advice = find(error) or 'Move away what is there.'
  return _kind(error)(f'{what}: expected to write it, got {first_line(error)}. {advice} Then run the same command '
                      'again.')


def _kind(error: BaseException) -> type[Obstacle] | type[TemporaryError]:
  """Returns the class of an error of storage; an unknown error of XLA's runtime counts as one of the environment."""
  is_elsewhere = any(type(one).__name__ in _JAX and _advice(one) not in (_RIGHTS, _MEMORY)
                     for one in chain(error, with_context=True))
  return TemporaryError if is_elsewhere or kind(error) is TemporaryError else Obstacle


def kind(error: BaseException) -> type[UserError] | type[TemporaryError]:
  """Returns the class of the error to raise instead of one of the system: `UserError` if the person has to change
  something, `TemporaryError` if the same command may succeed later."""
  is_passing = is_temporary(error, with_context=True) or is_lost_peer(error)
  return TemporaryError if is_passing else UserError


def is_temporary(error: BaseException, *, with_context: bool = False) -> bool:
  """Returns whether the same operation may succeed later: storage or a network failed, not the content of a file.

  `with_context` includes the errors that were being handled when this one was raised.
  """
  for one in chain(error, with_context=with_context):
    if isinstance(one, TemporaryError | TimeoutError | ConnectionError):
      return True
    if isinstance(one, UserError):
      return False
    status = http_status(one)
    number = one.errno if isinstance(one, OSError) and one.errno is not None else _find_number(str(one))
    if status in TEMPORARY_HTTP or number in TEMPORARY or _TEMPORARY_TEXT.search(str(one)):
      return True
    if _is_of_client(one) and number is None and not status and not _REFUSAL.search(type(one).__name__):
      return True
  return False


def is_lost_peer(error: BaseException) -> bool:
  """Returns whether another process of the run, a device or the network between them failed; repeating an operation in
  this process alone does not help, but starting all processes again does."""
  for one in chain(error, with_context=False):
    if isinstance(one, UserError | TemporaryError):
      return False
    if _LOST_PEER.search(str(one)) or type(one).__name__ in _JAX and _LOST_DEVICE.search(str(one)):
      return True
  return False


def http_status(error: BaseException) -> int:
  """Returns the HTTP status of an error of a client of object storage or of `urllib`; 0 if it has none."""
  found = str(getattr(error, 'code', None) or getattr(error, 'status', ''))
  is_http = _is_of_client(error) or type(error).__module__.startswith('urllib.')
  return int(found) if is_http and found.isdecimal() and 100 <= int(found) < 600 else 0


def _is_of_client(error: BaseException) -> bool:
  module = type(error).__module__
  return module.partition('.')[0] in _CLIENTS and not module.startswith('google.protobuf')


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
  if isinstance(error, TimeoutError | ConnectionError):
    return _DEVICE
  if isinstance(error, OSError):
    return '' if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError) else _of_text(str(error))
  is_elsewhere = type(error).__name__ in _JAX or _is_of_client(error)
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
