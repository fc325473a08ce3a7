"""The outcome of a run, of an evaluation or of the runs of a study, as their directory has it; compared with a record.

`recording` reads an outcome to write the record of it. `job` reads that of the commands it has run and compares it:
EQUAL, CLOSE, or what differs and by how much.
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
from vit_jax.evaluate.resources import Fingerprint
from vit_jax.record import clock, machine, reader
from vit_jax.replay.records import Record

_ADDED = ('processor_s', 'training_processor_s')
"""The costs of a study: the sums of those of its runs."""


class Outcome(NamedTuple):
  """The result of a run, an evaluation or a study, and how it was made.

  kind: `train` or `evaluation`.
  values: metrics at the end, by name; of several runs after the name of each, with their `median`; of a study
    also median, lowest and highest value of the runs that differ in the seed alone.
  params_digest: of the parameters; '' of several runs.
  commands: as they were typed, without the name of the program.
  commit: of the code; '' = not known.    machine: see `record/machine.py`.
  config: the directory with the config; of the last one of several runs.
  checkpoints: `params_digest` by step, or by the name of the run.
  history: of evaluations during training, `METRIC at STEP` and `best METRIC`; of several runs after the name of each.
  cost: what is known of `processor_s`, `training_processor_s` (of the steps and their data), and of one run that was
    always on as many devices, `exaflops` of training, `seconds` of its starts, and `devices`.
  data: examples and digest of what was read, by source and split; of the last one of several runs.
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
  """Returns the outcome of a run directory, of an `evaluate.json` or its directory, or of the directory of a study.

  Raises:
    UserError: it has none, as for a run that has not ended.
  """
  if (path / 'final.json').is_file():
    return _of_run(path)
  file = path if path.name == 'evaluate.json' else path / 'evaluate.json'
  if file.is_file():
    results = documents.read(file, expected='results as JSON')
    return Outcome('evaluation', _metrics(results), results.field('params_digest', default='').text(),
                   *_origin(results), file.parent, cost=_costs(results, 'processor_s'), data=_fingerprints(results))
  if runs := {one.parent.name: _of_run(one.parent) for one in sorted(path.glob('runs/*/final.json'))}:
    return _of_several(runs)
  raise UserError(f'{path}: expected the directory of a run that has ended, or an evaluate.json, got neither. Run the '
                  'train or evaluate command to its end first.')


def _of_run(path: pathlib.Path) -> Outcome:
  final, run = documents.read(path / 'final.json', expected='results as JSON'), reader.read(path, most_rows=1)
  starts = [Field(event, str(path / reader.FILE)) for event in run.events if event['event'] == 'start']
  start = starts[-1] if starts else Field({}, str(path / reader.FILE))
  checkpoints = {str(event['step']): str(event['params_digest']) for event in run.events
                 if event['event'] == 'checkpoint' and {'step', 'params_digest'} <= event.keys()}
  cost: dict[str, float] = {}
  if final.field('starts', default=1).whole() == clock.count_starts(run.events):  # the costs are those of all starts
    cost = _costs(final, *_ADDED)
    if len({repr(one.value.get('devices')) for one in starts}) == 1:
      cost |= _costs(final, 'exaflops', 'seconds')
      if devices := start.field('devices', default=0).whole():
        cost['devices'] = devices
  return Outcome('train', _metrics(final), final.field('params_digest').text(), *_origin(start), path, checkpoints,
                 _history(run.rows), cost, _fingerprints(final))


def _metrics(results: Field) -> dict[str, float]:
  """Returns the metrics, without single seeds of a mean; those that were not finite are NaN."""
  metrics = results.field('metrics')
  return {name: metrics.field(name, default=math.nan).number() for name in metrics.object() if '_seed' not in name}


def _origin(content: Field) -> tuple[tuple[tuple[str, ...], ...], str, dict[str, Any]]:
  """Returns the fields `commands`, `commit` and `machine` of an outcome."""
  return ((content.field('command', default=()).texts()[1:],), content.field('commit', default='').text(),
          content.part('machine').object())


def _costs(content: Field, *names: str) -> dict[str, float]:
  """Returns those of the numbers that are known."""
  return {name: number for name in names if (number := content.field(name, default=0.).number(0))}


def _fingerprints(results: Field) -> dict[str, Fingerprint]:
  return {name: Fingerprint(one.field('examples').whole(), one.field('digest').text())
          for name, one in results.part('data').fields()}


def _history(rows: Sequence[reader.Row]) -> dict[str, float]:
  """Returns `METRIC at STEP` of all evaluations, and `best METRIC`, the largest value of each."""
  history = {f'{name} at {row["step"]:.0f}': value for row in rows for name, value in row.items()
             if not name.startswith('train/') and name not in ('step', 'time_s')}
  best: dict[str, float] = {}
  for name, value in history.items():
    name = f'best {name.rpartition(" at ")[0]}'
    best[name] = max(value, best.get(name, value))
  return history | best


