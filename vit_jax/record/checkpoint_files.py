"""The checkpoints of a run on disk: names, descriptions, and the choice of the checkpoint that stands for the run.

  checkpoints/STEP/meta/metadata                  the description: {"body": {…}, "sha256": "…"}, the digest of the body
  checkpoints/STEP/params, …/opt, …/extra         the arrays, as Orbax writes them (`train/checkpoint.py`)

Every job that uses or describes a finished run takes the step from `choose`: evaluate, predict, convert, export, push,
serve, report, the summary at the end. `choose` prefers the best checkpoint by `checkpoints.keep_best` to the newest. It
depends only on files: the checkpoints that exist, and their metrics, in the descriptions and in `metrics.jsonl`.

Paths are of `pathlib` or of `etils.epath`. This module imports no library that reads arrays, and writes no files.
"""
from __future__ import annotations

import collections
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vit_jax.core import documents, failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.failures import Damaged
from vit_jax.record import reader, storage

VERSION = 1
"""Version of the layout; it increases when old checkpoints cannot be read any more."""

META, DATA, LIBRARY = 'meta/metadata', 'data/metadata', '_CHECKPOINT_METADATA'
"""Files of a checkpoint: its description, the order of the data (of older versions), and Orbax's own description."""
COMMITTED = 'commit_success.txt'  # Orbax writes this file last in object storage, where no folder can be renamed
_MAX_METRIC = 1e300  # integers in JSON may be larger than any float
T = TypeVar('T')


def steps(folder: Any) -> list[int]:
  """Returns the steps of the complete checkpoints in `folder`, oldest first; [] if the folder does not exist.

  Raises UserError if the system does not allow reading the folder.
  """
  try:
    paths = failures.retried(lambda: [path for path in folder.iterdir() if is_step(path.name) and path.is_dir()],
                             f'listing {folder}')
    return sorted(int(path.name) for path in paths if isinstance(path, pathlib.Path) or (path / COMMITTED).exists())
  except (FileNotFoundError, NotADirectoryError):
    return []
  except OSError as error:
    raise failures.reading(str(folder), error) from error


def is_step(name: str) -> bool:
  """Returns whether a folder with this name may be a checkpoint: it is a number without leading zeros."""
  return name.isascii() and name.isdecimal() and str(int(name)) == name


def read_meta(checkpoint: Any) -> dict[str, Any]:
  """Returns the verified body of a checkpoint's description, with `version`, `step`, `digests` and `shapes`.

  Raises:
    UserError: the system does not allow reading the file.
    Damaged: the file does not exist, or differs from what was saved.
  """
  record = read_json(checkpoint / META)
  if not isinstance(record.get('body'), dict) or sha256(record['body']) != record.get('sha256'):
    raise Damaged('its description is not the one that was saved')
  return record['body']


def read_json(path: Any) -> dict[str, Any]:
  """Returns the JSON object in a file. Raises the same errors as `read_meta`."""
  content = guarded_read(str(path), lambda: documents.load(path))
  if not isinstance(content, dict):
    raise Damaged(f'{path.parent.name}/{path.name} is not a JSON object')
  return content


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the description to write: the body and its digest. `read_meta` returns the body again."""
  return {'body': dict(body), 'sha256': sha256(body)}


def sha256(value: Any) -> str:
  """Returns the SHA-256 of a JSON value, as hexadecimal digits."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def guarded_read(path: str, read: Callable[[], T]) -> T:
  """Returns the result of `read`, which reads a file; converts errors to Damaged, UserError or TemporaryError."""
  try:
    return failures.retried(read, f'reading {path}')
  except TemporaryError:
    raise
  except Exception as error:  # Orbax raises plain Exception for a damaged array; zstd, json and TensorStore their own
    if failures.is_of_runtime(error):
      raise
    converted = failures.reading(path, error)
    if isinstance(converted, Damaged):
      is_about_code = isinstance(error, AttributeError | TypeError | LookupError)  # the text does not help a person
      converted = Damaged(f'{path} is not what was saved there{"" if is_about_code else f": {converted}"}')
    raise converted from error


