"""Measures what plans for GPUs assume, in five calls of at most ten minutes each, on a machine with one GPU.

  python -m benchmarks.gpu_calls --call=1 --to=DIR [--torch=PYTHON] [--rehearse]

1. products: TFLOP/s of each product of B/16 and L/16, forward and backward, with cuBLAS and with Triton, and of cuDNN's
   attention at 196 to 200 tokens; `gpu_kernels.PRODUCTS` and `ATTENTION` are assumptions about these.
2. steps of B/16 and S/16, by the flags of the project and by XLA's defaults, beside timm with torch.compile.
3. a profile of the step of B/16: the time of the kernels of each kind beside its estimate.
4. steps of L/16: scanned, scanned with `remat=names`, and unrolled.
5. the digest of three runs of digits, and a step of B/16 with deterministic operations.

The files of call N are in DIR/N; `summary.txt` has a line for each part. `--rehearse` runs on the CPU, with small
shapes.
"""
from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from vit_jax.plan import gpu_kernels, hlo, table, topologies

XLA_DEFAULTS = '--xla_gpu_enable_triton_gemm=true --xla_allow_excess_precision=true'
DETERMINISTIC = '--xla_gpu_deterministic_ops=true'
LIMIT_S = 560.
REPEATS = 50
WIDTHS = {'B/16': (768, 3072), 'L/16': (1024, 4096)}
TOKENS = (196, 197, 198, 200)


def product_times(rows: int, repeats: int, widths: dict[str, tuple[int, int]]) -> Iterator[tuple[str, float]]:
  """Yields each product of the blocks of a network, by name, with its TFLOP/s in bfloat16."""
  import jax
  import jax.numpy as jnp
  for name, (width, hidden) in widths.items():
    for inner, outer in ((width, width), (width, hidden), (hidden, width)):
      x, kernel, dy = (jnp.ones(shape, jnp.bfloat16) for shape in ((rows, inner), (inner, outer), (rows, outer)))
      forms: dict[str, Callable[[], Any]] = {
          'forward': jax.jit(lambda x=x, w=kernel: x @ w), 'of the input': jax.jit(lambda dy=dy, w=kernel: dy @ w.T),
          'of the kernel': jax.jit(lambda x=x, dy=dy: x.T @ dy),
          'forward with bias and GELU': jax.jit(lambda x=x, w=kernel: jax.nn.gelu(x @ w + w[0]))}
      for what, run in forms.items():
        yield f'{name} {inner} to {outer}, {what}', 2 * rows * inner * outer / seconds(run, repeats) / 1e12


def attention_times(images: int, repeats: int, implementation: Literal['xla', 'cudnn']) -> Iterator[tuple[str, float]]:
  """Yields attention of 12 heads forward, and forward with backward, by the number of tokens, with its TFLOP/s."""
  import jax
  import jax.numpy as jnp
  for tokens in TOKENS:
    if tokens % 2:
      continue  # jax refuses the gradient for odd numbers
    x = jnp.ones((images, tokens, 12, 64), jnp.bfloat16)

    def forward(x: Any = x) -> Any:
      return jax.nn.dot_product_attention(x, x, x, implementation=implementation)

    def both(x: Any = x, forward: Any = forward) -> Any:
      return jax.grad(lambda x: forward(x).astype(jnp.float32).sum())(x)
    flops = 4 * images * 12 * tokens**2 * 64 / 1e12
    yield f'attention, {tokens} tokens, forward', flops / seconds(jax.jit(forward), repeats)
    yield (f'attention, {tokens} tokens, forward and backward',
           flops * (1 + gpu_kernels.BACKWARD_PRODUCTS) / seconds(jax.jit(both), repeats))


def seconds(run: Callable[[], Any], repeats: int) -> float:
  """Returns the median seconds of five turns of a function, after a first call."""
  import jax
  jax.block_until_ready(run())
  turns = []
  for _ in range(5):
    began = time.perf_counter()
    for _ in range(repeats):
      last = run()
    jax.block_until_ready(last)
    turns.append((time.perf_counter() - began) / repeats)
  return statistics.median(turns)


