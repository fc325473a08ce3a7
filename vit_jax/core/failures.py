"""Decides what each failure means: the exit status of the program, its message, and whether to repeat what failed.

Libraries report one failure in many ways: as an `OSError`, as a status of HTTP or gRPC, as words in a text, or as the
cause of another error. `MEANINGS` has the advice for each of these codes, and whether the same operation may succeed
later. Everything else follows from it, in this order:

1. A module that reads or writes calls `retried` or `stored`, which repeat what failed. No other module repeats.
2. It raises what `unreadable`, `reading` or `writing` return in place of an error that remains: a `UserError` (exit
   status 2), a `TemporaryError` (75), or `Damaged`, if the content of the file is the cause. Errors of XLA's runtime
   that have no known code (`is_of_runtime`) are raised as they are.
3. `main.py` converts what ends a job by `reports.explain`.

An error is examined with its causes (`chain`): it is temporary if one of them is. Imports only `core`.
"""
from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from vit_jax.core.errors import TemporaryError, UserError

USER_ERROR = 2     # the message explains what to change; repeating the same command does not help
UNFORESEEN = 70    # EX_SOFTWARE of sysexits.h: an error of this program
TRY_AGAIN = 75     # EX_TEMPFAIL: stopped on request, or the environment failed; the same command resumes
SHOW = 'VIT_JAX_TRACEBACK'
"""Environment variable: 1 prints the traceback of every failure."""
PATIENCE_S = 300.
"""Seconds after the first failure during which an operation is repeated, unless `configure` sets another time."""
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.
log = logging.getLogger('vit_jax.storage')
_Result = TypeVar('_Result')
_patience_s: float | None = None


class Damaged(Exception):
  """The content of a file cannot be used, or the file does not exist; the text says why."""


class Meaning(NamedTuple):
  """What a code of `MEANINGS` means.

  advice: what to do about it, a sentence.
  is_temporary: whether the same operation may succeed later.
  is_of_file: whether it says only that a file is missing or of another type.
  """
  advice: str
  is_temporary: bool = False
  is_of_file: bool = False


_EAI_AGAIN = -3  # socket.EAI_AGAIN of Linux: no answer from a name server
_DEVICE = 'Check the disk, the connection to the storage and the devices.'
_OTHER = Meaning(_DEVICE)  # of codes that are not in the table
_PASSING = Meaning(_DEVICE, is_temporary=True)
_GROUPS: tuple[tuple[tuple[int | str, ...], Meaning], ...] = (
    ((errno.ENOSPC, errno.EDQUOT), Meaning('Free some space, or choose another disk.', is_temporary=True)),
    ((errno.EFBIG,), Meaning('Free some space, or choose another disk.')),
    ((errno.EACCES, errno.EPERM, 401, 403, 'PERMISSION_DENIED', 'UNAUTHENTICATED'),
     Meaning('Change the permissions, or choose another path.')),
    ((errno.EROFS,), Meaning('The file system is read-only. Choose another path.')),
    ((errno.ENOENT, errno.EINVAL, 404), Meaning('Check the path.', is_of_file=True)),
    ((errno.ENOTDIR,), Meaning('Check the path: a part of it that should be a directory is a file.', is_of_file=True)),
    ((errno.EISDIR,), Meaning('Check the path: it should be a file.', is_of_file=True)),
    ((errno.EEXIST, errno.ENOTEMPTY), Meaning('Choose another path, or remove what is there.', is_of_file=True)),
    ((errno.ENAMETOOLONG,), Meaning('Choose a shorter name.', is_of_file=True)),
    ((errno.ELOOP,), Meaning('Check the path: symbolic links form a circle.', is_of_file=True)),
    ((errno.ENXIO, errno.ENODEV, errno.ESPIPE), Meaning('Check the path: it is not an ordinary file.')),
    ((errno.EMFILE,), Meaning('Raise the limit on open files with "ulimit -n 65536".')),
    ((errno.ENFILE,), Meaning('The system has too many open files. End other programs.')),
    ((errno.ENOMEM, 'RESOURCE_EXHAUSTED'), Meaning('Free memory, or use more or larger devices.')),
    ((errno.EAGAIN,), Meaning('The system allows no more processes or threads. End other programs, or use fewer '
                              'workers.')),
    ((errno.EIO,), Meaning('The disk or network file system reports an error. Check it.', is_temporary=True)),
    ((errno.ESTALE,), Meaning('The network file system lost this file. Start the command again.', is_temporary=True)),
    ((errno.ENOTCONN,), Meaning('The network file system is not connected. Mount it again.', is_temporary=True)),
    ((errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.EHOSTUNREACH,
      errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ESHUTDOWN, _EAI_AGAIN, errno.EBUSY,
      errno.ENOLCK, 408, 425, 429, 500, 502, 503, 504, 'UNAVAILABLE', 'DEADLINE_EXCEEDED', 'ABORTED'), _PASSING))
