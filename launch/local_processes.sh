#!/usr/bin/env bash
# Runs a command as N processes of one run, with M simulated CPU devices each, on this machine:
#   bash launch/local_processes.sh 2 4 -- python -m vit_jax.main --config=digits --workdir=runs/two
# Output is prefixed with [i]; LOG_DIR=DIR writes DIR/0.log, DIR/1.log … instead. A free port is chosen.
# Ctrl-C and TERM go to all processes as TERM (the program saves and ends with 75). When a process fails, the others
# get SIGTERM. A process that does not end within GRACE_S seconds (60 on request, 15 after a failure) is killed.
# Exit status: that of all processes by the rule of statuses.sh (2 of any, else the largest failure, else 75, else 0),
# whichever ended first; a process that only this script has ended does not count. MAX_FAILURES=N starts all processes
# again after any status but 0 and 2, at most N times in a row without a new checkpoint in the command's --workdir. A
# command of this project is checked first, once for all processes (`vit-jax check`); NO_CHECK=1 skips that.
set -uo pipefail

usage() {
  sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

if [ "${1:-}" = --help ]; then usage; exit 0; fi
count="${1:-}" devices="${2:-}"
[[ "$count" =~ ^[1-9][0-9]*$ && "$devices" =~ ^[1-9][0-9]*$ && "${3:-}" = -- && $# -gt 3 ]] || { usage >&2; exit 2; }
shift 3
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/check.sh
source "$root/launch/check.sh"
# shellcheck source=launch/statuses.sh
source "$root/launch/statuses.sh"
if [ -z "${NO_CHECK:-}" ]; then check_here "$root" -- "$@" || exit 2; fi

# Process i of a start has pids[i] until it has ended; sent[i] is the status that follows from our last signal to it.
pids=() readers=() sent=() asked='' deadline='' signalled=''
folder="$(mktemp -d)"
# Each process leads its own group, so that the processes it started can be ended with it.
leader=()
if command -v setsid >/dev/null; then leader=(setsid); fi

say() {
  echo "local_processes: $*" >&3
}

# A free port below those that the system assigns.
find_port() {
  local port
  for _ in {1..50}; do
    port=$((20000 + RANDOM % 12000))
    if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then echo "$port"; return; fi
  done
}

# start I COMMAND…
start() {
  local out="$folder/$1" line
  if [ -n "${LOG_DIR:-}" ]; then
    exec 5>> "$LOG_DIR/$1.log"
  else
    rm -f "$out"
    mkfifo "$out"
    # All ends are opened here: a process that is killed before it has opened its own would leave its reader waiting.
    exec 4<> "$out" 5> "$out" 6< "$out"
    while IFS= read -r line || [ -n "$line" ]; do printf '[%s] %s\n' "$1" "$line"; done <&6 3>&- 4>&- 5>&- 6<&- &
    readers+=($!)
  fi
  XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices" JAX_PLATFORMS=cpu \
    JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo VIT_JAX_COORDINATOR="127.0.0.1:$port" \
    VIT_JAX_NUM_PROCESSES="$count" VIT_JAX_PROCESS_ID="$1" \
    ${leader[@]+"${leader[@]}"} "${@:2}" >&5 2>&1 < /dev/null 3>&- 4>&- 5>&- 6<&- &
  pids+=($!)
  exec 4>&- 5>&- 6<&-
}

# end_group I: kills process i and all that it started.
end_group() {
  if [ "${#leader[@]}" -gt 0 ]; then kill -KILL -- "-${pids[$1]}"; fi
  kill -KILL "${pids[$1]}"
}

# end_all SECONDS: signals the processes that are still running to end, and sets the deadline.
end_all() {
  local i
  asked=1 deadline=$((SECONDS + $1))
  for i in "${!pids[@]}"; do
    if kill -TERM "${pids[i]}"; then sent[i]=143; fi
  done
}

# shellcheck disable=SC2317,SC2329  # called by the trap below
on_signal() {
  if [ -n "$signalled" ]; then deadline=$SECONDS; return; fi
  signalled=1
  say "asked to stop; sending SIGTERM to all processes, waiting up to ${GRACE_S:-60} s"
  end_all "${GRACE_S:-60}"
}

# shellcheck disable=SC2317,SC2329  # called by the trap below
finish() {
  local i
  trap '' INT TERM
  for i in "${!pids[@]}"; do end_group "$i"; done
  for i in ${readers[@]+"${readers[@]}"}; do wait "$i"; done
  rm -rf "$folder"
}

# Runs all processes until the last has ended; `worst` is their status then.
run_all() {
  local i status statuses=() by_us=0
  pids=() readers=() sent=() asked='' deadline=''
  port="$(find_port)"
  if [ -z "$port" ]; then say 'no free port between 20000 and 31999'; exit 1; fi
  for ((i = 0; i < count; i++)); do start "$i" "$@"; done
  while [ "${#pids[@]}" -gt 0 ]; do
    for i in "${!pids[@]}"; do
      if kill -0 "${pids[i]}"; then continue; fi
      wait "${pids[i]}"
      status=$?
      end_group "$i"  # processes that it started and that still run
      unset "pids[i]"
      if [ "$status" -eq "${sent[i]:-0}" ] && [ "$status" -ne 0 ]; then by_us="$status"; continue; fi
      statuses+=("$status")
      if [ "$status" -eq 0 ] || [ -n "$asked" ]; then continue; fi
      if [ "$status" -ne 75 ]; then say "process $i ended with status $status"; fi
      end_all "${GRACE_S:-$((status == 75 ? 60 : 15))}"
    done
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
      for i in "${!pids[@]}"; do
        say "process $i did not end in time; killed"
        sent[i]=137
        end_group "$i"
      done
      deadline=$((SECONDS + 5))
    fi
    sleep 0.1
  done
  worst="$(judge ${statuses[@]+"${statuses[@]}"})"
  worst="${worst#* }"
  # That of the processes that ended by themselves, if they did not just finish.
  if [ "$worst" -eq 0 ]; then worst="$by_us"; fi
}

if [ -n "${LOG_DIR:-}" ]; then
  mkdir -p "$LOG_DIR" || exit 2
  for ((i = 0; i < count; i++)); do : > "$LOG_DIR/$i.log"; done
fi
trap on_signal INT TERM
trap finish EXIT
exec 3>&2 2> /dev/null  # without the messages of the shell about killed jobs; `say` prints those of this script
while true; do
  run_all "$@"
  if [[ "$(judge "$worst")" != again* ]] || [ -n "$signalled" ] || [ "${MAX_FAILURES:-0}" -eq 0 ]; then break; fi
  count_failure "$folder/failures" "$MAX_FAILURES" "$(find_workdir "$@")" >&3 || break
  say "ended with status $worst; starting all processes again"
done
exit "$worst"
