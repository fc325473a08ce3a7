"""Plans a complete study on hardware that is not here: one compiled program for all runs that share it.

The job plan calls `make`. Runs that differ in seed, learning rate, schedule, length or data run the same program, so
the 3 final runs and the 4 learning rates of a dataset are compiled once. Stages whose runs depend on results are
planned as if each first choice were the best.
"""
from __future__ import annotations

import collections
import dataclasses
import hashlib
from typing import Any, NamedTuple

from vit_jax.config import check, durations, schema
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.jobs import build
from vit_jax.plan import plan as plans
from vit_jax.plan import table, topologies
from vit_jax.record import console, run_directory, storage

HEAD = ('program of', 'runs', 'px', 'batch', 'steps in total', 'peak GiB', 'step ms', 'collectives ms', 'core-days',
        'with collectives')
SAME_CLASSES = 1_000
"""Heads of up to so many classes are planned with as many: they are below 2 % of a network, and one program."""
_STEP, _STEP_WITH_COLLECTIVES = 'estimated_step_ms', 'step_ms_with_collectives'  # figures of a plan


class Program(NamedTuple):
  """A program that some runs share: the config that is compiled, the numbers of its data, and the steps of each run."""
  config: schema.Config
  numbers: build.Numbers
  steps: dict[str, int]

  @property
  def total_steps(self) -> int:
    return sum(self.steps.values())


class Row(NamedTuple):
  """A program with the content of its `plan.json`; None if it cannot run because of a `problem`."""
  program: Program
  plan: dict[str, Any] | None
  problem: str

  def core_days(self, figure: str) -> float | None:
    """Returns the core-days of all runs, by the plan's figure of this name, the ms of a step; None if it has none."""
    step_ms = self.plan[figure] if self.plan else None
    if self.plan is None or step_ms is None:
      return None
    return step_ms / 1e3 * self.program.total_steps * self.plan['num_cores'] / plans.SECONDS_A_DAY


def expand(study: schema.Study) -> tuple[dict[str, schema.Config], str]:
  """Returns all runs of a study by name, and a note on the stages that are not known before there are results."""
  configs: dict[str, schema.Config] = {}
  for number, stage in enumerate((lambda results: study.runs, *study.then), start=1):
    results = {name: schema.Result(config, f'runs/{name}', 0, 0., 0, 0., collections.defaultdict(float), 0.)
               for name, config in configs.items()}  # with all metrics 0
    try:
      configs |= stage(results)
    except UserError as error:
      return configs, f'Stage {number} is only known when the runs before it are finished: {error}'
  return configs, ''


def key(config: schema.Config, numbers: build.Numbers) -> str:
  """Returns a text that is equal for runs of the same program: the config without what changes only numbers in it."""
  data = dataclasses.replace(config.data, source='', train_split='', eval_split='', data_dir='', num_examples=0,
                             num_classes=0)
  schedule = dataclasses.replace(config.optimizer.schedule, warmup='', cooldown='', timescale='', end_lr=0.)
  optimizer = dataclasses.replace(config.optimizer, lr=0., schedule=schedule)
  train = dataclasses.replace(config.train, log_every='')
  same = dataclasses.replace(config, name='', length='', seed=0, init_from='', data=data, optimizer=optimizer,
                             train=train, evals={}, checkpoints=schema.Checkpoints())
  return repr((same, numbers.num_classes, numbers.in_memory))


def _numbers(config: schema.Config) -> build.Numbers:
  """Returns the numbers of the data, with the classes that the head is planned with."""
  numbers = plans.numbers(config)
  has_class_weights = bool(getattr(config.objective, 'class_weights', ()))  # one for each class
  return numbers if has_class_weights else numbers._replace(num_classes=max(numbers.num_classes, SAME_CLASSES))


def programs(configs: dict[str, schema.Config]) -> list[Program]:
  """Returns the distinct programs of these runs, in the order of their first runs."""
  program_by_key: dict[str, Program] = {}
  for name, config in configs.items():
    check.check(config)
    numbers = _numbers(config)
    lengths = durations.lengths(config.length, num_examples=numbers.num_examples, batch_size=config.batch_size)
    program = program_by_key.setdefault(key(config, numbers), Program(config, numbers, {}))
    program.steps[name] = lengths.total_steps
  return list(program_by_key.values())


