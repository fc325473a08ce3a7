#!/usr/bin/env bash
# Runs a command on all hosts of a Cloud TPU slice, again after every preemption, until it is done.
# See the usage text below, and README.md in this folder.
set -euo pipefail

usage() {
  cat <<'TEXT'
bash launch/tpu_pod.sh --name=NAME --type=TYPE --zone=ZONE --workdir=gs://BUCKET/RUN [FLAGS] -- COMMAND…

Requests the slice (a queued resource), or uses the existing one of that name; copies this checkout to its hosts;
installs; starts COMMAND on all; shows the output of the first; fetches the run directory. A preempted slice is
requested again, and COMMAND resumes. Interrupting this script does not stop the job: the same line follows it again.

  bash launch/tpu_pod.sh --name=l16-jft --type=v3-512 --zone=europe-west4-a --spot \
    --data=gs://my-bucket/jft --workdir=gs://my-bucket/runs/l16-jft \
    -- python -m vit_jax.main --config=configs/vit_l16_jft.py --config.data.source=array_record:{data}
  On other slices: --type=v4-256 --zone=us-central2-b, or --type=v5litepod-256 --zone=us-west4-a --slices=2 with
  --config.mesh.slices=2 in the command.

  --name=NAME            name of the queued resource and of the slice
  --type=TYPE            v3-512, v4-256, v5litepod-256, v5p-256, v6e-256 …
  --slices=N             number of such slices, in one queued resource, for one run; default: 1
  --zone=ZONE
  --project=PROJECT      default: gcloud's
  --runtime=VERSION      image of the hosts; default: the one for the type
  --spot, --reserved     pricing of the slice; default: on demand
  --create_flag=FLAG     another flag of `gcloud … queued-resources create`; may be repeated
  --workdir=gs://…       run directory, mounted on all hosts; the command gets --workdir=PATH, or PATH in place of
                         the word {workdir}
  --data=gs://…          data, mounted or copied; the command must have the word {data} for its path on the hosts:
                         --config.data.source=folder:{data}, or --config.data.data_dir={data} for TFDS
  --data_mode=mount      gcsfuse, with a cache of complete files on each host (default)
  --data_mode=copy       everything is copied to each host first
  --cache_dir=DIR        folder on the hosts for the cache or the copy; default: in the home folder
  --setup=COMMAND        command to run on every host before anything else
  --env=NAME=VALUE       environment variable of the command; may be repeated
  --fetch=DIR            local folder for the run directory without its checkpoints; default: runs/NAME
  --keep                 keep the slice when done; otherwise a slice that was requested here is deleted after success
  --max_failures=3       end after this many failures in a row without a new checkpoint, not counting preemptions
  --poll_s=30            seconds between requests for the state of the queue
  --price=USD            price of a chip and hour, to show what a slice costs that is left; default: not shown
  --no_check             do not check the command on this machine first (`vit-jax check`)
  --dry_run              print every command, run none
  --stop                 only make the job save and end
  --delete               only delete the slice

Exit status: 0 done; 2 something that you must change, see the message; 75 ended by --stop, or the environment failed
too often; 130 interrupted, while the job continues; else that of the last failure. README.md has the rule.
TEXT
}

say() {
  printf '%s %s\n' "$(date +%H:%M:%S)" "$*" >&2
}

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/flags.sh
source "$ROOT/launch/flags.sh"
# shellcheck source=launch/check.sh
source "$ROOT/launch/check.sh"
# shellcheck source=launch/statuses.sh
source "$ROOT/launch/statuses.sh"

name='' type='' zone='' project='' runtime='' workdir='' data='' data_mode=mount cache_dir='' setup='' fetch=''
tier='' action=run keep='' dry_run='' max_failures=3 poll_s=30 created='' create_flags=() envs=() words=()
slices=1 price='' no_check=''

parse() {
  local flags='name type zone project runtime workdir data data_mode cache_dir setup fetch max_failures poll_s'
  flags+=' slices price'
  while [ $# -gt 0 ]; do
    case "$1" in
      --spot | --reserved)
        if [ -n "$tier" ] && [ "$tier" != "$1" ]; then fail "expected one of $tier and $1, got both"; fi
        tier="$1" ;;
      --create_flag=*) create_flags+=("${1#*=}") ;;
      --env=*) envs+=("$1") ;;
      --keep) keep=1 ;;
      --no_check) no_check=1 ;;
      --dry_run) dry_run=1 ;;
      --stop) action=stop ;;
      --delete) action=delete ;;
      --) words=("${@:2}"); return ;;
      *) set_flag "$flags" "$1" ;;
    esac
    shift
  done
}

