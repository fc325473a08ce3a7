"""Results of `benchmarks.bench`: the tables, the JSON file, and the figure over image sizes."""
from __future__ import annotations

import datetime
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.bench_parts import Compiled
from vit_jax.inspect import figures
from vit_jax.plan import table
from vit_jax.record import machine


class Row(NamedTuple):
  """Measurements of one part of one network.

  part: one of `bench.PARTS`, or `PART of PROGRAM`.         images: per call.
  seconds: per call, one for each turn.                        processor_s: the same, of the processors.
  flops: per call, analytic; 0 if not counted.
  ratio: how many times faster ours is than another program, median over the turns; 0 for our own.
  processor_ratio: the same by processor time.
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
  """Measurements of one network. peak_flops: of all devices, 0 if unknown; matmul_flops: measured."""
  model: str
  batch_size: int
  rows: list[Row]
  compiled: Compiled
  peak_flops: float
  matmul_flops: float
  px: int = 0


def render(reports: Sequence[Report]) -> str:
  """Returns the tables in Markdown."""
  lines = [f'{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} processors'
           f'{f" ({name})" if (name := machine.cpu_model()) else ""}; medians of '
           f'{len(reports[0].rows[0].seconds)} turns, minimum and maximum in brackets.', '']
  on_cpu, beside = jax.default_backend() == 'cpu', any(row.ratio for report in reports for row in report.rows)
  ratio = ['ours is faster'] * beside
  lines.append(table.table(
      ['network', 'part', 'batch', 'ms', 'images/s', 'GFLOP/s', 'MFU', 'of a matmul', *ratio,
       *(['processor ms', *ratio] if on_cpu else [])],
      [_cells(report, row) + _ratio(row.ratio)[:beside]
       + ([_ms(row.processor_s), *_ratio(row.processor_ratio)[:beside]] if on_cpu else [])
       for report in reports for row in report.rows]))
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
          f'{rate / report.matmul_flops:.1%}' if rate else '–']


def _ratio(value: float) -> list[str]:
  return [f'{value:.2f}×' if value else '–']


def _ms(seconds: Sequence[float]) -> str:
  median, low, high = (1e3 * found(seconds) for found in (statistics.median, min, max))
  digits = 1 if median >= 10 else 2  # the loop takes a fraction of a millisecond more than its step
  return f'{median:,.{digits}f} ({low:,.{digits}f} – {high:,.{digits}f})'


def describe(reports: Sequence[Report]) -> dict[str, Any]:
  """Returns everything as JSON, with the command and the versions."""
  return {
      'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'), 'command': sys.argv,
      'versions': machine.versions(), 'device_kind': jax.devices()[0].device_kind, 'num_devices': jax.device_count(),
      'processor': machine.cpu_model(),
      'networks': [{'model': r.model, 'px': r.px, 'batch_size': r.batch_size, 'peak_flops': r.peak_flops or None,
                    'matmul_flops': r.matmul_flops, **r.compiled._asdict(),
                    'parts': [{**row._asdict(), 'median_s': row.median_s, 'images_per_s': row.images / row.median_s,
                               'ratio': row.ratio or None, 'processor_ratio': row.processor_ratio or None}
                              for row in r.rows]} for r in reports]}


def figure(reports: Sequence[Report]) -> bytes:
  """Returns a PNG of forward images/s and of images per batch over the image size, one line per network.

  As in Figure 12 of the ViT paper (Appendix D.5).
  """
  networks = dict.fromkeys(report.model.rpartition(' at ')[0] for report in reports)
  speeds, batches = {}, {}
  for network in networks:
    own = sorted((report for report in reports if report.model.rpartition(' at ')[0] == network), key=lambda r: r.px)
    side = np.array([report.px for report in own], np.float64)
    forward = [next(row for row in report.rows if row.part == 'forward') for report in own]
    speeds[network] = side, np.array([row.images / row.median_s for row in forward])
    batches[network] = side, np.array([float(report.batch_size) for report in own])
  return figures.panels({'Peak speed, forward': ('images/s', speeds), 'Batch': ('images', batches)},
                        xlabel='side of an image, px', is_log=True)
