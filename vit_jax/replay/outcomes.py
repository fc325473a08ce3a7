"""Reads the outcome of a run, an evaluation or a study from a directory, and compares an outcome with a record.

`recording` reads an `Outcome` (`read`) and makes a record of the outcome. `job` runs the commands of a record, reads
their outcome, and compares it with the record (`compare`): the result is EQUAL, CLOSE, or the differences.
"""
from __future__ import annotations

import enum
import math
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.core import documents
from vit_jax.core.documents import Field
from vit_jax.core.errors import UserError
from vit_jax.evaluate.results import Fingerprint
from vit_jax.record import clock, machine, reader
from vit_jax.replay.records import Record

_SUMMED_COSTS = ('processor_s', 'training_processor_s')  # costs that are added up over the runs of a study


class Outcome(NamedTuple):
  """The result of a run, an evaluation or a study, with the commands, code and machine that produced the result.

  kind: `train` or `evaluation`.
  values: metrics at the end, by name. For a study, the names are `RUN METRIC`, `median METRIC` over all runs, and
    `median GROUP METRIC`, `lowest GROUP METRIC` and `highest GROUP METRIC` over runs that differ only in the seed.
  params_digest: digest of the parameters; '' for a study.
  commands: the arguments of each command, without the name of the program.
  commit: commit of the code; '' = not known. For a study, `commit`, `machine` and `config_folder` are of the last run.
  machine: see `machine.describe`.    config_folder: the directory with `config.json`.
  checkpoints: `params_digest` by step; for a study by the name of the run.
  history: metrics during training, `METRIC at STEP` and `best METRIC`; for a study `RUN METRIC at STEP` and so on.
  cost: `processor_s` and `training_processor_s` (of steps and their data), and, for a run with the same number of
    devices at all starts, `exaflops` of training, `seconds` of all starts and `devices`; without unknown costs.
  data: the fingerprint of each split that was read, by 'SOURCE SPLIT'.
  """
  kind: str
  values: dict[str, float]
  params_digest: str
  commands: tuple[tuple[str, ...], ...]
  commit: str
  machine: dict[str, Any]
  config_folder: pathlib.Path
  checkpoints: dict[str, str] = {}
  history: dict[str, float] = {}
  cost: dict[str, float] = {}
  data: dict[str, Fingerprint] = {}


def read(path: pathlib.Path) -> Outcome:
  """Returns the outcome in a run directory, in an `evaluate.json` or its directory, or in the directory of a study.

  Raises UserError if there is no outcome, for example because a run has not ended.
  """
  if (path / 'final.json').is_file():
    return _read_run(path)
  file = path if path.name == 'evaluate.json' else path / 'evaluate.json'
  if file.is_file():
    results = documents.read(file, expected='results as JSON')
    return Outcome('evaluation', _metrics(results), results.field('params_digest', default='').text(),
                   *_origin(results), file.parent, cost=_costs(results, 'processor_s'), data=_fingerprints(results))
  if run_by_name := {final.parent.name: _read_run(final.parent) for final in sorted(path.glob('runs/*/final.json'))}:
    return _summarize_study(run_by_name)
  raise UserError(f'{path}: expected the directory of a run that has ended, or an evaluate.json, got neither. Run the '
                  'train or evaluate command to its end first.')


def _read_run(path: pathlib.Path) -> Outcome:
  """Returns the outcome in the directory of a run that has ended."""
  final = documents.read(path / 'final.json', expected='results as JSON')
  run = reader.read(path, most_rows=1)
  starts = [Field(event, str(path / reader.FILE)) for event in run.events if event['event'] == 'start']
  last_start = starts[-1] if starts else Field({}, str(path / reader.FILE))
  checkpoints = {str(event['step']): str(event['params_digest']) for event in run.events
                 if event['event'] == 'checkpoint' and {'step', 'params_digest'} <= event.keys()}
  cost: dict[str, float] = {}
  if final.field('starts', default=1).whole() == clock.count_starts(run.events):  # the costs of all starts are known
    cost = _costs(final, *_SUMMED_COSTS)
    if len({repr(start.value.get('devices')) for start in starts}) == 1:
      cost |= _costs(final, 'exaflops', 'seconds')
      if devices := last_start.field('devices', default=0).whole():
        cost['devices'] = devices
  return Outcome('train', _metrics(final), final.field('params_digest').text(), *_origin(last_start), path, checkpoints,
                 _history(run.rows), cost, _fingerprints(final))


