"""`--job=report` and the page of a run directory, `report.html`: key figures, curves, tables, images, settings.

`run` checks run directories and writes one page for them, and no other file. At the end of a run, `train` and
`evaluate` call `write_or_warn`, which writes the page. `serve` shows the page while the run trains (`to_html`).

The page needs no internet connection; its template is `inspect/templates/report.html`. A run that was killed has a
report, too: missing or damaged files, and parts of the page that cannot be drawn, are left out and listed at the end of
the page. This module only reads files and needs no device. `report_curves.py` draws the curves.
"""
from __future__ import annotations

import functools
import logging
import math
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vit_jax import __version__
from vit_jax.config import engine, provenance
from vit_jax.core import documents, failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.failures import Damaged
from vit_jax.core.types import HostArray
from vit_jax.evaluate import results
from vit_jax.inspect import html_pages, predictions
from vit_jax.jobs import report_curves, startup
from vit_jax.parallel import elastic
from vit_jax.record import checkpoint_files, clock, destination, reader, run_directory, storage
from vit_jax.record.progress import format_duration
from vit_jax.train import host_times
from vit_jax.weights import runs as run_weights

log = logging.getLogger('vit_jax.jobs')
T = TypeVar('T')
Json = dict[str, object]
Values = dict[str, Any]
"""Variables of a template of the page, by name."""

PAGE = 'report.html'
_MAX_ROWS = 5_000  # of training metrics that are read; a curve has fewer pixels
_NOT_ENVIRONMENT = ('event', 'time_s', 'resumed_from', 'lost', 'command')
"""Fields of the event `start` that do not describe the environment of the run."""
RECORDS = ('config.json', 'final.json', 'evaluate.json')  # each holds one JSON object
RUN_CONTENT = (*RECORDS, 'metrics.jsonl', 'checkpoints')
"""Files and folders of which every run directory has at least one."""


def run(workdirs: Sequence[storage.Path], to: str, *, overwrite: bool = False) -> int:
  """Writes the page and prints the path of the page; returns the exit status 0.

  Args:
    workdirs: run directories.
    to: path of the page; '' = `report.html` in the run directory.
    overwrite: replace the file at `to`.

  Raises UserError if a directory is not a run; the config of a run is not that of its checkpoints; another program
  wrote the existing page; or a file is damaged, in which case the page is first written without that file.
  """
  if absent := [str(workdir) for workdir in workdirs if not workdir.is_dir()]:
    raise UserError(f'--workdir: expected directories of runs, got {",".join(absent)}, which does not exist. Pass the '
                    'directory of a run, or several with commas.')
  if len(workdirs) > 1 and not to:
    raise UserError('--to: expected a path for the page of several runs, got none. Set --to=FILE.html.')
  if to and storage.is_local(to):
    destination.check_free([pathlib.Path(to)], setting='--to', overwrite=overwrite)
  startup.quiet_abandoned_reads()
  for workdir in workdirs:
    check(workdir)
  if not to:
    html_pages.check_ours(workdirs[0] / PAGE)
  damaged = [line for workdir in workdirs for line in find_damaged(workdir)]
  print(f'Report: {write_report(workdirs, to or None)}', flush=True)
  if damaged:
    raise UserError('\n'.join([*damaged, 'The page was written without the damaged files. The command that trained '
                               'the run writes them again.']))
  return 0


def check(workdir: storage.Path) -> None:
  """Raises UserError unless a directory is a run whose config is the one of the newest checkpoint."""
  if not any((workdir / name).exists() for name in RUN_CONTENT):
    raise UserError(f'--workdir={workdir}: expected the directory of a run, got one without {", ".join(RUN_CONTENT)}. '
                    'Pass the --workdir that the run was trained or evaluated with.')
  steps = checkpoint_files.steps(workdir / 'checkpoints')
  try:
    config = engine.from_json(storage.read_text(workdir / 'config.json'), code='none')
    meta = checkpoint_files.read_meta(workdir / 'checkpoints' / str(steps[-1])) if steps else {}
  except (OSError, UserError, Damaged):
    return  # one of the files cannot be read, so nothing is compared; the page lists damaged files
  provenance.check(meta, config, said=str(workdir / 'config.json'))


