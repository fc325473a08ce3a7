from __future__ import annotations

import os
import signal

import jax
import pytest

from vit_jax.core import signals
from vit_jax.train.stopping import StopRequest


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_becomes_a_reason_and_handlers_come_back(number: signal.Signals,
                                                          capfd: pytest.CaptureFixture[str]) -> None:
  before = signal.getsignal(number)
  with StopRequest() as asked:
    assert asked.reason(1) == ''
    os.kill(os.getpid(), number)
    assert asked.reason(2) == number.name
  assert signal.getsignal(number) is before
  assert capfd.readouterr().err == f'{signals.STOPPING}\n' * (number == signal.SIGINT)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGUSR1])
def test_with_several_processes_it_is_sent_on_as_sigterm_which_jax_handles(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
  got: list[int] = []
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  before = signal.signal(signal.SIGTERM, lambda *_: got.append(signal.SIGTERM))
  with StopRequest():
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), 0)
  signal.signal(signal.SIGTERM, before)
  assert got == [signal.SIGTERM]


def test_the_first_ctrl_c_after_another_signal_lets_the_step_end(monkeypatch: pytest.MonkeyPatch) -> None:
  ended: list[int] = []
  monkeypatch.setattr(os, '_exit', ended.append)
  with StopRequest() as request:
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGINT)
    assert not ended and request.reason(0) == 'SIGINT'
    os.kill(os.getpid(), signal.SIGINT)
  assert ended == [130]


def test_a_second_ctrl_c_ends_the_process_at_once_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
  ended: list[int] = []
  monkeypatch.setattr(os, '_exit', ended.append)
  with StopRequest():
    os.kill(os.getpid(), signal.SIGINT)
    assert not ended
    os.kill(os.getpid(), signal.SIGINT)
  assert ended == [130] and capfd.readouterr().err == f'{signals.STOPPING}\nInterrupted.\n'
