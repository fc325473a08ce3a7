"""`benchmarks/plans.sh`: what it compiles, what it does not compile again, and what it refuses."""
from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / 'benchmarks' / 'plans.sh'
BASH = shutil.which('bash') or '/bin/bash'
PYTHON = f"""#!{BASH}
echo "$*" >> "$CALLS"
for word in "$@"; do
  case "$word" in
    --config=vit_h14_jft) exit 1 ;;
    --to=*) mkdir -p "${{word#*=}}"; echo '{{}}' > "${{word#*=}}/plan.json" ;;
  esac
done
"""


def run(tmp_path: pathlib.Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
  """Runs the script with a Python that writes down its calls; plans of H/14 fail."""
  python, calls = tmp_path / 'python', tmp_path / 'calls'
  python.write_text(PYTHON)
  python.chmod(0o755)
  calls.write_text('')
  done = subprocess.run([SCRIPT, tmp_path / 'out', f'--python={python}', *flags], text=True, capture_output=True,
                        check=False, env={'PATH': '/usr/bin:/bin', 'CALLS': str(calls)})
  return done, calls.read_text().splitlines()


def test_steps_are_compiled_with_the_rows_and_the_checkout_that_are_given(tmp_path: pathlib.Path) -> None:
  done, calls = run(tmp_path, '--parts=steps', '--only=v6e,L/16', '--big_vision=/checkout')
  assert done.returncode == 0, done.stderr
  assert calls == [f'-m benchmarks.tpu_tables {tmp_path}/out/steps --only=v6e,L/16 --big_vision=/checkout']


def test_runs_are_planned_once_and_one_that_fails_is_told(tmp_path: pathlib.Path) -> None:
  done, calls = run(tmp_path, '--parts=runs')
  assert done.returncode == 1 and done.stderr.count('vit_h14_jft on ') == 3
  assert len(calls) == 9 and calls[-1] == f'-m benchmarks.tpu_runs {tmp_path}/out/runs'
  assert '--config=vit_l16_jft --topology=v3:16x16' in calls[0] and '--quick' not in calls[0]
  assert f'{tmp_path}/out/runs/vit_l16_jft-v3_16_16' in calls[0]
  assert '--config=configs/vit_g14_jft3b.py:G/14 --topology=v5e:16x16' in calls[6]
  _, again = run(tmp_path, '--parts=runs')
  assert [('vit_h14_jft' in call) for call in again] == [True] * 3 + [False]


@pytest.mark.parametrize(('rows', 'planned'), [('22B', ['v4:8x8x8']), ('L/16@v5e,G/14', ['v5e:16x16', 'v5e:16x16'])])
def test_rows_are_selected_and_quick_plans_have_folders_of_their_own(tmp_path: pathlib.Path, rows: str,
                                                                     planned: list[str]) -> None:
  done, calls = run(tmp_path, '--parts=runs', f'--rows={rows}', '--quick', '--write')
  assert done.returncode == 0, done.stderr
  assert [word.partition('=')[2] for call in calls for word in call.split() if '--topology' in word] == planned
  assert all(' --quick' in call and '-quick ' in call for call in calls[:-2])
  assert calls[-1] == f'-m benchmarks.plan_docs {tmp_path}/out/runs'
  _, complete = run(tmp_path, '--parts=runs', f'--rows={rows}')
  assert len(complete) == len(planned) + 1 and '--quick' not in complete[0]


@pytest.mark.parametrize(('flag', 'said'), [('--parts=step', 'expected some of steps,runs, got step'),
                                            ('--part=steps', '--part=steps: no such flag; see --help'),
                                            ('--rows=L/17', 'G/14@v5e,H/14'), ('--rows=L/16@v9', 'got L/16@v9')])
def test_wrong_input_is_refused(tmp_path: pathlib.Path, flag: str, said: str) -> None:
  done, calls = run(tmp_path, flag)
  assert done.returncode == 2 and said in done.stderr and not calls
