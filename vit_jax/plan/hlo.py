"""Parses the text of a compiled program (HLO), and follows which instructions run and how often.

The times and the collectives of a plan are read from this text, but not its memory and its FLOPs. The modules
`compiled`, `schedule`, `overlap` and `gpu_kernels` begin with `parse`. A program consists of computations, and a
computation of instructions:

    %body (state: (s32[], bf16[64,128])) -> (s32[], bf16[64,128]) {
      %x = bf16[64,128]{1,0:T(8,128)} get-tuple-element(%state), index=1
      ROOT %next = (s32[], bf16[64,128]{1,0}) tuple(%i, %x), metadata={op_name="jit(step)/while/body/add"}
    }

Its first instruction has the name `x`, the opcode `get-tuple-element` and the type `bf16[64,128]{1,0:T(8,128)}`. The
computation that begins with `ENTRY` calls the others. The TPU compiler does not write the trip count of a loop (the
number of its iterations), so the count is derived from the loop's counter.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{$')  # '%body (state: f32[]) -> f32[] {'
_END = re.compile(r'\}(, execution_thread="\w+")?$')
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = (.*)')  # '  ROOT %sum = f32[] add(%a, %b)'
_OPCODE = re.compile(r' ([a-z][a-z0-9\-]*)\(')
_CALLED = re.compile(r'(calls|body|condition|to_apply)=%?([\w.\-]+)')
_OFFLOADED = re.compile(r'called_computations=\{%?([\w.\-]+)\}')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')  # 'branch_computations={%first, %second}'
_TWO_BRANCHES = re.compile(r'(?:true|false)_computation=%?([\w.\-]+)')  # the older form, 'true_computation=%first'
_OPERAND = re.compile(r'%([\w.\-]+)')
_CONSTANT = re.compile(r'[su]\d+\[\]\S* constant\((-?\d+)\)')  # 's32[]{:T(128)} constant(12)'
_INDEX = re.compile(r'get-tuple-element\(.*\), index=(\d+)')
_TRIPS = re.compile(r'known_trip_count\D+(\d+)')  # 'backend_config={"known_trip_count":{"n":"12"}}'
_SOURCE = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ARRAY = re.compile(r'\b(pred|bf16|[sufc]\d+|f8\w+)\[([\d,]*)\](?:\{([^}]*)\})?')  # 'bf16[64,128]{1,0:T(8,128)}'


class ArrayType(NamedTuple):
  """The type of an array: `bf16[64,128]{1,0:T(8,128)}` has the layout `1,0:T(8,128)`; '' = the text has no layout."""
  dtype: str
  shape: tuple[int, ...]
  layout: str

  @property
  def item_bits(self) -> int:
    """Bits of one element, without padding."""
    bits = re.search(r'\d+', self.dtype)
    return int(bits[0]) if bits else 8  # 'pred'


def arrays(type_text: str) -> list[ArrayType]:
  """Returns the arrays of a type, which is one array or a tuple such as `(s32[], bf16[64,128]{1,0})`."""
  return [ArrayType(dtype, tuple(int(size) for size in sizes.split(',') if size), layout)
          for dtype, sizes, layout in _ARRAY.findall(type_text)]


class Instruction(NamedTuple):
  """One line of a computation. `type` is the type of the result, and `text` is everything after the equals sign."""
  name: str
  opcode: str
  type: str
  text: str
  is_root: bool

  @property
  def operands(self) -> list[str]:
    """Names of the operands, in order."""
    begin = len(self.type) + len(self.opcode) + 2
    return _OPERAND.findall(self.text[begin:self.text.index(')', begin)])

  @property
  def called(self) -> dict[str, str]:
    """Names of computations by role: `calls` of a fusion, `body` and `condition` of a loop, `to_apply` of a call."""
    return dict(_CALLED.findall(self.text))

  @property
  def branches(self) -> list[str]:
    """Names of the computations of which a conditional runs one."""
    listed = [name.strip(' %') for names in _BRANCHES.findall(self.text) for name in names.split(',')]
    return listed or _TWO_BRANCHES.findall(self.text)

  @property
  def cycles(self) -> int:
    """The compiler's estimate, for a fusion including its instructions; 0 if the text has none."""
    cycles = _CYCLES.search(self.text)
    return int(cycles[1]) if cycles else 0

  @property
  def source(self) -> str:
    """The place in the traced function, such as `jit(step)/jvp(Block)/mlp/dot_general`; '' if the text has none."""
    source = _SOURCE.search(self.text)
    return source[1] if source else ''


class Visit(NamedTuple):
  """An instruction that a program runs.

  times: how often it runs; loops with an unknown trip count are counted as one iteration.
  has_known_times: whether the trip counts of all loops around it are known.
  caller: the loop, fusion or call that runs its computation; None in the entry computation.
  """
  instruction: Instruction
  computation: str
  times: int
  has_known_times: bool
  caller: Visit | None

  def callers(self) -> Iterator[Visit]:
    """Yields the loops, fusions and calls around the instruction, the innermost first."""
    if self.caller:
      yield self.caller
      yield from self.caller.callers()

  def is_inside(self, *opcodes: str) -> bool:
    """Returns whether the instruction is called by one of these opcodes, such as `fusion`, directly or not."""
    return any(caller.instruction.opcode in opcodes for caller in self.callers())


