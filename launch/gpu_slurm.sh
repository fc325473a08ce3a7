#!/usr/bin/env bash
#SBATCH --requeue
#SBATCH --open-mode=append
# Submits a command to Slurm. The job runs it on all nodes, and runs it again after every preemption.
# See the usage text below, and README.md in this folder.
#
# One process per node uses all its GPUs: they share one loader and one copy of in-memory data, and a host gets one
# signal to stop. (One process per GPU works too: the program reads Slurm's variables.)
set -uo pipefail

usage() {
  cat <<'TEXT'
bash launch/gpu_slurm.sh --nodes=N --gpus=G [FLAGS] -- COMMAND…

  bash launch/gpu_slurm.sh --nodes=4 --gpus=8 --time=24:00:00 --partition=gpu \
    -- python -m vit_jax.main --config=configs/vit_l16_jft.py \
       --config.data.source=array_record:/shared/jft --workdir=/shared/runs/l16

  --nodes=N              number of nodes
  --gpus=G               GPUs per node
  --name=NAME            name of the job; default: vit_jax
  --time=, --partition=, --account=, --qos=   as for sbatch
  --cpus=C               cores per node, for reading and decoding; default: all (--exclusive)
  --logs=DIR             folder of the logs, one per job, to which a resumed job appends; default: runs/slurm
  --warn_s=120           seconds before the time limit at which the job is signalled to save
  --max_failures=3       end after this many failures in a row without a new checkpoint in the command's --workdir
  --sbatch_flag=FLAG     another flag of sbatch; may be repeated
  --check                only check the command (`vit-jax check`), submit nothing. On a machine without sbatch, such as
                         a laptop, data and --workdir are taken to be on the cluster
  --no_check             do not check the command here first
  --dry_run              print the sbatch command, submit nothing; needs no sbatch either

The checkout and --workdir must be on a file system that all nodes share. If the checkout has a .venv, its Python is
used. When preempted or out of time, the program saves and exits with 75; the job is queued again and resumes. So it is
after a failure, up to --max_failures times. Status 2 (something that you must change) of any process ends the job.
TEXT
}

# Runs on every node: the command, which gets TERM from srun or from here; its status goes to the file $1/RANK.
# shellcheck disable=SC2016  # it is expanded there
TASK='trap "asked=1; kill -TERM \$child 2>/dev/null" TERM
"${@:2}" &
child=$!
if [ -n "${asked:-}" ]; then kill -TERM "$child"; fi
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
wait "$child"
status=$?
echo "$status" > "$1/${SLURM_PROCID:-0}"
exit "$status"'

submit() {
  local nodes='' gpus='' name=vit_jax cpus='' logs=runs/slurm warn_s=120 max_failures='' only='' no_check=''
  local flags=() limit=() root here=()
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  # shellcheck source=launch/flags.sh
  source "$root/launch/flags.sh"
  # shellcheck source=launch/check.sh
  source "$root/launch/check.sh"
  while [ $# -gt 0 ]; do
    case "$1" in
      --time=* | --partition=* | --account=* | --qos=*) flags+=("$1") ;;
      --sbatch_flag=*) flags+=("${1#*=}") ;;
      --dry_run | --check) only="$1" ;;
      --no_check) no_check=1 ;;
      --) shift; break ;;
      *) set_flag 'nodes gpus name cpus logs warn_s max_failures' "$1" ;;
    esac
    shift
  done
  [[ "$nodes" =~ ^[1-9][0-9]*$ && "$gpus" =~ ^[1-9][0-9]*$ ]] || fail 'expected whole numbers: --nodes=N --gpus=G'
  [ $# -gt 0 ] || fail 'expected a command after --, got none'
  [[ -z "$max_failures" || "$max_failures" =~ ^[0-9]+$ ]] || fail "--max_failures: expected a number, got $max_failures"
  if [ -n "$max_failures" ]; then limit=("--max_failures=$max_failures"); fi
  if ! command -v sbatch >/dev/null; then
    [ -n "$only" ] || fail 'sbatch: expected a login node of a Slurm cluster, got a machine without it. Add --check to check the command here, or --dry_run to see what would be submitted'
    here=(--elsewhere)
  fi
  if [ -z "$no_check" ]; then
    check_command "$root" --topology="gpu:$((nodes * gpus))" ${here[@]+"${here[@]}"} -- "$@" \
      || fail 'the command has problems, see above; nothing was submitted'
  fi
  if [ "$only" = --check ]; then return 0; fi
  if [ -n "$cpus" ]; then flags+=("--cpus-per-task=$cpus"); else flags+=(--exclusive); fi
  set -- sbatch --job-name="$name" --nodes="$nodes" --ntasks-per-node=1 --gpus-per-node="$gpus" --requeue \
    --open-mode=append --signal="B:USR1@$warn_s" --chdir="$root" --output="$logs/%x-%j.log" "${flags[@]}" \
    "$root/launch/gpu_slurm.sh" ${limit[@]+"${limit[@]}"} -- "$@"
  if [ "$only" = --dry_run ]; then printf '%q ' "$@"; echo; return 0; fi
  # Slurm does not create the folder of --output: without it a job ends without a message.
  (cd "$root" && mkdir -p "$logs") && exec "$@"
}

