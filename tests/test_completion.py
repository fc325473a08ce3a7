"""Shell completion: what the shells offer at each place of a command line."""
from __future__ import annotations

import functools
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from vit_jax import completion, main
from vit_jax.commands import JOBS
from vit_jax.core.errors import UserError

TRY = """
COMP_LINE="$1"; COMP_POINT=${#1}; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1))
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
_vit_jax; printf '%s\\n' "${COMPREPLY[@]}"
"""


@functools.cache
def script(shell: str) -> str:
  return subprocess.run([sys.executable, '-m', 'vit_jax.main', 'completion', shell], capture_output=True, text=True,
                        check=True).stdout


def complete(line: str, folder: pathlib.Path) -> list[str]:
  """What follows `line`, whose words are split as bash does."""
  words = line.replace('=', ' = ').split(' ')
  words = [word for word in words[:-1] if word] + words[-1:] if not line.endswith('=') else line.replace(
      '=', ' = ').split()
  done = subprocess.run(['bash', '-c', f'{script("bash")}{TRY}', 'bash', line, *words], cwd=folder,
                        capture_output=True, text=True, check=True)
  return done.stdout.split()


@pytest.mark.parametrize(('line', 'offered'), [
    ('vit-jax pre', ['pretrain', 'predict', 'prepare']),
    ('vit-jax predict --to', ['--tokenizer', '--top', '--to']),
    ('vit-jax predict --ov', ['--overlay', '--overwrite']),
    ('vit-jax predict --view=', ['student', 'ema', 'teacher']),
    ('vit-jax predict --view=e', ['ema']),
    ('vit-jax predict --view e', ['ema']),
    ('vit-jax train --config=vit_l16_j', ['vit_l16_jft']),
    ('vit-jax predict --weights=a', ['a.npz']),
    ('vit-jax predict --weights=b --view=t', ['teacher']),
    ('vit-jax predict a', ['a.npz']),
    ('vit-jax list --format=m', ['markdown']),
])
def test_bash_offers_jobs_flags_choices_configs_and_files(
    line: str, offered: list[str], tmp_path: pathlib.Path) -> None:
  (tmp_path / 'a.npz').touch()
  assert complete(line, tmp_path) == offered


def test_each_job_offers_its_own_flags(tmp_path: pathlib.Path) -> None:
  for name, job in JOBS.items():
    assert {word.strip('-') for word in complete(f'vit-jax {name} --', tmp_path)} >= {*job.flags}


def test_the_script_is_printed_for_known_shells_only() -> None:
  assert main.run(['completion', 'tcsh']) == 2
  with pytest.raises(UserError, match='completion: expected bash, zsh or fish, got tcsh'):
    completion.run(['tcsh'])


@pytest.mark.parametrize('shell', completion.SHELLS)
def test_a_script_has_every_job_and_flag(shell: str) -> None:
  words = set(re.findall(r'\w+', script(shell)))
  assert {*JOBS, *(flag for job in JOBS.values() for flag in job.flags)} <= words
  assert shell != 'zsh' or '"*--view=[' in script(shell)


@pytest.mark.skipif(not shutil.which('fish'), reason='fish is not installed')
@pytest.mark.parametrize(('line', 'offered'), [
    ('vit-jax pre', ['predict', 'prepare', 'pretrain']), ('vit-jax predict --view=', [
        '--view=ema', '--view=student', '--view=teacher']), ('vit-jax train --config=vit_l16_j', [
            '--config=vit_l16_jft'])])
def test_fish_offers_jobs_choices_and_configs(line: str, offered: list[str], tmp_path: pathlib.Path) -> None:
  done = subprocess.run(['fish', '--no-config', '-c', 'source $argv[2]; complete -C $argv[1]', line, '-'],
                        cwd=tmp_path, input=script('fish'), capture_output=True, text=True, check=True)
  assert [word.split('\t')[0] for word in done.stdout.splitlines()] == offered and not done.stderr
