"""Writes scalars, images and histograms for TensorBoard to event files, at least one for each start of a run.

The format is encoded here: every run writes such files, for which tensorboardX (compared at version 2.6.5) would import
protobuf and 46 further modules, and the names, sizes and errors of files would have to stay here.
An event file is a sequence of frames: u64 length, u32 checksum of the length, content, u32 checksum of the content
(little endian; CRC-32C, rotated right by 15 bits, plus a constant). The content is an `Event` message
(tensorflow/core/util/event.proto and framework/summary.proto) in the wire format of protocol buffers.
"""
from __future__ import annotations

import io
import math
import os
import re
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import IO

from PIL import Image

from vit_jax.core.types import HostArray
from vit_jax.record.trackers.tracker import Guarded, Histogram, Status

FLUSH_S = 10.
_VERSION = b'brain.Event:2'
_START = b'\x08\x01'  # SessionLog { status (1): START (1) }
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7  # fields of Event
_VALUE, _TAG, _SIMPLE_VALUE, _IMAGE, _HISTOGRAM = 1, 1, 2, 4, 5  # of Summary; of its values
_HEIGHT, _WIDTH, _CHANNELS, _ENCODED = 1, 2, 3, 4  # of Summary.Image
_MIN, _MAX, _NUM, _SUM, _SUM_SQUARES, _LIMITS, _COUNTS = 1, 2, 3, 4, 5, 6, 7  # of HistogramProto
_NOT_IN_TAGS = re.compile(r'[^-/\w.]')
_EVENTS = re.compile(r'events\.out\.tfevents\.(\d{1,12})\.', re.ASCII)
_MASK_DELTA = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected


class Board:
  """Event files of one start.

  Args:
    folder: an existing folder for the files.
    purge_step: first step that this start repeats; TensorBoard drops earlier values of this and later steps. None for
      a new run.
    most_bytes: after so many bytes, another file begins; object storage gets a complete one only once.

  Raises:
    OSError: the file cannot be written; every method can raise it.
  """

  def __init__(self, folder: str, *, purge_step: int | None, most_bytes: int = 2**23) -> None:
    self._folder, self._most_bytes = folder, most_bytes
    self._flushed_s = time.monotonic()
    self._file = self._begin()
    if purge_step is not None:
      self._add(_varint(_STEP, purge_step) + _bytes(_SESSION_LOG, _START))

  def add_scalar(self, name: str, value: float, step: int) -> None:
    """Adds a value; a later call writes it to the file once `FLUSH_S` have passed.

    Characters that TensorBoard does not allow in a name become `_`.
    """
    self._add_value(name, _key(_SIMPLE_VALUE, _FIXED32) + _float32(value), step)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Adds scalars by name."""
    for name, value in values.items():
      self.add_scalar(name, value, step)

  def images(self, step: int, values: Mapping[str, HostArray]) -> None:
    """Adds images `[B, H, W, 3]` u8, each as `NAME/NUMBER`, as PNG."""
    for name, images in values.items():
      for number, image in enumerate(images):
        sides = b''.join(map(_varint, (_HEIGHT, _WIDTH, _CHANNELS), image.shape))
        self._add_value(f'{name}/{number}', _bytes(_IMAGE, sides + _bytes(_ENCODED, _png(image))), step)

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    """Adds histograms by name."""
    for name, one in values.items():
      numbers = {_MIN: one.edges[0], _MAX: one.edges[-1], _NUM: one.counts.sum(), _SUM: one.sum,
                 _SUM_SQUARES: one.sum_squares}
      content = b''.join(_key(field, _FIXED64) + struct.pack('<d', float(number)) for field, number in numbers.items())
      self._add_value(name, _bytes(_HISTOGRAM, content + _doubles(_LIMITS, one.edges[1:].tolist())
                                   + _doubles(_COUNTS, one.counts.tolist())), step)

  def _add_value(self, name: str, content: bytes, step: int) -> None:
    tag = _NOT_IN_TAGS.sub('_', name).lstrip('/').encode()
    self._add(_varint(_STEP, step) + _bytes(_SUMMARY, _bytes(_VALUE, _bytes(_TAG, tag) + content)))
    if self._file.tell() > self._most_bytes:
      self._file.close()
      self._file = self._begin()
    elif time.monotonic() - self._flushed_s > FLUSH_S:
      self._file.flush()
      self._flushed_s = time.monotonic()

  def settle(self) -> None:
    """Writes buffered values, and syncs the file to disk."""
    self._file.flush()
    os.fsync(self._file.fileno())
    self._flushed_s = time.monotonic()

  def close(self, status: Status = 'done') -> None:
    """Writes buffered values, and closes the file."""
    del status
    self._file.close()

  def _begin(self) -> IO[bytes]:
    # The name is unique even for two starts within a second, and behind all others even if the clock was set back.
    before = [int(found[1]) for name in os.listdir(self._folder) if (found := _EVENTS.match(name))]
    now_s = max(round(time.time()), *before, 0)
    name = f'events.out.tfevents.{now_s + (now_s in before)}.{socket.gethostname()}.{time.time_ns()}'
    file = open(os.path.join(self._folder, name), 'wb')
    file.write(_frame(_bytes(_FILE_VERSION, _VERSION)))
    return file

  def _add(self, event: bytes) -> None:
    self._file.write(_frame(event))


def _frame(event: bytes) -> bytes:
  """Returns an event with its time, length and checksums."""
  event = _key(_WALL_TIME, _FIXED64) + struct.pack('<d', time.time()) + event
  size = struct.pack('<Q', len(event))
  return size + _checksum(size) + event + _checksum(event)


def opened(folder: str, resumed_from: int | None) -> Guarded:
  """Returns a tracker that writes event files to a local folder.

  `resumed_from` is the step of a resumed run, or None.
  """
  purge_step = None if resumed_from is None else resumed_from + 1
  return Guarded('trackers.tensorboard', lambda: Board(folder, purge_step=purge_step), background=False)


def _key(field: int, wire_type: int) -> bytes:
  return bytes([field << 3 | wire_type])


def _number(value: int) -> bytes:
  """Returns a whole number of 0 or more as a varint: 7 bits a byte, the lowest first."""
  found = bytearray()
  while value > 127:
    found.append(value & 127 | 128)
    value >>= 7
  return bytes([*found, value])


def _varint(field: int, value: int) -> bytes:
  return _key(field, _VARINT) + _number(value)


def _bytes(field: int, value: bytes) -> bytes:
  return _key(field, _BYTES) + _number(len(value)) + value


def _doubles(field: int, values: Sequence[float]) -> bytes:
  return _bytes(field, struct.pack(f'<{len(values)}d', *values))


def _png(image: HostArray) -> bytes:
  file = io.BytesIO()
  Image.fromarray(image).save(file, 'png')
  return file.getvalue()


def _float32(value: float) -> bytes:
  try:
    return struct.pack('<f', value)
  except OverflowError:
    return struct.pack('<f', math.copysign(math.inf, value))


def _table() -> tuple[int, ...]:
  """Returns the CRC-32C of each byte."""
  found = []
  for byte in range(256):
    for _ in range(8):
      byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    found.append(byte)
  return tuple(found)


_CRC = _table()


def _checksum(data: bytes) -> bytes:
  crc = 0xFFFFFFFF
  for byte in data:
    crc = _CRC[(crc ^ byte) & 255] ^ crc >> 8
  crc ^= 0xFFFFFFFF
  return struct.pack('<I', ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)
