"""The launch scripts: which Python is taken, what is said when there is none, what is installed when."""
from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = [*sorted((ROOT / 'launch').rglob('*.sh')), *sorted((ROOT / 'benchmarks').glob('*.sh')),
           ROOT / '.ci' / 'run']
BASH = shutil.which('bash') or '/bin/bash'
TOOLS = ('dirname', 'cat', 'cksum', 'mkdir')


def run_bash(code: str, *, path: pathlib.Path, **env: str) -> subprocess.CompletedProcess[str]:
  """Runs bash code after sourcing setup_env.sh, with nothing on PATH but `path` and basic tools."""
  for tool in TOOLS:
    link = path / tool
    if not link.exists():
      link.symlink_to(shutil.which(tool) or tool)
  return subprocess.run([BASH, '-c', f'set -euo pipefail; source "{ROOT}/launch/setup_env.sh"; {code}'],
                        env={'PATH': str(path), **env}, capture_output=True, text=True, check=False)


def write_python(folder: pathlib.Path, name: str, body: str) -> None:
  folder.mkdir(exist_ok=True)
  script = folder / name
  script.write_text(f'#!{BASH}\n{body}\n')
  script.chmod(0o755)


def fake_python(*, version: tuple[int, int], has_venv: bool = True) -> str:
  """The body of a script that behaves like a Python of that version."""
  prelude = f'import sys; sys.version_info = {(*version, 0)!r}; sys.executable = sys.argv.pop(1)'
  broken = '' if has_venv else '; sys.modules["ensurepip"] = None'
  return f'[ "$1" = -c ] && exec "{sys.executable}" -c \'{prelude}{broken}\n\'"$2" "$0"'


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: pathlib.Path) -> None:
  subprocess.run([BASH, '-n', script], check=True)


@pytest.mark.skipif(not shutil.which('shellcheck'), reason='shellcheck is not installed')
def test_shellcheck_finds_nothing() -> None:
  found = subprocess.run(['shellcheck', '-x', *SCRIPTS], cwd=ROOT, capture_output=True, text=True,
                         check=False)
  assert found.returncode == 0, found.stdout


def test_a_shim_that_fails_and_a_python_too_old_are_passed_over(tmp_path: pathlib.Path) -> None:
  write_python(tmp_path, 'python3.12', 'echo "shim: python3.12: command not found" >&2; exit 127')
  write_python(tmp_path, 'python3.11', fake_python(version=(3, 10)))
  write_python(tmp_path, 'python3', fake_python(version=(3, 11)))
  found = run_bash('find_python', path=tmp_path)
  assert found.stdout == f'{tmp_path}/python3\n', found.stderr
  assert found.stderr == ''


def test_a_python_without_venv_is_passed_over_for_one_with_it(tmp_path: pathlib.Path) -> None:
  write_python(tmp_path, 'python3.12', fake_python(version=(3, 12), has_venv=False))
  write_python(tmp_path, 'python', fake_python(version=(3, 13)))
  assert run_bash('find_python', path=tmp_path).stdout == f'{tmp_path}/python\n'


def test_a_python_that_lacks_venv_is_told_with_what_to_install(tmp_path: pathlib.Path) -> None:
  write_python(tmp_path, 'python3', fake_python(version=(3, 11), has_venv=False))
  found = run_bash('find_python', path=tmp_path)
  assert found.returncode == 1 and found.stdout == ''
  assert f'{tmp_path}/python3 runs, but has no venv or ensurepip' in found.stderr
  assert 'apt-get install python3-venv' in found.stderr


def test_no_python_is_told_with_what_was_tried(tmp_path: pathlib.Path) -> None:
  found = run_bash('find_python', path=tmp_path)
  assert found.returncode == 1
  tried = 'python3.12 python3.11 python3.13 python3 python'
  assert f'No Python >= 3.11 that runs; tried: {tried}.' in found.stderr


