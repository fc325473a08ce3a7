"""Reads from a compiled program's text what the compiler reports: cycles, operations, collectives, missing memory.

`compile` calls `read` and `operations` after a compilation, and `overflow` after one that failed. The body of a loop
counts as often as the loop runs; the compiler's own totals count it once.
"""
from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

import numpy as np

from vit_jax.plan import hlo
from vit_jax.plan.hlo import Instruction, Visit

GIB = 2**30
KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast')
BETWEEN_SLICES = 'between slices'
_SENT_PARTS = {'all-reduce': 2, 'all-gather': 1, 'reduce-scatter': 1, 'all-to-all': 1}
"""How often each device of a ring of n sends (n - 1) / n of the array."""
_COUNTER = re.compile(r'\bu32\[\]')  # in the types of asynchronous collectives
_MEGASCALE = '_xla_megascale_transfer_type'
_WRAPPER = re.compile(r'(jvp|transpose|vmap|jit|checkpoint)\((.*)\)$')  # 'transpose(jvp(Block))'
_UNNAMED = re.compile(r'|cond|branch(_\d+)?_fun|while|body|closed_call|checkpoint|main|step')
_KERNEL = 'custom_call_target="tpu_custom_call"'  # a kernel of Pallas


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
  sources: the functions that have these loops, such as `jit(_beta)`.
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
  """Returns cycles, collectives and custom kernels of a compiled program's text (`compiled.as_text()`)."""
  program = hlo.parse(text)
  cycles, unknown_loops, unknown_cycles = 0, 0, 0
  sources: dict[str, None] = {}
  calls: Counter[str] = Counter()  # of collectives, by kind
  result_bytes: Counter[str] = Counter()
  sent_bytes: Counter[str] = Counter()
  kernels: Counter[str] = Counter()
  for visit in program.walk():
    instruction = visit.instruction
    own_cycles = 0 if visit.is_inside('fusion') else visit.times * instruction.cycles
    cycles += own_cycles
    if not visit.has_known_times:
      unknown_cycles += own_cycles
    if not own_cycles and is_kernel(instruction):
      kernels[re.sub(r'[.\d]+$', '', instruction.name)] += visit.times
    if instruction.opcode == 'while' and program.trips(instruction, visit.computation) is None:
      unknown_loops += 1
      sources[_enclosing_functions(instruction)] = None
    call = collective(instruction, visit.computation, num_devices)
    if call and not any(continues(program, caller) for caller in visit.callers()):
      calls[call.kind] += visit.times
      result_bytes[call.kind] += visit.times * call.num_bytes
      sent_bytes[call.kind] += visit.times * call.sent_bytes
  return Costs(cycles, Unknown(unknown_loops, unknown_cycles, list(sources)),
               [Collective(kind, calls[kind], result_bytes[kind], sent_bytes[kind])
                for kind in (*KINDS, BETWEEN_SLICES) if kind in calls],
               [Kernel(*row) for row in kernels.items()])


def is_kernel(instruction: Instruction) -> bool:
  """Returns whether an instruction is a custom kernel, such as one of Pallas."""
  return _KERNEL in instruction.text


def _enclosing_functions(loop: Instruction) -> str:
  """Returns the functions that contain a loop, without the step itself: `jit(_beta)/jit(_gamma)`."""
  _, *functions = loop.source.partition('/while')[0].split('/')
  return '/'.join(name for name in functions if name != 'vmap()') or 'an unnamed function'


def continues(program: hlo.Program, visit: Visit) -> bool:
  """Returns whether an instruction continues a collective that one of its operands has started."""
  if visit.instruction.opcode.endswith(('-update', '-done')):
    return True
  return bool(find_continued(program, visit.instruction, visit.computation))


def find_continued(program: hlo.Program, fusion: Instruction, computation: str) -> str:
  """Returns the name of the fusion whose collective another fusion continues; '' if there is none, or it is no fusion.

  The TPU compiler writes an asynchronous collective several times: in the fusion that starts it, in the fusions of the
  work beside it, and in the fusion that waits for it. Each of them has the one before as an operand. Channels and names
  do not show this: all collectives of `shard_map` have one channel, and the copies have different names.
  """
  started = started_in(program, fusion) if fusion.opcode == 'fusion' else set()
  for operand in fusion.operands if started else ():
    before = program.producer(computation, operand)
    if before is not None and before.opcode == 'fusion' and started & started_in(program, before):
      return before.name
  return ''


def started_in(program: hlo.Program, fusion: Instruction) -> set[tuple[str, ...]]:
  """Returns kind, channel and type of the collectives in a fusion, and in those inside of it.

  The type is without the layout, because the copies of one collective may write to memory and to the chip.
  """
  started: set[tuple[str, ...]] = set()
  for name, _ in program.calls(fusion, ''):
    for instruction in program.instructions(name):
      if instruction.opcode in KINDS:
        channel = re.findall(r'channel_id=(\d+)', instruction.text)
        started.add((instruction.opcode, *channel, re.sub(r'\{[^}]*\}', '', instruction.type)))
      elif instruction.opcode == 'fusion':
        started |= started_in(program, instruction)
  return started


