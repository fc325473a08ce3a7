"""`vit-jax completion bash|zsh|fish`: prints a script that completes jobs, flags, their choices, and names of configs.

    eval "$(vit-jax completion bash)"      # in ~/.bashrc; likewise zsh in ~/.zshrc
    vit-jax completion fish | source       # in ~/.config/fish/config.fish

The script follows from the table of jobs. In zsh it runs through `bashcompinit`.
"""
from __future__ import annotations

from collections.abc import Sequence

from vit_jax.commands import JOBS, WEIGHTS, Flag
from vit_jax.config import files as configs
from vit_jax.core.errors import UserError
from vit_jax.flag_kinds import FILE, GLOB, LOCAL, SEVERAL, STORED

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
FISH = """function __vit_jax_job
  for word in (commandline -opc)[2..]
    set word (string replace -- --job= '' $word)
    contains -- $word {jobs}; and echo $word; and return
  end
  echo train
end
function __vit_jax_is
  test (__vit_jax_job) = $argv[1]
end
"""
SETUP = {'bash': ('', ''), 'zsh': (ZSH, '-o nospace ')}
"""Lines before the function, and options of `complete`, of the shells that run `SCRIPT`."""
SHELLS = (*SETUP, 'fish')


def run(files: Sequence[str]) -> int:
  """Prints the script for the shell that is the only argument; exit status 0."""
  if len(files) != 1 or files[0] not in SHELLS:
    raise UserError(f'completion: expected {", ".join(SETUP)} or fish, got {" ".join(files)}. '
                    'Name the shell that you use.')
  print(fish() if files[0] == 'fish' else script(files[0]), end='')
  return 0


def script(shell: str) -> str:
  """Returns the completion script of bash or zsh."""
  setup, options = SETUP[shell]
  flags, values = [], []
  for name, job in JOBS.items():
    words = [f'--{flag.name}{"=" if flag.kind else ""}' for flag in job.flags.values()]
    flags.append(f"        {name}) flags='{' '.join([*words, '--help'])}';;")
    values += [f"        '{name} --{flag.name}') values='{found}';;" for flag in job.flags.values()
               if (found := _values(flag))]
  return SCRIPT.format(setup=setup, options=options, jobs='|'.join(JOBS), words=' '.join(JOBS),
                       flags='\n'.join(flags), values='\n'.join(values))


def fish() -> str:
  """Returns the completion script of fish, which shows the help beside each job and flag."""
  lines = [FISH.format(jobs=' '.join(JOBS)).rstrip()]
  for name, job in JOBS.items():
    lines.append(f"complete -c vit-jax -n 'test (count (commandline -opc)) -eq 1' -f -a {name} -d {_quoted(job.line)}")
    for flag in job.flags.values():
      found = _values(flag)
      takes = '' if flag.kind is None else ' -r -F' if found == 'files' else f' -x -a {_quoted(found)}'
      lines.append(f"complete -c vit-jax -n '__vit_jax_is {name}' -l {flag.name}{takes} -d {_quoted(flag.help)}")
  return '\n'.join([*lines, "complete -c vit-jax -l help -d 'show the help of a job'", ''])


def _quoted(text: str) -> str:
  """Returns a text in the single quotes of fish."""
  return "'" + text.replace('\\', '\\\\').replace("'", "\\'").replace('\n', ' ') + "'"


def _values(flag: Flag) -> str:
  """Returns the values of a flag, separated by spaces; `files` for paths, '' for others."""
  if flag.name in ('config', 'configs'):
    return ' '.join(configs.list_names())
  if flag.kind and flag.kind.choices:
    return ' '.join(flag.kind.choices)
  is_file = flag.kind in (FILE, LOCAL, STORED, SEVERAL) or flag.name == WEIGHTS.name
  return 'files' if is_file and flag.kind != GLOB else ''
