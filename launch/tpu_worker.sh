#!/usr/bin/env bash
# Runs on every host of a TPU slice, started by tpu_pod.sh.
#   setup                            installs Python, .venv and the project with its tpu extra
#   start --spec=HASH [--data=gs://… --data_mode=mount|copy] [--workdir=gs://…] [--env=NAME=VALUE]… -- COMMAND…
#   running                          prints RUNNING HASH if a job runs
#   follow LINE                      prints the output of the job from that line until it ends
#   status SECONDS                   waits at most this long for its end, then prints VIT_JAX_STATUS HOST STATUS
#   message                          prints the error message of a job that ended with status 2, with the name of the host
#   newest                           prints VIT_JAX_NEWEST and the step of the newest checkpoint of the run
#   stop                             sends TERM to the job, which saves and ends; it is not started again
#   end                              sends TERM to the job, then KILL if it has not ended after 60 s
# Answers are words on a line, not exit statuses, which ssh to several hosts does not return reliably.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/flags.sh
source launch/flags.sh
# shellcheck source=launch/setup_env.sh
source launch/setup_env.sh
# shellcheck source=launch/statuses.sh
source launch/statuses.sh

JOB="${VIT_JAX_JOB:-$HOME/vit_jax_job}"
METADATA=http://metadata.google.internal/computeMetadata/v1/instance/attributes
RESERVE_MB=10240  # of the cache's disk, kept free
PAUSE_S="${VIT_JAX_PAUSE_S:-1}"  # between checks of the job

# Ends with the status of what may succeed later.
fail_now() {
  printf 'error: %s\n' "$*" >&2
  exit 75
}

# The images bring Python 3.10; a newer one is put beside it.
setup() {
  if ! find_python >/dev/null 2>&1; then
    python3 -m pip install --quiet --user uv
    python3 -m uv python install --quiet 3.12
    PYTHON="$(python3 -m uv python find 3.12)"
    export PYTHON
  fi
  setup_env tpu
  echo "VIT_JAX_READY $(hostname)"
}

# Mounts gs://… $1 at $2, with the options after them; does nothing if it is mounted.
mount_bucket() {
  local address="${1#gs://}" folder="$2" only=()
  mkdir -p "$folder"
  if mountpoint --quiet "$folder"; then return; fi
  command -v gcsfuse >/dev/null || sudo apt-get install --yes --quiet gcsfuse >/dev/null 2>&1 \
    || fail_now "gcsfuse is not installed on $(hostname), and apt-get does not find it. Install it with --setup='…'"
  address="${address%/}"
  if [ "$address" != "${address%%/*}" ]; then only=("--only-dir=${address#*/}"); fi
  gcsfuse --implicit-dirs "${only[@]}" "${@:3}" "${address%%/*}" "$folder" >&2 \
    || fail_now "$1 cannot be mounted on $(hostname); see above, and whether the service account may read it"
}

# Makes the data at gs://… $1 readable on this host, by $2 = mount or copy with the folder $3; prints the folder.
bring_data() {
  local folder="$JOB/data" cache="$3" needed free
  mkdir -p "$cache"
  free=$(df --output=avail --block-size=1M "$cache" | tail -n 1 | tr -d ' ')  # MB
  if [ "$2" = mount ]; then
    # Records are read in random order. Therefore complete files are fetched, in parallel parts.
    mount_bucket "$1" "$folder" -o ro --cache-dir="$cache" --file-cache-max-size-mb=$((free - RESERVE_MB)) \
      --file-cache-cache-file-for-range-read --file-cache-enable-parallel-downloads \
      --metadata-cache-ttl-secs=-1
  else
    folder="$cache/copy"
    mkdir -p "$folder"
    needed=$(($(gcloud storage du --summarize "$1" | awk '{print $1}') / 1048576))
    free=$((free + $(du --summarize --block-size=1M "$folder" | awk '{print $1}')))
    if [ $((needed + RESERVE_MB)) -gt "$free" ]; then
      fail "$1 holds $needed MB, and $cache on $(hostname) has $free MB free, $RESERVE_MB of them reserved. Use" \
        '--data_mode=mount, or a larger disk (--create_flag=--data-disk=…) and --cache_dir on it'
    fi
    gcloud storage rsync --recursive "$1" "$folder" >&2
  fi
  echo "$folder"
}

metadata() {
  curl --silent --fail --max-time 10 --header 'Metadata-Flavor: Google' "$METADATA/$1"
}

# A value of the metadata `tpu-env`, lines such as MEGASCALE_SLICE_ID: '1', which has them only with several slices.
tpu_env() {
  (metadata tpu-env || true) | sed -n "s/^$1: *'\{0,1\}\([^']*\).*/\1/p"
}

# Exports the rank of this host among all, in the variables that the program reads. The hosts of slice 0 come first.
export_place() {
  local hosts index first count slices
  if ! hosts="$(metadata worker-network-endpoints)" || ! index="$(metadata agent-worker-number)"; then
    export VIT_JAX_DISTRIBUTED=auto
    return
  fi
  first="${hosts%%,*}"
  first="${first##*:}"  # one host is NAME or NAME:ID:ADDRESS
  count=$(tr ',' '\n' <<< "$hosts" | grep --count .)
  slices="$(tpu_env MEGASCALE_NUM_SLICES)"
  if [ "${slices:-1}" -gt 1 ]; then
    first="$(tpu_env MEGASCALE_COORDINATOR_ADDRESS)"
    first="${first%%:*}"
    index=$((index + count * $(tpu_env MEGASCALE_SLICE_ID)))
    count=$((count * slices))
  fi
  if [ "$count" -gt 1 ]; then
    export VIT_JAX_COORDINATOR="$first:${VIT_JAX_PORT:-8476}" VIT_JAX_NUM_PROCESSES="$count" VIT_JAX_PROCESS_ID="$index"
  fi
}

