"""The page of a run directory, `report.html`: key figures, curves, tables, images, settings.

The page opens without a network (`inspect/templates/report.html`). Files that are missing or damaged are left out and
listed at the end, so that a run that was killed has a report too. Reads files only and needs no device.
"""
from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.evaluate import final as results
from vit_jax.inspect import charts, html_pages, norms, predictions
from vit_jax.record import goodput, run_directory, storage, writer
from vit_jax.record.progress import format_duration

Json = dict[str, object]
Values = dict[str, Any]
"""Values of a template."""

_NOTHING = writer.Run([], [], 0, 0)
# Title, unit of y, names of metrics, factor, logarithmic.
_FIGURES = (
  ('Loss', 'nats', r'train/loss|[^/]+/(nll|loss)(@.*)?', 1., False),
  ('Accuracy', '%', r'train/accuracy|.+/(top1(_k20)?|10shot)([.]partial\d+)?(@.*)?', 100., False),
  ('Learning rate', 'learning rate', r'train/lr', 1., False),
  ('Gradient norm', 'L2 norm', r'train/grad_norm', 1., True),
  ('Speed', 'images/s', r'train/images_per_s', 1., False),
  ('Model FLOPs utilisation', '%', r'train/mfu', 100., False),
)


class _Record(NamedTuple):
  """The files of a run directory; `missing` lists those that are not there or cannot be read."""
  name: str
  workdir: str
  config: Json
  final: Json
  evaluation: Json
  run: writer.Run
  predictions: dict[str, HostArray]
  missing: list[str]


def write_report(workdirs: storage.PathLike | Sequence[storage.PathLike], out: storage.PathLike | None = None) -> str:
  """Writes the report of a run, or one that overlays the curves of several.

  Args:
    workdirs: a run directory, or several.
    out: path of the page; None = `report.html` in the (first) run directory.

  Returns:
    The path of the page.

  Raises:
    ValueError: a run directory does not exist, or none was passed.
  """
  if isinstance(workdirs, str | os.PathLike):
    workdirs = [workdirs]
  absent = [os.fspath(w) for w in workdirs if not storage.open_path(w).is_dir()]
  if absent or not workdirs:
    raise ValueError(f'workdirs: expected existing run directories, got {", ".join(absent) or "none"}. Pass the '
                     '--workdir of a run.')
  records = [_load(os.fspath(w)) for w in workdirs]
  path = os.path.join(workdirs[0], 'report.html') if out is None else os.fspath(out)
  run_directory.write_bytes(path, _render(records).encode())
  return path


def _render(records: Sequence[_Record]) -> str:
  is_single = len(records) == 1
  runs = [_of_run(r, is_single=is_single) for r in records]
  names = list(dict.fromkeys(name for run in runs for name in run['key_figures']))
  overview = [['run', *names], *([run['name'], *(run['key_figures'].get(name, '–') for name in names)] for run in runs)]
  missing = [line if is_single else f'{r.name}: {line}' for r in records for line in r.missing]
  title = f'{records[0].name if is_single else f"{len(records)} runs"} – report'
  return html_pages.render('report.html', title=title, runs=runs, overview=overview, curves=_curves(records),
                           missing=missing)


def _of_run(r: _Record, *, is_single: bool) -> Values:
  """Returns what the page shows of a run; only the page of a single run shows its results."""
  start: Json = next((e for e in reversed(r.run.events) if e['event'] == 'start'), {})
  command = start.get('command', start.get('argv', ''))
  hidden = ('event', 'time_s', 'resumed_from', 'lost', 'command', 'argv')
  shown: Values = {
      'name': r.name, 'workdir': r.workdir, 'state': _state(r), 'key_figures': dict(_key_figures(r)),
      'command': shlex.join(map(str, command)) if isinstance(command, list) else str(command), 'config': r.config,
      'environment': {name: value for name, value in start.items() if name not in hidden}}
  return shown | (_results(r) | {'predictions': _predictions(r), 'norms': _norms(r), 'phases': _phases(r)}
                  if is_single else {})


def _load(workdir: str) -> _Record:
  missing: list[str] = []
  config, final, evaluation = (_load_json(workdir, name, missing)
                               for name in ('config.json', 'final.json', 'evaluate.json'))
  try:
    run = writer.read(workdir)
    if run.num_broken:
      missing.append(f'metrics.jsonl: {run.num_broken} lines could not be read')
  except FileNotFoundError:
    run = _NOTHING
    missing.append('metrics.jsonl: no such file, so no curves')
  except UserError as error:
    run = _NOTHING
    missing.append(str(error))
  name = config.get('name') or os.path.basename(os.path.abspath(workdir))
  arrays = _load_predictions(workdir, missing)
  return _Record(str(name), workdir, config, final, evaluation, run, arrays, missing)


def _load_json(workdir: str, name: str, missing: list[str]) -> Json:
  try:
    value = json.loads(storage.read_text(os.path.join(workdir, name)))
  except FileNotFoundError:
    missing.append(f'{name}: no such file')
    return {}
  except (OSError, ValueError, RecursionError):
    value = None
  if not isinstance(value, dict):
    missing.append(f'{name}: could not be read')
    return {}
  return value


def _load_predictions(workdir: str, missing: list[str]) -> dict[str, HostArray]:
  try:
    with storage.local(os.path.join(workdir, 'predictions.npz')) as path:
      return predictions.load(path)
  except FileNotFoundError:
    missing.append('predictions.npz: no such file, so no confusion matrix and no example predictions')
  except ValueError as error:
    missing.append(str(error))
  return {}


