"""Records of any length are read in little memory, and their ends without the rest."""
from __future__ import annotations

import json
import pathlib

import pytest

from vit_jax.record import reader

GOODPUT = {'step': 1., 'compile': 2.}


def write(path: pathlib.Path, entries: list[dict[str, object]]) -> None:
  (path / 'metrics.jsonl').write_text(''.join(json.dumps(entry) + '\n' for entry in entries))


def record(steps: range, *, resumed_from: int | None = None, evaluated: int = 10,
           kinds: tuple[str, ...] = ('goodput',)) -> list[dict[str, object]]:
  """A start with a row and events of these kinds for each step, and an evaluation at each multiple of `evaluated`."""
  found: list[dict[str, object]] = [{'event': 'start', 'time_s': 0., 'resumed_from': resumed_from}]
  for step in steps:
    found += [{'step': step, 'time_s': float(step), 'train/loss': 1. / step, 'train/lr': 'nan'},
              *({'event': kind, 'time_s': float(step), 'step': step, 'seconds': GOODPUT} for kind in kinds)]
    if step % evaluated == 0:
      found.append({'step': step, 'time_s': float(step), 'test/top1': .5})
  return found


def test_rows_of_training_are_thinned_evenly_and_evaluations_are_complete(tmp_path: pathlib.Path) -> None:
  write(tmp_path, record(range(1, 1001), kinds=('goodput', 'hosts')))
  full, thin = reader.read(tmp_path), reader.read(tmp_path, most_rows=50)
  assert full.stride == 1 and len(full.rows) == 1100
  steps = [int(row['step']) for row in thin.rows if 'train/loss' in row]
  assert thin.stride == 16 and 50 <= len(steps) <= 101
  assert steps == [*range(1, 1001, 16), 1000][:len(steps)] and steps[-1] == 1000  # the last one is always read
  assert [row['step'] for row in thin.rows if 'test/top1' in row] == list(range(10, 1001, 10))
  by_step = {row['step']: row for row in full.rows if 'train/loss' in row}
  assert all(row['train/loss'] == by_step[row['step']]['train/loss'] for row in thin.rows if 'train/loss' in row)
  for kind in ('goodput', 'hosts'):
    found = [e['step'] for e in thin.events if e['event'] == kind]
    assert len(found) <= 101 and found[-1] == 1000, kind


def test_lost_steps_are_the_same_in_a_thinned_record(tmp_path: pathlib.Path) -> None:
  write(tmp_path, record(range(1, 701)) + record(range(401, 1001), resumed_from=400))
  full, thin = reader.read(tmp_path), reader.read(tmp_path, most_rows=20)
  assert thin.lost_steps == full.lost_steps == 300 and thin.stride > 1
  steps = [row['step'] for row in thin.rows]
  assert steps == sorted(steps) and len(thin.rows) < 150
  assert [row['step'] for row in thin.rows if 'test/top1' in row] == list(range(10, 1001, 10))


def test_incomplete_and_foreign_lines_are_never_skipped_unseen(tmp_path: pathlib.Path) -> None:
  write(tmp_path, record(range(1, 201)))
  with open(tmp_path / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 201, "train/loss": \n{"step": 202, "train/loss": 1.0, "time_s": 3}\n{"step": 203, "tr')
  found = reader.read(tmp_path, most_rows=5)
  assert found.num_broken == 2 and found.rows[-1]['step'] == 202


@pytest.mark.parametrize('block', [7, 100, 2**18])
def test_the_end_has_what_was_done_since_a_step(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                                block: int) -> None:
  monkeypatch.setattr(reader, '_BLOCK_BYTES', block)
  write(tmp_path, record(range(1, 501)) + [{'event': 'checkpoint', 'step': 500, 'note': 'ä' * 20}])
  found = reader.read_end(tmp_path, since=490)
  assert found[0] == {'event': 'start'}
  assert [e['step'] for e in found[1:]] == [*range(490, 501), 500] and found[-1]['note'] == 'ä' * 20
  assert reader.last_time_s(str(tmp_path / 'metrics.jsonl')) == 500.
  complete = reader.read_end(tmp_path, since=0)
  assert complete[0]['time_s'] == 0. and len(complete) == 502


def test_the_end_is_that_of_the_last_start(tmp_path: pathlib.Path) -> None:
  write(tmp_path, record(range(1, 51)) + record(range(41, 46), resumed_from=40))
  found = reader.read_end(tmp_path, since=40)
  assert found[0]['resumed_from'] == 40 and [e['step'] for e in found[1:]] == [41, 42, 43, 44, 45]


def test_a_record_without_a_time_begins_at_zero(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'metrics.jsonl').write_text('\n[1]\n{"step": 3}\n')
  assert reader.last_time_s(str(tmp_path / 'metrics.jsonl')) == 0.


def test_a_line_without_an_end_takes_little_memory(tmp_path: pathlib.Path) -> None:
  write(tmp_path, [{'step': 1, 'time_s': 2., 'train/loss': 1.}])
  with open(tmp_path / reader.FILE, 'r+b') as file:
    file.truncate(2**28)
  found = reader.read(tmp_path)
  assert [row['step'] for row in found.rows] == [1.] and found.num_broken
  assert reader.last_time_s(str(tmp_path / reader.FILE)) == 2.
