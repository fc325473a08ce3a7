"""A second estimate of the time of a TPU program: each operation by its instruction bundles and its memory traffic.

The time of an operation is `max(bundles, bytes / (0.85 bandwidth))`. XLA's own estimate charges bf16 like f32, so it
overstates operations in bf16 that wait for memory by 2 to 2.8 times; and it has no time of Pallas kernels. This second
estimate has both right, but is a lower bound: it lacks the latency of memory, and counts loops of unknown length as one
iteration. Neither estimate includes collectives and asynchronous copies, which run beside the operations.

`compile` calls `read` with the counts of `bundles`. `overlap` follows the program with a `Clock`. The memory traffic is
counted from the program's text: the result and the operands, with the padding of the tiles that they are stored in.
Arrays that the compiler keeps in on-chip memory (`S(1)` in the layout) are left out. Of an operand that a fusion only
slices, and of a result that it writes in place, only the part that is touched is counted. v4 has a second memory on the
chip, of 128 MiB beside the vector memory (CMEM, `S(3)`). The rate of its transfers is not published, so their bytes are
counted separately, and their time is in neither estimate.
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
EVERYWHERE = 'everywhere'
_ASYNCHRONOUS = ('-start', '-done', '-update')
_OPERATIONS = ('fusion', 'convolution', 'copy', 'reduce', 'broadcast', 'convert', 'sqrt', 'scatter', 'gather', 'sort')
"""Opcodes that take time of the core, where the text has no estimates."""
_TILE = re.compile(r'T\(([\d,]+)\)')  # 'T(8,128)' in the layout '1,0:T(8,128)'


class Traffic:
  """Counts the bytes that the instructions of a program read and write; caches the parts that fusions read.

  Args:
    program: the parsed program.
    space: the memory whose bytes are counted, as layouts name it, such as `CMEM`; '' = the memory outside of the chip.
    slices: opcodes that read only a part of their first operand.
  """

  def __init__(self, program: hlo.Program, space: str = '', slices: Sequence[str] = ('dynamic-slice',)) -> None:
    self._program, self._space, self._slices = program, space, slices
    self._read_by_slices = functools.cache(self._count_slices)  # several fusions may call a computation

  def num_bytes(self, instruction: Instruction, computation: str) -> int:
    """Returns the bytes that an instruction of `computation` reads and writes."""
    siblings = self._program.computations[computation]
    fused = instruction.called.get('calls') if instruction.opcode == 'fusion' else None
    total = self._written_bytes(instruction, fused)
    for index, name in enumerate(instruction.operands):
      size = array_bytes(siblings[name].type, space=self._space) if name in siblings else 0
      sliced = self._read_by_slices(fused, index) if fused and size else None
      total += size if sliced is None else min(size, sliced)
    return total

  def _written_bytes(self, instruction: Instruction, fused: str | None) -> int:
    """Returns the bytes of a result; of a fusion that updates an array in place, only those of the new part."""
    size = array_bytes(instruction.type, space=self._space)
    inside = self._program.computations.get(fused or '', {})
    for root in inside.values():
      if root.is_root and root.opcode == 'dynamic-update-slice':
        return min(size, array_bytes(inside[root.operands[1]].type, space=EVERYWHERE))
    return size

  def _count_slices(self, fused: str, index: int) -> int | None:
    """Returns the bytes that a fused computation reads of a parameter by slices; None if it reads all of it."""
    inside = self._program.instructions(fused)
    names = {instruction.name for instruction in inside  # of the parameter, and below also of bitcasts of it
             if instruction.opcode == 'parameter' and f'parameter({index})' in instruction.text}
    if not names:
      return None
    total = 0
    for instruction in inside:
      if instruction.opcode == 'parameter':
        continue
      uses = [i for i, name in enumerate(instruction.operands) if name in names]
      if not uses or (instruction.opcode == 'dynamic-update-slice' and uses == [0]):  # updated in place
        continue
      if instruction.opcode == 'bitcast' and not instruction.is_root:
        names.add(instruction.name)
      elif instruction.opcode in self._slices:
        total += array_bytes(instruction.type, space=EVERYWHERE)
      elif instruction.opcode == 'fusion':
        for i in uses:
          part = self._read_by_slices(instruction.called['calls'], i)
          if part is None:
            return None
          total += part
      else:
        return None
    return total


def array_bytes(type_text: str, *, space: str = '') -> int:
  """Returns the bytes, with the padding of tiles, of those arrays of a type that are in the memory `space`.

  '' = the memory outside of the chip; `EVERYWHERE` = all arrays.
  """
  total = 0
  for array in hlo.arrays(type_text):
    is_outside = 'S(' not in array.layout
    if space == EVERYWHERE or (space in array.layout if space else is_outside):
      total += _padded_size(array) * array.item_bits // 8
  return total


def _padded_size(array: hlo.ArrayType) -> int:
  """Returns the number of elements with padding: `f32[64,196]{1,0:T(8,128)}` has 64 x 256.

  The layout lists the axes, the fastest first. The fastest axes are padded to multiples of the sides of the tile.
  """
  order = [int(axis) for axis in array.layout.partition(':')[0].split(',') if axis]
  tile = _TILE.search(array.layout)
  sides = [int(side) for side in tile[1].split(',')] if tile else []
  shape = list(array.shape)
  if len(sides) <= len(shape):
    for axis, side in zip(order, reversed(sides), strict=False):
      shape[axis] = -(-shape[axis] // side) * side
  return math.prod(shape)


class Schedule(NamedTuple):
  """The second estimate of the time of a step of one device, in cycles.

  memory_cycles: cycles of the operations that wait for memory.
  uncounted: number of operations without a count of bundles, whose time is that of their bytes alone.
  uncounted_cycles: XLA's estimate for these operations.
  unknown_loops: runs of loops of unknown length inside operations; each run is counted as one iteration.
  kernels: names of Pallas kernels without a count of bundles.
  cmem_bytes: bytes that operations read from and write to the second memory of v4's chip, whose time is not counted.
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
  """Returns the second estimate of a compiled program, and its cycles by phase and place of the operations.

  Args:
    text: of the program, `compiled.as_text()`.
    counts: bundles of the operations by name, `bundles.read`. The compiler schedules one of several equal operations;
      the others have the same type and estimate.
    bytes_a_cycle: peak bandwidth of the memory.
  """
  program = hlo.parse(text)
  clock, cmem = Clock(program, counts, bytes_a_cycle), Traffic(program, CMEM)
  cycles_by_place: Counter[tuple[str, str]] = Counter()
  memory_cycles = uncounted = uncounted_cycles = unknown_loops = cmem_bytes = 0
  kernels: dict[str, None] = {}
  for visit in program.walk():
    instruction, computation, times = visit.instruction, visit.computation, visit.times
    if visit.is_inside('fusion', 'custom-call-start') or not clock.is_counted(instruction):
      continue
    count = clock.count(instruction)
    cycles = times * clock.cycles(instruction, computation)
    cycles_by_place[compiled.locate(instruction)] += cycles
    cmem_bytes += times * cmem.num_bytes(instruction, computation)
    if clock.memory_cycles(instruction, computation) > (count.cycles if count else 0):
      memory_cycles += cycles
    if count:
      unknown_loops += times * count.unknown_loops
    else:
      uncounted += times
      uncounted_cycles += times * instruction.cycles
      if compiled.is_kernel(instruction):
        kernels[instruction.name] = None
  return Schedule(
      cycles=cycles_by_place.total(), memory_cycles=memory_cycles, uncounted=uncounted,
      uncounted_cycles=uncounted_cycles, unknown_loops=unknown_loops, kernels=list(kernels),
      cmem_bytes=cmem_bytes), dict(cycles_by_place)


