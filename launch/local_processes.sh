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
  sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

if [ "${1:-}" = --help ]; then (usage 2>&1) || exit 0; fi
count="${1:-}" devices="${2:-}"
[[ "$count" =~ ^[1-9][0-9]*$ && "$devices" =~ ^[1-9][0-9]*$ && "${3:-}" = -- && $# -gt 3 ]] || usage
shift 3

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/check.sh
source "$root/launch/check.sh"
# shellcheck source=launch/statuses.sh
source "$root/launch/statuses.sh"
if [ -z "${NO_CHECK:-}" ]; then check_here "$root" -- "$@" || exit 2; fi

folder="$(mktemp -d)"
signalled=''
# Each process leads its own group, so that the processes it started can be ended with it.
leader=()
if command -v setsid >/dev/null; then leader=(setsid); fi

# A free port below those that the system assigns.
find_port() {
  local port
  for _ in {1..50}; do
    port=$((20000 + RANDOM % 12000))
    if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then echo "$port"; return; fi
  done
}

# Passes its input on, line by line, with a name in front.
prefix() {
  local line
  while IFS= read -r line || [ -n "$line" ]; do printf '[%s] %s\n' "$1" "$line"; done
}

start() {
  local i="$1" out="$folder/$1"
  if [ -n "${LOG_DIR:-}" ]; then
    out="$LOG_DIR/$i.log"
    if [ -z "$attempts" ]; then : > "$out"; fi
    exec 5>> "$out"
  else
    rm -f "$out"
    mkfifo "$out"
    # All ends are opened here: a process that is killed before it has opened its own would leave its reader waiting.
    exec 4<> "$out" 5> "$out" 6< "$out"
    prefix "$i" <&6 3>&- 4>&- 5>&- 6<&- &
    readers+=($!)
  fi
  XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices" JAX_PLATFORMS=cpu \
    JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo VIT_JAX_COORDINATOR="127.0.0.1:$port" \
    VIT_JAX_NUM_PROCESSES="$count" VIT_JAX_PROCESS_ID="$i" \
    ${leader[@]+"${leader[@]}"} "${@:2}" >&5 2>&1 < /dev/null 3>&- 4>&- 5>&- 6<&- &
  pids+=($!)
  exec 4>&- 5>&- 6<&-
}

# Sends signal $1 to process $2 and, if $3 is given, to all processes that it started.
send() {
  if [ -n "${3:-}" ] && [ "${#leader[@]}" -gt 0 ]; then kill "-$1" -- "-$2" 2>/dev/null; fi
  kill "-$1" "$2" 2>/dev/null
}

# Signals the processes that are still running to end, and sets the deadline. `sent` is the status that follows.
end_all() {
  local i
  deadline=$((SECONDS + $1))
  for i in "${!pids[@]}"; do
    if [ -z "${ended[i]:-}" ] && send TERM "${pids[i]}"; then sent[i]=143; fi
  done
}

# shellcheck disable=SC2317,SC2329  # called by the trap below
on_signal() {
  if [ -n "$signalled" ]; then deadline=$SECONDS; return; fi
  signalled=1 asked=1
  echo "local_processes: asked to stop; sending SIGTERM to all processes, waiting up to ${GRACE_S:-60} s" >&3
  end_all "${GRACE_S:-60}"
}

# Records that process $1 ended with status $2.
note_end() {
  local i="$1" status="$2"
  ended[i]=1
  # Processes that it started and that still run are ended too.
  send KILL "${pids[i]}" group
  if [ "$status" -eq "${sent[i]:-0}" ]; then
    by_us="$status"  # it had not ended by itself
    return
  fi
  statuses+=("$status")
  if [ "$status" -eq 0 ] || [ -n "$asked" ]; then return; fi
  asked=1
  if [ "$status" -eq 75 ]; then
    end_all "${GRACE_S:-60}"
  else
    echo "local_processes: process $i ended with status $status" >&3
    end_all "${GRACE_S:-15}"
  fi
}

# The status of all processes: that of those that ended by themselves, if they did not just finish.
judge_all() {
  local verdict
  verdict="$(judge ${statuses[@]+"${statuses[@]}"})"
  worst="${verdict#* }"
  if [ "$worst" -eq 0 ]; then worst="$by_us"; fi
}

# shellcheck disable=SC2317,SC2329  # called by the trap below
finish() {
  local i
  trap '' INT TERM
  for i in "${!pids[@]}"; do
    if [ -z "${ended[i]:-}" ]; then send KILL "${pids[i]}" group; fi
  done
  for i in ${readers[@]+"${readers[@]}"}; do wait "$i" 2>/dev/null; done
  rm -rf "$folder"
}

# Runs all processes until the last has ended; `worst` is their status then.
run_all() {
  local n running=$count
  pids=() readers=() ended=() sent=() statuses=() asked='' deadline='' by_us=0
  port="$(find_port)"
  if [ -z "$port" ]; then echo 'local_processes: no free port between 20000 and 31999' >&3; exit 1; fi
  for ((n = 0; n < count; n++)); do start "$n" "$@"; done
  attempts+=1
  while [ "$running" -gt 0 ]; do
    for n in "${!pids[@]}"; do
      if [ -n "${ended[n]:-}" ] || kill -0 "${pids[n]}" 2>/dev/null; then continue; fi
      wait "${pids[n]}" 2>/dev/null
      note_end "$n" $?
      running=$((running - 1))
    done
    if [ "$running" -gt 0 ] && [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
      for n in "${!pids[@]}"; do
        if [ -z "${ended[n]:-}" ]; then
          echo "local_processes: process $n did not end in time; killed" >&3
          sent[n]=137
          send KILL "${pids[n]}" group
        fi
      done
      deadline=$((SECONDS + 5))
    fi
    sleep 0.1
  done
  judge_all
}

# Suppresses the messages of the shell about killed jobs; this script prints its own.
exec 3>&2
attempts='' pids=() readers=() ended=() sent=() asked='' deadline=''
if [ -n "${LOG_DIR:-}" ]; then mkdir -p "$LOG_DIR" || exit 2; fi
trap on_signal INT TERM
trap finish EXIT
exec 2> /dev/null
while true; do
  run_all "$@"
  if [[ "$(judge "$worst")" != again* ]] || [ -n "$signalled" ] || [ "${MAX_FAILURES:-0}" -eq 0 ]; then break; fi
  count_failure "$folder/failures" "$MAX_FAILURES" "$(find_workdir "$@")" >&3 || break
  echo "local_processes: ended with status $worst; starting all processes again" >&3
done
exit "$worst"
