"""Tables of train steps on TPUs by the compiler, ours beside big_vision's, from one command.

  python -m benchmarks.tpu_tables DIR --big_vision=CHECKOUT [--only=v6e,L/16,fused] [--depths=4] [--into=FILE]

Each row is a program that is compiled with a small number of unrolled blocks. At the complete depth its operations
within blocks and the update of parameters take as much longer as there are more blocks, the others once; with two
numbers of blocks all figures, memory too, follow from `a + b depth`; the complete depth gives the program as it is.
`--depths=0` compiles one block alone, forward and backward, on one device (`tpu_block.py`). All rows have the same
batch per device, dtype and optimizer; all but `auto`, whose layout is the one that a run chooses by itself, have no
rematerialization. Both times of `plan` are given, without collectives, and the time that the core waits for these. DIR
has the figures of each program as a line of `figures.jsonl`, so that a later call compiles only what is missing, and
the tables in `tables.md`, or with `--into` between the two comments of that Markdown file. Nothing runs on a TPU.
"""
from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks import rival, tpu_block
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
FILE = 'figures.jsonl'
BEGIN, END = '<!--tpu_tables-->', '<!--/tpu_tables-->'
ONE_DEVICE = {'v6e': 'v6e:1x1', 'v5e': 'v5e:1x1', 'v4': 'v4:2x2x1', 'v3': 'v3:2x2'}
BLOCKS = ('Plain', 'encoderblock')
"""What the places of operations in our and in big_vision's blocks have: the names of their modules."""
BLOCK = 0
"""Number of blocks that stands for one block alone, on one device."""
NUM_EXAMPLES, NUM_CLASSES, IMAGE_PX = 1_281_167, 1_000, 224
OVERRIDES = (
    'train.accumulate=1', 'data.recipe.mixup=0', 'model.dropout=0', 'model.pool=mean', 'model.dtype=bf16',
    'optimizer.mu_dtype=bf16', f'data.num_examples={NUM_EXAMPLES}', f'data.num_classes={NUM_CLASSES}')
"""What big_vision's step has, too."""
AUTO = 'auto'
"""The program with the kernels, rematerialization, loop and sharding that the layout of a run chooses."""
OURS: dict[str, dict[str, str]] = {
    AUTO: {'attention': 'auto', 'mlp_kernel': 'auto'},
    'plain': {'attention': 'xla', 'mlp_kernel': 'xla'}, 'fused': {'attention': 'fused', 'mlp_kernel': 'xla'},
    'fused_mlp': {'attention': 'fused', 'mlp_kernel': 'fused'},
    'int8': {'attention': 'fused', 'mlp_kernel': 'xla', 'quantize': 'int8'},
    'fp8': {'attention': 'fused', 'mlp_kernel': 'xla', 'quantize': 'fp8'}}
"""Names of our programs, and the kernels of their blocks, as `tpu_block.Request` names them."""
PATHS = {'mlp': 'mlp.hidden', 'attention': 'attention.kernel', 'mlp_kernel': 'mlp.kernel'}
"""Settings of a model that have another name in a `tpu_block.Request`."""
WITHOUT = {'v5e': ('fp8',), 'v4': ('fused_mlp', 'int8', 'fp8'), 'v3': ('fused', 'fused_mlp', 'int8', 'fp8')}
"""Our programs whose kernels or narrow products a chip does not have, or has no faster."""
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
  def images(self) -> int:
    """Of one device."""
    return IMAGES[self.model] // (2 if self.topology.startswith('v3') else 1)

  @property
  def batch(self) -> int:
    """Images of all devices."""
    return topologies.parse(self.topology).num_devices * self.images

class Figures(NamedTuple):
  """What the tables have of a program: both times and that of collectives in ms, and memory of a device in GiB.

  estimate_ms: the compiler's, which has nothing of kernels; their time by schedule is added.
  blocks_estimate_ms, blocks_scheduled_ms: the parts of both times that blocks and the update take.
  exposed_ms: what of the collectives the core waits for; NaN in files of before 2026-11-28.
  """
  estimate_ms: float
  scheduled_ms: float
  collectives_ms: float
  peak_gib: float
  blocks_estimate_ms: float
  blocks_scheduled_ms: float
  exposed_ms: float = math.nan

  def at(self, depth: int, *, own_depth: int, other: Figures, other_depth: int) -> Figures:
    """Figures at another depth, on the line through these and those of another depth."""
    share = (depth - own_depth) / (other_depth - own_depth)
    return Figures(*(a + (b - a) * share for a, b in zip(self, other, strict=True)))

  def scaled(self, depth: int, own_depth: int) -> Figures:
    """Figures at another depth: blocks, the update and collectives in proportion, the rest and memory as they are."""
    times = depth / own_depth
    blocks = self.blocks_estimate_ms * times, self.blocks_scheduled_ms * times
    return Figures(self.estimate_ms - self.blocks_estimate_ms + blocks[0],
                   self.scheduled_ms - self.blocks_scheduled_ms + blocks[1], self.collectives_ms * times, self.peak_gib,
                   *blocks, self.exposed_ms * times)


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
          and program not in WITHOUT.get(topology.partition(':')[0], ())]


