"""Converts exceptions of the command line to an exit status, one message, and the path of a saved traceback.

Imports only the standard library, so that `--help` stays instant.
"""
from __future__ import annotations

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
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import vit_jax
from vit_jax.core import implementation
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.os_errors import ADVICE, chain, is_lost_peer, is_temporary, kind
from vit_jax.core.redaction import redacted

USER_ERROR = 2     # the message explains what to change; repeating the same command does not help
UNFORESEEN = 70    # EX_SOFTWARE of sysexits.h: an error of this program
TRY_AGAIN = 75     # EX_TEMPFAIL: stopped on request, or the environment failed; the same command resumes
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE, likewise
SHOW = 'VIT_JAX_TRACEBACK'
"""Environment variable: 1 prints the traceback of every failure."""
MOST_FILES = 20
"""Saved tracebacks that are kept; older ones are deleted."""

_OF_PROCESSES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Error numbers whose message is clear without a path."""
_MEMORY = re.compile(r'RESOURCE_EXHAUSTED(?=.*memory)|out of ?memory|insufficient memory|bad_alloc', re.I | re.S)
_FULL = ('No space left on device', 'ENOSPC', 'Disk quota exceeded')
_AGAIN = 'The same command resumes from the last checkpoint.'
MORE_MEMORY = ('To use less: a smaller batch_size, train.accumulate=2 or more, model.remat=full, smaller evals.*.'
               'batch_size, or data.in_memory=no; vit-jax plan shows what a config needs.')

INSTALL = 'Install the dependencies of vit_jax: pip install -e . in its checkout, or pip install of the package alone.'


class Failure(NamedTuple):
  """The exit status of the program, and its message on standard error ('' = nothing)."""
  status: int
  message: str


def worst(statuses: Iterable[int]) -> int:
  """Returns the status of several programs as one: 2 if a person has to change something for any of them; else 75 if
  any may succeed later, as after its own 75, a signal (128 and more, or negative) or an abort; else 70; 0 if all are
  done."""
  found = set(statuses) - {0}
  if not found or USER_ERROR in found:
    return USER_ERROR if found else 0
  return TRY_AGAIN if any(one == TRY_AGAIN or one < 0 or one >= 128 for one in found) else UNFORESEEN


def explain(error: BaseException, words: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Failure:
  """Converts any exception to an exit status and a message.

  Args:
    error: the exception that ended the job.
    words: the command line, for the report.
    environ: the process environment. `VIT_JAX_TRACEBACK=1` adds the traceback to every message.

  Returns:
    2 with advice for what the user has to change: settings, own code, files, permissions, limits of the machine; 75
    for what the environment caused, a lost process of the run among it; 130 for Ctrl-C, 141 for a closed standard
    output, and 70 with the path of a saved traceback for the rest.
  """
  found = _known(error)
  if environ.get(SHOW) in (None, '', '0'):
    return found or _of_own_code(error, words, environ) or _unforeseen(error, words, environ)
  text = ''.join(traceback.format_exception(error))
  return Failure(found.status if found else UNFORESEEN, redacted(f'{text}{found.message if found else ""}'.rstrip()))


def _known(error: BaseException) -> Failure | None:
  """Returns the failure for an exception with a known cause; None for others."""
  if isinstance(error, UserError):
    return Failure(USER_ERROR, f'error: {error}')
  if isinstance(error, TemporaryError):
    return Failure(TRY_AGAIN, f'error: {error}')
  if isinstance(error, KeyboardInterrupt):
    return Failure(INTERRUPTED, 'Interrupted.')
  if isinstance(error, BrokenPipeError) and _is_output_closed():
    return Failure(BROKEN_PIPE, '')
  for one in chain(error, with_context=False):
    said = _first_line(one)
    if isinstance(one, ModuleNotFoundError) and one.name and one.name.partition('.')[0] != 'vit_jax':
      package = one.name.partition('.')[0]
      return Failure(USER_ERROR, f'error: {package}: expected this Python package to be installed, got none. {INSTALL}')
    if isinstance(one, OSError) and one.errno in ADVICE and (one.filename is not None or one.errno in _OF_PROCESSES):
      return Failure(TRY_AGAIN if kind(one) is TemporaryError else USER_ERROR, f'error: {_of_system(one)}')
    if any(word in str(one) for word in _FULL):
      return Failure(TRY_AGAIN, f'error: {said}. {ADVICE[errno.ENOSPC]}')
    if isinstance(one, MemoryError) or _MEMORY.search(str(one)):
      return Failure(USER_ERROR, f'error: expected enough memory, got {said}. {MORE_MEMORY}')
  if is_lost_peer(error):
    return Failure(TRY_AGAIN, f'error: the connection to another process of the run was lost ({_first_line(error)}). '
                              f'See the messages of the other processes. {_AGAIN}')
  if is_temporary(error):
    return Failure(TRY_AGAIN, f'error: storage, the network or a device failed ({_first_line(error)}). Check them. '
                              f'{_AGAIN}')
  return None


def _of_system(error: OSError) -> str:
  assert error.errno is not None
  paths = [os.fsdecode(p) if isinstance(p, str | bytes) else str(p)
           for p in (error.filename, error.filename2) if p is not None]
  return f'{" -> ".join(paths) or "a file or standard output"}: {error.strerror}. {ADVICE[error.errno]}'


def _first_line(error: BaseException) -> str:
  """Returns the type and the first line of an exception, at most 300 characters."""
  lines = str(error).strip().splitlines()
  return redacted(f'{type(error).__name__}: {lines[0][:300].rstrip(".")}') if lines else type(error).__name__


def interrupt_at_once() -> None:
  """Ends this process at once with a message. Loaders end too; an unfinished save leaves the previous checkpoint."""
  os.write(2, b'Interrupted.\n')
  if 'multiprocessing' in sys.modules:
    for child in sys.modules['multiprocessing'].active_children():
      child.kill()  # a child that is still starting would print a traceback
  os._exit(INTERRUPTED)


def _is_output_closed() -> bool:
  """Whether standard output is a pipe whose reader has ended, as after `| head`."""
  try:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
  except (OSError, ValueError):  # no file, or closed
    return False


def drop_output() -> None:
  """Discards output that cannot be written, which the interpreter would otherwise try to write again at exit."""
  try:
    sys.stdout.flush()
  except OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_own_code(error: BaseException, words: Sequence[str], environ: Mapping[str, str]) -> Failure | None:
  """Returns the failure for an exception that passed through a user's own module; None for others."""
  frames = [frame for frame in traceback.extract_tb(error.__traceback__) if implementation.is_persons(frame.filename)]
  if not frames:
    return None
  last, place = frames[-1], save(report(error, words), environ)
  where = f'{last.filename}, line {last.lineno}, in {last.name}'
  advice = (f'{place} holds the traceback; ' if place else '') + f'{SHOW}=1 shows it here.'
  return Failure(USER_ERROR, redacted(
      f'error: {where}: expected code that runs, got {_first_line(error)}.\n    {last.line}\n{advice}'))


