"""Every failure has a meaning: what the person has to change, what is repeated, and the end of the program."""
from __future__ import annotations

import email.message
import errno
import os
import pathlib
import urllib.error

import pytest

from vit_jax.core import failures, implementation, reports
from vit_jax.core.errors import TemporaryError, UserError

Runtime = type('JaxRuntimeError', (RuntimeError,), {})


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
  """The exception with a traceback."""
  try:
    raise error from cause
  except BaseException as caught:
    return caught


def explain(error: BaseException, **environ: str) -> reports.Failure:
  return reports.explain(error, ['train', '--config=x'], environ)


@pytest.fixture(autouse=True)
def no_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(implementation, 'own_modules', {})


def test_an_unforeseen_error_is_one_line_that_names_the_file_with_its_traceback(tmp_path: pathlib.Path) -> None:
  status, message = explain(raised(KeyError('first\nsecond')), XDG_STATE_HOME=str(tmp_path))
  [path] = (tmp_path / 'vit_jax').iterdir()
  assert status == 70 and '\n' not in message and "KeyError: 'first\\nsecond'" in message and str(path) in message
  text = path.read_text()
  assert 'Traceback' in text and 'raise error from cause' in text and "'--config=x'" in text and 'jaxlib ' in text


def test_a_package_that_is_not_installed_is_named() -> None:
  status, message = explain(raised(ModuleNotFoundError("No module named 'cv3.ops'", name='cv3.ops')))
  assert status == 2 and message.startswith('error: cv3: expected this Python package to be installed, got')
  assert explain(raised(ModuleNotFoundError('', name='vit_jax.nowhere')), XDG_STATE_HOME='/dev/null').status == 70


LOST = [
    Runtime('UNAVAILABLE: Task /job:jax_worker/replica:0/task:1 heartbeat timeout.'),
    Runtime('DEADLINE_EXCEEDED: Barrier timed out. Id: x. This usually happens because a task triggered the barrier'),
    Runtime('UNAVAILABLE: Failed to send RPC to coordination service.'),
    Runtime('INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited or there was a network error'),
    Runtime('INTERNAL: NCCL operation failed: unhandled system error (run with NCCL_DEBUG=INFO for details)'),
    Runtime('INTERNAL: Accelerator device halted prematurely. 1 observed errors are: [Network]'),
    Runtime('UNAVAILABLE: The slice is unhealthy'), Runtime('INTERNAL: ICI link 3 is down'),
    RuntimeError("Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed: open(/dev/accel3): busy")]