class Clock:
  """Counts the cycles of the operations of a program: of each the larger of its bundles and its bytes.

  `counts` and `bytes_a_cycle` are those of `read`.
  """

  def __init__(self, program: hlo.Program, counts: Mapping[str, Count], bytes_a_cycle: float) -> None:
    self._program, self._traffic = program, Traffic(program)
    self._counts, self._bytes_a_cycle = counts, bytes_a_cycle
    # The text in the compiler's dump is from before the estimates.
    self._has_estimates = any(instruction.cycles for instruction in program.instructions(program.entry))
    self._count_by_likeness = {
        _likeness(instruction): counts[instruction.name]
        for instructions in program.computations.values() for instruction in instructions.values()
        if instruction.name in counts and self.is_counted(instruction)}

  def is_counted(self, instruction: Instruction) -> bool:
    """Returns whether an instruction takes time of the core: an operation of XLA with an estimate, or a kernel.

    In a text without estimates, an operation is one of `_OPERATIONS` that contains no collective.
    """
    if instruction.opcode in compiled.KINDS or instruction.opcode.endswith(_ASYNCHRONOUS):
      return False
    if self._has_estimates or instruction.opcode not in _OPERATIONS:
      return instruction.cycles > 0 or compiled.is_kernel(instruction)
    return not compiled.started_in(self._program, instruction)

  def count(self, instruction: Instruction) -> Count | None:
    """Returns the bundles of an operation, or those of an equal one; None if there is neither."""
    return self._counts.get(instruction.name) or self._count_by_likeness.get(_likeness(instruction))

  def memory_cycles(self, instruction: Instruction, computation: str) -> float:
    """Returns the cycles that the bytes of an operation take."""
    return self._traffic.num_bytes(instruction, computation) / self._bytes_a_cycle / REACHED

  def cycles(self, instruction: Instruction, computation: str) -> int:
    """Returns the cycles of an operation of `computation`; 0 if it takes no time of the core."""
    if not self.is_counted(instruction):
      return 0
    count = self.count(instruction)
    return round(max(self.memory_cycles(instruction, computation), count.cycles if count else 0))


def _likeness(instruction: Instruction) -> tuple[str, str, int]:
  """Returns opcode, type and estimate, which are the same for equal operations."""
  return instruction.opcode, instruction.type, instruction.cycles
