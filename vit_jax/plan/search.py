"""`--search`: the fastest accumulation, rematerialization, execution and sharding that fit.

All combinations are sorted by an estimate of their speed, and those whose state and saved activations alone are too
large are dropped. The rest is compiled in that order.
"""
from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.jobs import build
from vit_jax.parallel import layout
from vit_jax.plan import plan as plans
from vit_jax.plan import table
from vit_jax.record import console

MAX_COMPILES = 10
ENOUGH = 2
"""Number of fitting candidates after which the search ends; they are tried in order of expected speed."""


class Candidate(NamedTuple):
  """One combination, with its step time and memory by arithmetic."""
  accumulate: int
  remat: schema.Remat
  execution: schema.Execution | None
  fsdp: int
  expected_ms: float
  expected_gib: float

  def flags(self) -> str:
    execution = f'--config.model.execution={self.execution.value} ' if self.execution else ''
    return (f'--config.train.accumulate={self.accumulate} --config.model.remat={self.remat.value} {execution}'
            f'--config.mesh.fsdp={self.fsdp} --config.mesh.data=-1')


class Tried(NamedTuple):
  """A candidate and its plan; None if it was skipped, for the reason in `note`."""
  candidate: Candidate
  plan: plans.Plan | None
  note: str

  @property
  def step_ms(self) -> float | None:
    """Time with exposed collectives, so that sharding is compared with its cost."""
    return None if self.plan is None else self.plan.step_ms_with_collectives


