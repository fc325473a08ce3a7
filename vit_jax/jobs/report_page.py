"""A run directory as one page, `report.html`: key figures, curves, tables, pictures, settings.

The page opens without a network. Whatever is missing or damaged is left out and named at the end, so that a
run that was killed has a report too. Reads files only; needs no device and none of the code that wrote them.
"""
from __future__ import annotations

import html
import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.evaluate import final as results
from vit_jax.inspect import norms, predictions, render
from vit_jax.record import goodput, run_directory, storage, writer
from vit_jax.record.progress import format_duration

Json = dict[str, object]

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
  """What was found in a run directory; `missing` says what was not."""
  name: str
  workdir: str
  config: Json
  final: Json
  evaluation: Json
  run: writer.Run
  predictions: dict[str, HostArray]
  missing: list[str]


def write_report(workdirs: storage.PathLike | Sequence[storage.PathLike], out: storage.PathLike | None = None) -> str:
  """Writes the report of a run, or one with the curves of several over each other.

  Args:
    workdirs: a run directory, or several.
    out: where to; None = `report.html` in the (first) run directory.

  Returns:
    The path of the page.

  Raises:
    ValueError: a run directory does not exist, or none is given.
  """
  if isinstance(workdirs, str | os.PathLike):
    workdirs = [workdirs]
  absent = [os.fspath(w) for w in workdirs if not storage.open_path(w).is_dir()]
  if absent or not workdirs:
    raise ValueError(f'not a run directory: {", ".join(absent) or "(none given)"}; want existing folders')
  records = [_load(os.fspath(w)) for w in workdirs]
  path = os.path.join(workdirs[0], 'report.html') if out is None else os.fspath(out)
  page = _render_one(records[0]) if len(records) == 1 else _render_many(records)
  run_directory.write_bytes(path, page.encode())
  return path


def _render_one(r: _Record) -> str:
  sections = [_title(r), _key_figures(r), _curves([r]), _results(r), _predictions(r), _norms(r), _goodput(r),
              _settings(r), _missing([r])]
  return render.make_page(f'{r.name} – report', [s for s in sections if s])


def _render_many(records: Sequence[_Record]) -> str:
  names = list(dict.fromkeys(name for r in records for name, _ in _key_values(r)))
  table = render.make_table(['run', *names], [[r.name, *(dict(_key_values(r)).get(n, '–') for n in names)]
                                              for r in records])
  sections = [f'<h1>{len(records)} runs</h1>', table, _curves(records), *map(_settings, records),
              _missing(records)]
  return render.make_page(f'{len(records)} runs – report', [s for s in sections if s])


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


def _title(r: _Record) -> str:
  last = max((int(row['step']) for row in r.run.rows), default=0)
  resumes = sum(e['event'] == 'start' for e in r.run.events) - 1
  state = [f'finished at step {render.format_value(r.final.get("step", last))}' if r.final
           else f'at step {last:,}, running or stopped']
  if resumes > 0:
    state.append(f'resumed {resumes}×, {r.run.lost_steps:,} steps done again')
  return (f'<h1>{html.escape(r.name)}</h1><div class="quiet">{html.escape(" · ".join(state))}<br>'
          f'<code>{render.break_path(r.workdir)}</code></div>')


def _key_figures(r: _Record) -> str:
  cards = [f'<div class="key"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
           for name, value in _key_values(r)]
  return f'<div class="keys">{"".join(cards)}</div>' if cards else ''


def _key_values(r: _Record) -> Iterator[tuple[str, str]]:
  """Names and values of the numbers to be seen first."""
  metrics = _mapping(r.final.get('metrics')) or _newest(r.run.rows)
  sizes = _mapping(r.final.get('num_examples'))
  for name, value in metrics.items():
    number = _number(value)
    if re.fullmatch(r'.+/top1(@.*)?', name) and number is not None:
      size = sizes.get(name.split('/')[0])
      over = f' over {render.format_value(size)} images' if size is not None else ''
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


def _curves(records: Sequence[_Record]) -> str:
  figures = []
  for title, unit, pattern, factor, log in _FIGURES:
    curves = []
    found = [(r, name) for r in records for name in _names(r, pattern)]
    is_single = len({name for _, name in found}) == 1
    for r, name in found:
      points = [(row['step'], factor * row[name]) for row in r.run.rows if name in row and 'step' in row]
      label = name if len(records) == 1 else r.name if is_single else f'{r.name}: {name}'
      curves.append(render.Curve(label, *zip(*points, strict=True)))
    if curves:
      figures.append(f'<div><h3>{title}</h3>'
                     f'{render.draw_curves(curves, xlabel="step", ylabel=unit, log=log)}</div>')
  return f'<h2>Curves</h2><div class="figures">{"".join(figures)}</div>' if figures else ''


