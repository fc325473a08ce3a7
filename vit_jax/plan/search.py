"""`--search`: finds the fastest accumulation, rematerialization, execution and sharding that fit.

The job plan calls `search` with the plan of the config, and then `render` and `to_json`. All combinations
(`candidates`) are sorted by an estimate of their speed, and compiled in that order. Those whose state and saved
activations alone are too large are skipped.
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
  """One combination of settings, with step time and memory by arithmetic.

  execution: None for a network without that setting.
  tensor: the size in place of -1, as `data` takes the rest; None if the config has another one than -1.
  """
  accumulate: int
  remat: schema.Remat
  execution: schema.Execution | None
  fsdp: int
  tensor: int | None
  expected_ms: float
  expected_gib: float

  @property
  def name(self) -> str:
    """The settings in words, such as `accumulate 2, remat full, scan, fsdp 8`."""
    execution = f'{self.execution.value}, ' if self.execution else ''
    return f'accumulate {self.accumulate}, remat {self.remat.value}, {execution}fsdp {self.fsdp}'

  def flags(self) -> str:
    """Returns the flags of a command line that set this combination."""
    execution = f'--config.model.execution={self.execution.value} ' if self.execution else ''
    tensor = f' --config.mesh.tensor={self.tensor}' if self.tensor else ''
    return (f'--config.train.accumulate={self.accumulate} --config.model.remat={self.remat.value} {execution}'
            f'--config.mesh.fsdp={self.fsdp} --config.mesh.data=-1{tensor}')

  def differs_in_execution(self, other: Candidate) -> bool:
    """Returns whether all settings but `execution` are those of another candidate."""
    return (self.accumulate, self.remat, self.fsdp) == (other.accumulate, other.remat, other.fsdp)

  def apply(self, config: schema.Config) -> schema.Config:
    """Returns a config with these settings."""
    return layout.put(config, {
        'mesh.data': -1, 'mesh.fsdp': self.fsdp, 'mesh.tensor': self.tensor or max(1, config.mesh.tensor),
        'train.accumulate': self.accumulate, 'model.remat': self.remat, 'model.execution': self.execution})


class Tried(NamedTuple):
  """A candidate and its plan; None if it was skipped, for the reason in `note`."""
  candidate: Candidate
  plan: plans.Plan | None
  note: str

  @property
  def step_ms(self) -> float | None:
    """Time with exposed collectives, so that sharding is compared with its cost; None if it does not fit."""
    return None if self.plan is None else self.plan.step_ms_with_collectives

  @property
  def fits(self) -> bool:
    return self.plan is not None and self.plan.fits

  @property
  def peak_text(self) -> str:
    """The peak memory in GiB with two decimals; '-' if it was skipped."""
    return '-' if self.plan is None else f'{self.plan.peak_gib:.2f}'

  @property
  def step_text(self) -> str:
    """The time of a step with one decimal, `> ` before it if it does not include all kernels; '-' if not known."""
    if self.plan is None or self.step_ms is None:
      return '-'
    return f'{"> " if self.plan.uncounted else ""}{self.step_ms:.1f}'


def candidates(plan: plans.Plan) -> list[Candidate]:
  """Returns all combinations that the batch and the devices allow, in order of expected speed."""
  config, topology = plan.parts.config, plan.subject.topology
  tensor = plan.parts.mesh.shape['tensor']
  shards = topology.num_devices // tensor
  possible = layout.fsdp_sizes(
      layout.put(config, {'mesh.fsdp': 0, 'mesh.tensor': tensor, 'mesh.data': -1}), topology.hardware, tensor)
  not_powers_of_2 = {size for size in possible if size & (size - 1)}  # of 12 devices, for example
  sizes = sorted(size for size in {1, 8, 32, 128, plan.parts.mesh.shape['fsdp'], *not_powers_of_2}
                 if shards % size == 0 and shards // size % config.mesh.slices == 0)
  accumulations = [1] if config.model.has_batch_norm else [1, 2, 4, 8, 16]
  accumulations = [num for num in accumulations if config.batch_size % (shards * num) == 0]
  state_bytes = {fsdp: _state_bytes(plan, fsdp) for fsdp in sizes}
  image_bytes = {remat: build.kept_bytes(plan.parts, layout.put(config, {'model.remat': remat}).model)
                 for remat in config.model.remats}
  new_tensor = tensor if config.mesh.tensor == -1 else None
  combinations = itertools.product(accumulations, config.model.remats, config.model.executions, sizes)
  expected = []
  for accumulate, remat, execution, fsdp in combinations:
    expected_ms = _expected_ms(plan, accumulate, remat, execution, fsdp)
    num_bytes = state_bytes[fsdp] + image_bytes[remat] * config.batch_size // shards // accumulate
    expected.append(Candidate(accumulate, remat, execution, fsdp, new_tensor, expected_ms, num_bytes / plans.GIB))
  return sorted(expected, key=lambda candidate: (candidate.expected_ms, candidate.expected_gib))


def _state_bytes(plan: plans.Plan, fsdp: int) -> int:
  """Returns the bytes of state and gradients on one device: a dimension that fsdp does not divide is replicated."""
  config = layout.put(plan.parts.config, {'train.accumulate': 1, 'mesh.data': -1, 'mesh.fsdp': fsdp,
                                          'mesh.tensor': plan.parts.mesh.shape['tensor']})
  subject = plan.subject._replace(config=config)
  memory = plans.Plan(subject, plans.abstract_parts(subject), None, '').memory
  return sum(memory[part] for part in ('parameters', 'optimizer', 'extra', 'gradients'))


def _expected_ms(plan: plans.Plan, accumulate: int, remat: schema.Remat, execution: schema.Execution | None,
                 fsdp: int) -> float:
  """Returns the time of a step by arithmetic: products at the assumed MFU, and collectives without overlap."""
  topology = plan.subject.topology
  param_bytes = trees.num_bytes(plan.parts.program.abstract_state.params)
  # All-reduce of the gradients, or gathering bf16 weights twice a microbatch and scattering gradients once.
  sent_bytes = 2 * param_bytes if fsdp == 1 else param_bytes * accumulate + param_bytes
  seconds = plan.flops_per_step / topology.num_devices / plan.dtype_flops / plan.assumed_mfu
  seconds *= layout.REMAT_TIME[remat] * (layout.EXECUTION_TIME[execution] if execution else 1.)
  seconds *= 1 + layout.MICROBATCH_TIME * (accumulate - 1)
  return 1e3 * (seconds + sent_bytes / topology.chip.ring_bytes_s)


def search(plan: plans.Plan) -> list[Tried]:
  """Compiles scanned candidates, which compile fastest, until enough fit; then the best of them unrolled.

  Raises:
    UserError: the compiler for the hardware is not installed.
  """
  if plan.reason:
    raise UserError(f'--search: expected the compiler for the hardware. {plan.reason}')
  tried: list[Tried] = []
  num_compiled = num_fitting = 0
  unrolled = []
  for candidate in candidates(plan):
    if candidate.execution is schema.Execution.UNROLLED:
      unrolled.append(candidate)
    elif num_fitting >= ENOUGH or num_compiled >= MAX_COMPILES:
      continue
    elif candidate.expected_gib > plan.chip.hbm_gib:
      tried.append(Tried(candidate, None, f'skipped: {candidate.expected_gib:.1f} GiB by arithmetic'))
    else:
      tried.append(_try(plan, candidate))
      num_compiled += 1
      num_fitting += tried[-1].fits
  if fastest := best(tried):
    tried += [_try(plan, candidate) for candidate in unrolled if candidate.differs_in_execution(fastest.candidate)]
  return tried


def _try(plan: plans.Plan, candidate: Candidate) -> Tried:
  """Compiles a candidate and prints the result, because compiling takes minutes."""
  candidate_plan = plans.make(plan.subject._replace(config=candidate.apply(plan.parts.config)))
  note = 'fits' if candidate_plan.fits else 'does not fit'
  if overflow := candidate_plan.report.overflow:
    note = plans.overflow_text(overflow)
  console.end_stage()
  print(f'  {candidate.name}: {note}', flush=True)
  return Tried(candidate, candidate_plan, note)


def best(tried: list[Tried]) -> Tried | None:
  """Returns the fastest candidate that fits; None if none fits."""
  fitting = [attempt for attempt in tried if attempt.step_ms is not None]
  return min(fitting, key=lambda attempt: attempt.step_ms or 0., default=None)


def render(tried: list[Tried]) -> str:
  """Returns a table of what was tried, and the settings of the fastest."""
  rows = [(attempt.candidate.name, attempt.peak_text, attempt.step_text, attempt.note) for attempt in tried]
  num_compiled = sum(attempt.plan is not None for attempt in tried)
  fastest = best(tried)
  if fastest is None:
    summary = f'None of the {num_compiled} compiled candidates fits.' if num_compiled else (
        f'None of the {len(tried)} candidates fits by arithmetic, so none was compiled.')
    summary += ' Use more devices, a smaller batch_size or a smaller model.'
  else:
    summary = (f'The fastest of {num_compiled} compiled candidates that fits: {fastest.candidate.name}; '
               f'{fastest.step_text} ms a step.\n{fastest.candidate.flags()}')
  return '\n\n'.join(['\n## Search (not measured)',
                      table.table(('settings', 'peak GiB', 'ms a step with collectives', 'verdict'), rows), summary])


def to_json(tried: list[Tried]) -> dict[str, Any]:
  """Returns the part of `plan.json` about a search: everything tried, and the flags of the fastest; '' if none fits."""
  fastest = best(tried)
  return {'flags': fastest.candidate.flags() if fastest else '', 'tried': [
      {'settings': attempt.candidate.name, 'fits': attempt.fits, 'note': attempt.note,
       'peak_gib_per_device': attempt.plan.peak_gib if attempt.plan else None,
       'step_ms_with_collectives': attempt.step_ms} for attempt in tried]}
