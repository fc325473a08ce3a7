"""Estimates the time of each kernel of a program for GPUs, because XLA does not: by its products or its memory traffic.

The text of a compiled program has one instruction for each kernel, in the order in which they run. The time of a kernel
is `LAUNCH_S` plus the larger of two times: its floating-point operations at the rate of their type, and the bytes that
it reads and writes at `REACHED` of the bandwidth of the memory. Caches between kernels are ignored. `compile` calls
`annotate`, which writes the times into the text, so that the text can be read as that of a TPU program.
"""
from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

from vit_jax.plan import compiled, hlo, schedule
from vit_jax.plan.hlo import Instruction

REACHED = .9
"""Part of the bandwidth of the memory that a kernel is assumed to reach."""
LAUNCH_S = 5.5e-6
"""Time of each kernel beside its work, chosen to fit the three steps of `OFF`."""
PRODUCTS = {'bf16': 620e12, 'f16': 620e12, 'f32': 310e12, 'f64': 50e12, 'f8': 1050e12, 's8': 1050e12}
"""FLOP/s of products by the type of their operands on an H100 or H200; all are assumed.

bf16 has 63 % of the peak, where a product of 8,192 x 8,192 matrices reached 72 % on an H200. float32, which XLA
multiplies as TF32, has half of that, and types of 8 bits have 1.7 times as much."""
ATTENTION = (450e12, 350e12)
"""FLOP/s of cuDNN's attention, forward and backward; assumed."""
BACKWARD_PRODUCTS = 2.5
"""Products of the backward pass of attention, relative to the two of the forward pass."""
OFF = {'L/16 (128 images, scanned)': -.03, 'B/16 (128)': .00, 'S/16 (256)': .10}
"""How much longer a step took on an H200 (jax 0.11.2) than the estimate (jax 0.10.2), as a share of the estimate.

The steps took 138.0, 40.9 and 32.1 ms, and the estimates were 142.0, 40.7 and 29.1 ms. The programs have changed
since: rows are joined now."""
HZ = 1e9
"""The times are written into the text as cycles of one nanosecond."""

_SLICES = ('dynamic-slice', 'slice', 'gather')
_WITHOUT_KERNEL = (
    'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'partition-id', 'replica-id',
    'while', 'call', 'conditional', 'opt-barrier', 'iota', *compiled.KINDS)
_COPYING_FUSIONS = ('copy', 'loop_slice', 'loop_dynamic', 'loop_pad', 'input_concat', 'loop_concat', 'loop_broadcast')
"""Beginnings of the names of fusions that only move data."""
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r'lhs_contracting_dims=\{([\d,]*)\}|"lhs_contracting_dimensions":\[([\d",]*)\]')
_LINE = re.compile(r'^(\s+(?:ROOT )?%?([\w.\-]+) = .*)$', re.MULTILINE)  # an instruction; group 2 is its name


