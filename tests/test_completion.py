"""Shell completion: what bash offers at each place of a command line."""
from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from vit_jax import completion, main
from vit_jax.commands import JOBS
from vit_jax.core.errors import UserError

TRY = """
COMP_LINE="$1"; COMP_POINT=${#1}; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1))
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
_vit_jax; printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete(line: str, folder: pathlib.Path) -> list[str]:
  """What follows `line`, whose words are split as bash does."""
  words = line.replace('=', ' = ').split(' ')
  words = [word for word in words[:-1] if word] + words[-1:]
  done = subprocess.run(['bash', '-c', f'{completion.script("bash")}{TRY}', 'bash', line, *words], cwd=folder,
                        capture_output=True, text=True, check=True)
  return done.stdout.split()


def fish_complete(line: str, folder: pathlib.Path) -> list[str]:
  """The completions of `line` in fish, each with its description after a tab."""
  done = subprocess.run(['fish', '--no-config', '-c', 'source $argv[2]; complete -C $argv[1]', line, '-'], cwd=folder,
                        input=completion.fish(), capture_output=True, text=True, check=True)
  assert not done.stderr
  return done.stdout.splitlines()


@pytest.mark.parametrize(('line', 'offered'), [
    ('vit-jax pre', ['pretrain', 'predict', 'prepare']),
    ('vit-jax predict --to', ['--tokenizer=', '--top=', '--to=']),
    ('vit-jax predict --ov', ['--overlay']),
    ('vit-jax --conf', ['--config=']),
    ('vit-jax predict --view=', ['student', 'ema', 'teacher']),
    ('vit-jax --job=predict --view=e', ['ema']),
    ('vit-jax --config=vit_l16_j', ['vit_l16_jft']),
    ('vit-jax predict --weights=a', ['a.npz']),
    ('vit-jax predict a', ['a.npz']),
    ('vit-jax predict --top=', []),
    ('vit-jax list --format=m', ['markdown']),
    ('vit-jax list --configs=vit_l16_j', ['vit_l16_jft']),
    ('vit-jax list --models=a', []),
])
def test_bash_offers_jobs_flags_choices_configs_and_files(
    line: str, offered: list[str], tmp_path: pathlib.Path) -> None:
  (tmp_path / 'a.npz').touch()
  assert complete(line, tmp_path) == offered


def test_each_job_offers_its_own_flags(tmp_path: pathlib.Path) -> None:
  for name, job in JOBS.items():
    assert {word.strip('-=') for word in complete(f'vit-jax {name} --', tmp_path)} == {*job.flags, 'help'}


def test_the_script_is_printed_for_known_shells_only(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['completion', 'zsh']) == 0
  assert capsys.readouterr().out.startswith('autoload -U +X compinit')
  with pytest.raises(UserError, match='completion: expected bash, zsh or fish, got tcsh'):
    completion.run(['tcsh'])


@pytest.mark.skipif(not shutil.which('fish'), reason='fish is not installed')
@pytest.mark.parametrize(('line', 'offered'), [
    ('vit-jax pre', ['predict', 'prepare', 'pretrain']),
    ('vit-jax predict --to', ['--to', '--tokenizer', '--top']),
    ('vit-jax predict --ov', ['--overlay']),
    ('vit-jax --conf', ['--config']),
    ('vit-jax predict --view=', ['--view=ema', '--view=student', '--view=teacher']),
    ('vit-jax --job=predict --view=e', ['--view=ema']),
    ('vit-jax --config=vit_l16_j', ['--config=vit_l16_jft']),
    ('vit-jax predict --weights=a', ['--weights=a.npz']),
    ('vit-jax predict a', ['a.npz']),
    ('vit-jax predict --top=', []),
    ('vit-jax list --format=m', ['--format=markdown']),
])
def test_fish_offers_jobs_flags_choices_configs_and_files(
    line: str, offered: list[str], tmp_path: pathlib.Path) -> None:
  (tmp_path / 'a.npz').touch()
  found = fish_complete(line, tmp_path)
  assert [word.split('\t')[0].rstrip('=') for word in found] == offered or not offered and found == [line.split()[-1]]


@pytest.mark.skipif(not shutil.which('fish'), reason='fish is not installed')
def test_fish_offers_the_flags_of_each_job_with_their_help(tmp_path: pathlib.Path) -> None:
  for name, job in JOBS.items():
    found = dict(line.split('\t') for line in fish_complete(f'vit-jax {name} --', tmp_path))
    assert {word.strip('-=') for word in found} == {*job.flags, 'help'}
    assert all(found.get(f'--{flag.name}', found.get(f'--{flag.name}=')) for flag in job.flags.values())


def test_the_script_of_fish_has_every_job_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['completion', 'fish']) == 0
  lines = capsys.readouterr().out.splitlines()
  for name, job in JOBS.items():
    assert sum(f' -f -a {name} -d ' in line for line in lines) == 1
    for flag in job.flags.values():
      assert sum(f"'__vit_jax_is {name}' -l {flag.name} " in line for line in lines) == 1, (name, flag.name)
