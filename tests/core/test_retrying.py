"""Operations that fail for a temporary reason are repeated, and only those."""
import email.message
import errno
import urllib.error

import pytest

from vit_jax.core import failures, retrying
from vit_jax.core.errors import TemporaryError, UserError


class Failing:
  """Fails with these errors, one a call, then returns 'done'."""

  def __init__(self, *errors: BaseException) -> None:
    self.errors = list(errors)

  def __call__(self) -> str:
    if self.errors:
      raise self.errors.pop(0)
    return 'done'


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
  found: list[float] = []
  now = [0.]
  monkeypatch.setattr(retrying.time, 'monotonic', lambda: now[0])
  monkeypatch.setattr(retrying.time, 'sleep', lambda s: (found.append(s), now.__setitem__(0, now[0] + s)))
  return found


@pytest.mark.parametrize('error', [
    OSError(errno.EIO, 'x'), OSError(errno.ESTALE, 'x'), ConnectionResetError(), TimeoutError(),
    RuntimeError('UNAVAILABLE: no route'), RuntimeError('HTTP status 503'), RuntimeError("[os_error_code='110']")])
def test_a_temporary_error_is_repeated_with_waits_that_double(error: BaseException, waits: list[float],
                                                              caplog: pytest.LogCaptureFixture) -> None:
  assert retrying.retried(Failing(error, error, error), 'reading x') == 'done'
  assert waits == [.5, 1., 2.]
  assert caplog.text.count('reading x failed and is tried again') == 3


@pytest.mark.parametrize('error', [FileNotFoundError(errno.ENOENT, 'x'), PermissionError(errno.EACCES, 'x'),
                                   UserError('x'), ValueError('x'), RuntimeError('INVALID_ARGUMENT: 503 rows')])
def test_another_error_is_raised_at_once(error: BaseException, waits: list[float]) -> None:
  with pytest.raises(type(error)):
    retrying.retried(Failing(error), 'reading x')
  assert not waits


def test_after_the_patience_the_program_ends_with_75(waits: list[float]) -> None:
  with pytest.raises(TemporaryError, match='reading x: expected success within 20 s, got ') as found:
    retrying.retried(Failing(*[OSError(errno.EIO, 'x')] * 99), 'reading x', patience_s=20)
  assert sum(waits) == 20
  assert failures.explain(found.value).status == 75


def test_a_patience_of_zero_repeats_nothing(waits: list[float]) -> None:
  with pytest.raises(OSError, match='x'):
    retrying.retried(Failing(OSError(errno.EIO, 'x')), 'reading x', patience_s=0)
  assert not waits


def test_the_patience_of_the_process_counts_where_none_is_given(waits: list[float]) -> None:
  retrying.configure(3.)
  try:
    with pytest.raises(TemporaryError, match='within 3 s'):
      retrying.retried(Failing(*[OSError(errno.EIO, 'x')] * 99), lambda: 'reading x')
  finally:
    retrying.configure(None)
  assert sum(waits) == 3 and retrying.patience() == retrying.PATIENCE_S


@pytest.mark.parametrize(('asked', 'waited'), [('7', [7., 1.]), ('999', [40.]), ('0', [.5, 1.]), ('soon', [.5, 1.])])
def test_a_server_that_asks_for_a_wait_gets_it_within_the_patience(
    asked: str, waited: list[float], waits: list[float]) -> None:
  headers = email.message.Message()
  headers['Retry-After'] = asked
  busy = urllib.error.HTTPError('a', 429, 'Too Many Requests', headers, None)
  assert retrying.retried(Failing(busy, *[OSError(errno.EIO, 'x')] * (len(waited) - 1)), 'x', patience_s=40) == 'done'
  assert waits == waited


def test_what_says_that_it_was_repeated_is_not_repeated_again(waits: list[float]) -> None:
  for error in (TemporaryError('x'), RuntimeError('DEADLINE_EXCEEDED: Barrier timed out')):
    with pytest.raises(type(error)):
      retrying.retried(Failing(error), 'reading x')
  assert not waits