# suggest_type TYPE: prints the nearest type of the Cloud TPU API; nothing if none is near. Numbers are cores of v2 to v4
# and v5p, and chips of the others.
suggest_type() {
  local kind count="${1##*-}" one best=''
  kind="$(printf '%s' "${1%-*}" | tr '[:upper:]' '[:lower:]' | tr -d '_-')"
  case "$kind" in
    v2) set -- 8 32 128 256 512 ;;
    v3) set -- 8 32 64 128 256 512 1024 2048 ;;
    v4 | v5p) set -- ;;
    v5e | v5lite | v5litepod | v5litepods) kind=v5litepod; set -- 1 4 8 16 32 64 128 256 ;;
    v6 | v6e | v6epod | trillium) kind=v6e; set -- 1 4 8 16 32 64 128 256 ;;
    *) return 0 ;;
  esac
  [[ "$count" =~ ^[1-9][0-9]{0,5}$ ]] || { printf '%s\n' "$kind-8"; return 0; }
  if [ $# = 0 ]; then best=$(((count + 7) / 8 * 8)); fi
  for one in "$@"; do
    if [ -z "$best" ] || [ $((2 * count)) -gt $((best + one)) ]; then best="$one"; fi
  done
  printf '%s\n' "$kind-$best"
}

# Reports all problems at once.
check() {
  local problems=() near
  [ -n "$name" ] || problems+=('--name is missing')
  [ -n "$zone" ] || problems+=('--zone is missing')
  if [ "$action" = run ]; then
    [ -n "$type" ] || problems+=('--type is missing, such as v4-256')
    [ "${#words[@]}" -gt 0 ] || problems+=('expected a command after --, got none')
    [[ "$workdir" == gs://* ]] || problems+=("--workdir: expected gs://…, which all hosts share and which outlives them, got '$workdir'")
    [[ -z "$data" || "$data" == gs://* ]] || problems+=("--data: expected gs://…, got $data")
    [[ -z "$data" || "${words[*]-}" == *'{data}'* ]] || { [ -z "$no_check" ] && is_ours ${words[@]+"${words[@]}"}; } \
      || problems+=('--data: expected the word {data} in the command, for its folder on the hosts, got none')
    [[ "$data_mode" == mount || "$data_mode" == copy ]] || problems+=("--data_mode: expected mount or copy, got $data_mode")
    [[ "${words[*]-}" != *' --workdir='* || "${words[*]-}" == *'{workdir}'* ]] \
      || problems+=('--workdir: expected it before the --, got it in the command')
    [[ "$max_failures" =~ ^[0-9]+$ && "$poll_s" =~ ^[0-9]+$ ]] || problems+=('--max_failures and --poll_s: expected numbers')
    [[ -z "$price" || "$price" =~ ^[0-9]+([.][0-9]+)?$ ]] || problems+=("--price: expected a number, got $price")
  fi
  [[ "$slices" =~ ^[1-9][0-9]*$ ]] || problems+=("--slices: expected a whole number, got $slices")
  if [ -z "$runtime" ] && [ -n "$type" ]; then
    near="$(suggest_type "$type")"
    case "$type" in
      "$near") ;;
      tpu7x-* | v7x-*) ;;
      *) [ -z "$near" ] || problems+=("--type=$type: expected a type of the Cloud TPU API. Did you mean --type=$near?") ;;
    esac
    case "${near:-$type}" in
      v2-* | v3-* | v4-*) runtime=tpu-ubuntu2204-base ;;
      v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
      v5p-*) runtime=v2-alpha-tpuv5 ;;
      v6e-*) runtime=v2-alpha-tpuv6e ;;
      tpu7x-* | v7x-*) problems+=("--type=$type: expected a type of the Cloud TPU API, got one that is requested through GKE. See launch/k8s.yaml") ;;
      *) problems+=("--type=$type: expected a type with a known image. Set --runtime=VERSION") ;;
    esac
  fi
  fail_with ${problems[@]+"${problems[@]}"}
  [ -n "$dry_run" ] || command -v gcloud >/dev/null || fail 'gcloud: expected the Google Cloud CLI, which is not installed'
}

