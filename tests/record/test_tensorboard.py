"""Event files for TensorBoard."""
from __future__ import annotations

import io
import pathlib
import resource

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto import event_pb2

from vit_jax.record.trackers import tensorboard
from vit_jax.record.trackers.tracker import Histogram


def events(path: pathlib.Path) -> list[event_pb2.Event]:
  """Records of a file: length, checksum of it, content, checksum of it."""
  raw, found = path.read_bytes(), []
  while raw:
    size = int.from_bytes(raw[:8], 'little')
    found.append(event_pb2.Event.FromString(raw[12:12 + size]))
    raw = raw[16 + size:]
  return found


def test_scalars_are_in_the_file_with_their_steps(tmp_path: pathlib.Path) -> None:
  for purge in (None, 5):
    one = tensorboard.Board(str(tmp_path), purge_step=purge)
    one.add_scalar('train/loss', 1.5, 7)
    one.close()
  first, second = (events(path) for path in sorted(tmp_path.glob('events.out.tfevents.*')))
  assert [e.file_version for e in first] == ['brain.Event:2', '']
  assert (first[-1].step, first[-1].summary.value[0].tag) == (7, 'train/loss')
  assert first[-1].summary.value[0].simple_value == 1.5
  assert second[1].step == 5 and second[1].session_log.status == event_pb2.SessionLog.START


def test_images_and_histograms_are_in_the_file(tmp_path: pathlib.Path) -> None:
  one = tensorboard.Board(str(tmp_path), purge_step=None)
  pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), np.uint8)
  one.images(3, {'train/images': pixels})
  one.histograms(4, {'params/head/bias': Histogram(np.array([2., 1.]), np.array([-1., 0., 1.]), .5, 1.25)})
  one.close()
  (path,) = tmp_path.glob('events.out.tfevents.*')
  first, second, third = (event.summary.value[0] for event in events(path)[1:])
  assert [first.tag, second.tag, third.tag] == ['train/images/0', 'train/images/1', 'params/head/bias']
  assert (second.image.height, second.image.width, second.image.colorspace) == (5, 7, 3)
  np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(second.image.encoded_image_string))), pixels[1])
  histo = third.histo
  assert (histo.min, histo.max, histo.num, histo.sum, histo.sum_squares) == (-1., 1., 3., .5, 1.25)
  assert [*histo.bucket_limit] == [0., 1.] and [*histo.bucket] == [2., 1.]


def test_a_full_disk_is_an_error_of_the_caller(tmp_path: pathlib.Path) -> None:
  one = tensorboard.Board(str(tmp_path), purge_step=None)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
  try:
    with pytest.raises(OSError, match='too large'):
      for step in range(1000):
        one.add_scalar('train/loss', 1., step)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_has_grown_is_followed_by_another(tmp_path: pathlib.Path) -> None:
  one = tensorboard.Board(str(tmp_path), purge_step=None, most_bytes=500)
  for step in range(40):
    one.add_scalar('train/loss', 1., step)
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
    monkeypatch.setattr(tensorboard.time, 'time', lambda now_s=now_s: now_s)
    tensorboard.opened(str(tmp_path), None).close('done')
    names += [path.name for path in tmp_path.iterdir() if path.name not in names]
  assert len(names) == 3 and names == sorted(names)
