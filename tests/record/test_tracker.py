"""A tracker that fails or is slow does not touch the run."""
from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import pytest

from vit_jax.core.types import HostArray
from vit_jax.record.trackers import tracker as trackers
from vit_jax.record.trackers.tracker import Guarded, Histogram, Status


class Listed:
  """A tracker that keeps its calls; fails with the error at the call with this number."""

  def __init__(self, fails_at: int = -1, error: BaseException | None = None) -> None:
    self.calls: list[object] = []
    self._fails_at, self._error = fails_at, error

  def _add(self, *call: object) -> None:
    if len(self.calls) == self._fails_at and self._error:
      raise self._error
    self.calls.append(call)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    self._add('write', step, dict(values))

  def images(self, step: int, values: Mapping[str, HostArray]) -> None:
    self._add('images', step, [*values])

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    self._add('histograms', step, [*values])

  def settle(self) -> None:
    self._add('settle')

  def close(self, status: Status) -> None:
    self._add('close', status)


@pytest.mark.parametrize('background', [False, True])
def test_all_calls_arrive_in_order(background: bool) -> None:
  seen = Listed()
  guarded = Guarded('trackers.x', lambda: seen, background=background)
  guarded.write(1, {'loss': 2.})
  guarded.images(1, {'a': np.zeros((1, 2, 2, 3), np.uint8)})
  guarded.histograms(2, {'b': Histogram(np.ones(1), np.zeros(2), 0., 0.)})
  guarded.settle()
  guarded.close('stopped')
  assert seen.calls == [
      ('write', 1, {'loss': 2.}), ('images', 1, ['a']), ('histograms', 2, ['b']), ('settle',),
      ('close', 'stopped')]


@pytest.mark.parametrize('background', [False, True])
@pytest.mark.parametrize('error', [OSError('disk full\nand more'), SystemExit(1), RuntimeError()])
def test_the_first_error_is_one_warning_and_nothing_is_sent_later(
    background: bool, error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
  seen = Listed(1, error)
  guarded = Guarded('trackers.x', lambda: seen, background=background)
  for step in range(4):
    guarded.write(step, {'loss': 2.})
  guarded.close('done')
  assert seen.calls == [('write', 0, {'loss': 2.})]
  (said,) = caplog.messages
  assert said.startswith(f'trackers.x: expected a tracker that takes the metrics, got {type(error).__name__}')
  assert 'The run continues without it' in said and '\n' not in said


@pytest.mark.parametrize('background', [False, True])
def test_a_tracker_that_cannot_start_is_one_warning(background: bool, caplog: pytest.LogCaptureFixture) -> None:
  def make() -> Listed:
    raise ConnectionError('no server')
  guarded = Guarded('trackers.x', make, background=background)
  guarded.write(0, {'loss': 2.})
  guarded.close('failed')
  assert len(caplog.messages) == 1 and 'ConnectionError: no server' in caplog.text


def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setattr(trackers, 'CLOSE_S', .05)
  monkeypatch.setattr(trackers, 'WAITING', 3)
  release = threading.Event()

  def make() -> Listed:
    release.wait(60)
    return Listed()
  guarded = Guarded('trackers.x', make, background=True)
  guarded.close('done')
  assert 'no end within 0 s' in caplog.text
  full = Guarded('trackers.y', make, background=True)
  for step in range(9):
    full.write(step, {'loss': 2.})
  assert 'trackers.y: expected a tracker that takes the metrics, got 3 calls that wait' in caplog.text
  full.close('done')
  release.set()
