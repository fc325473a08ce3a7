"""The second time of a compiled program: bundles or bytes, whichever takes longer, and what is missing in it."""
from __future__ import annotations

import json
import pathlib

import pytest

from vit_jax.plan import bundles, compile, compiled, hlo, schedule, topologies

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
  assert compile.times(TEXT, bundles.read(tmp_path), chip) == (None, compiled.operations(TEXT))
  for name, lines in GOLDEN['dump'].items():
    (tmp_path / name).write_text('\n'.join(lines))
  second, found = compile.times(TEXT, bundles.read(tmp_path), chip)
  assert second == schedule.read(TEXT, COUNTS, bytes_a_cycle=RATE)[0]
  assert {(one.place.split('/')[-1], one.cycles, one.scheduled) for one in found} == {
      ('tanh', 3460, 276), ('pallas_call', 0, 587), ('dot_general', 5060, PRODUCT), ('dynamic_update_slice', 2125, 3)}


@pytest.mark.parametrize(('text', 'size'), [
    ('bf16[1024,256]{1,0:T(8,128)(2,1)}', 1024 * 256 * 2), ('bf16[1024,256]{1,0:T(8,128)(2,1)S(1)}', 0),
    ('f32[64,16,196,64]{3,2,1,0:T(8,128)}', 64 * 16 * 200 * 128 * 4),    # 196 tokens fill 25 tiles, 64 channels one
    ('f32[1024,16,64]{0,2,1:T(8,128)}', 1024 * 16 * 64 * 4),             # the width is the last axis
    ('f32[1000]{0:T(1024)}', 1024 * 4), ('pred[]', 1), ('s32[3,5]{1,0}', 60),
    ('(f32[8,128]{1,0:T(8,128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)})', 8 * 128 * 6)])
def test_arrays_take_whole_tiles_and_none_where_they_are_on_the_chip(text: str, size: int) -> None:
  assert schedule.array_bytes(text) == size


CMEM_TEXT = """HloModule jit_step

ENTRY %main (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %near = f32[8,128]{1,0:T(8,128)S(1)} add(%a, %a), backend_config={"estimated_cycles":"9"}
  %kept = f32[8,128]{1,0:T(8,128)S(3)} add(%near, %near), backend_config={"estimated_cycles":"9"}
  %used = f32[8,128]{1,0:T(8,128)S(3)} add(%kept, %a), backend_config={"estimated_cycles":"9"}
  ROOT %out = f32[8,128]{1,0:T(8,128)} add(%used, %kept), backend_config={"estimated_cycles":"9"}
}
"""


def test_bytes_of_the_second_memory_on_the_chip_are_counted_apart_and_take_no_time() -> None:
  size = 8 * 128 * 4
  found, _ = schedule.read(CMEM_TEXT, {}, bytes_a_cycle=1.)
  assert found.cmem_bytes == (1 + 2 + 2) * size  # of `kept`, `used` and `out`
  assert found.cycles == pytest.approx((2 + 1 + 1) * size / schedule.REACHED, abs=4)  # `a` twice and once, and `out`
  both, _ = schedule.read(CMEM_TEXT.replace('S(3)', 'S(1)'), {}, bytes_a_cycle=1.)
  assert both.cmem_bytes == 0 and both.cycles == found.cycles


TRAFFIC_TEXT = """HloModule jit_step

%inner (p: f32[4,8,128]) -> f32[1,8,128] {
  %p = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  ROOT %cut = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%p, %i), dynamic_slice_sizes={1,8,128}
}

%sliced (q: f32[4,8,128], r: f32[8,128]) -> f32[8,128] {
  %q = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  %r = f32[8,128]{1,0:T(8,128)} parameter(1)
  %same = f32[4,8,128]{2,1,0:T(8,128)} bitcast(%q)
  %part = f32[1,8,128]{2,1,0:T(8,128)} fusion(%same), kind=kLoop, calls=%inner
  ROOT %sum = f32[8,128]{1,0:T(8,128)} add(%part, %r)
}

%written (s: f32[4,8,128], t: f32[1,8,128]) -> f32[4,8,128] {
  %s = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  %t = f32[1,8,128]{2,1,0:T(8,128)} parameter(1)
  ROOT %put = f32[4,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%s, %t, %i)
}

%read (u: f32[4,8,128]) -> f32[4,8,128] {
  %u = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  %cut.2 = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%u, %i), dynamic_slice_sizes={1,8,128}
  ROOT %all = f32[4,8,128]{2,1,0:T(8,128)} add(%u, %cut.2)
}

%bits (v: f32[4,8,128]) -> f32[4,8,128] {
  %v = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  ROOT %as = f32[4,8,128]{2,1,0:T(8,128)} bitcast(%v)
}

%viewed (w: f32[4,8,128]) -> f32[8,128] {
  %w = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  %view = f32[4,8,128]{2,1,0:T(8,128)} fusion(%w), kind=kLoop, calls=%bits
  ROOT %max = f32[8,128]{1,0:T(8,128)} reduce(%view, %low), dimensions={0}, to_apply=%larger
}

ENTRY %main (a: f32[4,8,128], b: f32[8,128]) -> f32[4,8,128] {
  %a = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  %b = f32[8,128]{1,0:T(8,128)} parameter(1)
  %one = f32[8,128]{1,0:T(8,128)} fusion(%a, %b), kind=kLoop, calls=%sliced
  %two = f32[4,8,128]{2,1,0:T(8,128)} fusion(%a, %one), kind=kLoop, calls=%written
  %three = f32[4,8,128]{2,1,0:T(8,128)} fusion(%two), kind=kLoop, calls=%read
  %five = f32[8,128]{1,0:T(8,128)} fusion(%a), kind=kLoop, calls=%viewed
  ROOT %four = f32[4,8,128]{2,1,0:T(8,128)S(1)} copy(%three)
}
"""
TILE = 8 * 128 * 4


@pytest.mark.parametrize(('name', 'tiles'), [('one', 1 + 1 + 1), ('two', 1 + 1), ('three', 4 + 4), ('four', 4),
                                             ('five', 4 + 1)])
def test_of_slices_and_updates_in_place_only_the_part_that_is_touched_is_counted(name: str, tiles: int) -> None:
  program = hlo.parse(TRAFFIC_TEXT)
  one = program.computations['main'][name]
  assert schedule.Traffic(program).num_bytes(one, 'main') == tiles * TILE
