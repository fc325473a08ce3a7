"""The text of a compiled program, as instructions; and how often its loops run.

The TPU compiler leaves the trips of a loop out of its text, so they are worked out from the loop's counter.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{$')
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = (.*)')
_OPCODE = re.compile(r' ([a-z][a-z0-9\-]*)\(')
_CALLED = re.compile(r'(calls|body|condition|to_apply)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_OPERAND = re.compile(r'%([\w.\-]+)')
_CONSTANT = re.compile(r'[su]\d+\[\]\S* constant\((-?\d+)\)')
_TRIPS = re.compile(r'known_trip_count\D+(\d+)')
_SOURCE = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class Instruction(NamedTuple):
  """One line: `type` is that of the result, `text` all after the equals sign."""
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
    """What the compiler estimates, for a fusion with all that it holds; 0 if the text does not say."""
    found = _CYCLES.search(self.text)
    return int(found[1]) if found else 0

  @property
  def source(self) -> str:
    """Where in the traced function it comes from; '' if the text does not say."""
    found = _SOURCE.search(self.text)
    return found[1] if found else ''


class Program(NamedTuple):
  """Instructions by computation, and the name of the one that is run."""
  computations: dict[str, list[Instruction]]
  entry: str

  def calls(self, one: Instruction, within: str) -> Iterator[tuple[str, int | None]]:
    """Computations that an instruction of `within` runs, and how often; None = the text does not say."""
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

  def trips(self, loop: Instruction, within: str) -> int | None:
    """How often a loop runs: as stated, or by its counter; None if it ends by something else than a counter.

    A counter is an integer of the loop's state that the condition compares with a constant and the body adds a
    constant to: 1 of a scan, 2 where the compiler has unrolled a loop of its own once. One whose start is not in
    the text starts at 0.
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

  def _step(self, body: str, index: int) -> int | None:
    """What a loop's body adds to an element of its state."""
    root = self._root(body)
    added = self._element(body, root.name, index) if root else None
    if added is None or added.opcode != 'add':
      return None
    known = [value for name in added.operands if (value := _value(self._find(body, name))) is not None]
    return known[0] if len(known) == 1 else None

  def _element(self, within: str, name: str, index: int) -> Instruction | None:
    """What an element of a tuple is made by."""
    made = self._find(within, name)
    if made is None or made.opcode != 'tuple' or index >= len(made.operands):
      return None
    return self._find(within, made.operands[index])

  def _find(self, within: str, name: str) -> Instruction | None:
    """The instruction of a name, seen through copies."""
    one = next((x for x in self.computations.get(within, ()) if x.name == name), None)
    return self._find(within, one.operands[0]) if one and one.opcode in ('copy', 'bitcast') else one

  def _root(self, name: str) -> Instruction | None:
    return next((x for x in self.computations.get(name, ()) if x.is_root), None)


def _value(one: Instruction | None) -> int | None:
  found = _CONSTANT.match(one.text) if one else None
  return int(found[1]) if found else None


def parse(text: str) -> Program:
  """Reads what `compiled.as_text()` gives."""
  computations: dict[str, list[Instruction]] = {}
  entry, current = '', None
  for line in text.splitlines():
    if current and line != '}' and not line.startswith(' '):  # of a kernel, whose metadata has lines of its own
      current[-1] = current[-1]._replace(text=current[-1].text + line)
    elif not line.startswith(' '):
      head = _COMPUTATION.match(line)
      current = computations.setdefault(head[2], []) if head else None
      entry = head[2] if head and head[1] else entry
    elif current is not None and (found := _INSTRUCTION.match(line)) and (code := _OPCODE.search(found[3])):
      current.append(Instruction(found[2], code[1], found[3][:code.start()], found[3], bool(found[1])))
  return Program(computations, entry)
