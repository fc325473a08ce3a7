"""Tables of train steps on TPUs by the compiler, ours beside big_vision's, from one command.

  python -m vit_jax.bench.tpu_tables DIR --big_vision=CHECKOUT [--only=v6e,L/16,fused] [--depths=2,4]

Each row is a program that is compiled with two small numbers of unrolled blocks; its times and memory at the complete
depth follow from `a + b depth`. All rows have the same batch per device, dtype, optimizer and no rematerialization.
Both times of `plan` are given, without collectives. DIR keeps the figures of each program in a file of its own, so that
a later call compiles only what is missing, and has the tables in `tables.md`. Nothing runs on a TPU.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vit_jax.bench import rival
from vit_jax.config import files
from vit_jax.core.errors import UserError
from vit_jax.plan import compile, compiled, plan, table, topologies

SIZES = {  # ViT paper, Table 1; G/14: Zhai et al. 2022, Table 2
    'L/16': {'patch': 16, 'width': 1024, 'depth': 24, 'mlp': 4096, 'heads': 16},
    'H/14': {'patch': 14, 'width': 1280, 'depth': 32, 'mlp': 5120, 'heads': 16},
    'G/14': {'patch': 14, 'width': 1664, 'depth': 48, 'mlp': 8192, 'heads': 16},
}
IMAGES = {'L/16': 64, 'H/14': 32, 'G/14': 16}
"""Images of a device; half as many on a core of v3, which has half of the memory."""
TOPOLOGIES = ('v6e:4x4', 'v5e:4x4', 'v4:2x2x4', 'v3:2x2')
"""16 devices; of v3 8 cores."""
NUM_EXAMPLES, NUM_CLASSES, IMAGE_PX = 1_281_167, 1_000, 224
OVERRIDES = (
    'train.accumulate=1', 'data.recipe.mixup=0', 'model.dropout=0', 'model.pool=mean', 'model.dtype=bf16',
    'model.execution=unrolled', 'model.remat=none', 'optimizer.mu_dtype=bf16',
    f'data.num_examples={NUM_EXAMPLES}', f'data.num_classes={NUM_CLASSES}')
"""What big_vision's step has, too."""
OURS = {'plain': 'xla', 'fused': 'fused'}
"""Names of our programs, and their `model.attention`."""
RIVALS: dict[str, tuple[int | None, bool]] = {
    'big_vision': (rival.WHOLE_MIB, False), 'big_vision, all sharded': (0, False),
    'big_vision, replicated': (None, False), 'big_vision, scanned': (rival.WHOLE_MIB, True)}
"""Names of big_vision's settings: MiB above which parameters are sharded, and whether blocks run in a loop. All have
the XLA flag that vit_jax sets by default. With a loop, nothing is saved for the backward pass."""


