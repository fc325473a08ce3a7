"""Messages: their time, their level, and how many of them -q and -v show."""
from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time

import pytest

from vit_jax.core.errors import UserError
from vit_jax.record import console


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def formatted(text: str, level: int = logging.INFO, *, now: float = 9.44) -> str:
  record = logging.LogRecord('vit_jax', level, 'a.py', 1, text, None, None)
  return console.Handler(100., now=lambda: 100. + now).format(record)


def test_a_message_begins_with_the_time_and_a_problem_with_its_level() -> None:
  assert formatted('one\n  two') == '  9.4 s  one\n           two'
  assert formatted('odd', logging.WARNING) == '  9.4 s  warning: odd'
  assert formatted('bad', logging.ERROR, now=3661.) == '1:01:01  error: bad'
  assert [len(console.elapsed(s)) for s in (0., 9.96, 999.9, 1000., 35_999.)] == [7] * 5


def test_messages_of_other_processes_of_a_run_name_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(console, '_host', '')
  console.name_host(3)
  assert formatted('odd\nso', logging.WARNING) == '  9.4 s  host 3: warning: odd\n         so'


def test_a_loader_process_writes_as_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
  own = logging.getLogger('vit_jax')
  monkeypatch.setattr(own, 'handlers', [])
  monkeypatch.setattr(own, 'propagate', True)
  monkeypatch.setattr(console, '_host', '')
  console.follow_parent((time.monotonic() - 100., 'host 3: '))
  logging.getLogger('vit_jax.storage').warning('tried again')
  assert capsys.readouterr().err.endswith(' s  host 3: warning: tried again\n')
  assert console.message_form()[1] == 'host 3: '


def test_a_terminal_gets_lines_of_its_width_and_a_file_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
  text = ' '.join(['word'] * 40)
  assert '\n' not in formatted(text)
  monkeypatch.setenv('COLUMNS', '80')
  monkeypatch.setattr(sys, 'stderr', Terminal())
  lines = formatted(f'short\n{text}').split('\n')
  assert lines[0] == '  9.4 s  short' and len(lines) > 3 and all(len(line) < 80 for line in lines)
  assert ' '.join(' '.join(lines[1:]).split()) == text and lines[2].startswith(' ' * 11 + 'word')
  path = '/' + 'a' * 90
  assert path in formatted(f'see {path}')


@pytest.mark.parametrize(('words', 'level', 'is_talking'), [
    ([], logging.INFO, True), (['-q'], logging.WARNING, False), (['--quiet', '-q'], logging.WARNING, False),
    (['--verbose'], logging.DEBUG, True)])
def test_switches_are_taken_from_the_command_line_and_hold_for_its_job(
    words: list[str], level: int, is_talking: bool) -> None:
  rest, how = console.split_switches(['train', *words, '--config=digits'])
  before = dict(os.environ)
  with console.verbosity_set(how):
    assert (console.level(), console.is_talking()) == (level, is_talking)
    assert (os.environ.get('VIT_JAX_TRACEBACK') == '1') == (level == logging.DEBUG)
    stream = io.StringIO()
    with console.stages_shown(stream, now=lambda: 0.):
      console.begin_stage('compiling')
    assert stream.getvalue() == ('  0.0 s  compiling …\n' if is_talking else '')
  assert rest == ['train', '--config=digits'] and dict(os.environ) == before


def test_both_switches_are_refused() -> None:
  with pytest.raises(UserError, match='-q, -v: expected one of them, got both'):
    console.split_switches(['-q', '--verbose'])


def test_each_stage_is_a_line_with_the_seconds_since_the_start() -> None:
  stream, now = io.StringIO(), iter([100., 100.2, 103.46])
  with console.stages_shown(stream, now=lambda: next(now)):
    console.begin_stage('importing jax')
    console.begin_stage('opening the data')
    console.end_stage()
  console.begin_stage('nobody sees this')
  assert stream.getvalue() == '  0.2 s  importing jax …\n  3.5 s  opening the data …\n'


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
  monkeypatch.setenv('TERM', 'xterm')
  return Terminal()


def test_on_a_terminal_there_is_one_live_line_that_makes_room_for_messages(terminal: Terminal) -> None:
  now, handler = [100.], console.Handler(100., now=lambda: 101.)
  with contextlib.redirect_stderr(terminal), console.stages_shown(now=lambda: now[0]):
    console.begin_stage('compiling')
    now[0] = 103.
    deadline = time.monotonic() + 10
    while '3.0 s  compiling' not in terminal.getvalue() and time.monotonic() < deadline:
      time.sleep(0.01)  # until the line shows the new time
    handler.handle(logging.LogRecord('vit_jax', logging.INFO, 'a.py', 1, 'a message', None, None))
    console.end_stage()
    shown = terminal.getvalue()
    time.sleep(0.6)
    assert terminal.getvalue() == shown  # nothing after the end
  assert '  0.0 s  compiling …\r\x1b[2K  3.0 s  compiling …' in shown
  assert '\r\x1b[2K  1.0 s  a message\n  3.0 s  compiling …' in shown and shown.rstrip('\r').endswith('\x1b[2K')
  assert shown.rindex('\x1b[?25h') > shown.rindex('\x1b[?25l')  # the cursor is visible


def test_the_cursor_is_visible_while_a_line_is_live_since_a_kill_would_leave_it_hidden(terminal: Terminal) -> None:
  with contextlib.redirect_stderr(terminal), console.stages_shown():
    console.begin_stage('compiling')
    shown = terminal.getvalue()
    assert shown.rindex('\x1b[?25h') > shown.rindex('\x1b[?25l')


@pytest.mark.parametrize('term', ['dumb', 'unknown'])
def test_a_terminal_that_cannot_clear_a_line_gets_lines(
    terminal: Terminal, term: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('TERM', term)
  with contextlib.redirect_stderr(terminal), console.stages_shown(now=lambda: 0.):
    console.begin_stage('compiling')
  assert terminal.getvalue() == '  0.0 s  compiling …\n'


def test_results_that_go_to_a_file_do_not_pass_through_the_live_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
  file = io.StringIO()
  monkeypatch.setattr(sys, 'stdout', file)
  with contextlib.redirect_stderr(terminal), console.stages_shown():
    console.begin_stage('compiling')
    print('a result')
  assert file.getvalue() == 'a result\n' and 'a result' not in terminal.getvalue()


def test_a_process_that_hides_its_stages_shows_no_more() -> None:
  stream = io.StringIO()
  with console.stages_shown(stream):
    console.hide_stages()
    console.begin_stage('compiling')
  assert stream.getvalue() == ''
