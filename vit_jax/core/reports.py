"""The message and the exit status with which the program ends after an exception.

`main.py` calls `explain`, prints the message, and exits with the status. The command, versions and traceback of an
unforeseen error are saved to a file, the report. `failures.py` decides which errors are temporary, and has the advice.
"""
from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import platform
import re
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import NamedTuple

import vit_jax
from vit_jax.core import failures, implementation
from vit_jax.core.errors import TemporaryError, UserError, redacted
from vit_jax.core.failures import MEANINGS, SHOW, TRY_AGAIN, UNFORESEEN, USER_ERROR
from vit_jax.core.signals import ENDING, INTERRUPTED

BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report it
MAX_REPORTS = 20  # `save` keeps so many reports, and deletes older ones
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy', 'libtpu')
_CLEAR_WITHOUT_PATH = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Error numbers whose message is clear without a path."""
_OUT_OF_MEMORY = re.compile(
    r'RESOURCE_EXHAUSTED(?=.*memory)|out of ?memory|insufficient memory|bad_alloc|YNNPACK .*failed',
    re.I | re.S)  # YNNPACK, XLA's kernels for CPUs, says only that it failed
_USE_LESS_MEMORY = ('To use less: a smaller batch_size, train.accumulate=2 or more, model.remat=full, smaller evals.*.'
                'batch_size, or data.in_memory=no; vit-jax plan shows what a config needs.')
_RESUMES = 'The same command resumes from the last checkpoint.'
_INSTALL = 'Install the dependencies of vit_jax: pip install -e . in its checkout, or pip install of the package alone.'


class Failure(NamedTuple):
  """The exit status of the program, and its message on standard error ('' = nothing)."""
  status: int
  message: str


def explain(error: BaseException, words: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Failure:
  """Returns the exit status and the message for any exception. Saves a report of an unforeseen error.

  Args:
    error: the exception that ended the job.
    words: the command line, for the report.
    environ: the process environment. With `VIT_JAX_TRACEBACK=1` messages have the traceback, and no report is saved.

  Returns:
    Status 2, with advice, if the user has to change something: settings, own code, files, permissions, limits of the
    machine. 75 if the environment failed, such as storage or another process of the run. 130 for Ctrl-C, 141 for a
    closed standard output. 70 for all other exceptions, with the path of the report.
  """
  failure = _explain_expected(error)
  if environ.get(SHOW) in (None, '', '0'):
    return failure or _report_unforeseen(error, words, environ)
  status, message = failure or _explain_own_code(error) or (UNFORESEEN, '')
  lines = ''.join(traceback.format_exception(error))
  return Failure(status, redacted(f'{lines}{message}'.rstrip()))


def _explain_expected(error: BaseException) -> Failure | None:
  """Returns the failure for an exception with a known cause; None for other exceptions."""
  if isinstance(error, UserError | TemporaryError):
    return Failure(TRY_AGAIN if isinstance(error, TemporaryError) else USER_ERROR, f'error: {error}')
  if isinstance(error, KeyboardInterrupt):
    return Failure(INTERRUPTED, ENDING)
  if isinstance(error, BrokenPipeError) and _is_output_closed():
    return Failure(BROKEN_PIPE, '')
  for cause in failures.chain(error, with_context=False):
    if isinstance(cause, ModuleNotFoundError) and cause.name and cause.name.partition('.')[0] != 'vit_jax':
      return Failure(USER_ERROR, f'error: {cause.name.partition(".")[0]}: expected this Python package to be '
                                 f'installed, got none. {_INSTALL}')
    if isinstance(cause, OSError) and cause.errno in MEANINGS and (
        cause.filename is not None or cause.errno in _CLEAR_WITHOUT_PATH):
      paths = [os.fsdecode(path) if isinstance(path, bytes) else str(path)
               for path in (cause.filename, cause.filename2) if path is not None]
      status = TRY_AGAIN if failures.error_class(cause) is TemporaryError else USER_ERROR
      return Failure(status, f'error: {" -> ".join(paths) or "a file or standard output"}: {cause.strerror}. '
                             f'{MEANINGS[cause.errno].advice}')
    if (code := failures.code_of(cause)) in (errno.ENOSPC, errno.EDQUOT):
      return Failure(TRY_AGAIN, f'error: {_typed_line(cause)}. {MEANINGS[code].advice}')
    if isinstance(cause, MemoryError) or _OUT_OF_MEMORY.search(str(cause)):
      return Failure(USER_ERROR, f'error: expected enough memory, got {_typed_line(cause)}. {_USE_LESS_MEMORY}')
  if failures.is_lost_peer(error):
    return Failure(TRY_AGAIN, f'error: the connection to another process of the run was lost ({_typed_line(error)}). '
                              f'See the messages of the other processes. {_RESUMES}')
  if failures.is_temporary(error):
    return Failure(TRY_AGAIN, f'error: storage, the network or a device failed ({_typed_line(error)}). Check them. '
                              f'{_RESUMES}')
  return None


def _typed_line(error: BaseException) -> str:
  """Returns `failures.typed_line` without secrets and without its full stop, which the message adds."""
  return redacted(failures.typed_line(error).rstrip('.'))


def _report_unforeseen(error: BaseException, words: Sequence[str], environ: Mapping[str, str]) -> Failure:
  """Saves a report, and returns the failure for an error in the user's own module (status 2) or in vit_jax (70)."""
  text = redacted('\n'.join([f'Command: {" ".join(map(repr, words))}', versions(), '',
                             ''.join(traceback.format_exception(error))]))
  path = save(text, environ)
  if failure := _explain_own_code(error):
    hint = (f'{path} holds the traceback; ' if path else '') + f'{SHOW}=1 shows it here.'
    return failure._replace(message=f'{failure.message}\n{hint}')
  blame = 'This is an error in vit_jax.'
  if implementation.own_modules:
    names = ', '.join(implementation.own_modules)
    blame = f'Compare your code in {names} with the contract of its kind; else this is an error in vit_jax.'
  message = f'error: unforeseen {_typed_line(error)}. {blame} Please report it with the'
  if path is None:
    return Failure(UNFORESEEN, f'{text}\n{message} lines above.')
  return Failure(UNFORESEEN, f'{message} file {path}, which holds the traceback; {SHOW}=1 shows it here.')


