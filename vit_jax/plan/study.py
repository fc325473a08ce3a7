"""The cost of a complete study on hardware that is not here: one compiled program for all runs that share it.

Runs that differ in seed, learning rate, schedule, length or data run the same program; so the 3 final runs and the 4
learning rates of a dataset are compiled once. Stages whose runs depend on results are planned as if each first choice
were the best.
"""
from __future__ import annotations

import collections
import dataclasses
import hashlib
from typing import Any, NamedTuple

from vit_jax.config import check, durations, schema
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.plan import plan as plans
from vit_jax.plan import table, topologies
from vit_jax.record import console, run_directory, storage

HEAD = ('program of', 'runs', 'px', 'batch', 'steps in total', 'peak GiB', 'step ms', 'collectives ms', 'core-days',
        'with collectives')


SAME_CLASSES = 1_000
"""Heads of up to so many classes are planned with as many: they are below 2 % of a network, and one program."""


class Program(NamedTuple):
  """A program that some runs share: the config that is compiled, its numbers, and the steps of each run."""
  config: schema.Config
  numbers: tuple[int, int, bool]
  steps: dict[str, int]


class Row(NamedTuple):
  """A planned program: the figures of one step, and the cost of all of its runs; None where it cannot run."""
  program: Program
  plan: dict[str, Any] | None
  problem: str

  @property
  def total_steps(self) -> int:
    return sum(self.program.steps.values())

  def core_days(self, step: str) -> float | None:
    """Returns the core-days of all runs, by the plan's figure of this name for one step."""
    if self.plan is None or self.plan[step] is None:
      return None
    return self.plan[step] / 1e3 * self.total_steps * self.plan['num_cores'] / plans.SECONDS_A_DAY


def expand(study: schema.Study) -> tuple[dict[str, schema.Config], str]:
  """Returns all runs of a study, and a note on the stages that are not known before there are results."""
  found: dict[str, schema.Config] = {}
  for number, stage in enumerate((lambda results: study.runs, *study.then)):
    results = {name: schema.Result(one, f'runs/{name}', 0, 0., 0, 0., collections.defaultdict(float), 0.)
               for name, one in found.items()}
    try:
      found |= stage(results)
    except UserError as error:
      return found, f'Stage {number + 1} is only known when the runs before it are finished: {error}'
  return found, ''


def key(config: schema.Config, numbers: tuple[int, int, bool]) -> str:
  """Returns a text that is equal for runs of the same program.

  It is the config without what changes only numbers in it.
  """
  data = dataclasses.replace(config.data, source='', train_split='', eval_split='', data_dir='', num_examples=0,
                             num_classes=0)
  schedule = dataclasses.replace(config.optimizer.schedule, warmup='', cooldown='', timescale='', end_lr=0.)
  optimizer = dataclasses.replace(config.optimizer, lr=0., schedule=schedule)
  train = dataclasses.replace(config.train, log_every='')
  same = dataclasses.replace(config, name='', length='', seed=0, init_from='', data=data, optimizer=optimizer,
                             train=train, evals={}, checkpoints=schema.Checkpoints())
  return repr((same, *numbers[1:]))


def _numbers(config: schema.Config) -> tuple[int, int, bool]:
  """Returns examples, classes that the head is planned with, and whether images come from memory."""
  num_examples, num_classes, in_memory = plans.numbers(config)
  is_fixed = bool(getattr(config.objective, 'class_weights', ()))  # there is one for each class
  return num_examples, num_classes if is_fixed else max(num_classes, SAME_CLASSES), in_memory


def programs(configs: dict[str, schema.Config]) -> list[Program]:
  """Returns the distinct programs of these runs, in the order of their first runs."""
  found: dict[str, Program] = {}
  for name, config in configs.items():
    check.check(config)
    numbers = _numbers(config)
    steps = durations.lengths(config.length, num_examples=numbers[0], batch_size=config.batch_size).total_steps
    found.setdefault(key(config, numbers), Program(config, numbers, {})).steps[name] = steps
  return list(found.values())


