"""A plan as text, which is also Markdown: verdict, memory, time, collectives, parameters."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.parallel import layout
from vit_jax.plan import compile, compiled, gpu_kernels, quick, schedule, warn
from vit_jax.plan import plan as plans

GIB = 2**30
OPERATIONS = 24
"""Rows of the table of operations."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a Markdown table whose columns line up."""
  widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
  lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
  lines.insert(1, ['-' * width for width in widths])
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def render(plan: plans.Plan) -> str:
  """Returns the complete plan as text."""
  config, topology = plan.parts.config, plan.subject.topology
  axes = ' x '.join(f'{axis}={size}' for axis, size in plan.parts.mesh.shape.items())
  made = ', '.join(f'{name} {version}' for name, version in plan.to_json()['versions'].items())
  sections = [
      f'# Plan: {config.name} on {topology.label}, {topology.num_devices} devices',
      f'{config.batch_size:,} images a step on {axes}; {plan.rows} a device and microbatch; '
      f'{layout.dtype_text(config.model)}, {_execution(config.model)}{_remat(config.model)}. {made}, '
      f'{plan.to_json()["date"]}.',
      *filter(None, (plan.subject.layout, _precision(plan), _quick(plan))),
      verdict(plan), *(f'**Warning**: {one}' for one in warn.find(plan)),
      *_section(plan, 'Memory of one device', table(('what', 'GiB', 'how known'), memory_rows(plan))),
      *_section(plan, 'Time and cost', table(('figure', 'value', 'how known'), list(time_rows(plan))))]
  if plan.of_lengths:
    sections += _section(plan, 'Steps by the length of their sequences', _lengths(plan))
  if plan.answer and not plan.answer.overflow:
    if plan.answer.kinds:
      sections += _section(plan, 'Kernels of one step by kind, one GPU', kernels(plan.answer.kinds))
    if plan.has_cycles:
      what = 'time' if topology.chip.platform == 'gpu' else 'cycles'
      goes = 'goes' if topology.chip.platform == 'gpu' else 'go'
      sections += _section(plan, f'Where the {what} of one step {goes}', operations(plan))
    sections += _section(plan, 'Collectives of one step, one device', collectives(plan))
  sections += _section(plan, 'Parameters', parameters(plan))
  return '\n\n'.join(sections)


def _lengths(plan: plans.Plan) -> str:
  """Returns a table of the steps of each length; the other sections are of the longest one."""
  drawn = plan.parts.config.data.recipe.native_lengths
  rows = [(f'{length:,}', f'{drawn.count(length) / len(drawn):.0%}', str(one.parts.config.train.microbatches),
           f'{one.peak_gib:.2f}', '-' if one.step_ms is None else _short(one.step_ms))
          for length, one in plan.of_lengths.items()]
  return table(('patches of an image', 'of the steps', 'microbatches', 'peak GiB', 'step ms'), rows)


def _precision(plan: plans.Plan) -> str:
  """Returns a note on a plan in float32 for an accelerator, which multiplies bfloat16 faster."""
  if plan.parts.config.model.dtype is not schema.DType.F32 or plan.subject.topology.chip.platform == 'cpu':
    return ''
  return ('**This plan is for float32**, the dtype of the config. The MFU is relative to the bfloat16 peak; '
          '--config.model.dtype=bfloat16 plans a faster step that needs less memory.')


def to_json(plan: plans.Plan) -> dict[str, Any]:
  """Returns the content of `plan.json`: the figures of the plan, and its warnings."""
  return {**plan.to_json(), 'warnings': warn.find(plan), 'ideal_sent_bytes': warn.ideal_bytes(plan)}


def _quick(plan: plans.Plan) -> str:
  """Returns a note on figures that are not of the complete program."""
  if not plan.is_quick or not quick.is_shorter(plan.parts.config):
    return ''
  low, high = quick.DEPTHS
  return (f'**This plan is quick**: programs of {low} and {high} blocks were compiled; time, memory and collectives '
          'are on the line through their figures.')


def _section(plan: plans.Plan, title: str, text: str) -> list[str]:
  where = {'tpu': ' on a TPU', 'gpu': ' on a GPU'}.get(plan.subject.topology.chip.platform, '')
  return [f'## {title} (not measured{where})', text]