MEANINGS: dict[int | str, Meaning] = {code: meaning for codes, meaning in _GROUPS for code in codes}
"""Error numbers of the system, statuses of HTTP (from 400 on) and statuses of gRPC, as XLA and TensorStore use them."""
_NUMBER = re.compile(r"\[(?:Errno|OS error) (\d+)\b|os_error_code='(\d+)'")  # [Errno 28] of Python and TensorStore
_STATUS = re.compile(rf'\b({"|".join(code for code in MEANINGS if isinstance(code, str))})\b|'
                     r'\b(?:HTTP|status|code)\D{0,12}(408|429|50[0234])\b')  # UNAVAILABLE, status code: 503
_NUMBERS = {os.strerror(code): code for code in MEANINGS if isinstance(code, int) and 0 < code < 400}
_PHRASE = re.compile('|'.join(map(re.escape, _NUMBERS)))  # No space left on device
_TAIL = re.compile(r' \[(?:os_error_code|tensorstore_spec|source locations)=')  # what TensorStore adds to a message
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
_OF_CODE = (LookupError, AssertionError, AttributeError, NameError, TypeError)
"""Errors of code, whose texts may quote words of another error."""
_RUNTIME = ('JaxRuntimeError', 'XlaRuntimeError')
_CLIENTS = ('gcsfs', 'aiohttp', 'tensorflow', 'google', 'requests', 'urllib3')
"""Packages that access object storage; their errors say nothing about the content of a file."""
_REFUSAL = re.compile(r'NotFound|Forbidden|Permission|Unauthenticated|Credential|Invalid|Precondition|OutOfRange|'
                      r'DataLoss|AlreadyExists|Unimplemented|ResourceExhausted')
"""Names of errors of those packages after which repeating does not help."""


def chain(error: BaseException, *, with_context: bool = True) -> Iterator[BaseException]:
  """Yields an error and its causes, outermost first; `with_context` includes errors that were being handled then."""
  seen: list[BaseException] = []
  cause: BaseException | None = error
  while cause is not None and not any(cause is one for one in seen):
    seen.append(cause)
    yield cause
    context = None if cause.__suppress_context__ or not with_context else cause.__context__
    cause = cause.__cause__ or context


def code_of(error: BaseException) -> int | str | None:
  """Returns the code of one error of a chain, a key of `MEANINGS`: its attribute, or else found in its text.

  None if it has no code.
  """
  if isinstance(error, MemoryError):
    return errno.ENOMEM
  if isinstance(error, OSError) and error.errno is not None:
    return error.errno
  status = str(getattr(error, 'code', None) or getattr(error, 'status', ''))
  if (_is_of_client(error) or type(error).__module__.startswith('urllib.')) and re.fullmatch('[1-5][0-9][0-9]', status):
    return int(status)
  text = str(error)
  if match := _NUMBER.search(text):
    return int(match[1] or match[2])
  if isinstance(error, _OF_CODE):
    return None
  number = _NUMBERS[match[0]] if (match := _PHRASE.search(text)) else None
  if number not in (errno.ENOSPC, errno.EDQUOT) and (match := _STATUS.search(text)):  # a full disk is the cause
    return match[1] or int(match[2])
  return number


def _number(error: BaseException) -> int:
  """Returns the code of one error of a chain if it is an error number of the system; 0 for others."""
  return code if isinstance(code := code_of(error), int) and 0 < code < 400 else 0


def _is_of_client(error: BaseException) -> bool:
  """Returns whether the class of an error is of a client of object storage."""
  module = type(error).__module__
  return module.partition('.')[0] in _CLIENTS and not module.startswith('google.protobuf')


def is_of_storage(error: BaseException) -> bool:
  """Returns whether an error may be one of storage: of the system, or of a client of object storage."""
  return (isinstance(error, OSError | RuntimeError) and not is_of_runtime(error)) or _is_of_client(error)


