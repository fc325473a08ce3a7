"""A run that is killed many times ends with the bits of one that was not."""
from __future__ import annotations

import collections
import json
import pathlib
import subprocess
import sys

import killing
import pytest
import runs


def kill(workdir: pathlib.Path, kills: int, seed: int, *how: str) -> list[dict]:
  command = [sys.executable, str(killing.ROOT / 'tests' / 'killing.py'), str(workdir), str(kills), str(seed), *how]
  done = subprocess.run(command, capture_output=True, text=True, timeout=3500)
  output = workdir.with_name(f'{workdir.name}.txt').read_text()
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + output[-3000:]
  assert 'Traceback' not in output and 'damaged' not in output, output[-3000:]
  return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(2000)
@pytest.mark.slow(reason='about 3 min: 14 starts')
def test_twelve_kills_at_random_moments_leave_the_bits_as_they_are(tmp_path: pathlib.Path) -> None:
  """Four at any moment of a start, four as a save begins, four after one."""
  assert kill(tmp_path / 'whole', 0, 0) == []
  killed = kill(tmp_path / 'killed', 12, 1)
  assert len(killed) == 12 and all(one['status'] is None for one in killed)
  in_saves = sum(any('tmp' in name for name in one['left']) for one in killed)
  resumed = [e['resumed_from'] for e in runs.events(tmp_path / 'killed', 'start')]
  assert in_saves >= 3 and len(set(resumed)) >= 5, (in_saves, resumed)
  check_same(tmp_path)


def check_same(folder: pathlib.Path) -> None:
  """The killed run has every loss, the final parameters and the metrics of the whole one."""
  assert runs.losses(folder / 'killed') == runs.losses(folder / 'whole')
  got, want = runs.final(folder / 'killed'), runs.final(folder / 'whole')
  assert got['params_digest'] == want['params_digest'] and got['metrics'] == want['metrics']


@pytest.mark.timeout(7200)
@pytest.mark.slow(reason='about 20 min: 62 starts')
def test_sixty_kills_in_steps_saves_evaluations_and_at_the_end_leave_the_bits_as_they_are(
    tmp_path: pathlib.Path) -> None:
  """The record of the run decides the moments; most kills are in training steps and in saves."""
  assert kill(tmp_path / 'whole', 0, 0, 'placed') == []
  killed = [one for one in kill(tmp_path / 'killed', 60, 7, 'placed') if one['status'] is None]
  counts = collections.Counter(one['in'] for one in killed)
  (tmp_path / 'outcomes.json').write_text(json.dumps(killed))
  assert len(killed) == 60 and counts['step'] >= 15 and counts['save'] >= 15 and counts['evaluation'] >= 4, counts
  assert counts['step'] + counts['save'] > 30 and sum(one['moment'] == 'end' for one in killed) >= 6, counts
  check_same(tmp_path)
