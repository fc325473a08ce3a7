"""The table of a speedrun: records of the same goal, each with its cost and its gain over the one before."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from vit_jax.record import clock
from vit_jax.replay.records import Record

CHIPS = {'v5e': 'TPU v5e', 'v6e': 'TPU v6e', 'H200': 'NVIDIA H200'}
UTILIZATION = .05
"""Share of the peak of a chip in bfloat16 that is assumed for networks as small as those of a speedrun."""
HEAD = (f'| record | processor s | gain | exaFLOPs | device s | {", ".join(CHIPS)}: s at {UTILIZATION:.0%} | '
        'made on | replay |\n|---|---:|---:|---:|---:|---:|---|---|\n').replace('%', ' %')


def in_order(found: Sequence[Record]) -> list[Record]:
  """Returns records as they improved: by their date, and of one day the one with the most processor seconds first."""
  return sorted(found, key=lambda one: (one.made.get('date', ''), -one.made.get('processor_s', 0.), one.id))


def cells(found: Sequence[Record]) -> Iterator[tuple[str, ...]]:
  """Yields the first columns of the row of each record, in their order.

  The gain is how many times fewer processor seconds a record takes than the last one before it on a processor of the
  same model. Device seconds are those of accelerators, from the start of the process to its end.
  """
  before: dict[str, Record] = {}  # by the model of the processor
  for record in found:
    model = record.made.get('machine', {}).get('cpu_model', '')
    made = record.made
    flops = 1e18 * made.get('exaflops', 0.)
    is_accelerator = made.get('machine', {}).get('device_kind', 'cpu') != 'cpu'
    device_s = made.get('seconds', 0.) * made.get('devices', 1) if is_accelerator else 0.
    yield (record.sentence.replace('|', '\\|'), _number(made.get('processor_s', 0.), ',.0f'),
           _gain(before.get(model), record), _number(flops / 1e18, '.3g'),
           _number(device_s, ',.0f'), ', '.join(_number(seconds, '.1f') for seconds in chip_seconds(flops).values()))
    if model and record.made.get('processor_s'):
      before[model] = record


def chip_seconds(flops: float) -> dict[str, float]:
  """Returns the seconds that one chip of each kind takes for so many FLOPs at `UTILIZATION` of its peak."""
  return {name: flops / (UTILIZATION * (clock.find_peak_flops(kind, 1) or float('inf')))
          for name, kind in CHIPS.items()}


def _gain(before: Record | None, record: Record) -> str:
  """Returns the factor between two records; '–' for the first one of a model, and where the seconds are not known."""
  seconds = record.made.get('processor_s', 0.)
  return f'{before.made["processor_s"] / seconds:.2f}×' if before and seconds else '–'


def _number(value: float, spec: str) -> str:
  return f'{value:{spec}}' if value else '–'