# Runs a command; with --dry_run prints it in a form that can be pasted into a shell.
run() {
  if [ -z "$dry_run" ]; then "$@"; return; fi
  local word line='' quote="'"
  for word in "$@"; do
    if ! [[ "$word" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then word="'${word//$quote/$quote\\$quote$quote}'"; fi
    line+=" $word"
  done
  printf '%s\n' "${line# }"
}

queue() {
  run gcloud compute tpus queued-resources "$1" "$name" "${place[@]}" "${@:2}"
}

# on_hosts ssh|scp N WORDS…: with hosts N (0 = the first of all, or all) of the slice, or of all slices.
on_hosts() {
  local kind=tpu-vm node=()
  if [ "$slices" -gt 1 ]; then kind=queued-resources node=(--node="$2"); fi
  if [ "$1" = ssh ]; then
    run gcloud compute tpus "$kind" ssh "$name" "${place[@]}" ${node[@]+"${node[@]}"} --worker="$2" --command="$3"
  else
    run gcloud compute tpus "$kind" scp "$3" "$name:$4" "${place[@]}" ${node[@]+"${node[@]}"} --worker="$2"
  fi
}

worker() {
  on_hosts ssh "$1" "bash vit_jax/launch/tpu_worker.sh $2"
}

# Whether a message of gcloud is about its service or the network, so that the same call may succeed later.
is_passing() {
  grep -qiE 'UNAVAILABLE|DEADLINE|INTERNAL|timed? ?out|connection|temporar|unreachable|HTTPError 5|429|50[0234]' <<< "$1"
}

# State of the queued resource, '' if there is none.
slice_state() {
  local out tries=0
  while true; do
    if out="$(queue describe --format='value(state.state)' 2>&1)"; then
      tail -n 1 <<< "${out:-of no known state}"  # it exists and must not be requested again
      return
    fi
    if grep -qiE 'NOT_FOUND|not found|was not found|does not exist' <<< "$out"; then return; fi
    is_passing "$out" || fail "the queue cannot be read: $out"
    tries=$((tries + 1))
    if [ "$tries" -gt "$max_failures" ]; then say "the queue cannot be read: $out"; exit 75; fi
    sleep "$poll_s"
  done
}

# States of all slices of the queued resource.
node_states() {
  local one nodes=("$name")
  if [ "$slices" -gt 1 ]; then nodes=(); for ((one = 0; one < slices; one++)); do nodes+=("$name-$one"); done; fi
  for one in "${nodes[@]}"; do
    run gcloud compute tpus tpu-vm describe "$one" "${place[@]}" --format='value(state)' 2>/dev/null || true
  done
}

# What the slices cost while they are left, and the command that deletes them. Types up to v4, and v5p, count cores, of
# which a chip has two.
cost_of_keeping() {
  local text="slice $name is left, and paid for" chips="${type##*-}"
  if [[ "$type" =~ -[0-9]+$ ]]; then
    case "$type" in v2-* | v3-* | v4-* | v5p-*) chips=$((chips / 2)) ;; esac
    chips=$((chips * slices))
    text+=": $chips chips, so every hour costs $chips chip-hours"
    if [ -n "$price" ]; then text+=", $(awk "BEGIN {printf \"%.2f\", $chips * $price}") USD at --price=$price"; fi
  fi
  echo "$text. Delete it: bash launch/tpu_pod.sh --name=$name --zone=$zone${project:+ --project=$project} --delete"
}

delete_slice() {
  queue delete --force --quiet
}

# Requests the slice; status 1 if the request may succeed later.
create_slice() {
  local nodes=(--node-id="$name") out status=0
  if [ "$slices" -gt 1 ]; then nodes=(--node-count="$slices" --node-prefix="$name"); fi
  out="$(queue create "${nodes[@]}" --accelerator-type="$type" --runtime-version="$runtime" ${tier:+"$tier"} \
    ${create_flags[@]+"${create_flags[@]}"} 2>&1)" || status=$?
  if [ -n "$out" ]; then printf '%s\n' "$out"; fi
  if [ "$status" -eq 0 ]; then created=1; return; fi
  is_passing "$out" && return 1
  fail "the request was refused; see above. In doubt: is there quota for $type in $zone${tier:+ with $tier}?"
}

# Returns when the slice is ready; requests it if needed, repeatedly.
ensure_slice() {
  local state before='' refused=0
  if [ -n "$dry_run" ]; then
    queue describe --format='value(state.state)'
    create_slice
    return
  fi
  while true; do
    state="$(slice_state)"
    if [ "$state" != "$before" ]; then say "slice $name: ${state:-none}"; fi
    before="$state"
    case "$state" in
      '')
        say "requesting $type in $zone"
        if create_slice >&2; then continue; fi
        refused=$((refused + 1))
        if [ "$refused" -gt "$max_failures" ]; then say "the request failed $refused times, see above"; exit 75; fi ;;
      ACTIVE)
        case "$(node_states)" in
          *PREEMPTED* | *TERMINATED* | *STOPPED*) say 'its hosts are gone; requesting them again'; delete_slice; continue ;;
          *) return ;;
        esac ;;
      SUSPENDED) say 'preempted; requesting it again'; delete_slice; continue ;;
      FAILED)
        refused=$((refused + 1))
        if [ "$refused" -gt "$max_failures" ]; then
          queue describe >&2 || true
          fail "the request failed $refused times; its state is above"
        fi
        delete_slice; sleep "$poll_s"; continue ;;
    esac
    sleep "$poll_s"
  done
}