def make(study: schema.Study, topology: str, *, to: storage.Path | None, is_quick: bool,
         slices: int = 0) -> tuple[str, dict[str, Any]]:
  """Plans a study: its table as text, and its content for `plan.json`.

  Args:
    study: its runs are checked.
    topology: name of the hardware, all of which each run gets.
    to: keeps the plan of each program in `programs`; a program that is there is not compiled again, unless the flags
      or versions of the compiler are others.
    is_quick: see `quick`.
    slices: number of such slices; 0 = as in the config of each run.
  """
  configs, note = expand(study)
  hardware = topologies.parse(topology, slices=slices or 1)
  rows = []
  for program in programs(configs):
    row = _plan(program, topology, to, is_quick=is_quick, slices=slices)
    rows.append(row)
    console.end_stage()
    print(f'  {next(iter(program.steps))}: {row.problem or "planned"}', flush=True)
  text = '\n\n'.join(filter(None, [
      f'# Plan: {study.name}, {len(configs)} runs of {len(rows)} programs on {hardware.label}',
      table.table(HEAD, [*map(_cells, rows), _total(rows)]), *_problems(rows),
      'Not measured. Core-days are those of the steps of all runs, one run at a time on all devices, without '
      'collectives and with those that the step waits for; evaluation and start are not in them.', note]))
  return text, {'study': study.name, 'topology': hardware.name, 'note': note, 'programs': [
      {'runs': row.program.steps, 'plan': row.plan, 'problem': row.problem, 'core_days': row.core_days(_STEP),
       'core_days_with_collectives': row.core_days(_STEP_WITH_COLLECTIVES)} for row in rows]}


def _plan(program: Program, topology: str, to: storage.Path | None, *, is_quick: bool, slices: int) -> Row:
  """Returns the plan of a program: the one in the directory `to` if it is there, else a new one."""
  one_slice = topologies.parse(topology)
  compiler = topologies.missing(one_slice), topologies.environment(one_slice), plans.versions(), slices
  content = repr((key(program.config, program.numbers), topology, is_quick, compiler))
  name = hashlib.sha256(content.encode()).hexdigest()[:16]
  path = None if to is None else to / 'programs' / f'{name}.json'
  if path is not None and path.is_file():
    return Row(program, read(path), '')
  try:
    hardware = topologies.for_run(program.config, topology, slices)
    subject = plans.lay_out(plans.Subject(program.config, hardware, *program.numbers))
    plan = table.to_json(plans.make(subject, is_quick=is_quick))
  except UserError as error:
    return Row(program, None, str(error))
  if path is not None:
    path.parent.mkdir(parents=True, exist_ok=True)
    run_directory.write_json(path, plan)
  return Row(program, plan, '')


def read(path: storage.Path) -> dict[str, Any]:
  """Returns the plan of a program that was written before. Raises UserError if it is damaged."""
  plan = documents.read(path, advice='Remove the file, and run the same command again.')
  for name in ('peak_gib_per_device', 'estimated_step_ms', 'collectives_ms', 'step_ms_with_collectives'):
    if plan.field(name).value is not None:
      plan.field(name).number()
  plan.field('num_cores').whole(1)
  plan.field('warnings').texts()
  return plan.object()


def _cells(row: Row) -> tuple[str, ...]:
  """Returns the cells of a row of the table; '–' for figures that are not known."""
  program, plan = row.program, row.plan or {}
  figures = [(plan.get('peak_gib_per_device'), 2), (plan.get(_STEP), 1), (plan.get('collectives_ms'), 1),
             (row.core_days(_STEP), 1), (row.core_days(_STEP_WITH_COLLECTIVES), 1)]
  return (next(iter(program.steps)), str(len(program.steps)), str(program.config.image_px[0]),
          f'{program.config.batch_size:,}', f'{program.total_steps:,}',
          *('–' if value is None else f'{value:,.{digits}f}' for value, digits in figures))


def _total(rows: list[Row]) -> tuple[str, ...]:
  """Returns the last row: the sum over all runs that have a plan and fit."""
  num_runs = sum(len(row.program.steps) for row in rows)
  num_steps = sum(row.program.total_steps for row in rows)
  days, days_with_collectives = (sum(row.core_days(figure) or 0. for row in rows)
                                 for figure in (_STEP, _STEP_WITH_COLLECTIVES))
  return ('all', str(num_runs), '', '', f'{num_steps:,}', '', '', '', f'{days:,.1f}', f'{days_with_collectives:,.1f}')


def _problems(rows: list[Row]) -> list[str]:
  """Returns the programs that are missing in the sum, and the warnings of all programs, each once."""
  missing = [f'**Not in the sum**: {", ".join(row.program.steps)}. {row.problem or "It does not fit."}' for row in rows
             if row.core_days(_STEP) is None]
  warnings = dict.fromkeys(warning for row in rows if row.plan for warning in row.plan['warnings'])
  return [*missing, *(f'**Warning**: {warning}' for warning in warnings)]
