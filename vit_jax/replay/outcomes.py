"""The outcome of a run, of an evaluation or of the runs of a study, as their directory has it."""
from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple

from vit_jax.core.errors import UserError
from vit_jax.record import reader


class Outcome(NamedTuple):
  """What a directory has to say of a result.

  kind: `train` or `evaluation`.
  values: metrics at the end, by name; in a study after the name of the run.
  history: metrics of evaluations during training, as `METRIC at STEP`.
  params_digest: of the parameters; '' in a study.    checkpoints: the same by step.
  command: as it was typed, without the name of the program.
  commit: of the code; '' = not known.    machine: see `record/machine.py`.
  processor_s: 0 = not known.
  """
  kind: str
  values: dict[str, float]
  params_digest: str
  checkpoints: dict[str, str]
  command: tuple[str, ...]
  commit: str
  machine: dict[str, Any]
  processor_s: float
  history: dict[str, float] = {}


def read(path: pathlib.Path) -> Outcome:
  """Returns the outcome of a run directory, of an `evaluate.json` or its directory, or of the directory of a study.

  Raises:
    UserError: it has none, as for a run that has not ended.
  """
  if (path / 'final.json').is_file():
    return _of_run(path)
  file = path if path.name == 'evaluate.json' else path / 'evaluate.json'
  if file.is_file():
    content = _json(file)
    return Outcome('evaluation', _numbers(content['metrics']), content.get('params_digest', ''), {},
                   tuple(content.get('command', ())[1:]), content.get('commit', ''), content.get('machine', {}),
                   content.get('processor_s', 0.))
  if runs := sorted(one.parent for one in path.glob('runs/*/final.json')):
    return _of_study({run.name: _of_run(run) for run in runs})
  raise UserError(f'{path}: expected the directory of a run that has ended, or an evaluate.json, got neither. Run the '
                  'train or evaluate command to its end first.')


def _of_run(path: pathlib.Path) -> Outcome:
  final, record = _json(path / 'final.json'), reader.read(path, most_rows=1)
  start: dict[str, Any] = next((e for e in reversed(record.events) if e['event'] == 'start'), {})
  starts = sum(e['event'] == 'start' for e in record.events)
  saved = {str(e['step']): str(e['params_digest']) for e in record.events if e['event'] == 'checkpoint'}
  return Outcome('train', _numbers(final['metrics']), final['params_digest'], saved,
                 tuple(start.get('command', ())[1:]), start.get('commit', ''), start.get('machine', {}),
                 final.get('processor_s', 0.) if starts == 1 else 0.,
                 {f'{name} at {row["step"]:.0f}': value for row in record.rows for name, value in row.items()
                  if not name.startswith('train/') and name not in ('step', 'time_s')})


def _of_study(runs: dict[str, Outcome]) -> Outcome:
  first = next(iter(runs.values()))
  return Outcome('train', {f'{name} {metric}': value for name, run in runs.items()
                           for metric, value in run.values.items()}, '', {
                 name: run.params_digest for name, run in runs.items()}, (), first.commit, first.machine,
                 sum(run.processor_s for run in runs.values()))


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
  """Returns the metrics, without single seeds of a mean."""
  return {name: float(value) for name, value in metrics.items() if '_seed' not in name}


def _json(path: pathlib.Path) -> dict[str, Any]:
  try:
    found = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise UserError(f'{path}: expected results as JSON, got an error ({error}). Run the command that wrote it again.'
                    ) from error
  if not isinstance(found, dict) or not isinstance(found.get('metrics'), dict):
    raise UserError(f'{path}: expected results as JSON, got no metrics. Run the command that wrote it again.')
  return found