@pytest.mark.parametrize(('error', 'status', 'said'), [
    (UserError('seed: expected 0, got 1.'), 2, 'error: seed: expected 0, got 1.'),
    (KeyboardInterrupt(), 130, 'Interrupted.'),
    (OSError(errno.ENOSPC, 'No space left on device', '/a/b'), 75, 'error: /a/b: No space left on device. Free some'),
    (OSError(errno.ENOSPC, 'No space left on device'), 75, 'Free some space'),
    (PermissionError(errno.EACCES, 'Permission denied', b'/a/b'), 2, '/a/b: Permission denied. Change the perm'),
    (OSError(errno.EMFILE, 'Too many open files'), 2, 'ulimit -n'),
    (OSError(errno.EXDEV, 'Cross-device link', '/a', None, '/b'), 70, 'OSError: [Errno 18]'),
    (FileNotFoundError(errno.ENOENT, 'No such file or directory'), 70, 'FileNotFoundError'),  # of which file?
    (ValueError('Error writing "x": [OS error 28: ENOSPC No space left on device]'), 75, 'Free some space'),
    (MemoryError('Unable to allocate 9 GiB'), 2, 'expected enough memory, got MemoryError: Unable to allocate 9 GiB.'),
    (RuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore'), 2, 'train.accumulate=2'),
    (RuntimeError('INTERNAL: YNNPACK operation failed: error'), 2, 'expected enough memory, got RuntimeError'),
    (RuntimeError('RESOURCE_EXHAUSTED: too many requests'), 70, 'unforeseen RuntimeError'),
    (ValueError('UNKNOWN: Gloo all-reduce failed: [tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:58502'), 75,
     'error: the connection to another process of the run was lost (ValueError: UNKNOWN: Gloo all-reduce failed'),
    (ValueError('gloo is no name of a split'), 70, 'unforeseen'),
    (ValueError('data.train_split: the slice [0:3] failed'), 70, 'unforeseen'),
    (OSError(errno.EIO, 'Input/output error', '/a'), 75, 'error: /a: Input/output error. The disk or network file'),
    (OSError(errno.EROFS, 'Read-only file system', '/a'), 2, 'error: /a: Read-only file system. The file system is'),
    (TemporaryError('x: try later'), 75, 'error: x: try later'),
    (ConnectionResetError(errno.ECONNRESET, 'Connection reset by peer'), 75, 'storage, the network or a device failed'),
    (OSError('Server disconnected, status 503'), 75, 'storage, the network or a device failed (OSError: Server disc'),
    (Runtime('INTERNAL: Accelerator device halted prematurely, perhaps due to an on-device check-failure'), 70,
     'unforeseen JaxRuntimeError'),
    *((error, 75, 'error: the connection to another process of the run was lost') for error in LOST),
    (Runtime('RESOURCE_EXHAUSTED: /x.pb; No space left on device'), 75, 'Free some space'),
    (KeyError('Connection refused'), 70, 'unforeseen KeyError'),
    (AssertionError('Input/output error'), 70, 'unforeseen AssertionError'),
    (ValueError('wrong'), 70, 'error: unforeseen ValueError: wrong. This is an error in vit_jax.'),
    (RecursionError(), 70, 'RecursionError')], ids=lambda x: str(x)[:40])
def test_each_kind_has_its_status(error: BaseException, status: int, said: str, tmp_path: pathlib.Path) -> None:
  failure = explain(raised(error), XDG_STATE_HOME=str(tmp_path))
  assert failure.status == status and said in failure.message and 'Traceback' not in failure.message
  assert bool(list(tmp_path.rglob('*.txt'))) == ('unforeseen' in failure.message)


def test_the_reason_may_be_what_an_error_was_raised_from() -> None:
  full = OSError(errno.ENOSPC, 'No space left on device', '/a')
  assert explain(raised(RuntimeError('saving failed'), full)).message.startswith('error: /a: No space')


@pytest.mark.parametrize(('error', 'status'), [(UserError('x'), 2), (KeyError('x'), 70)])
def test_the_environment_asks_for_tracebacks(error: Exception, status: int, tmp_path: pathlib.Path) -> None:
  failure = explain(raised(error), VIT_JAX_TRACEBACK='1', XDG_STATE_HOME=str(tmp_path))
  assert failure.status == status and 'Traceback' in failure.message and not any(tmp_path.iterdir())


def test_a_broken_pipe_is_quiet_only_where_it_is_standard_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  assert explain(raised(BrokenPipeError(errno.EPIPE, 'Broken pipe')), XDG_STATE_HOME=str(tmp_path)).status == 75
  reader, writer = os.pipe()
  os.close(reader)
  with open(writer, 'w') as closed:
    monkeypatch.setattr(reports.sys, 'stdout', closed)
    closed.write('x')
    assert explain(raised(BrokenPipeError(errno.EPIPE, 'Broken pipe'))) == (141, '')
    reports.drop_output()  # else leaving the block would raise


@pytest.mark.parametrize(('statuses', 'worst'), [
    ([], 0), ([0, 0], 0), ([0, 75], 75), ([75, 2, 70], 2), ([70, 0], 70), ([70, 75], 75), ([70, 134], 75), ([-9], 75),
    ([1], 70)])
def test_of_several_programs_what_a_person_must_change_comes_first(statuses: list[int], worst: int) -> None:
  assert failures.worst(statuses) == worst


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
  found = failures.advice(error)
  assert (advice in found) if advice else found == ''
  wrapped = Exception('outer')
  wrapped.__cause__ = error
  assert failures.advice(wrapped) == found


def test_a_failed_device_does_not_make_a_file_damaged() -> None:
  assert 'devices' in failures.advice(Runtime('INTERNAL: stream did not block'))


def test_messages_name_the_first_cause_and_what_to_do() -> None:
  outer = Exception('Encountered error while reading')
  outer.__cause__ = ValueError("x: Too many open files [os_error_code='24'] [tensorstore_spec='…']\nmore")
  error = failures.reading('run/checkpoints/2', outer)
  assert isinstance(error, UserError)
  assert str(error).startswith('run/checkpoints/2: expected to read it, got "Too many open files". Raise the limit')
  damaged = failures.reading('f', ValueError('bad magic'))
  assert isinstance(damaged, failures.Damaged) and str(damaged) == 'bad magic'
  assert 'Free some space' in str(failures.writing('f', of(errno.ENOSPC)))
  assert 'Move away' in str(failures.writing('f', of(errno.EISDIR)))


def test_a_cause_that_goes_in_circles_ends() -> None:
  error = ValueError('a')
  error.__cause__ = error
  assert failures.advice(error) == '' and failures.first_line(error) == 'a'


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
  assert failures.error_class(error) is TemporaryError
  assert isinstance(failures.writing('f', error), TemporaryError)


@pytest.mark.parametrize('error', [
    *map(of, [errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENOENT, errno.ENOTDIR, errno.EFBIG]),
    client('HttpError', code=403), client('HttpError', code=401), client('DefaultCredentialsError'),
    client('NotFound'), urllib.error.HTTPError('x', 403, 'Forbidden', email.message.Message(), None),
    MemoryError(), ValueError("PERMISSION_DENIED: x [os_error_code='13']"), UserError('x: UNAVAILABLE')], ids=str)
def test_a_person_has_to_change_what_a_later_try_meets_again(error: Exception) -> None:
  assert failures.error_class(error) is UserError
  assert isinstance(failures.writing('f', error), UserError)


UNKNOWN = [Runtime(text) for text in (
    'INTERNAL: stream did not block', 'INVALID_ARGUMENT: expected 7 buffers, got 6', 'UNKNOWN: x', 'CANCELLED: x',
    'FAILED_PRECONDITION: DNN library initialization failed.', 'UNIMPLEMENTED: x', 'DATA_LOSS: x')]
"""Errors after which the same command meets the same error, as far as is known."""


@pytest.mark.parametrize('error', UNKNOWN, ids=str)
def test_an_unknown_error_of_the_runtime_is_neither_temporary_nor_one_of_a_file(error: Exception) -> None:
  wrapped = raised(ValueError('x'), error)
  for one in (error, wrapped):
    assert failures.is_of_runtime(one) and failures.error_class(one) is not TemporaryError
  assert explain(error, XDG_STATE_HOME='/dev/null').status == 70
  with pytest.raises(type(error)):  # and not as an error of the storage
    failures.stored(Failing(error), 'a')


def test_an_error_of_storage_beside_one_of_the_runtime_stays_one_of_storage() -> None:
  try:
    try:
      raise UNKNOWN[0]
    finally:
      raise of(errno.EACCES)
  except OSError as error:
    assert failures.is_of_storage(error) and not failures.is_of_runtime(error)


@pytest.mark.parametrize(('error', 'status'), [
    (Runtime('UNAVAILABLE: no route'), 75), (Runtime('ABORTED: x'), 75), (Runtime('DEADLINE_EXCEEDED: x'), 75),
    (Runtime('INTERNAL: NCCL operation failed: unhandled system error'), 75),
    (Runtime('INTERNAL: ICI link 3 is down'), 75), (Runtime('RESOURCE_EXHAUSTED: Out of memory: 9 GiB'), 2),
    (Runtime('INTERNAL: [Errno 5] Input/output error'), 75), (OSError(errno.EXDEV, 'x'), 70), (ValueError('x'), 70)],
    ids=str)
def test_a_known_error_of_the_runtime_has_the_status_of_its_cause(error: Exception, status: int) -> None:
  assert not failures.is_of_runtime(error)
  assert explain(error, XDG_STATE_HOME='/dev/null').status == status
  assert (failures.error_class(error) is TemporaryError) == (status == 75)


class Failing:
  """Fails with these errors, one a call, then returns 'done'."""

  def __init__(self, *errors: BaseException) -> None:
    self.errors = list(errors)

  def __call__(self) -> str:
    if self.errors:
      raise self.errors.pop(0)
    return 'done'


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
  found: list[float] = []
  now = [0.]
  monkeypatch.setattr(failures.time, 'monotonic', lambda: now[0])
  monkeypatch.setattr(failures.time, 'sleep', lambda s: (found.append(s), now.__setitem__(0, now[0] + s)))
  return found


@pytest.mark.parametrize('error', [
    OSError(errno.EIO, 'x'), OSError(errno.ESTALE, 'x'), ConnectionResetError(), TimeoutError(),
    RuntimeError('UNAVAILABLE: no route'), RuntimeError('HTTP status 503'), RuntimeError("[os_error_code='110']")])
def test_a_temporary_error_is_repeated_with_waits_that_double(error: BaseException, waits: list[float],
                                                              caplog: pytest.LogCaptureFixture) -> None:
  assert failures.retried(Failing(error, error, error), 'reading x') == 'done'
  assert waits == [.5, 1., 2.]
  assert caplog.text.count('reading x failed and is tried again') == 3


@pytest.mark.parametrize('error', [FileNotFoundError(errno.ENOENT, 'x'), PermissionError(errno.EACCES, 'x'),
                                   UserError('x'), ValueError('x'), RuntimeError('INVALID_ARGUMENT: 503 rows')])
def test_another_error_is_raised_at_once(error: BaseException, waits: list[float]) -> None:
  with pytest.raises(type(error)):
    failures.retried(Failing(error), 'reading x')
  assert not waits


def test_after_the_patience_the_program_ends_with_75(waits: list[float]) -> None:
  with pytest.raises(TemporaryError, match='reading x: expected success within 20 s, got ') as found:
    failures.retried(Failing(*[OSError(errno.EIO, 'x')] * 99), 'reading x', patience_s=20)
  assert sum(waits) == 20
  assert reports.explain(found.value).status == 75


def test_a_patience_of_zero_repeats_nothing(waits: list[float]) -> None:
  with pytest.raises(OSError, match='x'):
    failures.retried(Failing(OSError(errno.EIO, 'x')), 'reading x', patience_s=0)
  assert not waits


def test_the_patience_of_the_process_counts_where_none_is_given(waits: list[float]) -> None:
  failures.configure(3.)
  try:
    with pytest.raises(TemporaryError, match='within 3 s'):
      failures.retried(Failing(*[OSError(errno.EIO, 'x')] * 99), lambda: 'reading x')
  finally:
    failures.configure(None)
  assert sum(waits) == 3 and failures.patience() == failures.PATIENCE_S


@pytest.mark.parametrize(('asked', 'waited'), [('7', [7., 1.]), ('999', [40.]), ('0', [.5, 1.]), ('soon', [.5, 1.])])
def test_a_server_that_asks_for_a_wait_gets_it_within_the_patience(
    asked: str, waited: list[float], waits: list[float]) -> None:
  headers = email.message.Message()
  headers['Retry-After'] = asked
  busy = urllib.error.HTTPError('a', 429, 'Too Many Requests', headers, None)
  assert failures.retried(Failing(busy, *[OSError(errno.EIO, 'x')] * (len(waited) - 1)), 'x', patience_s=40) == 'done'
  assert waits == waited


def test_what_says_that_it_was_repeated_is_not_repeated_again(waits: list[float]) -> None:
  for error in (TemporaryError('x'), RuntimeError('DEADLINE_EXCEEDED: Barrier timed out')):
    with pytest.raises(type(error)):
      failures.retried(Failing(error), 'reading x')
  assert not waits


def test_what_is_stored_is_repeated_and_ends_with_an_error_for_the_person(waits: list[float]) -> None:
  assert failures.stored(Failing(OSError(errno.EIO, 'x')), 'a') == 'done' and waits == [.5]
  for error in (PermissionError(errno.EACCES, 'x'), client('HttpError', code=403)):
    with pytest.raises(UserError, match='^a: expected to write it, got "'):
      failures.stored(Failing(error), 'a')
  with pytest.raises(KeyError):  # an error of the program
    failures.stored(Failing(KeyError('x')), 'a')


@pytest.mark.parametrize(('error', 'number'), [
    (RuntimeError('record 3: Input/output error; reading'), errno.EIO), (RuntimeError('[Errno 28] x'), errno.ENOSPC),
    (ValueError("x: failed [os_error_code='13']"), errno.EACCES), (MemoryError(), errno.ENOMEM),
    (RuntimeError('UNAVAILABLE: Input/output error'), None), (client('HttpError', code=403), None),
    (ValueError('bad magic'), None)], ids=str)
def test_an_error_of_the_system_in_the_text_of_a_library_is_found(error: Exception, number: int | None) -> None:
  found = failures.system_error(error, '/a/b')
  assert found is None if number is None else found is not None and (found.errno, found.filename) == (number, '/a/b')


def test_statuses_of_http_and_words_of_libraries_have_the_meaning_of_error_numbers() -> None:
  assert failures.advice(client('HttpError', code=403)) == failures.MEANINGS[errno.EACCES].advice
  assert failures.advice(RuntimeError('Disk quota exceeded')) == failures.MEANINGS[errno.EDQUOT].advice
  assert failures.error_class(RuntimeError('Connection reset by peer')) is TemporaryError
  assert failures.advice(client('HttpError', code=404)) == '' == failures.advice(ValueError('x: Is a directory'))
