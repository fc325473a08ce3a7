"""Scalars for TensorBoard, in an event file of one start of a run.

Written by the calling thread: the writer thread of tensorboardX ends when a disk is full, and a caller that hands it
more waits for ever.
"""
from __future__ import annotations

import os
import time

from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

FLUSH_S = 10.


class Board:
  """An event file.

  Args:
    folder: where to; it has to be there.
    purge_step: first step that this start does again: TensorBoard drops what it has of it and of later ones; None for
      a fresh start.

  Raises:
    OSError: of every method, where the file cannot be written.
  """

  def __init__(self, folder: str, *, purge_step: int | None) -> None:
    # A name of its own even for two starts within a second: an event file is truncated when opened.
    self._events = event_file_writer.EventsWriter(os.path.join(folder, 'events'), f'.{time.time_ns()}')
    self._flushed_s = time.monotonic()
    if purge_step is not None:
      started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._add(event_pb2.Event(session_log=started), purge_step)

  def add_scalar(self, name: str, value: float, step: int) -> None:
    """Adds a value; it is in the file within `FLUSH_S` of a later one."""
    self._add(event_pb2.Event(summary=summary.scalar(name, value)), step)
    if time.monotonic() - self._flushed_s > FLUSH_S:
      self._events.flush()
      self._flushed_s = time.monotonic()

  def close(self) -> None:
    """Writes what is left, and closes the file."""
    self._events.close()

  def _add(self, event: event_pb2.Event, step: int) -> None:
    event.wall_time, event.step = time.time(), step
    self._events.write_event(event)
