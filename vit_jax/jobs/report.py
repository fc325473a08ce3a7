"""`--job=report` and the page of a run directory, `report.html`: key figures, curves, tables, images, settings.

The job checks the directories and writes their page, and no other file. `train` and `evaluate` write the page of their
run at their end (`write_or_warn`), and `serve` shows it while the run grows (`to_html`).

The page opens without a network (`inspect/templates/report.html`). Files that are missing or damaged are left out and
listed at the end, so that a run that was killed has a report too; so is a part that cannot be drawn. Reads files only
and needs no device.

Training metrics are those of single batches; where they are noisy, the curve is their moving mean, labeled as such,
with the single values behind it. Evaluations are never smoothed.
"""
from __future__ import annotations

import functools
import logging
import math
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from markupsafe import Markup

from vit_jax import __version__
from vit_jax.config import elastic, json_files, provenance
from vit_jax.core import documents, failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.failures import Damaged
from vit_jax.core.types import HostArray
from vit_jax.evaluate import final as results
from vit_jax.inspect import charts, html_pages, norms, predictions
from vit_jax.jobs import startup
from vit_jax.record import checkpoint_files, clock, destination, reader, run_directory, storage
from vit_jax.record.progress import format_duration
from vit_jax.record.reader import Row
from vit_jax.train import host_times
from vit_jax.weights import runs as run_weights

log = logging.getLogger('vit_jax.jobs')
T = TypeVar('T')
Json = dict[str, object]
Values = dict[str, Any]
"""Values of a template."""

PAGE = 'report.html'
_MOST_ROWS = 5_000  # of training metrics, which are more than the pixels of a curve
_NO_ENVIRONMENT = ('event', 'time_s', 'resumed_from', 'lost', 'command')  # of the event of a start
RECORDS = ('config.json', 'final.json', 'evaluate.json')
TRACES = (*RECORDS, 'metrics.jsonl', 'checkpoints')
"""Files and folders of which every run directory has at least one."""


