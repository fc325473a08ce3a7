# shellcheck shell=bash
# Sourced by the launchers: what follows from the exit statuses of all processes of a run. README.md, "Exit status and
# resuming", has the rule.

# judge STATUS…: prints one word and the status that stands for all:
#   done 0    all have finished
#   final 2   a person has to change something; the others failed because of it, or will
#   again N   anything else: the same command may succeed; N is a failure if there is one, otherwise 75
judge() {
  local words=" $* " others
  case "$words" in *' 2 '*) echo 'final 2'; return ;; esac
  others="$(tr ' ' '\n' <<< "$words" | grep -xE '[0-9]+' | grep -vxE '0|75' | sort -n | tail -n 1)"
  if [ -n "$others" ]; then echo "again $others"
  elif [[ "$words" =~ [1-9a-z] ]]; then echo 'again 75'
  else echo 'done 0'; fi
}

# newest_step WORKDIR: prints the number of the newest checkpoint of a run; 0 if there is none.
newest_step() {
  local found
  found="$(cd "$1/checkpoints" 2>/dev/null && printf '%s\n' * | grep -xE '[0-9]+' | sort -n | tail -n 1)"
  echo "${found:-0}"
}

# The run directory that a command names, '' if none or if it is in object storage.
find_workdir() {
  local word before='' found=''
  for word in "$@"; do
    case "$word" in --workdir=*) found="${word#*=}" ;; esac
    if [ "$before" = --workdir ]; then found="$word"; fi
    before="$word"
  done
  if [[ "$found" != *://* ]]; then echo "$found"; fi
}

# Counts a failure in the file $1, unless the run has a checkpoint that is newer than at the one before; returns 1 after
# too many in a row.
count_failure() {
  local file="$1" limit="$2" workdir="$3" count=0 before=0 now
  if [ -s "$file" ]; then read -r count before < "$file"; fi
  now="$(newest_step "${workdir:-/nowhere}")"
  count=$((count + 1))
  if [ "$now" -gt "$before" ]; then count=0; fi
  echo "$count $now" > "$file"
  echo "Failure $count of at most $limit in a row without a new checkpoint; the newest is of step $now"
  [ "$count" -le "$limit" ]
}