def _state(r: _Record) -> str:
  last = max((int(row['step']) for row in r.run.rows), default=0)
  resumes = sum(e['event'] == 'start' for e in r.run.events) - 1
  state = (f'finished at step {html_pages.format_value(r.final.get("step", last))}' if r.final
           else f'at step {last:,}, running or stopped')
  return state + (f' · resumed {resumes}×, {r.run.lost_steps:,} steps repeated' if resumes > 0 else '')


def _key_figures(r: _Record) -> Iterator[tuple[str, str]]:
  """Yields names and values of the numbers at the top of the page."""
  metrics = _mapping(r.final.get('metrics')) or _newest(r.run.rows)
  sizes = _mapping(r.final.get('num_examples'))
  for name, value in metrics.items():
    number = _number(value)
    if re.fullmatch(r'.+/top1(@.*)?', name) and number is not None:
      size = sizes.get(name.split('/')[0])
      over = f' over {html_pages.format_value(size)} images' if size is not None else ''
      yield f'{name}{over}', f'{100 * number:.2f} %'
  times = [row['time_s'] for row in r.run.rows if 'time_s' in row]
  seconds = _number(r.final.get('seconds')) or max(times, default=None)
  if seconds is not None:
    yield 'time', format_duration(seconds)
  speeds = [row['train/images_per_s'] for row in r.run.rows if 'train/images_per_s' in row]
  if speeds:
    yield 'images/s, median', f'{np.nanmedian(speeds):,.0f}' if not np.all(np.isnan(speeds)) else 'nan'
  num_params = _number(r.final.get('num_params', r.final.get('parameters')))
  if num_params is not None:
    yield 'parameters', f'{num_params:,.0f}'


def _curves(records: Sequence[_Record]) -> list[tuple[str, Markup]]:
  found = []
  for title, unit, pattern, factor, log in _FIGURES:
    series = [(r, name) for r in records for name in _names(r, pattern)]
    is_one_metric = len({name for _, name in series}) == 1
    curves = []
    for r, name in series:
      points = [(row['step'], factor * row[name]) for row in r.run.rows if name in row and 'step' in row]
      label = name if len(records) == 1 else r.name if is_one_metric else f'{r.name}: {name}'
      curves.append(charts.Curve(label, *zip(*points, strict=True)))
    if curves:
      found.append((title, charts.draw_curves(curves, xlabel='step', ylabel=unit, log=log)))
  return found


def _names(r: _Record, pattern: str) -> list[str]:
  """Returns the metrics whose names match, those of training first."""
  names = {name for row in r.run.rows for name in row if re.fullmatch(pattern, name)}
  return sorted(names, key=lambda name: (not name.startswith('train/'), name))


def _results(r: _Record) -> Values:
  final, own = (_informative(r, _mapping(one.get('metrics'))) for one in (r.final, r.evaluation))
  tables = [('at the end of training', final)] if final else []
  if own and own != final:
    tables.append((f'evaluated at step {html_pages.format_value(r.evaluation.get("step", "?"))}', own))
  return {'tables': [(title, [(name, value if isinstance(value, int | float) else str(value))
                              for name, value in metrics.items()]) for title, metrics in tables],
          'digest': r.final.get('params_digest'),
          'preprocessing': ', '.join(f'{name} {value}' for name, value
                                     in _mapping(r.evaluation.get('preprocessing')).items())}


def _informative(r: _Record, metrics: Json) -> Json:
  """Returns the metrics that are informative for the number of classes, if it is known."""
  names, data = r.predictions.get('class_names'), _mapping(r.config.get('data'))
  known = np.size(names) if names is not None else _number(data.get('num_classes')) or np.inf
  return {name: value for name, value in metrics.items() if results.is_telling(name, known)}


def _predictions(r: _Record) -> predictions.Predictions | None:
  if not r.predictions:
    return None
  found = predictions.summarize(r.predictions)
  if not any(examples for _, _, examples in found.groups):
    r.missing.append('predictions.npz: has no images of examples')
  return found


def _norms(r: _Record) -> norms.Norms | None:
  event = next((e for e in reversed(r.run.events) if e['event'] == 'norms'), None)
  if event is None:
    return None
  return norms.summarize(event.get('step', '?'), *(_mapping(event.get(key)) for key in ('grad', 'param', 'update')))


def _phases(r: _Record) -> list[tuple[str, str, str]]:
  """Returns the time of each phase and its share, summed over the starts of the run."""
  found = goodput.sum_starts(r.run.events)
  if found.total_s <= 0:
    return []
  names = {'step': 'steps that advanced the run', 'lost': 'work lost since the last checkpoint before a kill',
           'startup': 'start-up', 'data_wait': 'waiting for data', 'evaluate': 'evaluation'}
  return [(names.get(name, name), format_duration(seconds), f'{100 * seconds / found.total_s:.1f} %')
          for name, seconds in sorted(found.seconds.items(), key=lambda item: -item[1])]


def _newest(rows: Sequence[writer.Row]) -> dict[str, float]:
  newest: dict[str, float] = {}
  for row in rows:
    newest.update(row)
  return newest


def _mapping(value: object) -> Json:
  return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
  number = html_pages.to_float(value)
  return number if math.isfinite(number) else None

