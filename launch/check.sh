# shellcheck shell=bash
# Sourced by the launchers: checks a command of this project here, before anything is requested or paid for.

# Prints the first Python with this project's packages: that of .venv, $PYTHON, python3, python.
find_checker() {
  local one
  for one in "$1/.venv/bin/python" "${PYTHON:-python3}" python3 python; do
    if PYTHONPATH="$1" "$one" -c 'import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, ("vit_jax", "jax", "flax"))))' >/dev/null 2>&1; then
      printf '%s\n' "$one"
      return 0
    fi
  done
  return 1
}

# Whether a command runs this program.
is_ours() {
  [[ " $* " == *' vit_jax.main '* || " $* " == *'vit-jax '* ]]
}

# check_here ROOT -- COMMAND…: as check_command, in the folder that is the current one, and only with a Python.
check_here() {
  if ! is_ours "${@:3}" || ! find_checker "$1" >/dev/null; then return 0; fi
  local said
  said="$(CHECK_IN="$PWD" check_command "$@" 2>&1)" || { printf '%s\n' "$said" >&2; return 2; }
}

# check_command ROOT [FLAGS…] -- COMMAND…: runs `vit-jax check` with these flags on the command. Status 2: it has
# problems, which are printed. Commands of other programs are not checked.
check_command() {
  local root="$1" flags=() line='' word quote="'" python
  shift
  while [ "$1" != -- ]; do flags+=("$1"); shift; done
  shift
  is_ours "$@" || return 0
  if ! python="$(find_checker "$root")"; then
    printf '%s\n' "error: expected a Python with the packages of this project, to check the command before anything is \
requested, got none. Install it here: source launch/setup_env.sh; setup_env ''. Or set --no_check" >&2
    return 2
  fi
  for word in "$@"; do line+=" '${word//$quote/$quote\\$quote$quote}'"; done
  (cd "${CHECK_IN:-$root}" && JAX_PLATFORMS=cpu PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" \
    "$python" -m vit_jax.main check "${flags[@]}" --line="${line# }") >&2
}