def measure(row: Row, depth: int, *, checkout: str) -> Figures:
  """Compiles a row with so many blocks."""
  topology = topologies.parse(row.topology)
  if depth == BLOCK:
    answer = tpu_block.ask(_block_request(row, checkout))
  elif row.program in RIVALS:
    whole_mib, scan = RIVALS[row.program]
    network = {**SIZES[row.model], 'depth': depth, 'px': IMAGE_PX, 'classes': NUM_CLASSES}
    answer = rival.ask(rival.Request(checkout, row.topology, network, row.batch, whole_mib, scan))
  else:
    answer = compile.ask(_request(row, depth))
  if answer.overflow:
    raise UserError(f'{row}: {plan.overflow_text(answer.overflow)}.')
  assert answer.schedule, 'every TPU program has a schedule'
  sent = sum(one.sent_bytes for one in answer.costs.collectives if one.kind != compiled.BETWEEN_SLICES)
  ms, kernels = 1e3 / topology.chip.clock_hz, sum(one.scheduled or 0 for one in answer.operations if not one.cycles)
  repeated = [one for one in answer.operations if _is_repeated(one)]
  return Figures((answer.costs.cycles + kernels) * ms, answer.schedule.cycles * ms,
                 1e3 * sent / topology.chip.ring_bytes_s,
                 (answer.temp_bytes if depth == BLOCK else answer.peak_bytes) / plan.GIB,
                 sum(one.cycles or one.scheduled or 0 for one in repeated) * ms,
                 sum(one.scheduled or 0 for one in repeated) * ms,
                 math.nan if answer.waits is None else sum(one.exposed_ns for one in answer.waits) / 1e6)


def _is_repeated(one: compiled.Operation) -> bool:
  """Whether a step has as much more of an operation as it has more blocks; all but a few parameters are of blocks."""
  return one.phase == 'update' or re.search('|'.join(BLOCKS), one.place) is not None


