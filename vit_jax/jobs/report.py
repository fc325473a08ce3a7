"""`--job=report` and the page of a run directory, `report.html`: key figures, curves, tables, images, settings.

The job checks the directories and writes their page, and no other file. `train` and `evaluate` write the page of their
run at their end (`write_or_warn`), and `serve` shows it while the run grows (`to_html`).

The page opens without a network (`inspect/templates/report.html`). A run that was killed has a report, too: files that
are missing or damaged, and parts of the page that cannot be drawn, are left out and listed at its end. This module only
reads files and needs no device. Its curves are drawn by `report_curves.py`.
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
from vit_jax.config import elastic, json_files, provenance
from vit_jax.core import documents, failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.failures import Damaged
from vit_jax.core.types import HostArray
from vit_jax.evaluate import results
from vit_jax.inspect import html_pages, norms, predictions
from vit_jax.jobs import report_curves, startup
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
_NO_ENVIRONMENT = ('event', 'time_s', 'resumed_from', 'lost', 'command')
"""Fields of the event `start` that do not describe the environment of the run."""
RECORDS = ('config.json', 'final.json', 'evaluate.json')
RUN_CONTENT = (*RECORDS, 'metrics.jsonl', 'checkpoints')
"""Files and folders of which every run directory has at least one."""


def run(workdirs: Sequence[storage.Path], to: str, *, overwrite: bool = False) -> int:
  """Writes the page and prints its path; exit status 0.

  Args:
    workdirs: run directories.
    to: path of the page; '' = `report.html` in the run directory.
    overwrite: replace the file at `to`.

  Raises:
    UserError: a directory is not a run; its config is not that of its checkpoints; another program wrote the page
      that is there; or a file is damaged, in which case the page is written without it first.
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
  """Raises UserError unless a directory is a run, and its config the one its newest checkpoint was saved with."""
  if not any((workdir / name).exists() for name in RUN_CONTENT):
    raise UserError(f'--workdir={workdir}: expected the directory of a run, got one without {", ".join(RUN_CONTENT)}. '
                    'Pass the --workdir that the run was trained or evaluated with.')
  steps = checkpoint_files.steps(workdir / 'checkpoints')
  try:
    config = json_files.from_json(storage.read_text(workdir / 'config.json'), code='none')
    meta = checkpoint_files.read_meta(workdir / 'checkpoints' / str(steps[-1])) if steps else {}
  except (OSError, UserError, Damaged):
    return  # nothing to compare; the page lists damaged files
  provenance.check(meta, config, said=str(workdir / 'config.json'))


def find_damaged(workdir: storage.Path) -> list[str]:
  """Returns one line per record of a run that exists and is not a JSON object.

  Raises UserError if the system does not allow reading one.
  """
  lines = []
  for path in (workdir / name for name in RECORDS):
    try:
      record = documents.load(path)
      got = '' if isinstance(record, dict) else documents.describe(record)
    except FileNotFoundError:
      continue
    except (OSError, ValueError) as error:
      if isinstance(error, OSError) and failures.advice(error):
        raise failures.unreadable(error, os.fspath(path)) from error
      got = str(getattr(error, 'strerror', error))
    if got:
      lines.append(f'{path}: expected a JSON object, got {got}.')
  return lines


