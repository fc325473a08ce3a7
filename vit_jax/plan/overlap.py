"""How long the collectives of a step take, and how long the core waits for them, by the schedule of the program.

The text of a compiled program for a TPU has its instructions in the order in which the core starts them. Three forms
let a collective run beside other operations; the core waits for all others from their start to their end:

- a start and a done of its own, with the operations between them;
- continuation fusions (v5e): the fusion that starts the collective, those of the work beside it, and the one that waits
  for it. It advances only in these fusions, so that operations between them hide nothing;
- SparseCores (v6e, v5p): `custom-call-start` prepares the call, `custom-call-update` hands over the data and begins it,
  and `custom-call-done` waits for it.

The core is followed through the program with the time of each operation (`schedule.Clock`), and the links of the device
with the time of each collective: they carry one after another, in the order in which they begin. A permutation uses the
links of one direction. The time of a collective is that of its bytes around one ring of neighbors, but at least
`HOP_S` for each hop; there are at most as many hops as between the farthest devices of a square torus.
"""
from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vit_jax.plan import compiled, hlo
from vit_jax.plan.hlo import Instruction

HOP_S = 1e-6
"""Least time of a hop between neighbors (How to Scale Your Model, Sharded Matrices: about 1 us); not measured here."""
_BOTH = (0, 1)
"""The two directions around a ring."""


class Wait(NamedTuple):
  """All collectives of a kind in one step of one device.

  ns: their time on the links, as if none ran beside other work.
  exposed_ns: of it, what the core waits.
  """
  kind: str
  calls: int
  ns: int
  exposed_ns: int


