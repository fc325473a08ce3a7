"""Times the train steps of several networks and settings on the devices of this machine, compiled side by side.

  python -m benchmarks.steps --rows=L/16:128,L/16:128:attention.kernel=xla --against=timm-compiled=PYTHON --to=DIR

A row is NETWORK:BATCH, followed by settings of the network, `:name=value`. `benchmarks.bench` compiles one network
after the other, which takes minutes for each on an accelerator; here all programs are compiled at the same time, by
threads, and then timed interleaved, with nothing else running. `--against` times other programs as `benchmarks.bench`
does, for the first row of each network and batch. `--limit_s` leaves out rows that are not compiled by then. `--flags`
names sets of XLA flags (`vit_jax/parallel/xla_flags.py`), which hold for all rows.

Weights are random numbers of the size of initial ones, as products of zeros are faster than those of real weights.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import json
import logging
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import peers, timing
from benchmarks.timing import Part, Spent
from vit_jax.config import check, files, schema
from vit_jax.core.errors import UserError
from vit_jax.parallel import xla_flags
from vit_jax.recipes import sizes

log = logging.getLogger('vit_jax.jobs')
INITIAL_STD = .02
Measure = Callable[[], dict[str, list[Spent]]]
Around = Callable[[Measure], dict[str, list[Spent]]]


class Wanted(NamedTuple):
  """A row as it was given: the name of a network, a batch, and settings of the network."""
  network: str
  batch_size: int
  settings: tuple[str, ...]

  @classmethod
  def parse(cls, text: str) -> Wanted:
    """Raises UserError if the text is no row."""
    network, _, rest = text.partition(':')
    batch, *settings = rest.split(':')
    if not batch.isdecimal() or not int(batch) or any('=' not in setting for setting in settings):
      raise UserError(f'--rows: expected NETWORK:BATCH or NETWORK:BATCH:SETTING=VALUE, got {text!r}.')
    return cls(network, int(batch), tuple(settings))

  @property
  def name(self) -> str:
    return ' '.join((self.network, *self.settings))

  def config(self) -> schema.Config:
    """Returns the config `bench:bf16` with this network and batch; attention by the best kernel of the device."""
    given = [f'model=ViT-{self.network}', f'batch_size={self.batch_size}', 'data.recipe.crop=resize',
             *(f'model.{setting}' for setting in ('dtype=bfloat16', *self.settings))]
    config = files.load('bench:bf16', given, models=sizes.model)
    check.check(config)
    return config


class Row(NamedTuple):
  """A compiled step. flops: per call.   bytes: peak memory of the program on a device.   text: of the program."""
  wanted: Wanted
  run: Callable[[], Part]
  flops: float
  compile_s: float
  bytes: int
  text: str


def compile_row(wanted: Wanted) -> Row:
  """Builds and compiles the train step of a row; nothing is placed on the devices until `Row.run` is called."""
  import jax
  import numpy as np

  from benchmarks import bench_parts
  from vit_jax.jobs import build
  from vit_jax.parallel import mesh as meshes
  config = wanted.config()
  *_, parts = build.open_run(config, build.open_data(config))
  program = parts.program
  lowered = program.step_fn.lower(program.abstract_state, build.abstract_batch(parts.config))
  began = time.perf_counter()
  step = lowered.compile()
  compile_s = time.perf_counter() - began
  log.info('%s is compiled after %.0f s.', wanted.name, compile_s)

  def run() -> Part:
    rng = np.random.default_rng(0)

    def value(leaf: jax.ShapeDtypeStruct) -> Any:
      if not np.issubdtype(leaf.dtype, np.floating) and leaf.dtype != jax.numpy.bfloat16:
        return np.zeros(leaf.shape, leaf.dtype)
      return (INITIAL_STD * rng.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)

    abstract = program.abstract_state
    filled = abstract._replace(**jax.tree.map(value, {'params': abstract.params, 'extra': abstract.extra}),
                               **jax.tree.map(lambda x: np.zeros(x.shape, x.dtype),
                                              {'step': abstract.step, 'opt': abstract.opt}))
    held = [jax.device_put(filled, program.shardings)]
    batch = jax.tree.map(
        lambda x: (rng.integers(0, 256, x.shape) if len(x.shape) == 4 else np.zeros(x.shape)).astype(x.dtype),
        build.abstract_batch(parts.config))
    placed = jax.device_put(batch, meshes.batch_sharding(parts.mesh))

    def timed(count: int) -> Spent:
      began = timing.now()
      for _ in range(count):
        held[0], metrics = step(held[0], placed)
      jax.block_until_ready(metrics)
      return timing.since(began)
    return timed

  return Row(wanted, run, build.train_flops(parts) * wanted.batch_size, compile_s, bench_parts.count_bytes(step),
             step.as_text() or '')


def compile_all(wanted: Sequence[Wanted], limit_s: float) -> Iterator[Row]:
  """Yields the rows that are compiled within the limit, as they were given; logs those that are not, or that fail."""
  pool, began = concurrent.futures.ThreadPoolExecutor(len(wanted)), time.perf_counter()
  futures = [pool.submit(compile_row, one) for one in wanted]
  for one, future in zip(wanted, futures, strict=True):
    try:
      yield future.result(max(0., limit_s - (time.perf_counter() - began)))
    except TimeoutError:
      log.warning('%s is not compiled after %.0f s and is left out.', one.name, limit_s)
    except (UserError, RuntimeError, ValueError) as error:
      log.warning('%s is left out: %s', one.name, str(error).splitlines()[0])
  pool.shutdown(wait=False, cancel_futures=True)


def matmul(side: int) -> Part:
  """Returns a square product in bf16, with which the steps are compared."""
  import jax
  import jax.numpy as jnp
  square = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
  multiply = jax.jit(lambda x: x @ x)

  def timed(count: int) -> Spent:
    began = timing.now()
    for _ in range(count):
      last = multiply(square)
    jax.block_until_ready(last)
    return timing.since(began)
  return timed


def render(rows: Sequence[Row], spent: Mapping[str, Sequence[Spent]], beside: Mapping[str, str], *,
           peak_flops: float, matmul_flops: float) -> str:
  """Returns the table in Markdown; `beside`: the row with which another program is compared, by its name."""
  from vit_jax.plan import table
  of, lines = {row.wanted.name: row for row in rows}, []
  for name, times in spent.items():
    seconds, row = [one.clock_s for one in times], of[beside.get(name, name)]
    middle, ours = statistics.median(seconds), [one.clock_s for one in spent[row.wanted.name]]
    rate, low, high = row.flops / middle, 1e3 * min(seconds), 1e3 * max(seconds)
    ratio = statistics.median(theirs / own for own, theirs in zip(ours, seconds, strict=True))
    lines.append([name, f'{row.wanted.batch_size}', f'{1e3 * middle:,.1f} ({low:,.1f} – {high:,.1f})',
                  f'{row.wanted.batch_size / middle:,.0f}', f'{rate / 1e12:,.1f}',
                  f'{rate / peak_flops:.1%}' if peak_flops else '–', f'{rate / matmul_flops:.1%}',
                  *([f'{ratio:.2f}×', '–', '–'] if name in beside else
                    ['–', f'{row.compile_s:.0f} s', f'{row.bytes / 2**30:.1f} GiB'])])
  return table.table(['step', 'batch', 'ms', 'images/s', 'TFLOP/s', 'of the peak', 'of a matmul', 'ours is faster',
                      'compiled in', 'memory'], lines)


class Other(NamedTuple):
  """Another program beside a row, by the name of the row."""
  name: str
  beside: str
  child: peers.Child


def open_peers(given: Sequence[peers.Peer], wanted: Sequence[Wanted]) -> Iterator[Other]:
  """Yields each program beside the first row of each network and batch, after a first step, which compiles."""
  first = {(one.network, one.batch_size): one for one in reversed(wanted)}
  for one in reversed(first.values()):
    for peer in given:
      try:
        child = peers.Child(peer, one.config(), num_classes=1_000)
        child.parts()['step'](1)
      except UserError as error:
        log.warning('%s beside %s is left out: %s', peer.name, one.name, error)
        continue
      yield Other(f'{one.network} of {child.label}', one.name, child)


def main(arguments: Sequence[str], *, around: Around = lambda measure: measure()) -> int:
  """Compiles, measures and prints. `around` calls the function that measures, when the machine is free for it."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.steps', description=__doc__, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--rows', required=True, metavar='NETWORK:BATCH[:SETTING=VALUE…],…')
  parser.add_argument('--against', default='', metavar='NAME[=PATH],…', help=', '.join(peers.PEERS))
  parser.add_argument('--flags', default='', metavar='NAME,…', help='sets of XLA flags')
  parser.add_argument('--turns', type=int, default=5)
  parser.add_argument('--limit_s', type=float, default=1e6)
  parser.add_argument('--to', type=pathlib.Path, default=None, metavar='DIR')
  given = parser.parse_args(arguments)
  try:
    wanted = [Wanted.parse(text) for text in given.rows.split(',')]
    programs = peers.parse(given.against.split(',')) if given.against else []
    xla_flags.choose(os.environ, 'gpu', filter(None, given.flags.split(',')))
    from vit_jax.jobs import startup
    startup.start()
    for one in wanted:
      one.config()
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    opened = pool.submit(lambda: list(open_peers(programs, wanted)))
    rows, others = list(compile_all(wanted, given.limit_s)), opened.result()
  try:
    text, found = _measured(rows, others, given.turns, around)
  finally:
    for other in others:
      other.child.close()
  print(text, flush=True)
  if given.to is not None:
    given.to.mkdir(parents=True, exist_ok=True)
    (given.to / 'steps.md').write_text(text + '\n', encoding='utf-8')
    (given.to / 'steps.json').write_text(json.dumps(found, indent=2) + '\n', encoding='utf-8')
  return 0


