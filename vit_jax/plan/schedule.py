"""A second time of a TPU program: each operation by its instruction schedule and its memory traffic.

The time of an operation is `max(bundles, bytes / (0.85 bandwidth))`. XLA's own estimate charges bf16 like f32, and so
overstates operations in bf16 that wait for memory 2 to 2.8 times; and it has no time of Pallas kernels. This second
time has both right, but is a lower bound: the latency of memory, and loops whose length the program does not state, are
not in it. Collectives and asynchronous copies, which run beside the operations, are in neither time.

The memory traffic is counted from the program's text: the result and the operands in the tiles that they are stored in.
Arrays that the compiler keeps in on-chip memory (`S(1)` in the layout) are left out; of an operand that is only sliced,
and of a result that is written in place, only the part that is touched is counted. v4 has a second memory on the chip,
of 128 MiB beside the vector memory (CMEM, `S(3)`). The rate of its transfers is not published, so that their bytes are
counted apart, and their time is in neither figure.
"""
from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.plan import compiled, hlo
from vit_jax.plan.bundles import Count
from vit_jax.plan.hlo import Instruction

REACHED = .85
"""Part of the peak memory bandwidth that an operation is assumed to reach."""
CMEM = 'S(3)'
"""The second memory on the chip of v4, in a layout."""
_ASYNCHRONOUS = ('-start', '-done', '-update')
_OPERATIONS = ('fusion', 'convolution', 'copy', 'reduce', 'broadcast', 'convert', 'sqrt', 'scatter', 'gather', 'sort')
"""Opcodes that take time of the core, where the text has no estimates."""


_ARRAY = re.compile(r'\b(pred|bf16|[sufc]\d+|f8\w+)\[([\d,]*)\](?:\{([^}]*)\})?')
_TILE = re.compile(r'T\(([\d,]+)\)')
_CALLED = re.compile(r'calls=%?([\w.\-]+)')
_PARAMETER = re.compile(r' parameter\((\d+)\)')


class Traffic:
  """Counts the bytes of the instructions of a program; remembers which parts of its arguments a fusion reads.

  `space`: the memory, as layouts name it; '' = that outside of the chip. `slices`: opcodes that read a part of their
  first operand.
  """

  def __init__(self, program: hlo.Program, space: str = '', slices: Sequence[str] = ('dynamic-slice',)) -> None:
    self._slices = slices
    self._array_bytes = functools.partial(array_bytes, space=space)
    self._computations = {name: {one.name: one for one in rows} for name, rows in program.computations.items()}
    self._parts: dict[tuple[str, int], int | None] = {}

  def num_bytes(self, one: Instruction, within: str) -> int:
    """Returns the bytes that an instruction of the computation `within` reads and writes."""
    known = self._computations[within]
    fused = _CALLED.search(one.text) if one.opcode == 'fusion' else None
    total = self._written(one, fused[1]) if fused else self._array_bytes(one.type)
    for i, name in enumerate(one.operands):
      size = self._array_bytes(known[name].type) if name in known else 0
      part = self._part(fused[1], i) if fused and size else None
      total += size if part is None else min(size, part)
    return total

  def _written(self, one: Instruction, fused: str) -> int:
    """Returns the bytes of the result of a fusion; of an update in place only those of the new part."""
    inside = self._computations.get(fused, {})
    root = next((x for x in inside.values() if x.is_root), None)
    if root is not None and root.opcode == 'dynamic-update-slice' and (size := self._array_bytes(one.type)):
      return min(size, array_bytes(inside[root.operands[1]].type, everywhere=True))
    return self._array_bytes(one.type)

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
      elif one.opcode in self._slices:
        total += array_bytes(one.type, everywhere=True)
      elif one.opcode == 'fusion' and (called := _CALLED.search(one.text)):
        parts = [self._part(called[1], i) for i in used]
        if None in parts:
          return None
        total += sum(part for part in parts if part is not None)
      elif one.opcode != 'dynamic-update-slice' or used != [0]:
        return None
    return total if names else None


def array_bytes(type_text: str, *, everywhere: bool = False, space: str = '') -> int:
  """Returns the bytes of all arrays of a type in their tiles: of those in the memory `space`, or `everywhere`."""
  total = 0
  for dtype, dims, layout in _ARRAY.findall(type_text):
    if everywhere or (space in layout if space else 'S(' not in layout):
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