class _Record(NamedTuple):
  """What the files of a run directory contain.

  name: of the config.
  label: the end of the path of the directory, which distinguishes runs of one config.
  config, final, evaluation: `config.json`, `final.json` and `evaluate.json`; {} if there is no such file.
  history: rows and events of `metrics.jsonl`.
  predictions: arrays of `predictions.npz` by name.
  missing: a line for each file, or part of the page, that is not there or cannot be used.
  source: the weights that were evaluated in this directory; '' = it is the directory of a training run.
  used: the checkpoint whose weights are those of the run; None = there is none.
  used_metrics, used_digest: the metrics of that checkpoint, and the digest of its parameters; '' = not known.
  used_reason: why it is this checkpoint; '' = it is the newest one.
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
  source: str
  used: checkpoint_files.Chosen | None = None
  used_metrics: dict[str, float] = {}
  used_digest: str = ''
  used_reason: str = ''

  @property
  def starts(self) -> list[reader.Event]:
    """The events of the starts of the run, oldest first."""
    return [event for event in self.history.events if event['event'] == 'start']


def write_report(workdirs: storage.PathLike | Sequence[storage.PathLike], out: storage.PathLike | None = None, *,
                 evaluated: storage.PathLike | None = None) -> str:
  """Writes the report of a run, or one that overlays the curves of several, and returns its path.

  Args:
    workdirs: a run directory, or several.
    out: path of the page; None = `report.html` in the (first) run directory, or in `evaluated`.
    evaluated: directory of the evaluation, if that of a single run was written elsewhere.

  Raises:
    ValueError: a run directory does not exist, or none was passed.
  """
  if isinstance(workdirs, str | os.PathLike):
    workdirs = [workdirs]
  page = to_html(workdirs, evaluated=evaluated)
  path = os.path.join(evaluated or workdirs[0], PAGE) if out is None else os.fspath(out)
  run_directory.write_bytes(path, storage.encode(page))
  return path


def to_html(workdirs: Sequence[storage.PathLike], *, evaluated: storage.PathLike | None = None,
            **more: object) -> str:
  """Returns the report of a run, or one that overlays the curves of several; `more` values are for the template.

  The evaluation of a single run is read in the directory `evaluated`; None = in that of the run.

  Raises:
    ValueError: a run directory does not exist, or none was passed.
  """
  paths = [os.fspath(workdir) for workdir in workdirs]
  absent = [path for path in paths if not storage.open_path(path).is_dir()]
  if absent or not paths:
    raise ValueError(f'workdirs: expected existing run directories, got {", ".join(absent) or "none"}. Pass the '
                     '--workdir of a run.')
  # A label is the shortest end of a path that no other path has, or else the whole path.
  parts = [os.path.abspath(path).split(os.sep) if storage.is_local(path) else path.split('/') for path in paths]
  labels = html_pages.shortest_ends(parts) or paths
  records = [_load(path, label, os.fspath(evaluated or path)) for path, label in zip(paths, labels, strict=True)]
  is_single = len(records) == 1
  runs = [_describe_run(record, is_single=is_single) for record in records]
  histories = [(record.label, record.history.rows) for record in records]
  curves = [_try(records[0], kind.title, functools.partial(report_curves.draw, kind, histories))
            for kind in report_curves.KINDS]
  missing = [line if is_single else f'{record.label}: {line}' for record in records for line in record.missing]
  title = f'{records[0].name if is_single else f"{len(records)} runs"} – report'
  return html_pages.render(
      'report.html', title=title, runs=runs, overview=_overview(runs), curves=[curve for curve in curves if curve],
      missing=missing, version=__version__, **more)


def _overview(runs: Sequence[Values]) -> list[list[str]]:
  """Returns the rows of the table of all runs: its head, and then each run with its key figures."""
  names = list(dict.fromkeys(name for run in runs for name in run['key_figures']))
  return [['run', *names], *([run['label'], *(' '.join(run['key_figures'].get(name, '–')) for name in names)]
                             for run in runs)]


def write_or_warn(workdir: storage.PathLike, **more: storage.PathLike) -> str:
  """Writes the report of one run like `write_report`. The results of the run exist already.

  An error is logged as a warning, and a sentence about it is returned.
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
      'name': record.name, 'label': record.label, 'workdir': record.workdir, 'state': _state(record),
      'key_figures': _key_figures(record), 'config': record.config, 'alarms': _alarms(record),
      'digest': str(record.used_digest or record.final.get('params_digest') or saved_digest or ''),
      'command': shlex.join(map(str, command)) if isinstance(command, list) else str(command),
      'environment': {name: value for name, value in start.items() if name not in _NO_ENVIRONMENT}}
  if not is_single:
    return values
  return values | {
      'tables': _tables(record), 'preprocessing': _describe_images(_mapping(record.evaluation.get('preprocessing'))),
      'predictions': _try(record, 'predictions', lambda: _predictions(record)),
      'predictions_note': _describe_predictions(record),
      'norms': _try(record, 'norms by layer', lambda: _norms(record)),
      'phases': _try(record, 'where the time went', lambda: _phases(record)) or [],
      'hosts': _try(record, 'hosts', lambda: host_times.sentences(record.history.events))}


def _try(record: _Record, part: str, draw: Callable[[], T]) -> T | None:
  """Returns the result of `draw`; if it fails, None, and the page says that it has no such part."""
  try:
    return draw()
  except Exception as error:  # of any library that draws: the rest of the page is of use without it
    log.warning('%s: %s could not be drawn: %s: %s', record.workdir, part, type(error).__name__, error)
    record.missing.append(f'{part}: could not be drawn ({type(error).__name__}: {error})')
    return None