def _of_several(runs: Mapping[str, Outcome]) -> Outcome:
  last = [*runs.values()][-1]
  groups: dict[str, list[Outcome]] = {}  # runs that differ in the seed alone
  for name, run in runs.items():
    groups.setdefault(re.sub(r'_seed\d+', '', name), []).append(run)
  values = {f'{name} {metric}': value for name, run in runs.items() for metric, value in run.values.items()}
  values |= {f'median {metric}': statistics.median(of_runs) for metric, of_runs in _shared([*runs.values()])}
  values |= {f'{word} {name} {metric}': choose(of_runs)
             for name, group in groups.items() if len(group) > 1 and len(groups) > 1
             for metric, of_runs in _shared(group)
             for word, choose in (('median', statistics.median), ('lowest', min), ('highest', max))}
  return Outcome(
      'train', values, '', tuple(line for run in runs.values() for line in run.commands), last.commit, last.machine,
      last.config, {name: run.params_digest for name, run in runs.items()},
      {f'{name} {metric}': value for name, run in runs.items() for metric, value in run.history.items()},
      {name: sum(run.cost[name] for run in runs.values()) for name in _ADDED
       if all(name in run.cost for run in runs.values())}, last.data)


def _shared(runs: Sequence[Outcome]) -> list[tuple[str, list[float]]]:
  """Returns the metrics that all runs have, each with the values of the runs."""
  return [(metric, [run.values[metric] for run in runs])
          for metric in sorted(set.intersection(*(set(run.values) for run in runs)))]


class Status(enum.IntEnum):
  """The exit statuses of a replay, beside those of every job."""
  EQUAL = 0  # and CLOSE
  RESULT = 3  # another result, on a machine and packages that have the same bits
  MACHINE = 4  # another result, and a machine or packages with other bits
  DATA = 5  # other data or weights; nothing ran
  CONFIG = 6  # other settings
  MISSING = 7  # data or weights are not given; nothing ran


class Verdict(NamedTuple):
  """The status, lines that say what was compared and what differs, and whether all is equal bit for bit."""
  status: Status
  lines: list[str]
  is_equal: bool = False


def compare(record: Record, outcome: Outcome) -> Verdict:
  """Compares values and parameters with the record, bit for bit.

  What is not equal may be close, within the tolerance of each value, on another kind of machine or where the record
  allows it on the same one too.
  """
  made, tolerance = record.made, record.tolerance
  changed = machine.differences(made.get('machine', {}), outcome.machine)
  is_same = bool(made.get('machine')) and not changed
  about = [f'  {name}: {before} -> {now}' for name, (before, now) in changed.items()]
  if (commit := made.get('commit', '')) != outcome.commit:
    about.append(f'  commit: {commit[:12] or "unknown"} -> {outcome.commit[:12] or "unknown"}')
  since = ['Changed since the record was made:', *about] if about else []
  digests = {'at the end': (record.params_digest, outcome.params_digest)} if record.params_digest else {}
  digests |= {f'at {name}': (digest, outcome.checkpoints.get(name, '')) for name, digest in record.checkpoints.items()}
  not_equal = _other_values(record, outcome, {}) + [
      f'  parameters {where}: {before[:12]} -> {now[:12] or "not saved"}'
      for where, (before, now) in digests.items() if before != now]
  count = f'{len(record.values)} value{"s" * (len(record.values) > 1)}'
  if digests and not not_equal:
    return Verdict(Status.EQUAL, [f'EQUAL: {count} and {len(digests)} digest{"s" * (len(digests) != 1)} of parameters, '
                                  'bit for bit.', *since], is_equal=True)
  usual = tolerance.same if is_same else tolerance.elsewhere
  allowed = {name: min(usual, tolerance.values.get(name, usual)) for name in record.values}
  note = f' ({tolerance.reason})' if tolerance.reason and usual else ''
  not_close = not_equal if is_same and not usual else _other_values(record, outcome, allowed)
  if not_close:
    return Verdict(Status.RESULT if is_same else Status.MACHINE,
                   [f'DIFFERS from the record{note}:', *not_close, *since])
  limits = ' to '.join(dict.fromkeys(f'{limit:.2g}' for limit in (min(allowed.values()), max(allowed.values()))))
  return Verdict(Status.EQUAL, [f'CLOSE: {count} within {limits}{note}. Not equal:',
                                *(not_equal or ['  no digest of parameters was recorded']), *since])


def _other_values(record: Record, outcome: Outcome, allowed: Mapping[str, float]) -> list[str]:
  """Returns a line for each value that differs by more than what is allowed by its name, 0 if nothing is."""
  measured = outcome.history | outcome.values
  lines = []
  for name, value in record.values.items():
    if name not in measured:
      lines.append(f'  value {name}: {value!r} -> not measured')
    elif not abs(measured[name] - value) <= (most := allowed.get(name, 0.)):
      by = f', within {most:.2g} allowed' if most else ''
      lines.append(f'  value {name}: {value!r} -> {measured[name]!r}, by {measured[name] - value:+.3g}{by}')
  return lines