# Copies the checkout, without generated files, to all hosts; then installs.
install() {
  local archive out remote
  archive="$(mktemp -d)/vit_jax.tgz"
  # Status 1 of tar: a file changed while it was read, for example by an editor.
  run tar -czf "$archive" -C "$ROOT" --exclude=./.git --exclude=./.venv --exclude=./runs --exclude=./build \
    --exclude=__pycache__ --exclude='.*_cache' --exclude='*.egg-info' . || [ $? -eq 1 ] || return 1
  on_hosts scp all "$archive" vit_jax.tgz || { rm -rf "$(dirname "$archive")"; return 1; }
  rm -rf "$(dirname "$archive")"
  # Unpacked into a new folder, so that files deleted here are deleted there too. The environment is kept.
  remote='set -e; rm -rf vit_jax.new; mkdir vit_jax.new; tar -xzf vit_jax.tgz -C vit_jax.new;'
  remote+=' if [ -d vit_jax/.venv ]; then mv vit_jax/.venv vit_jax.new/; fi; rm -rf vit_jax; mv vit_jax.new vit_jax'
  on_hosts ssh all "$remote" || return 1
  if [ -n "$setup" ]; then on_hosts ssh all "$setup" || return 1; fi
  if [ -n "$dry_run" ]; then worker all setup; return; fi
  out="$(worker all setup 2>&1 | tee /dev/stderr)" || true
  [[ "$out" == *VIT_JAX_READY* ]]
}

# Starts the job on all hosts, unless it is already running.
start() {
  local flags spec
  flags=(--spec=@ --workdir="$workdir" ${envs[@]+"${envs[@]}"})
  if [ -n "$data" ]; then flags+=(--data="$data" --data_mode="$data_mode"); fi
  if [ -n "$cache_dir" ]; then flags+=(--cache_dir="$cache_dir"); fi
  flags=("$(printf '%q ' "${flags[@]}" -- "${words[@]}")")
  spec="$(cksum <<< "${flags[0]}" | tr ' ' -)"
  if [ -z "$dry_run" ]; then
    case "$(worker 0 running 2>/dev/null || true)" in
      *"RUNNING $spec"*) say 'the job runs already; showing its output'; return ;;
      *RUNNING*) fail "another job runs on $name; end it with --stop, or take another --name" ;;
    esac
  fi
  install || return 1
  worker all "start ${flags[0]/@/$spec}" || true  # the status that follows reports a failure
}

# Shows the output of the first host from the last line shown, until the job or the connection ends.
show() {
  worker 0 "follow $(($(wc -l < "$output") + 1))" | tee -a "$output" || true
}

# The first host has ended: the others do so within the heartbeat timeout, 100 s, or never.
# The state of the job in one word, or that of `judge` with its status, from the answers of all hosts.
job_status() {
  local out words
  out="$(worker all "status ${VIT_JAX_WAIT_S:-150}" 2>/dev/null || true)"
  words=" $(grep -oE 'VIT_JAX_STATUS [^ ]+ [a-z0-9]+' <<< "$out" | awk '{print $3}' | sort -u | tr '\n' ' ')"
  case "$words" in
    *' 2 '*) echo 'final 2' ;;
    ' ' | *' lost '*) echo lost ;;
    *' stopped '*) echo stopped ;;
    ' running ') echo running ;;
    *' running '*) echo stuck ;;
    *) judge "$words" ;;
  esac
}

