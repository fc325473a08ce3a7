#!/usr/bin/env bash
# Installs what the tests need, then lints, checks types and tests. Arguments go to pytest:
#   bash launch/test.sh tests/record -k clock      some tests
#   bash launch/test.sh -m slow                    the slow ones
# TEST_WORKERS sets the number of test processes (0 = in this one).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup_env.sh
source launch/setup_env.sh

setup_env test
# Compiled programs are kept between runs of the tests; most of their time is compilation.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/vit_jax/xla}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0.2}"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"

"$VENV/bin/python" -m ruff check .
"$VENV/bin/python" -m mypy
exec "$VENV/bin/python" -m pytest --durations=15 -n "${TEST_WORKERS:-2}" --dist loadgroup "$@"