class Program(NamedTuple):
  """The instructions by their name, by the name of their computation; and the name of the entry computation."""
  computations: dict[str, dict[str, Instruction]]
  entry: str

  def instructions(self, computation: str) -> list[Instruction]:
    """Returns the instructions of a computation in order; [] if the program has no such computation."""
    return list(self.computations.get(computation, {}).values())

  def walk(self) -> Iterator[Visit]:
    """Yields all instructions that the program runs, in order, those inside fusions and loops included.

    All branches of a conditional are yielded, as if each ran: sums over them are upper bounds.
    """
    return self._walk(self.entry, None, 1, True)

  def _walk(self, computation: str, caller: Visit | None, times: int, has_known_times: bool) -> Iterator[Visit]:
    """Yields the instructions of a computation that runs so many `times`, each followed by those that it calls."""
    for instruction in self.instructions(computation):
      visit = Visit(instruction, computation, times, has_known_times, caller)
      yield visit
      for called, trips in self.calls(instruction, computation):
        if trips is None:
          yield from self._walk(called, visit, times, False)
        else:
          yield from self._walk(called, visit, times * trips, has_known_times)

  def calls(self, instruction: Instruction, computation: str) -> Iterator[tuple[str, int | None]]:
    """Yields the computations that an instruction of `computation` runs, and how often; None = unknown."""
    called = instruction.called
    if instruction.opcode == 'while':
      yield called['body'], self.trips(instruction, computation)
    elif instruction.opcode == 'conditional':
      yield from ((name, 1) for name in instruction.branches)
    elif 'calls' in called:
      yield called['calls'], 1
    elif instruction.opcode == 'call':
      yield called['to_apply'], 1
    elif instruction.opcode == 'custom-call-start':  # these computations run on the SparseCores
      yield from ((name, 1) for name in _OFFLOADED.findall(instruction.text))

  def trips(self, loop: Instruction, computation: str) -> int | None:
    """Returns the trip count of a loop: as stated, or from its counter; None if the loop has no counter.

    A counter is an integer in the state of the loop. The condition compares it with a constant, and the body adds a
    constant to it: 1 in a scan, 2 where the compiler has unrolled one of its own loops once. The counter starts at 0
    if the text has no other start.
    """
    if stated := _TRIPS.search(loop.text):
      return int(stated[1])
    condition, body = loop.called['condition'], loop.called['body']
    test = self._root(condition)
    if test is None or test.opcode != 'compare' or 'direction=LT' not in test.text:
      return None
    counter, bound = (self._find(condition, name) for name in test.operands)
    index_match = _INDEX.search(counter.text) if counter else None
    end = _constant(bound)
    if index_match is None or end is None:
      return None
    index = int(index_match[1])  # of the counter in the state
    step = self._step(body, index)
    if not step:
      return None
    start = _constant(self._element(computation, loop.operands[0], index)) or 0
    return max(0, -(-(end - start) // step))

  def producer(self, computation: str, name: str) -> Instruction | None:
    """Returns the instruction that computes an array: copies, and elements of tuples, are followed to their source."""
    instruction = self._find(computation, name)
    if instruction and instruction.opcode == 'get-tuple-element':
      return self.producer(computation, instruction.operands[0])
    return instruction

  def _step(self, body: str, index: int) -> int | None:
    """Returns the constant that the body of a loop adds to an element of its state; None if there is none."""
    root = self._root(body)
    addition = self._element(body, root.name, index) if root else None
    if addition is None or addition.opcode != 'add':
      return None
    operands = [_constant(self._find(body, name)) for name in addition.operands]
    constants = [value for value in operands if value is not None]
    return constants[0] if len(constants) == 1 else None

  def _element(self, computation: str, name: str, index: int) -> Instruction | None:
    """Returns the instruction that computes an element of the tuple with this name; None if it is not in the text."""
    instruction = self._find(computation, name)
    if instruction is None or instruction.opcode != 'tuple' or index >= len(instruction.operands):
      return None
    return self._find(computation, instruction.operands[index])

  def _find(self, computation: str, name: str) -> Instruction | None:
    """Returns the instruction with this name; copies are followed to their source."""
    instruction = self.computations.get(computation, {}).get(name)
    if instruction and instruction.opcode in ('copy', 'bitcast'):
      return self._find(computation, instruction.operands[0])
    return instruction

  def _root(self, computation: str) -> Instruction | None:
    """Returns the instruction whose result is the result of a computation."""
    return next((instruction for instruction in self.instructions(computation) if instruction.is_root), None)


def _constant(instruction: Instruction | None) -> int | None:
  """Returns the value of an integer constant; None for another instruction."""
  value = _CONSTANT.match(instruction.text) if instruction else None
  return int(value[1]) if value else None


def parse(text: str) -> Program:
  """Parses the text that `compiled.as_text()` returns, or the text in the compiler's dump."""
  computations: dict[str, dict[str, Instruction]] = {}
  entry = ''
  current: dict[str, Instruction] | None = None  # the computation of the line
  name = ''  # of the instruction before the line
  for line in text.splitlines():
    if current and not _END.match(line) and not line.startswith(' '):  # more metadata of the instruction before
      current[name] = current[name]._replace(text=current[name].text + line)
    elif not line.startswith(' '):
      head = _COMPUTATION.match(line)
      current = computations.setdefault(head[2], {}) if head else None
      if head and head[1]:
        entry = head[2]
    elif current is not None:
      parts = _INSTRUCTION.match(line)
      opcode = _OPCODE.search(parts[3]) if parts else None
      if parts and opcode:
        name, content = parts[2], parts[3]
        current[name] = Instruction(name, opcode[1], content[:opcode.start()], content, is_root=bool(parts[1]))
  return Program(computations, entry)
