"""Times the parts of a config on this machine, and other programs beside them.

  python -m benchmarks.bench --config=bench --models=S/16,B/16 --to=DIR
  python -m benchmarks.bench --config=bench --against=timm=PYTHON,transformers=PYTHON,big_vision=CHECKOUT

All measurements are interleaved, so that a machine that is busy for a while slows all of them equally. Medians over the
turns are reported. On CPUs the processor time is reported as well, which depends less on other programs on the machine.
The train step is the one of `vit-jax train`. `--config.NAME=VALUE` overrides settings. `--against` names programs, see
`benchmarks/peers.py`. Exit status 2: a program could not be timed; the others were.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks import peers, timing
from benchmarks.timing import Spent
from vit_jax.config import check, files, schema
from vit_jax.core import implementation
from vit_jax.core.errors import UserError
from vit_jax.parallel import hardware, layout, xla_flags
from vit_jax.recipes import sizes
from vit_jax.record import destination

if TYPE_CHECKING:
  from benchmarks.bench_tables import Report, Row

PARTS = ('forward', 'gradient', 'step', 'input', 'together', 'loop', 'logged loop')
FILES = ('bench.md', 'bench.json', 'sizes.png')
Networks = list[tuple[str, schema.Config]]


def main(arguments: Sequence[str]) -> int:
  """Reads the command line, measures, and prints a table and why some programs could not be timed."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.bench', description=__doc__, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--config', required=True, metavar='NAME')
  parser.add_argument('--models', default='', metavar='NAME,…', help='networks, such as S/16,B/16,Mixer-B/16')
  parser.add_argument('--px', default='', metavar='N,…', help='sides of the images, such as 64,128,224')
  parser.add_argument('--parts', default=','.join(PARTS), metavar='NAME,…')
  parser.add_argument('--turns', type=int, default=7, help='repetitions of every measurement')
  parser.add_argument('--search', action='store_true', help='time the largest batch that fits')
  parser.add_argument('--against', default='', metavar='NAME[=PATH],…', help=', '.join(peers.PEERS))
  parser.add_argument('--flags', default='', metavar='NAME,…', help='sets of XLA flags')
  parser.add_argument('--to', type=pathlib.Path, default=None, metavar='DIR', help=f'folder for {", ".join(FILES)}')
  parser.add_argument('--overwrite', action='store_true')
  parser.add_argument('--allow_code', action='store_true', help='look for own code in this folder')
  given, rest = parser.parse_known_args(arguments)
  if unknown := [word for word in rest if not word.startswith('--config.') or '=' not in word]:
    parser.error(f'expected --config.NAME=VALUE, got {unknown[0]}')
  if given.allow_code:
    implementation.trust_folder(os.getcwd())
  failures: list[str] = []
  try:
    networks = _networks(given.config, [word.removeprefix('--config.') for word in rest],
                         models=_words(given.models), px=_words(given.px))
    beside = peers.Peers(peers.parse(_words(given.against)))
    failures = beside.failures
    for flag, words, known in (('parts', given.parts, PARTS), ('flags', given.flags, xla_flags.SETS)):
      if unknown := [word for word in _words(words) if word not in known]:
        raise UserError(f'--{flag}: expected some of {", ".join(known)}, got {", ".join(unknown)}. Correct the names.')
    if given.turns < 1:
      raise UserError(f'--turns: expected at least 1, got {given.turns}. Set a larger number.')
    hardware.choose(flags=_words(given.flags))  # before jax is imported
    run(networks, beside, parts=_words(given.parts), turns=given.turns, search=given.search, to=given.to,
        overwrite=given.overwrite)
  except UserError as error:
    failures.append(str(error))
  print(''.join(f'error: {failure}\n' for failure in failures), end='', file=sys.stderr)
  return 2 * bool(failures)


