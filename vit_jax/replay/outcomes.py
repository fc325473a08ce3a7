"""The outcome of a run, of an evaluation or of a study: it is read from their directory, and compared with a record.

`recording` reads an `Outcome` (`read`) and writes a record of it. `job` reads the outcome of the commands that it has
run, and compares it with the record (`compare`): EQUAL, CLOSE, or what differs and by how much.
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

_SUMMED_COSTS = ('processor_s', 'training_processor_s')  # over the runs of a study


class Outcome(NamedTuple):
  """The result of a run, an evaluation or a study, and how it was made. Of a study, fields of one run are of the last.

  kind: `train` or `evaluation`.
  values: metrics at the end, by name. Of a study: `RUN METRIC`, `median METRIC` over all runs, and of the runs GROUP
    that differ only in the seed `median GROUP METRIC`, `lowest GROUP METRIC` and `highest GROUP METRIC`.
  params_digest: of the parameters; '' of a study.
  commands: the arguments of each command, without the name of the program.
  commit: of the code; '' = not known.    machine: see `machine.describe`.
  config: the directory with `config.json`.
  checkpoints: `params_digest` by step; of a study by the name of the run.
  history: of evaluations during training, `METRIC at STEP` and `best METRIC`; of a study after the name of the run.
  cost: `processor_s` and `training_processor_s` (of steps and their data); of a run with the same number of devices at
    all its starts also `exaflops` of training, `seconds` of its starts, and `devices`; only those that are known.
  data: the fingerprint of what was read, by 'SOURCE SPLIT'.
  """
  kind: str
  values: dict[str, float]
  params_digest: str
  commands: tuple[tuple[str, ...], ...]
  commit: str
  machine: dict[str, Any]
  config: pathlib.Path
  checkpoints: dict[str, str] = {}
  history: dict[str, float] = {}
  cost: dict[str, float] = {}
  data: dict[str, Fingerprint] = {}


def read(path: pathlib.Path) -> Outcome:
  """Returns the outcome in a run directory, in an `evaluate.json` or its directory, or in the directory of a study.

  Raises:
    UserError: there is none, for example because a run has not ended.
  """
  if (path / 'final.json').is_file():
    return _of_run(path)
  file = path if path.name == 'evaluate.json' else path / 'evaluate.json'
  if file.is_file():
    results = documents.read(file, expected='results as JSON')
    return Outcome('evaluation', _metrics(results), results.field('params_digest', default='').text(),
                   *_origin(results), file.parent, cost=_costs(results, 'processor_s'), data=_fingerprints(results))
  if runs := {final.parent.name: _of_run(final.parent) for final in sorted(path.glob('runs/*/final.json'))}:
    return _of_study(runs)
  raise UserError(f'{path}: expected the directory of a run that has ended, or an evaluate.json, got neither. Run the '
                  'train or evaluate command to its end first.')


def _of_run(path: pathlib.Path) -> Outcome:
  """Returns the outcome in the directory of a run that has ended."""
  final, run = documents.read(path / 'final.json', expected='results as JSON'), reader.read(path, most_rows=1)
  starts = [Field(event, str(path / reader.FILE)) for event in run.events if event['event'] == 'start']
  last_start = starts[-1] if starts else Field({}, str(path / reader.FILE))
  checkpoints = {str(event['step']): str(event['params_digest']) for event in run.events
                 if event['event'] == 'checkpoint' and {'step', 'params_digest'} <= event.keys()}
  cost: dict[str, float] = {}
  if final.field('starts', default=1).whole() == clock.count_starts(run.events):  # else costs of some starts are lost
    cost = _costs(final, *_SUMMED_COSTS)
    if len({repr(start.value.get('devices')) for start in starts}) == 1:
      cost |= _costs(final, 'exaflops', 'seconds')
      if devices := last_start.field('devices', default=0).whole():
        cost['devices'] = devices
  return Outcome('train', _metrics(final), final.field('params_digest').text(), *_origin(last_start), path, checkpoints,
                 _history(run.rows), cost, _fingerprints(final))


def _metrics(results: Field) -> dict[str, float]:
  """Returns the metrics, without those of the single seeds of a mean; values that were not finite are NaN."""
  metrics = results.field('metrics')
  return {name: metrics.field(name, default=math.nan).number() for name in metrics.object() if '_seed' not in name}


def _origin(content: Field) -> tuple[tuple[tuple[str, ...], ...], str, dict[str, Any]]:
  """Returns the fields `commands`, `commit` and `machine` of an outcome."""
  return ((content.field('command', default=()).texts()[1:],), content.field('commit', default='').text(),
          content.part('machine').object())


def _costs(content: Field, *names: str) -> dict[str, float]:
  """Returns the numbers with these names that are known, that is, present and not 0."""
  return {name: number for name in names if (number := content.field(name, default=0.).number(0))}


def _fingerprints(results: Field) -> dict[str, Fingerprint]:
  """Returns the fingerprints of the data by 'SOURCE SPLIT'."""
  return {name: Fingerprint(data.field('examples').whole(), data.field('digest').text())
          for name, data in results.part('data').fields()}


def _history(rows: Sequence[reader.Row]) -> dict[str, float]:
  """Returns `METRIC at STEP` of all evaluations, and `best METRIC`, the largest value of each."""
  history = {f'{name} at {row["step"]:.0f}': value for row in rows for name, value in row.items()
             if not name.startswith('train/') and name not in ('step', 'time_s')}
  best: dict[str, float] = {}
  for name_at_step, value in history.items():
    name = f'best {name_at_step.rpartition(" at ")[0]}'
    best[name] = max(value, best.get(name, value))
  return history | best


def _of_study(runs: Mapping[str, Outcome]) -> Outcome:
  """Returns the outcome of a study from the outcomes of its runs by name."""
  outcomes = [*runs.values()]
  last = outcomes[-1]
  groups: dict[str, list[Outcome]] = {}  # of runs that differ only in the seed
  for name, run in runs.items():
    groups.setdefault(re.sub(r'_seed\d+', '', name), []).append(run)
  values = {f'{name} {metric}': value for name, run in runs.items() for metric, value in run.values.items()}
  values |= {f'median {metric}': statistics.median(numbers) for metric, numbers in _shared_metrics(outcomes).items()}
  for name, group in groups.items() if len(groups) > 1 else ():
    for metric, numbers in _shared_metrics(group).items() if len(group) > 1 else ():
      values |= {f'median {name} {metric}': statistics.median(numbers), f'lowest {name} {metric}': min(numbers),
                 f'highest {name} {metric}': max(numbers)}
  return Outcome(
      'train', values, '', tuple(words for run in outcomes for words in run.commands), last.commit, last.machine,
      last.config, {name: run.params_digest for name, run in runs.items()},
      {f'{name} {metric}': value for name, run in runs.items() for metric, value in run.history.items()},
      {name: sum(run.cost[name] for run in outcomes) for name in _SUMMED_COSTS
       if all(name in run.cost for run in outcomes)}, last.data)


def _shared_metrics(runs: Sequence[Outcome]) -> dict[str, list[float]]:
  """Returns the values of the runs by metric, of the metrics that all runs have, sorted by name."""
  return {metric: [run.values[metric] for run in runs]
          for metric in sorted(set.intersection(*(set(run.values) for run in runs)))}


class Status(enum.IntEnum):
  """The exit statuses of a replay, beside those of every job."""
  EQUAL = 0  # equal or close
  RESULT = 3  # another result, although machine and packages compute the same bits
  MACHINE = 4  # another result, and `machine.differences` in the machine or the packages
  DATA = 5  # other data or weights; nothing ran
  CONFIG = 6  # other settings
  MISSING = 7  # data or weights are not given; nothing ran


class Verdict(NamedTuple):
  """The status, lines about what was compared and what differs, and whether everything is equal bit for bit."""
  status: Status
  lines: list[str]
  is_equal: bool = False


def compare(record: Record, outcome: Outcome) -> Verdict:
  """Compares values and digests of parameters with the record, bit for bit; if they differ, values by tolerances.

  The tolerance is `same` on a machine with the same bits, else `elsewhere`. With `same` 0, only equal values and
  digests pass on such a machine.
  """
  made, tolerance = record.made, record.tolerance
  changed = machine.differences(made.get('machine', {}), outcome.machine)
  is_same_machine = bool(made.get('machine')) and not changed
  changes = [f'  {name}: {before} -> {now}' for name, (before, now) in changed.items()]
  if (commit := made.get('commit', '')) != outcome.commit:
    changes.append(f'  commit: {commit[:12] or "unknown"} -> {outcome.commit[:12] or "unknown"}')
  if changes:
    changes.insert(0, 'Changed since the record was made:')
  digests = {'at the end': (record.params_digest, outcome.params_digest)} if record.params_digest else {}
  digests |= {f'at {name}': (digest, outcome.checkpoints.get(name, '')) for name, digest in record.checkpoints.items()}
  not_equal = _other_values(record, outcome, {}) + [
      f'  parameters {when}: {before[:12]} -> {now[:12] or "not saved"}'
      for when, (before, now) in digests.items() if before != now]
  num_values = f'{len(record.values)} {"values" if len(record.values) > 1 else "value"}'
  if digests and not not_equal:
    num_digests = f'{len(digests)} {"digest" if len(digests) == 1 else "digests"} of parameters'
    return Verdict(Status.EQUAL, [f'EQUAL: {num_values} and {num_digests}, bit for bit.', *changes], is_equal=True)
  usual = tolerance.same if is_same_machine else tolerance.elsewhere
  allowed = {name: min(usual, tolerance.values.get(name, usual)) for name in record.values}
  reason = f' ({tolerance.reason})' if tolerance.reason and usual else ''
  not_close = not_equal if is_same_machine and not usual else _other_values(record, outcome, allowed)
  if not_close:
    return Verdict(Status.RESULT if is_same_machine else Status.MACHINE,
                   [f'DIFFERS from the record{reason}:', *not_close, *changes])
  limits = ' to '.join(dict.fromkeys(f'{limit:.2g}' for limit in (min(allowed.values()), max(allowed.values()))))
  return Verdict(Status.EQUAL, [f'CLOSE: {num_values} within {limits}{reason}. Not equal:',
                                *(not_equal or ['  no digest of parameters was recorded']), *changes])


def _other_values(record: Record, outcome: Outcome, allowed: Mapping[str, float]) -> list[str]:
  """Returns a line for each value that differs from the record by more than `allowed`, by name; 0 if it has none."""
  measured = outcome.history | outcome.values
  lines = []
  for name, value in record.values.items():
    if name not in measured:
      lines.append(f'  value {name}: {value!r} -> not measured')
    elif not abs(measured[name] - value) <= (most := allowed.get(name, 0.)):  # also for NaN
      limit = f', within {most:.2g} allowed' if most else ''
      lines.append(f'  value {name}: {value!r} -> {measured[name]!r}, by {measured[name] - value:+.3g}{limit}')
  return lines
