"""The time of each kernel of a program for GPUs, which XLA does not estimate: products by rate, the rest by memory.

The text of a compiled program has one instruction for each kernel, in the order in which they run. Its time is
`LAUNCH_S` and the larger of two: its floating-point operations at the rate of its kind, and the bytes that it reads and
writes at `REACHED` of the bandwidth of the memory. What the caches hold between kernels is not counted.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from vit_jax.plan import compiled, hlo, schedule
from vit_jax.plan.hlo import Instruction

REACHED = .9
"""Part of the bandwidth of the memory that a kernel is assumed to reach."""
LAUNCH_S = 5.5e-6
"""What each kernel takes beside its work, chosen by the three steps of `OFF`."""
PRODUCTS = {'bf16': 620e12, 'f16': 620e12, 'f32': 310e12, 'f64': 50e12, 'f8': 1050e12, 's8': 1050e12}
"""FLOP/s of products by the type of their operands on an H100 or H200.

Assumed: of bf16 63 % of the peak, where a product of 8,192 x 8,192 matrices reached 72 % on an H200; of float32, which
XLA multiplies as TF32, half; of 8 bits 1.7 times as many."""
ATTENTION = (450e12, 350e12)
"""FLOP/s of cuDNN's attention, forward and backward; assumed."""
BACKWARD_PRODUCTS = 2.5
"""Products of the backward pass of attention, relative to the two of the forward pass."""
OFF = {'L/16 (128 images, scanned)': -.03, 'B/16 (128)': .00, 'S/16 (256)': .10}
"""How much longer a step took on an H200 (jax 0.11.2) than the estimate (jax 0.10.2), of the programs before rows were
joined: 138.0, 40.9 and 32.1 ms beside 142.0, 40.7 and 29.1."""
HZ = 1e9
"""The estimates are written into the text as cycles, of one nanosecond."""

_SLICES = ('dynamic-slice', 'slice', 'gather')
_FREE = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'partition-id', 'replica-id',
         'while', 'call', 'conditional', 'opt-barrier', 'iota', *compiled.KINDS)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SHAPE = re.compile(r'\b(pred|bf16|[sufc]\d+|f8\w+)\[([\d,]*)\]')
_CONTRACTED = re.compile(r'lhs_contracting_dims=\{([\d,]*)\}|"lhs_contracting_dimensions":\[([\d",]*)\]')
_CALLED = re.compile(r'calls=%?([\w.\-]+)')


class Kernel(NamedTuple):
  """One kernel: `kind` for tables, bytes of memory, floating-point operations, and time."""
  kind: str
  num_bytes: int
  flops: float
  seconds: float


class Kind(NamedTuple):
  """All kernels of a kind in one step of one device."""
  name: str
  calls: int
  num_bytes: int
  flops: int
  ns: int


