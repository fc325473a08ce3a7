# shellcheck shell=bash
# Sourced by the other scripts: finds Python, creates .venv in the repository root, installs the project into it.
# Repeating it is safe, and fast if nothing changed.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

# Prints the path of the first Python >= 3.11 that runs and can create environments. If PYTHON is set, it is the only
# candidate. Candidates are run, because a shim on PATH may not start any interpreter.
find_python() {
  local candidates=(python3.12 python3.11 python3.13 python3 python)
  local candidate found lacking=''
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    found="$("$candidate" -c 'import sys; print(sys.executable) if sys.version_info >= (3, 11) else sys.exit(1)' \
      2>/dev/null)" || continue
    if [ -z "$found" ]; then continue; fi
    if "$found" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      printf '%s\n' "$found"
      return 0
    fi
    lacking="${lacking:-$found}"
  done
  if [ -n "$lacking" ]; then
    printf '%s\n' "$lacking runs, but has no venv or ensurepip module, which are needed to create an environment." \
      'On Debian or Ubuntu: apt-get install python3-venv' \
      'Or name another interpreter: PYTHON=/path/to/python bash launch/…' >&2
  else
    printf '%s\n' "No Python >= 3.11 that runs; tried: ${candidates[*]}." \
      'Install one (Debian or Ubuntu: apt-get install python3 python3-venv), or name one that is elsewhere:' \
      'PYTHON=/path/to/python bash launch/…' >&2
  fi
  return 1
}

# Creates .venv unless there is one that works.
make_venv() {
  local python
  if "$VENV/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then return 0; fi
  python="$(find_python)" || return 1
  echo "Creating $VENV with $python"
  "$python" -m venv --clear "$VENV"
}

# Runs pip install with the given arguments and shows its progress: names of packages as they are downloaded, then that
# they are being unpacked. The output of pip is kept in a log, which is shown if it fails.
run_pip() {
  local log="$VENV/install.log" line name
  if (set -o pipefail; "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" 2>&1 | {
    while IFS= read -r line; do
      printf '%s\n' "$line" >&3
      case "$line" in
        Collecting\ * | Processing\ *)
          name="${line#* }" name="${name%%[ <>=!~;[(]*}" name="${name##*/}"
          printf ' %s' "${name%%-[0-9]*}" ;;
        Installing\ collected\ packages*) printf '\nUnpacking these; a minute or two …' ;;
      esac
    done 3> "$log"
    echo
  }); then return 0; fi
  cat "$log" >&2
  return 1
}

# Installs the project, with the extra named by $1 if any, if its dependencies changed since the last time.
install_project() {
  local extra="${1:-}" checksum stamp
  stamp="$VENV/installed${extra:+-$extra}"
  # The path is included, because an editable install refers to the folder where it was made.
  checksum="$(cd "$ROOT" && { pwd; cat setup.py pyproject.toml; } | cksum)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$checksum" ]; then return 0; fi
  printf '%s' "Installing into $VENV; the first time takes a few minutes. Getting:"
  run_pip --editable "$ROOT${extra:+[$extra]}" || return 1
  printf '%s\n' "$checksum" > "$stamp"
  if [ -n "$extra" ]; then printf '%s\n' "$checksum" > "$VENV/installed"; fi
}

# Prepares the environment, with the extra named by $1 if any.
setup_env() {
  make_venv || return 1
  install_project "${1:-}"
}
