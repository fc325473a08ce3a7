"""The report card of several weights, `evaluate --weights=A,B --config=report_card`: its table, page and JSON.

`evaluate.py` measures each of the weights and makes a `Column` of the results. Then `evaluate.py` calls `text` for the
terminal, `plain` for the JSON file, and `render` for the page. This module reads no weights and no images.
"""
from __future__ import annotations

import dataclasses
import datetime
import enum
import inspect
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax import __version__
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.evaluate import by_class, results
from vit_jax.evaluate.results import Result, is_share
from vit_jax.inspect import html_pages
from vit_jax.weights import addresses

NAME = 'report card'
"""The name of the config."""
PAGE, NUMBERS = 'report_card.html', 'report_card.json'
_NOT_IN_PROTOCOL = ('every', 'batch_size', 'views', 'source', 'split', 'train_split')
"""Settings of an evaluation on which no result depends, or which are shown before the others."""


class Column(NamedTuple):
  """One of the weights with its results, a column of the table. The mappings are by the name of the evaluation.

  source, title: the weights as on the command line, and a short name of the weights.
  network, images: descriptions of the network and of the preprocessing.
  results, seconds, reasons: results and times of measured evaluations; why each other evaluation was not measured.
  """
  source: str
  title: str
  network: str
  images: str
  num_params: int
  results: dict[str, Result]
  reasons: dict[str, str]
  seconds: dict[str, float]

  @property
  def metrics(self) -> dict[str, float]:
    """Every number by `EVALUATION/METRIC`."""
    return {f'{name}/{metric}': number for name, result in self.results.items()
            for metric, number in result.metrics.items()}


def split_weights(text: str) -> list[str]:
  """Returns the weights of `--weights=A,B`; the path of a file is not split. Raises UserError if there are none."""
  names = [text] if addresses.exists(text) else [name.strip() for name in text.split(',') if name.strip()]
  if not names:
    raise UserError(f'--weights: expected weights, or several with commas, got {text!r}. Correct the list.')
  return names


def short(weights: Sequence[str]) -> list[str]:
  """Returns a title for each of the weights: the shortest ends of the paths that differ from each other."""
  parts = [pathlib.PurePosixPath(path.rstrip('/')).parts for path in weights]
  return html_pages.shortest_ends(parts) or list(weights)


def protocol(config: schema.Config, settings: schema.Eval) -> str:
  """Returns how an evaluation measures: the first line of its docstring, its source and splits, and other settings."""
  summary = (inspect.getdoc(type(settings)) or '').splitlines()[0]
  source, split = settings.source or config.data.source, settings.split or config.data.eval_split
  train_split = getattr(settings, 'train_split', None)  # None = the evaluation has no such setting
  has_one_split = train_split is None or getattr(settings, 'gallery', None) is schema.Gallery.REST
  splits = split if has_one_split else f'{train_split or config.data.train_split} to {split}'
  others = ', '.join(f'{name}={value}' for name, value in _set_values(settings).items() if name not in _NOT_IN_PROTOCOL)
  return f'{summary} {source}, {splits}' + (f'; {others}' if others else '')


def _set_values(settings: Any, prefix: str = '') -> dict[str, object]:
  """Returns the values of a settings dataclass by name, such as `features.blocks`, without empty values and 0."""
  values: dict[str, object] = {}
  for field in dataclasses.fields(settings):
    name, value = prefix + field.name, getattr(settings, field.name)
    if dataclasses.is_dataclass(value):
      values |= _set_values(value, f'{name}.')
    elif isinstance(value, tuple) and value:
      values[name] = ','.join(f'{part:g}' if isinstance(part, float) else str(part) for part in value)
    elif value not in ('', (), 0):
      value = value.value if isinstance(value, enum.Enum) else value
      values[name] = f'{value:g}' if isinstance(value, float) else value
  return values


def plain(config: schema.Config, columns: Sequence[Column]) -> dict[str, Any]:
  """Returns the content of the JSON file `NUMBERS`; metrics and headlines are named `EVALUATION/METRIC`."""
  return {
      'version': __version__, 'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
      'data': config.data.source,
      'protocols': {name: protocol(config, settings) for name, settings in config.evals.items()},
      'weights': [{
          'source': column.source, 'network': column.network, 'images': column.images,
          'num_parameters': column.num_params, 'metrics': column.metrics,
          'headlines': {name: f'{name}/{result.headline}'
                        for name, result in column.results.items() if result.headline},
          'num_examples': {name: result.num_examples for name, result in column.results.items()},
          'not_measured': column.reasons, 'seconds': column.seconds} for column in columns]}


def table(columns: Sequence[Column]) -> list[tuple[str, list[str], int]]:
  """Returns the rows: a metric, the cell of each column, and the index of the best column; -1 = no value is better."""
  evaluations = list(dict.fromkeys(name for column in columns for name in (*column.seconds, *column.results)))
  metrics = dict.fromkeys(metric for column in columns for metric in column.metrics
                          if results.is_telling(metric.split('/', 1)[1], 1000))
  main_metrics = headlines(columns)
  rows = []
  for metric in sorted(metrics, key=lambda metric: evaluations.index(metric.split('/')[0])):
    values = [column.metrics.get(metric) for column in columns]
    measured = [value for value in values if value is not None]
    is_lower_better = metric.endswith(('/nll', '/ece'))  # negative log-likelihood, expected calibration error
    is_ranked = metric in main_metrics or is_lower_better or (is_share(metric) and '_std' not in metric)
    best_value = min(measured) if is_lower_better else max(measured)
    best_column = values.index(best_value) if is_ranked and len(set(measured)) > 1 else -1
    cells = ['-' if value is None else html_pages.format_metric(metric, value) for value in values]
    rows.append((metric, cells, best_column))
  return rows


def headlines(columns: Sequence[Column]) -> set[str]:
  """Returns the main metric of each evaluation, as `EVALUATION/METRIC`."""
  pairs = (pair for column in columns for pair in column.results.items())
  return {f'{name}/{result.headline}' for name, result in pairs if result.headline}


def text(columns: Sequence[Column]) -> str:
  """Returns the table as text, and below the table the reasons why evaluations were not measured."""
  rows = [['', *(column.title for column in columns)], *([name, *cells] for name, cells, _ in table(columns))]
  return '\n'.join([by_class.align(rows), *(f'{name} of {column.title} is not measured: {reason}' for column in columns
                                            for name, reason in column.reasons.items())])


def render(content: Mapping[str, Any], columns: Sequence[Column]) -> str:
  """Returns the page as HTML; `content` is that of `plain`."""
  return html_pages.render(
      'report_card.html', title='Report card', data=content['data'], protocols=content['protocols'], columns=columns,
      rows=table(columns), headlines=headlines(columns),
      counts={name: sorted({column.results[name].num_examples for column in columns if name in column.results})
              for name in content['protocols']},
      version=content['version'], date=content['date'])
