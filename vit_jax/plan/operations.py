"""Which parts of a step the compiler's cycles go to, by the place in the traced program that they come from."""
from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from vit_jax.plan import hlo

_WRAPPER = re.compile(r'(jvp|transpose|vmap|jit|checkpoint)\((.*)\)$')
_SILENT = re.compile(r'|cond|branch(_\d+)?_fun|while|body|closed_call|checkpoint|main|step')


class Operation(NamedTuple):
  """All operations of a kind in one step of one device.

  phase: `forward`, `recomputed` (forward again, in the backward pass), `backward`, or `update`: all outside of these.
  place: modules and primitive, `Block/mlp/up/dot_general`.
  """
  phase: str
  place: str
  calls: int
  cycles: int


def read(text: str) -> list[Operation]:
  """The operations of a compiled program's text, most cycles first; loops times their trips."""
  program = hlo.parse(text)
  cycles: Counter[tuple[str, str]] = Counter()
  calls: Counter[tuple[str, str]] = Counter()

  def visit(name: str, times: int) -> None:
    for one in program.computations.get(name, ()):
      if one.cycles:
        key = place(one.source or one.opcode)
        cycles[key] += times * one.cycles
        calls[key] += times
      if one.opcode != 'fusion':  # whose cycles are those of what it holds
        for called, trips in program.calls(one, name):
          visit(called, times * (1 if trips is None else trips))

  visit(program.entry, 1)
  return [Operation(*key, calls[key], value) for key, value in cycles.most_common()]


def place(source: str) -> tuple[str, str]:
  """Phase and place of an operation from its `op_name`, such as `jit(step)/transpose(jvp(Block))/mlp/up/dot`."""
  phase, names = 'update', []
  for part in source.split('/'):
    while found := _WRAPPER.match(part):
      if found[1] == 'transpose' or found[1] == 'jvp' and phase == 'update':
        phase = 'backward' if found[1] == 'transpose' else 'forward'
      part = found[2]
    if part == 'rematted_computation':
      phase = 'recomputed'
    elif not _SILENT.fullmatch(part):
      names.append(part)
  return phase, '/'.join(names) or 'step'
