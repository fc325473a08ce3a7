"""What the compiler reports about a program: cycles, operations, collectives, and by how much it does not fit.

All are read from the text of the compiled program (`hlo`). The body of a loop counts as often as the loop runs; the
compiler's own totals count it once.
"""
from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

import numpy as np

from vit_jax.plan import hlo
from vit_jax.plan.hlo import Instruction

GIB = 2**30
KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast')
BETWEEN_SLICES = 'between slices'
_ITEM_BYTES = {'pred': 1, 'bf16': 2, 'f16': 2, 'f32': 4, 'f64': 8, 'c64': 8, 'c128': 16}
_ARRAY = re.compile(r'\b(pred|bf16|[sufc]\d+|f8\w+)\[([\d,]*)\]')
_MEGASCALE = '_xla_megascale_transfer_type'
_LISTED = (*KINDS, BETWEEN_SLICES)
_WRAPPER = re.compile(r'(jvp|transpose|vmap|jit|checkpoint)\((.*)\)$')
_SILENT = re.compile(r'|cond|branch(_\d+)?_fun|while|body|closed_call|checkpoint|main|step')
_KERNEL = 'custom_call_target="tpu_custom_call"'  # what Pallas compiles to


class Collective(NamedTuple):
  """All collectives of a kind in one step of one device.

  num_bytes: of their results; for reduce-scatter, of the array that is scattered.
  sent_bytes: what a device sends when they run around a ring; between slices, to the data-center network.
  """
  kind: str
  calls: int
  num_bytes: int
  sent_bytes: int


class Unknown(NamedTuple):
  """Loops whose number of iterations depends on random numbers or data; they are counted as if they ran once.

  cycles: of one iteration, included in `Costs.cycles`.
  sources: where in the traced function they come from.
  """
  loops: int
  cycles: int
  sources: list[str]


class Kernel(NamedTuple):
  """A custom kernel, for which the compiler counts no cycles; `calls` in one step of one device."""
  name: str
  calls: int


class Costs(NamedTuple):
  """Of one step on one device. `cycles` is 0 if the compiler counts none; those of `kernels` are never included."""
  cycles: int
  unknown: Unknown
  collectives: list[Collective]
  kernels: list[Kernel]


class Operation(NamedTuple):
  """All operations of a kind in one step of one device.

  phase: `forward`, `recomputed` (forward again, in the backward pass), `backward`, or `update` (everything else).
  place: modules and primitive, `Block/mlp/up/dot_general`.
  cycles: the compiler's estimate, 0 for Pallas kernels.
  scheduled: cycles by schedule and memory (`schedule`); None if they were not counted.
  """
  phase: str
  place: str
  calls: int
  cycles: int
  scheduled: int | None = None


NOTHING = Costs(0, Unknown(0, 0, []), [], [])


def read(text: str, *, num_devices: int) -> Costs:
  """Reads cycles, collectives and custom kernels from a compiled program's text (`compiled.as_text()`)."""
  program = hlo.parse(text)
  cycles, unknown_loops, unknown_cycles = 0, 0, 0
  sources: dict[str, None] = {}
  found: list[tuple[str, int, int, int]] = []
  kernels: Counter[str] = Counter()

  def visit(name: str, times: int, is_fused: bool, is_sure: bool, is_again: bool) -> None:
    nonlocal cycles, unknown_loops, unknown_cycles
    for one in program.computations.get(name, ()):
      own = 0 if is_fused else times * one.cycles
      cycles, unknown_cycles = cycles + own, unknown_cycles + own * (not is_sure)
      if not own and is_kernel(one):
        kernels[re.sub(r'[.\d]+$', '', one.name)] += times
      kind = BETWEEN_SLICES if one.opcode == 'send' and _MEGASCALE in one.text else one.opcode.removesuffix('-start')
      if kind in _LISTED and not is_again:
        found.append(collective(one, kind, times, name, num_devices))
      for called, trips in program.calls(one, name):
        if trips is None:
          unknown_loops += 1
          sources[_source(one)] = None
        visit(called, times * (1 if trips is None else trips), is_fused or one.opcode == 'fusion',
              is_sure and trips is not None, is_again or continues(program, one, name))

  visit(program.entry, 1, False, True, False)
  return Costs(cycles, Unknown(unknown_loops, unknown_cycles, list(sources)), _by_kind(found),
               [Kernel(*row) for row in kernels.items()])


