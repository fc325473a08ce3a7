"""Every exception becomes an exit status and a message; the traceback of an unexpected one is saved in a file."""
from __future__ import annotations

import errno
import os
import pathlib

import pytest

from vit_jax.core import failures, implementation
from vit_jax.core.errors import TemporaryError, UserError


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
  """The exception with a traceback."""
  try:
    raise error from cause
  except BaseException as caught:
    return caught


def explain(error: BaseException, **environ: str) -> failures.Failure:
  return failures.explain(error, ['train', '--config=x'], environ)


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


def test_where_the_state_directory_cannot_be_made_a_temporary_file_holds_the_traceback(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / 'file').touch()
  monkeypatch.setattr(failures.tempfile, 'tempdir', str(tmp_path))
  _, message = explain(raised(KeyError()), XDG_STATE_HOME=str(tmp_path / 'file'))
  [path] = tmp_path.glob('vit_jax-failure-*')
  assert str(path) in message and 'Traceback' in path.read_text()


def test_where_no_file_can_be_written_the_traceback_is_printed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(failures.tempfile, 'tempdir', str(tmp_path / 'absent'))
  status, message = explain(raised(KeyError('x')), XDG_STATE_HOME='/dev/null')
  assert status == 70 and message.startswith('Command: ') and 'Traceback' in message


def test_old_tracebacks_are_deleted(tmp_path: pathlib.Path) -> None:
  folder = tmp_path / 'vit_jax'
  folder.mkdir()
  for i in range(30):
    (folder / f'failure-2000-{i:02}.txt').touch()
  explain(raised(KeyError()), XDG_STATE_HOME=str(tmp_path))
  kept = sorted(path.name for path in folder.iterdir())
  assert len(kept) == failures.MOST_FILES and kept[0] == 'failure-2000-11.txt' and 'failure-2000-29.txt' in kept


Runtime = type('JaxRuntimeError', (RuntimeError,), {})
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
    monkeypatch.setattr(failures.sys, 'stdout', closed)
    closed.write('x')
    assert explain(raised(BrokenPipeError(errno.EPIPE, 'Broken pipe'))) == (141, '')
    failures.drop_output()  # else leaving the block would raise


@pytest.mark.parametrize(('statuses', 'worst'), [
    ([], 0), ([0, 0], 0), ([0, 75], 75), ([75, 2, 70], 2), ([70, 0], 70), ([70, 75], 75), ([70, 134], 75), ([-9], 75),
    ([1], 70)])
def test_of_several_programs_what_a_person_must_change_comes_first(statuses: list[int], worst: int) -> None:
  assert failures.worst(statuses) == worst