def find_damaged(workdir: storage.Path) -> list[str]:
  """Returns a line for each of the `RECORDS` that exists and is not a JSON object.

  Raises UserError if the system does not allow reading a record.
  """
  lines = []
  for path in (workdir / name for name in RECORDS):
    try:
      content = documents.load(path)
      problem = '' if isinstance(content, dict) else documents.describe(content)
    except FileNotFoundError:
      continue
    except OSError as error:
      if failures.advice(error):
        raise failures.unreadable(error, os.fspath(path)) from error
      problem = str(error.strerror)
    except ValueError as error:
      problem = str(error)
    if problem:
      lines.append(f'{path}: expected a JSON object, got {problem}.')
  return lines


class _Record(NamedTuple):
  """The content of a run directory. `_load_record` makes it, and functions that draw a part may add to `missing`.

  name: the name of the config.
  label: the end of the path of the directory, which distinguishes runs of one config.
  config, final, evaluation: `config.json`, `final.json` and `evaluate.json`; {} if there is no such file.
  history: rows and events of `metrics.jsonl`.
  predictions: arrays of `predictions.npz` by name.
  missing: a line for each file or part of the page that is missing or cannot be used.
  evaluated_weights: the weights that `evaluate` measured in this directory; '' = it is the directory of a training run.
  checkpoint: the checkpoint whose weights are those of the run; None = there is none.
  checkpoint_metrics, checkpoint_digest: the metrics of the checkpoint; the digest of its parameters, '' = not known.
  checkpoint_reason: why this checkpoint was chosen; '' = it is the newest one.
  """
  name: str
  label: str
  workdir: str
  config: Json
  final: Json
  evaluation: Json
  history: reader.Run
  predictions: dict[str, HostArray]
  missing: list[str]
  evaluated_weights: str
  checkpoint: checkpoint_files.Chosen | None = None
  checkpoint_metrics: dict[str, float] = {}
  checkpoint_digest: str = ''
  checkpoint_reason: str = ''

  @property
  def starts(self) -> list[reader.Event]:
    """The events of the starts of the run, oldest first."""
    return [event for event in self.history.events if event['event'] == 'start']


def write_report(workdirs: storage.PathLike | Sequence[storage.PathLike], out: storage.PathLike | None = None, *,
                 evaluated: storage.PathLike | None = None) -> str:
  """Writes the report of a run, or one that overlays the curves of several runs, and returns the path of the page.

  Args:
    workdirs: a run directory, or several.
    out: path of the page; None = `report.html` in `evaluated`, or else in the (first) run directory.
    evaluated: directory with the evaluation of a single run; None = the run directory.

  Raises ValueError if a run directory does not exist, or none was passed.
  """
  if isinstance(workdirs, str | os.PathLike):
    workdirs = [workdirs]
  page = to_html(workdirs, evaluated=evaluated)
  path = os.path.join(evaluated or workdirs[0], PAGE) if out is None else os.fspath(out)
  run_directory.write_bytes(path, storage.encode(page))
  return path


