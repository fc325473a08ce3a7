# shellcheck shell=bash
# Sourced by the other scripts: errors, and flags as variables.

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# fail_with PROBLEM…: ends with all problems, if there are any.
fail_with() {
  if [ $# -gt 0 ]; then printf 'error: %s\n' "$@" >&2; exit 2; fi
}

# set_flag 'NAME …' FLAG: sets the variable NAME to the value of FLAG, --NAME=VALUE; prints usage for --help; fails for
# any other flag.
set_flag() {
  local flag="${2%%=*}"
  case "$2" in --help | -h) usage; exit 0 ;; esac
  [[ "$2" == --*=* && " $1 " == *" ${flag#--} "* ]] || fail "$2: no such flag; see --help"
  printf -v "${flag#--}" '%s' "${2#*=}"
}