def _metrics(results: Field) -> dict[str, float]:
  """Returns the metrics by name, without metrics of single seeds; values that were not finite are NaN."""
  metrics = results.field('metrics')
  return {name: metrics.field(name, default=math.nan).number() for name in metrics.object() if '_seed' not in name}


def _origin(content: Field) -> tuple[tuple[tuple[str, ...], ...], str, dict[str, Any]]:
  """Returns the fields `commands`, `commit` and `machine` of an outcome."""
  return ((content.field('command', default=()).texts()[1:],), content.field('commit', default='').text(),
          content.object_or_empty('machine').object())


def _costs(content: Field, *names: str) -> dict[str, float]:
  """Returns the known costs, by name: those that are present and not 0."""
  costs = {name: content.field(name, default=0.).number(0) for name in names}
  return {name: cost for name, cost in costs.items() if cost}


def _fingerprints(results: Field) -> dict[str, Fingerprint]:
  """Returns the fingerprints of the data by 'SOURCE SPLIT'."""
  return {name: Fingerprint(data.field('examples').whole(), data.field('digest').text())
          for name, data in results.object_or_empty('data').fields()}


def _history(rows: Sequence[reader.Row]) -> dict[str, float]:
  """Returns `METRIC at STEP` of all evaluations, and `best METRIC`, the largest value of each metric."""
  history = {f'{name} at {row["step"]:.0f}': value for row in rows for name, value in row.items()
             if not name.startswith('train/') and name not in ('step', 'time_s')}
  best: dict[str, float] = {}
  for name_at_step, value in history.items():
    name = f'best {name_at_step.rpartition(" at ")[0]}'
    best[name] = max(value, best.get(name, value))
  return history | best


def _summarize_study(run_by_name: Mapping[str, Outcome]) -> Outcome:
  """Returns the outcome of a study from the outcomes of the runs."""
  runs = [*run_by_name.values()]
  last = runs[-1]
  groups: dict[str, list[Outcome]] = {}  # runs that differ only in the seed, by name without the seed
  for name, run in run_by_name.items():
    groups.setdefault(re.sub(r'_seed\d+', '', name), []).append(run)
  values = {f'{name} {metric}': value for name, run in run_by_name.items() for metric, value in run.values.items()}
  values |= {f'median {metric}': statistics.median(numbers) for metric, numbers in _shared_metrics(runs).items()}
  for name, group in groups.items():
    if len(groups) > 1 and len(group) > 1:  # else the values are those of all runs, or of a single run
      for metric, numbers in _shared_metrics(group).items():
        values |= {f'median {name} {metric}': statistics.median(numbers), f'lowest {name} {metric}': min(numbers),
                   f'highest {name} {metric}': max(numbers)}
  checkpoints = {name: run.params_digest for name, run in run_by_name.items()}
  history = {f'{name} {metric}': value for name, run in run_by_name.items() for metric, value in run.history.items()}
  cost = {name: sum(run.cost[name] for run in runs) for name in _SUMMED_COSTS if all(name in run.cost for run in runs)}
  commands = tuple(words for run in runs for words in run.commands)
  return Outcome('train', values, '', commands, last.commit, last.machine, last.config_folder, checkpoints, history,
                 cost, last.data)


def _shared_metrics(runs: Sequence[Outcome]) -> dict[str, list[float]]:
  """Returns the values of all runs for each metric that all runs have, sorted by the name of the metric."""
  return {metric: [run.values[metric] for run in runs]
          for metric in sorted(set.intersection(*(set(run.values) for run in runs)))}


