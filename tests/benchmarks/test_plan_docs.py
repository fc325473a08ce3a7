"""Plans of complete runs on their page and in the docstrings of configs."""
from __future__ import annotations

import ast
import json
import pathlib
from typing import Any

import pytest

from benchmarks import plan_docs

PLAN: dict[str, Any] = {
    'config': 'vit_l16_jft', 'topology': 'v3:16x16', 'num_devices': 512, 'peak_gib_per_device': 1.768, 'quick': False,
    'estimated_step_ms': 81.74, 'scheduled_step_ms': None, 'collectives_ms': 32.4, 'core_days': 1502.4,
    'core_days_with_collectives': 2101.2, 'paper_core_days': 680, 'mesh': {'data': 64, 'fsdp': 8, 'tensor': 1},
    'warnings': [], 'date': '2026-11-22'}
CONFIG = '''"""A run.

Run:      command
Plan:     plan command
          an old line
          another
Expected: a number.
"""
value = 1
'''


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
  """A repository with a page and two configs, and plans of one of them in `plans`."""
  for path, text in {plan_docs.PAGE: f'before\n{plan_docs.MARKS[0]}\nold\n{plan_docs.MARKS[1]}\nafter\n',
                     'configs/vit_l16_jft.py': CONFIG, 'configs/other.py': CONFIG}.items():
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
  for name, more in {'vit_l16_jft-v3_16_16': {}, 'vit_l16_jft-v3_16_16-quick': {'quick': True, 'config': 'hidden'},
                     'vit_l16_jft-v4_4_4_8-quick': {'quick': True, 'topology': 'v4:4x4x8', 'num_devices': 128,
                                                    'warnings': ['Too much is sent. See the table.']}}.items():
    (tmp_path / 'plans' / name).mkdir(parents=True)
    (tmp_path / 'plans' / name / 'plan.json').write_text(json.dumps({**PLAN, **more}))
  return tmp_path


def test_the_page_and_the_docstrings_get_the_plans_and_keep_everything_else(root: pathlib.Path) -> None:
  assert plan_docs.main([str(root / 'plans'), str(root)]) == 0
  page = (root / plan_docs.PAGE).read_text()
  assert page.startswith(f'before\n{plan_docs.MARKS[0]}\n| run') and page.endswith(f'{plan_docs.MARKS[1]}\nafter\n')
  rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in page.splitlines() if line.startswith('|')]
  assert rows[2] == ['vit_l16_jft', 'v3:16x16, 512', 'data=64 fsdp=8', '1.77', '81.7', '–', '32.4', '1,502', '2,101',
                     '680', '0', '2026-11-22']
  assert rows[3][1] == 'v4:4x4x8, 128' and rows[3][-2:] == ['1', '2026-11-22, quick'] and len(rows) == 4
  assert 'old' not in page and 'Quick rows are from programs of 2 and 4' in page
  assert (root / 'configs/other.py').read_text() == CONFIG
  text = (root / 'configs/vit_l16_jft.py').read_text()
  said = ast.get_docstring(ast.parse(text), clean=False) or ''
  assert 'Plan:     plan command\n          Compiled without' in said and 'an old line' not in said
  assert 'v3:16x16  data=64 fsdp=8  1.77' in said and 'Warning: v4:4x4x8: Too much is sent\nExpected: ' in said
  assert max(map(len, said.splitlines())) <= 120


def test_a_command_of_several_lines_is_kept(root: pathlib.Path) -> None:
  path = root / 'configs/vit_l16_jft.py'
  path.write_text(CONFIG.replace('plan command\n', 'plan command \\\n              --more\n'))
  assert plan_docs.main([str(root / 'plans'), str(root)]) == 0
  assert 'plan command \\\n              --more\n          Compiled without' in path.read_text()
  assert 'an old line' not in path.read_text()


def test_a_second_call_changes_nothing(root: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  plan_docs.main([str(root / 'plans'), str(root)])
  assert len(capsys.readouterr().out.splitlines()) == 2
  assert plan_docs.main([str(root / 'plans'), str(root)]) == 0 and not capsys.readouterr().out


def test_a_folder_without_plans_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert plan_docs.main([str(tmp_path)]) == 2 and 'usage: ' in capsys.readouterr().err
