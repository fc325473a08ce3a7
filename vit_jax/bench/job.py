"""`--job=bench`: how fast the parts of a config are on this machine, and beside other programs in the same run.

Everything takes turns, so that a machine that is busy now and then slows all alike; medians over the turns are given,
and ratios are medians of the turns' own ratios. On CPUs the processors' seconds are given beside the clock's: other
programs on the machine change these less. What is timed is what runs: the train step is that of `train`.
"""
from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from vit_jax.bench import own as bench_own
from vit_jax.bench import peers as bench_peers
from vit_jax.bench import sizes as bench_sizes
from vit_jax.config import check, layout, schema
from vit_jax.core.errors import UserError
from vit_jax.jobs import runtime as startup
from vit_jax.jobs import train
from vit_jax.plan import table
from vit_jax.recipes import sizes
from vit_jax.record import clock

log = logging.getLogger('vit_jax.jobs')
TURNS = 7
LEAST_S = .5  # of one turn of one part, so that the clock's grain and the first call do not matter


class Row(NamedTuple):
  """What was seen of one part of one network.

  part: of `bench_own.PARTS`, or 'step of timm' and the like.     images: of a call.
  seconds: of a call, one for each turn.                          processor_s: likewise, of the processors.
  flops: of a call, analytic; 0 where none are counted.
  ratio: how much faster ours is than a peer, median over the turns; 0 for our own.     processor_ratio: likewise.
  """
  model: str
  part: str
  images: int
  seconds: list[float]
  processor_s: list[float]
  flops: float
  ratio: float = 0.
  processor_ratio: float = 0.

  @property
  def median_s(self) -> float:
    return statistics.median(self.seconds)


class Report(NamedTuple):
  """Of one network; seconds and bytes. peak_flops: of all devices, 0 where it is not known; matmul_flops: reached."""
  model: str
  batch_size: int
  rows: list[Row]
  compiled: bench_own.Compiled
  peak_flops: float
  matmul_flops: float
  px: int = 0


def run(config: schema.Config, *, models: str, px: str, against: str, turns: str, search: bool,
        to: pathlib.Path | None) -> int:
  """Times networks and prints a table.

  Args:
    config: of a train run; its model, batch, data and optimiser are timed.
    models: names with commas, as `recipes.sizes.model` has them, instead of the config's own.
    px: sides of square images with commas, instead of the config's own; each network is timed at each.
    against: names of `bench_peers.PEERS` with commas; `NAME=PATH` says where: a Python that has the package, or for
      big_vision a checkout.
    turns: how often everything is timed, as text; '' = 7.
    search: also look for the largest batch whose step fits in memory, a power of two.
    to: folder for `bench.md` and `bench.json`, and `sizes.png` of several sides; None = only printed.

  Returns:
    Exit status: 0, or 2 if a peer could not be timed.
  """
  count = _parse_turns(turns)
  peers = bench_peers.parse(against)
  networks = [(name, _with(config, name)) for name in filter(None, models.split(','))] or [(config.name, config)]
  networks = [pair for name, one in networks for pair in bench_sizes.at_each(name, one, px)]
  for _, one in networks:
    check.check(one)
    if peers:
      bench_peers.settings(one, 0)
  startup.start()
  reports, failures = [], []
  for name, one in networks:
    if search:
      one = layout.plain(one)
      one = dataclasses.replace(one, batch_size=bench_own.largest_batch(one))
    report, failed = _measure(name, one, peers, turns=count)
    reports.append(report)
    failures += failed
  text = render(reports)
  print(text, flush=True)
  for failure in failures:
    log.error('%s', failure)
  if to is not None:
    _write(to, text, reports, failures)
  return 2 if failures else 0


def _write(to: pathlib.Path, text: str, reports: Sequence[Report], failures: Sequence[str]) -> None:
  to.mkdir(parents=True, exist_ok=True)
  (to / 'bench.md').write_text(text + '\n', encoding='utf-8')
  (to / 'bench.json').write_text(json.dumps(describe(reports, failures), indent=2) + '\n', encoding='utf-8')
  if len({report.px for report in reports}) > 1:
    (to / 'sizes.png').write_bytes(bench_sizes.figure(reports))


def _parse_turns(text: str) -> int:
  if text and not (text.isdecimal() and int(text)):
    raise UserError(f'--turns={text} is no number of turns; want 1 or more')
  return int(text or TURNS)


def _with(config: schema.Config, name: str) -> schema.Config:
  """The config with another network, in the dtype and way of running of its own."""
  kept = {field: getattr(config.model, field) for field in ('dtype', 'execution', 'remat', 'pool', 'attention')
          if hasattr(config.model, field)}
  model = sizes.model(name.removeprefix('ViT-'))
  return dataclasses.replace(config, name=name, model=dataclasses.replace(
      model, **{field: value for field, value in kept.items() if hasattr(model, field)}))


