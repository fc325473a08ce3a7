"""Bytes of operations: tiles, on-chip memory, slices, and updates in place."""
from __future__ import annotations

import pytest

from vit_jax.plan import hlo, traffic


@pytest.mark.parametrize(('text', 'size'), [
    ('bf16[1024,256]{1,0:T(8,128)(2,1)}', 1024 * 256 * 2), ('bf16[1024,256]{1,0:T(8,128)(2,1)S(1)}', 0),
    ('f32[64,16,196,64]{3,2,1,0:T(8,128)}', 64 * 16 * 200 * 128 * 4),    # 196 tokens fill 25 tiles, 64 channels one
    ('f32[1024,16,64]{0,2,1:T(8,128)}', 1024 * 16 * 64 * 4),             # the width is the last axis
    ('f32[1000]{0:T(1024)}', 1024 * 4), ('pred[]', 1), ('s32[3,5]{1,0}', 60),
    ('(f32[8,128]{1,0:T(8,128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)})', 8 * 128 * 6)])
def test_arrays_take_whole_tiles_and_none_where_they_are_on_the_chip(text: str, size: int) -> None:
  assert traffic.array_bytes(text) == size


TEXT = """HloModule jit_step

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
  program = hlo.parse(TEXT)
  one = next(x for x in program.computations['main'] if x.name == name)
  assert traffic.Traffic(program).num_bytes(one, 'main') == tiles * TILE
