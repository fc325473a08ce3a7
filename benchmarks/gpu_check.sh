#!/usr/bin/env bash
# Runs the tests on a machine with one NVIDIA GPU, then times networks. Its parts tests and steps ran on an H200.
# See the usage text below, and BENCHMARKS.md, "Steps on a GPU".
set -uo pipefail

usage() {
  cat <<'TEXT'
bash benchmarks/gpu_check.sh [DIR] [FLAGS]

  DIR                    output folder; default: runs/gpu
  --python=PYTHON        an interpreter with all dependencies; default: .venv, made with jax for GPUs and the extra test
  --extra=gpu            extra of setup.py: gpu (CUDA 13) or gpu12 (CUDA 12)
  --wheels=FOLDER        install from the wheels in this folder, without a network; it must contain setuptools. With
                         --python or --quick they are unpacked into DIR/packages, before what that interpreter has
  --quick                the most important parts within ten minutes: tests/test_gpu.py, then steps of L/16 (scanned
                         layers) and B/16, batch 128, with attention by cuDNN and by XLA (benchmarks.steps), by python3
                         unless --python is set, beside its timm with torch.compile if it has it; makes DIR.tar.gz
  --rehearse             as --quick, on the CPU of any machine and with small shapes: shows that all parts can run
  --call=N               one of five calls within ten minutes each that measure what plans for GPUs assume, see
                         benchmarks.gpu_calls; also with --rehearse
  --torch=PYTHON         an interpreter with torch for CUDA and timm, to time them beside vit_jax
  --models=S/16,B/16,L/16
  --batch_sizes=256,256,128   the batch size of each network
  --turns=7              repetitions of every measurement
  --only=tests,bench,search,switches
                         tests: kernels, steps, weights of other programs;  bench: attention by XLA and by cuDNN with
                         the batch sizes above;  search: both with the largest batch that fits;  switches: the second
                         network with stacked and with scanned layers, and with each set of XLA flags for GPUs
                         (vit_jax/parallel/xla_flags.py) with which training steps are those of a CPU

Writes DIR/summary.txt (one line per part: ok or failed, seconds), machine.txt (nvidia-smi, versions), a log of each
part, and a folder with bench.md and bench.json for each measurement. If a part fails, the others still run. Exit
status: 0 all parts succeeded, 1 a part failed, 2 invalid input or configuration.
TEXT
}

# shellcheck source=launch/flags.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/flags.sh"

# part NAME COMMAND…: runs it with a log of its own and a line in the summary. With --quick, for as long as is left.
part() {
  local name="$1" began="$SECONDS" result=ok
  printf '%s … ' "$name"
  if [ "$SECONDS" -ge "$limit_s" ]; then result=failed name="$1: no time left"
  elif ! limited "${@:2}" < /dev/null > "$to/$name.log" 2>&1; then result=failed
  fi
  printf '%s, %d s\n' "$result" "$((SECONDS - began))"
  printf '%-7s %5d s  %s\n' "$result" "$((SECONDS - began))" "$name" >> "$to/summary.txt"
  [ "$result" = ok ] || { failures=$((failures + 1)); return 1; }
}

# limited COMMAND…: functions are run as they are; programs are stopped at the limit.
limited() {
  if [ "$(type -t "$1")" = function ]; then "$@"; else timeout "$((limit_s - SECONDS))" "$@"; fi
}

describe_machine() {
  if [ -n "$rehearse" ]; then
    "$python" -c 'import jax; print(jax.devices(), "jax", jax.__version__)'
    return
  fi
  nvidia-smi
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap,clocks.max.sm,power.limit --format=csv
  "$python" -m pip list --format=freeze 2>/dev/null | grep -iE '^(jax|nvidia|flax|numpy|optax)'
  if [ -n "$torch" ]; then
    "$torch" -c 'import torch, timm; print("torch", torch.__version__, "timm", timm.__version__)'
  fi
  "$python" -c 'import jax
d = jax.devices()[0]
print(d.device_kind, d.platform, getattr(d, "compute_capability", ""), "jax", jax.__version__)
raise SystemExit(d.platform != "gpu")'
}

