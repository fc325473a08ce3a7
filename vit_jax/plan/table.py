"""Writes a plan as text, which is also Markdown: verdict, memory, time, collectives, parameters.

The job plan calls `render` for the text and `to_json` for `plan.json`. Rows are tuples of cells; those of the tables of
memory and time are a figure, its value, and how it is known, such as `('peak', '1.234', 'compiler')`.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.parallel import layout
from vit_jax.plan import compiled, gpu_kernels, quick, schedule, warn
from vit_jax.plan import plan as plans

GIB = compiled.GIB
OPERATIONS = 24
"""Rows of the table of operations."""
TRUST = ("Accuracy: memory is what the compiler reserves. The step time is the estimate of the compiler's cost model, "
         'which overstates operations in bfloat16 that wait for memory. What it is by schedule is a lower bound, which '
         'lacks the latency of memory. '
         'The estimate was compared once, for the published program of a 90-epoch S/16 run on eight v3 cores: 201 ms '
         'estimated, 194 to 226 ms by the published hours. Other generations were not compared. A core-day is one core '
         'for one day: a device of v2, v3, v5e and v6e is one core, a device of v4 and v5p two.')
TRUST_GPU = (
    'Accuracy: memory is what the compiler reserves. The time of a kernel is that of its products at an assumed rate, '
    'or of its bytes. Beside the estimates of earlier programs of this project an H200 took '
    + ', '.join(f'{error:+.0%} for {name}' for name, error in gpu_kernels.OFF.items())
    + '; the program that is compiled here was not timed.')
_Row = tuple[str, str, str]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a Markdown table whose columns line up."""
  widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
  lines = [head, ['-' * width for width in widths], *rows]
  return '\n'.join(f'| {" | ".join(map(str.ljust, line, widths))} |' for line in lines)


def render(plan: plans.Plan) -> str:
  """Returns the complete plan as text."""
  config, topology, report = plan.parts.config, plan.subject.topology, plan.report
  is_gpu = plan.chip.platform == 'gpu'
  axes = ' x '.join(f'{axis}={size}' for axis, size in plan.parts.mesh.shape.items())
  content = plan.to_json()
  versions = ', '.join(f'{name} {version}' for name, version in content['versions'].items())
  sections = [
      f'# Plan: {config.name} on {topology.label}, {topology.num_devices} devices',
      f'{config.batch_size:,} images a step on {axes}; {plan.rows} a device and microbatch; '
      f'{layout.dtype_text(config.model)}, {_describe_execution(config.model)}. {versions}, {content["date"]}.',
      *filter(None, (plan.subject.layout, _note_on_float32(plan), _note_on_quick(plan))),
      verdict(plan), *(f'**Warning**: {warning}' for warning in warn.find(plan))]

  def add(title: str, text: str) -> None:
    where = {'tpu': ' on a TPU', 'gpu': ' on a GPU'}.get(plan.chip.platform, '')
    sections.extend([f'## {title} (not measured{where})', text])

  add('Memory of one device', table(('what', 'GiB', 'how known'), _memory_rows(plan)))
  add('Time and cost', table(('figure', 'value', 'how known'), list(_time_rows(plan))))
  if plan.of_lengths:
    add('Steps by the length of their sequences', _lengths(plan))
  if report.kinds:
    add('Kernels of one step by kind, one GPU', kernels(report.kinds))
  if plan.has_cycles:
    add('Where the time of one step goes' if is_gpu else 'Where the cycles of one step go', operations(plan))
  if plan.answer and not report.overflow:
    add('Collectives of one step, one device', collectives(plan))
  add('Parameters', parameters(plan))
  return '\n\n'.join(sections)


def to_json(plan: plans.Plan) -> dict[str, Any]:
  """Returns the content of `plan.json`: the figures of the plan, and its warnings."""
  return {**plan.to_json(), 'warnings': warn.find(plan), 'ideal_sent_bytes': warn.ideal_bytes(plan)}


def _describe_execution(model: schema.Model) -> str:
  """Returns such as `scan, remat none, full in the first 3`."""
  execution = f'{model.execution.value}, ' if isinstance(model, schema.ViT | schema.Mixer) else ''
  num_full = getattr(model, 'full_remat', 0)
  return f'{execution}remat {model.remat.value}' + (f', full in the first {num_full}' if num_full else '')


def _note_on_float32(plan: plans.Plan) -> str:
  """Returns a note on a plan in float32 for an accelerator, which multiplies bfloat16 faster; else ''."""
  if plan.parts.config.model.dtype is not schema.DType.F32 or plan.chip.platform == 'cpu':
    return ''
  return ('**This plan is for float32**, the dtype of the config. The MFU is relative to the bfloat16 peak; '
          '--config.model.dtype=bfloat16 plans a faster step that needs less memory.')


