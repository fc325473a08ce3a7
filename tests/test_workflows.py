"""The workflows of the repository run commands that exist, on versions of Python that the package takes."""
from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vit_jax import main

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / '.github' / 'workflows').glob('*.yml')}
COMMANDS = [(f'{name}/{job}', step['run']) for name, flow in WORKFLOWS.items() for job, one in flow['jobs'].items()
            for step in one['steps'] if 'run' in step]


def test_there_are_a_workflow_for_each_change_one_for_each_night_and_one_for_the_site() -> None:
  assert set(WORKFLOWS) == {'test', 'nightly', 'site'}
  assert WORKFLOWS['site']['jobs']['deploy']['permissions'] == {'contents': 'write'}  # its branch; no other writes
  assert {'tests', 'docs'} == set(WORKFLOWS['test']['jobs'])
  assert {'slow', 'lowest', 'plans', 'gpu_rehearsal', 'macos'} == set(WORKFLOWS['nightly']['jobs'])
  for flow in WORKFLOWS.values():
    assert flow['permissions'] == {'contents': 'read'}
    assert all(one['timeout-minutes'] <= 180 for one in flow['jobs'].values())


@pytest.mark.parametrize(('where', 'command'), COMMANDS)
def test_a_step_runs_a_command_that_exists(where: str, command: str) -> None:
  program, *words = shlex.split(command)
  match program:
    case 'bash':
      assert (ROOT / words[0]).is_file()
    case 'vit-jax':
      main.parse(words)
    case 'pip':
      extras = re.search(r'\.\[(\w+)]', command)
      assert extras is None or extras[1] in (metadata.metadata('vit-jax').get_all('Provides-Extra') or ())
    case 'git':
      assert words[0] == 'config'
    case _:
      assert program == 'mkdocs' and (ROOT / words[words.index('-f') + 1]).is_file()


def test_the_versions_of_python_are_those_of_the_package() -> None:
  versions = WORKFLOWS['test']['jobs']['tests']['strategy']['matrix']['python']
  assert versions == ['3.11', '3.12', '3.13']
  assert f'/badge/python-{"%20%7C%20".join(versions)}-blue' in (ROOT / 'README.md').read_text()
  assert metadata.metadata('vit-jax')['Requires-Python'] == '>=3.11'


def test_badges_show_the_workflow_of_the_tests_and_the_license_of_the_package() -> None:
  readme = (ROOT / 'README.md').read_text()
  (workflow,) = re.findall(r'actions/workflows/(\w+)\.yml/badge\.svg', readme)
  assert 'bash launch/test.sh' in {command for where, command in COMMANDS if where.startswith(f'{workflow}/')}
  assert f'/badge/license-{metadata.metadata("vit-jax")["License"].replace("-", "--")}-blue' in readme


def test_forms_for_issues_are_complete() -> None:
  forms = [*(ROOT / '.github' / 'ISSUE_TEMPLATE').glob('*.yml')]
  assert forms
  for path in forms:
    form = yaml.safe_load(path.read_text())
    assert form['name'] and form['description'] and form['labels'], path
    names = [one['id'] for one in form['body']]
    assert len(names) == len(set(names)) and all(one['attributes']['label'] for one in form['body']), path


def test_the_constraints_pin_every_dependency_within_its_bounds() -> None:
  pins = dict(line.split('==') for line in (ROOT / 'launch' / 'constraints.txt').read_text().splitlines()
              if not line.startswith('#'))
  named = {canonicalize_name(name): version for name, version in pins.items()}
  needed = [Requirement(text) for text in metadata.requires('vit-jax') or ()
            if 'extra' not in text or "extra == 'test'" in text.replace('"', "'")]
  needed = [one for one in needed if one.marker is None or one.marker.evaluate({'extra': 'test'})]
  assert len(needed) > 30
  wrong = [str(one) for one in needed if not one.specifier.contains(named.get(canonicalize_name(one.name), '0'))]
  assert not wrong


@pytest.mark.slow(reason='resolves all dependencies, over the network')
def test_the_constraints_can_be_installed() -> None:
  if sys.version_info[:2] != (3, 11):
    pytest.skip('the versions are those for Python 3.11')
  pip = [sys.executable, '-m', 'pip', 'install', '--dry-run', '--ignore-installed', '--quiet', '--retries=0']
  if subprocess.run([*pip, '--no-deps', 'absl-py'], check=False).returncode:
    pytest.skip('needs a network with a package index')
  done = subprocess.run([*pip, '-c', 'launch/constraints.txt', '.[test]'], cwd=ROOT, capture_output=True, text=True,
                        check=False)
  assert done.returncode == 0, done.stderr