# run_pytest VARIABLES… -- FILES…. By default GPUs round f32 products to tf32; the tests compare to 1e-5, so the highest
# precision is set.
run_pytest() {
  local platform=cuda,cpu variables=()
  while [ "$1" != -- ]; do variables+=("$1"); shift; done
  if [ -n "$rehearse" ]; then platform=cpu; fi
  VIT_JAX_TEST_PLATFORM="$platform" VIT_JAX_REHEARSE="$rehearse" JAX_DEFAULT_MATMUL_PRECISION=highest \
    limited env ${variables[@]+"${variables[@]}"} "$python" -m pytest -q -p no:cacheprovider -rs "${@:2}"
}

run_tests() {
  local files=(tests/test_gpu.py)
  if [ -z "$quick" ]; then
    files+=(tests/models/test_fast_forms.py tests/models/test_attend_kernels.py tests/weights/test_golden.py)
  elif "$python" -c 'import xdist' 2>/dev/null; then files+=(-n 4)  # most of it is compilation
  fi
  run_pytest -- "${files[@]}"
}

# run_flag_tests SET: training steps with a set of XLA flags, compared with those of a CPU.
run_flag_tests() {
  local variables=() line
  while IFS= read -r line; do variables+=("$line"); done < <("$python" -m vit_jax.parallel.xla_flags "$1")
  run_pytest ${variables[@]+"${variables[@]}"} -- tests/test_gpu.py -k 'steps or training'
}

# bench NAME MODEL ATTENTION BATCH FLAGS…: without crops the images stay in memory, which needs neither cv2 nor grain.
bench() {
  local name="$1" model="$2" attention="$3" batch="$4"
  shift 4
  part "$name" "$python" -m benchmarks.bench --config=bench:bf16 --models="$model" --turns="$turns" \
    --config.model.attention.kernel="$attention" --config.batch_size="$batch" --config.data.recipe.crop=resize \
    --to="$to/$name" "${small[@]}" "$@"
}

# An unrolled step of L/16 takes minutes to compile, a scanned one about one.
bench_quick() {
  local i kernel rows='' row
  for i in "${!networks[@]}"; do
    for kernel in $(printf '%s\n' "$best" xla | uniq); do
      row="${networks[i]}:${sizes[i]}:attention.kernel=$kernel"
      if [ "${networks[i]}" = L/16 ]; then row="$row:execution=scan"; fi
      if [ -n "$rehearse" ]; then row="$row:depth=2"; fi
      rows="$rows${rows:+,}$row"
    done
  done
  part steps "$python" -m benchmarks.steps --rows="$rows" --turns="$turns" --to="$to/steps" "${against[@]}"
}

bench_all() {
  local i attention flags=("${@:2}") kind="$1"
  for i in "${!networks[@]}"; do
    for attention in xla cudnn; do
      bench "$kind-${networks[i]/\//_}-$attention" "${networks[i]}" "$attention" "${sizes[i]}" "${flags[@]}"
    done
  done
}

bench_switches() {
  local i=$((${#networks[@]} > 1)) name
  bench flags-none "${networks[i]}" "$best" "${sizes[i]}"
  bench layers-scanned "${networks[i]}" "$best" "${sizes[i]}" --config.model.execution=scan
  "$python" -m vit_jax.parallel.xla_flags > "$to/flags.txt"
  while IFS= read -r name; do
    if part "tests-$name" run_flag_tests "$name"; then
      bench "flags-$name" "${networks[i]}" "$best" "${sizes[i]}" --flags="$name"
    fi
  done < <("$python" -m vit_jax.parallel.xla_flags gpu)
}

to=runs/gpu python='' extra=gpu wheels='' torch='' turns=7 only=tests,bench,search,switches failures=0
models=S/16,B/16,L/16 batch_sizes=256,256,128 call='' quick='' rehearse='' limit_s=1000000 best=cudnn small=()
case " $* " in
  *' --rehearse '*)
    models=S/16,Ti/16 batch_sizes=4,4 turns=1 only=tests,bench,switches best=xla
    small=(--px=32 --config.model.depth=2) ;;
  *' --quick '*) models=L/16,B/16 batch_sizes=128,128 turns=3 only=tests,bench limit_s=560 ;;
esac
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=1 ;;
    --rehearse) quick=1 rehearse=1 ;;
    -*) set_flag 'python extra wheels torch models batch_sizes turns only call' "$1" ;;
    *) to="$1" ;;
  esac
  shift