class Status(enum.IntEnum):
  """The exit statuses of a replay, in addition to those of every job."""
  EQUAL = 0  # the result is equal or close
  RESULT = 3  # the result differs, although machine and packages compute the same bits
  MACHINE = 4  # the result and the machine or the packages differ
  DATA = 5  # data or weights differ; nothing ran
  CONFIG = 6  # settings differ
  MISSING = 7  # data or weights are not given; nothing ran


class Verdict(NamedTuple):
  """The result of a comparison: a status, lines about all differences, and whether all is equal bit for bit."""
  status: Status
  lines: list[str]
  is_equal: bool = False


def compare(record: Record, outcome: Outcome) -> Verdict:
  """Compares values and digests of parameters with the record, bit for bit; if they differ, values by tolerances.

  The tolerance is `same` on a machine that computes the same bits, else `elsewhere`. If `same` is 0, only equal values
  and digests pass on the same machine.
  """
  machine_changes = machine.differences(record.made.get('machine', {}), outcome.machine)
  is_same_machine = bool(record.made.get('machine')) and not machine_changes
  changes = [f'  {name}: {before} -> {now}' for name, (before, now) in machine_changes.items()]
  commit = record.made.get('commit', '')
  if commit != outcome.commit:
    changes.append(f'  commit: {commit[:12] or "unknown"} -> {outcome.commit[:12] or "unknown"}')
  if changes:
    changes.insert(0, 'Changed since the record was made:')
  digests = {'at the end': (record.params_digest, outcome.params_digest)} if record.params_digest else {}
  digests |= {f'at {name}': (digest, outcome.checkpoints.get(name, '')) for name, digest in record.checkpoints.items()}
  not_equal = _differing_values(record, outcome, max_differences={}) + [
      f'  parameters {when}: {before[:12]} -> {now[:12] or "not saved"}'
      for when, (before, now) in digests.items() if before != now]
  num_values = f'{len(record.values)} {"values" if len(record.values) > 1 else "value"}'
  if digests and not not_equal:
    num_digests = f'{len(digests)} {"digest" if len(digests) == 1 else "digests"} of parameters'
    return Verdict(Status.EQUAL, [f'EQUAL: {num_values} and {num_digests}, bit for bit.', *changes], is_equal=True)
  tolerance = record.tolerance
  limit = tolerance.same if is_same_machine else tolerance.elsewhere
  limit_by_name = {name: min(limit, tolerance.values.get(name, limit)) for name in record.values}
  reason = f' ({tolerance.reason})' if tolerance.reason and limit else ''
  not_close = not_equal if is_same_machine and not limit else _differing_values(record, outcome, limit_by_name)
  if not_close:
    return Verdict(Status.RESULT if is_same_machine else Status.MACHINE,
                   [f'DIFFERS from the record{reason}:', *not_close, *changes])
  limits = f'{min(limit_by_name.values()):.2g}', f'{max(limit_by_name.values()):.2g}'
  return Verdict(Status.EQUAL, [f'CLOSE: {num_values} within {" to ".join(dict.fromkeys(limits))}{reason}. Not equal:',
                                *(not_equal or ['  no digest of parameters was recorded']), *changes])


def _differing_values(record: Record, outcome: Outcome, max_differences: Mapping[str, float]) -> list[str]:
  """Returns a line for each value that differs from the record by more than the limit, which is 0 for other names."""
  measured = outcome.history | outcome.values
  lines = []
  for name, value in record.values.items():
    limit = max_differences.get(name, 0.)
    if name not in measured:
      lines.append(f'  value {name}: {value!r} -> not measured')
    elif not abs(measured[name] - value) <= limit:  # also if the difference is NaN
      allowed = f', within {limit:.2g} allowed' if limit else ''
      lines.append(f'  value {name}: {value!r} -> {measured[name]!r}, by {measured[name] - value:+.3g}{allowed}')
  return lines