def run(workdirs: Sequence[storage.Path], to: str, *, overwrite: bool = False) -> int:
  """Writes the page and prints its path; exit status 0.

  Args:
    workdirs: run directories.
    to: path of the page; '' = `report.html` in the run directory.
    overwrite: replace the file at `to`.

  Raises:
    UserError: a directory is not a run, or its config is not that of its checkpoints; or the page there is not one of
      this program; or a file is damaged, and the page is written without it.
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
  if not any((workdir / name).exists() for name in TRACES):
    raise UserError(f'--workdir={workdir}: expected the directory of a run, got one without {", ".join(TRACES)}. '
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
  """The files of a run directory; `missing` lists those that are not there or cannot be read.

  name: of the config; label: of the directory, which distinguishes runs of one config.
  source: of the weights, if they were only evaluated here; '' = a run.
  used: the checkpoint whose weights are those of the run; None = there is none. measured: its metrics.
  digest: of its parameters; '' = not known. why: the reason for that checkpoint; '' = it is the newest one.
  """
  name: str
  label: str
  workdir: str
  config: Json
  final: Json
  evaluation: Json
  run: reader.Run
  predictions: dict[str, HostArray]
  missing: list[str]
  source: str
  used: checkpoint_files.Chosen | None = None
  measured: dict[str, float] = {}
  digest: str = ''
  why: str = ''

  @property
  def starts(self) -> list[reader.Event]:
    """The events of the starts of the run, oldest first."""
    return [event for event in self.run.events if event['event'] == 'start']


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
  # The shortest ends of the paths that differ, or else the whole paths.
  parts = [os.path.abspath(path).split(os.sep) if storage.is_local(path) else path.split('/') for path in paths]
  labels = html_pages.shortest_ends(parts) or paths
  records = [_load(path, label, os.fspath(evaluated or path)) for path, label in zip(paths, labels, strict=True)]
  is_single = len(records) == 1
  runs = [_of_run(r, is_single=is_single) for r in records]
  names = list(dict.fromkeys(name for run in runs for name in run['key_figures']))
  overview = [['run', *names], *([run['label'], *(' '.join(run['key_figures'].get(name, '–')) for name in names)]
                                 for run in runs)]
  rows = [(r.label, r.run.rows) for r in records]
  curves = [curve for kind in CURVE_KINDS
            if (curve := _try(records[0], kind.title, functools.partial(draw_curves, kind, rows)))]
  missing = [line if is_single else f'{r.label}: {line}' for r in records for line in r.missing]
  title = f'{records[0].name if is_single else f"{len(records)} runs"} – report'
  return html_pages.render('report.html', title=title, runs=runs, overview=overview, curves=curves, missing=missing,
                           version=__version__, **more)


def write_or_warn(workdir: storage.PathLike, **more: storage.PathLike) -> str:
  """Writes the report of one run like `write_report`. The results of the run exist already.

  An error is logged as a warning, and a sentence about it is returned.
  """
  try:
    return write_report(workdir, **more)
  except Exception as error:  # of any library that draws: a finished run must not end as a failed one
    log.warning('The report could not be written: %s: %s. The results are complete.', type(error).__name__, error)
    return 'not written, see the warning above'


def _of_run(r: _Record, *, is_single: bool) -> Values:
  """Returns what the page shows of a run; only the page of a single run shows its results."""
  start = r.starts[-1] if r.starts else {}
  command = start.get('command', '')
  saved = (event.get('params_digest') for event in reversed(r.run.events) if event['event'] == 'checkpoint')
  shown: Values = {
      'name': r.name, 'label': r.label, 'workdir': r.workdir, 'state': _state(r), 'key_figures': dict(_key_figures(r)),
      'digest': str(r.digest or r.final.get('params_digest') or next(saved, '') or ''), 'config': r.config,
      'alarms': list(_alarms(r)),
      'command': shlex.join(map(str, command)) if isinstance(command, list) else str(command),
      'environment': {name: value for name, value in start.items() if name not in _NO_ENVIRONMENT}}
  if not is_single:
    return shown
  return shown | _results(r) | {
      'predictions': _try(r, 'predictions', lambda: _predictions(r)),
      'norms': _try(r, 'norms by layer', lambda: _norms(r)),
      'phases': _try(r, 'where the time went', lambda: _phases(r)) or [],
      'hosts': _try(r, 'hosts', lambda: host_times.sentences(r.run.events))}


def _try(r: _Record, what: str, make: Callable[[], T]) -> T | None:
  """Returns what a function makes; if it fails, None, and the page says so."""
  try:
    return make()
  except Exception as error:  # of any library that draws: the rest of the page is of use without it
    log.warning('%s: %s could not be drawn: %s: %s', r.workdir, what, type(error).__name__, error)
    r.missing.append(f'{what}: could not be drawn ({type(error).__name__}: {error})')
    return None


def _load(workdir: str, label: str, evaluated: str) -> _Record:
  """Reads what is there of the files of a run, and those of its evaluation in the directory `evaluated`."""
  missing: list[str] = []
  source = str(_load_json(workdir, 'weights.json', []).get('source', ''))
  files = (workdir, 'config.json'), (workdir, 'final.json'), (evaluated, 'evaluate.json')
  config, final, evaluation = (_load_json(folder, name, missing) for folder, name in files)
  run = reader.NOTHING
  try:
    run = reader.read(workdir, most_rows=_MOST_ROWS)
    if run.stride > 1:
      missing.append(f'metrics.jsonl: the curves of training show 1 in {run.stride} of the logged steps')
    if run.num_broken:
      missing.append(f'metrics.jsonl: {run.num_broken} lines could not be read')
  except FileNotFoundError:
    missing.append('metrics.jsonl: no such file, so no curves')
  except UserError as error:
    missing.append(str(error))
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
  r = _Record(name, label, workdir, config, final, evaluation, run, arrays, missing, source)
  try:
    where, metric = storage.open_path(workdir), str(_mapping(config.get('checkpoints')).get('keep_best') or '')
    used, damaged = run_weights.find_whole(where, metric)
    missing.extend(f'checkpoints/{step}: is damaged and not used, as {why}' for step, why in damaged.items())
    if used is None:
      return r
    digest = checkpoint_files.read_meta(where / 'checkpoints' / str(used.step))['digests']['params']
    return r._replace(used=used, measured=checkpoint_files.measured(where, used.step), digest=str(digest),
                      why=run_weights.reason(used, damaged) if used.metric or damaged else '')
  except (Damaged, UserError, TemporaryError, LookupError, TypeError) as error:
    missing.append(f'checkpoints: could not be read ({error})')
    return r


def _load_json(workdir: str, name: str, missing: list[str]) -> Json:
  """Returns a JSON object; {} and a line in `missing` if there is none."""
  try:
    if isinstance(value := documents.load(storage.open_path(os.path.join(workdir, name))), dict):
      return value
    missing.append(f'{name}: could not be read')
  except FileNotFoundError:
    missing.append(f'{name}: no such file')
  except (OSError, ValueError):
    missing.append(f'{name}: could not be read')
  return {}


def _state(r: _Record) -> str:
  if r.source:
    return f'an evaluation of {r.source}'
  last, resumes = max((int(row['step']) for row in r.run.rows), default=0), len(r.starts) - 1
  state = (f'finished at step {html_pages.format_value(r.final.get("step", last))}' if r.final
           else f'at step {last:,}, running or stopped')
  state += f' · its weights are those of step {r.used.step:,}, {r.why}' if r.used and r.why else ''
  state += f' · resumed {resumes}×, {r.run.lost_steps:,} steps repeated' if resumes > 0 else ''
  before = 0  # slices of the start before
  for event in r.starts:
    slices, first, microbatches, step = (int(_number(event.get(name)) or 0) for name in (
        'slices', 'first_slices', 'microbatches', 'resumed_from'))
    if first and slices != (before or first):
      state += f' · from step {step:,} on {elastic.text(slices, first, microbatches)}'
    before = slices or before
  return state


def _key_figures(r: _Record) -> Iterator[tuple[str, tuple[str, str]]]:
  """Yields names, values and notes of the numbers at the top of the page."""
  metrics = (r.measured if r.used and not r.used.is_newest else _mapping(r.final.get('metrics'))) or {
      name: value for row in r.run.rows for name, value in row.items()} or _mapping(r.evaluation.get('metrics'))
  sizes = _mapping(r.final.get('num_examples')) or {
      str(r.evaluation.get('evaluation')): r.evaluation.get('num_examples')}
  for name, value in metrics.items():
    if re.fullmatch(r'.+/top1(@.*)?', name) and _number(value) is not None:
      size = sizes.get(name.split('/')[0])
      yield name, (html_pages.format_metric(name, value),
                   f'of {html_pages.format_value(size)} images' if size is not None else '')
  times = [row['time_s'] for row in r.run.rows if 'time_s' in row]
  # Older versions wrote the seconds of the last start alone.
  known = [_number(r.final.get('seconds')), clock.sum_starts(r.run.events).total_s, max(times, default=None)]
  if seconds := max(filter(None, known[:2] if r.final else known), default=None):
    yield 'time', (format_duration(seconds), '')
  speeds = [row['train/images_per_s'] for row in r.run.rows if 'train/images_per_s' in row]
  if speeds:
    yield 'images/s, median', (f'{np.nanmedian(speeds):,.0f}' if not np.all(np.isnan(speeds)) else 'nan', '')
  num_params = _number(r.final.get('num_params'))
  if num_params is not None:
    yield 'parameters', (f'{num_params:,.0f}', '')


def _alarms(r: _Record) -> Iterator[str]:
  """Yields a sentence for each metric that raised alarms."""
  alarms = [event for event in r.run.events if event['event'] == 'alarm']
  for metric in dict.fromkeys(str(alarm.get('metric')) for alarm in alarms):
    first, *others = (alarm for alarm in alarms if str(alarm.get('metric')) == metric)
    times = f'{len(others) + 1} times' if others else 'once'
    yield (f'Alarm, {times}, first at step {html_pages.format_value(first.get("step"))}: {metric} was '
           f'{html_pages.format_value(first.get("value"))}, below {html_pages.format_value(first.get("below"))}.')


def _results(r: _Record) -> Values:
  """Returns the tables of metrics: of the weights of the run, at the end of training, of a later evaluation."""
  names, of_config = r.predictions.get('class_names'), _mapping(r.config.get('data')).get('num_classes')
  num_classes = np.size(names) if names is not None else _number(of_config) or np.inf
  final, evaluated, best = (
      {name: value for name, value in _mapping(metrics).items() if results.is_telling(name, num_classes)}
      for metrics in (r.final.get('metrics'), r.evaluation.get('metrics'), r.measured))
  tables = [('at the end of training', final)] if final else []
  if r.used and not r.used.is_newest and best:
    tables.insert(0, (f'at step {r.used.step:,}, whose weights are those of the run', best))
  if evaluated and evaluated != final:
    tables.append((f'evaluated at step {html_pages.format_value(r.evaluation.get("step", "?"))}', evaluated))
  return {'tables': [(title, [(name, html_pages.format_metric(name, value)) for name, value in metrics.items()])
                     for title, metrics in tables],
          'preprocessing': _describe_images(_mapping(r.evaluation.get('preprocessing')))}


def _describe_images(preprocessing: Json) -> str:
  """Returns the preprocessing of evaluated images in words."""
  def shown(name: str, value: object) -> str:
    if isinstance(value, bool):
      return 'yes' if value else 'no'
    joint = ' × ' if name == 'image_px' else ' '
    return joint.join(map(html_pages.format_value, value)) if isinstance(value, list) else str(value)
  words = [f'{name} {shown(name, value)}' for name, value in preprocessing.items() if (name, value) != ('resize_px', 0)]
  return ', '.join(words + ['resized without a crop'] * (preprocessing.get('resize_px') == 0))


def _predictions(r: _Record) -> predictions.Predictions | None:
  summary = predictions.summarize(r.predictions) if r.predictions else None
  if summary and not any(group.by_class for group in summary.groups):
    r.missing.append('predictions.npz: has no images of examples')
  return summary


def _norms(r: _Record) -> norms.Norms | None:
  events = [event for event in r.run.events if event['event'] == 'norms']
  rates = {int(row['step']): row['train/lr'] for row in r.run.rows if 'train/lr' in row and 'step' in row}
  return norms.summarize(events, rates) if events else None


def _phases(r: _Record) -> list[tuple[str, str, str]]:
  """Returns the time of each phase and its share, summed over the starts of the run."""
  spent = clock.sum_starts(r.run.events)
  if spent.total_s <= 0:
    return []
  names = {'step': 'steps that advanced the run', 'lost': 'work lost since the last checkpoint before a kill',
           'startup': 'start-up', 'data_wait': 'waiting for data', 'evaluate': 'evaluation',
           'checkpoint': 'saving checkpoints', 'restore': 'restoring checkpoints'}
  return [(names.get(name, name), format_duration(seconds), f'{100 * seconds / spent.total_s:.1f} %')
          for name, seconds in sorted(spent.seconds.items(), key=lambda item: -item[1])]


def _mapping(value: object) -> Json:
  return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
  number = html_pages.to_float(value)
  return number if math.isfinite(number) else None


_MEAN_PART = 25  # a mean covers 1 in so many rows of a curve
_LEAST_TO_SMOOTH = 20  # rows, below which nothing is smoothed


class CurveKind(NamedTuple):
  """A chart: its title, unit of y, names of its metrics, factor, a note, and how it is drawn."""
  title: str
  unit: str
  pattern: str
  factor: float = 1.
  note: str = ''
  is_log: bool = False
  smooths: str = ''


CURVE_KINDS = (
    CurveKind('Loss', 'nats', r'train/loss|[^/]+/(nll|loss)(@.*)?', smooths='train/loss', note=(
        'train/loss is the objective, with augmentation and label smoothing if the run has them; single batches are '
        'drawn faintly. Evaluations are exact and not smoothed.')),
    CurveKind('Accuracy', '%', r'train/accuracy|.+/(top1(_k20)?|10shot)([.]partial\d+)?(@.*)?', 100.,
         smooths='train/accuracy', note='train/accuracy is that of batches, faintly each, with their augmentation. '
         'Evaluations are not smoothed.'),
    CurveKind('RankMe of features', 'dimensions', r'.+/rank_me([.]partial\d+)?(@.*)?'),
    CurveKind('Spread of features', 'standard deviation',
              r'train/(deviation|spread)|.+/deviation([.]partial\d+)?(@.*)?'),
    CurveKind('Alignment and uniformity', '', r'.+/(alignment|uniformity)([.]partial\d+)?(@.*)?'),
    CurveKind('Teacher', 'nats', r'train/(teacher_entropy|information|patch_entropy|patch_information)'),
    CurveKind('Prototypes in use', '%', r'train/(patch_)?used_prototypes', 100.),
    CurveKind('Learning rate', 'learning rate', r'train/lr'),
    CurveKind('Gradient norm', 'L2 norm', r'train/grad_norm', is_log=True),
    CurveKind('Speed', 'images/s', r'train/images_per_s'),
    CurveKind('Model FLOPs utilization', '%', r'train/mfu', 100.))


class CurveChart(NamedTuple):
  """A chart with its title and a note, which may be empty."""
  title: str
  svg: Markup
  note: str


def draw_curves(kind: CurveKind, runs: Sequence[tuple[str, Sequence[Row]]]) -> CurveChart | None:
  """Draws a chart of one or several runs; None if none of them has such metrics.

  `runs` has the name and the rows of each; if there are several, labels begin with the name.
  """
  series = [(run, rows, name) for run, rows in runs for name in sorted(
      {name for row in rows for name in row if re.fullmatch(kind.pattern, name)},
      key=lambda name: (not name.startswith('train/'), name))]
  if not series:
    return None
  is_one_metric = len({name for _, _, name in series}) == 1
  curves = []
  for run, rows, name in series:
    points = [(row['step'], kind.factor * row[name]) for row in rows if name in row and 'step' in row]
    curve = charts.Curve(name, *zip(*points, strict=True))
    if name == kind.smooths:
      curve = smooth(curve)
    if len(runs) > 1:
      smoothed = curve.label.removeprefix(name)
      curve = curve._replace(label=run + smoothed if is_one_metric else f'{run}: {curve.label}', raw=())
    curves.append(curve)
  note = kind.note if any(name == kind.smooths for _, _, name in series) else ''
  return CurveChart(kind.title, charts.draw_curves(curves, xlabel='step', ylabel=kind.unit, log=kind.is_log), note)


def smooth(curve: charts.Curve) -> charts.Curve:
  """Returns the moving mean of a curve, centered, with the curve itself behind it; a short curve stays as it is.

  The label says how many steps a mean covers. Values that are not finite are left out of it.
  """
  x, y = np.asarray(curve.x, np.float64), np.asarray(curve.y, np.float64)
  if len(y) < _LEAST_TO_SMOOTH:
    return curve
  width = max(3, len(y) // _MEAN_PART) | 1  # odd
  steps = round(float(np.median(np.diff(x))) * width)
  good = np.isfinite(y)
  middle = np.arange(len(y))
  ends, starts = np.minimum(middle + width // 2 + 1, len(y)), np.maximum(middle - width // 2, 0)
  sums, counts = (np.concatenate([[0.], np.cumsum(values)]) for values in (np.where(good, y, 0.), good.astype(float)))
  total, count = sums[ends] - sums[starts], counts[ends] - counts[starts]  # of each window; fewer at the ends
  mean = np.where(count > 0, total / np.maximum(count, 1.), np.nan)
  return charts.Curve(f'{curve.label}, mean over {steps:,} steps', curve.x, mean.tolist(), curve.y)
