#!/usr/bin/env bash
# Builds the documentation site as one version beside others, in the branch gh-pages (extra `docs`):
#   bash launch/site/deploy.sh dev [--push]      of the main branch
#   bash launch/site/deploy.sh latest [--push]   of a release: its X.Y, which readers get without a version
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
config=(--config-file launch/site/mkdocs.yml)
case "${1:-}" in
  dev)
    mike deploy "${config[@]}" "${@:2}" dev
    if ! mike list "${config[@]}" | grep -q latest; then mike set-default "${config[@]}" "${@:2}" dev; fi ;;
  latest)
    version="$(sed -nE "s/^__version__ = '([0-9]+\.[0-9]+).*/\1/p" vit_jax/__init__.py)"
    mike deploy "${config[@]}" --update-aliases "${@:2}" "$version" latest
    mike set-default "${config[@]}" "${@:2}" latest ;;
  *)
    echo "deploy.sh: expected dev or latest, got '${1:-}'." >&2
    exit 2 ;;
esac