def profiled(row: str, steps: int, folder: pathlib.Path, card: str) -> str:
  """Returns a table of the kernels of a train step by kind: measured and estimated ms."""
  import jax

  from benchmarks import steps as timed_steps
  compiled = timed_steps.compile_row(timed_steps.Wanted.parse(row))
  run = compiled.run()
  run(2)
  with jax.profiler.trace(str(folder / 'trace')):
    run(steps)
  measured = {name: ns / steps for name, ns in kernel_ns(folder / 'trace').items()}
  (folder / 'kernels.json').write_text(json.dumps(measured, indent=1))
  program = hlo.parse(compiled.text)
  clock = gpu_kernels.Clock(program, topologies.CHIPS[card].hbm_bytes_s)
  sums: dict[str, list[float]] = collections.defaultdict(lambda: [0., 0., 0.])
  for visit in program.walk():
    kernel = None if visit.is_inside('fusion') else clock.kernel(visit.instruction, visit.computation)
    if kernel:
      measured_ms = measured.pop(visit.instruction.name, 0.) / 1e6
      for i, value in enumerate((visit.times, 1e3 * visit.times * kernel.seconds, measured_ms)):
        sums[kernel.kind][i] += value
  sums['in no instruction of the program'][2] = sum(measured.values()) / 1e6
  sums['all'] = [sum(row[i] for row in sums.values()) for i in range(3)]
  return table.table(['kind and phase', 'kernels', 'estimated ms', 'measured ms'], [
      [name, f'{count:,.0f}', f'{estimate:.2f}', f'{real:.2f}'] for name, (count, estimate, real) in sums.items()])


def kernel_ns(folder: pathlib.Path) -> dict[str, float]:
  """Returns the nanoseconds of a profile by the name of the instruction whose kernel ran."""
  found: dict[str, float] = collections.defaultdict(float)
  for path in folder.glob('plugins/profile/*/*.trace.json.gz'):
    for event in json.loads(gzip.decompress(path.read_bytes()))['traceEvents']:
      if name := event.get('args', {}).get('hlo_op'):
        found[name] += 1e3 * event['dur']
  return found


class Call:
  """The parts of one call; each is a process of its own, as XLA reads its flags once."""

  def __init__(self, given: argparse.Namespace) -> None:
    self.to, self.small, self.torch = given.to / str(given.call), given.rehearse, given.torch
    self.to.mkdir(parents=True, exist_ok=True)
    self._began, self.failed = time.monotonic(), 0

  def part(self, name: str, *words: str, flags: str = '') -> str:
    """Runs Python with these words and returns its output, which is also in NAME.log."""
    began, left = time.monotonic(), LIMIT_S - (time.monotonic() - self._began)
    environ = {**os.environ, 'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {flags}'.strip(),
               **({'JAX_PLATFORMS': 'cpu'} if self.small else {})}
    with open(self.to / f'{name}.log', 'w') as log:
      try:
        status = subprocess.run([sys.executable, *words], env=environ, stdout=log, stderr=subprocess.STDOUT,
                                timeout=max(1., left)).returncode
      except subprocess.TimeoutExpired:
        status = 124
    self.failed += status != 0
    line = f'{"ok" if status == 0 else f"failed {status}":<11} {time.monotonic() - began:5.0f} s  {name}'
    with open(self.to / 'summary.txt', 'a') as summary:
      print(line, file=summary)
    print(line, flush=True)
    return (self.to / f'{name}.log').read_text()

  def steps(self, name: str, rows: str, *, flags: str = '', beside: bool = False) -> None:
    """Times steps with `benchmarks.steps`."""
    rows = ','.join(f'{row}:depth=2' for row in rows.split(',')) if self.small else rows
    rows = rows.replace(':128', ':2').replace(':256', ':2').replace('B/16', 'Ti/16') if self.small else rows
    against = [f'--against=timm-compiled={self.torch}'] * bool(beside and self.torch)
    self.part(name, '-m', 'benchmarks.steps', f'--rows={rows}', '--turns=3', f'--to={self.to / name}', *against,
              flags=flags)


