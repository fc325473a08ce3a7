"""Decides what each failure means: the exit status of the program, its message, and whether to repeat an operation.

Libraries report one failure in many ways: as an `OSError`, as a status of HTTP or gRPC, as words in a text, or as the
cause of another error. `code_of` finds the code of an error. `MEANINGS` has the advice for each code, and whether the
same operation may succeed later. The functions are used in this order:

1. A module that reads or writes calls `retried` or `stored`, which repeat operations. No other module repeats them.
2. The module replaces an error that remains by the result of `unreadable`, `reading` or `writing`: a `UserError` (exit
   status 2), a `TemporaryError` (75), or `Damaged` if the content of the file is the cause. An error of XLA's runtime
   without a known code (`is_of_runtime`) is not replaced.
3. `main.py` converts the error that ends a job with `reports.explain`.

An error is examined with its causes (`chain`): it is temporary if one of the causes is. Imports only `core`.
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
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.
log = logging.getLogger('vit_jax.storage')
_Result = TypeVar('_Result')
_patience_s: float | None = None


class Damaged(Exception):
  """The content of a file cannot be used, or the file does not exist; the message says why."""


class Meaning(NamedTuple):
  """What a code of `MEANINGS` means.

  advice: a sentence that says what to do.
  is_temporary: whether the same operation may succeed later.
  is_of_file: whether the code says only that a file is missing or of another type.
  """
  advice: str
  is_temporary: bool = False
  is_of_file: bool = False


_EAI_AGAIN = -3  # socket.EAI_AGAIN of Linux: a name server did not answer
_CHECKS = 'Check the disk, the connection to the storage and the devices.'
_UNLISTED = Meaning(_CHECKS)  # of codes that are not in `MEANINGS`
_TEMPORARY = Meaning(_CHECKS, is_temporary=True)
_MEANING_BY_CODES: tuple[tuple[tuple[int | str, ...], Meaning], ...] = (
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
      errno.ENOLCK, 408, 425, 429, 500, 502, 503, 504, 'UNAVAILABLE', 'DEADLINE_EXCEEDED', 'ABORTED'), _TEMPORARY))
MEANINGS: dict[int | str, Meaning] = {code: meaning for codes, meaning in _MEANING_BY_CODES for code in codes}
"""Keys are error numbers of the system, statuses of HTTP (from 400 on), and statuses of gRPC (of XLA, TensorStore)."""
_NUMBER_IN_TEXT = re.compile(r"\[(?:Errno|OS error) (\d+)\b|os_error_code='(\d+)'")  # [Errno 28]
_STATUS_IN_TEXT = re.compile(rf'\b({"|".join(code for code in MEANINGS if isinstance(code, str))})\b|'
                             r'\b(?:HTTP|status|code)\D{0,12}(408|429|50[0234])\b')  # UNAVAILABLE, status code: 503
_NUMBER_BY_PHRASE = {os.strerror(code): code for code in MEANINGS if isinstance(code, int) and 0 < code < 400}
_PHRASE_IN_TEXT = re.compile('|'.join(map(re.escape, _NUMBER_BY_PHRASE)))  # No space left on device
_TENSORSTORE_DETAILS = re.compile(r' \[(?:os_error_code|tensorstore_spec|source locations)=')  # the end of a message
_LOST_PEER = re.compile(
    r'\bgloo\b.*(closed|reset|timed? ?out|failed|refused|aborted)|coordination service|heartbeat|'
    r'connection closed by (remote )?peer|\bbarrier\b.*(timed out|failed|aborted)|'
    r'\bNCCL\b.*(remote process|network error|system error|timed? ?out|aborted)|nccl(Remote|System)Error|'
    r'TPU initialization failed|observed errors are: \[(network|power|hardware)\]', re.I | re.S)
"""Messages of JAX and its libraries in the processes that remain when another process of a run ends, or when a device
or the network between hosts fails: gloo, the coordination service, NCCL, and libtpu (openxla.org/xla/errors, E0200)."""
_LOST_DEVICE = re.compile(r'\bslice\b.*(health|unhealthy|failed)|\bICI\b.*(link|fail|error|unhealthy|down)|'
                          r'megascale.*(timed? ?out|error|failed)', re.I | re.S)
"""Words of libtpu about the links between chips and slices. They are looked for only in errors of XLA's runtime."""
_PROGRAMMING_ERRORS = (LookupError, AssertionError, AttributeError, NameError, TypeError)
"""Errors in a program, whose messages may contain the words of a code by chance."""
_RUNTIME_ERRORS = ('JaxRuntimeError', 'XlaRuntimeError')
_STORAGE_CLIENTS = ('gcsfs', 'aiohttp', 'tensorflow', 'google', 'requests', 'urllib3')
"""Packages that access object storage. Their errors say nothing about the content of a file."""
_REFUSED = re.compile(r'NotFound|Forbidden|Permission|Unauthenticated|Credential|Invalid|Precondition|OutOfRange|'
                      r'DataLoss|AlreadyExists|Unimplemented|ResourceExhausted')
