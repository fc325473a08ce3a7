"""Progress: a bar on a terminal, lines elsewhere, and a terminal that is left as it was."""
from __future__ import annotations

import contextlib
import io
import logging
import sys

import pytest

from vit_jax.record import console
from vit_jax.record import progress as progress_lib


class Terminal(io.StringIO):
  """A stream that says it is a terminal."""

  def isatty(self) -> bool:
    return True


class Time:
  """Seconds that pass only when told to."""
  now = 0.

  def __call__(self) -> float:
    return self.now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '120')
  return Terminal()


def test_without_a_terminal_there_is_a_first_line_one_now_and_then_and_a_last_one() -> None:
  stream, time = io.StringIO(), Time()
  with progress_lib.Progress(50, start=0, shown=True, stream=stream, now=time) as progress:
    time.now = 100.  # what happens once, such as compiling, is not expected again
    for step in range(1, 42):
      time.now += 1.
      progress.update(step, {'train/loss': 1 / step, 'train/images_per_s': 1234.4, 'train/epoch': step / 4})
  lines = stream.getvalue().splitlines()
  assert [line.split()[1] for line in lines] == ['1/50', '11/50', '21/50', '31/50', '41/50']
  assert lines[0] == 'step 1/50  epoch 0.2  loss 1  1,234 images/s'
  assert lines[1] == 'step 11/50  epoch 2.8  loss 0.09091  1,234 images/s  39 s left'


def test_a_resumed_run_prints_lines_before_its_first_logged_loss() -> None:
  stream, time = io.StringIO(), Time()
  with progress_lib.Progress(60, start=20, shown=True, stream=stream, now=time) as progress:
    for step in range(21, 45):
      time.now += 1.
      progress.update(step, {'train/loss': .5} if step == 44 else {})
  lines = stream.getvalue().splitlines()
  assert lines == ['step 31/60  29 s left', 'step 41/60  19 s left', 'step 44/60  loss 0.5  16 s left']


def test_epoch_and_loss_are_of_the_step_that_is_shown_or_say_of_which() -> None:
  stream, time = io.StringIO(), Time()
  with progress_lib.Progress(60, start=0, shown=True, stream=stream, now=time) as progress:
    for step in range(1, 46):
      time.now += .5
      progress.update(step, {'train/loss': 1 / step, 'train/epoch': step / 15} if step % 20 == 1 else {})
      if step == 30:
        progress.update(step, {'val/top1': .5})
  lines = stream.getvalue().splitlines()
  assert lines[1] == 'step 21/60  epoch 1.4  loss 0.04762  20 s left'
  assert lines[2] == 'step 41/60  epoch 2.7  loss 0.02439  10 s left'
  assert lines[3] == 'step 45/60  epoch 3.0  loss 0.02439 (step 41)  8 s left'  # an interval ends, or the run


def test_other_units_are_counted_by_their_name() -> None:
  stream = io.StringIO()
  with progress_lib.Progress(340, start=0, shown=True, unit='images', stream=stream, now=Time()) as progress:
    progress.update(64, {'train/images_per_s': 120.})
  assert stream.getvalue() == '64 of 340 images  120 images/s\n'


def test_the_display_shows_speed_time_left_accuracy_and_memory(terminal: Terminal) -> None:
  time = Time()
  with progress_lib.Progress(60, start=0, shown=True, stream=terminal, now=time, memory=lambda: 1.26) as progress:
    assert terminal.getvalue() == ''  # until the first step, the stages of the start are shown
    progress.update(1, {'train/loss': 2., 'train/epoch': .1, 'train/images_per_s': 80.})
    progress.update(20, {'val/top1': .25, 'val/top1@ema': .5, 'val/nll': 3.})
    time.now = 19.
    progress.update(20, {})
  last = terminal.getvalue().split('20/60')[-1]
  assert '40 s left' in last and 'epoch 2.0  loss 2 (step 1)  80 images/s  val/top1@ema 50.0%  1.3 GiB' in last