def _note_on_quick(plan: plans.Plan) -> str:
  """Returns a note on figures that are not of the complete program; '' if they are."""
  if not plan.answer or not plan.is_quick or not quick.is_shorter(plan.parts.config):
    return ''
  low, high = quick.DEPTHS
  return (f'**This plan is quick**: programs of {low} and {high} blocks were compiled; time, memory and collectives '
          'are on the line through their figures.')


def verdict(plan: plans.Plan) -> str:
  """Returns whether the program fits, and by how much."""
  have_gib, replicated = plan.chip.hbm_gib, _note_on_replicated(plan)
  if overflow := plan.report.overflow:
    text = plans.overflow_text(overflow)
    return f'**Does not fit**: {text}. --search looks for settings that fit.{replicated}'
  how = 'as compiled' if plan.answer else f'by arithmetic only. {plan.reason}'
  if plan.fits:
    return f'**Fits**: {plan.peak_gib:.2f} of {have_gib:.2f} GiB a device at the peak, {how}{replicated}'
  return (f'**Does not fit**: {plan.peak_gib:.2f} GiB a device, {plan.peak_gib - have_gib:.2f} GiB too much, {how}'
          f'{replicated}')


def _note_on_replicated(plan: plans.Plan) -> str:
  """Returns a sentence on large parameters that `fsdp` does not split; '' if there are none."""
  if not plan.replicated_bytes:
    return ''
  model = plan.parts.config.model
  width = 'its channels' if isinstance(model, schema.EfficientNet) else f'model.width={model.width}'
  return (f' Parameters of {plan.replicated_bytes / GIB:.2f} GiB are replicated, because mesh.fsdp='
          f'{plan.parts.mesh.shape["fsdp"]} does not divide their dimensions. Set it to a divisor of {width}.')


def _short(value: float) -> str:
  """Formats a positive number with three or four significant digits."""
  if value >= 999.95:
    return f'{value:,.0f}'
  return f'{value:.1f}' if value >= 9.995 else f'{value:.3g}'


def _memory_rows(plan: plans.Plan) -> list[_Row]:
  rows = [(name, f'{size / GIB:.3f}', 'estimate' if name in ('activations', 'gradients') else 'exact')
          for name, size in plan.memory.items()]
  if plan.answer and not plan.answer.overflow:
    rows += [('arguments', f'{plan.answer.argument_bytes / GIB:.3f}', 'compiler: state and batch'),
             ('temporaries', f'{plan.answer.temp_bytes / GIB:.3f}', 'compiler: activations, gradients, buffers'),
             ('peak', f'{plan.answer.peak_bytes / GIB:.3f}', 'compiler')]
  return [*rows, ('usable', f'{plan.chip.hbm_gib:.3f}', 'of one device')]


def _time_rows(plan: plans.Plan) -> Iterator[_Row]:
  """Yields time, utilization and cost of a step and of the run; only what is exact if the program does not fit."""
  chip, step_ms = plan.chip, plan.step_ms
  num_params = trees.num_elements(plan.parts.program.abstract_state.params)
  yield 'parameters', f'{num_params:,}', 'exact'
  yield 'FLOPs a step', f'{plan.flops_per_step:.4g}', 'forward and backward, 2 a multiply-add, without recomputation'
  yield ('roofline', f'{_short(plan.roofline_ms)} ms',
         f'lower bound: {chip.peak_flops / 1e12:g} TFLOP/s, {chip.hbm_bytes_s / 1e9:g} GB/s a device')
  yield 'total steps', f'{plan.parts.lengths.total_steps:,}', plan.parts.config.length
  if step_ms is None:
    return
  is_bound = bool(plan.uncounted) or plan.step_ms_source == 'schedule'
  more, less = ('> ', '< ') if is_bound else ('', '')
  yield 'step', f'{more}{_short(step_ms)} ms', _explain_step(plan)
  yield from _schedule_rows(plan)
  if plan.uncounted:
    names = ', '.join(f'{kernel.calls:,} x {kernel.name}' for kernel in plan.uncounted)
    yield ('kernels', 'unknown', f'{names}: the compiler counts no cycles for these; only the lower bound by schedule '
           'includes them')
  if plan.answer:
    yield ('collectives', f'{_short(plan.collectives_ms)} ms',
           f'one ring at {chip.ring_bytes_s / 1e9:g} GB/s, without overlap')
  if (exposed_ms := plan.exposed_ms) is not None:
    yield ('exposed', f'{_short(exposed_ms)} ms', 'of the collectives, those that no work beside them hides, by the '
           f'schedule; {exposed_ms / (step_ms + exposed_ms):.1%} of the step with them')
  if plan.between_slices_ms:
    yield ('between slices', f'{_short(plan.between_slices_ms)} ms', 'data-center network at '
           f'{chip.between_bytes_s / 1e9:g} GB/s a device; not included in other figures')
  yield from _cost_rows(plan, step_ms, more, less)
  yield from _compiler_rows(plan)


