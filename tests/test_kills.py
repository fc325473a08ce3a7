"""A run that is killed twelve times ends with the bits of one that was not."""
from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import killing
import pytest
import runs


def kill(workdir: pathlib.Path, kills: int, seed: int) -> list[dict]:
  command = [sys.executable, str(killing.ROOT / 'tests' / 'killing.py'), str(workdir), str(kills), str(seed)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=1900)
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
  assert runs.losses(tmp_path / 'killed') == runs.losses(tmp_path / 'whole')
  got, want = runs.final(tmp_path / 'killed'), runs.final(tmp_path / 'whole')
  assert got['params_digest'] == want['params_digest'] and got['metrics'] == want['metrics']