def _load(workdir: str, label: str, evaluated: str) -> _Record:
  """Reads the files of a run that are there, and those of its evaluation in the directory `evaluated`."""
  missing: list[str] = []
  source = str(_load_json(workdir, 'weights.json', []).get('source', ''))
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
  if source:  # weights that were evaluated have no training
    missing = [line for line in missing if not line.startswith(('final.json: no such', 'metrics.jsonl: no such'))]
  name = str(config.get('name') or os.path.basename(os.path.abspath(workdir)))
  return _with_used(_Record(name, label, workdir, config, final, evaluation, history, arrays, missing, source))


def _load_json(workdir: str, name: str, missing: list[str]) -> Json:
  """Returns a JSON object; {} and a line in `missing` if there is none."""
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
  """Returns the content of `metrics.jsonl`; adds lines to `missing` if it is not there or not complete."""
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


def _with_used(record: _Record) -> _Record:
  """Returns the record with the checkpoint whose weights are those of the run."""
  try:
    workdir = storage.open_path(record.workdir)
    metric = str(_mapping(record.config.get('checkpoints')).get('keep_best') or '')
    used, damaged = run_weights.find_whole(workdir, metric)
    record.missing.extend(f'checkpoints/{step}: is damaged and not used, as {why}' for step, why in damaged.items())
    if used is None:
      return record
    meta = checkpoint_files.read_meta(workdir / 'checkpoints' / str(used.step))
    return record._replace(used=used, used_metrics=checkpoint_files.measured(workdir, used.step),
                           used_digest=str(meta['digests']['params']),
                           used_reason=run_weights.reason(used, damaged) if used.metric or damaged else '')
  except (Damaged, UserError, TemporaryError, LookupError, TypeError) as error:
    record.missing.append(f'checkpoints: could not be read ({error})')
    return record


def _state(record: _Record) -> str:
  """Returns how far the run is, which weights it has, and how it was resumed."""
  if record.source:
    return f'an evaluation of {record.source}'
  last = max((int(row['step']) for row in record.history.rows), default=0)
  if record.final:
    state = f'finished at step {html_pages.format_value(record.final.get("step", last))}'
  else:
    state = f'at step {last:,}, running or stopped'
  if record.used and record.used_reason:
    state += f' · its weights are those of step {record.used.step:,}, {record.used_reason}'
  num_resumes = len(record.starts) - 1
  if num_resumes > 0:
    state += f' · resumed {num_resumes}×, {record.history.lost_steps:,} steps repeated'
  slices_before = 0
  for event in record.starts:
    slices, first_slices, microbatches, step = (int(_number(event.get(name)) or 0) for name in (
        'slices', 'first_slices', 'microbatches', 'resumed_from'))
    if first_slices and slices != (slices_before or first_slices):
      state += f' · from step {step:,} on {elastic.text(slices, first_slices, microbatches)}'
    slices_before = slices or slices_before
  return state


def _key_figures(record: _Record) -> dict[str, tuple[str, str]]:
  """Returns the numbers at the top of the page by name, each with a note, which may be empty."""
  final, rows = record.final, record.history.rows
  is_older = record.used is not None and not record.used.is_newest
  metrics = record.used_metrics if is_older else _mapping(final.get('metrics'))
  if not metrics:  # a run that has not finished: the last value of each metric
    metrics = {name: value for row in rows for name, value in row.items()}
  if not metrics:
    metrics = _mapping(record.evaluation.get('metrics'))
  sizes = _mapping(final.get('num_examples')) or {
      str(record.evaluation.get('evaluation')): record.evaluation.get('num_examples')}
  figures: dict[str, tuple[str, str]] = {}
  for name, value in metrics.items():
    if re.fullmatch(r'.+/top1(@.*)?', name) and _number(value) is not None:  # such as `val/top1@ema`
      size = sizes.get(name.split('/')[0])
      note = '' if size is None else f'of {html_pages.format_value(size)} images'
      figures[name] = html_pages.format_metric(name, value), note
  times = [_number(final.get('seconds')), clock.sum_starts(record.history.events).total_s]
  if not final:
    times.append(max((row['time_s'] for row in rows if 'time_s' in row), default=None))
  # `final.json` of older versions has the seconds of the last start alone, so the largest is the nearest to the truth.
  if seconds := max(filter(None, times), default=None):
    figures['time'] = format_duration(seconds), ''
  speeds = [row['train/images_per_s'] for row in rows if 'train/images_per_s' in row]
  if speeds:
    figures['images/s, median'] = 'nan' if np.all(np.isnan(speeds)) else f'{np.nanmedian(speeds):,.0f}', ''
  num_params = _number(final.get('num_params'))
  if num_params is not None:
    figures['parameters'] = f'{num_params:,.0f}', ''
  return figures