def candidates(plan: plans.Plan) -> list[Candidate]:
  """Returns all combinations that the batch and the devices allow, in order of expected speed."""
  config, n = plan.parts.config, plan.subject.topology.num_devices
  shards = n // config.mesh.tensor if config.mesh.tensor > 0 else n
  possible = layout.fsdp_sizes(layout.put(config, {'mesh.fsdp': 0, 'mesh.data': -1}), plan.subject.topology.hardware,
                               max(1, config.mesh.tensor))
  odd = {f for f in possible if f & (f - 1)}  # of 12 devices, for example
  sizes = sorted(f for f in {1, 8, 32, 128, max(1, config.mesh.fsdp), *odd}
                 if shards % f == 0 and shards // f % config.mesh.slices == 0)
  steps = [a for a in (1, 2, 4, 8, 16) if config.batch_size % (shards * a) == 0]
  held = {fsdp: _held_bytes(plan, fsdp) for fsdp in sizes}
  if config.model.has_batch_norm:
    steps = [a for a in steps if a == 1]
  kept = {remat: build.kept_bytes(plan.parts, layout.put(config, {'model.remat': remat}).model)
          for remat in config.model.remats}
  found = [_expect(plan, *choice, held=held[choice[-1]], kept=kept[choice[1]])
           for choice in itertools.product(steps, config.model.remats, config.model.executions, sizes)]
  return sorted(found, key=lambda c: (c.expected_ms, c.expected_gib))


def _held_bytes(plan: plans.Plan, fsdp: int) -> int:
  """Returns the bytes of state and gradients on one device, exactly.

  A dimension that fsdp does not divide is replicated.
  """
  own_config = plan.parts.config
  config = layout.put(own_config, {'train.accumulate': 1, 'mesh.data': -1, 'mesh.fsdp': fsdp,
                                   'mesh.tensor': max(1, own_config.mesh.tensor)})
  subject = plan.subject._replace(config=config)
  own = plans.Plan(subject, plans.abstract_parts(subject), None, '').memory
  return sum(own[part] for part in ('parameters', 'optimizer', 'extra', 'gradients'))


def _expect(plan: plans.Plan, accumulate: int, remat: schema.Remat, execution: schema.Execution | None, fsdp: int, *,
            held: int, kept: int) -> Candidate:
  """Computes time and memory by arithmetic; `kept` bytes of an image."""
  config, topology = plan.parts.config, plan.subject.topology
  params = trees.num_bytes(plan.parts.program.abstract_state.params)
  shards = topology.num_devices // max(1, config.mesh.tensor)
  # All-reduce of the gradients, or gathering bf16 weights twice a microbatch and scattering gradients once.
  sent = 2 * params if fsdp == 1 else params * accumulate + params
  seconds = plan.flops_per_step / topology.num_devices / plan.dtype_flops / plan.assumed_mfu
  seconds *= layout.REMAT_TIME[remat] * (layout.EXECUTION_TIME[execution] if execution else 1.)
  seconds *= 1 + layout.MICROBATCH_TIME * (accumulate - 1)
  return Candidate(accumulate, remat, execution, fsdp, 1e3 * (seconds + sent / topology.chip.ring_bytes_s),
                   (held + kept * config.batch_size // shards // accumulate) / plans.GIB)


def search(plan: plans.Plan) -> list[Tried]:
  """Compiles scanned candidates, which compile fastest, until enough fit; then the best of them unrolled.

  Raises:
    UserError: the compiler for the hardware is not installed.
  """
  if plan.reason:
    raise UserError(f'--search: expected the compiler for the hardware. {plan.reason}')
  tried: list[Tried] = []
  ordered = candidates(plan)
  for one in (c for c in ordered if c.execution is not schema.Execution.UNROLLED):
    fitting = sum(t.plan is not None and t.plan.fits for t in tried)
    if fitting >= ENOUGH or sum(t.plan is not None for t in tried) >= MAX_COMPILES:
      break
    if one.expected_gib > plan.subject.topology.chip.hbm_gib:
      tried.append(Tried(one, None, f'skipped: {one.expected_gib:.1f} GiB by arithmetic'))
      continue
    tried.append(_try(plan, one))
  if found := best(tried):
    unrolled = schema.Execution.UNROLLED
    tried += [_try(plan, c) for c in ordered if c.execution is unrolled and c[:2] == found.candidate[:2]
              and c.fsdp == found.candidate.fsdp]
  return tried


def _try(plan: plans.Plan, one: Candidate) -> Tried:
  """Compiles a candidate and prints the result, because compiling takes minutes."""
  made = plans.make(plan.subject._replace(config=_with(plan.parts.config, one)))
  lost = made.answer.overflow if made.answer else None
  note = plans.overflow_text(lost) if lost else 'fits' if made.fits else 'does not fit'
  console.end_stage()
  print(f'  {_name(one)}: {note}', flush=True)
  return Tried(one, made, note)


def _with(config: schema.Config, one: Candidate) -> schema.Config:
  return layout.put(config, {
      'mesh.data': -1, 'mesh.fsdp': one.fsdp, 'mesh.tensor': max(1, config.mesh.tensor),
      'train.accumulate': one.accumulate, 'model.remat': one.remat, 'model.execution': one.execution})


def _name(one: Candidate) -> str:
  execution = f'{one.execution.value}, ' if one.execution else ''
  return f'accumulate {one.accumulate}, remat {one.remat.value}, {execution}fsdp {one.fsdp}'


def best(tried: list[Tried]) -> Tried | None:
  """Returns the fastest candidate that fits."""
  fitting = [t for t in tried if t.step_ms is not None]
  return min(fitting, key=lambda t: t.step_ms or 0., default=None)


def render(tried: list[Tried]) -> str:
  """Returns a table of what was tried, and the settings of the fastest."""
  rows = [(_name(t.candidate), f'{t.plan.peak_gib:.2f}' if t.plan else '-',
           '-' if t.step_ms is None else f'{_more(t)}{t.step_ms:.1f}', t.note) for t in tried]
  compiled = sum(t.plan is not None for t in tried)
  parts = ['\n## Search (not measured)',
           table.table(('settings', 'peak GiB', 'ms a step with collectives', 'verdict'), rows)]
  found = best(tried)
  if found is None:
    return '\n\n'.join([*parts, f'None of the {compiled} compiled candidates fits. Use more devices, a smaller '
                                'batch_size or a smaller model.'])
  return '\n\n'.join([*parts, f'The fastest of {compiled} compiled candidates that fits: {_name(found.candidate)}; '
                              f'{_more(found)}{found.step_ms:.1f} ms a step.\n{found.candidate.flags()}'])


def _more(one: Tried) -> str:
  """Returns the prefix of a time that does not include all kernels."""
  return '> ' if one.plan and one.plan.uncounted else ''


def to_json(tried: list[Tried]) -> dict[str, Any]:
  """Returns what `plan.json` has of a search: everything tried, and the flags of the fastest that fits.

  The flags are '' if none fits.
  """
  found = best(tried)
  return {'flags': found.candidate.flags() if found else '', 'tried': [
      {'settings': _name(t.candidate), 'fits': bool(t.plan and t.plan.fits), 'note': t.note,
       'peak_gib_per_device': t.plan.peak_gib if t.plan else None, 'step_ms_with_collectives': t.step_ms}
      for t in tried]}