def _meaning(error: BaseException) -> Meaning | None:
  """Returns what one error of a chain means; None if it says nothing about the environment."""
  if (code := code_of(error)) is not None:
    return MEANINGS.get(code, _OTHER)
  if isinstance(error, TemporaryError | TimeoutError | ConnectionError):
    return _PASSING
  if _is_of_client(error):
    return _OTHER if _REFUSAL.search(type(error).__name__) else _PASSING
  return _OTHER if type(error).__name__ in _RUNTIME else None


def advice(error: BaseException) -> str:
  """Returns what to do about an error of the system; '' if the file itself is the cause."""
  for cause in chain(error):
    if (meaning := _meaning(cause)) and not meaning.is_of_file:
      return meaning.advice
  return ''


def first_line(error: BaseException) -> str:
  """Returns the system's words for an error, such as `No space left on device`, or else the first line of its cause."""
  cause = error
  for cause in chain(error):
    if (number := _number(cause)) and not MEANINGS.get(number, _OTHER).is_of_file:
      return os.strerror(number)
  text = str(getattr(cause, 'strerror', None) or cause).strip() or type(cause).__name__
  return _TAIL.split(text.splitlines()[0])[0][:300].rstrip('.')


def typed_line(error: BaseException, *, is_located: bool = False) -> str:
  """Returns `ValueError: text`: the type of an exception and the first line of its text, at most 300 characters.

  With `is_located`, the text of a SyntaxError does not repeat the file and the line, which the message has already.
  """
  lines = str(error.msg if is_located and isinstance(error, SyntaxError) else error).strip().splitlines()
  return f'{type(error).__name__}: {lines[0][:300]}' if lines else type(error).__name__


def is_temporary(error: BaseException, *, with_context: bool = False) -> bool:
  """Returns whether the same operation may succeed later: storage or a network failed, not the content of a file.

  `with_context` includes the errors that were being handled when this one was raised.
  """
  for cause in chain(error, with_context=with_context):
    if isinstance(cause, UserError | TemporaryError):
      return isinstance(cause, TemporaryError)
    if (meaning := _meaning(cause)) and meaning.is_temporary:
      return True
  return False


def is_lost_peer(error: BaseException) -> bool:
  """Returns whether another process of the run, a device or the network between them failed.

  Repeating an operation in this process alone does not help then, but starting all processes again does.
  """
  for cause in chain(error, with_context=False):
    if isinstance(cause, UserError | TemporaryError):
      return False
    if _LOST_PEER.search(str(cause)) or (type(cause).__name__ in _RUNTIME and _LOST_DEVICE.search(str(cause))):
      return True
  return False


def is_of_runtime(error: BaseException) -> bool:
  """Returns whether XLA's runtime failed for an unknown reason. Such an error is raised as it is, with exit status 70.

  It is no `TemporaryError`, after which launchers repeat the command without end, as the command may fail each time.
  Nor is it a `UserError`: no advice about files would help.
  """
  if isinstance(error, OSError):  # an error of the runtime was being handled when it was raised
    return False
  is_unknown = any(type(one).__name__ in _RUNTIME and _meaning(one) == _OTHER for one in chain(error))
  return is_unknown and kind(error) is UserError


def kind(error: BaseException) -> type[UserError] | type[TemporaryError]:
  """Returns the class of the error to raise in place of one of the system.

  It is `UserError` if a person has to change something, `TemporaryError` if the same command may succeed later.
  """
  return TemporaryError if is_temporary(error, with_context=True) or is_lost_peer(error) else UserError


def system_error(error: BaseException, path: str | None = None) -> OSError | None:
  """Returns an OSError with the error number that a library's error has in its text; None if it has none."""
  return OSError(number, os.strerror(number), path) if (number := _number(error)) else None


def unreadable(error: BaseException, what: str) -> UserError | TemporaryError:
  """Returns the error that ends a job which could not read `what`; an image does not count as bad because of it."""
  path = str(getattr(error, 'filename', None) or '')
  where = f'{what} ({path})' if path and path not in what else what
  meanings = filter(None, map(_meaning, chain(error)))
  todo = advice(error) or next((meaning.advice for meaning in meanings), _DEVICE)
  return kind(error)(f'{where}: expected to read it, got "{first_line(error)}". {todo} Then run the same command '
                       'again; nothing was skipped or changed.')


def reading(what: str, error: BaseException) -> Damaged | UserError | TemporaryError:
  """Returns the error to raise instead of one that occurred while reading `what`."""
  return unreadable(error, what) if advice(error) else Damaged(first_line(error))