def to_html(workdirs: Sequence[storage.PathLike], *, evaluated: storage.PathLike | None = None,
            **more: object) -> str:
  """Returns the page as HTML, with `more` variables for the template; for the rest, see `write_report`."""
  paths = [os.fspath(workdir) for workdir in workdirs]
  absent = [path for path in paths if not storage.open_path(path).is_dir()]
  if absent or not paths:
    raise ValueError(f'workdirs: expected existing run directories, got {", ".join(absent) or "none"}. Pass the '
                     '--workdir of a run.')
  # A label is the shortest end of a path that no other path has, or else the whole path.
  parts = [os.path.abspath(path).split(os.sep) if storage.is_local(path) else path.split('/') for path in paths]
  labels = html_pages.shortest_ends(parts) or paths
  records = [_load_record(path, label, os.fspath(evaluated or path)) for path, label in zip(paths, labels, strict=True)]
  is_single = len(records) == 1
  runs = [_describe_run(record, is_single=is_single) for record in records]
  histories = [(record.label, record.history.rows) for record in records]
  curves = [_draw_or_note(records[0], kind.title, functools.partial(report_curves.draw, kind, histories))
            for kind in report_curves.KINDS]
  missing = [line if is_single else f'{record.label}: {line}' for record in records for line in record.missing]
  names = list(dict.fromkeys(name for run in runs for name in run['key_figures']))
  overview = [['run', *names]]  # the rows of the table of all runs; the first row is the head
  for run in runs:
    overview.append([run['label'], *(' '.join(run['key_figures'].get(name, '–')) for name in names)])
  title = f'{records[0].name if is_single else f"{len(records)} runs"} – report'
  return html_pages.render(
      'report.html', title=title, runs=runs, overview=overview, curves=[curve for curve in curves if curve],
      missing=missing, version=__version__, **more)


def write_or_warn(workdir: storage.PathLike, **more: storage.PathLike) -> str:
  """Writes the report of a run whose results exist, with the arguments of `write_report`; returns the path of the page.

  After an error, logs a warning and returns a note in place of the path.
  """
  try:
    return write_report(workdir, **more)
  except Exception as error:  # of any library that draws: a finished run must not end as a failed one
    log.warning('The report could not be written: %s: %s. The results are complete.', type(error).__name__, error)
    return 'not written, see the warning above'


def _describe_run(record: _Record, *, is_single: bool) -> Values:
  """Returns what the page shows of a run; only the page of a single run shows its results."""
  start = record.starts[-1] if record.starts else {}
  command = start.get('command', '')
  saves = [event for event in record.history.events if event['event'] == 'checkpoint']
  saved_digest = saves[-1].get('params_digest') if saves else ''
  values: Values = {
      'name': record.name, 'label': record.label, 'workdir': record.workdir, 'state': _describe_state(record),
      'key_figures': _key_figures(record), 'config': record.config, 'alarms': _describe_alarms(record),
      'digest': str(record.checkpoint_digest or record.final.get('params_digest') or saved_digest or ''),
      'command': shlex.join(map(str, command)) if isinstance(command, list) else str(command),
      'environment': {name: value for name, value in start.items() if name not in _NOT_ENVIRONMENT}}
  if not is_single:
    return values
  return values | {
      'tables': _metric_tables(record),
      'preprocessing': _describe_preprocessing(_mapping(record.evaluation.get('preprocessing'))),
      'predictions': _draw_or_note(record, 'predictions', lambda: _summarize_predictions(record)),
      'predictions_note': _describe_predictions(record),
      'norms': _draw_or_note(record, 'norms by layer', lambda: _summarize_norms(record)),
      'phases': _draw_or_note(record, 'where the time went', lambda: _phase_rows(record)) or [],
      'hosts': _draw_or_note(record, 'hosts', lambda: host_times.sentences(record.history.events))}


def _draw_or_note(record: _Record, part: str, draw: Callable[[], T]) -> T | None:
  """Returns the result of `draw`; if `draw` fails, returns None and adds a line to `missing` of the record."""
  try:
    return draw()
  except Exception as error:  # of any library that draws: the rest of the page is of use without it
    log.warning('%s: %s could not be drawn: %s: %s', record.workdir, part, type(error).__name__, error)
    record.missing.append(f'{part}: could not be drawn ({type(error).__name__}: {error})')
    return None