def collective(instruction: Instruction, computation: str, num_devices: int) -> Collective | None:
  """Returns an instruction of `computation` as one call of a collective; None if it is no collective."""
  if instruction.opcode == 'send' and _MEGASCALE in instruction.text:  # its type is (operand, counter, token)
    num_bytes = _num_bytes(_COUNTER.sub('', instruction.type))
    return Collective(BETWEEN_SLICES, 1, num_bytes, num_bytes)
  kind = instruction.opcode.removesuffix('-start')
  if kind not in KINDS:
    return None
  group = group_size(instruction.text, num_devices)
  num_bytes = _num_bytes(instruction.type)
  match instruction.opcode:
    case 'all-gather-start' | 'reduce-scatter-start':  # the type is (operand, result)
      num_bytes = num_bytes * group // (group + 1)
    case 'collective-permute-start' | 'all-to-all-start':  # the type is (operand, result), perhaps with counters
      num_bytes = _num_bytes(_COUNTER.sub('', instruction.type)) // 2
    case 'reduce-scatter':
      num_bytes *= group
    case 'all-reduce' | 'all-reduce-start' if computation.startswith('all-reduce-scatter'):
      kind = 'reduce-scatter'  # the TPU compiler has fused an all-reduce and a slice
  parts = _SENT_PARTS[kind] * (group - 1) / group if kind in _SENT_PARTS else 1.
  return Collective(kind, 1, num_bytes, int(parts * num_bytes))


def _num_bytes(type_text: str) -> int:
  """Returns the bytes of all arrays of a type, without padding; elements of less than 8 bits count as one byte."""
  return sum(math.prod(array.shape) * max(8, array.item_bits) // 8 for array in hlo.arrays(type_text))


def group_size(text: str, num_devices: int) -> int:
  """Returns how many devices take part in a collective, from any of the three forms of `replica_groups`.

  The forms are `mesh['a'=2,'b'=4] {'a','b'}`, `[2,4]<=[8]` and `{{0,1,2,3},{4,5,6,7}}`.
  """
  if mesh := re.search(r'replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}', text):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
    axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])  # `'a':(1)2` is a part of an axis, of size 2
    return math.prod(int(part or sizes.get(axis, 1)) for axis, part in axes)
  if iota := re.search(r'replica_groups=\[(\d+),(\d+)\]', text):
    return int(iota[2])
  if listed := re.search(r'replica_groups=\{\{([\d,]+)\}', text):
    return listed[1].count(',') + 1
  return num_devices


def first_group(text: str, num_devices: int) -> list[int]:
  """Returns the devices that take part in a collective together with the first one."""
  if listed := re.search(r'replica_groups=\{\{([\d,]+)\}', text):
    return [int(device) for device in listed[1].split(',')]
  # `[2,8]<=[8,2]T(1,0)`: two groups of eight devices, the rows of a transposed array of all device numbers
  iota = re.search(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  if iota is None:
    return list(range(group_size(text, num_devices)))
  shape = [int(size) for size in iota[3].split(',')]
  axes = [int(axis) for axis in iota[4].split(',')] if iota[4] else range(len(shape))
  devices = np.arange(math.prod(shape)).reshape(shape).transpose(axes).reshape(int(iota[1]), int(iota[2]))
  return devices[0].tolist()


def operations(text: str) -> list[Operation]:
  """Returns the operations of a compiled program's text, and kernels without cycles; most cycles first.

  The cycles of a fusion include those of its instructions.
  """
  cycles: Counter[tuple[str, str]] = Counter()
  calls: Counter[tuple[str, str]] = Counter()
  for visit in hlo.parse(text).walk():
    instruction = visit.instruction
    if (instruction.cycles or is_kernel(instruction)) and not visit.is_inside('fusion'):
      phase_and_place = locate(instruction)
      cycles[phase_and_place] += visit.times * instruction.cycles
      calls[phase_and_place] += visit.times
  return [Operation(*phase_and_place, calls[phase_and_place], total) for phase_and_place, total in cycles.most_common()]


def locate(instruction: Instruction) -> tuple[str, str]:
  """Returns phase and place of an operation, as in `Operation`, from its source, or from its opcode if it has none.

  The source `jit(step)/transpose(jvp(Block))/mlp/up/dot` gives `backward` and `Block/mlp/up/dot`.
  """
  phase = 'update'
  names = []
  for part in (instruction.source or instruction.opcode).split('/'):
    while wrapper := _WRAPPER.match(part):
      function, part = wrapper.groups()
      if function == 'transpose':
        phase = 'backward'
      elif function == 'jvp' and phase == 'update':
        phase = 'forward'
    if part == 'rematted_computation':
      phase = 'recomputed'
    elif not _UNNAMED.fullmatch(part):
      names.append(part)
  return phase, '/'.join(names) or 'step'


class Overflow(NamedTuple):
  """By how much a program does not fit, GiB a device; 0 = not known. `what` names what needs the memory."""
  need_gib: float
  have_gib: float
  what: str


def overflow(message: str) -> Overflow | None:
  """Returns the content of the compiler's out-of-memory message; None for any other message."""
  if sizes := re.search(r'(?:memory required|required) for HLO temporaries \(([\d.]+[KMGT]?)\) exceeds available HBM '
                        r'\(([\d.]+[KMGT]?)\)', message):
    return Overflow(_gib(sizes[1]), _gib(sizes[2]), 'temporaries')
  if sizes := re.search(r'Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm', message):
    return Overflow(_gib(sizes[1]), _gib(sizes[2]), 'the program')
  if 'RESOURCE_EXHAUSTED' in message or 'out of memory' in message.lower():
    return Overflow(0., 0., 'the program')
  return None


def _gib(text: str) -> float:
  """Returns the GiB of a number of bytes such as `20.5G`."""
  scale = {'K': 2**-20, 'M': 2**-10, 'G': 1., 'T': 1024.}
  return float(text[:-1]) * scale[text[-1]] if text[-1] in scale else float(text) / GIB