def run(networks: Networks, beside: peers.Peers, *, parts: Sequence[str], turns: int, search: bool,
        to: pathlib.Path | None, overwrite: bool) -> None:
  """Times networks and prints a table.

  Args:
    networks: configs of train runs with their names; their models, batches, data and optimizers are timed.
    beside: further programs to time.
    parts: names of `PARTS` to time. Only what these need is compiled.
    turns: repetitions of every measurement.
    search: time the largest batch, a power of two, whose step fits in memory.
    to: folder for `bench.md` and `bench.json`, and `sizes.png` for several sides; None = only print.
    overwrite: replace these files.
  """
  from benchmarks import bench_parts, bench_tables
  from vit_jax.jobs import startup
  if to is not None:
    destination.check_free([to / name for name in FILES], setting='--to', overwrite=overwrite)
    destination.check_writable(to, setting='--to', advice='Choose another folder.')
  for _, config in networks:
    check.check(config)
    beside.check(config)
  startup.start()
  reports = []
  for name, config in networks:
    if search:
      config = layout.plain(config)
      config = dataclasses.replace(config, batch_size=bench_parts.largest_batch(config))
    reports.append(_measure(name, config, beside, chosen=parts, turns=turns))
  text = bench_tables.render(reports)
  print(text, flush=True)
  if to is not None:
    with destination.filled(to, overwrite=overwrite) as part:
      (part / 'bench.md').write_text(text + '\n', encoding='utf-8')
      found = json.dumps(bench_tables.describe(reports), indent=2)
      (part / 'bench.json').write_text(found + '\n', encoding='utf-8')
      if len({report.px for report in reports}) > 1 and 'forward' in parts:
        (part / 'sizes.png').write_bytes(bench_tables.figure(reports))


def _words(text: str) -> list[str]:
  return [word.strip() for word in text.split(',') if word.strip()]


def _networks(name: str, overrides: list[str], *, models: Sequence[str], px: Sequence[str]) -> Networks:
  """Returns the config with each network, which keeps the config's way to compute, at each image size.

  Raises:
    UserError: lists all that cannot be read.
  """
  config = files.load(name, overrides, models=sizes.model)
  if not all(side.isdecimal() and 0 < int(side) < 65_536 for side in px):
    raise UserError(f'--px: expected whole numbers with commas, each 1 to 65,535, got {",".join(px)!r}. Correct them.')
  networks = [(config.name, config)] if not models else []
  for named in models:
    model = sizes.model(named.removeprefix('ViT-'))
    kept = {field: getattr(config.model, field) for field in (
        'dtype', 'quantize', 'execution', 'remat', 'pool', 'attention') if hasattr(config.model, field)}
    model = dataclasses.replace(model, **{field: value for field, value in kept.items() if hasattr(model, field)})
    networks.append((named, dataclasses.replace(config, name=named, model=model)))
  if not px:
    return networks
  found = []
  for network, one in networks:
    for side in map(int, px):  # the size before the center crop of evaluation is scaled too
      recipe = dataclasses.replace(one.data.recipe, eval_resize_px=round(
          one.data.recipe.eval_resize_px * side / one.image_px[0]))
      data = dataclasses.replace(one.data, recipe=recipe)
      found.append((f'{network} at {side} px', dataclasses.replace(one, image_px=(side, side), data=data)))
  return found


def _measure(name: str, config: schema.Config, beside: peers.Peers, *, chosen: Sequence[str], turns: int) -> Report:
  import jax

  from benchmarks import bench_parts
  from benchmarks.bench_tables import Report
  from vit_jax.record import clock
  with contextlib.closing(bench_parts.Own(config)) as own:
    parts, flops = own.parts(), own.flops()
    with beside.opened(config, own.num_classes) as more:
      timed = {part: run for part, run in {**parts, **more}.items()
               if part.partition(' of ')[0] in (*chosen, bench_parts.MATMUL)}
      spent = timing.take_turns(timed, turns=turns)
  matmul = statistics.median(one.clock_s for one in spent.pop(bench_parts.MATMUL))
  rows = [_row(name, part, spent, images=config.batch_size, flops=flops) for part in spent]
  device = jax.devices()[0].device_kind
  return Report(name, config.batch_size, rows, own.compiled, clock.find_peak_flops(device, jax.device_count()) or 0.,
                own.matmul_flops / matmul, config.image_px[0])


def _row(model: str, part: str, spent: Mapping[str, Sequence[Spent]], *, images: int,
         flops: Mapping[str, float]) -> Row:
  from benchmarks.bench_tables import Row
  ours, _, label = part.partition(' of ')
  row = Row(model, part, images, [one.clock_s for one in spent[part]], [one.processor_s for one in spent[part]],
            flops.get(ours, 0.))
  if not label:
    return row
  pairs = list(zip(spent[ours], spent[part], strict=True))
  return row._replace(ratio=statistics.median(b.clock_s / a.clock_s for a, b in pairs),
                      processor_ratio=statistics.median(b.processor_s / max(a.processor_s, 1e-9) for a, b in pairs))


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