"""Names of errors of these packages after which repeating does not help."""


def chain(error: BaseException, *, with_context: bool = True) -> Iterator[BaseException]:
  """Yields an error and its causes, outermost first, and with `with_context` the errors that were handled meanwhile."""
  seen_ids: set[int] = set()
  cause: BaseException | None = error
  while cause is not None and id(cause) not in seen_ids:
    seen_ids.add(id(cause))
    yield cause
    has_context = with_context and not cause.__suppress_context__
    cause = cause.__cause__ or (cause.__context__ if has_context else None)


def code_of(error: BaseException) -> int | str | None:
  """Returns the code of an error, without its causes, from an attribute or else the message; None without a code."""
  if isinstance(error, MemoryError):
    return errno.ENOMEM
  if isinstance(error, OSError) and error.errno is not None:
    return error.errno
  status = str(getattr(error, 'code', None) or getattr(error, 'status', ''))
  if (_is_of_client(error) or type(error).__module__.startswith('urllib.')) and re.fullmatch('[1-5][0-9][0-9]', status):
    return int(status)
  text = str(error)
  if match := _NUMBER_IN_TEXT.search(text):
    return int(match[1] or match[2])
  if isinstance(error, _PROGRAMMING_ERRORS):
    return None
  phrase = _PHRASE_IN_TEXT.search(text)
  code = _NUMBER_BY_PHRASE[phrase[0]] if phrase else None
  grpc_or_http = _STATUS_IN_TEXT.search(text)
  if grpc_or_http and code not in (errno.ENOSPC, errno.EDQUOT):  # a full disk is the cause of any status
    return grpc_or_http[1] or int(grpc_or_http[2])
  return code


def _system_number(error: BaseException) -> int:
  """Returns the code of an error, without its causes, if the code is an error number of the system; else 0."""
  code = code_of(error)
  return code if isinstance(code, int) and 0 < code < 400 else 0


def _is_of_client(error: BaseException) -> bool:
  """Returns whether a client of object storage defines the class of an error."""
  module = type(error).__module__
  return module.partition('.')[0] in _STORAGE_CLIENTS and not module.startswith('google.protobuf')


def is_of_storage(error: BaseException) -> bool:
  """Returns whether storage may have failed: the error is one of the system, or of a client of object storage."""
  return (isinstance(error, OSError | RuntimeError) and not is_of_runtime(error)) or _is_of_client(error)


def _meaning(error: BaseException) -> Meaning | None:
  """Returns what an error, without its causes, means; None if the error says nothing about the environment."""
  code = code_of(error)
  if code is not None:
    return MEANINGS.get(code, _UNLISTED)
  if isinstance(error, TemporaryError | TimeoutError | ConnectionError):
    return _TEMPORARY
  if _is_of_client(error):
    return _UNLISTED if _REFUSED.search(type(error).__name__) else _TEMPORARY
  return _UNLISTED if type(error).__name__ in _RUNTIME_ERRORS else None


