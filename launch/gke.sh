#!/usr/bin/env bash
# Checks a run and submits it to a GKE cluster with TPU slices: a JobSet manifest, or through XPK.
# See the usage text below, and README.md in this folder.
set -euo pipefail

usage() {
  cat <<'TEXT'
bash launch/gke.sh [FLAGS] MANIFEST                    checks a manifest like launch/k8s.yaml; kubectl apply
bash launch/gke.sh --xpk [FLAGS] -- COMMAND…           checks a command; xpk workload create

  bash launch/gke.sh my_run.yaml
  bash launch/gke.sh --xpk --cluster=my-cluster --name=s16 --type=v5litepod-256 --slices=2 --storage=data \
    --image=europe-docker.pkg.dev/my-project/images/vit_jax:tpu \
    -- python -m vit_jax.main --config=vit_s16_i1k --config.data.data_dir=/data/tfds --config.mesh.slices=2 \
    --workdir=/runs/s16

  --cluster=NAME, --project=, --zone=   as for xpk
  --name=NAME            name of the workload
  --type=TYPE            of a slice: v4-256, v5litepod-256, v5p-256, v6e-256 …
  --slices=N             number of such slices; default: 1
  --image=IMAGE          built with launch/Dockerfile
  --storage=NAME         storage attached with `xpk storage attach`, such as a bucket; may be repeated
  --no_check             do not check the run on this machine first (`vit-jax check`)
  --dry_run              print the command, submit nothing

A workload is restarted after every end but 0 and 2 (something that you must change), and resumes from its last
checkpoint. XPK and launch/k8s.yaml mount memory at /dev/shm for libraries that use it; loader processes do not.
TEXT
}

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/flags.sh
source "$ROOT/launch/flags.sh"
# shellcheck source=launch/check.sh
source "$ROOT/launch/check.sh"

xpk='' cluster='' project='' zone='' name='' type='' slices=1 image='' no_check='' dry_run='' manifest=''
storages=() words=()

# Runs a command that $1 is part of, or prints it.
submit() {
  if [ -n "$dry_run" ]; then printf '%q ' "$@"; echo; return; fi
  command -v "$1" >/dev/null || fail "$1: expected it to be installed on this machine, got none"
  exec "$@"
}

apply_manifest() {
  local python
  [ -n "$manifest" ] || fail 'expected the path of a manifest, or --xpk; see --help'
  if [ -z "$no_check" ]; then
    python="$(find_checker "$ROOT")" || fail 'expected a Python with the packages of this project, got none. Set --no_check'
    PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$python" -m vit_jax.main check --manifest="$manifest" >&2 \
      || fail 'the manifest has problems, see above; nothing was submitted'
  fi
  submit kubectl apply -f "$manifest"
}

create_workload() {
  local problems=() one
  for one in cluster name type image; do [ -n "${!one}" ] || problems+=("--$one is missing"); done
  [ "${#words[@]}" -gt 0 ] || problems+=('expected a command after --, got none')
  [[ "$slices" =~ ^[1-9][0-9]*$ ]] || problems+=("--slices: expected a whole number, got $slices")
  [ -z "$manifest" ] || problems+=("expected a command after --, got $manifest")
  fail_with ${problems[@]+"${problems[@]}"}
  if [ -z "$no_check" ]; then
    check_command "$ROOT" --elsewhere --topology="$type" --slices="$slices" -- "${words[@]}" \
      || fail 'the command has problems, see above; nothing was submitted'
  fi
  for one in "${words[@]}"; do
    if [[ "$one" == --workdir=/*/* ]]; then  # beside the run directory, the cache outlives the nodes
      one="${one#*=}"
      words=(env "XDG_CACHE_HOME=${one%/*}/.cache" HF_HOME=/tmp/huggingface "${words[@]}")
      break
    fi
  done
  # XPK restarts after the statuses 42 and 127 to 255 by itself.
  submit xpk workload create --cluster="$cluster" ${project:+--project="$project"} ${zone:+--zone="$zone"} \
    --workload="$name" --tpu-type="$type" --num-slices="$slices" --docker-image="$image" \
    ${storages[@]+"${storages[@]}"} --max-restarts=100 --restart-on-exit-codes=1,70,75 \
    --command="$(printf '%q ' "${words[@]}")"
}

while [ $# -gt 0 ]; do
  case "$1" in
    --storage=*) storages+=("$1") ;;
    --xpk) xpk=1 ;;
    --no_check) no_check=1 ;;
    --dry_run) dry_run=1 ;;
    --) words=("${@:2}"); break ;;
    --* | -h) set_flag 'cluster project zone name type slices image' "$1" ;;
    *) manifest="$1" ;;
  esac
  shift
done
if [ -n "$xpk" ]; then create_workload; else apply_manifest; fi