def test_a_named_python_is_the_only_candidate(tmp_path: pathlib.Path) -> None:
  write_python(tmp_path, 'python3.12', fake_python(version=(3, 12)))
  write_python(tmp_path / 'my tools', 'mine', fake_python(version=(3, 11)))
  found = run_bash('find_python', path=tmp_path, PYTHON=f'{tmp_path}/my tools/mine')
  assert found.stdout == f'{tmp_path}/my tools/mine\n'
  found = run_bash('find_python', path=tmp_path, PYTHON=f'{tmp_path}/none')
  assert f'tried: {tmp_path}/none.' in found.stderr


def test_setting_up_stops_where_there_is_no_python(tmp_path: pathlib.Path) -> None:
  found = run_bash(f'VENV={tmp_path}/venv; setup_env test; echo went on', path=tmp_path)
  assert found.returncode == 1 and 'went on' not in found.stdout


def test_installing_is_done_again_only_when_the_project_changed(tmp_path: pathlib.Path) -> None:
  root, venv = tmp_path / 'my root', tmp_path / 'venv'
  (venv / 'bin').mkdir(parents=True)
  root.mkdir()
  write_python(venv / 'bin', 'python', f'echo "$*" >> {tmp_path}/calls')
  for name in ('setup.py', 'pyproject.toml'):
    (root / name).write_text('1')

  def install(extra: str) -> list[str]:
    (tmp_path / 'calls').write_text('')
    found = run_bash(f'ROOT="{root}"; VENV="{venv}"; install_project {extra}', path=tmp_path)
    assert found.returncode == 0, found.stderr
    return (tmp_path / 'calls').read_text().splitlines()

  assert install('test') == [
    f'-m pip install --disable-pip-version-check --progress-bar off --editable {root}[test]']
  assert install('test') == []
  assert install('""') == []  # the extra came with the project itself
  (root / 'setup.py').write_text('2')
  assert len(install('""')) == 1
  assert len(install('test')) == 1


def test_installing_says_what_it_is_at_and_keeps_the_rest_for_a_failure(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'bin').mkdir()
  said = ('Collecting jax>=0.10 (from x)\n  Downloading jax.whl (3 MB)\nProcessing /a/flax-0.12-py3.whl (from x)\n'
          'Installing collected packages: a')
  write_python(tmp_path / 'bin', 'python', f"echo '{said}'; exit 0")
  found = run_bash(f'VENV={tmp_path}; install_project', path=tmp_path)
  assert found.returncode == 0 and found.stderr == ''
  assert 'Getting: jax flax\nUnpacking these; a minute or two …\n' in found.stdout
  (tmp_path / 'installed').unlink()
  write_python(tmp_path / 'bin', 'python', f"echo '{said}'; echo 'ERROR: no room' >&2; exit 1")
  found = run_bash(f'VENV={tmp_path}; install_project', path=tmp_path)
  assert found.returncode != 0 and 'Downloading jax.whl (3 MB)' in found.stderr and 'ERROR: no room' in found.stderr
  assert not (tmp_path / 'installed').exists()


def test_a_failed_install_is_tried_again(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'bin').mkdir()
  write_python(tmp_path / 'bin', 'python', 'exit 1')
  found = run_bash(f'VENV={tmp_path}; install_project', path=tmp_path)
  assert found.returncode != 0
  assert not (tmp_path / 'installed').exists()


@pytest.mark.skipif(os.name != 'posix', reason='scripts are for POSIX systems')
def test_scripts_that_are_run_are_executable() -> None:
  sourced = ('setup_env.sh', 'check.sh', 'flags.sh', 'statuses.sh')
  for script in SCRIPTS:
    assert os.access(script, os.X_OK) == (script.name not in sourced), script


def test_configs_are_a_package_for_editable_installs_find_them_by_it() -> None:
  assert (ROOT / 'configs' / '__init__.py').exists(), (
    'configs/ needs an __init__.py: setuptools maps a folder without one only in regular installs')
