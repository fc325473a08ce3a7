"""What a compiled program says of itself: cycles, collectives, memory, and by how much it does not fit.

Cycles and collectives are read from the text of the compiled program, every loop's body times its trips.
The compiler's own totals count a loop's body once.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

GIB = 2**30
KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast')
_ITEM_BYTES = {'pred': 1, 'bf16': 2, 'f16': 2, 'f32': 4, 'f64': 8, 'c64': 8, 'c128': 16}
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{$')
_INSTRUCTION = re.compile(r'\s+(?:ROOT )?%?([\w.\-]+) = (.*)')
_OPCODE = re.compile(r' ([a-z][a-z0-9\-]*)\(')
_ARRAY = re.compile(r'\b(pred|bf16|[sufc]\d+|f8\w+)\[([\d,]*)\]')
_CALLED = re.compile(r'(calls|body|condition|to_apply)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_CONSTANT = re.compile(r's(?:32|64)\[\]\S* constant\((\d+)\)')
_TRIPS = re.compile(r'known_trip_count\D+(\d+)')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class Collective(NamedTuple):
  """All collectives of a kind in one step of one device.

  num_bytes: of their results, which for reduce-scatter is the whole that is scattered.
  sent_bytes: what a device sends when they run around a ring.
  """
  kind: str
  calls: int
  num_bytes: int
  sent_bytes: int


class Costs(NamedTuple):
  """Of one step on one device. `cycles` 0 = the compiler counts none; `unknown_loops` were counted once."""
  cycles: int
  unknown_loops: int
  collectives: list[Collective]


class _Instruction(NamedTuple):
  name: str
  opcode: str
  type: str
  text: str


def read(text: str, *, num_devices: int) -> Costs:
  """Cycles and collectives of a compiled program's text (`compiled.as_text()`)."""
  computations, entry = _parse(text)
  cycles, unknown = 0, 0
  found: dict[str, tuple[str, int, int, int]] = {}

  def visit(name: str, times: int, is_fused: bool) -> None:
    nonlocal cycles, unknown
    for one in computations.get(name, ()):
      counted = None if is_fused else _CYCLES.search(one.text)
      cycles += times * int(counted[1]) if counted else 0
      kind = one.opcode.removesuffix('-start')
      if kind in KINDS:
        key, entry_ = _collective(one, kind, times, name, num_devices)
        found[key] = max(found.get(key, entry_), entry_, key=lambda x: x[1])
      for called, trips in _calls(one, computations):
        unknown += trips is None
        visit(called, times * (trips or 1), is_fused or one.opcode == 'fusion')

  visit(entry, 1, False)
  return Costs(cycles, unknown, _by_kind(found))


def _by_kind(found: dict[str, tuple[str, int, int, int]]) -> list[Collective]:
  rows = []
  for kind in KINDS:
    own = [x for x in found.values() if x[0] == kind]
    if own:
      rows.append(Collective(kind, sum(x[1] for x in own), sum(x[1] * x[2] for x in own),
                             sum(x[1] * x[3] for x in own)))
  return rows


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
  """Instructions by computation, and the name of the entry."""
  computations: dict[str, list[_Instruction]] = {}
  entry, current = '', None
  for line in text.splitlines():
    if not line.startswith(' '):
      head = _COMPUTATION.match(line)
      current = computations.setdefault(head[2], []) if head else None
      entry = head[2] if head and head[1] else entry
    elif current is not None and (found := _INSTRUCTION.match(line)) and (code := _OPCODE.search(found[2])):
      current.append(_Instruction(found[1], code[1], found[2][:code.start()], found[2]))
  return computations, entry


def _calls(one: _Instruction, computations: dict[str, list[_Instruction]]) -> Iterator[tuple[str, int | None]]:
  """Computations that an instruction runs and how often; None = a loop whose trips the text does not say."""
  called = dict(_CALLED.findall(one.text))
  if one.opcode == 'while':
    yield called['body'], _trips(one, called['condition'], computations)
  elif one.opcode == 'conditional':
    for names in _BRANCHES.findall(one.text):
      yield from ((name.strip(' %'), 1) for name in names.split(','))
  elif 'calls' in called:
    yield called['calls'], 1
  elif one.opcode == 'call':
    yield called['to_apply'], 1


def _trips(loop: _Instruction, condition: str, computations: dict[str, list[_Instruction]]) -> int | None:
  """Trips of a loop: as stated, or the bound that its condition compares a counter from 0 with."""
  if stated := _TRIPS.search(loop.text):
    return int(stated[1])
  bounds = [int(n) for one in computations.get(condition, ()) for n in _CONSTANT.findall(one.text)]
  return max(bounds) if bounds else None


def _collective(one: _Instruction, kind: str, times: int, within: str,
                num_devices: int) -> tuple[str, tuple[str, int, int, int]]:
  """Key, and (kind, times, bytes, sent bytes). An asynchronous one is written several times under one channel."""
  size = _num_bytes(one.type)
  group = _group_size(one.text, num_devices)
  if one.opcode == 'all-gather-start':  # its type is (operand, result)
    size = size * group // (group + 1)
  elif one.opcode == 'collective-permute-start':
    size = _num_bytes(re.sub(r'\bu32\[\]', '', one.type)) // 2  # operand and result, without counters
  if kind == 'reduce-scatter':
    size *= group
  elif kind == 'all-reduce' and within.startswith('all-reduce-scatter'):  # what the TPU compiler fuses
    kind = 'reduce-scatter'
  share = (group - 1) / group
  sent = {'all-reduce': 2 * share, 'collective-permute': 1., 'collective-broadcast': 1.}.get(kind, share) * size
  channel = re.search(r'channel_id=(\d+)', one.text)
  return f'{kind} {channel[1] if channel else one.name}', (kind, times, size, int(sent))


def _num_bytes(type_text: str) -> int:
  total = 0
  for dtype, dims in _ARRAY.findall(type_text):
    count = 1
    for dim in dims.split(','):
      count *= int(dim) if dim else 1
    total += count * (_ITEM_BYTES.get(dtype) or max(1, int((re.search(r'\d+', dtype) or ['8'])[0]) // 8))
  return total


def _group_size(text: str, num_devices: int) -> int:
  """Devices that a collective joins, from any of the three spellings of `replica_groups`."""
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


class Overflow(NamedTuple):
  """By how much a program does not fit, GiB a device; `what` says what needs it."""
  need_gib: float
  have_gib: float
  what: str


def overflow(message: str) -> Overflow | None:
  """Reads the compiler's out-of-memory message; None if it is none."""
  if found := re.search(r'(?:memory required|required) for HLO temporaries \(([\d.]+[KMGT]?)\) exceeds available HBM '
                        r'\(([\d.]+[KMGT]?)\)', message):
    return Overflow(_gib(found[1]), _gib(found[2]), 'temporaries')
  if found := re.search(r'Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm', message):
    return Overflow(_gib(found[1]), _gib(found[2]), 'the whole program')
  if 'RESOURCE_EXHAUSTED' in message or 'out of memory' in message.lower():
    return Overflow(0., 0., 'the program')
  return None


def _gib(text: str) -> float:
  scale = {'K': 2**-20, 'M': 2**-10, 'G': 1., 'T': 1024.}
  return float(text[:-1]) * scale[text[-1]] if text[-1] in scale else float(text) / GIB