def _explain_step(plan: plans.Plan) -> str:
  """Returns how the time of a step is known."""
  if plan.has_cycles and plan.chip.platform == 'gpu':
    return (f'estimate: kernels by the rates of their products and {gpu_kernels.REACHED:.0%} of the bandwidth of the '
            'memory; without collectives, host and input')
  if plan.has_cycles:
    return (f'estimate: cycles that the compiler estimates, at {plan.chip.clock_hz / 1e9:g} GHz; without collectives, '
            'host and input')
  if plan.step_ms_source == 'schedule':
    return 'lower bound, by schedule, because the text of the program has no estimates'
  dtype = plan.parts.config.model.dtype.value
  return (f'estimate: FLOPs at an assumed {plan.assumed_mfu:.0%} of the peak for {dtype}, '
          f'{plan.dtype_flops / 1e12:g} TFLOP/s')


def _schedule_rows(plan: plans.Plan) -> Iterator[_Row]:
  """Yields the second estimate of the time of a step, and what it lacks."""
  second_estimate, scheduled_ms = plan.report.schedule, plan.scheduled_ms
  if second_estimate is None or scheduled_ms is None:
    return
  memory_share = second_estimate.memory_cycles / max(second_estimate.cycles, 1)
  yield ('lower bound, by schedule', f'> {_short(scheduled_ms)} ms',
         f'of each operation the larger of its instruction bundles and its bytes at {schedule.REACHED:.0%} of the '
         f'memory bandwidth ({memory_share:.0%} of the time); kernels included, without collectives, host and input')
  if second_estimate.uncounted or second_estimate.unknown_loops:
    yield ('not in it', f'{1e3 * second_estimate.uncounted_cycles / plan.chip.clock_hz:.3g} ms',
           f'estimate for {second_estimate.uncounted:,} operations without a schedule, of which only the bytes are '
           f'counted; {second_estimate.unknown_loops:,} runs of inner loops of unknown length are counted as one '
           'iteration each')
  if second_estimate.cmem_bytes:
    yield ('not in it, on the chip', f'{second_estimate.cmem_bytes / GIB:,.2f} GiB', 'that operations read from and '
           'write to the second memory of the chip (CMEM of v4); its rate is not known')


def _cost_rows(plan: plans.Plan, step_ms: float, more: str, less: str) -> Iterator[_Row]:
  """Yields utilization, hours, core-days and price of the run, without and with the collectives of the steps.

  Args:
    plan: of the run.
    step_ms: time of a step without collectives.
    more, less: prefixes `> ` and `< ` if the time is a lower bound; '' if it is an estimate.
  """
  both_ms = plan.step_ms_with_collectives or step_ms
  topology = plan.subject.topology
  unit = 'GPU' if plan.chip.platform == 'gpu' else 'core'
  rows = [('MFU', f'{less}{plan.mfu(step_ms):.1%}', 'of the step', f'{less}{plan.mfu(both_ms):.1%}'),
          ('hours', more + _short(plan.hours(step_ms)), 'all steps', more + _short(plan.hours(both_ms))),
          (f'{unit}-days', more + _short(plan.core_days(step_ms)), f'{topology.num_cores} {unit}s',
           more + _short(plan.core_days(both_ms)))]
  for figure, value, how, with_collectives in rows:
    yield figure, value, f'{how}; {with_collectives} with collectives' if plan.answer else how
  if plan.hourly_price:
    included = ', with collectives' if plan.answer else ''
    yield ('price', more + f'{plan.price(both_ms):,.2f}',
           f'{topology.num_chips} at {plan.hourly_price:g} an hour; all steps{included}')
  if paper := plans.PAPER_CORE_DAYS.get(plan.parts.config.name):
    yield 'paper', f'{paper:,}', 'TPUv3-core-days, ViT paper, Table 2; comparable on v3 only'


def _compiler_rows(plan: plans.Plan) -> Iterator[_Row]:
  """Yields loops of unknown length, and the time of the compilation; nothing if the program was not compiled."""
  if plan.answer is None:
    return
  unknown, clock_hz = plan.answer.costs.unknown, plan.chip.clock_hz
  if unknown.loops:
    once = f'{1e3 * unknown.cycles / clock_hz:.3g} ms' if clock_hz else '-'
    yield ('loops of unknown length', once, f'{unknown.loops}, counted as one iteration each, included in the step: '
           f'{", ".join(unknown.sources)}')
  yield 'compile', f'{plan.answer.lower_s + plan.answer.compile_s:.0f} s', 'on this machine'


