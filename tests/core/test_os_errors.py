"""Errors of the system are distinguished from damaged files."""
from __future__ import annotations

import email.message
import errno
import os
import urllib.error

import pytest

from vit_jax.core import os_errors
from vit_jax.core.errors import TemporaryError, UserError


def of(number: int) -> OSError:
  return OSError(number, os.strerror(number))


@pytest.mark.parametrize(('error', 'advice'), [
    (of(errno.EMFILE), 'ulimit -n'), (of(errno.ENOSPC), 'Free some space'), (of(errno.EDQUOT), 'Free some space'),
    (of(errno.EACCES), 'Change the permissions'), (of(errno.EIO), 'reports an error'),
    (of(errno.EXDEV), 'Check the disk'), (TimeoutError('no answer'), 'Check the disk'),
    (MemoryError(), 'Free memory'), (RuntimeError('RESOURCE_EXHAUSTED: Out of memory'), 'Free memory'),
    (ValueError("RESOURCE_EXHAUSTED: Failed to open: Too many open files [os_error_code='24'] [x"), 'ulimit -n'),
    (RuntimeError('[Errno 28] No space left on device'), 'Free some space'),
    (of(errno.ENOENT), ''), (of(errno.EISDIR), ''), (FileNotFoundError('not in the bucket'), ''),
    (ValueError("NOT_FOUND: no manifest [os_error_code='2']"), ''), (ValueError('DATA_LOSS: bad magic'), ''),
    (KeyError('body'), ''), (RecursionError('too deep'), '')])
def test_errors_of_the_system_are_distinguished_from_damaged_files(error: Exception, advice: str) -> None:
  found = os_errors.find(error)
  assert (advice in found) if advice else found == ''
  wrapped = Exception('outer')
  wrapped.__cause__ = error
  assert os_errors.find(wrapped) == found


def test_a_failed_device_does_not_make_a_file_damaged() -> None:
  kind = type('JaxRuntimeError', (RuntimeError,), {})
  assert 'devices' in os_errors.find(kind('INTERNAL: stream did not block'))


def test_messages_name_the_first_cause_and_what_to_do() -> None:
  outer = Exception('Encountered error while reading')
  outer.__cause__ = ValueError("x: Too many open files [os_error_code='24'] [tensorstore_spec='…']\nmore")
  error = os_errors.reading('run/checkpoints/2', outer)
  assert isinstance(error, UserError)
  assert str(error).startswith('run/checkpoints/2: expected to read it, got Too many open files. Raise the limit')
  damaged = os_errors.reading('f', ValueError('bad magic'))
  assert isinstance(damaged, os_errors.Damaged) and str(damaged) == 'bad magic'
  assert 'Free some space' in str(os_errors.writing('f', of(errno.ENOSPC)))
  assert 'Move away' in str(os_errors.writing('f', of(errno.EISDIR)))


def test_a_cause_that_goes_in_circles_ends() -> None:
  error = ValueError('a')
  error.__cause__ = error
  assert os_errors.find(error) == '' and os_errors.first_line(error) == 'a'


def client(name: str, **fields: object) -> Exception:
  """An error of a client of object storage."""
  error = type(name, (Exception,), {'__module__': 'gcsfs.retry'})('x')
  error.__dict__.update(fields)
  return error


def raised_while_handling(error: Exception) -> Exception:
  try:
    try:
      raise error
    except Exception:
      raise ValueError('could not save')  # noqa: B904
  except ValueError as found:
    return found


@pytest.mark.parametrize('error', [
    *map(of, [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT, errno.ENOTCONN]),
    client('HttpError', code=503), client('HttpError', code='429'), client('HttpError'), client('ServerDisconnected'),
    urllib.error.HTTPError('x', 502, 'Bad gateway', email.message.Message(), None), TimeoutError(),
    raised_while_handling(of(errno.EIO)), RuntimeError('[Errno 122] Disk quota exceeded'),
    ValueError("UNAVAILABLE: Error reading x [os_error_code='5']")], ids=str)
def test_the_environment_may_do_better_later(error: Exception) -> None:
  assert os_errors.kind(error) is TemporaryError
  assert isinstance(os_errors.writing('f', error), TemporaryError)


@pytest.mark.parametrize('error', [
    *map(of, [errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENOENT, errno.ENOTDIR, errno.EFBIG]),
    client('HttpError', code=403), client('HttpError', code=401), client('DefaultCredentialsError'),
    client('NotFound'), urllib.error.HTTPError('x', 403, 'Forbidden', email.message.Message(), None),
    MemoryError(), ValueError("PERMISSION_DENIED: x [os_error_code='13']"), UserError('x: UNAVAILABLE')], ids=str)
def test_a_person_has_to_change_what_a_later_try_meets_again(error: Exception) -> None:
  assert os_errors.kind(error) is UserError
  assert isinstance(os_errors.writing('f', error), UserError)


def test_an_unknown_error_of_the_runtime_while_a_file_is_written_is_one_of_the_environment() -> None:
  runtime = type('JaxRuntimeError', (RuntimeError,), {})
  assert isinstance(os_errors.writing('f', runtime('INTERNAL: stream did not block')), TemporaryError)
  assert isinstance(os_errors.writing('f', runtime('RESOURCE_EXHAUSTED: 9 GiB')), UserError)
