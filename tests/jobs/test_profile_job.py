"""The job that asks a running run for profiles."""
from __future__ import annotations

import json
import pathlib
import threading
import time
from typing import Any

import pytest

from vit_jax import main


def answer(workdir: pathlib.Path, hosts: dict[str, Any]) -> threading.Thread:
  """A run that answers as soon as it is asked; an earlier answer is there before."""
  folder = workdir / 'profile'
  folder.mkdir()
  (workdir / 'config.json').write_text('{}')
  (folder / 'answer.json').write_text(json.dumps({'id': 'another', 'hosts': {}}))

  def run() -> None:
    while not (folder / 'request.json').exists():
      time.sleep(.01)
    asked = json.loads((folder / 'request.json').read_text())
    assert asked['steps'] == 3 and asked['hosts'] == [1, 0]
    (folder / 'answer.json').write_text(json.dumps({'id': asked['id'], 'hosts': hosts}))

  thread = threading.Thread(target=run)
  thread.start()
  return thread


def test_the_places_of_the_profiles_are_printed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  one = {'name': 'a', 'first': 1004, 'last': 1006, 'folder': '/x/profile/host_1'}
  thread = answer(tmp_path, {'1': one, '0': one | {'name': 'b', 'folder': '/x/profile/host_0'}})
  assert main.run(['profile', f'--workdir={tmp_path}', '--host=1,0,1', '--steps=3']) == 0
  thread.join()
  assert capsys.readouterr().out.splitlines()[1:] == [
      'Host 0 (b), steps 1,004 to 1,006: /x/profile/host_0', 'Host 1 (a), steps 1,004 to 1,006: /x/profile/host_1',
      f'tensorboard --logdir={tmp_path}/profile']
  assert not (tmp_path / 'profile' / 'request.json').exists()


def test_what_the_run_cannot_do_is_an_error(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  thread = answer(tmp_path, {'1': {'error': '--host: expected 0 to 0, got 1.'},
                             '0': {'name': 'b', 'first': 4, 'last': 6, 'folder': '/x'}})
  assert main.run(['profile', f'--workdir={tmp_path}', '--host=1,0', '--steps=3']) == 2
  thread.join()
  said = capsys.readouterr()
  assert 'error: --host: expected 0 to 0, got 1.' in said.err and 'Host 0 (b), steps 4 to 6: /x' in said.out


def test_a_run_that_does_not_answer_is_an_error_that_takes_the_request_back(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['profile', f'--workdir={tmp_path}', '--timeout=1']) == 2
  assert 'expected the directory of a run that is training, got one without config.json' in capsys.readouterr().err
  (tmp_path / 'config.json').write_text('{}')
  assert main.run(['profile', f'--workdir={tmp_path}', '--timeout=1']) == 2
  assert 'expected an answer of the run in time, got none' in capsys.readouterr().err
  assert not (tmp_path / 'profile' / 'request.json').exists()
