"""Profiles that a running run is asked for: who traces which steps, and what is answered."""
from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import buckets
import pytest

from vit_jax.parallel.board import Board
from vit_jax.record import profile_request, storage
from vit_jax.record.profile_request import Request
from vit_jax.train import profile_requests


class Tracing:
  """Stands in for the profiler: notes what it should trace, and finishes it when told to."""

  def __init__(self, busy: bool = False) -> None:
    self.busy, self.asked = busy, list[tuple[str, int, int]]()
    self.finish: Callable[[], None] = lambda: None

  def request(self, folder: Any, first: int, last: int, told: Callable[[int, int, str], None]) -> bool:
    self.asked.append((str(folder), first, last))
    self.finish = lambda: told(first, last, str(folder))
    return not self.busy


class Hosts:
  """The processes of a run whose log has an interval of ten steps."""

  def __init__(self, workdir: Any, num: int = 3, log_every: int = 10, busy: bool = False) -> None:
    self.workdir, board = workdir, Board()
    self.tracing = [Tracing(busy) for _ in range(num)]
    self.hooks = [profile_requests.Requests(workdir, tracing, board, log_every=log_every, total=100, num_hosts=num,
                                            host=host) for host, tracing in enumerate(self.tracing)]

  def go(self, first: int, last: int) -> None:
    for step in range(first, last + 1):
      for hook in self.hooks:
        hook.on_metrics(type('Done', (), {'step': step})())

  @property
  def answer(self) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(storage.read_text(self.workdir / 'profile' / 'answer.json'))
    return found


def ask(workdir: Any, *hosts: int, steps: int = 5, after_s: float = 60., name: str = 'one') -> None:
  request = Request(name, hosts, steps, time.time() + after_s)
  storage.write_bytes(workdir / 'profile' / 'request.json', request.to_json().encode())


def test_the_named_processes_trace_the_same_steps_and_process_0_answers(tmp_path: pathlib.Path) -> None:
  hosts = Hosts(tmp_path)
  ask(tmp_path, 0, 2)
  hosts.go(1, 11)
  assert not hosts.tracing[0].asked  # another process may not have had the metrics of step 10
  hosts.go(12, 12)
  assert [one.asked for one in hosts.tracing] == [
      [(f'{tmp_path}/profile/host_0', 14, 18)], [], [(f'{tmp_path}/profile/host_2', 14, 18)]]
  hosts.tracing[2].finish()
  hosts.go(13, 29)
  assert not (tmp_path / 'profile' / 'answer.json').exists()
  hosts.tracing[0].finish()
  hosts.go(30, 30)
  assert hosts.answer['id'] == 'one' and sorted(hosts.answer['hosts']) == ['0', '2']
  assert hosts.answer['hosts']['2'] == hosts.answer['hosts']['0'] | {'folder': f'{tmp_path}/profile/host_2'}
  hosts.go(31, 60)
  assert len(hosts.tracing[0].asked) == 1  # a request is followed once
  ask(tmp_path, 1, name='two')
  hosts.go(61, 79)
  assert hosts.tracing[1].asked == [(f'{tmp_path}/profile/host_1', 74, 78)]


@pytest.mark.parametrize('log_every', [1, 2, 3])
def test_any_interval_of_the_log_will_do(log_every: int, tmp_path: pathlib.Path) -> None:
  hosts = Hosts(tmp_path, log_every=log_every)
  ask(tmp_path, 1)
  hosts.go(1, 8)
  assert hosts.tracing[1].asked == [(f'{tmp_path}/profile/host_1', log_every + 4, log_every + 8)]


@pytest.mark.parametrize(('host', 'steps', 'busy', 'said'), [
    (7, 5, False, '--host: expected 0 to 2, the processes of the run, got 7.'),
    (1, 88, False, '--steps: expected at most 87, the steps that host 1 can still trace, got 88. Set fewer.'),
    (1, 5, True, '--host: expected hosts that are not traced, got 1, of which train.profile traces steps.')])
def test_what_cannot_be_traced_is_answered(host: int, steps: int, busy: bool, said: str,
                                           tmp_path: pathlib.Path) -> None:
  hosts = Hosts(tmp_path, busy=busy)
  ask(tmp_path, host, steps=steps)
  hosts.go(1, 20)
  assert hosts.answer['hosts'][str(host)]['error'].startswith(said)


@pytest.mark.parametrize('text', ['', 'x', '[]', '{"id": "a"}', '{"id": "a", "hosts": 3, "steps": 1, "until_s": 9e99}',
                                  Request('a', (1,), 5, 1.).to_json(), Request('a', (1,), 0, 9e99).to_json()])
def test_a_file_that_is_no_valid_request_is_ignored(text: str, tmp_path: pathlib.Path) -> None:
  assert profile_request.parse(text) is None
  hosts = Hosts(tmp_path)
  storage.write_bytes(tmp_path / 'profile' / 'request.json', text.encode())
  hosts.go(1, 30)
  assert not hosts.tracing[1].asked


def test_the_last_answers_are_written_at_the_end_of_training(tmp_path: pathlib.Path) -> None:
  hosts = Hosts(tmp_path, num=1)
  ask(tmp_path, 0)
  with hosts.hooks[0]:
    hosts.go(1, 12)
    hosts.tracing[0].finish()
  assert hosts.answer['hosts']['0']['last'] == 18


def test_a_run_in_object_storage_is_asked_in_the_same_way(bucket: buckets.Server) -> None:
  workdir = storage.open_path('gs://mine/run')
  hosts = Hosts(workdir)
  hosts.go(1, 10)
  ask(workdir, 1)
  step = 10
  while not hosts.tracing[1].asked and step < 100:  # a thread reads the request
    hosts.go(step + 1, step + 10)
    step += 10
    time.sleep(.1)
  assert hosts.tracing[1].asked[0][0] == 'gs://mine/run/profile/host_1'
  hosts.tracing[1].finish()
  hosts.go(step + 1, step + 10)
  hosts.hooks[0].__exit__(None, None, None)
  assert json.loads(bucket.read('gs://mine/run/profile/answer.json'))['hosts']['1']['first'] > 14