def products(call: Call) -> None:
  for name, flags in {'cublas': '', 'xla_defaults': XLA_DEFAULTS}.items():
    call.part(name, '-m', 'benchmarks.gpu_calls', '--inner=products', *['--rehearse'] * call.small, flags=flags)


def steps(call: Call) -> None:
  call.steps('B_16', 'B/16:128', beside=True)
  call.steps('B_16_xla_defaults', 'B/16:128', flags=XLA_DEFAULTS)
  call.steps('S_16', 'S/16:256', beside=True)
  call.steps('B_16_again', 'B/16:128', beside=True)


def profile(call: Call) -> None:
  call.part('profile', '-m', 'benchmarks.gpu_calls', '--inner=profile', f'--to={call.to}',
            *['--rehearse'] * call.small)


def large(call: Call) -> None:
  call.steps('L_16_scanned', 'L/16:128:execution=scan,L/16:128:execution=scan:remat=names')
  call.steps('L_16', 'L/16:128:execution=unrolled', beside=True)


def digests(call: Call) -> None:
  found = []
  for i in range(3):
    with tempfile.TemporaryDirectory() as folder:
      call.part(f'digits_{i}', '-m', 'vit_jax.main', 'train', '--config=digits', '--config.length=40 steps',
                f'--workdir={folder}/run', flags=DETERMINISTIC)
      final = pathlib.Path(folder, 'run', 'final.json')
      found.append(json.loads(final.read_text())['params_digest'] if final.exists() else 'none')
  (call.to / 'digests.txt').write_text('\n'.join(found) + '\n')
  print(f'{len(set(found))} digest(s) of 3 runs: {", ".join(sorted(set(found)))}')
  call.failed += len(set(found)) != 1
  call.steps('B_16_deterministic', 'B/16:128', flags=DETERMINISTIC)


CALLS = (products, steps, profile, large, digests)


def inner(given: argparse.Namespace) -> int:
  """What runs in a process of its own: `products` or `profile`; prints its table."""
  from vit_jax.jobs import startup
  from vit_jax.parallel import xla_flags
  xla_flags.choose(os.environ, 'gpu', ())
  startup.start()
  import jax
  kind, small = jax.devices()[0].device_kind, given.rehearse
  print(f'{kind}, jax {jax.__version__}, XLA_FLAGS={os.environ.get("XLA_FLAGS", "")}\n')
  if given.inner == 'products':
    rows = [*product_times(64 if small else 198 * 128, 2 if small else REPEATS,
                           {'Ti/16': (48, 96)} if small else WIDTHS),
            *attention_times(1 if small else 128, 2 if small else REPEATS, 'xla' if small else 'cudnn')]
    print(table.table(['product', 'TFLOP/s'], [[name, f'{rate:,.1f}'] for name, rate in rows]))
    return 0
  card = next((name for name in topologies.CHIPS if name in kind.lower()), 'h200')
  text = profiled('Ti/16:2:depth=2' if small else 'B/16:128', 5, given.to, card)
  (given.to / 'profile.md').write_text(f'{text}\n')
  print(text)
  return 0


def main(arguments: Sequence[str]) -> int:
  """Runs a call and returns 0, or 1 if one of its parts failed."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.gpu_calls', description=__doc__, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--call', type=int, choices=range(1, len(CALLS) + 1), default=1)
  parser.add_argument('--to', type=pathlib.Path, default=pathlib.Path('runs/gpu_calls'), metavar='DIR')
  parser.add_argument('--torch', default='', metavar='PYTHON', help='an interpreter with torch for CUDA and timm')
  parser.add_argument('--rehearse', action='store_true', help='on the CPU, with small shapes')
  parser.add_argument('--inner', choices=('products', 'profile'), help=argparse.SUPPRESS)
  given = parser.parse_args(arguments)
  if given.inner:
    return inner(given)
  call = Call(given)
  CALLS[given.call - 1](call)
  return int(call.failed > 0)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