def verdict(plan: plans.Plan) -> str:
  """Returns whether the program fits, and by how much."""
  have = plan.subject.topology.chip.hbm_gib
  lost = plan.answer.overflow if plan.answer else None
  if lost:
    return f'**Does not fit**: {plans.overflow_text(lost)}. --search looks for settings that fit.{_whole(plan)}'
  how = 'as compiled' if plan.answer else f'by arithmetic only. {plan.reason}'
  if plan.fits:
    return f'**Fits**: {plan.peak_gib:.2f} of {have:.2f} GiB a device at the peak, {how}{_whole(plan)}'
  return (f'**Does not fit**: {plan.peak_gib:.2f} GiB a device, {plan.peak_gib - have:.2f} GiB too much, {how}'
          f'{_whole(plan)}')


def _whole(plan: plans.Plan) -> str:
  if not plan.whole_bytes:
    return ''
  return (f' Parameters of {plan.whole_bytes / GIB:.2f} GiB are replicated, because mesh.fsdp='
          f'{plan.parts.mesh.shape["fsdp"]} does not divide their dimensions. Set it to a divisor of '
          f'{_width(plan.parts.config.model)}.')


def _width(model: schema.Model) -> str:
  return 'its channels' if isinstance(model, schema.EfficientNet) else f'model.width={model.width}'


def _remat(model: schema.Model) -> str:
  first = getattr(model, 'full_remat', 0)
  return f'remat {model.remat.value}' + (f', full in the first {first}' if first else '')


def _execution(model: schema.Model) -> str:
  return f'{model.execution.value}, ' if isinstance(model, schema.ViT | schema.Mixer) else ''


def _short(value: float) -> str:
  """Formats a positive number with three or four significant digits."""
  return f'{value:,.0f}' if value >= 999.95 else f'{value:.1f}' if value >= 9.995 else f'{value:.3g}'


def memory_rows(plan: plans.Plan) -> list[tuple[str, str, str]]:
  rows = [(name, f'{size / GIB:.3f}', 'estimate' if name in ('activations', 'gradients') else 'exact')
          for name, size in plan.memory.items()]
  if plan.answer and not plan.answer.overflow:
    a = plan.answer
    rows += [('arguments', f'{a.argument_bytes / GIB:.3f}', 'compiler: state and batch'),
             ('temporaries', f'{a.temp_bytes / GIB:.3f}', 'compiler: activations, gradients, buffers'),
             ('peak', f'{a.peak_bytes / GIB:.3f}', 'compiler')]
  return [*rows, ('usable', f'{plan.subject.topology.chip.hbm_gib:.3f}', 'of one device')]


def time_rows(plan: plans.Plan) -> Iterator[tuple[str, str, str]]:
  """Returns time, utilization and cost of a step and of the run."""
  chip, total, step = plan.subject.topology.chip, plan.parts.lengths.total_steps, plan.step_ms
  count = trees.num_elements(plan.parts.program.abstract_state.params)
  yield 'parameters', f'{count:,}', 'exact'
  yield 'FLOPs a step', f'{plan.flops_per_step:.4g}', 'forward and backward, 2 a multiply-add, without recomputation'
  yield 'roofline', f'{_short(plan.roofline_ms)} ms', f'lower bound: {chip.peak_flops / 1e12:g} TFLOP/s, ' \
      f'{chip.hbm_bytes_s / 1e9:g} GB/s a device'
  yield 'total steps', f'{total:,}', plan.parts.config.length
  if step is None:
    return
  if plan.has_cycles and chip.platform == 'gpu':
    how = (f'estimate: kernels by the rates of their products and {gpu_kernels.REACHED:.0%} of the bandwidth of the '
           'memory; without collectives, host and input')
  elif plan.has_cycles:
    how = (f'estimate: cycles that the compiler estimates, at {chip.clock_hz / 1e9:g} GHz; without collectives, host '
           'and input')
  elif plan.step_ms_source == 'schedule':
    how = 'lower bound, by schedule, because the text of the program has no estimates'
  else:
    dtype = plan.parts.config.model.dtype.value
    how = (f'estimate: FLOPs at an assumed {plan.assumed_mfu:.0%} of the peak for {dtype}, '
           f'{plan.dtype_flops / 1e12:g} TFLOP/s')
  more, less = ('> ', '< ') if plan.uncounted or plan.step_ms_source == 'schedule' else ('', '')
  yield 'step', f'{more}{_short(step)} ms', how
  yield from _scheduled_rows(plan)
  if plan.uncounted:
    named = ', '.join(f'{kernel.calls:,} x {kernel.name}' for kernel in plan.uncounted)
    yield 'kernels', 'unknown', f'{named}: the compiler counts no cycles for these; only the lower bound by ' \
        'schedule includes them'
  if plan.answer:
    yield 'collectives', f'{_short(plan.collectives_ms)} ms', \
        f'one ring at {chip.ring_bytes_s / 1e9:g} GB/s, without overlap'
  if (exposed := plan.exposed_ms) is not None:
    share = f'; {exposed / (step + exposed):.1%} of the step with them'
    yield 'exposed', f'{_short(exposed)} ms', \
        f'of the collectives, those that no work beside them hides, by the schedule{share}'
  if between := plan.between_slices_ms:
    yield 'between slices', f'{_short(between)} ms', \
        f'data-center network at {chip.between_bytes_s / 1e9:g} GB/s a device; not included in other figures'
  yield from _cost_rows(plan, step, more, less)
  if plan.answer:
    yield from _compiler_rows(plan.answer, chip.clock_hz)


