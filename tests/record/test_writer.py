"""The record of a run survives kills, resumes and numbers that JSON does not have."""
from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Mapping

import numpy as np
import pytest

from vit_jax.core.errors import UserError
from vit_jax.record import reader, run_directory
from vit_jax.record import writer as writer_lib
from vit_jax.record.trackers import Guarded


def make(workdir: pathlib.Path, *, resumed_from: int | None = None,
         process_index: int = 0) -> writer_lib.Writer:
  return writer_lib.Writer(workdir, process_index=process_index, resumed_from=resumed_from,
                           progress_total=100, progress=False)


def read_lines(workdir: pathlib.Path) -> list[dict[str, object]]:
  def refuse(word: str) -> float:
    raise AssertionError(f'{word} is not JSON')
  text = (workdir / 'metrics.jsonl').read_text()
  return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_rows_come_back_with_step_and_time(tmp_path: pathlib.Path) -> None:
  with make(tmp_path) as writer:
    writer.write(3, {'train/loss': 1.5, 'train/lr': .25})
    writer.write(3, {'test/top1': .5})
  run = reader.read(tmp_path)
  assert [row['step'] for row in run.rows] == [3, 3]
  assert run.rows[0]['train/loss'] == 1.5 and run.rows[0]['train/lr'] == .25
  assert run.rows[0]['time_s'] >= 0
  assert [e['event'] for e in run.events] == ['start']
  assert list(tmp_path.glob('events.*'))


def test_every_row_is_on_disk_at_once(tmp_path: pathlib.Path) -> None:
  with make(tmp_path) as writer:
    writer.write(1, {'a': 1.})
    assert read_lines(tmp_path)[-1]['a'] == 1.


def test_numbers_that_are_not_finite_are_text_in_the_file_and_numbers_again(tmp_path: pathlib.Path) -> None:
  with make(tmp_path) as writer:
    writer.write(1, {'a': math.nan, 'b': math.inf, 'c': -math.inf})
    writer.event('found', step=1, grad={'head/bias': np.array([1., np.nan])})
  line = read_lines(tmp_path)[1]
  assert (line['a'], line['b'], line['c']) == ('nan', 'inf', '-inf')
  run = reader.read(tmp_path)
  assert math.isnan(run.rows[0]['a']) and run.rows[0]['c'] == -math.inf
  assert run.events[1]['grad'] == {'head/bias': [1., 'nan']}


def test_other_processes_leave_no_trace(tmp_path: pathlib.Path) -> None:
  with make(tmp_path / 'run', process_index=1) as writer:
    writer.write(5, {'a': 1.})
    writer.write(1, {'a': 1.})
    writer.event('start')
    writer.advance(7)
  assert not (tmp_path / 'run').exists()


def test_a_step_backwards_is_refused_with_both_steps(tmp_path: pathlib.Path) -> None:
  with make(tmp_path) as writer:
    writer.write(7, {'a': 1.})
    with pytest.raises(ValueError, match='step 6 after those of step 7: steps must not go backwards'):
      writer.write(6, {'a': 1.})


def test_steps_before_the_resumed_one_are_refused(tmp_path: pathlib.Path) -> None:
  with make(tmp_path, resumed_from=40) as writer, pytest.raises(ValueError, match='step 39 after .* step 40'):
    writer.write(39, {'a': 1.})


def test_a_half_written_line_costs_only_itself(tmp_path: pathlib.Path) -> None:
  with make(tmp_path) as writer:
    writer.write(1, {'a': 1.})
  with open(tmp_path / 'metrics.jsonl', 'ab') as file:
    file.write(b'{"step": 2, "a": \xff')
  with make(tmp_path, resumed_from=1) as writer:
    writer.write(2, {'a': 2.})
  run = reader.read(tmp_path / 'metrics.jsonl')
  assert [(row['step'], row['a']) for row in run.rows] == [(1, 1.), (2, 2.)]
  assert run.num_broken == 1 and len(run.events) == 2  # the start that follows is on a line of its own


def test_lines_that_are_no_rows_are_counted_and_left_out(tmp_path: pathlib.Path) -> None:
  lines = ['[1]', '3', '{"a": 1}', '{"step": "x"}', '', '{"step": 4, "a": "what", "b": null, "c": 2}']
  (tmp_path / 'metrics.jsonl').write_text('\n'.join(lines))
  run = reader.read(tmp_path)
  assert run.rows == [{'step': 4., 'c': 2.}]
  assert run.num_broken == 4


def test_reading_drops_what_was_lost_and_done_again(tmp_path: pathlib.Path) -> None:
  with make(tmp_path) as writer:
    for step in (1, 2, 3, 4, 5):
      writer.write(step, {'a': 1.})
      writer.event('checkpoint', step=step, params_digest='x')
    writer.event('goodput', step=5, seconds={'step': 1.})
  with make(tmp_path, resumed_from=3) as writer:
    writer.write(4, {'a': 2.})
  run = reader.read(tmp_path)
  assert [(row['step'], row['a']) for row in run.rows] == [(1, 1.), (2, 1.), (3, 1.), (4, 2.)]
  assert [e.get('step') for e in run.events if e['event'] == 'checkpoint'] == [1, 2, 3]
  assert [e['event'] for e in run.events if e['event'] != 'checkpoint'] == ['start', 'goodput', 'start']
  assert run.lost_steps == 2


def test_a_fresh_start_loses_everything_before_it(tmp_path: pathlib.Path) -> None:
  for value in (1., 2.):
    with make(tmp_path) as writer:
      writer.write(1, {'a': value})
  run = reader.read(tmp_path)
  assert [row['a'] for row in run.rows] == [2.]
  assert run.lost_steps == 1