def is_kernel(one: Instruction) -> bool:
  """Returns whether an instruction is a custom kernel, such as one of Pallas."""
  return _KERNEL in one.text


def _source(loop: Instruction) -> str:
  """Returns the functions that contain a loop, without the step itself: `jit(_beta)/jit(_gamma)`."""
  names = loop.source.partition('/while')[0].split('/')
  return '/'.join(n for n in names[1:] if n != 'vmap()') or 'an unnamed function'


def continues(program: hlo.Program, one: Instruction, within: str) -> bool:
  """Returns whether an instruction goes on with a collective that one of its operands has begun."""
  return one.opcode.endswith(('-update', '-done')) or one.opcode == 'fusion' and bool(continued(program, one, within))


def continued(program: hlo.Program, one: Instruction, within: str) -> str:
  """Returns the name of the fusion whose collective a fusion goes on with; '' if there is none.

  The TPU compiler writes an asynchronous collective several times: in the fusion that starts it, in those of the work
  beside it, and in the one that waits for it, each of which gets the one before. Neither channels nor names tell that:
  all collectives of `shard_map` have one channel, and the copies have names of their own.
  """
  own = begun(program, one)
  makers = (program.maker(within, name) for name in (one.operands if own else ()))
  return next((before.name for before in makers
               if before is not None and before.opcode == 'fusion' and own & begun(program, before)), '')


def begun(program: hlo.Program, fusion: Instruction) -> set[tuple[str, ...]]:
  """Returns kind, channel and shape of the collectives in a fusion, and in those inside of it.

  The layout may differ: the copies of one collective write to memory and to the chip.
  """
  found: set[tuple[str, ...]] = set()
  for name, _ in program.calls(fusion, ''):
    for one in program.computations.get(name, ()):
      if one.opcode in KINDS:
        found.add((one.opcode, *re.findall(r'channel_id=(\d+)', one.text), re.sub(r'\{[^}]*\}', '', one.type)))
      elif one.opcode == 'fusion':
        found |= begun(program, one)
  return found


def _by_kind(found: list[tuple[str, int, int, int]]) -> list[Collective]:
  rows = []
  for kind in _LISTED:
    own = [x for x in found if x[0] == kind]
    if own:
      rows.append(Collective(kind, sum(x[1] for x in own), sum(x[1] * x[2] for x in own),
                             sum(x[1] * x[3] for x in own)))
  return rows


def collective(one: Instruction, kind: str, times: int, within: str, num_devices: int) -> tuple[str, int, int, int]:
  """Returns the kind of a collective, how often it runs, its bytes and its sent bytes."""
  size = _num_bytes(one.type)
  group = group_size(one.text, num_devices)
  if kind == BETWEEN_SLICES:  # its type is (operand, counter, token)
    size = _num_bytes(re.sub(r'\bu32\[\]', '', one.type))
    return kind, times, size, size
  if one.opcode == 'all-gather-start':  # its type is (operand, result)
    size = size * group // (group + 1)
  elif one.opcode in ('collective-permute-start', 'all-to-all-start'):
    size = _num_bytes(re.sub(r'\bu32\[\]', '', one.type)) // 2  # operand and result, without counters
  if one.opcode == 'reduce-scatter-start':
    size = size * group // (group + 1)
  elif kind == 'reduce-scatter':
    size *= group
  elif kind == 'all-reduce' and within.startswith('all-reduce-scatter'):  # the TPU compiler fuses these
    kind = 'reduce-scatter'
  share = (group - 1) / group
  sent = {'all-reduce': 2 * share, 'collective-permute': 1., 'collective-broadcast': 1.}.get(kind, share) * size
  return kind, times, size, int(sent)


