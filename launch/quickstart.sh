#!/usr/bin/env bash
# Trains a small ViT on the handwritten digits of scikit-learn: no dataset download, no accelerator.
# Needs only Python >= 3.11. Arguments are passed to the program: bash launch/quickstart.sh --config.seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup_env.sh
source launch/setup_env.sh

setup_env ''
exec "$VENV/bin/python" -m vit_jax.main --config=configs/digits.py --workdir=runs/digits "$@"
