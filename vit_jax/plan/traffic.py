"""Bytes that an operation of a compiled TPU program moves from and to the memory of its device.

Counted are the result and the operands in the tiles that they are stored in. Arrays that the compiler keeps in on-chip
memory (`S(1)` in the layout) are left out; of an operand that is only sliced, and of a result that is written in
place, only the part that is touched is counted.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping

from vit_jax.plan import hlo
from vit_jax.plan.hlo import Instruction

_ARRAY = re.compile(r'\b(pred|bf16|[sufc]\d+|f8\w+)\[([\d,]*)\](?:\{([^}]*)\})?')
_TILE = re.compile(r'T\(([\d,]+)\)')
_CALLED = re.compile(r'calls=%?([\w.\-]+)')
_PARAMETER = re.compile(r' parameter\((\d+)\)')


class Traffic:
  """Counts the bytes of the instructions of a program; remembers which parts of its arguments a fusion reads."""

  def __init__(self, program: hlo.Program) -> None:
    self._computations = {name: {one.name: one for one in rows} for name, rows in program.computations.items()}
    self._parts: dict[tuple[str, int], int | None] = {}

  def num_bytes(self, one: Instruction, within: str) -> int:
    """Returns the bytes that an instruction of the computation `within` reads and writes."""
    known = self._computations[within]
    fused = _CALLED.search(one.text) if one.opcode == 'fusion' else None
    total = self._written(one, fused[1]) if fused else array_bytes(one.type)
    for i, name in enumerate(one.operands):
      size = array_bytes(known[name].type) if name in known else 0
      part = self._part(fused[1], i) if fused and size else None
      total += size if part is None else min(size, part)
    return total

  def _written(self, one: Instruction, fused: str) -> int:
    """Returns the bytes of the result of a fusion; of an update in place only those of the new part."""
    inside = self._computations.get(fused, {})
    root = next((x for x in inside.values() if x.is_root), None)
    if root is not None and root.opcode == 'dynamic-update-slice' and (size := array_bytes(one.type)):
      return min(size, array_bytes(inside[root.operands[1]].type, everywhere=True))
    return array_bytes(one.type)

  def _part(self, fused: str, index: int) -> int | None:
    """Returns the bytes that a fusion reads of an operand through slices alone; None if it reads all of it."""
    key = fused, index
    if key not in self._parts:
      self._parts[key] = self._sliced(self._computations.get(fused, {}), index)
    return self._parts[key]

  def _sliced(self, inside: Mapping[str, Instruction], index: int) -> int | None:
    names = {one.name for one in inside.values()
             if (found := _PARAMETER.search(one.text)) and int(found[1]) == index}
    total = 0
    for one in inside.values():
      used = [i for i, name in enumerate(one.operands) if name in names] if one.opcode != 'parameter' else []
      if not used:
        continue
      if one.opcode == 'bitcast' and not one.is_root:
        names.add(one.name)
      elif one.opcode == 'dynamic-slice':
        total += array_bytes(one.type, everywhere=True)
      elif one.opcode == 'fusion' and (called := _CALLED.search(one.text)):
        parts = [self._part(called[1], i) for i in used]
        if None in parts:
          return None
        total += sum(part for part in parts if part is not None)
      elif one.opcode != 'dynamic-update-slice' or used != [0]:
        return None
    return total if names else None


def array_bytes(type_text: str, *, everywhere: bool = False) -> int:
  """Returns the bytes of all arrays of a type in their tiles; those in on-chip memory only if `everywhere`."""
  total = 0
  for dtype, dims, layout in _ARRAY.findall(type_text):
    if everywhere or 'S(' not in layout:
      total += _padded([int(dim) for dim in dims.split(',') if dim], layout) * _item_bits(dtype) // 8
  return total


def _item_bits(dtype: str) -> int:
  return 8 if dtype == 'pred' else int((re.search(r'\d+', dtype) or ['8'])[0])


def _padded(shape: list[int], layout: str) -> int:
  """Returns the number of elements with padding.

  The last axes of the layout, the fastest first, are multiples of the tile's sides.
  """
  order = [int(axis) for axis in layout.partition(':')[0].split(',') if axis]
  tile = _TILE.search(layout)
  sides = [int(side) for side in tile[1].split(',')] if tile else []
  shape = list(shape)
  if len(sides) <= len(shape):
    for axis, side in zip(order, reversed(sides), strict=False):
      shape[axis] = -(-shape[axis] // side) * side
  return math.prod(shape)