def _unforeseen(error: BaseException, words: Sequence[str], environ: Mapping[str, str]) -> Failure:
  said = f'error: unforeseen {_first_line(error)}.'
  text = report(error, words)
  place = save(text, environ)
  if place is None:
    return Failure(UNFORESEEN, f'{text}\n{said} {_blame()} Please report it with the lines above.')
  return Failure(UNFORESEEN, f'{said} {_blame()} Please report it with the file {place}, which holds '
                             f'the traceback; {SHOW}=1 shows it here.')


def _blame() -> str:
  """Where an unforeseen error is: vit_jax calls the code of a person, and then it may not follow its contract."""
  if implementation.own_modules:
    names = ', '.join(implementation.own_modules)
    return f'Compare your code in {names} with the contract of its kind; else this is an error in vit_jax.'
  return 'This is an error in vit_jax.'


def report(error: BaseException, words: Sequence[str] = ()) -> str:
  """Returns a report for debugging: command, versions, traceback."""
  return redacted('\n'.join([f'Command: {" ".join(map(repr, words))}', versions(), '',
                             ''.join(traceback.format_exception(error))]))


def versions() -> str:
  """Returns the versions of this program, Python and the main packages, in two lines; imports none of them."""
  from importlib import metadata
  found = []
  for name in ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy', 'libtpu'):
    try:
      found.append(f'{name} {metadata.version(name)}')
    except metadata.PackageNotFoundError:
      continue
  own = f'vit_jax {vit_jax.__version__}, Python {platform.python_version()} on {platform.platform()}'
  return f'{own}\n{", ".join(found)}'


def save(text: str, environ: Mapping[str, str]) -> pathlib.Path | None:
  """Saves a report in the user's state directory or a temporary one, and returns its path; None if both fail."""
  home = environ.get('XDG_STATE_HOME') or os.path.join(os.path.expanduser('~'), '.local', 'state')
  content = text.encode(errors='backslashreplace')
  try:
    path = pathlib.Path(home) / 'vit_jax' / time.strftime(f'failure-%Y%m%d-%H%M%S-{os.getpid()}.txt')
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(content)
    for old in sorted(path.parent.glob('failure-*.txt'))[:-MOST_FILES]:
      old.unlink(missing_ok=True)
    return path
  except OSError:
    pass
  try:
    handle, name = tempfile.mkstemp('.txt', 'vit_jax-failure-')
    with open(handle, 'wb') as file:
      file.write(content)
    return pathlib.Path(name)
  except OSError:
    return None
