"""A run whose step waits for the host says so, and takes more processes if it may choose."""
from __future__ import annotations

import logging
from typing import Any

import jax
import pytest

from vit_jax.config import schema
from vit_jax.data.pipeline import loader
from vit_jax.data.pipeline.capacity import Machine
from vit_jax.jobs import loader_processes
from vit_jax.train.host_speed import Found

HERE = Machine(112, 2**38)


def decide(found: Found, setting: int, caplog: pytest.LogCaptureFixture) -> tuple[int, str]:
  """The number of processes afterwards, and the log."""
  made: Any = None
  supply = loader.Supply(made, threads=0, workers=max(0, setting), batch_bytes=2**20)
  with caplog.at_level(logging.INFO):
    loader_processes.decide(found, 1_024., supply, setting=setting, here=HERE)
  return supply.workers, caplog.text


def test_a_step_that_waits_gets_processes_or_is_told_their_number(caplog: pytest.LogCaptureFixture) -> None:
  waits = Found(alone_s=1_024 / 16_000, step_s=1_024 / 8_400, waiting=.45, busy_cores=14.)
  workers, text = decide(waits, schema.AUTO_WORKERS, caplog)
  assert workers == 3 and 'The host makes 8.4k of the 16k images/s that the step takes: ' in text
  workers, text = decide(waits, 0, caplog)
  assert workers == 0 and '; set data.workers=3.' in text


def test_a_step_that_does_not_wait_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
  assert decide(Found(alone_s=.1, step_s=.12, waiting=.04, busy_cores=14.), schema.AUTO_WORKERS, caplog) == (0, '')


def test_a_process_that_logs_warnings_alone_warns(caplog: pytest.LogCaptureFixture,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
  waits = Found(alone_s=1_024 / 16_000, step_s=1_024 / 8_400, waiting=.45, busy_cores=14.)
  for process, level in ((0, logging.INFO), (3, logging.WARNING)):
    monkeypatch.setattr(jax, 'process_index', lambda process=process: process)
    caplog.clear()
    decide(waits, 0, caplog)
    assert [one.levelno for one in caplog.records] == [level]