class Kernel(NamedTuple):
  """One kernel: `kind` such as `products, forward`, bytes of memory traffic, floating-point operations, and time."""
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
  """Returns the kernels of a program, on a card with this bandwidth of its memory in bytes per second."""

  def __init__(self, program: hlo.Program, hbm_bytes_s: float) -> None:
    self._program, self._bytes_s = program, hbm_bytes_s
    self._traffic = schedule.Traffic(program, slices=_SLICES)

  def kernel(self, instruction: Instruction, computation: str) -> Kernel | None:
    """Returns the kernel of an instruction of `computation`; None if it starts none."""
    opcode = instruction.opcode
    if opcode in _WITHOUT_KERNEL or opcode.endswith(('-start', '-done', '-update')):
      return None
    num_bytes = self._traffic.num_bytes(instruction, computation)
    phase, _ = compiled.locate(instruction)
    target = _target(instruction)
    if 'fmha' in target:  # attention of cuDNN, whose first result is `[B, A, N, K]`
      batch, heads, tokens, width = hlo.arrays(instruction.type)[0].shape
      is_backward = 'Backward' in target
      flops = 4 * batch * heads * tokens**2 * width * (BACKWARD_PRODUCTS if is_backward else 1)
      rate = ATTENTION[1 if is_backward else 0]
      kind = 'attention'
    else:
      flops, dtype = self._products(instruction, computation)
      rate = PRODUCTS.get(dtype, PRODUCTS['bf16'])
      kind = 'products' if flops else _kind_without_products(instruction)
    seconds = LAUNCH_S + max(num_bytes / (REACHED * self._bytes_s), flops / rate)
    return Kernel(f'{kind}, {phase}', num_bytes, flops, seconds)

  def _products(self, instruction: Instruction, computation: str) -> tuple[float, str]:
    """Returns the FLOPs of all products of an instruction, and the type of the operands of the last one, or ''."""
    if instruction.opcode == 'dot' or _target(instruction).startswith('__cublas'):
      return self._product(instruction, computation)
    total, dtype = 0., ''
    if instruction.opcode == 'fusion':
      fused = instruction.called['calls']
      for inner in self._program.instructions(fused):
        flops, inner_dtype = self._products(inner, fused)
        total += flops
        dtype = inner_dtype or dtype
    return total, dtype

  def _product(self, instruction: Instruction, computation: str) -> tuple[float, str]:
    """Returns the FLOPs of one product, and the type of its operands as in `PRODUCTS`: `f8` for all types of 8 bits."""
    left = self._program.computations[computation].get(instruction.operands[0])
    contracted = _CONTRACTED.search(instruction.text)
    if left is None or contracted is None:
      return 0., ''
    operand = hlo.arrays(left.type)[0]
    axes = [int(axis) for axis in re.findall(r'\d+', contracted[1] or contracted[2] or '')]
    num_outputs = math.prod(hlo.arrays(instruction.type)[0].shape)
    flops = 2. * num_outputs * math.prod(operand.shape[axis] for axis in axes)
    return flops, 'f8' if operand.dtype.startswith('f8') else operand.dtype


def _target(instruction: Instruction) -> str:
  """Returns the function that a custom call runs, such as `__cudnn$fmhaSoftmax`; '' for another instruction."""
  target = _TARGET.search(instruction.text)
  return target[1] if target else ''


def _kind_without_products(instruction: Instruction) -> str:
  """Returns what a kernel without products does, for tables."""
  name = instruction.name.lower()
  if 'transpos' in name:
    return 'transposing'
  if instruction.opcode == 'copy' or name.startswith(_COPYING_FUSIONS) or 'dynamic_update_slice' in name:
    return 'copies, pads and slices'
  return 'elementwise and sums'


def annotate(text: str, hbm_bytes_s: float) -> tuple[str, list[Kind]]:
  """Returns the text of a program with the time of each kernel where a TPU's has cycles, and the kernels by kind."""
  program = hlo.parse(text)
  clock = Clock(program, hbm_bytes_s)
  ns_by_name: dict[str, int] = {}
  calls: Counter[str] = Counter()
  sums: dict[str, list[float]] = {}  # bytes, FLOPs and nanoseconds by kind
  for visit in program.walk():
    if visit.is_inside('fusion'):
      continue
    kernel = clock.kernel(visit.instruction, visit.computation)
    if kernel is None:
      continue
    ns_by_name[visit.instruction.name] = round(HZ * kernel.seconds)
    calls[kernel.kind] += visit.times
    row = sums.setdefault(kernel.kind, [0., 0., 0.])
    for i, value in enumerate((kernel.num_bytes, kernel.flops, HZ * kernel.seconds)):
      row[i] += visit.times * value

  def with_time(line: re.Match[str]) -> str:
    ns = ns_by_name.get(line[2])
    return line[0] if ns is None else f'{line[1]}, "estimated_cycles":"{ns}"'

  kinds = [Kind(name, calls[name], *(round(value) for value in row)) for name, row in sums.items()]
  return _LINE.sub(with_time, text), sorted(kinds, key=lambda kind: -kind.ns)