def test_quiet_shows_no_progress(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('VIT_JAX_LOG', 'quiet')
  with progress_lib.Progress(9, start=0, shown=True, stream=terminal) as progress:
    progress.update(1, {'train/loss': 1.})
  assert terminal.getvalue() == ''


def test_the_last_line_is_not_said_twice() -> None:
  stream = io.StringIO()
  with progress_lib.Progress(1, start=0, shown=True, stream=stream, now=Time()) as progress:
    progress.update(1, {'train/loss': 1.})
  progress.close()
  assert stream.getvalue() == 'step 1/1  loss 1\n'


def test_nothing_is_shown_when_switched_off(terminal: Terminal) -> None:
  with contextlib.redirect_stdout(terminal), progress_lib.Progress(3, start=0, shown=False) as progress:
    progress.update(1, {'train/loss': 1.})
  assert terminal.getvalue() == ''


def test_the_terminal_is_given_back_after_an_error(terminal: Terminal) -> None:
  with contextlib.redirect_stdout(terminal):
    with pytest.raises(KeyError), progress_lib.Progress(9, start=2, shown=True) as progress:
      progress.update(3, {'train/loss': 1.25})
      assert sys.stdout is not terminal
      raise KeyError
    assert sys.stdout is terminal
  text = terminal.getvalue()
  assert 'loss 1.25' in text
  assert text.rindex('\x1b[?25h') > text.rindex('\x1b[?25l')  # the cursor is shown again


def test_what_is_printed_or_logged_appears_above_the_bar(terminal: Terminal) -> None:
  handler = console.Handler(0.)
  logging.getLogger().addHandler(handler)
  try:
    with (contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal),
          progress_lib.Progress(9, start=0, shown=True) as progress):
      progress.update(4, {'train/loss': .5})
      print('printed [brackets]')
      logging.getLogger('x').warning('logged')
  finally:
    logging.getLogger().removeHandler(handler)
  text = terminal.getvalue()
  assert 'printed [brackets]\n' in text and 'logged\n' in text
  assert text.rindex('4/9') > text.index('logged')  # drawn again below


@pytest.mark.parametrize(('seconds', 'text'), [
  (0., '0 s'), (59.4, '59 s'), (59.6, '1 min 00 s'), (3601., '1 h 00 min'), (90000., '1 d 1 h'),
  (float('nan'), '?'), (float('inf'), '?'), (-1., '?')])
def test_durations_are_said_in_two_units(seconds: float, text: str) -> None:
  assert progress_lib.format_duration(seconds) == text


@pytest.mark.parametrize(('active', 'bar'), [(True, False), (True, True), (False, True)])
def test_a_line_now_and_then_says_how_long_it_will_take(active: bool, bar: bool,
                                                        caplog: pytest.LogCaptureFixture) -> None:
  time = Time()
  with caplog.at_level(logging.INFO), progress_lib.TaskProgress('evals.knn (x)', 1_000, unit='images', bar=bar,
      active=active, now=time) as one:
    for second in range(1, 26):
      time.now = float(second)
      one.update(10 * second)
  assert [record.message for record in caplog.records] == ([
      'evals.knn (x): 100 of 1,000 images, 1 min 30 s left', 'evals.knn (x): 200 of 1,000 images, 1 min 20 s left',
  ] if active else [])


def test_a_terminal_on_which_nothing_else_draws_has_a_bar_with_the_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setattr(sys, 'stdout', Terminal())
  time = Time()
  with caplog.at_level(logging.INFO), progress_lib.TaskProgress('evals.knn (x)', 40, unit='images', bar=True,
      active=True, now=time) as one:
    time.now = 2.
    one.update(48)
  assert [record.message for record in caplog.records] == ['evals.knn (x): 40 images']
  assert '40/40' in (shown := sys.stdout.getvalue()) and '20 images/s' in shown


@pytest.mark.parametrize(('total', 'repeats', 'said'), [
    (1_000, 1, ['evals.probe (x): takes about 16 min 40 s, as 1,000 steps take 1 s each.']),
    (80, 2, ['evals.probe (x): takes about 2 min 40 s, as 160 steps take 1 s each.']), (80, 1, [])])
def test_a_long_task_says_so_once_its_speed_without_compilation_is_known(
    total: int, repeats: int, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
  time = Time()
  with caplog.at_level(logging.INFO), progress_lib.TaskProgress(
      'evals.probe (x)', total, unit='steps', bar=False, active=True, repeats=repeats, now=time) as one:
    for done, second in enumerate((4., 8., 8.5, 10.), 1):  # the first two include compilation
      time.now = second
      one.update(done)
      assert not caplog.records or done == 4
  assert [record.message for record in caplog.records if 'left' not in record.message] == said
