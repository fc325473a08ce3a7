#!/usr/bin/env bash
# Installs the dependencies of the tests, then lints, checks types and runs the tests. Arguments are passed to pytest:
#   bash launch/test.sh tests/record -k clock      selected tests
#   bash launch/test.sh -m slow                    the slow tests
#   bash launch/test.sh -m ''                      all tests
#   bash launch/test.sh --changed                  those that your changes since main can affect, and the same arguments
#   bash launch/test.sh --lowest tests/record      with the lowest versions of the dependencies, in .venv-lowest
# TEST_WORKERS sets the number of test processes (0 = no extra process).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup_env.sh
source launch/setup_env.sh

lowest=
if [ "${1:-}" = --lowest ]; then
  shift
  lowest=1
  VENV="$ROOT/.venv-lowest"
fi
setup_env test
if [ -n "$lowest" ]; then
  # The part of setup.py between install_requires and extras_require, with == for >=.
  pins="$(sed -n '/install_requires=/,/extras_require=/p' setup.py | grep -oE "'[^']+>=[^']+'" | tr -d "'" | sed 's/>=/==/')"
  mapfile -t pins <<< "$pins"
  "$VENV/bin/python" -m pip install --quiet "${pins[@]}" "jaxlib==$(printf '%s\n' "${pins[@]}" | sed -n 's/^jax==//p')"
fi
# Compiled programs are cached between runs, because the tests spend most of their time on compilation.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/vit_jax/xla}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0.2}"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"

# The tests start many programs, which read compiled modules faster than they compile them.
export PYTHONDONTWRITEBYTECODE=

chosen=()
if [ "${1:-}" = --changed ]; then
  shift
  files="$("$VENV/bin/python" -m tests.changed)"
  if [ -z "$files" ]; then exit 0; fi
  mapfile -t chosen <<< "$files"
fi

if [ -z "$lowest" ]; then  # types are those of the newest versions
  "$VENV/bin/python" -m ruff check .
  "$VENV/bin/python" -m mypy
fi
exec "$VENV/bin/python" -m pytest --durations=15 -n "${TEST_WORKERS:-2}" --dist loadfile "${chosen[@]}" "$@"