def _measure(name: str, config: schema.Config, peers: Sequence[bench_peers.Peer], *,
             turns: int) -> tuple[Report, list[str]]:
  own = bench_own.Own(config)
  parts: dict[str, Any] = dict(own.parts())
  flops, failures = own.flops(), []
  children = []
  try:
    for peer in peers:
      try:
        child = bench_peers.Child(peer, config, num_classes=own.num_classes)
      except UserError as error:
        failures.append(str(error))
        continue
      children.append(child)
      parts |= {f'{part} of {child.label}': run_part for part, run_part in child.parts().items()}
    spent = take_turns(parts, turns=turns, least_s=LEAST_S)
  finally:
    own.close()
    for child in children:
      child.close()
  matmul = statistics.median(one.clock_s for one in spent.pop(bench_own.MATMUL))
  rows = [_row(name, part, spent, images=config.batch_size, flops=flops) for part in spent]
  device = jax.devices()[0].device_kind
  return Report(name, config.batch_size, rows, own.compiled, clock.find_peak_flops(device, jax.device_count()) or 0.,
                own.matmul_flops / matmul, config.image_px[0]), failures


def _row(model: str, part: str, spent: Mapping[str, Sequence[bench_own.Spent]], *, images: int,
         flops: Mapping[str, float]) -> Row:
  ours, _, label = part.partition(' of ')
  row = Row(model, part, images, [one.clock_s for one in spent[part]], [one.processor_s for one in spent[part]],
            flops.get(ours, 0.))
  if not label:
    return row
  pairs = list(zip(spent[ours], spent[part], strict=True))
  return row._replace(ratio=statistics.median(b.clock_s / a.clock_s for a, b in pairs),
                      processor_ratio=statistics.median(b.processor_s / max(a.processor_s, 1e-9) for a, b in pairs))


def take_turns(parts: Mapping[str, bench_own.Part], *, turns: int,
               least_s: float) -> dict[str, list[bench_own.Spent]]:
  """Seconds of a call of each part, one for each turn; a turn calls a part as often as `least_s` asks."""
  counts = {}
  for name, part in parts.items():
    part(1)  # compiles, fills caches
    counts[name] = max(1, round(least_s / max(part(1).clock_s, 1e-9)))
  spent: dict[str, list[bench_own.Spent]] = {name: [] for name in parts}
  for turn in range(turns):
    log.info('Turn %d of %d.', turn + 1, turns)
    for name, part in parts.items():
      spent[name].append(bench_own.Spent(*(seconds / counts[name] for seconds in part(counts[name]))))
  return spent


def render(reports: Sequence[Report]) -> str:
  """Tables of what was seen, in Markdown."""
  lines = [f'{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} processors; medians of '
           f'{len(reports[0].rows[0].seconds)} turns, least and most of them in brackets.', '']
  on_cpu = jax.default_backend() == 'cpu'
  lines.append(table.table(
      ['network', 'part', 'batch', 'ms', 'images/s', 'GFLOP/s', 'MFU', 'of a matmul', 'ours is faster',
       *(['processor ms', 'ours is faster'] if on_cpu else [])],
      [_cells(report, row) + (_processor_cells(row) if on_cpu else []) for report in reports for row in report.rows]))
  lines += ['', table.table(
      ['network', 'compiling the step: cold', 'from the cache', 'memory of the step', 'a large matmul'],
      [[r.model, f'{r.compiled.cold_s:.1f} s', f'{r.compiled.cached_s:.1f} s', f'{r.compiled.bytes / 2**30:.2f} GiB',
        f'{r.matmul_flops / 1e9:,.0f} GFLOP/s'] for r in reports])]
  return '\n'.join(lines)


def _cells(report: Report, row: Row) -> list[str]:
  rate = row.flops / row.median_s
  return [row.model, row.part, f'{row.images:,}', _ms(row.seconds), f'{row.images / row.median_s:,.1f}',
          f'{rate / 1e9:,.0f}' if rate else '–',
          f'{rate / report.peak_flops:.1%}' if rate and report.peak_flops else '–',
          f'{rate / report.matmul_flops:.1%}' if rate else '–', f'{row.ratio:.2f} x' if row.ratio else '–']


def _processor_cells(row: Row) -> list[str]:
  return [_ms(row.processor_s), f'{row.processor_ratio:.2f} x' if row.processor_ratio else '–']


def _ms(seconds: Sequence[float]) -> str:
  median, low, high = (1e3 * found(seconds) for found in (statistics.median, min, max))
  return f'{median:,.1f} ({low:,.1f} – {high:,.1f})'


def describe(reports: Sequence[Report], failures: Sequence[str]) -> dict[str, Any]:
  """Everything as JSON, with what is needed to do it again."""
  return {
      'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'), 'command': sys.argv,
      'versions': train.versions(), 'device_kind': jax.devices()[0].device_kind, 'num_devices': jax.device_count(),
      'failures': list(failures),
      'networks': [{'model': r.model, 'px': r.px, 'batch_size': r.batch_size, 'peak_flops': r.peak_flops or None,
                    'matmul_flops': r.matmul_flops, **r.compiled._asdict(),
                    'parts': [{**row._asdict(), 'median_s': row.median_s, 'images_per_s': row.images / row.median_s,
                               'ratio': row.ratio or None, 'processor_ratio': row.processor_ratio or None}
                              for row in r.rows]} for r in reports]}
