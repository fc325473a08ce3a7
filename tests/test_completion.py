"""Shell completion: what bash offers at each place of a command line."""
from __future__ import annotations

import pathlib
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


@pytest.mark.parametrize(('line', 'offered'), [
    ('vit-jax pre', ['predict', 'prepare']),
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
  with pytest.raises(UserError, match='completion: expected bash or zsh, got fish'):
    completion.run(['fish'])