class Links(NamedTuple):
  """The links of a device: bytes per second around one ring in both directions, and devices of the program.

  node: devices of a node, whose links these are; 0 = all are joined by them.
  out_bytes_s: what each device of a node sends to others. A ring over nodes leaves each by all of its own devices.
  """
  bytes_s: float
  num_devices: int
  node: int = 0
  out_bytes_s: float = 0.

  def rate(self, text: str) -> float:
    """Returns the bytes per second of a collective, by the devices that take part in it."""
    group = compiled.first_group(text, self.num_devices) if self.node else []
    own = sum(one // self.node == group[0] // self.node for one in group)
    return self.bytes_s if own == len(group) else min(self.bytes_s, own * self.out_bytes_s)


class _Transfer(NamedTuple):
  """A collective: its time in seconds, and the directions whose links it uses."""
  kind: str
  seconds: float
  directions: tuple[int, ...] = _BOTH


class _Flight:
  """A collective that has begun: when its links are done with it, or how much of it continuation fusions have left."""

  def __init__(self, transfer: _Transfer, end: float | None = None) -> None:
    self.transfer, self.end, self.left = transfer, end, transfer.seconds


def read(text: str, links: Links, seconds: Callable[[hlo.Program], Callable[[Instruction, str], float]]) -> list[Wait]:
  """Returns the collectives of a compiled program by kind, in the order in which they begin.

  Transfers between slices, whose links these are not, are not among them.

  Args:
    text: of the program: `compiled.as_text()` or the compiler's dump.
    links: of a device.
    seconds: makes, for the parsed program, the function that returns the time of an instruction of a computation.
  """
  program = hlo.parse(text)
  core = _Core(program, links, seconds(program))
  core.run(program.entry, 1)
  return [Wait(kind, core.calls[kind], round(1e9 * core.needed[kind]), round(1e9 * core.waited[kind]))
          for kind in core.calls]


class _Core:
  """The core of a device and its links, while it runs a program; times in seconds since its begin."""

  def __init__(self, program: hlo.Program, links: Links, seconds: Callable[[Instruction, str], float]) -> None:
    self._program, self._links, self._seconds = program, links, seconds
    self._now, self._free = 0., [0., 0.]
    self.calls: Counter[str] = Counter()
    self.needed: dict[str, float] = defaultdict(float)
    self.waited: dict[str, float] = defaultdict(float)

  def run(self, name: str, times: int) -> None:
    """Runs a computation, which the step runs so many `times`; what is still on its way at its end is waited for."""
    flights: dict[str, _Flight] = {}
    before = self._predecessors(name)
    for one in self._program.computations.get(name, ()):
      if one.opcode in ('while', 'conditional', 'call'):
        for called, trips in self._program.calls(one, name):
          begin, trips = self._now, 1 if trips is None else trips
          self.run(called, times * trips)
          self._now = begin + (self._now - begin) * trips
      elif one.opcode.endswith(('-update', '-done')):
        self._go_on(one, flights, times)
      elif one.name in before and before[one.name] in flights:
        self._continue(one, name, flights[before[one.name]], one.name in before.values(), times)
        flights[one.name] = flights.pop(before[one.name])
        if one.name not in before.values():
          del flights[one.name]
      else:
        self._start(one, name, flights, one.name in before.values(), times)
    for flight in flights.values():
      self._wait(flight, times)

  def _predecessors(self, name: str) -> dict[str, str]:
    """Returns, by the name of each continuation fusion of a computation, the fusion that it goes on from."""
    found = {}
    for one in self._program.computations.get(name, ()):
      if one.opcode == 'fusion' and (first := compiled.continued(self._program, one, name)):
        found[one.name] = first
    return found

  def _start(self, one: Instruction, within: str, flights: dict[str, _Flight], has_more: bool, times: int) -> None:
    """Runs an instruction that goes on with nothing: its collectives, if it has any, and its own work."""
    is_apart = one.opcode.endswith('-start') or has_more
    for transfer in self._transfers(one, within):
      self.calls[transfer.kind] += times
      self.needed[transfer.kind] += times * transfer.seconds
      if has_more or one.opcode == 'custom-call-start' and not one.operands:
        flights[one.name] = _Flight(transfer)
      elif is_apart:
        flights[one.name] = _Flight(transfer, self._send(transfer))
      else:
        self._wait(_Flight(transfer, self._send(transfer)), times)
    self._now += self._seconds(one, within)

  def _continue(self, one: Instruction, within: str, flight: _Flight, has_more: bool, times: int) -> None:
    """Runs a continuation fusion: it waits for what its own work does not hide, if it is the last one."""
    own = self._seconds(one, within)
    flight.left = max(0., flight.left - own)
    self._now += own
    if not has_more:
      self._wait(flight, times)

  def _go_on(self, one: Instruction, flights: dict[str, _Flight], times: int) -> None:
    """Hands over the data of a collective, or waits for it."""
    flight = flights.pop(one.operands[0], None) if one.operands else None
    if flight is None:
      return
    if flight.end is None:
      flight.end = self._send(flight.transfer)
    if one.opcode.endswith('-update'):
      flights[one.name] = flight
    else:
      self._wait(flight, times)

  def _send(self, transfer: _Transfer) -> float:
    """Returns when the links are done with a collective that begins now."""
    end = max(self._now, *(self._free[i] for i in transfer.directions)) + transfer.seconds
    for i in transfer.directions:
      self._free[i] = end
    return end

  def _wait(self, flight: _Flight, times: int) -> None:
    left = flight.left if flight.end is None else max(0., flight.end - self._now)
    self.waited[flight.transfer.kind] += times * left
    self._now += left

  def _transfers(self, one: Instruction, within: str) -> Iterator[_Transfer]:
    """Returns the collectives of an instruction: itself, or those inside of its fusion or of its call."""
    kind = one.opcode.removesuffix('-start')
    if kind in compiled.KINDS:
      yield _transfer(one, kind, within, self._links)
    elif one.opcode == 'fusion' or one.opcode.endswith('-start'):
      for called, _ in self._program.calls(one, within):
        for inner in self._program.computations.get(called, ()):
          yield from self._transfers(inner, called)


def _transfer(one: Instruction, kind: str, within: str, links: Links) -> _Transfer:
  """Returns the time of a collective around one ring, as long as it takes alone."""
  kind, _, size, sent = compiled.collective(one, kind, 1, within, links.num_devices)
  group, farthest = compiled.group_size(one.text, links.num_devices), max(1, round(math.sqrt(links.num_devices)))
  hops, bytes_s = min(group // 2, farthest), links.rate(one.text)
  match kind:
    case 'collective-permute' | 'collective-broadcast':
      distance = _shift(one.text)
      hops = min(abs(distance), farthest)
      return _Transfer(kind, max(hops * HOP_S, 2 * hops * sent / bytes_s), (int(distance < 0),))
    case 'all-to-all':  # a part for each other device, which is a quarter of the ring away on average
      sent = round(size * group / 4)
    case 'all-reduce':
      hops *= 2
  return _Transfer(kind, max(hops * HOP_S, sent / bytes_s))


def _shift(text: str) -> int:
  """Returns by how many places a permutation shifts along a ring; negative = the other way.

  Pairs of a shift have one of two distances: one way, or, around the end of the ring, the other way.
  """
  pairs = re.search(r'source_target_pairs=\{\{([\d,{} ]*)\}\}', text)
  found = [int(b) - int(a) for a, b in re.findall(r'(\d+),(\d+)', pairs[1])] if pairs else []
  return min((distance for distance in found if distance), key=abs, default=1)
