#!/usr/bin/env bash
# Trains a small ViT on the handwritten digits that come with scikit-learn: no download, no accelerator.
# Needs a Python >= 3.11 and nothing else. Arguments go to the program: bash launch/quickstart.sh --config.seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup_env.sh
source launch/setup_env.sh

setup_env ''
exec "$VENV/bin/python" -m vit_jax.main --config=configs/digits.py --workdir=runs/digits "$@"