def _explain_own_code(error: BaseException) -> Failure | None:
  """Returns the failure for an error in the user's own module, without a hint to the report; None for other errors."""
  frames = [frame for frame in traceback.extract_tb(error.__traceback__) if implementation.is_own_file(frame.filename)]
  if not frames:
    return None
  frame = frames[-1]
  return Failure(USER_ERROR, redacted(f'error: {frame.filename}, line {frame.lineno}, in {frame.name}: expected code '
                                      f'that runs, got {_typed_line(error)}.\n    {frame.line}'))


def versions() -> str:
  """Returns the versions of this program, Python and the main packages, in two lines; imports no package."""
  installed = []
  for name in _PACKAGES:
    with contextlib.suppress(metadata.PackageNotFoundError):
      installed.append(f'{name} {metadata.version(name)}')
  return (f'vit_jax {vit_jax.__version__}, Python {platform.python_version()} on {platform.platform()}\n'
          f'{", ".join(installed)}')


def save(text: str, environ: Mapping[str, str]) -> pathlib.Path | None:
  """Saves a report in the user's state directory, or else a temporary one, and returns its path; None if both fail."""
  home = environ.get('XDG_STATE_HOME') or os.path.join(os.path.expanduser('~'), '.local', 'state')
  content = text.encode(errors='backslashreplace')
  with contextlib.suppress(OSError):
    path = pathlib.Path(home) / 'vit_jax' / time.strftime(f'failure-%Y%m%d-%H%M%S-{os.getpid()}.txt')
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(content)
    for old in sorted(path.parent.glob('failure-*.txt'))[:-MAX_REPORTS]:
      old.unlink(missing_ok=True)
    return path
  with contextlib.suppress(OSError):
    handle, name = tempfile.mkstemp('.txt', 'vit_jax-failure-')
    with open(handle, 'wb') as file:
      file.write(content)
    return pathlib.Path(name)
  return None


def _is_output_closed() -> bool:
  """Returns whether standard output is a pipe whose reader has ended, as after `| head`."""
  try:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
  except (OSError, ValueError):  # standard output is no file, or is closed
    return False


def drop_output() -> None:
  """Discards output that cannot be written. Otherwise the interpreter would try to write it again at its exit."""
  try:
    sys.stdout.flush()
  except OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