def _load_record(workdir: str, label: str, evaluated: str) -> _Record:
  """Reads the existing files of a run, and the files of an evaluation in the directory `evaluated`."""
  missing: list[str] = []
  # `weights.json` is not listed as missing, since a training run does not have the file.
  evaluated_weights = str(_load_json(workdir, 'weights.json', []).get('source', ''))
  config = _load_json(workdir, 'config.json', missing)
  final = _load_json(workdir, 'final.json', missing)
  evaluation = _load_json(evaluated, 'evaluate.json', missing)
  history = _load_history(workdir, missing)
  arrays: dict[str, HostArray] = {}
  try:
    with storage.local(os.path.join(evaluated, 'predictions.npz')) as path:
      arrays = predictions.load(path)
  except FileNotFoundError:
    missing.append('predictions.npz: no such file, so no confusion matrix and no example predictions')
  except ValueError as error:
    missing.append(str(error))
  if evaluated_weights:  # there was no training, so these two files are not expected
    missing = [line for line in missing if not line.startswith(('final.json: no such', 'metrics.jsonl: no such'))]
  name = str(config.get('name') or os.path.basename(os.path.abspath(workdir)))
  return _with_checkpoint(_Record(name, label, workdir, config, final, evaluation, history, arrays, missing,
                                  evaluated_weights))


def _load_json(workdir: str, name: str, missing: list[str]) -> Json:
  """Returns the JSON object in a file; if there is none, returns {} and adds a line to `missing`."""
  try:
    content = documents.load(storage.open_path(os.path.join(workdir, name)))
    if isinstance(content, dict):
      return content
    missing.append(f'{name}: could not be read')
  except FileNotFoundError:
    missing.append(f'{name}: no such file')
  except (OSError, ValueError):
    missing.append(f'{name}: could not be read')
  return {}


def _load_history(workdir: str, missing: list[str]) -> reader.Run:
  """Returns the content of `metrics.jsonl`; adds lines to `missing` if the file is missing or not complete."""
  history = reader.NOTHING
  try:
    history = reader.read(workdir, most_rows=_MAX_ROWS)
    if history.stride > 1:
      missing.append(f'metrics.jsonl: the curves of training show 1 in {history.stride} of the logged steps')
    if history.num_broken:
      missing.append(f'metrics.jsonl: {history.num_broken} lines could not be read')
  except FileNotFoundError:
    missing.append('metrics.jsonl: no such file, so no curves')
  except UserError as error:
    missing.append(str(error))
  return history


def _with_checkpoint(record: _Record) -> _Record:
  """Returns the record with the checkpoint whose weights are those of the run; adds unusable ones to `missing`."""
  try:
    workdir = storage.open_path(record.workdir)
    metric = str(_mapping(record.config.get('checkpoints')).get('keep_best') or '')
    checkpoint, damage_by_step = run_weights.find_whole(workdir, metric)
    record.missing.extend(f'checkpoints/{step}: is damaged and not used, as {damage}'
                          for step, damage in damage_by_step.items())
    if checkpoint is None:
      return record
    meta = checkpoint_files.read_meta(workdir / 'checkpoints' / str(checkpoint.step))
    reason = run_weights.reason(checkpoint, damage_by_step) if checkpoint.metric or damage_by_step else ''
    metrics = checkpoint_files.measured(workdir, checkpoint.step)
    return record._replace(checkpoint=checkpoint, checkpoint_metrics=metrics, checkpoint_reason=reason,
                           checkpoint_digest=str(meta['digests']['params']))
  except (Damaged, UserError, TemporaryError, LookupError, TypeError) as error:
    record.missing.append(f'checkpoints: could not be read ({error})')
    return record