def advice(error: BaseException) -> str:
  """Returns what to do about an error of the system; '' if the file itself is the cause."""
  for cause in chain(error):
    meaning = _meaning(cause)
    if meaning and not meaning.is_of_file:
      return meaning.advice
  return ''


def first_line(error: BaseException) -> str:
  """Returns the system's words for an error, such as `No space left on device`, or the first line of the last cause."""
  causes = list(chain(error))
  for cause in causes:
    number = _system_number(cause)
    if number and not MEANINGS.get(number, _UNLISTED).is_of_file:
      return os.strerror(number)
  text = str(getattr(causes[-1], 'strerror', None) or causes[-1]).strip() or type(causes[-1]).__name__
  return _TENSORSTORE_DETAILS.split(text.splitlines()[0])[0][:300].rstrip('.')


def typed_line(error: BaseException, *, is_located: bool = False) -> str:
  """Returns `ValueError: text`: the type of an exception, and the first line of its message (at most 300 characters).

  `is_located` leaves out the file and the line of a SyntaxError, for a message that has both already.
  """
  lines = str(error.msg if is_located and isinstance(error, SyntaxError) else error).strip().splitlines()
  return f'{type(error).__name__}: {lines[0][:300]}' if lines else type(error).__name__


def is_temporary(error: BaseException, *, with_context: bool = False) -> bool:
  """Returns whether the same operation may succeed later: storage or a network failed; `with_context` as in `chain`."""
  for cause in chain(error, with_context=with_context):
    if isinstance(cause, UserError | TemporaryError):
      return isinstance(cause, TemporaryError)
    meaning = _meaning(cause)
    if meaning and meaning.is_temporary:
      return True
  return False


def is_lost_peer(error: BaseException) -> bool:
  """Returns whether another process of the run, a device or the network between hosts failed.

  After such an error, repeating an operation in this process does not help, but starting all processes again does.
  """
  for cause in chain(error, with_context=False):
    if isinstance(cause, UserError | TemporaryError):
      return False
    if _LOST_PEER.search(str(cause)) or (type(cause).__name__ in _RUNTIME_ERRORS and _LOST_DEVICE.search(str(cause))):
      return True
  return False


def is_of_runtime(error: BaseException) -> bool:
  """Returns whether XLA's runtime failed for an unknown reason. Such an error is not replaced; the exit status is 70.

  A `TemporaryError` would make launchers repeat the command without end if the command fails each time. The advice of a
  `UserError`, which is about files, would not help.
  """
  if isinstance(error, OSError):  # raised while an error of the runtime was being handled
    return False
  is_unknown = any(type(cause).__name__ in _RUNTIME_ERRORS and _meaning(cause) == _UNLISTED for cause in chain(error))
  return is_unknown and error_class(error) is UserError


def error_class(error: BaseException) -> type[UserError] | type[TemporaryError]:
  """Returns the class of the error to raise in place of an error of the system.

  The class is `UserError` if a person has to change something, `TemporaryError` if the same command may succeed later.
  """
  return TemporaryError if is_temporary(error, with_context=True) or is_lost_peer(error) else UserError


def system_error(error: BaseException, path: str | None = None) -> OSError | None:
  """Returns an OSError with the error number that the message of a library's error has; None without a number."""
  number = _system_number(error)
  return OSError(number, os.strerror(number), path) if number else None


def unreadable(error: BaseException, what: str) -> UserError | TemporaryError:
  """Returns the error that ends a job which could not read `what`. An image does not count as bad because of it."""
  path = str(getattr(error, 'filename', None) or '')
  subject = f'{what} ({path})' if path and path not in what else what
  meanings = filter(None, map(_meaning, chain(error)))
  todo = advice(error) or next((meaning.advice for meaning in meanings), _CHECKS)
  return error_class(error)(f'{subject}: expected to read it, got "{first_line(error)}". {todo} Then run the same '
                            'command again; nothing was skipped or changed.')


