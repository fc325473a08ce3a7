"""The table of complete runs: core-days with and without collectives, and what a plan does not know."""
from __future__ import annotations

import json
import pathlib

import pytest

from benchmarks import tpu_runs

PLAN = {'config': 'vit_l16_jft', 'topology': 'v3:16x16', 'num_devices': 512, 'peak_gib_per_device': 1.768,
        'estimated_step_ms': 81.74, 'scheduled_step_ms': None, 'collectives_ms': 32.4, 'core_days': 1502.4,
        'core_days_with_collectives': 2101.2, 'paper_core_days': 680}


def test_the_table_has_core_days_with_and_without_collectives(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  for name, plan in (('b', PLAN), ('a', {**PLAN, 'config': 'other', 'paper_core_days': None})):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'plan.json').write_text(json.dumps(plan))
  assert tpu_runs.main([str(tmp_path)]) == 0
  rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in capsys.readouterr().out.splitlines()]
  assert rows[0] == list(tpu_runs.HEAD) and rows[2][0] == 'other' and rows[2][-1] == ''
  assert rows[3] == ['vit_l16_jft', 'v3:16x16, 512', '1.77', '81.7', '–', '32.4', '1,502', '2,101', '680']


def test_a_folder_that_is_not_there_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert tpu_runs.main([str(tmp_path / 'none')]) == 2
  assert 'usage: ' in capsys.readouterr().err