def _alarms(record: _Record) -> list[str]:
  """Returns a sentence for each metric that raised alarms."""
  by_metric: dict[str, list[reader.Event]] = {}
  for event in record.history.events:
    if event['event'] == 'alarm':
      by_metric.setdefault(str(event.get('metric')), []).append(event)
  sentences = []
  for metric, alarms in by_metric.items():
    step, value, below = (html_pages.format_value(alarms[0].get(name)) for name in ('step', 'value', 'below'))
    times = f'{len(alarms)} times' if len(alarms) > 1 else 'once'
    sentences.append(f'Alarm, {times}, first at step {step}: {metric} was {value}, below {below}.')
  return sentences


def _tables(record: _Record) -> list[tuple[str, list[tuple[str, str]]]]:
  """Returns the title and the rows of each table of metrics: of the used checkpoint, the end, a later evaluation."""
  class_names = record.predictions.get('class_names')
  if class_names is not None:
    num_classes: float = np.size(class_names)
  else:
    num_classes = _number(_mapping(record.config.get('data')).get('num_classes')) or np.inf
  used, final, evaluated = (
      {name: value for name, value in _mapping(metrics).items() if results.is_telling(name, num_classes)}
      for metrics in (record.used_metrics, record.final.get('metrics'), record.evaluation.get('metrics')))
  tables = []
  if record.used and not record.used.is_newest and used:
    tables.append((f'at step {record.used.step:,}, whose weights are those of the run', used))
  if final:
    tables.append(('at the end of training', final))
  if evaluated and evaluated != final:
    step = record.evaluation.get('step')
    is_known = step is not None and not (record.source and step == 0)  # weights of an unknown step have step 0
    tables.append((f'evaluated at step {html_pages.format_value(step)}' if is_known else 'evaluated', evaluated))
  return [(title, [(name, html_pages.format_metric(name, value)) for name, value in metrics.items()])
          for title, metrics in tables]


def _describe_images(preprocessing: Json) -> str:
  """Returns the preprocessing of evaluated images in words."""
  def words_of(name: str, value: object) -> str:
    if isinstance(value, bool):
      return 'yes' if value else 'no'
    if isinstance(value, list):
      return (' × ' if name == 'image_px' else ' ').join(map(html_pages.format_value, value))
    return str(value)

  words = [f'{name} {words_of(name, value)}' for name, value in preprocessing.items()
           if (name, value) != ('resize_px', 0)]
  if preprocessing.get('resize_px') == 0:
    words.append('resized without a crop')
  return ', '.join(words)


def _predictions(record: _Record) -> predictions.Predictions | None:
  summary = predictions.summarize(record.predictions) if record.predictions else None
  if summary and not any(group.by_class for group in summary.groups):
    record.missing.append('predictions.npz: has no images of examples')
  return summary


def _describe_predictions(record: _Record) -> str:
  """Returns a note if the predictions are those of other weights than the run's, as after a training; else ''."""
  step = _number(record.evaluation.get('step'))  # `evaluate.json` and `predictions.npz` are written together
  if record.used is None or step is None or step == record.used.step:
    return ''
  return (f'These are predictions at step {step:,.0f}. The weights of the run are those of step {record.used.step:,}: '
          f'vit-jax evaluate --workdir={shlex.quote(record.workdir)} predicts with them.')


def _norms(record: _Record) -> norms.Norms | None:
  events = [event for event in record.history.events if event['event'] == 'norms']
  rates = {int(row['step']): row['train/lr'] for row in record.history.rows if 'train/lr' in row and 'step' in row}
  return norms.summarize(events, rates) if events else None


def _phases(record: _Record) -> list[tuple[str, str, str]]:
  """Returns each phase with its time and its share, both summed over the starts of the run, the longest first."""
  spent = clock.sum_starts(record.history.events)
  if spent.total_s <= 0:
    return []
  names = {'step': 'steps that advanced the run', 'lost': 'work lost since the last checkpoint before a kill',
           'startup': 'start-up', 'data_wait': 'waiting for data', 'evaluate': 'evaluation',
           'checkpoint': 'saving checkpoints', 'restore': 'restoring checkpoints'}
  return [(names.get(name, name), format_duration(seconds), f'{100 * seconds / spent.total_s:.1f} %')
          for name, seconds in sorted(spent.seconds.items(), key=lambda item: -item[1])]


def _mapping(value: object) -> Json:
  """Returns a value of a file if it is an object, else {}."""
  return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
  """Returns a value of a file if it is a finite number, else None."""
  number = html_pages.to_float(value)
  return number if math.isfinite(number) else None