def _lengths(plan: plans.Plan) -> str:
  """Returns a table of the steps of each length; the other sections are of the longest one."""
  drawn = plan.parts.config.data.recipe.native_lengths
  rows = [(f'{length:,}', f'{drawn.count(length) / len(drawn):.0%}', str(part.parts.config.train.microbatches),
           f'{part.peak_gib:.2f}', '-' if part.step_ms is None else _short(part.step_ms))
          for length, part in plan.of_lengths.items()]
  return table(('patches of an image', 'of the steps', 'microbatches', 'peak GiB', 'step ms'), rows)


def kernels(kinds: Sequence[gpu_kernels.Kind]) -> str:
  """Returns the kernels of a GPU by kind, with their sum."""
  total = gpu_kernels.Kind('all', *(sum(column) for column in list(zip(*kinds, strict=True))[1:]))
  rows = [(kind.name, f'{kind.calls:,}', f'{kind.num_bytes / GIB:.2f}', f'{kind.flops / 1e12:.2f}',
           f'{kind.ns / 1e6:.2f}') for kind in (*kinds, total)]
  return table(('kind and phase', 'kernels', 'GiB', 'TFLOP', 'ms'), rows)


def operations(plan: plans.Plan) -> str:
  """Returns the most expensive operations by source, and the sum of the rest; `plan.json` has all of them."""
  shown, rest = plan.report.operations[:OPERATIONS], plan.report.operations[OPERATIONS:]
  rows = list(shown)
  for phase in ('forward', 'recomputed', 'backward', 'update'):
    others = [operation for operation in rest if operation.phase == phase]
    if others:
      rows.append(compiled.Operation(
          phase, 'all others', calls=sum(operation.calls for operation in others),
          cycles=sum(operation.cycles for operation in others),
          scheduled=sum(operation.scheduled or 0 for operation in others)))
  has_bound = plan.report.schedule is not None
  clock_hz = plan.chip.clock_hz
  cells = []
  for operation in rows:
    cells.append([operation.phase, operation.place, f'{operation.calls:,}', f'{1e3 * operation.cycles / clock_hz:.2f}',
                  f'{operation.cycles / plan.report.costs.cycles:.1%}'])
    if has_bound:
      cells[-1].append(f'{1e3 * (operation.scheduled or 0) / clock_hz:.2f}')
  return table(['phase', 'from', 'calls', 'ms', 'share', *(['lower bound, ms'] if has_bound else [])], cells)


def collectives(plan: plans.Plan) -> str:
  """Returns the collectives by kind, and how far the figures can be trusted."""
  chip, wait_by_kind = plan.chip, {wait.kind: wait for wait in plan.report.waits or ()}
  rows = []
  for collective in plan.report.costs.collectives:
    bytes_s = chip.between_bytes_s if collective.kind == compiled.BETWEEN_SLICES else chip.ring_bytes_s
    ms = exposed_ms = '-'
    if wait := wait_by_kind.get(collective.kind):
      ms, exposed_ms = f'{wait.ns / 1e6:.2f}', f'{wait.exposed_ns / 1e6:.2f}'
    elif bytes_s:
      ms = f'{1e3 * collective.sent_bytes / bytes_s:.2f}'
    rows.append((collective.kind, f'{collective.calls:,}', f'{collective.num_bytes / 2**20:,.1f}',
                 f'{collective.sent_bytes / 2**20:,.1f}', ms, exposed_ms))
  text = table(('kind', 'count', 'MiB of results', 'MiB sent', 'ms', 'exposed ms'), rows) if rows else 'None.'
  text += f'\n\nThis layout needs {warn.ideal_bytes(plan) / 2**20:,.1f} MiB sent within a slice.'
  if any(kind == compiled.BETWEEN_SLICES for kind, *_ in rows):
    text += '\n\nTransfers between slices use the data-center network; no sum here includes their time.'
  if plan.has_cycles:
    text += f'\n\n{TRUST_GPU if chip.platform == "gpu" else TRUST}'
  return text


def parameters(plan: plans.Plan) -> str:
  """Returns every parameter with its sharding."""
  program = plan.parts.program
  leaves = trees.flatten(program.abstract_state.params)
  rows = []
  for (name, leaf), placed in zip(leaves.items(), jax.tree.leaves(program.shardings.params), strict=True):
    num_bytes = math.prod(placed.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    spec = ', '.join(str(axis or '-') for axis in placed.spec) or 'replicated'
    rows.append((name, str(list(leaf.shape)), spec, f'{num_bytes:,}'))
  return table(('parameter', 'shape', 'spec', 'bytes a device'), rows)