def writing(what: str, error: BaseException) -> UserError | TemporaryError:
  """Returns the error to raise instead of one that occurred while writing `what`."""
  todo = advice(error) or 'Move away what is there, or choose another path.'
  return kind(error)(f'{what}: expected to write it, got "{first_line(error)}". {todo} Then run the same command '
                       'again.')


def configure(patience_s: float | None) -> None:
  """Sets how long this process repeats operations (`train.retry`); loader processes get the value of their parent."""
  global _patience_s
  _patience_s = patience_s


def patience() -> float:
  """Returns for how many seconds after its first failure an operation is repeated in this process; 0 = not at all."""
  return PATIENCE_S if _patience_s is None else _patience_s


def is_worth(error: BaseException) -> bool:
  """Returns whether this process may repeat an operation that raised this error: the default of `retried`."""
  return not isinstance(error, TemporaryError) and not is_lost_peer(error) and is_temporary(error, with_context=True)


def retried(operation: Callable[[], _Result], what: str | Callable[[], str], *,
            patience_s: float | None = None,
            choose: Callable[[BaseException], bool] = is_worth) -> _Result:
  """Returns the result of `operation`, which is repeated after temporary errors, with waits that double.

  If a server requires a longer wait (`Retry-After`), that is waited, within the patience. After a `TemporaryError` the
  operation is not repeated, since another call of this function has done it already.

  Args:
    operation: reads or writes; repeating it has the same effect as doing it once.
    what: the operation, for messages, such as `reading gs://BUCKET/x`, or a function that returns it.
    patience_s: seconds after the first failure during which it is repeated; None = `patience()`.
    choose: returns whether to repeat after an error.

  Raises:
    TemporaryError: it still failed for a temporary reason. With a patience of 0, errors are those of the operation.
  """
  ends_s: float | None = None
  wait_s = FIRST_WAIT_S
  limit_s = patience() if patience_s is None else patience_s
  while True:
    try:
      return operation()
    except Exception as error:
      if limit_s <= 0 or not choose(error):
        raise
      name = what if isinstance(what, str) else what()
      ends_s = time.monotonic() + limit_s if ends_s is None else ends_s
      left_s = ends_s - time.monotonic()
      if left_s <= 0:
        raise TemporaryError(f'{name}: expected success within {limit_s:.0f} s, got {first_line(error)}. '
                             f'{advice(error) or _DEVICE} Then run the same command again, which resumes.') from error
      this_wait_s = min(max(wait_s, _required_wait_s(error)), left_s)
      log.warning('%s failed and is tried again in %.1f s: %s', name, this_wait_s, first_line(error))
    time.sleep(this_wait_s)
    wait_s = min(2 * wait_s, MOST_WAIT_S)


def _required_wait_s(error: BaseException) -> float:
  """Returns the seconds in the header `Retry-After` of a server's response; 0 if there is none, or it has a date."""
  for cause in chain(error, with_context=False):
    headers: Any = getattr(cause, 'headers', None) or getattr(getattr(cause, 'response', None), 'headers', None)
    text = str(headers.get('Retry-After') or '') if hasattr(headers, 'get') else ''
    if text.isdecimal():
      return float(text)
  return 0.


def stored(operation: Callable[[], _Result], what: str, *, patience_s: float | None = None) -> _Result:
  """Returns the result of `operation`, which writes `what`, `retried` with this patience.

  Raises:
    UserError: the storage does not allow it.
    TemporaryError: it failed for a temporary reason, for as long as the patience.
  """
  try:
    return retried(operation, f'writing {what}', patience_s=patience_s)
  except Exception as error:
    if isinstance(error, UserError | TemporaryError) or not is_of_storage(error):
      raise
    raise writing(what, error) from error


def worst(statuses: Iterable[int]) -> int:
  """Returns one exit status for several programs: 0 if all succeeded, else the first of 2, 75 and 70 that fits.

  2: for one of them a person has to change something. 75: one of them may succeed later; it ended with 75, or by a
  signal (128 and more, or negative), as an abort does. 70: all others.
  """
  failed = set(statuses) - {0}
  if not failed:
    return 0
  if USER_ERROR in failed:
    return USER_ERROR
  return TRY_AGAIN if any(status == TRY_AGAIN or status < 0 or status >= 128 for status in failed) else UNFORESEEN