class Clock:
  """The kernels of a program, on a card with this bandwidth of its memory in bytes per second."""

  def __init__(self, program: hlo.Program, hbm_bytes_s: float) -> None:
    self._program, self._bytes_s = program, hbm_bytes_s
    self._known = {name: {one.name: one for one in rows} for name, rows in program.computations.items()}
    self._traffic = schedule.Traffic(program, slices=_SLICES)

  def kernel(self, one: Instruction, within: str) -> Kernel | None:
    """Returns the kernel of an instruction of a computation; None if it starts none."""
    if one.opcode in _FREE or one.opcode.endswith(('-start', '-done', '-update')):
      return None
    num_bytes = self._traffic.num_bytes(one, within)
    target = found[1] if (found := _TARGET.search(one.text)) else ''
    phase, _ = compiled.place(one.source or one.opcode)
    if 'fmha' in target:
      flops, rate = self._attention(one, target)
      kind = 'attention'
    else:
      flops, dtype = self._products(one, within)
      rate, kind = PRODUCTS.get(dtype, PRODUCTS['bf16']), 'products' if flops else _kind(one)
    seconds = LAUNCH_S + max(num_bytes / (REACHED * self._bytes_s), flops / rate)
    return Kernel(f'{kind}, {phase}', num_bytes, flops, seconds)

  def _attention(self, one: Instruction, target: str) -> tuple[float, float]:
    """Returns FLOPs and rate of a call of cuDNN, whose first result is `[B, A, N, K]`."""
    is_backward = 'Backward' in target
    batch, heads, tokens, width = _dims(one.type)
    flops = 4 * batch * heads * tokens**2 * width * (BACKWARD_PRODUCTS if is_backward else 1)
    return flops, ATTENTION[is_backward]

  def _products(self, one: Instruction, within: str) -> tuple[float, str]:
    """Returns the FLOPs of all products of an instruction, and the type of the operands of the last one."""
    target = _TARGET.search(one.text)
    if one.opcode == 'dot' or target and target[1].startswith('__cublas'):
      first = self._known[within].get(one.operands[0])
      contracted = _CONTRACTED.search(one.text)
      if first is None or contracted is None:
        return 0., ''
      axes = [int(axis) for axis in re.findall(r'\d+', contracted[1] or contracted[2] or '')]
      shape = _dims(first.type)
      dtype = _SHAPE.search(first.type)
      name = '' if dtype is None else 'f8' if dtype[1].startswith('f8') else dtype[1]
      return 2. * math.prod(_dims(one.type)) * math.prod(shape[axis] for axis in axes), name
    total, dtype_name = 0., ''
    if one.opcode == 'fusion' and (called := _CALLED.search(one.text)):
      for inner in self._program.computations.get(called[1], ()):
        flops, name = self._products(inner, called[1])
        total, dtype_name = total + flops, name or dtype_name
    return total, dtype_name


def _kind(one: Instruction) -> str:
  """Returns what a kernel without products does, for tables."""
  name = one.name.lower()
  if 'transpos' in name:
    return 'transposing'
  if one.opcode == 'copy' or name.startswith(('copy', 'loop_slice', 'loop_dynamic', 'loop_pad', 'input_concat',
                                               'loop_concat', 'loop_broadcast')) or 'dynamic_update_slice' in name:
    return 'copies, pads and slices'
  return 'elementwise and sums'


def _dims(type_text: str) -> list[int]:
  found = _SHAPE.search(type_text)
  return [int(dim) for dim in found[2].split(',') if dim] if found else []


def run(program: hlo.Program, name: str = '', times: int = 1) -> Iterator[tuple[Instruction, str, int]]:
  """Yields the instructions that a program runs, each with its computation and how often."""
  for one in program.computations.get(name or program.entry, ()):
    yield one, name or program.entry, times
    if one.opcode != 'fusion':
      for called, trips in program.calls(one, name or program.entry):
        yield from run(program, called, times * (1 if trips is None else trips))


def annotate(text: str, hbm_bytes_s: float) -> tuple[str, list[Kind]]:
  """Returns the text of a program with the time of each kernel where a TPU's has cycles, and the kernels by kind."""
  program = hlo.parse(text)
  clock, found = Clock(program, hbm_bytes_s), dict[str, int]()
  sums: dict[str, list[float]] = {}
  for one, within, times in run(program):
    if (kernel := clock.kernel(one, within)) is None:
      continue
    found[one.name] = round(HZ * kernel.seconds)
    row = sums.setdefault(kernel.kind, [0., 0., 0., 0.])
    for i, value in enumerate((1, kernel.num_bytes, kernel.flops, HZ * kernel.seconds)):
      row[i] += times * value
  kinds = [Kind(name, *(round(value) for value in row)) for name, row in sums.items()]
  return _written(text, found), sorted(kinds, key=lambda one: -one.ns)


def _written(text: str, found: Mapping[str, int]) -> str:
  """Returns the text with these times behind the instructions of these names."""
  line = re.compile(r'^(\s+(?:ROOT )?%?([\w.\-]+) = .*)$', re.MULTILINE)

  def write(match: re.Match[str]) -> str:
    return f'{match[1]}, "estimated_cycles":"{found[match[2]]}"' if match[2] in found else match[0]

  return line.sub(write, text)