def _cost_rows(plan: plans.Plan, step: float, more: str, less: str) -> Iterator[tuple[str, str, str]]:
  """Returns utilization, hours and core-days of the run, by the time of a step in ms.

  They are also given with the collectives added that the step waits for: all of them where there is no schedule.

  Args:
    plan: of the run.
    step: time of a step in ms.
    more, less: what is put before bounds, `> ` and `< `; '' = they are estimates.
  """
  both = plan.step_ms_with_collectives or step

  def added(value: str) -> str:
    return f'; {value} with collectives' if plan.answer else ''

  yield 'MFU', f'{less}{plan.mfu(step):.1%}', f'of the step{added(f"{less}{plan.mfu(both):.1%}")}'
  yield 'hours', more + _short(plan.hours(step)), f'all steps{added(more + _short(plan.hours(both)))}'
  unit = 'GPU' if plan.subject.topology.chip.platform == 'gpu' else 'core'
  yield f'{unit}-days', more + _short(plan.core_days(step)), \
      f'{plan.subject.topology.num_cores} {unit}s{added(more + _short(plan.core_days(both)))}'
  if plan.hourly_price:
    yield 'price', more + f'{plan.price(both):,.2f}', \
        f'{plan.subject.topology.num_chips} at {plan.hourly_price:g} an hour; the steps and their collectives'
  paper = plans.PAPER_CORE_DAYS.get(plan.parts.config.name)
  if paper:
    yield 'paper', f'{paper:,}', 'TPUv3-core-days, ViT paper, Table 2; comparable on v3 only'


def _scheduled_rows(plan: plans.Plan) -> Iterator[tuple[str, str, str]]:
  """Returns the second time of a step, and what is missing in it."""
  second, ms = plan.answer.schedule if plan.answer else None, plan.scheduled_ms
  if second is None or ms is None:
    return
  clock = plan.subject.topology.chip.clock_hz
  yield 'lower bound, by schedule', f'> {_short(ms)} ms', (
      f'of each operation the larger of its instruction bundles and its bytes at {schedule.REACHED:.0%} of the memory '
      f'bandwidth ({second.memory_cycles / max(second.cycles, 1):.0%} of the time); kernels included, without '
      'collectives, host and input')
  if second.uncounted or second.unknown_loops:
    yield 'not in it', f'{1e3 * second.uncounted_cycles / clock:.3g} ms', (
        f'estimate for {second.uncounted:,} operations without a schedule, of which only the bytes are counted; '
        f'{second.unknown_loops:,} inner loops of unknown length are counted as one iteration each')
  if second.cmem_bytes:
    yield 'not in it, on the chip', f'{second.cmem_bytes / 2**30:,.2f} GiB', (
        'that operations read from and write to the second memory of the chip (CMEM of v4); its rate is not known')


def _compiler_rows(answer: compile.Answer, clock_hz: float) -> Iterator[tuple[str, str, str]]:
  if (unknown := answer.costs.unknown).loops:
    once = f'{1e3 * unknown.cycles / clock_hz:.3g} ms' if clock_hz else '-'
    yield 'loops of unknown length', once, \
        f'{unknown.loops}, counted as one iteration each, included in the step: {", ".join(unknown.sources)}'
  yield 'compile', f'{answer.lower_s + answer.compile_s:.0f} s', 'on this machine'


TRUST = ("Accuracy: memory is what the compiler reserves. The step time is the estimate of the compiler's cost model, "
         'which overstates operations in bfloat16 that wait for memory. What it is by schedule is a lower bound, which '
         'lacks the latency of memory. '
         'The estimate was compared once, for the published program of a 90-epoch S/16 run on eight v3 cores: 201 ms '
         'estimated, 194 to 226 ms by the published hours. Other generations were not compared. A core-day is one core '
         'for one day: a device of v2, v3, v5e and v6e is one core, a device of v4 and v5p two.')


