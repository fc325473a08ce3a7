#!/usr/bin/env bash
# Compiles train steps and complete runs for TPUs, and makes tables of their plans; see the usage text below.
set -uo pipefail

usage() {
  cat <<'TEXT'
bash benchmarks/plans.sh [DIR] [FLAGS]

  DIR                    output folder; default: runs/plans. A later call compiles only what it lacks
  --python=PYTHON        an interpreter with the extra `plan`; default: .venv/bin/python, else python3
  --big_vision=CHECKOUT  a checkout of big_vision, whose steps are compiled beside ours; without it they are left out
  --only=v6e,L/16,fused  rows of the step tables: models, chips and programs
  --parts=steps,runs     steps: L/16, H/14 and G/14 on v6e, v5e, v4 and v3, by both times of `plan`;  runs: core-days
                         of complete runs, with and without collectives
  --rows=L/16,22B@v4     rows of the runs: L/16, H/14, G/14 and 22B, or one of them on a chip
  --quick                plan runs of unrolled networks from programs of 2 and 4 blocks, in minutes; the table says so
  --write                write the runs into benchmarks/records/TABLES.md and the docstrings of their configs

Writes DIR/steps/tables.md and DIR/runs.md. A program takes 2 to 8 minutes of one core, and up to 4 GiB; what DIR has is
not compiled again. Exit status: 0 all parts succeeded, 1 a part failed, 2 invalid input.
TEXT
}

# shellcheck source=launch/flags.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/flags.sh"

# Name, config and topology of each complete run, in its automatic layout.
RUNS=(
  'L/16@v3 vit_l16_jft v3:16x16' 'L/16@v5e vit_l16_jft v5e:16x16' 'L/16@v4 vit_l16_jft v4:4x4x8'
  'H/14@v3 vit_h14_jft v3:16x16' 'H/14@v5e vit_h14_jft v5e:16x16' 'H/14@v4 vit_h14_jft v4:4x4x8'
  'G/14@v5e configs/vit_g14_jft3b.py:G/14 v5e:16x16'
  '22B@v4 vit_22b_jft4b v4:8x8x8'
)

# Plans each complete run that --rows asks for, by its name or its model, unless its folder has a plan.
runs() {
  local row name config topology folder
  mkdir -p "$to/runs"
  for row in "${RUNS[@]}"; do
    read -r name config topology <<< "$row"
    folder="$to/runs/$(basename "${config%%:*}" .py)-${topology//[:x]/_}${quick:+-quick}"
    if [ -f "$folder/plan.json" ] || [[ -n "$rows" && ",$rows," != *",$name,"* && ",$rows," != *",${name%%@*},"* ]]; then
      continue
    fi
    "$python" -m vit_jax.main --job=plan --config="$config" --topology="$topology" --to="$folder" $quick \
      > "$folder.log" 2>&1 || { echo "$config on $topology failed; see $folder.log" >&2; failures=$((failures + 1)); }
  done
  "$python" -m benchmarks.tpu_runs "$to/runs" | tee "$to/runs.md"
  if [ "$write" = 1 ]; then "$python" -m benchmarks.plan_docs "$to/runs" || failures=$((failures + 1)); fi
}

# check_words FLAG WORDS KNOWN…: fails for a word that is not known.
check_words() {
  local word
  for word in ${2//,/ }; do
    [[ " ${*:3} " = *" $word "* ]] || fail "$1: expected some of $(IFS=,; echo "${*:3}"), got $word"
  done
}

to=runs/plans python='' parts=steps,runs rows='' quick='' write=0 failures=0 flags=()
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=--quick ;;
    --write) write=1 ;;
    --big_vision=* | --only=*) flags+=("$1") ;;
    -*) set_flag 'python parts rows' "$1" ;;
    *) to="$1" ;;
  esac
  shift
done
check_words --parts "$parts" steps runs
# shellcheck disable=SC2046  # names are words
check_words --rows "$rows" $(for row in "${RUNS[@]}"; do row="${row%% *}"; printf '%s\n' "$row" "${row%@*}"; done | sort -u)
mkdir -p "$to" || fail "$to: expected a folder that can be created"
to="$(cd "$to" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
if [ -z "$python" ]; then
  python=python3
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi
if [[ ",$parts," = *,steps,* ]]; then
  "$python" -m benchmarks.tpu_tables "$to/steps" "${flags[@]}" || failures=$((failures + 1))
fi
if [[ ",$parts," = *,runs,* ]]; then runs; fi
[ "$failures" = 0 ]