# Fetches the run and deletes the slice, which is not needed any more even if nothing could be fetched.
finish() {
  local status=75 tries
  mkdir -p "$fetch"
  for ((tries = 0; tries <= max_failures && status > 0; tries++)); do
    if [ "$tries" -gt 0 ]; then sleep "$poll_s"; fi
    if copy_back; then status=0; fi
  done
  if [ "$status" -eq 0 ]; then say "run directory: $fetch (checkpoints stay in $workdir)"
  else say "the run is done, but $workdir could not be fetched; see above"; fi
  if [ -n "$created" ] && [ -z "$keep" ]; then
    delete_slice
  else
    say "$(cost_of_keeping)"
  fi
  exit "$status"
}

copy_back() {
  run gcloud storage rsync --recursive --exclude='^(checkpoints|\.cache)/.*' "$workdir" "$fetch"
}

# Step of the newest checkpoint of the run; 0 if there is none or no host answers.
newest_checkpoint() {
  { worker 0 newest 2>/dev/null || true; } | awk '/^VIT_JAX_NEWEST [0-9]+$/ {step = $2} END {print step + 0}'
}

# Counts a failure, unless there is a checkpoint that is newer than at the one before; ends after too many in a row.
count_failure() {
  local now
  now="$(newest_checkpoint)"
  if [ "$now" -gt "$newest" ]; then
    say "$2 after it had saved step $now"
    newest="$now" failures=0
    return
  fi
  failures=$((failures + 1))
  say "$2 (failure $failures of at most $max_failures in a row)"
  if [ "$failures" -gt "$max_failures" ]; then
    say "giving up; $(cost_of_keeping)"
    exit "$1"
  fi
}

supervise() {
  local status began failures=0 newest=-1
  output="$(mktemp)"
  trap 'rm -f "$output"' EXIT
  trap 'say "the job continues; the same command line follows it again, --stop ends it"; exit 130' INT TERM
  while true; do
    ensure_slice
    if ! start; then
      # The slice may have been preempted meanwhile; its state shows it.
      if [ "$(slice_state)" = ACTIVE ]; then count_failure 1 'the hosts could not be made ready'; fi
      sleep "$poll_s"
      continue
    fi
    began=$SECONDS
    if [ "$newest" -lt 0 ]; then newest="$(newest_checkpoint)"; fi
    show
    if [ "$(slice_state)" != ACTIVE ]; then : > "$output"; continue; fi
    status="$(job_status)"
    case "$status" in
      'done 0') finish ;;
      'final 2')
        worker all message >&2 || true
        say "the program ended $((SECONDS - began)) s after its start; $(cost_of_keeping)"
        fail "the program reports something that you must change, see above. The same command line with it fixed runs" \
          "on the same slice at once" ;;
      stopped) say "stopped by --stop; $(cost_of_keeping)"; exit 75 ;;
      stuck) : > "$output"; worker all end || true; count_failure 1 'some hosts ended, others did not; ended them' ;;
      running) say 'connection lost; taking it up again' ;;
      lost) : > "$output"; count_failure 75 'a host does not answer' ;;
      'again 75') : > "$output"; count_failure 75 'the program stopped, or the environment failed; starting it again' ;;
      again*) : > "$output"; count_failure "${status#again }" "the program failed with status ${status#again }" ;;
    esac
    sleep "$((poll_s < 10 ? poll_s : 10))"
  done
}

main() {
  parse "$@"
  check
  place=(--zone="$zone" ${project:+--project="$project"})
  fetch="${fetch:-runs/$name}"
  if [ "$action" = run ] && [ -z "$no_check" ]; then
    check_command "$ROOT" --elsewhere --topology="$type" --slices="$slices" ${data:+--data="$data"} -- "${words[@]}" \
      || fail 'the command has problems, see above; nothing was requested'
  fi
  case "$action" in
    stop) worker all stop ;;
    delete) delete_slice ;;
    run)
      if [ -z "$dry_run" ]; then supervise; return; fi
      ensure_slice
      start
      worker 0 'follow 1'
      worker all 'status 150'
      copy_back
      if [ -z "$keep" ]; then delete_slice; fi ;;
  esac
}

main "$@"