done
IFS=, read -ra networks <<< "$models"
IFS=, read -ra sizes <<< "$batch_sizes"
[ "${#networks[@]}" = "${#sizes[@]}" ] || fail "--models has ${#networks[@]} networks, but --batch_sizes ${#sizes[@]}"
for word in ${only//,/ }; do
  [[ " tests bench search switches " = *" $word "* ]] || fail "--only: expected some of tests,bench,search,switches, got $word"
done
[[ -z "$call" || "$call" = [1-5] ]] || fail "--call: expected 1 to 5, got $call"
[ -n "$rehearse" ] || command -v nvidia-smi >/dev/null || fail 'nvidia-smi: expected a machine with an NVIDIA GPU and its driver, got none'
[ -z "$wheels" ] || [ -d "$wheels" ] || fail "--wheels=$wheels: no such folder"

mkdir -p "$to" || fail "$to: expected a folder that can be created"
to="$(cd "$to" && pwd)"
wheels="${wheels:+$(cd "$wheels" && pwd)}"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
: > "$to/summary.txt"
if [ -n "$quick" ]; then
  python="${python:-python3}"
  if [ -z "$torch" ] && "$python" -c 'import torch, timm' 2> "$to/torch.log"; then torch="$python"; fi
fi
if [ -n "$python" ] && [ -n "$wheels" ]; then
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade --target "$to/packages" \
    "$wheels"/*.whl > "$to/install.log" 2>&1 || fail "the wheels could not be installed; see $to/install.log"
  export PYTHONPATH="$to/packages${PYTHONPATH:+:$PYTHONPATH}"
fi
if [ -z "$python" ]; then
  # shellcheck source=launch/setup_env.sh
  source launch/setup_env.sh
  if [ -n "$wheels" ]; then export PIP_NO_INDEX=1 PIP_FIND_LINKS="$wheels"; fi
  setup_env "$extra,test" || fail 'the installation failed. Set --python=PYTHON to an interpreter with all dependencies'
  python="$VENV/bin/python"
fi
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-.9}"
against=()
if [ -n "$torch" ]; then
  against=("--against=timm=$torch,timm-compiled=$torch")
  if [ -n "$quick" ]; then against=("--against=timm-compiled=$torch"); fi
fi
# Several programs share one GPU: none may reserve all of its memory.
if [ -n "$torch$quick" ]; then export XLA_PYTHON_CLIENT_PREALLOCATE=false; fi
if [ -n "$rehearse" ]; then export JAX_PLATFORMS=cpu; fi
if [ -n "$call" ]; then
  exec "$python" -m benchmarks.gpu_calls --call="$call" --to="$to" ${torch:+--torch="$torch"} ${rehearse:+--rehearse}
fi
part machine describe_machine || fail "jax sees no GPU here; see $to/machine.log"
mv "$to/machine.log" "$to/machine.txt"
if [[ ",$only," = *,tests,* ]]; then part tests run_tests; fi
if [[ ",$only," = *,bench,* ]]; then
  if [ -n "$quick" ]; then bench_quick; else bench_all bench "${against[@]}"; fi
fi
if [[ ",$only," = *,search,* ]]; then bench_all search --search; fi
if [[ ",$only," = *,switches,* ]]; then bench_switches; fi
if [ -n "$quick" ]; then tar -czf "$to.tar.gz" --exclude=packages -C "$(dirname "$to")" "$(basename "$to")"; fi
echo "Results are in $to. Failed parts: $failures"
[ "$failures" = 0 ]
