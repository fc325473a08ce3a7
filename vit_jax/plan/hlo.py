"""The instructions in the text of a compiled program, and how often its loops run.

The TPU compiler does not write the trip count of a loop, so it is derived from the loop's counter.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{$')
_END = re.compile(r'\}(, execution_thread="\w+")?$')
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = (.*)')
_OPCODE = re.compile(r' ([a-z][a-z0-9\-]*)\(')
_CALLED = re.compile(r'(calls|body|condition|to_apply)=%?([\w.\-]+)')
_OFFLOADED = re.compile(r'called_computations=\{%?([\w.\-]+)\}')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_OPERAND = re.compile(r'%([\w.\-]+)')
_CONSTANT = re.compile(r'[su]\d+\[\]\S* constant\((-?\d+)\)')
_TRIPS = re.compile(r'known_trip_count\D+(\d+)')
_SOURCE = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class Instruction(NamedTuple):
  """One line: `type` is the type of the result, `text` everything after the equals sign."""
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
  def cycles(self) -> int:
    """The compiler's estimate, for a fusion including its instructions; 0 if the text has none."""
    found = _CYCLES.search(self.text)
    return int(found[1]) if found else 0

  @property
  def source(self) -> str:
    """Where in the traced function it comes from; '' if the text has no source."""
    found = _SOURCE.search(self.text)
    return found[1] if found else ''


class Program(NamedTuple):
  """Instructions by computation, and the name of the entry computation."""
  computations: dict[str, list[Instruction]]
  entry: str

  def calls(self, one: Instruction, within: str) -> Iterator[tuple[str, int | None]]:
    """Returns the computations that an instruction of `within` runs, and how often; None = unknown."""
    called = dict(_CALLED.findall(one.text))
    if one.opcode == 'while':
      yield called['body'], self.trips(one, within)
    elif one.opcode == 'conditional':
      for names in _BRANCHES.findall(one.text):
        yield from ((name.strip(' %'), 1) for name in names.split(','))
    elif 'calls' in called:
      yield called['calls'], 1
    elif one.opcode == 'call':
      yield called['to_apply'], 1
    elif one.opcode == 'custom-call-start':  # what the SparseCores run
      yield from ((name, 1) for name in _OFFLOADED.findall(one.text))

  def trips(self, loop: Instruction, within: str) -> int | None:
    """Returns the trip count of a loop: as stated, or from its counter; None if the loop has no counter.

    A counter is an integer of the loop's state that the condition compares with a constant and the body adds a
    constant to: 1 of a scan, 2 where the compiler has unrolled one of its own loops once. It starts at 0 if
    the text has no other start.
    """
    if stated := _TRIPS.search(loop.text):
      return int(stated[1])
    called = dict(_CALLED.findall(loop.text))
    test = self._root(called['condition'])
    if test is None or test.opcode != 'compare' or 'direction=LT' not in test.text:
      return None
    place, bound = (self._find(called['condition'], name) for name in test.operands)
    index = re.search(r'get-tuple-element\(.*\), index=(\d+)', place.text) if place else None
    last = _value(bound)
    step = self._step(called['body'], int(index[1])) if index else None
    if index is None or last is None or not step:
      return None
    first = _value(self._element(within, loop.operands[0], int(index[1]))) or 0
    return max(0, -(-(last - first) // step))

  def maker(self, within: str, name: str) -> Instruction | None:
    """Returns the instruction that makes an array, behind copies and elements of tuples that it returns."""
    one = self._find(within, name)
    return self.maker(within, one.operands[0]) if one and one.opcode == 'get-tuple-element' else one

  def _step(self, body: str, index: int) -> int | None:
    """Returns the constant that the body of a loop adds to an element of its state; None if there is none."""
    root = self._root(body)
    added = self._element(body, root.name, index) if root else None
    if added is None or added.opcode != 'add':
      return None
    known = [value for name in added.operands if (value := _value(self._find(body, name))) is not None]
    return known[0] if len(known) == 1 else None

  def _element(self, within: str, name: str, index: int) -> Instruction | None:
    """Returns the instruction that makes an element of a tuple."""
    made = self._find(within, name)
    if made is None or made.opcode != 'tuple' or index >= len(made.operands):
      return None
    return self._find(within, made.operands[index])

  def _find(self, within: str, name: str) -> Instruction | None:
    """Returns the instruction of this name; copies are followed to their source."""
    one = next((x for x in self.computations.get(within, ()) if x.name == name), None)
    return self._find(within, one.operands[0]) if one and one.opcode in ('copy', 'bitcast') else one

  def _root(self, name: str) -> Instruction | None:
    return next((x for x in self.computations.get(name, ()) if x.is_root), None)


def _value(one: Instruction | None) -> int | None:
  found = _CONSTANT.match(one.text) if one else None
  return int(found[1]) if found else None


def parse(text: str) -> Program:
  """Parses the text that `compiled.as_text()` returns, or that of the compiler's dump."""
  computations: dict[str, list[Instruction]] = {}
  entry, current = '', None
  for line in text.splitlines():
    if current and not _END.match(line) and not line.startswith(' '):  # continued metadata of a kernel
      current[-1] = current[-1]._replace(text=current[-1].text + line)
    elif not line.startswith(' '):
      head = _COMPUTATION.match(line)
      current = computations.setdefault(head[2], []) if head else None
      entry = head[2] if head and head[1] else entry
    elif current is not None and (found := _INSTRUCTION.match(line)) and (code := _OPCODE.search(found[3])):
      current.append(Instruction(found[2], code[1], found[3][:code.start()], found[3], bool(found[1])))
  return Program(computations, entry)
