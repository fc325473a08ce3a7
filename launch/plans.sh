#!/usr/bin/env bash
# Renews the tables of train steps on TPUs in BENCHMARKS.md and docs/guides/read_a_plan.md. No TPU is needed; see the usage text below.
set -uo pipefail

usage() {
  cat <<'TEXT'
bash launch/plans.sh [DIR] [FLAGS]

  DIR                    output folder; default: runs/plans. A later call compiles only what it lacks
  --python=PYTHON        an interpreter with the extra `plan`; default: .venv/bin/python, else python3
  --big_vision=CHECKOUT  a checkout of big_vision, whose steps are compiled beside ours; without it they are left out
  --only=v6e,L/16,fused  rows of the step tables: models, chips and programs
  --parts=steps,runs     steps: L/16, H/14 and G/14 on v6e, v5e, v4 and v3, by both times of `plan`;  runs: core-days
                         of complete runs, with and without collectives

Writes DIR/steps/tables.md and DIR/runs.md. A program takes 2 to 8 minutes of one core, and up to 4 GiB. Exit status: 0
all parts succeeded, 1 a part failed, 2 invalid input.
TEXT
}

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# run_plan CONFIG TOPOLOGY OVERRIDES…: plans a complete run, unless its folder has a plan.
run_plan() {
  local config="$1" topology="$2" folder
  shift 2
  folder="$to/runs/$(basename "${config%%:*}" .py)-${topology//[:x]/_}"
  if [ ! -f "$folder/plan.json" ]; then
    "$python" -m vit_jax.main --job=plan --config="$config" --topology="$topology" --workdir="$folder" "$@" \
      > "$folder.log" 2>&1 || { echo "$config on $topology failed; see $folder.log" >&2; failures=$((failures + 1)); }
  fi
}

runs() {
  local scanned=(--config.model.execution=scan --config.model.remat=names) config topology
  mkdir -p "$to/runs"
  for config in vit_l16_jft vit_h14_jft; do
    for topology in v3:16x16 v5e:16x16 v4:4x4x8; do
      run_plan "$config" "$topology" "${scanned[@]}"
    done
  done
  run_plan configs/vit_g14_jft3b.py:G/14 v5e:16x16
  "$python" -m vit_jax.bench.tpu_runs "$to/runs" | tee "$to/runs.md"
}

to=runs/plans python='' parts=steps,runs failures=0 flags=()
while [ $# -gt 0 ]; do
  case "$1" in
    --python=*) python="${1#*=}" ;;
    --parts=*) parts="${1#*=}" ;;
    --big_vision=* | --only=*) flags+=("$1") ;;
    --help | -h) usage; exit 0 ;;
    -*) fail "$1: no such flag; see --help" ;;
    *) to="$1" ;;
  esac
  shift
done
for part in ${parts//,/ }; do
  case "$part" in
    steps | runs) ;;
    *) fail "--parts: expected some of steps,runs, got $part" ;;
  esac
done
mkdir -p "$to" || fail "$to: expected a folder that can be created"
to="$(cd "$to" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
if [ -z "$python" ]; then
  python=python3
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi
if [[ ",$parts," = *,steps,* ]]; then
  "$python" -m vit_jax.bench.tpu_tables "$to/steps" "${flags[@]}" || failures=$((failures + 1))
fi
if [[ ",$parts," = *,runs,* ]]; then runs; fi
[ "$failures" = 0 ]
