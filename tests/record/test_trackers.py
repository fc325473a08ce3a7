"""Trackers that fail or are slow do not touch the run; event files for TensorBoard."""
from __future__ import annotations

import io
import pathlib
import resource
import socket
import threading
import time
import urllib.request
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto import event_pb2

from vit_jax.core.types import HostArray
from vit_jax.record import trackers
from vit_jax.record.trackers import Guarded, Histogram, Status, TensorBoard


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

  def close(self, status: Status) -> None:
    self._add('close', status)


@pytest.mark.parametrize('background', [False, True])
def test_all_calls_arrive_in_order(background: bool) -> None:
  seen = Listed()
  guarded = Guarded('trackers.x', lambda: seen, background=background)
  guarded.do(lambda one: one.write(1, {'loss': 2.}))
  guarded.do(lambda one: one.images(1, {'a': np.zeros((1, 2, 2, 3), np.uint8)}))
  guarded.do(lambda one: one.histograms(2, {'b': Histogram(np.ones(1), np.zeros(2), 0., 0.)}))
  guarded.close('stopped')
  assert seen.calls == [
      ('write', 1, {'loss': 2.}), ('images', 1, ['a']), ('histograms', 2, ['b']), ('close', 'stopped')]


@pytest.mark.parametrize('background', [False, True])
@pytest.mark.parametrize('error', [OSError('disk full\nand more'), SystemExit(1), RuntimeError()])
def test_the_first_error_is_one_warning_and_nothing_is_sent_later(
    background: bool, error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
  seen = Listed(1, error)
  guarded = Guarded('trackers.x', lambda: seen, background=background)
  for step in range(4):
    guarded.do(lambda one, step=step: one.write(step, {'loss': 2.}))
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
  guarded.do(lambda one: one.write(0, {'loss': 2.}))
  guarded.close('failed')
  assert len(caplog.messages) == 1 and 'ConnectionError: no server' in caplog.text


def test_a_server_that_never_answers_delays_neither_steps_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setattr(trackers, 'CLOSE_S', .05)
  monkeypatch.setattr(trackers, 'MAX_WAITING', 3)
  with socket.create_server(('127.0.0.1', 0)) as server:
    address = 'http://{}:{}'.format(*server.getsockname())

    is_waiting = threading.Event()

    def make() -> Listed:
      is_waiting.set()
      urllib.request.urlopen(address, timeout=60)
      return Listed()
    began_s = time.monotonic()
    guarded = Guarded('trackers.x', make, background=True)
    assert is_waiting.wait(20)
    guarded.close('done')
    assert 'no end within 0 s' in caplog.text
    is_waiting.clear()
    full = Guarded('trackers.y', make, background=True)
    assert is_waiting.wait(20)
    for _ in range(9):
      full.do(lambda one: one.write(1, {'loss': 2.}))
    assert 'trackers.y: expected a tracker that takes the metrics, got 3 calls that wait' in caplog.text
    full.close('done')
    assert time.monotonic() - began_s < 30  # a request would wait for 60
    assert len(caplog.messages) == 3, caplog.text  # the last one: no end of `full` either


def events(path: pathlib.Path) -> list[event_pb2.Event]:
  """Records of a file: length, checksum of it, content, checksum of it."""
  raw, found = path.read_bytes(), []
  while raw:
    size = int.from_bytes(raw[:8], 'little')
    found.append(event_pb2.Event.FromString(raw[12:12 + size]))
    raw = raw[16 + size:]
  return found


def test_scalars_are_in_the_file_with_their_steps(tmp_path: pathlib.Path) -> None:
  for purge in (None, 4):
    one = TensorBoard(str(tmp_path), purge)
    one.write(7, {'train/loss': 1.5})
    assert events(max(tmp_path.iterdir()))[-1].step == 7  # before it is closed: a kill loses nothing
    one.close()
  first, second = (events(path) for path in sorted(tmp_path.glob('events.out.tfevents.*')))
  assert [e.file_version for e in first] == ['brain.Event:2', '']
  assert (first[-1].step, first[-1].summary.value[0].tag) == (7, 'train/loss')
  assert first[-1].summary.value[0].simple_value == 1.5
  assert second[1].step == 5 and second[1].session_log.status == event_pb2.SessionLog.START


def test_images_and_histograms_are_in_the_file(tmp_path: pathlib.Path) -> None:
  one = TensorBoard(str(tmp_path), None)
  pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), np.uint8)
  one.images(3, {'train/images': pixels})
  one.histograms(4, jax.device_get({'params/head/bias': Histogram(  # as `tracker_hooks.Histograms` passes them
      jnp.array([2, 1], jnp.int32), jnp.array([-1., 0., 1.]), jnp.float32(.5), jnp.float32(1.25))}))
  one.close()
  (path,) = tmp_path.glob('events.out.tfevents.*')
  first, second, third = (event.summary.value[0] for event in events(path)[1:])
  assert [first.tag, second.tag, third.tag] == ['train/images/0', 'train/images/1', 'params/head/bias']
  assert (second.image.height, second.image.width, second.image.colorspace) == (5, 7, 3)
  np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(second.image.encoded_image_string))), pixels[1])
  histo = third.histo
  assert (histo.min, histo.max, histo.num, histo.sum, histo.sum_squares) == (-1., 1., 3., .5, 1.25)
  assert [*histo.bucket_limit] == [0., 1.] and [*histo.bucket] == [2., 1.]


def test_a_full_disk_is_one_warning(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  one = trackers.tensorboard(str(tmp_path), None)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
  try:
    for _ in range(1000):
      one.do(lambda tracker: tracker.write(1, {'train/loss': 1.}))
    one.close('done')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert len(caplog.messages) == 1 and 'too large' in caplog.text


def test_a_file_that_has_grown_is_followed_by_another(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(trackers, 'MAX_BYTES', 500)
  one = TensorBoard(str(tmp_path), None)
  for step in range(40):
    one.write(step, {'train/loss': 1.})
  one.close()
  paths = sorted(tmp_path.glob('events.out.tfevents.*'))
  assert 2 < len(paths) < 10 and all(path.stat().st_size < 600 for path in paths)
  found = [event for path in paths for event in events(path)]
  assert [e.step for e in found if e.summary.value] == list(range(40))
  assert all(events(path)[0].file_version == 'brain.Event:2' for path in paths)


def test_files_are_in_the_order_of_their_starts_though_the_clock_is_set_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  names: list[str] = []
  for now_s in (2_000_000_000., 1_000_000_000., 1_000_000_000.):
    monkeypatch.setattr(trackers.time, 'time', lambda now_s=now_s: now_s)
    trackers.tensorboard(str(tmp_path), None).close('done')
    names += [path.name for path in tmp_path.iterdir() if path.name not in names]
  assert len(names) == 3 and names == sorted(names)