def _names(r: _Record, pattern: str) -> list[str]:
  """Metrics that match, those of training first."""
  names = {name for row in r.run.rows for name in row if re.fullmatch(pattern, name)}
  return sorted(names, key=lambda name: (not name.startswith('train/'), name))


def _results(r: _Record) -> str:
  final, own = (_telling(r, _mapping(one.get('metrics'))) for one in (r.final, r.evaluation))
  parts = [_metrics_table('at the end of training', final)] if final else []
  if own and own != final:
    parts.append(_metrics_table(f'evaluated at step {render.format_value(r.evaluation.get("step", "?"))}', own))
  digest = r.final.get('params_digest')
  if digest:
    parts.append(f'<p class="quiet">Digest of the parameters: <code>{html.escape(str(digest))}</code></p>')
  if how := _mapping(r.evaluation.get('preprocessing')):
    shown = ', '.join(f'{name} {value}' for name, value in how.items())
    parts.append(f'<p class="quiet">Evaluated images: {html.escape(shown)}</p>')
  return f'<h2>Results</h2><div class="figures">{"".join(parts)}</div>' if parts else ''


def _telling(r: _Record, metrics: Json) -> Json:
  """The metrics that say something for the number of classes, as far as that is known."""
  names, data = r.predictions.get('class_names'), _mapping(r.config.get('data'))
  known = np.size(names) if names is not None else _number(data.get('num_classes')) or np.inf
  return {name: value for name, value in metrics.items() if results.is_telling(name, known)}


def _metrics_table(title: str, metrics: Json) -> str:
  return render.make_table([title, 'value'], [(name, _shown(value)) for name, value in metrics.items()])


def _predictions(r: _Record) -> str:
  if not r.predictions:
    return ''
  where = ' of '.join(str(r.predictions[key]) for key in ('view', 'split') if key in r.predictions)
  examples = predictions.render_examples(r.predictions)
  if not examples:
    r.missing.append('predictions.npz: has no pictures of examples')
  title = f'Predictions ({where})' if where else 'Predictions'
  return f'<h2>{html.escape(title)}</h2>{predictions.render_confusion(r.predictions)}{examples}'


def _norms(r: _Record) -> str:
  event = next((e for e in reversed(r.run.events) if e['event'] == 'norms'), None)
  if event is None:
    return ''
  step = html.escape(render.format_value(event.get('step', '?')))
  grad, param, update = (_mapping(event.get(key)) for key in ('grad', 'param', 'update'))
  return f'<h2>Norms by layer, step {step}</h2>{norms.render_norms(grad, param, update)}'


def _goodput(r: _Record) -> str:
  """Seconds by phase, summed over the starts of the run."""
  found = goodput.sum_starts(r.run.events)
  if found.total_s <= 0:
    return ''
  names = {'step': 'steps that moved the run on', 'lost': 'work lost since the last checkpoint before a kill',
           'startup': 'start-up', 'data_wait': 'waiting for data', 'evaluate': 'evaluation'}
  rows = [(names.get(n, n), format_duration(s), f'{s / found.total_s:.1%}')
          for n, s in sorted(found.seconds.items(), key=lambda item: -item[1])]
  return f'<h2>Where the time went</h2>{render.make_table(["phase", "time", "share"], rows)}'


def _settings(r: _Record) -> str:
  start: Json = next((e for e in reversed(r.run.events) if e['event'] == 'start'), {})
  command = start.get('command', start.get('argv', ''))
  command = shlex.join(map(str, command)) if isinstance(command, list) else str(command)
  around = {k: v for k, v in start.items() if k not in ('event', 'time_s', 'resumed_from', 'lost', 'command', 'argv')}
  parts = [f'<pre>{render.break_path(command)}</pre>' if command else '']
  parts += [render.make_tree(name, value, is_open=False) for name, value
            in (('config', r.config), ('environment', around)) if value]
  return f'<h2>Settings of {html.escape(r.name)}</h2>{"".join(parts)}' if any(parts) else ''


def _missing(records: Sequence[_Record]) -> str:
  lines = [f'{r.name}: {line}' if len(records) > 1 else line for r in records for line in r.missing]
  items = ''.join(f'<li>{html.escape(line)}</li>' for line in lines)
  return f'<h2>Not in this report</h2><ul class="quiet">{items}</ul>' if items else ''


def _newest(rows: Sequence[writer.Row]) -> dict[str, float]:
  newest: dict[str, float] = {}
  for row in rows:
    newest.update(row)
  return newest


def _mapping(value: object) -> Json:
  return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
  number = render.to_float(value)
  return number if math.isfinite(number) else None


def _shown(value: object) -> object:
  return value if isinstance(value, int | float) else str(value)
