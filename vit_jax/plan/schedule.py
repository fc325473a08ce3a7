"""A second time of a TPU program: each operation by its instruction schedule and its memory traffic.

The time of an operation is `max(bundles, bytes / (0.85 bandwidth))`. XLA's own estimate charges bf16 like f32, and so
overstates operations in bf16 that wait for memory 2 to 2.8 times; and it has no time of Pallas kernels. This second
time has both right, but is a lower bound: the latency of memory, and loops whose length the program does not state, are
not in it. Collectives and asynchronous copies, which run beside the operations, are in neither time.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from vit_jax.plan import compiled, hlo, traffic
from vit_jax.plan.bundles import Count
from vit_jax.plan.hlo import Instruction

REACHED = .85
"""Part of the peak memory bandwidth that an operation is assumed to reach."""
_ASYNCHRONOUS = ('-start', '-done', '-update')


class Schedule(NamedTuple):
  """The second time of a step of one device, in cycles.

  memory_cycles: of the operations that wait for memory.
  uncounted: operations without a schedule, whose time is that of memory alone; `uncounted_cycles`: XLA's estimate of
    them.
  unknown_loops: loops inside operations that are counted as one iteration.
  kernels: names of Pallas kernels without a schedule.
  """
  cycles: int
  memory_cycles: int
  uncounted: int
  uncounted_cycles: int
  unknown_loops: int
  kernels: list[str]


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
  moved, alike = traffic.Traffic(program), _alike(program, counts)
  rows: Counter[tuple[str, str]] = Counter()
  sums: Counter[str] = Counter()
  kernels: dict[str, None] = {}

  def add(one: Instruction, within: str, times: int) -> None:
    found = counts.get(one.name) or alike.get(_likeness(one))
    memory, own = moved.num_bytes(one, within) / bytes_a_cycle / REACHED, found.cycles if found else 0
    cycles = times * round(max(memory, own))
    sums.update(cycles=cycles, memory=cycles * (memory > own), loops=times * (found.unknown_loops if found else 0))
    rows[compiled.place(one.source or one.opcode)] += cycles
    if found is None:
      sums.update(uncounted=times, estimate=times * one.cycles)
      kernels.update({one.name: None} if compiled.is_kernel(one) else {})

  def visit(name: str, times: int) -> None:
    for one in program.computations.get(name, ()):
      if is_counted(one):
        add(one, name, times)
      if one.opcode != 'fusion':
        for called, trips in program.calls(one, name):
          visit(called, times * (1 if trips is None else trips))

  visit(program.entry, 1)
  return Schedule(sums['cycles'], sums['memory'], sums['uncounted'], sums['estimate'], sums['loops'],
                  list(kernels)), dict(rows)


def is_counted(one: Instruction) -> bool:
  """Returns whether an instruction takes time of the core: operations of XLA with an estimate, and kernels."""
  kind = one.opcode.removesuffix('-start').removesuffix('-done')
  if kind in compiled.KINDS or one.opcode.endswith(_ASYNCHRONOUS):
    return False
  return one.cycles > 0 or compiled.is_kernel(one)


def _likeness(one: Instruction) -> tuple[str, str, int]:
  return one.opcode, one.type, one.cycles


def _alike(program: hlo.Program, counts: Mapping[str, Count]) -> dict[tuple[str, str, int], Count]:
  """Counts by opcode, type and estimate, for operations whose equals were scheduled."""
  return {_likeness(one): counts[one.name] for rows in program.computations.values() for one in rows
          if one.name in counts and is_counted(one)}