OF_GPUS = ('Accuracy: memory is what the compiler reserves. The time of a kernel is that of its products at an assumed '
           'rate, or of its bytes. Beside the estimates of earlier programs of this project an H200 took ' + ', '.join(
               f'{off:+.0%} for {name}' for name, off in gpu_kernels.OFF.items()) +
           '; the program that is compiled here was not timed.')


def kernels(kinds: Sequence[gpu_kernels.Kind]) -> str:
  """Returns the kernels of a GPU by kind, with their sum."""
  rows = [(one.name, f'{one.calls:,}', f'{one.num_bytes / GIB:.2f}', f'{one.flops / 1e12:.2f}', f'{one.ns / 1e6:.2f}')
          for one in kinds]
  total = ('all', f'{sum(one.calls for one in kinds):,}', f'{sum(one.num_bytes for one in kinds) / GIB:.2f}',
           f'{sum(one.flops for one in kinds) / 1e12:.2f}', f'{sum(one.ns for one in kinds) / 1e6:.2f}')
  return table(('kind and phase', 'kernels', 'GiB', 'TFLOP', 'ms'), [*rows, total])


def operations(plan: plans.Plan) -> str:
  """Returns the most expensive operations by source, and the sum of the rest; `plan.json` has all of them."""
  assert plan.answer is not None
  found, whole = plan.answer.operations, plan.answer.costs.cycles
  rows = [(one.phase, one.place, one.calls, one.cycles, one.scheduled or 0) for one in found[:OPERATIONS]]
  for phase in ('forward', 'recomputed', 'backward', 'update'):
    left = [one for one in found[OPERATIONS:] if one.phase == phase]
    rows += [(phase, 'all others', sum(one.calls for one in left), sum(one.cycles for one in left),
              sum(one.scheduled or 0 for one in left))] * bool(left)
  clock, second = plan.subject.topology.chip.clock_hz, plan.answer.schedule
  head = ('phase', 'from', 'calls', 'ms', 'share', *['lower bound, ms'] * bool(second))
  return table(head, [(phase, place, f'{calls:,}', f'{1e3 * cycles / clock:.2f}', f'{cycles / whole:.1%}',
                       *[f'{1e3 * scheduled / clock:.2f}'] * bool(second))
                      for phase, place, calls, cycles, scheduled in rows])


def collectives(plan: plans.Plan) -> str:
  assert plan.answer is not None
  chip, waits = plan.subject.topology.chip, {one.kind: one for one in plan.answer.waits or ()}
  rows = []
  for row in plan.answer.costs.collectives:
    rate = chip.between_bytes_s if row.kind == compiled.BETWEEN_SLICES else chip.ring_bytes_s
    wait = waits.get(row.kind)
    ms = wait.ns / 1e6 if wait else 1e3 * row.sent_bytes / rate if rate else None
    rows.append((row.kind, f'{row.calls:,}', f'{row.num_bytes / 2**20:,.1f}', f'{row.sent_bytes / 2**20:,.1f}',
                 '-' if ms is None else f'{ms:.2f}', f'{wait.exposed_ns / 1e6:.2f}' if wait else '-'))
  shown = table(('kind', 'count', 'MiB of results', 'MiB sent', 'ms', 'exposed ms'), rows) if rows else 'None.'
  shown += f'\n\nThis layout needs {warn.ideal_bytes(plan) / 2**20:,.1f} MiB sent within a slice.'
  if any(row[0] == compiled.BETWEEN_SLICES for row in rows):
    shown += '\n\nTransfers between slices use the data-center network; no sum here includes their time.'
  trust = OF_GPUS if chip.platform == 'gpu' else TRUST
  return f'{shown}\n\n{trust}' if plan.has_cycles else shown


def parameters(plan: plans.Plan) -> str:
  """Returns every parameter with its sharding."""
  program = plan.parts.program
  leaves = trees.flatten(program.abstract_state.params)
  placed = jax.tree.leaves(program.shardings.params)
  rows = []
  for (name, leaf), sharding in zip(leaves.items(), placed, strict=True):
    size = int(np.prod(sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
    spec = ', '.join(str(axis or '-') for axis in sharding.spec) or 'replicated'
    rows.append((name, str(list(leaf.shape)), spec, f'{size:,}'))
  return table(('parameter', 'shape', 'spec', 'bytes a device'), rows)
