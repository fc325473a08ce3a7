"""The outcome of a run, of an evaluation or of the runs of a study, as their directory has it."""
from __future__ import annotations

import math
import pathlib
import re
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from vit_jax.core import documents
from vit_jax.core.documents import Field
from vit_jax.core.errors import UserError
from vit_jax.evaluate.resources import Fingerprint
from vit_jax.record import clock, reader


class Outcome(NamedTuple):
  """What a directory has to say of a result.

  kind: `train` or `evaluation`.
  values: metrics at the end, by name; of several runs after the name of each, with their `median`; of a study
    also median, lowest and highest value of the runs that differ in the seed alone.
  history: of evaluations during training, `METRIC at STEP` and `best METRIC`; of several runs after the name of each.
  params_digest: of the parameters; '' of several runs.    checkpoints: the same by step, or by the name of the run.
  commands: as they were typed, without the name of the program.
  config: the directory with the config; of the last one of several runs.
  commit: of the code; '' = not known.    machine: see `record/machine.py`.
  processor_s: 0 = not known.    training_processor_s: the part of the steps and their data; 0 = not known.
  data: examples and digest of what was read, by source and split; of the last one of several runs.
  cost: of one run that was always on as many devices: `exaflops` of training, `seconds` of its starts, and `devices`.
  """
  kind: str
  values: dict[str, float]
  params_digest: str
  checkpoints: dict[str, str]
  commands: tuple[tuple[str, ...], ...]
  commit: str
  machine: dict[str, Any]
  processor_s: float
  config: pathlib.Path
  history: dict[str, float] = {}
  training_processor_s: float = 0.
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
    content = documents.read(file, expected='results as JSON')
    return Outcome('evaluation', _numbers(content), _text(content, 'params_digest'), {}, _commands(content),
                   _text(content, 'commit'), content.part('machine').object(), _seconds(content, 'processor_s'),
                   file.parent, data=_fingerprints(content))
  if runs := sorted(one.parent for one in path.glob('runs/*/final.json')):
    return _of_several({run.name: _of_run(run) for run in runs})
  raise UserError(f'{path}: expected the directory of a run that has ended, or an evaluate.json, got neither. Run the '
                  'train or evaluate command to its end first.')


def _of_run(path: pathlib.Path) -> Outcome:
  final, record = documents.read(path / 'final.json', expected='results as JSON'), reader.read(path, most_rows=1)
  starts = [Field(e, str(path / reader.FILE)) for e in record.events if e['event'] == 'start']
  start = starts[-1] if starts else Field({}, str(path / reader.FILE))
  saved = {str(e['step']): str(e['params_digest']) for e in record.events
           if e['event'] == 'checkpoint' and {'step', 'params_digest'} <= e.keys()}
  devices = {repr(one.value.get('devices')) for one in starts}
  is_whole = final.field('starts', default=1).whole() == clock.count_starts(record.events)  # its costs are those of all
  return Outcome('train', _numbers(final), final.field('params_digest').text(), saved, _commands(start),
                 _text(start, 'commit'), start.part('machine').object(),
                 _seconds(final, 'processor_s') if is_whole else 0., path, _history(record.rows),
                 _seconds(final, 'training_processor_s') if is_whole else 0.,
                 _cost(final, start) if is_whole and len(devices) == 1 else {}, _fingerprints(final))


def _text(content: Field, name: str) -> str:
  return content.field(name, default='').text()


def _seconds(content: Field, name: str) -> float:
  return content.field(name, default=0.).number(0)


def _commands(content: Field) -> tuple[tuple[str, ...], ...]:
  return (content.field('command', default=()).texts()[1:],)


def _fingerprints(content: Field) -> dict[str, Fingerprint]:
  return {name: Fingerprint(one.field('examples').whole(), one.field('digest').text())
          for name, one in content.part('data').fields()}


def _cost(final: Field, start: Field) -> dict[str, float]:
  found = {'exaflops': _seconds(final, 'exaflops'), 'seconds': _seconds(final, 'seconds'),
           'devices': start.field('devices', default=0).whole()}
  return {name: value for name, value in found.items() if value}


def _history(rows: list[reader.Row]) -> dict[str, float]:
  """Returns `METRIC at STEP` of all evaluations, and `best METRIC`, the largest value of each."""
  found = {f'{name} at {row["step"]:.0f}': value for row in rows for name, value in row.items()
           if not name.startswith('train/') and name not in ('step', 'time_s')}
  best: dict[str, float] = {}
  for name, value in found.items():
    name = f'best {name.rpartition(" at ")[0]}'
    best[name] = max(value, best.get(name, value))
  return found | best


def _of_several(runs: dict[str, Outcome]) -> Outcome:
  last = [*runs.values()][-1]
  values = {f'{name} {metric}': value for name, run in runs.items() for metric, value in run.values.items()}
  shared = set.intersection(*(set(run.values) for run in runs.values()))
  values |= {f'median {metric}': statistics.median(run.values[metric] for run in runs.values())
             for metric in sorted(shared)}
  values |= _of_seeds(runs)
  return Outcome('train', values, '', {name: run.params_digest for name, run in runs.items()},
                 tuple(line for run in runs.values() for line in run.commands), last.commit, last.machine,
                 _sum(run.processor_s for run in runs.values()), last.config,
                 {f'{name} {metric}': value for name, run in runs.items() for metric, value in run.history.items()},
                 _sum(run.training_processor_s for run in runs.values()), data=last.data)


def _sum(seconds: Iterable[float]) -> float:
  """Returns the sum, 0 = not known if a part of it is not known."""
  found = list(seconds)
  return sum(found) if all(found) else 0.


def _of_seeds(runs: dict[str, Outcome]) -> dict[str, float]:
  """Returns `median GROUP METRIC`, `lowest …` and `highest …` of the runs of a study that differ in the seed alone."""
  groups: dict[str, list[Outcome]] = {}
  for name, run in runs.items():
    groups.setdefault(re.sub(r'_seed\d+', '', name), []).append(run)
  several = {name: group for name, group in groups.items() if len(group) > 1 and len(groups) > 1}
  return {f'{word} {name} {metric}': choose(run.values[metric] for run in group)
          for name, group in several.items() for metric in sorted(set.intersection(*(set(one.values) for one in group)))
          for word, choose in (('median', statistics.median), ('lowest', min), ('highest', max))}


def _numbers(content: Field) -> dict[str, float]:
  """Returns the metrics, without single seeds of a mean; those that were not finite are NaN."""
  metrics = content.field('metrics')
  return {name: metrics.field(name, default=math.nan).number() for name in metrics.object() if '_seed' not in name}
