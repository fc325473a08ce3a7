"""Ends this process when another process of the run has ended, or gives no sign of life.

A process that waits in a collective operation for one that is gone waits forever, or until jax aborts it with status
134. Therefore every process keeps the connection by which it met process 0. Over it both send a line at intervals, and
a last one when they end:

  alive            sent every `timeout_s / 8`, at most every 5 s
  end STATUS RANK  process RANK ends with STATUS; 0 = it needs nobody any more

A connection that closes without a last line belongs to a process that was killed; a silent one to a host that is
stopped, or that the network does not reach. Both end this process with status 75, which launchers try again. After an
error of another process (2, 70), this process ends with the same status, so that all launchers see one status. Process
0 passes the line on to the others. jax's own heartbeats stay as a second guard, with twice the time.
"""
from __future__ import annotations

import atexit
import contextlib
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Mapping

from vit_jax.core.failures import TRY_AGAIN

MOST_INTERVAL_S = 5.
SIGNS_IN_TIMEOUT = 8
ALIVE = b'alive\n'
_END = re.compile(rb'end (\d+) (\d+)')


class Peers:
  """The connections of this process, watched by a thread.

  Args:
    rank: of this process.
    connections: by the rank of the other process: to all others in process 0, and to process 0 in the others.
    timeout_s: the time without a sign of another process after which it counts as lost.
  """

  def __init__(self, rank: int, connections: Mapping[int, socket.socket], timeout_s: float) -> None:
    self._rank, self._connections, self._timeout_s = rank, dict(connections), timeout_s
    self._received = dict.fromkeys(connections, b'')
    self._heard_s = dict.fromkeys(connections, time.monotonic())
    self._selector = selectors.DefaultSelector()
    for other, connection in connections.items():
      connection.setblocking(False)
      # A line is sent at once: one that waits for the receipt of an earlier one is lost if the process ends meanwhile.
      connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
      self._selector.register(connection, selectors.EVENT_READ, other)
    threading.Thread(target=self._run, name='peers', daemon=True).start()
    atexit.register(self.tell, 0)  # before jax's, which waits for the others

  def tell(self, status: int, rank: int | None = None) -> None:
    """Sends to the others that a process, by default this one, ends with this status."""
    self._send(b'end %d %d\n' % (status, self._rank if rank is None else rank))

  def _send(self, line: bytes) -> None:
    for connection in list(self._connections.values()):
      with contextlib.suppress(OSError):  # closed, or full because the other is stopped: reading notices it
        connection.sendall(line)

  def _run(self) -> None:
    interval_s, sent_s = min(self._timeout_s / SIGNS_IN_TIMEOUT, MOST_INTERVAL_S), -float('inf')
    while self._heard_s:
      if time.monotonic() - sent_s >= interval_s:
        self._send(ALIVE)
        sent_s = time.monotonic()
      self._selector.select(interval_s)
      for other in list(self._heard_s):
        self._receive(other)  # of all, as a process that was stopped has waited long enough, but has signs to read
        if time.monotonic() - self._heard_s.get(other, float('inf')) > self._timeout_s:
          self._leave(TRY_AGAIN, other, f'expected a sign of it within {self._timeout_s:.0f} s, got none')

  def _receive(self, other: int) -> None:
    """Takes what another process has sent."""
    try:
      got = self._connections[other].recv(4096)
    except BlockingIOError:
      return
    except OSError:
      got = b''
    if not got:
      self._leave(TRY_AGAIN, other, 'expected it to run, got a closed connection, so it was killed or its host is lost')
    self._heard_s[other] = time.monotonic()
    *lines, self._received[other] = (self._received[other] + got).split(b'\n')
    for found in filter(None, map(_END.fullmatch, lines)):
      status, rank = int(found[1]), int(found[2])
      if status:
        self._leave(status, rank, 'expected signs of this process in time, got none' if rank == self._rank else
                    f'expected it to run, got an end with status {status}')
      self._selector.unregister(self._connections[other])
      del self._heard_s[other]
      return

  def _leave(self, status: int, rank: int, what: str) -> None:
    """Ends this process at once: its main thread may wait forever in the runtime."""
    self.tell(status, rank)
    resumes = ' The same command resumes from the last checkpoint.' if status == TRY_AGAIN else ''
    os.write(2, f'error: process {rank} of the run: {what}. See its messages.{resumes}\n'.encode())
    os._exit(status)
