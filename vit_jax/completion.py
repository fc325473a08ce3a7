"""`vit-jax completion bash|zsh`: prints a script that completes jobs, flags, their choices, and names of configs.

    eval "$(vit-jax completion bash)"      # in ~/.bashrc; likewise zsh in ~/.zshrc

The script follows from the table of jobs. In zsh it runs through `bashcompinit`.
"""
from __future__ import annotations

from collections.abc import Sequence

from vit_jax.commands import FILE, GLOB, JOBS, LOCAL, SEVERAL, STORED, WEIGHTS
from vit_jax.config import files as configs
from vit_jax.core.errors import UserError

SCRIPT = """{setup}_vit_jax() {{
  local line=${{COMP_LINE:0:$COMP_POINT}} job=train flags='' values='' one
  local word=${{line##*[[:space:]]}}
  for one in "${{COMP_WORDS[@]:1}}"; do
    case ${{one#--job=}} in {jobs}) job=${{one#--job=}}; break;; esac
  done
  COMPREPLY=()
  case "$word" in
    --*=*)
      case "$job ${{word%%=*}}" in
{values}
      esac
      local head="${{word%%=*}}="
      [[ "${{COMP_WORDBREAKS-}}" == *=* ]] && head=''  # the shell completes what follows the sign
      while IFS= read -r one; do
        [[ -n $one ]] && COMPREPLY+=("$head$one")
      done <<< "$(if [[ $values == files ]]; then compgen -f -- "${{word#*=}}"
                  else compgen -W "$values" -- "${{word#*=}}"; fi)";;
    -*)
      case "$job" in
{flags}
      esac
      COMPREPLY=($(compgen -W "$flags" -- "$word"))
      [[ ${{COMPREPLY[*]}} == *= ]] && {{ compopt -o nospace; }} 2>/dev/null;;
    *)
      if [[ $COMP_CWORD -eq 1 ]]; then COMPREPLY=($(compgen -W "{words}" -- "$word"))
      else COMPREPLY=($(compgen -f -- "$word")); fi;;
  esac
  return 0
}}
complete {options}-F _vit_jax vit-jax
"""
ZSH = 'autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n'
SHELLS = {'bash': ('', ''), 'zsh': (ZSH, '-o nospace ')}
"""Lines before the function, and options of `complete`."""


def run(files: Sequence[str]) -> int:
  """Prints the script for the shell that is the only argument; exit status 0."""
  if len(files) != 1 or files[0] not in SHELLS:
    raise UserError(f'completion: expected {" or ".join(SHELLS)}, got {" ".join(files)}.')
  print(script(files[0]), end='')
  return 0


def script(shell: str) -> str:
  """The completion script of a shell of `SHELLS`."""
  setup, options = SHELLS[shell]
  flags, values = [], []
  for name, job in JOBS.items():
    words = [f'--{flag.name}{"=" if flag.kind else ""}' for flag in job.flags.values()]
    flags.append(f"        {name}) flags='{' '.join([*words, '--help'])}';;")
    for flag in job.flags.values():
      if flag.name in ('config', 'configs'):
        found = ' '.join(configs.list_names())
      elif flag.kind and flag.kind.choices:
        found = ' '.join(flag.kind.choices)
      elif flag.kind == GLOB:
        continue
      elif flag.kind in (FILE, LOCAL, STORED, SEVERAL) or flag.name == WEIGHTS.name:
        found = 'files'
      else:
        continue
      values.append(f"        '{name} --{flag.name}') values='{found}';;")
  return SCRIPT.format(setup=setup, options=options, jobs='|'.join(JOBS), words=' '.join(JOBS),
                       flags='\n'.join(flags), values='\n'.join(values))
