"""Profiles of any hosts of a running run, on request by a file in the run directory.

`vit-jax profile` writes `profile/request.json`. Process 0 looks for it at the interval of the log, for object storage
in a thread, as that is slow to answer. It puts it on the board (`parallel/board.py`), where every process reads it two
steps later; those that it names trace the following steps. Their answers come back on the board, and process 0 writes
them to `profile/answer.json`.
"""
from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from vit_jax.parallel.board import LAG, Board
from vit_jax.record import run_directory, storage
from vit_jax.record.profile_request import ANSWER, FOLDER, REQUEST, Request, parse
from vit_jax.train.loop import Done
from vit_jax.train.state import TrainState

AHEAD = 2
"""Steps from reading a request to the first one that is traced, as a process can be one step ahead of its metrics."""
LAST_WAIT_S = 5.
"""How long process 0 waits at the end of training for answers; a run that is preempted has little time to save."""
log = logging.getLogger('vit_jax.train')


class Tracing(Protocol):
  """What traces steps: `train/profile.py`."""

  def request(self, folder: storage.PathLike, first: int, last: int, told: Callable[[int, int, str], None]) -> bool:
    ...


class Requests:
  """A hook of every process that takes requests and answers them; use it in a `with` statement around the loop.

  Args:
    workdir: of the run.
    tracing: of this process.
    board: of the processes.
    log_every: steps between two looks.
    total: number of steps of the run.
    num_hosts, host: number of processes, and index of this one.
  """
  every = 0

  def __init__(self, workdir: storage.Path, tracing: Tracing, board: Board, *, log_every: int, total: int,
               num_hosts: int, host: int) -> None:
    self._folder, self._tracing, self._board = workdir / FOLDER, tracing, board
    self._log_every, self._total, self._num_hosts, self._host = log_every, total, num_hosts, host
    self._found: list[Request] = []
    self._open: Request | None = None
    self._seen = ''
    self._thread: threading.Thread | None = None

  def __enter__(self) -> Requests:
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    """Process 0: answers an open request with what the processes that it names have traced until the end."""
    until_s = time.monotonic() + (0. if error else LAST_WAIT_S)
    while self._open and not self._answer() and time.monotonic() < until_s:
      time.sleep(0.1)
    self._join()

  def on_metrics(self, done: Done) -> None:
    """Answers requests: looks for one, reads what process 0 shows, and has its steps traced, each at its step."""
    if self._host == 0 and done.step % self._log_every == 0:
      self._put(done.step)
    asked = done.step - LAG
    if asked > 0 and asked % self._log_every == 0 and (text := self._board.get(f'{FOLDER}/{asked}')):
      self._begin(Request(*json.loads(text)), done.step + AHEAD)

  def on_state(self, step: int, state: TrainState) -> None:
    raise AssertionError('never due')

  def _put(self, step: int) -> None:
    """Process 0: answers an open request; else looks for one, and shows it to all."""
    if self._open:
      self._answer()
      return
    self._start(self._look)
    if self._found:
      self._open = self._found.pop()
      self._board.put(f'{FOLDER}/{step}', json.dumps(self._open))

  def _look(self) -> None:
    """Reads the file of a request; in the thread."""
    try:
      path = self._folder / REQUEST
      text = storage.read_text(path) if path.exists() else ''
    except Exception as error:  # of any storage: a run does not depend on profiles
      log.debug('%s could not be read: %s', self._folder / REQUEST, error)
      return
    if (found := parse(text)) and found.id != self._seen:
      self._seen = found.id
      self._found.append(found)

  def _begin(self, request: Request, first: int) -> None:
    """Begins to trace if this process is named."""
    if self._host not in request.hosts:
      return
    last = first + request.steps - 1
    name = f'{FOLDER}/{request.id}/{self._host}'

    def answer(**fields: Any) -> None:
      self._board.put(name, json.dumps({'name': socket.gethostname(), **fields}))

    if last > self._total:
      answer(error=f'--steps: expected at most {max(0, self._total - first + 1):,}, the steps that host {self._host} '
                   f'can still trace, got {request.steps:,}. Set fewer.')
    elif not self._tracing.request(self._folder / f'host_{self._host}', first, last,
                                   lambda begun, done, folder: answer(first=begun, last=done, folder=folder)):
      answer(error=f'--host: expected hosts that are not traced, got {self._host}, of which train.profile traces '
                   'steps. Try again after them.')

  def _answer(self) -> bool:
    """Writes the answers if they are complete; returns whether they are."""
    request = self._open
    assert request is not None
    answers: dict[str, object] = {host: json.loads(text) for host, text in
                                  self._board.all(f'{FOLDER}/{request.id}').items()}
    for host in request.hosts:
      if not 0 <= host < self._num_hosts:
        answers[str(host)] = {'error': f'--host: expected 0 to {self._num_hosts - 1}, the processes of the run, got '
                                       f'{host}.'}
    if len(answers) < len(set(request.hosts)):
      return False
    self._open = None
    self._start(lambda: self._write({'id': request.id, 'hosts': answers}))
    return True

  def _write(self, answer: dict[str, object]) -> None:
    try:
      run_directory.write_json(self._folder / ANSWER, answer)
    except Exception as error:  # of any storage, as above
      log.warning('%s could not be written: %s', self._folder / ANSWER, error)

  def _start(self, task: Callable[[], None]) -> None:
    """Runs a task, for object storage in a thread, after the one before; a look is left out during another task."""
    if storage.is_local(self._folder):
      task()
    elif task != self._look or self._thread is None or not self._thread.is_alive():
      self._join()
      self._thread = threading.Thread(target=task, name='profile requests', daemon=True)
      self._thread.start()

  def _join(self) -> None:
    if self._thread is not None:
      self._thread.join(LAST_WAIT_S)