# The job, on its first node. Slurm runs a copy of this file, in the folder --chdir named.
job() {
  local first status=0 step asked='' limit=3 folder found=() root verdict
  if [ "$1" != -- ]; then limit="${1#*=}"; shift; fi
  shift  # --
  for root in "$PWD" "$(dirname "${BASH_SOURCE[0]}")/.."; do
    # shellcheck source=launch/statuses.sh
    if [ -f "$root/launch/statuses.sh" ]; then source "$root/launch/statuses.sh"; break; fi
  done
  folder="$PWD/runs/slurm/statuses-$SLURM_JOB_ID"
  rm -rf "$folder/now"
  mkdir -p "$folder/now"
  if [ -x .venv/bin/python ]; then PATH="$PWD/.venv/bin:$PATH"; fi
  first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
  export PATH PYTHONUNBUFFERED=1 VIT_JAX_COORDINATOR="$first:$((20000 + SLURM_JOB_ID % 12000))"
  export VIT_JAX_NUM_PROCESSES="$SLURM_JOB_NUM_NODES"
  unset VIT_JAX_PROCESS_ID  # each process uses its SLURM_PROCID
  echo "Job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $SLURM_JOB_NUM_NODES nodes, process 0 on $first"
  srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --label \
    bash -c "$TASK" task "$folder/now" "$@" &
  step=$!
  # Slurm signals this script only; srun forwards TERM to every process.
  trap 'asked=1; echo "Received a signal to stop; saving"; kill -TERM "$step" 2>/dev/null' USR1 TERM
  # A trap ends the wait too; the last one returns the status, also of a process that had ended before.
  while kill -0 "$step" 2>/dev/null; do wait "$step"; done
  wait "$step"
  status=$?
  # srun returns the largest status; a process that it killed leaves no file.
  mapfile -t found < <(cat "$folder/now/"* 2>/dev/null)
  if [ "${#found[@]}" -lt "$SLURM_JOB_NUM_NODES" ]; then found+=("$status"); fi
  read -r verdict status <<< "$(judge "${found[@]}")"
  if [ "$verdict" = done ]; then
    rm -rf "$folder"
  elif [ "$verdict" = final ]; then
    echo 'A process reports something that you must change, see its message above; not queued again'
  elif [ -n "$asked" ]; then
    echo 'Stopped and saved; queued again'
    scontrol requeue "$SLURM_JOB_ID"
  elif count_failure "$folder/failures" "$limit" "$(find_workdir "$@")"; then
    echo "Ended with status $status: the program stopped, failed, or lost a host or its storage; queued again"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "Ended with status $status too often; not queued again"
  fi
  exit "$status"
}

if [ -n "${SLURM_JOB_ID:-}" ] && { [ "${1:-}" = -- ] || [[ "${1:-}" == --max_failures=* && "${2:-}" = -- ]]; }; then
  job "$@"
else
  submit "$@"
fi