def _measured(rows: Sequence[Row], others: Sequence[Other], turns: int, around: Around) -> tuple[str, dict[str, Any]]:
  import jax

  from benchmarks import bench_parts
  from vit_jax.record import clock, machine
  side = bench_parts.MATMUL_SIDE[jax.devices()[0].platform]
  parts, known = {row.wanted.name: row.run() for row in rows}, {row.wanted.name for row in rows}
  beside = {other.name: other.beside for other in others if other.beside in known}
  parts |= {other.name: other.child.parts()['step'] for other in others if other.name in beside}
  parts[bench_parts.MATMUL] = matmul(side)
  spent = around(lambda: timing.take_turns(parts, turns=turns))
  matmul_flops = 2. * side**3 / statistics.median(one.clock_s for one in spent.pop(bench_parts.MATMUL))
  kind = jax.devices()[0].device_kind
  text = '\n'.join([f'{jax.device_count()} x {kind}, jax {jax.__version__}, medians of {turns} turns; a product of '
                    f'{side:,} x {side:,} matrices in bf16: {matmul_flops / 1e12:,.0f} TFLOP/s', '',
                    render(rows, spent, beside, peak_flops=clock.find_peak_flops(kind, 1) or 0.,
                           matmul_flops=matmul_flops)])
  return text, {'device_kind': kind, 'versions': machine.versions(), 'matmul_flops': matmul_flops,
                'steps': {name: [one._asdict() for one in times] for name, times in spent.items()},
                'rows': [{**row.wanted._asdict(), 'flops': row.flops, 'compile_s': row.compile_s, 'bytes': row.bytes}
                         for row in rows]}


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
