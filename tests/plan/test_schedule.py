"""The second time of a compiled program: bundles or bytes, whichever takes longer, and what is missing in it."""
from __future__ import annotations

import json
import pathlib

from vit_jax.plan import bundles, compile, compiled, schedule, topologies

GOLDEN = json.loads(pathlib.Path(__file__).with_name('golden_schedule.json').read_text())
TEXT = '\n'.join(GOLDEN['text'])
COUNTS = {file.split('-', 1)[1].removesuffix('-01-final_bundles.txt'): bundles.count(lines)
          for file, lines in GOLDEN['dump'].items()}
RATE = 1640e9 / 1.75e9  # bytes a cycle of v6e
PRODUCT = round(1024 * 256 * 2 / RATE / .85)
"""Cycles to write the product, whose operands are on the chip; its bundles are 373."""


def test_each_operation_takes_the_longer_of_its_bundles_and_its_bytes() -> None:
  found, rows = schedule.read(TEXT, COUNTS, bytes_a_cycle=RATE)
  assert {place.split('/')[-1]: cycles for (_, place), cycles in rows.items()} == {
      'tanh': 276, 'pallas_call': 587, 'dot_general': PRODUCT, 'dynamic_update_slice': 3}
  assert PRODUCT == 658 and found == schedule.Schedule(276 + 587 + PRODUCT + 3, PRODUCT, 0, 0, 0, [])
  fast, _ = schedule.read(TEXT, COUNTS, bytes_a_cycle=100 * RATE)
  assert fast == schedule.Schedule(276 + 587 + 373 + 3, 0, 0, 0, 0, [])


def test_operations_and_kernels_without_a_schedule_are_reported() -> None:
  some = {name: count for name, count in COUNTS.items() if name not in ('tanh.3', 'added.1')}
  some['fusion'] = some['fusion']._replace(unknown_loops=2)
  found, _ = schedule.read(TEXT, some, bytes_a_cycle=RATE)
  assert found == schedule.Schedule(PRODUCT + 3, PRODUCT, 2, 3460, 2, ['added.1'])


def test_equal_operations_share_a_schedule() -> None:
  again = next(line for line in GOLDEN['text'] if line.startswith('  %tanh.3 '))
  text = TEXT.replace(again, again + '\n' + again.replace('%tanh.3', '%tanh.4'))
  found, rows = schedule.read(text, COUNTS, bytes_a_cycle=RATE)
  assert found.uncounted == 0 and rows['update', 'program/shard_map/tanh'] == 2 * 276


def test_operations_of_a_plan_have_both_times(tmp_path: pathlib.Path) -> None:
  chip = topologies.CHIPS['v6e']
  assert compile.times(TEXT, tmp_path, chip) == (None, compiled.operations(TEXT))
  for name, lines in GOLDEN['dump'].items():
    (tmp_path / name).write_text('\n'.join(lines))
  second, found = compile.times(TEXT, tmp_path, chip)
  assert second == schedule.read(TEXT, COUNTS, bytes_a_cycle=RATE)[0]
  assert {(one.place.split('/')[-1], one.cycles, one.scheduled) for one in found} == {
      ('tanh', 3460, 276), ('pallas_call', 0, 587), ('dot_general', 5060, PRODUCT), ('dynamic_update_slice', 2125, 3)}