def test_time_goes_on_after_a_resume(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1, "time_s": 500.0}\n{"step": 2, "time_s": "nan"}\n')
  with make(tmp_path, resumed_from=1) as writer:
    writer.write(2, {'a': 1.})
  assert 500 <= reader.read(tmp_path).rows[-1]['time_s'] < 560


def test_the_callers_start_is_the_only_one_and_says_where_from(tmp_path: pathlib.Path) -> None:
  with make(tmp_path, resumed_from=4) as writer:
    writer.event('start', command=['a', 'b'], workdir=tmp_path)
    writer.write(5, {'a': 1.})
  starts = [e for e in reader.read(tmp_path).events if e['event'] == 'start']
  assert len(starts) == 1
  assert starts[0]['resumed_from'] == 4 and starts[0]['command'] == ['a', 'b']
  assert starts[0]['workdir'] == str(tmp_path)


def test_two_starts_within_a_second_have_event_files_of_their_own(tmp_path: pathlib.Path) -> None:
  for _ in range(2):
    make(tmp_path).close()
  assert len(list(tmp_path.glob('events.*'))) == 2


def test_a_value_that_cannot_be_recorded_is_named(tmp_path: pathlib.Path) -> None:
  with make(tmp_path) as writer, pytest.raises(TypeError, match='type object cannot be recorded'):
    writer.event('found', grad=object())


def test_reading_nothing_says_so(tmp_path: pathlib.Path) -> None:
  with pytest.raises(FileNotFoundError):
    reader.read(tmp_path)


class Kept:
  """A tracker that keeps what it is given."""

  def __init__(self) -> None:
    self.rows: list[tuple[int, dict[str, float]]] = []
    self.status = ''

  def write(self, step: int, values: Mapping[str, float]) -> None:
    self.rows.append((step, dict(values)))

  def images(self, step: int, values: object) -> None:
    raise OSError('no images')

  def histograms(self, step: int, values: object) -> None: ...

  def close(self, status: str) -> None:
    self.status = status


def tracked(workdir: pathlib.Path, kept: Kept) -> writer_lib.Writer:
  return writer_lib.Writer(workdir, process_index=0, resumed_from=None, progress_total=9, progress=False,
                           trackers=lambda folder: [Guarded('trackers.x', lambda: kept, background=False)])


def test_trackers_get_every_row_and_how_the_run_ended(tmp_path: pathlib.Path) -> None:
  kept, stopped, failed = Kept(), Kept(), Kept()
  with tracked(tmp_path / 'a', kept) as writer:
    writer.write(1, {'a': 1.})
  with tracked(tmp_path / 'b', stopped) as writer:
    writer.event('stop', step=1)
  with pytest.raises(ValueError, match='x'), tracked(tmp_path / 'c', failed):
    raise ValueError('x')
  assert kept.rows == [(1, {'a': 1.})] and not list(tmp_path.glob('*/events.*'))
  assert (kept.status, stopped.status, failed.status) == ('done', 'stopped', 'failed')


def test_the_record_continues_when_a_tracker_fails(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  kept = Kept()
  with tracked(tmp_path, kept) as writer:
    writer.write(1, {'a': 1.})
    writer.show(lambda tracker: tracker.images(1, {}))
    writer.write(2, {'a': 2.})
  assert [row['step'] for row in reader.read(tmp_path).rows] == [1, 2] and kept.rows == [(1, {'a': 1.})]
  assert caplog.text.count('no images') == 1


@pytest.mark.parametrize('how', ['moved', 'removed', 'replaced', 'a file'])
def test_a_directory_that_is_not_in_its_place_any_more_is_noticed(how: str, tmp_path: pathlib.Path) -> None:
  run = tmp_path / 'run'
  with make(run) as writer:
    writer.write(1, {'a': 1.})
    writer.check_not_moved()
    run.rename(tmp_path / 'other')
    if how == 'removed':
      shutil.rmtree(tmp_path / 'other')
    elif how == 'replaced':
      run.mkdir()
      (run / 'metrics.jsonl').write_text('{}\n')
    elif how == 'a file':
      run.write_text('')
    with pytest.raises(UserError, match=f'^--workdir={run}: expected the directory in which the run began, got '
                       f'{"another" if how == "replaced" else "none"}: .* with --workdir=DIR, where it is now'):
      writer.check_not_moved()


def test_names_of_files_need_not_be_text(tmp_path: pathlib.Path) -> None:
  """Reports and records name images, whose files may have names in any encoding."""
  name = os.fsdecode(b'caf\xe9.jpg')
  made = make(tmp_path)
  made.event('start', command=[name])
  made.close()
  row, = (json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text(encoding='utf-8').splitlines())
  assert row['command'] == [name]
  run_directory.write_text(tmp_path / 'report.html', f'<p>{name}</p>')
  assert (tmp_path / 'report.html').read_text(encoding='utf-8') == '<p>caf\\udce9.jpg</p>'


def test_times_of_the_record_do_not_follow_a_clock_that_is_set_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  clock = time.time
  for number in range(3):
    monkeypatch.setattr(time, 'time', lambda number=number: clock() - 1e6 * number)
    with make(tmp_path, resumed_from=number or None) as writer:
      writer.write(number + 1, {'a': 1.})
      monkeypatch.setattr(time, 'time', lambda number=number: clock() - 1e6 * (number + .5))
      writer.event('goodput', step=number + 1)
  times = [line['time_s'] for line in read_lines(tmp_path)]
  assert times == sorted(times) and 0 <= times[-1] < 60
