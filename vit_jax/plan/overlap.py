"""Computes how long the collectives of a step take, and how long the core waits for them, by the program's order.

The text of a compiled program for a TPU has its instructions in the order in which the core starts them. Three forms
let a collective run beside other operations; the core waits for all others from their start to their end:

- a start and a done of its own, with the operations between them;
- continuation fusions (v5e): the fusion that starts the collective, those of the work beside it, and the one that waits
  for it. It advances only in these fusions, so that operations between them hide nothing;
- SparseCores (v6e, v5p): `custom-call-start` prepares the call, `custom-call-update` hands over the data and begins it,
  and `custom-call-done` waits for it.

`compile` calls `read`, which follows the core through the program with the time of each operation (`schedule.Clock`).
The links of the device carry one collective after another, in the order in which they begin. A permutation uses the
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
_DIRECTIONS = (0, 1)
"""The two directions around a ring."""


class Wait(NamedTuple):
  """All collectives of a kind in one step of one device, in nanoseconds.

  ns: their time on the links, as if none ran beside other work.
  exposed_ns: the part of it for which the core waits.
  """
  kind: str
  calls: int
  ns: int
  exposed_ns: int


class Links(NamedTuple):
  """The links of a device: bytes per second around one ring in both directions, and devices of the program.

  node: number of devices that these links join; 0 = all.
  out_bytes_s: bytes per second of each device to other nodes. A ring over nodes leaves a node by all of its devices.
  """
  bytes_s: float
  num_devices: int
  node: int = 0
  out_bytes_s: float = 0.

  def rate(self, text: str) -> float:
    """Returns the bytes per second of a collective, by the devices that take part in it."""
    if not self.node:
      return self.bytes_s
    group = compiled.first_group(text, self.num_devices)
    num_on_node = sum(device // self.node == group[0] // self.node for device in group)
    return self.bytes_s if num_on_node == len(group) else min(self.bytes_s, num_on_node * self.out_bytes_s)


class _Transfer(NamedTuple):
  """A collective: its time in seconds, and the directions whose links it uses."""
  kind: str
  seconds: float
  directions: tuple[int, ...] = _DIRECTIONS


class _Flight:
  """A collective that has begun.

  `end_s` is the time when the links have carried it. None = the links have not begun, or continuation fusions carry it;
  then `left_s` are the seconds that are left.
  """

  def __init__(self, transfer: _Transfer, end_s: float | None = None) -> None:
    self.transfer, self.end_s, self.left_s = transfer, end_s, transfer.seconds


def read(text: str, links: Links, seconds: Callable[[hlo.Program], Callable[[Instruction, str], float]]) -> list[Wait]:
  """Returns the collectives of a compiled program by kind, in the order in which they begin.

  Transfers between slices are not included, because they do not use these links.

  Args:
    text: of the program: `compiled.as_text()` or the compiler's dump.
    links: of a device.
    seconds: makes, for the parsed program, the function that returns the time of an instruction of a computation.
  """
  program = hlo.parse(text)
  core = _Core(program, links, seconds(program))
  core.run(program.entry, 1)
  return [Wait(kind, calls, round(1e9 * core.transfer_s[kind]), round(1e9 * core.waiting_s[kind]))
          for kind, calls in core.calls.items()]


class _Core:
  """Simulates the core of a device and its links. Times are in seconds since the step began.

  `read` calls `run` for the entry computation, and then reads `calls`, `transfer_s` and `waiting_s` by kind.
  """

  def __init__(self, program: hlo.Program, links: Links, seconds: Callable[[Instruction, str], float]) -> None:
    self._program, self._links, self._seconds = program, links, seconds
    self._now_s = 0.
    self._free_s = [0., 0.]  # when the links of each direction are free
    self.calls: Counter[str] = Counter()
    self.transfer_s: dict[str, float] = defaultdict(float)
    self.waiting_s: dict[str, float] = defaultdict(float)

  def run(self, computation: str, times: int) -> None:
    """Runs a computation once, as one of so many `times`, and waits for the collectives that are left at its end.

    `flights` has the collectives that have begun, by the name of the instruction that holds them at the time.
    """
    flights: dict[str, _Flight] = {}
    instructions = self._program.instructions(computation)
    # For each continuation fusion, the fusion whose collective it continues; '' for all other instructions.
    previous_by_name = {instruction.name: compiled.find_continued(self._program, instruction, computation)
                        for instruction in instructions}
    continued_names = set(previous_by_name.values())
    for instruction in instructions:
      previous = previous_by_name[instruction.name]
      has_next = instruction.name in continued_names
      if instruction.opcode in ('while', 'conditional', 'call'):
        self._run_called(instruction, computation, times)
      elif instruction.opcode.endswith(('-update', '-done')):
        self._advance(instruction, flights, times)
      elif previous in flights:  # the collective advances beside the work of the fusion
        flight = flights.pop(previous)
        work_s = self._seconds(instruction, computation)
        flight.left_s = max(0., flight.left_s - work_s)
        self._now_s += work_s
        if has_next:
          flights[instruction.name] = flight
        else:
          self._wait(flight, times)
      else:
        flights |= self._start(instruction, computation, has_next, times)
    for flight in flights.values():
      self._wait(flight, times)

  def _run_called(self, instruction: Instruction, computation: str, times: int) -> None:
    """Runs the body of a loop once, and lets its iterations take as often as long; or runs what is called."""
    for called, trips in self._program.calls(instruction, computation):
      num_trips = 1 if trips is None else trips
      begin_s = self._now_s
      self.run(called, times * num_trips)
      self._now_s = begin_s + (self._now_s - begin_s) * num_trips

  def _start(self, instruction: Instruction, computation: str, has_next: bool, times: int) -> dict[str, _Flight]:
    """Runs an instruction that continues no collective; returns the flight that it starts, by its name.

    `has_next` = a continuation fusion continues its collective.
    """
    flights = {}
    for transfer in self._transfers(instruction, computation):
      kind = transfer.kind
      self.calls[kind] += times
      self.transfer_s[kind] += times * transfer.seconds
      is_prepared_only = instruction.opcode == 'custom-call-start' and not instruction.operands
      if has_next or is_prepared_only:
        flights[instruction.name] = _Flight(transfer)
      elif instruction.opcode.endswith('-start'):
        flights[instruction.name] = _Flight(transfer, self._send(transfer))
      else:
        self._wait(_Flight(transfer, self._send(transfer)), times)
    self._now_s += self._seconds(instruction, computation)
    return flights

  def _advance(self, instruction: Instruction, flights: dict[str, _Flight], times: int) -> None:
    """Runs an update, which hands over the data of a collective, or a done, which waits for it."""
    flight = flights.pop(instruction.operands[0], None) if instruction.operands else None
    if flight is None:
      return
    if flight.end_s is None:
      flight.end_s = self._send(flight.transfer)
    if instruction.opcode.endswith('-update'):
      flights[instruction.name] = flight
    else:
      self._wait(flight, times)

  def _send(self, transfer: _Transfer) -> float:
    """Returns the time at which the links have carried a collective that begins now."""
    end_s = max(self._now_s, *(self._free_s[direction] for direction in transfer.directions)) + transfer.seconds
    for direction in transfer.directions:
      self._free_s[direction] = end_s
    return end_s

  def _wait(self, flight: _Flight, times: int) -> None:
    """Lets the core wait for the rest of a collective."""
    rest_s = flight.left_s if flight.end_s is None else max(0., flight.end_s - self._now_s)
    self.waiting_s[flight.transfer.kind] += times * rest_s
    self._now_s += rest_s

  def _transfers(self, instruction: Instruction, computation: str) -> Iterator[_Transfer]:
    """Yields the collectives of an instruction: itself, or those inside of its fusion or of its call."""
    collective = compiled.collective(instruction, computation, self._links.num_devices)
    if collective and collective.kind != compiled.BETWEEN_SLICES:
      yield _time_transfer(collective, instruction.text, self._links)
    elif instruction.opcode == 'fusion' or instruction.opcode.endswith('-start'):
      for called, _ in self._program.calls(instruction, computation):
        for inner in self._program.instructions(called):
          yield from self._transfers(inner, called)


def _time_transfer(collective: compiled.Collective, text: str, links: Links) -> _Transfer:
  """Returns a collective with its time around one ring, as if no other used the links; `text` is its instruction."""
  group = compiled.group_size(text, links.num_devices)
  farthest = max(1, round(math.sqrt(links.num_devices)))  # hops on a square torus
  hops = min(group // 2, farthest)
  sent_bytes: float = collective.sent_bytes
  bytes_s = links.rate(text)
  match collective.kind:
    case 'collective-permute' | 'collective-broadcast':
      shift = _find_shift(text)
      hops = min(abs(shift), farthest)
      # Only half of the links carry it, and each hop sends all bytes again.
      seconds = max(hops * HOP_S, 2 * hops * sent_bytes / bytes_s)
      return _Transfer(collective.kind, seconds, directions=(1 if shift < 0 else 0,))
    case 'all-to-all':  # a part for each other device, which is a quarter of the ring away on average
      sent_bytes = round(collective.num_bytes * group / 4)
    case 'all-reduce':
      hops *= 2
  return _Transfer(collective.kind, max(hops * HOP_S, sent_bytes / bytes_s))


def _find_shift(text: str) -> int:
  """Returns by how many places a permutation shifts along a ring; negative = the other way.

  The pairs `{{0,1},{1,2},{2,3},{3,0}}` shift by 1: the distance of a pair is 1, or -3 around the end of the ring.
  """
  pairs = re.search(r'source_target_pairs=\{\{([\d,{} ]*)\}\}', text)
  if pairs is None:
    return 1
  distances = [int(target) - int(source) for source, target in re.findall(r'(\d+),(\d+)', pairs[1])]
  return min((distance for distance in distances if distance), key=abs, default=1)