def _block_request(row: Row, checkout: str) -> tpu_block.Request:
  sizes, chip = SIZES[row.model], row.topology.partition(':')[0]
  return tpu_block.Request(ONE_DEVICE[chip], row.images, (IMAGE_PX // sizes['patch'])**2, sizes['width'],
                           sizes['heads'], sizes['mlp'], checkout=checkout if row.program in RIVALS else '',
                           **OURS.get(row.program, {}))


def _request(row: Row, depth: int) -> compile.Request:
  topology, sizes = topologies.parse(row.topology), {**SIZES[row.model], 'depth': depth}
  fixed = () if row.program == AUTO else (
      'model.execution=unrolled', 'model.remat=none', f'mesh.fsdp={topology.num_devices}')
  config = files.load('vit_l16_i1k', [
      *OVERRIDES, *(f'model.{PATHS.get(name, name)}={value}' for name, value in (sizes | OURS[row.program]).items()),
      *fixed, f'batch_size={row.batch}'])
  return plan.lay_out(plan.Subject(config, topology, NUM_EXAMPLES, NUM_CLASSES, in_memory=False)).request()


def collect(asked: Sequence[Row], depths: Sequence[int], folder: pathlib.Path, *, checkout: str) -> None:
  """Compiles what the folder lacks, and keeps the figures there."""
  for row in asked:
    for depth in depths if checkout or row.program in OURS else ():
      is_double = depth == BLOCK and row.program in (AUTO, *RIVALS) and row.program != 'big_vision'  # a step differs
      if not is_double and depth not in found(row, folder):
        began = time.monotonic()
        figures = measure(row, depth, checkout=checkout)
        content = {'row': row, 'depth': depth, **figures._asdict(), 'versions': plan.versions(),
                   'date': time.strftime('%Y-%m-%d'), 'seconds': round(time.monotonic() - began)}
        with (folder / FILE).open('a') as lines:
          lines.write(json.dumps(content) + '\n')
        print(row, depth, {name: round(value, 3) for name, value in figures._asdict().items()}, flush=True)


def found(row: Row, folder: pathlib.Path) -> dict[int, Figures]:
  """The figures of a row that the folder has, by depth; the last of several lines counts."""
  result, path = {}, folder / FILE
  for line in path.read_text().splitlines() if path.exists() else ():
    content = json.loads(line)
    if tuple(content['row']) == row:
      result[content['depth']] = Figures(*(content[name] for name in Figures._fields if name in content))
  return dict(sorted(result.items()))


def complete(row: Row, folder: pathlib.Path) -> tuple[Figures, str] | None:
  """The figures of a row at its complete depth and the depths that they are from; None if there are none."""
  by_depth, depth = found(row, folder), SIZES[row.model]['depth']
  by_depth.pop(BLOCK, None)
  if not by_depth:
    return None
  if depth in by_depth:
    return by_depth[depth], f'{depth}, all'
  (one, first), (two, last) = [*by_depth.items()][0], [*by_depth.items()][-1]
  if one == two:
    return first.scaled(depth, one), str(one)
  return first.at(depth, own_depth=one, other=last, other_depth=two), f'{one}, {two}'


def render(folder: pathlib.Path) -> str:
  """The tables of all rows that the folder has, as Markdown."""
  head = ('topology, images a device', 'program', 'estimate, ms', 'lower bound, ms', 'collectives, ms', 'exposed, ms',
          'peak GiB', 'best big_vision / this', 'compiled blocks')
  parts = []
  for model, sizes in SIZES.items():
    steps = [line for topology in TOPOLOGIES for line in _of_topology(model, topology, folder)]
    if steps:
      parts.append(f'{model}, {sizes["depth"]} blocks, {IMAGE_PX} px:\n\n' + table.table(head, steps))
    blocks = [line for topology in TOPOLOGIES for line in _of_topology(model, topology, folder, of_block=True)]
    if blocks:
      parts.append(f'One block of {model}, {IMAGE_PX} px, on one device:\n\n' + table.table(
          ('chip, images', *head[1:4], 'GiB beside arguments', 'big_vision / this'), blocks))
  return '\n\n'.join(parts) + '\n'


def _of_topology(model: str, topology: str, folder: pathlib.Path, *,
                 of_block: bool = False) -> Iterator[tuple[str, ...]]:
  every = [row for row in rows([model]) if row.topology == topology]
  known = {row: figures for row in every if (figures := (_block if of_block else complete)(row, folder))}
  others = [figures for row, (figures, _) in known.items() if row.program in RIVALS]
  for row, (own, depths) in known.items():
    ratios = '–'
    if row.program in OURS and others:
      ratios = (f'{min(x.estimate_ms for x in others) / own.estimate_ms:.2f}, '
                f'{min(x.scheduled_ms for x in others) / own.scheduled_ms:.2f}')
    if of_block:
      yield (f'{topology.partition(":")[0]}, {row.images}', row.program, f'{own.estimate_ms:.2f}',
             f'{own.scheduled_ms:.2f}', f'{own.peak_gib:.2f}', ratios)
      continue
    peak = f'{own.peak_gib:.2f}' + f' with {depths} blocks' * depths.isdecimal()
    yield (f'{topology}, {row.images}', row.program, f'{own.estimate_ms:.1f}', f'{own.scheduled_ms:.1f}',
           f'{own.collectives_ms:.1f}', '–' if math.isnan(own.exposed_ms) else f'{own.exposed_ms:.1f}', peak, ratios,
           depths)


def _block(row: Row, folder: pathlib.Path) -> tuple[Figures, str] | None:
  own = found(row, folder).get(BLOCK)
  return None if own is None else (own, '')


def put(text: str, path: pathlib.Path) -> None:
  """Writes the tables between the two comments of a file.

  Raises:
    UserError: the file has no such comments.
  """
  before, begin, rest = path.read_text().partition(BEGIN)
  _, end, after = rest.partition(END)
  if not (begin and end):
    raise UserError(f'--into: expected a file with {BEGIN} and {END}, got {path}. Add both where the tables belong.')
  path.write_text(f'{before}{BEGIN}\n\n{text}\n{END}{after}')


def main(arguments: Sequence[str]) -> int:
  """Compiles what is missing, prints the tables, and writes them into the folder."""
  parser = argparse.ArgumentParser(prog='tpu_tables', description='Tables of train steps on TPUs by the compiler.')
  parser.add_argument('folder', help='keeps figures.jsonl and tables.md')
  parser.add_argument('--big_vision', default='', help='a checkout of big_vision; without it, its rows are left out')
  parser.add_argument('--only', default='', help='words with commas: models, chips, programs')
  parser.add_argument('--depths', default='4', help='numbers of blocks to compile, with commas; 0: one block alone')
  parser.add_argument('--into', default='', help='a Markdown file with comments around its tables, to renew them')
  parser.add_argument('--known', action='store_true', help='compiles nothing: tables of what the folder has')
  given = parser.parse_args(arguments)
  folder = pathlib.Path(given.folder)
  folder.mkdir(parents=True, exist_ok=True)
  try:
    if given.big_vision and not (pathlib.Path(given.big_vision) / 'big_vision').is_dir():
      raise UserError(f'--big_vision: expected a checkout, a folder that has the folder big_vision, got '
                      f'{given.big_vision}. Clone google-research/big_vision.')
    asked = [] if given.known else rows(list(filter(None, given.only.split(','))))
    collect(asked, [int(depth) for depth in given.depths.split(',')], folder, checkout=given.big_vision)
    text = render(folder)
    if given.into:
      put(text, pathlib.Path(given.into))
    else:
      (folder / 'tables.md').write_text(text)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  print(text)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