def _describe_state(record: _Record) -> str:
  """Returns how far the run is, which weights it has, how it was resumed, and when the number of slices changed."""
  if record.evaluated_weights:
    return f'an evaluation of {record.evaluated_weights}'
  last_step = max((int(row['step']) for row in record.history.rows), default=0)
  if record.final:
    state = f'finished at step {html_pages.format_value(record.final.get("step", last_step))}'
  else:
    state = f'at step {last_step:,}, running or stopped'
  if record.checkpoint and record.checkpoint_reason:
    state += f' · its weights are those of step {record.checkpoint.step:,}, {record.checkpoint_reason}'
  num_resumes = len(record.starts) - 1
  if num_resumes > 0:
    state += f' · resumed {num_resumes}×, {record.history.lost_steps:,} steps repeated'
  num_slices_before = 0  # 0 = no earlier start of the run recorded its slices
  for event in record.starts:
    num_slices, num_first_slices, num_microbatches, step = (
        int(_number(event.get(field)) or 0) for field in ('slices', 'first_slices', 'microbatches', 'resumed_from'))
    if num_first_slices and num_slices != (num_slices_before or num_first_slices):
      state += f' · from step {step:,} on {elastic.text(num_slices, num_first_slices, num_microbatches)}'
    num_slices_before = num_slices or num_slices_before
  return state


def _key_figures(record: _Record) -> dict[str, tuple[str, str]]:
  """Returns the numbers at the top of the page by name, each with a note, which may be empty."""
  final, rows = record.final, record.history.rows
  num_images_by_evaluation = _mapping(final.get('num_examples')) or {
      str(record.evaluation.get('evaluation')): record.evaluation.get('num_examples')}
  figures: dict[str, tuple[str, str]] = {}
  for name, value in _newest_metrics(record).items():
    if re.fullmatch(r'.+/top1(@.*)?', name) and _number(value) is not None:  # such as `val/top1@ema`
      num_images = num_images_by_evaluation.get(name.split('/')[0])
      note = '' if num_images is None else f'of {html_pages.format_value(num_images)} images'
      figures[name] = html_pages.format_metric(name, value), note
  times = [_number(final.get('seconds')), clock.sum_starts(record.history.events).total_s]
  if not final:
    times.append(max((row['time_s'] for row in rows if 'time_s' in row), default=None))
  # `final.json` of older versions has the seconds of the last start alone, so the longest time is the most complete.
  if seconds := max(filter(None, times), default=None):
    figures['time'] = format_duration(seconds), ''
  speeds = [row['train/images_per_s'] for row in rows if 'train/images_per_s' in row]
  if speeds:
    figures['images/s, median'] = 'nan' if np.all(np.isnan(speeds)) else f'{np.nanmedian(speeds):,.0f}', ''
  num_params = _number(final.get('num_params'))
  if num_params is not None:
    figures['parameters'] = f'{num_params:,.0f}', ''
  return figures


def _newest_metrics(record: _Record) -> Json:
  """Returns the metrics of the run's weights; before they are known, the last value of each metric of the run."""
  is_older = record.checkpoint is not None and not record.checkpoint.is_newest
  metrics: Json = {**record.checkpoint_metrics} if is_older else _mapping(record.final.get('metrics'))
  last_values: Json = {name: value for row in record.history.rows for name, value in row.items()}
  return metrics or last_values or _mapping(record.evaluation.get('metrics'))


def _describe_alarms(record: _Record) -> list[str]:
  """Returns a sentence for each metric that raised alarms."""
  alarms_by_metric: dict[str, list[reader.Event]] = {}
  for event in record.history.events:
    if event['event'] == 'alarm':
      alarms_by_metric.setdefault(str(event.get('metric')), []).append(event)
  sentences = []
  for metric, alarms in alarms_by_metric.items():
    step, value, below = (html_pages.format_value(alarms[0].get(name)) for name in ('step', 'value', 'below'))
    times = f'{len(alarms)} times' if len(alarms) > 1 else 'once'
    sentences.append(f'Alarm, {times}, first at step {step}: {metric} was {value}, below {below}.')
  return sentences