class Schedule(NamedTuple):
  """The second time of a step of one device, in cycles.

  memory_cycles: of the operations that wait for memory.
  uncounted: operations without a schedule, whose time is that of memory alone; `uncounted_cycles`: XLA's estimate of
    them.
  unknown_loops: loops inside operations that are counted as one iteration.
  kernels: names of Pallas kernels without a schedule.
  cmem_bytes: that operations read from and write to the second memory of v4's chip, whose time is not counted.
  """
  cycles: int
  memory_cycles: int
  uncounted: int
  uncounted_cycles: int
  unknown_loops: int
  kernels: list[str]
  cmem_bytes: int = 0


def read(text: str, counts: Mapping[str, Count], *,
         bytes_a_cycle: float) -> tuple[Schedule, dict[tuple[str, str], int]]:
  """Returns the second time of a compiled program, and its cycles by phase and place of the operations.

  Args:
    text: of the program, `compiled.as_text()`.
    counts: of its operations, `bundles.read`. The compiler schedules one of several equal operations; the others have
      the same type and estimate.
    bytes_a_cycle: peak bandwidth of the memory.
  """
  program = hlo.parse(text)
  clock, on_chip = Clock(program, counts, bytes_a_cycle), Traffic(program, CMEM)
  rows: Counter[tuple[str, str]] = Counter()
  sums: Counter[str] = Counter()
  kernels: dict[str, None] = {}

  def add(one: Instruction, within: str, times: int) -> None:
    found, memory = clock.count(one), clock.memory(one, within)
    cycles, own = times * clock.cycles(one, within), found.cycles if found else 0
    sums['cmem'] += times * on_chip.num_bytes(one, within)
    sums.update(cycles=cycles, memory=cycles * (memory > own), loops=times * (found.unknown_loops if found else 0))
    rows[compiled.place(one.source or one.opcode)] += cycles
    if found is None:
      sums.update(uncounted=times, estimate=times * one.cycles)
      kernels.update({one.name: None} if compiled.is_kernel(one) else {})

  def visit(name: str, times: int) -> None:
    for one in program.computations.get(name, ()):
      if clock.is_counted(one):
        add(one, name, times)
      if one.opcode not in ('fusion', 'custom-call-start'):
        for called, trips in program.calls(one, name):
          visit(called, times * (1 if trips is None else trips))

  visit(program.entry, 1)
  return Schedule(sums['cycles'], sums['memory'], sums['uncounted'], sums['estimate'], sums['loops'],
                  list(kernels), sums['cmem']), dict(rows)


class Clock:
  """The cycles of the operations of a program: of each the larger of its instruction bundles and its bytes.

  `counts` and `bytes_a_cycle` are those of `read`.
  """

  def __init__(self, program: hlo.Program, counts: Mapping[str, Count], bytes_a_cycle: float) -> None:
    self._program, self._counts, self._moved, self._rate = program, counts, Traffic(program), bytes_a_cycle
    # The compiler's dump has the text from before the estimates: there, all that has a schedule is an operation.
    self._has_estimates = any(one.cycles for one in program.computations.get(program.entry, ()))
    self._alike = {_likeness(one): counts[one.name] for rows in program.computations.values() for one in rows
                   if one.name in counts and self.is_counted(one)}

  def is_counted(self, one: Instruction) -> bool:
    """Returns whether an instruction takes time of the core: operations of XLA with an estimate, and kernels."""
    kind = one.opcode.removesuffix('-start').removesuffix('-done')
    if kind in compiled.KINDS or one.opcode.endswith(_ASYNCHRONOUS):
      return False
    if self._has_estimates or one.opcode not in _OPERATIONS:
      return one.cycles > 0 or compiled.is_kernel(one)
    return not compiled.begun(self._program, one)

  def count(self, one: Instruction) -> Count | None:
    """Returns the schedule of an operation, or that of an equal one; None if there is neither."""
    return self._counts.get(one.name) or self._alike.get(_likeness(one))

  def memory(self, one: Instruction, within: str) -> float:
    """Returns the cycles that the bytes of an operation take."""
    return self._moved.num_bytes(one, within) / self._rate / REACHED

  def cycles(self, one: Instruction, within: str) -> int:
    """Returns the cycles of an operation of the computation `within`; 0 if it takes no time of the core."""
    if not self.is_counted(one):
      return 0
    found = self.count(one)
    return round(max(self.memory(one, within), found.cycles if found else 0))


def _likeness(one: Instruction) -> tuple[str, str, int]:
  return one.opcode, one.type, one.cycles