def check_arrays(item: str, arrays: Iterable[Any], shapes: Mapping[str, str]) -> None:
  """Compares the arrays that an item's files declare with the item's description, before any array is read.

  Without this check, a small compressed file could expand to any size.

  Args:
    item: name of the item, for the message.
    arrays: the metadata of the arrays in the files, with `shape`, `dtype` and `storage.chunk_shape`.
    shapes: `float32[16, 7]` by path name, from the description.

  Raises Damaged if the arrays have other shapes or dtypes, or one has a chunk that is larger than the array.
  """
  arrays = list(arrays)
  declared = collections.Counter(f'{np.dtype(array.dtype)}{list(array.shape)}' for array in arrays)
  described = collections.Counter(shapes.values())
  if declared != described:
    others = ', '.join(sorted((declared - described).keys())[:4]) or f'only {len(arrays)} arrays'
    raise Damaged(f'{item} holds other arrays than its description: {others}')
  for array in arrays:
    chunk = getattr(array.storage, 'chunk_shape', None) or ()
    if math.prod(chunk) > max(1, math.prod(array.shape)):
      raise Damaged(f'{item}: a chunk of {list(chunk)} is larger than its array {list(array.shape)}')


class Chosen(NamedTuple):
  """The step of the checkpoint that stands for a run, and why it was chosen."""
  step: int
  newest: int  # the newest step
  metric: str = ''  # '' = the newest checkpoint was chosen, whatever its metrics
  value: float = 0.  # the best value of the metric

  @property
  def is_newest(self) -> bool:
    return self.step == self.newest

  @property
  def reason(self) -> str:
    """Returns why this step was chosen, such as `the best test/top1 (0.98)`, or `the newest one`."""
    return f'the best {self.metric} ({self.value:.4g})' if self.metric else 'the newest one'


def choose(workdir: storage.Path, metric: str, among: Sequence[int] | None = None) -> Chosen | None:
  """Returns the step that stands for a run; None if there is no checkpoint. Only finite metrics count.

  Args:
    workdir: the run directory.
    metric: `checkpoints.keep_best`; '' = the newest checkpoint.
    among: the steps to choose from; None = the steps of all complete checkpoints.
  """
  among = steps(workdir / 'checkpoints') if among is None else among
  if not among:
    return None
  values = metric_values(workdir, metric, among) if metric else {}
  step = best_step(values, metric)
  return Chosen(max(among), max(among)) if step is None else Chosen(step, max(among), metric, values[step])


def best_step(value_by_step: Mapping[int, float], metric: str) -> int | None:
  """Returns the step with the best finite value of a metric, the last of equal ones; None if no value is finite."""
  sign = -1. if reader.is_lower_better(metric) else 1.
  finite = [step for step, value in value_by_step.items() if math.isfinite(value)]
  return max(finite, key=lambda step: (sign * value_by_step[step], step), default=None)


def metric_values(workdir: storage.Path, metric: str, among: Sequence[int]) -> dict[int, float]:
  """Returns the values of a metric by step, of the checkpoints `among` that have one."""
  metrics_by_step = {step: _metrics_in_description(workdir, step) for step in among}
  if not all(metric in metrics for metrics in metrics_by_step.values()):  # written by an older version
    recorded = _metrics_in_record(workdir)
    metrics_by_step = {step: {**recorded.get(step, {}), **metrics} for step, metrics in metrics_by_step.items()}
  return {step: metrics[metric] for step, metrics in metrics_by_step.items() if metric in metrics}


def measured(workdir: storage.Path, step: int) -> dict[str, float]:
  """Returns the finite metrics of all evaluations of a checkpoint."""
  return {**_metrics_in_record(workdir).get(step, {}), **_metrics_in_description(workdir, step)}


def _metrics_in_description(workdir: storage.Path, step: int) -> dict[str, float]:
  """Returns the finite metrics in the description of a checkpoint; {} if it is damaged or has none."""
  try:
    return _finite_metrics(read_meta(workdir / 'checkpoints' / str(step)).get('metrics'))
  except (Damaged, UserError):
    return {}


def _metrics_in_record(workdir: storage.Path) -> dict[int, dict[str, float]]:
  """Returns the finite metrics of evaluations by step; {} if there is no record."""
  metrics_by_step: dict[int, dict[str, float]] = {}
  try:
    for row in reader.read(workdir, most_rows=1).rows:
      metrics_by_step.setdefault(int(row['step']), {}).update(_finite_metrics(row))
  except (FileNotFoundError, UserError):
    return {}
  return metrics_by_step


def _finite_metrics(fields: object) -> dict[str, float]:
  """Returns the fields that are finite metrics of evaluations, such as `test/top1`; {} if `fields` is not a mapping."""
  metrics = {}
  for name, value in fields.items() if isinstance(fields, Mapping) else ():
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and abs(value) < _MAX_METRIC and '/' in name and not name.startswith('train/'):
      metrics[name] = float(value)
  return metrics