def _metric_tables(record: _Record) -> list[tuple[str, list[tuple[str, str]]]]:
  """Returns title and rows of each table of metrics: at an older checkpoint of the run, at the end, and evaluated."""
  num_classes = _number(_mapping(record.config.get('data')).get('num_classes')) or np.inf
  if 'class_names' in record.predictions:
    num_classes = np.size(record.predictions['class_names'])
  def telling(metrics: object) -> Json:
    return {name: value for name, value in _mapping(metrics).items() if results.is_telling(name, num_classes)}
  of_checkpoint = telling(record.checkpoint_metrics)
  final, evaluated = (telling(file.get('metrics')) for file in (record.final, record.evaluation))
  tables = []
  if record.checkpoint and not record.checkpoint.is_newest and of_checkpoint:
    tables.append((f'at step {record.checkpoint.step:,}, whose weights are those of the run', of_checkpoint))
  if final:
    tables.append(('at the end of training', final))
  if evaluated and evaluated != final:
    step = record.evaluation.get('step')
    is_step_known = step is not None and not (record.evaluated_weights and step == 0)  # weights without a step have 0
    title = f'evaluated at step {html_pages.format_value(step)}' if is_step_known else 'evaluated'
    tables.append((title, evaluated))
  return [(title, [(name, html_pages.format_metric(name, value)) for name, value in metrics.items()])
          for title, metrics in tables]


def _describe_preprocessing(preprocessing: Json) -> str:
  """Returns the preprocessing of evaluated images in words."""
  def to_words(name: str, value: object) -> str:
    if isinstance(value, bool):
      return 'yes' if value else 'no'
    if isinstance(value, list):
      return (' × ' if name == 'image_px' else ' ').join(map(html_pages.format_value, value))
    return str(value)

  words = [f'{name} {to_words(name, value)}' for name, value in preprocessing.items()
           if (name, value) != ('resize_px', 0)]
  if preprocessing.get('resize_px') == 0:
    words.append('resized without a crop')
  return ', '.join(words)


def _summarize_predictions(record: _Record) -> predictions.Predictions | None:
  summary = predictions.summarize(record.predictions) if record.predictions else None
  if summary and not any(group.by_class for group in summary.groups):
    record.missing.append('predictions.npz: has no images of examples')
  return summary


def _describe_predictions(record: _Record) -> str:
  """Returns a note if the predictions are from another step than the run's weights; else ''."""
  step = _number(record.evaluation.get('step'))  # `evaluate.json` and `predictions.npz` are written together
  if record.checkpoint is None or step is None or step == record.checkpoint.step:
    return ''
  return (f'These are predictions at step {step:,.0f}. The weights of the run are those of step '
          f'{record.checkpoint.step:,}: vit-jax evaluate --workdir={shlex.quote(record.workdir)} predicts with them.')


def _summarize_norms(record: _Record) -> report_curves.NormSummary | None:
  """Returns the norms by layer with the learning rate of each step; None if the run recorded no norms."""
  events = [event for event in record.history.events if event['event'] == 'norms']
  rows = [row for row in record.history.rows if 'train/lr' in row and 'step' in row]
  rate_by_step = {int(row['step']): row['train/lr'] for row in rows}
  return report_curves.summarize_norms(events, rate_by_step) if events else None


def _phase_rows(record: _Record) -> list[tuple[str, str, str]]:
  """Returns each phase with its time and its share, both summed over the starts of the run, the longest first."""
  spent = clock.sum_starts(record.history.events)
  if spent.total_s <= 0:
    return []
  titles = {'step': 'steps that advanced the run', 'lost': 'work lost since the last checkpoint before a kill',
           'startup': 'start-up', 'data_wait': 'waiting for data', 'evaluate': 'evaluation',
           'checkpoint': 'saving checkpoints', 'restore': 'restoring checkpoints'}
  return [(titles.get(name, name), format_duration(seconds), f'{100 * seconds / spent.total_s:.1f} %')
          for name, seconds in sorted(spent.seconds.items(), key=lambda item: -item[1])]


def _mapping(value: object) -> Json:
  """Returns a value of a file if it is an object, else {}."""
  return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
  """Returns a value of a file if it is a finite number, else None."""
  number = html_pages.to_float(value)
  return number if math.isfinite(number) else None