def reading(what: str, error: BaseException) -> Damaged | UserError | TemporaryError:
  """Returns the error to raise in place of an error while reading `what`: `Damaged` if the file itself is the cause."""
  return unreadable(error, what) if advice(error) else Damaged(first_line(error))


def writing(what: str, error: BaseException) -> UserError | TemporaryError:
  """Returns the error to raise in place of an error while writing `what`."""
  todo = advice(error) or 'Move away what is there, or choose another path.'
  return error_class(error)(f'{what}: expected to write it, got "{first_line(error)}". {todo} Then run the same '
                            'command again.')


def configure(patience_s: float | None) -> None:
  """Sets how long this process repeats operations (`train.retry`); loader processes get the value of their parent."""
  global _patience_s
  _patience_s = patience_s


def patience() -> float:
  """Returns the seconds after the first failure during which this process repeats an operation; 0 = never repeat."""
  return PATIENCE_S if _patience_s is None else _patience_s


def is_worth(error: BaseException) -> bool:
  """Returns whether this process should repeat an operation that raised this error. `retried` calls it by default."""
  return not isinstance(error, TemporaryError) and not is_lost_peer(error) and is_temporary(error, with_context=True)


def retried(operation: Callable[[], _Result], what: str | Callable[[], str], *,
            patience_s: float | None = None,
            choose: Callable[[BaseException], bool] = is_worth) -> _Result:
  """Returns the result of `operation`, which is repeated after temporary errors, with waits that double.

  A wait is longer if a server requires this (`Retry-After`), but not longer than the patience. After a `TemporaryError`
  the operation is not repeated, since another call of this function has repeated it already.

  Args:
    operation: reads or writes; several calls have the same effect as one call.
    what: the operation in messages, such as `reading gs://BUCKET/x`, or a function that returns this text.
    patience_s: seconds after the first failure during which the operation is repeated; None = `patience()`.
    choose: returns whether to repeat the operation after this error.

  Raises:
    TemporaryError: the operation still failed for a temporary reason. A patience of 0 leaves its errors as they are.
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
                             f'{advice(error) or _CHECKS} Then run the same command again, which resumes.') from error
      this_wait_s = min(max(wait_s, _required_wait_s(error)), left_s)
      log.warning('%s failed and is tried again in %.1f s: %s', name, this_wait_s, first_line(error))
    time.sleep(this_wait_s)
    wait_s = min(2 * wait_s, MAX_WAIT_S)


def _required_wait_s(error: BaseException) -> float:
  """Returns the seconds in the header `Retry-After` of a server's response; 0 if there is none, or it has a date."""
  for cause in chain(error, with_context=False):
    headers: Any = getattr(cause, 'headers', None) or getattr(getattr(cause, 'response', None), 'headers', None)
    text = str(headers.get('Retry-After') or '') if hasattr(headers, 'get') else ''
    if text.isdecimal():
      return float(text)
  return 0.


def stored(operation: Callable[[], _Result], what: str, *, patience_s: float | None = None) -> _Result:
  """Returns the result of `operation`, which writes `what`, and is repeated by `retried` with this patience.

  Raises:
    UserError: the storage refuses the operation.
    TemporaryError: the operation still failed for a temporary reason when the patience ended.
  """
  try:
    return retried(operation, f'writing {what}', patience_s=patience_s)
  except Exception as error:
    if isinstance(error, UserError | TemporaryError) or not is_of_storage(error):
      raise
    raise writing(what, error) from error


def worst(statuses: Iterable[int]) -> int:
  """Returns one exit status for several programs: 0 if all succeeded, else the first of 2, 75 and 70 that applies.

  2: one of the programs ended with 2, so a person has to change something. 75: one of the programs may succeed later,
  because it ended with 75 or by a signal (a status of 128 or more, or below 0). 70: otherwise.
  """
  failed = set(statuses) - {0}
  if not failed:
    return 0
  if USER_ERROR in failed:
    return USER_ERROR
  return TRY_AGAIN if any(status == TRY_AGAIN or status < 0 or status >= 128 for status in failed) else UNFORESEEN