is_running() {
  [ -s "$JOB/pid" ] && ! [ -e "$JOB/status" ] && kill -0 "$(cat "$JOB/pid")" 2>/dev/null
}

# shellcheck disable=SC2317  # called by a trap
note_failure() {
  local status=$?
  if [ "$status" -ne 0 ]; then echo "$status" > "$JOB/status"; fi
}

# Starts the job, independent of this connection; or prints that it runs.
start() {
  local spec='' data='' data_mode=mount cache_dir='' workdir='' folder command=()
  while [ "$1" != -- ]; do
    case "$1" in
      --env=*) export "${1#--env=}" ;;
      *) set_flag 'spec data data_mode cache_dir workdir' "$1" ;;
    esac
    shift
  done
  shift
  if is_running; then echo "RUNNING $(cat "$JOB/spec")"; return; fi
  mkdir -p "$JOB"
  rm -f "$JOB/status" "$JOB/pid" "$JOB/asked"
  printf '%s\n' "$spec" > "$JOB/spec"
  # A failure here ends the job like any other, and is kept in its log.
  : > "$JOB/log"
  trap note_failure EXIT
  exec 2> >(tee -a "$JOB/log" >&2)
  command=("$@")
  if [ -n "$data" ]; then
    folder="$(bring_data "$data" "$data_mode" "${cache_dir:-$JOB/cache}")"
    command=("${command[@]//'{data}'/$folder}")
  fi
  if [ -n "$workdir" ]; then
    folder="$JOB/workdir"  # writes of one host must be visible to the others at once
    mount_bucket "$workdir" "$folder" --metadata-cache-ttl-secs=0 --rename-dir-limit=100000
    if [[ "$*" == *'{workdir}'* ]]; then command=("${command[@]//'{workdir}'/$folder}")
    else command+=("--workdir=$folder"); fi
    # Compiled programs and lists of data outlive the hosts; locks of the hub do not hold between hosts.
    export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$folder/.cache}" HF_HOME="${HF_HOME:-$HOME/.cache/huggingface}"
  fi
  export_place
  export PATH="$VENV/bin:$PATH" PYTHONUNBUFFERED=1
  setsid nohup bash "$ROOT/launch/tpu_worker.sh" job "${command[@]}" >> "$JOB/log" 2>&1 < /dev/null &
  # The job writes its pid when it can handle a request to stop.
  while ! [ -s "$JOB/pid" ] && kill -0 $! 2>/dev/null; do sleep 0.1; done
  echo "STARTED $(hostname)"
}

# The job itself: forwards TERM, and writes its exit status to a file.
job() {
  local child status=0
  "$@" &
  child=$!
  trap 'kill -TERM "$child" 2>/dev/null' TERM
  echo $$ > "$JOB/pid"
  # A trap ends the wait too; the last one returns the status, also of a process that had ended before.
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
  wait "$child" || status=$?
  echo "$status" > "$JOB/status.part"
  mv "$JOB/status.part" "$JOB/status"
}

follow() {
  local until_end=()
  if [ ! -e "$JOB/log" ]; then return; fi
  # With --pid, tail reads once more after the end of the job, so that no output is lost.
  if is_running; then
    until_end=(--follow=name --sleep-interval="$PAUSE_S" --pid="$(cat "$JOB/pid")")
  fi
  tail --lines="+$1" ${until_end[@]+"${until_end[@]}"} "$JOB/log" 2>/dev/null
}

status() {
  local until=$((SECONDS + $1))
  while is_running && [ "$SECONDS" -lt "$until" ]; do sleep "$PAUSE_S"; done
  if is_running; then echo "VIT_JAX_STATUS $(hostname) running"
  elif [ -e "$JOB/asked" ]; then echo "VIT_JAX_STATUS $(hostname) stopped"
  elif [ -e "$JOB/status" ]; then echo "VIT_JAX_STATUS $(hostname) $(cat "$JOB/status")"
  else echo "VIT_JAX_STATUS $(hostname) lost"; fi
}

message() {
  local lines
  if [ "$(cat "$JOB/status" 2>/dev/null)" != 2 ]; then return; fi
  lines="$(tail -n 40 "$JOB/log" | sed -n '/^error: /,$p')"
  printf '%s: %s\n' "$(hostname)" "${lines:-$(tail -n 5 "$JOB/log")}"
}

stop() {
  touch "$JOB/asked"  # requested by the user: must not be started again
  if is_running; then kill -TERM "$(cat "$JOB/pid")"; fi
}

end() {
  if is_running; then kill -TERM "$(cat "$JOB/pid")"; fi
  status 60 > /dev/null
  if is_running; then kill -KILL -- "-$(cat "$JOB/pid")"; fi
}

case "${1:-}" in
  setup | start | job | follow | status | message | stop | end) "$@" ;;
  newest) echo "VIT_JAX_NEWEST $(newest_step "$JOB/workdir")" ;;
  running) if is_running; then echo "RUNNING $(cat "$JOB/spec")"; else echo IDLE; fi ;;
  *) fail "tpu_worker.sh: unknown '${1:-}'; this script is run by tpu_pod.sh" ;;
esac
