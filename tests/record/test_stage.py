"""Stages of a start: what is shown of them, and where."""
from __future__ import annotations

import io
import logging
import time

from vit_jax.record import stage


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def test_each_stage_is_a_line_with_the_seconds_since_the_start() -> None:
  stream, now = io.StringIO(), iter([100., 100.2, 103.46])
  with stage.shown(stream, now=lambda: next(now)):
    stage.begin('importing jax')
    stage.begin('opening the data')
    stage.end()
  stage.begin('nobody sees this')
  assert stream.getvalue() == '  0.2 s  importing jax …\n  3.5 s  opening the data …\n'


def test_on_a_terminal_there_is_one_live_line_that_makes_room_for_messages() -> None:
  terminal, root = Terminal(), logging.getLogger()
  other = logging.StreamHandler(terminal)
  root.addHandler(other)
  try:
    with stage.shown(terminal):
      stage.begin('compiling')
      deadline = time.monotonic() + 10
      while terminal.getvalue().count('compiling') < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
      root.warning('a message')
      stage.end()
      shown = terminal.getvalue()
      time.sleep(2 * stage.REFRESH_S)
      assert terminal.getvalue() == shown  # nothing after the end
  finally:
    root.removeHandler(other)
  assert shown.count('compiling') >= 2 and '\r\x1b[Ka message\n' in shown and shown.endswith('\r\x1b[K')
  assert '\n' not in shown.replace('a message\n', '') and not other.filters


def test_a_process_that_hides_its_stages_shows_no_more() -> None:
  stream = io.StringIO()
  with stage.shown(stream):
    stage.hide()
    stage.begin('compiling')
  assert stream.getvalue() == ''
