"""`vit-jax completion bash|zsh|fish`: prints a script that completes jobs, flags, their choices, and names of configs.

    eval "$(vit-jax completion bash)"      # in ~/.bashrc; likewise zsh in ~/.zshrc
    vit-jax completion fish | source       # in ~/.config/fish/config.fish

The package shtab makes the script from the parsers of the jobs (`main.parser`), which are made from the table `JOBS`.
"""
from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

import shtab

from vit_jax import main
from vit_jax.commands import JOBS, WEIGHTS
from vit_jax.config import files as configs
from vit_jax.core.errors import UserError

SHELLS = ('bash', 'zsh', 'fish')
# bash splits --flag=VALUE into three words, and shtab expects two. The function below leaves out the sign, and then
# calls `_shtab_vit_jax`, which is in the script of shtab.
BASH = """
_vit_jax() {
  local word words=()
  for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do [[ $word == = ]] || words+=("${word#--job=}"); done
  [[ ${COMP_WORDS[COMP_CWORD]} == = ]] && words+=('')
  COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1))
  _shtab_vit_jax
}
complete -o bashdefault -F _vit_jax vit-jax
"""


def run(files: Sequence[str]) -> int:
  """Prints the script for the shell that `files` names, and returns the exit status 0."""
  if len(files) != 1 or files[0] not in SHELLS:
    raise UserError(f'completion: expected bash, zsh or fish, got {" ".join(files)}. Name the shell that you use.')
  program = argparse.ArgumentParser('vit-jax')
  jobs = program.add_subparsers(dest='job')
  for name, job in JOBS.items():
    parser = jobs.add_parser(name, help=job.summary, parents=[main.parser(name)])
    for action in parser._actions:
      if flag := job.flags.get(action.dest):
        if flag.name in ('config', 'configs'):
          action.choices = configs.list_names()
        elif flag.kind and flag.kind.choices:
          action.choices = flag.kind.choices
        elif (flag.kind and flag.kind.is_path) or flag.name == WEIGHTS.name:
          action.complete = shtab.FILE  # type: ignore[attr-defined]
    if job.files:
      parser.add_argument('words', nargs='*').complete = shtab.FILE  # type: ignore[attr-defined]
  script = shtab.complete(program, files[0])
  if files[0] == 'zsh':  # "*--top[classes per image]:…" becomes "*--top=[…", so that the value may also follow a sign
    script = re.sub(r'(?m)^(  "\*--\w+)(\[.*\]:)', r'\1=\2', script)
  print(script + BASH if files[0] == 'bash' else script)
  return 0