def make(study: schema.Study, topology: str, *, to: storage.Path | None, is_quick: bool,
         slices: int = 0) -> tuple[str, dict[str, Any]]:
  """Plans a study: its table as text, and its content for `plan.json`.

  Args:
    study: its runs are checked.
    topology: name of the hardware that each of its runs gets in turn.
    to: keeps the plan of each program in `programs`; a program that is there is not compiled again, unless the flags
      or versions of the compiler are others.
    is_quick: see `quick`.
    slices: number of such slices; 0 = as in the config of each run.
  """
  configs, note = expand(study)
  there = topologies.parse(topology, slices=slices or 1)
  rows = []
  for program in programs(configs):
    rows.append(_row(program, topology, to, is_quick=is_quick, slices=slices))
    console.end_stage()
    print(f'  {next(iter(program.steps))}: {rows[-1].problem or "planned"}', flush=True)
  text = '\n\n'.join(filter(None, [
      f'# Plan: {study.name}, {len(configs)} runs of {len(rows)} programs on {there.label}',
      table.table(HEAD, [*map(_cells, rows), _total(rows)]), *_problems(rows),
      'Not measured. Core-days are those of the steps of all runs, one run at a time on all devices, without '
      'collectives and with those that the step waits for; evaluation and start are not in them.', note]))
  return text, {'study': study.name, 'topology': there.name, 'note': note, 'programs': [
      {'runs': row.program.steps, 'plan': row.plan, 'problem': row.problem,
       'core_days': row.core_days('estimated_step_ms'),
       'core_days_with_collectives': row.core_days('step_ms_with_collectives')} for row in rows]}


def _row(program: Program, topology: str, to: storage.Path | None, *, is_quick: bool, slices: int) -> Row:
  """Returns the plan of a program: the one that `to` has, else a new one."""
  slice_ = topologies.parse(topology)  # other flags, versions or compilers give other figures
  by = topologies.missing(slice_), topologies.environment(slice_), plans.versions(), slices
  name = hashlib.sha256(repr((key(program.config, program.numbers), topology, is_quick, by)).encode()).hexdigest()[:16]
  path = None if to is None else to / 'programs' / f'{name}.json'
  if path is not None and path.is_file():
    return Row(program, read(path), '')
  try:
    there = topologies.for_run(program.config, topology, slices)
    subject = plans.lay_out(plans.Subject(program.config, there, *program.numbers))
    content = table.to_json(plans.make(subject, is_quick=is_quick))
  except UserError as error:
    return Row(program, None, str(error))
  if path is not None:
    path.parent.mkdir(parents=True, exist_ok=True)
    run_directory.write_json(path, content)
  return Row(program, content, '')


def read(path: storage.Path) -> dict[str, Any]:
  """Returns the plan of a program that was written before. Raises UserError if it is damaged."""
  found = documents.read(path, advice='Remove the file, and run the same command again.')
  for name in ('peak_gib_per_device', 'estimated_step_ms', 'collectives_ms', 'step_ms_with_collectives'):
    if found.field(name).value is not None:
      found.field(name).number()
  found.field('num_cores').whole(1)
  found.field('warnings').texts()
  return found.object()


def _cells(row: Row) -> tuple[str, ...]:
  def number(value: float | None, digits: int) -> str:
    return '–' if value is None else f'{value:,.{digits}f}'

  plan, config = row.plan or {}, row.program.config
  return (next(iter(row.program.steps)), str(len(row.program.steps)), str(config.image_px[0]),
          f'{config.batch_size:,}', f'{row.total_steps:,}', number(plan.get('peak_gib_per_device'), 2),
          number(plan.get('estimated_step_ms'), 1), number(plan.get('collectives_ms'), 1),
          number(row.core_days('estimated_step_ms'), 1), number(row.core_days('step_ms_with_collectives'), 1))


def _total(rows: list[Row]) -> tuple[str, ...]:
  """Returns the sum over all runs that have a plan and fit."""
  step, both = ([row.core_days(name) or 0. for row in rows] for name in ('estimated_step_ms',
                                                                         'step_ms_with_collectives'))
  return ('all', str(sum(len(row.program.steps) for row in rows)), '', '', f'{sum(row.total_steps for row in rows):,}',
          '', '', '', f'{sum(step):,.1f}', f'{sum(both):,.1f}')


def _problems(rows: list[Row]) -> list[str]:
  """Returns what the sum does not have, and the warnings of all programs, each once."""
  missing = [f'**Not in the sum**: {", ".join(row.program.steps)}. {row.problem or "It does not fit."}' for row in rows
             if row.core_days('estimated_step_ms') is None]
  warned = {one: None for row in rows if row.plan for one in row.plan['warnings']}
  return [*missing, *(f'**Warning**: {one}' for one in warned)]