class Row(NamedTuple):
  """A program of the tables."""
  model: str
  topology: str
  program: str

  @property
  def batch(self) -> int:
    """Images of all devices."""
    images = IMAGES[self.model]
    return topologies.parse(self.topology).num_devices * (images // 2 if self.topology.startswith('v3') else images)

  def name(self, depth: int) -> str:
    """Of the file with its figures."""
    return re.sub(r'\W+', '_', f'{self.model} {self.topology} {self.program} {depth}')


class Figures(NamedTuple):
  """What the tables have of a program: both times and that of collectives in ms, and memory of a device in GiB."""
  estimate_ms: float
  scheduled_ms: float
  collectives_ms: float
  peak_gib: float

  def at(self, depth: int, *, own_depth: int, other: Figures, other_depth: int) -> Figures:
    """Figures at another depth, on the line through these and those of another depth."""
    share = (depth - own_depth) / (other_depth - own_depth)
    return Figures(*(a + (b - a) * share for a, b in zip(self, other, strict=True)))


def rows(only: Sequence[str] = ()) -> list[Row]:
  """All rows in order, or those that have one of the words of `only` for each of model, chip and program it names."""
  known = {'model': tuple(SIZES), 'chip': tuple(name.partition(':')[0] for name in TOPOLOGIES),
           'program': (*OURS, *RIVALS)}
  unknown = set(only) - {word for words in known.values() for word in words}
  if unknown:
    raise UserError(f'--only: expected words of {known}, got {", ".join(sorted(unknown))}.')
  asked = {kind: [word for word in only if word in words] or words for kind, words in known.items()}
  return [Row(model, topology, program) for model in SIZES for topology in TOPOLOGIES for program in (*OURS, *RIVALS)
          if model in asked['model'] and topology.partition(':')[0] in asked['chip'] and program in asked['program']
          and not (program == 'fused' and topology.startswith('v3'))]


def measure(row: Row, depth: int, *, checkout: str) -> Figures:
  """Compiles a row with so many blocks."""
  topology = topologies.parse(row.topology)
  if row.program in RIVALS:
    whole_mib, scan = RIVALS[row.program]
    network = {**SIZES[row.model], 'depth': depth, 'px': IMAGE_PX, 'classes': NUM_CLASSES}
    answer = rival.ask(rival.Request(checkout, row.topology, network, row.batch, whole_mib, scan))
  else:
    answer = compile.ask(_request(row, depth))
  if answer.overflow:
    raise UserError(f'{row}: {plan.overflow_text(answer.overflow)}.')
  assert answer.schedule, 'every TPU program has a schedule'
  sent = sum(one.sent_bytes for one in answer.costs.collectives if one.kind != compiled.BETWEEN_SLICES)
  ms = 1e3 / topology.chip.clock_hz
  return Figures(answer.costs.cycles * ms, answer.schedule.cycles * ms, 1e3 * sent / topology.chip.ring_bytes_s,
                 answer.peak_bytes / plan.GIB)


def _request(row: Row, depth: int) -> compile.Request:
  topology, sizes = topologies.parse(row.topology), {**SIZES[row.model], 'depth': depth}
  config = files.load('vit_l16_i1k', [
      *OVERRIDES, *(f'model.{name}={value}' for name, value in sizes.items()), f'batch_size={row.batch}',
      f'model.attention={OURS[row.program]}', f'mesh.fsdp={topology.num_devices}'])
  return plan.lay_out(plan.Subject(config, topology, NUM_EXAMPLES, NUM_CLASSES, in_memory=False)).request()


def collect(asked: Sequence[Row], depths: Sequence[int], folder: pathlib.Path, *, checkout: str) -> None:
  """Compiles what the folder lacks, and keeps the figures there."""
  for row in asked:
    for depth in depths if checkout or row.program in OURS else ():
      path = folder / f'{row.name(depth)}.json'
      if not path.exists():
        began = time.monotonic()
        figures = measure(row, depth, checkout=checkout)
        path.write_text(json.dumps({'row': row, 'depth': depth, **figures._asdict(), 'versions': plan.versions(),
                                    'date': time.strftime('%Y-%m-%d'), 'seconds': round(time.monotonic() - began)}))
        print(path.name, {name: round(value, 3) for name, value in figures._asdict().items()}, flush=True)


def found(row: Row, folder: pathlib.Path) -> dict[int, Figures]:
  """The figures of a row that the folder has, by depth."""
  result = {}
  for path in folder.glob('*.json'):
    content = json.loads(path.read_text())
    if tuple(content['row']) == row:
      result[content['depth']] = Figures(*(content[name] for name in Figures._fields))
  return dict(sorted(result.items()))


def complete(row: Row, folder: pathlib.Path) -> tuple[Figures, str] | None:
  """The figures of a row at its complete depth and the depths that they are from; None if there are not two."""
  by_depth = found(row, folder)
  if len(by_depth) < 2:
    return None
  (one, first), *_, (two, last) = by_depth.items()
  return first.at(SIZES[row.model]['depth'], own_depth=one, other=last, other_depth=two), f'{one}, {two}'


def render(folder: pathlib.Path) -> str:
  """The tables of all rows that the folder has, as Markdown."""
  return '\n\n'.join(_of_model(model, folder) for model in SIZES if any(
      complete(row, folder) for row in rows([model]))) + '\n'


def _of_model(model: str, folder: pathlib.Path) -> str:
  lines = [line for topology in TOPOLOGIES for line in _of_topology(model, topology, folder)]
  head = ('topology, images a device', 'program', 'estimate, ms', 'by schedule, ms', 'collectives, ms', 'peak GiB',
          'best big_vision / this', 'from depths')
  return f'{model}, {SIZES[model]["depth"]} blocks, {IMAGE_PX} px:\n\n' + table.table(head, lines)


def _of_topology(model: str, topology: str, folder: pathlib.Path) -> Iterator[tuple[str, ...]]:
  every = [row for row in rows([model]) if row.topology == topology]
  known = {row: figures for row in every if (figures := complete(row, folder))}
  others = [figures for row, (figures, _) in known.items() if row.program in RIVALS]
  for row, (own, depths) in known.items():
    ratios = '–'
    if row.program in OURS and others:
      ratios = (f'{min(x.estimate_ms for x in others) / own.estimate_ms:.2f}, '
                f'{min(x.scheduled_ms for x in others) / own.scheduled_ms:.2f}')
    estimate = f'{own.estimate_ms:.1f}' + ' without the kernels' * (row.program == 'fused')
    yield (f'{topology}, {row.batch // topologies.parse(topology).num_devices}', row.program, estimate,
           f'{own.scheduled_ms:.1f}', f'{own.collectives_ms:.1f}', f'{own.peak_gib:.2f}', ratios, depths)


def main(arguments: Sequence[str]) -> int:
  """Compiles what is missing, prints the tables, and writes them into the folder."""
  parser = argparse.ArgumentParser(prog='tpu_tables', description='Tables of train steps on TPUs by the compiler.')
  parser.add_argument('folder', help='keeps the figures of each program, and tables.md')
  parser.add_argument('--big_vision', default='', help='a checkout of big_vision; without it, its rows are left out')
  parser.add_argument('--only', default='', help='words with commas: models, chips, programs')
  parser.add_argument('--depths', default='2,4', help='two numbers of blocks to compile')
  given = parser.parse_args(arguments)
  folder = pathlib.Path(given.folder)
  folder.mkdir(parents=True, exist_ok=True)
  try:
    collect(rows(list(filter(None, given.only.split(',')))), [int(depth) for depth in given.depths.split(',')], folder,
            checkout=given.big_vision)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  text = render(folder)
  (folder / 'tables.md').write_text(text)
  print(text)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
