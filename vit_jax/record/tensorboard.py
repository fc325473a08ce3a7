"""Writes scalars for TensorBoard to an event file, one for each start of a run.

The calling thread writes the file. The writer thread of tensorboardX is not used: it ends when the disk is full, and
its caller then waits forever.
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
    folder: an existing folder for the file.
    purge_step: first step that this start repeats; TensorBoard drops earlier values of this and later steps. None for
      a new run.

  Raises:
    OSError: the file cannot be written; every method can raise it.
  """

  def __init__(self, folder: str, *, purge_step: int | None) -> None:
    # The name is unique even for two starts within a second, because opening an event file truncates it.
    self._events = event_file_writer.EventsWriter(os.path.join(folder, 'events'), f'.{time.time_ns()}')
    self._flushed_s = time.monotonic()
    if purge_step is not None:
      started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._add(event_pb2.Event(session_log=started), purge_step)

  def add_scalar(self, name: str, value: float, step: int) -> None:
    """Adds a value; a later call writes it to the file once `FLUSH_S` have passed."""
    self._add(event_pb2.Event(summary=summary.scalar(name, value)), step)
    if time.monotonic() - self._flushed_s > FLUSH_S:
      self._events.flush()
      self._flushed_s = time.monotonic()

  def close(self) -> None:
    """Writes buffered values, and closes the file."""
    self._events.close()

  def _add(self, event: event_pb2.Event, step: int) -> None:
    event.wall_time, event.step = time.time(), step
    self._events.write_event(event)