def _num_bytes(type_text: str) -> int:
  total = 0
  for dtype, dims in _ARRAY.findall(type_text):
    count = 1
    for dim in dims.split(','):
      count *= int(dim) if dim else 1
    total += count * (_ITEM_BYTES.get(dtype) or max(1, int((re.search(r'\d+', dtype) or ['8'])[0]) // 8))
  return total


def group_size(text: str, num_devices: int) -> int:
  """Returns how many devices take part in a collective, from any of the three forms of `replica_groups`."""
  if named := re.search(r'replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}', text):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
    size = 1
    for axis, part in re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2]):
      size *= int(part or sizes.get(axis, 1))
    return size
  if iota := re.search(r'replica_groups=\[(\d+),(\d+)\]', text):
    return int(iota[2])
  if listed := re.search(r'replica_groups=\{\{([\d,]+)\}', text):
    return listed[1].count(',') + 1
  return num_devices


def first_group(text: str, num_devices: int) -> list[int]:
  """Returns the devices that take part in a collective together with the first one."""
  if listed := re.search(r'replica_groups=\{\{([\d,]+)\}', text):
    return [int(one) for one in listed[1].split(',')]
  iota = re.search(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  if iota is None:
    return list(range(group_size(text, num_devices)))
  shape = [int(one) for one in iota[3].split(',')]
  axes = [int(one) for one in iota[4].split(',')] if iota[4] else range(len(shape))
  devices = np.arange(math.prod(shape)).reshape(shape).transpose(axes).reshape(int(iota[1]), int(iota[2]))
  return [int(one) for one in devices[0]]


def operations(text: str) -> list[Operation]:
  """Returns the operations of a compiled program's text, most cycles first.

  Loop bodies count as often as they run.

  Kernels, for which the compiler counts no cycles, are among them.
  """
  program = hlo.parse(text)
  cycles: Counter[tuple[str, str]] = Counter()
  calls: Counter[tuple[str, str]] = Counter()

  def visit(name: str, times: int) -> None:
    for one in program.computations.get(name, ()):
      if one.cycles or is_kernel(one):
        key = place(one.source or one.opcode)
        cycles[key] += times * one.cycles
        calls[key] += times
      if one.opcode != 'fusion':  # the cycles of a fusion include those of its instructions
        for called, trips in program.calls(one, name):
          visit(called, times * (1 if trips is None else trips))

  visit(program.entry, 1)
  return [Operation(*key, calls[key], value) for key, value in cycles.most_common()]


def place(source: str) -> tuple[str, str]:
  """Returns phase and place of an operation from its `op_name`.

  An example is `jit(step)/transpose(jvp(Block))/mlp/up/dot`.
  """
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


class Overflow(NamedTuple):
  """By how much a program does not fit, GiB a device; `what` names what needs the memory."""
  need_gib: float
  have_gib: float
  what: str


def overflow(message: str) -> Overflow | None:
  """Reads the compiler's out-of-memory message; None for any other message."""
  if found := re.search(r'(?:memory required|required) for HLO temporaries \(([\d.]+[KMGT]?)\) exceeds available HBM '
                        r'\(([\d.]+[KMGT]?)\)', message):
    return Overflow(_gib(found[1]), _gib(found[2]), 'temporaries')
  if found := re.search(r'Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm', message):
    return Overflow(_gib(found[1]), _gib(found[2]), 'the program')
  if 'RESOURCE_EXHAUSTED' in message or 'out of memory' in message.lower():
    return Overflow(0., 0., 'the program')
  return None


def _gib(text: str) -> float:
  scale = {'K': 2**-20, 'M': 2**-10, 'G': 1., 'T': 1024.}
  return float(text[:-1]) * scale[text[-1]] if text[-1] in scale else float(text) / GIB
