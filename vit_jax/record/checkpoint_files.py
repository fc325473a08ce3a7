"""The checkpoints of a run on disk: their names, their descriptions, and which of them stands for the run.

A checkpoint is the folder `checkpoints/STEP`. Its item `meta` is JSON: a body, which describes what was saved, and the
SHA-256 of that body.

Every job that uses or describes a finished run takes the step from `choose`: evaluate, predict, convert, export, push,
serve, report, the summary at the end. It is the best one by `checkpoints.keep_best`, else the newest one. This follows
from the disk alone: from the checkpoints that are there, and from their metrics, which are in their descriptions and in
the record (`metrics.jsonl`).

Paths are of `pathlib` or of `etils.epath`. This module needs no library that reads arrays, and writes no files.
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
"""Files of a checkpoint: its description, the order of the data, and those that Orbax's manager reads on opening."""
COMMITTED = 'commit_success.txt'
"""The file that Orbax writes last in object storage, where it cannot rename the folder."""
LARGEST_METRIC = 1e300  # integers in JSON may be larger than any float
T = TypeVar('T')


def steps(folder: Any) -> list[int]:
  """Returns the steps of the complete checkpoints in `folder`, oldest first; [] if the folder does not exist.

  Raises:
    UserError: the system does not allow reading the folder.
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
  """Returns whether this is a valid name for the folder of a checkpoint."""
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
  """Reads a JSON object. Raises the same errors as `read_meta`."""
  content = guard(str(path), lambda: documents.load(path))
  if not isinstance(content, dict):
    raise Damaged(f'{path.parent.name}/{path.name} is not a JSON object')
  return content


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the description to write: the body and its digest."""
  return {'body': dict(body), 'sha256': sha256(body)}


def sha256(value: Any) -> str:
  """Returns the digest of a JSON value."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def guard(what: str, action: Callable[[], T]) -> T:
  """Returns the result of reading `what` with a library, and converts its errors as `failures.reading`."""
  try:
    return failures.retried(action, f'reading {what}')
  except TemporaryError:
    raise
  except Exception as error:  # Orbax raises plain Exception for a damaged array; zstd, json and TensorStore their own
    if failures.is_of_runtime(error):
      raise
    found = failures.reading(what, error)
    if isinstance(found, Damaged):  # some errors of libraries say only what their code met
      why = '' if isinstance(error, AttributeError | TypeError | LookupError) else f': {found}'
      found = Damaged(f'{what} is not what was saved there{why}')
    raise found from error


def check_arrays(item: str, arrays: Iterable[Any], shapes: Mapping[str, str]) -> None:
  """Compares the arrays that an item's files declare with the item's description, before any array is read.

  Without this check, a small compressed file could expand to any size.

  Args:
    item: name of the item, for the message.
    arrays: the metadata of its arrays, with `shape`, `dtype` and `storage.chunk_shape`.
    shapes: `float32[16, 7]` by path name, from the description.

  Raises:
    Damaged: the arrays have other shapes or dtypes, or one has a chunk that is larger than the array.
  """
  arrays = list(arrays)
  declared = collections.Counter(f'{np.dtype(array.dtype)}{list(array.shape)}' for array in arrays)
  if declared != (saved := collections.Counter(shapes.values())):
    others = ', '.join(sorted((declared - saved).keys())[:4]) or f'only {len(arrays)} arrays'
    raise Damaged(f'{item} holds other arrays than its description: {others}')
  for array in arrays:
    chunk = getattr(array.storage, 'chunk_shape', None) or ()
    if math.prod(chunk) > max(1, math.prod(array.shape)):
      raise Damaged(f'{item}: a chunk of {list(chunk)} is larger than its array {list(array.shape)}')


class Chosen(NamedTuple):
  """The step that stands for a run, and the newest one; `metric` with its `value` if it is the best, else '' and 0."""
  step: int
  newest: int
  metric: str = ''
  value: float = 0.

  @property
  def is_newest(self) -> bool:
    return self.step == self.newest

  @property
  def reason(self) -> str:
    """Returns why it is this one, such as `the best test/top1 (0.98)`."""
    return f'the best {self.metric} ({self.value:.4g})' if self.metric else 'the newest one'


def choose(workdir: storage.Path, metric: str, among: Sequence[int] | None = None) -> Chosen | None:
  """Returns the step of a run; None without a checkpoint. Checkpoints without a finite metric are never the best.

  Args:
    workdir: the run directory.
    metric: `checkpoints.keep_best`; '' = the newest checkpoint.
    among: the steps to choose from; None = those of all complete checkpoints.
  """
  among = steps(workdir / 'checkpoints') if among is None else among
  if not among:
    return None
  values = metric_values(workdir, metric, among) if metric else {}
  step = best_step(values, metric)
  return Chosen(max(among), max(among)) if step is None else Chosen(step, max(among), metric, values[step])


def best_step(values: Mapping[int, float], metric: str) -> int | None:
  """Returns the step with the best finite value of a metric, the last one of equal ones; None without any."""
  sign = -1. if reader.is_lower_better(metric) else 1.
  return max((step for step in values if math.isfinite(values[step])), key=lambda step: (sign * values[step], step),
             default=None)


def metric_values(workdir: storage.Path, metric: str, among: Sequence[int]) -> dict[int, float]:
  """Returns the values of a metric by step, of the checkpoints that have one."""
  metrics = {step: _described(workdir, step) for step in among}
  if not all(metric in of_step for of_step in metrics.values()):
    rows = _rows(workdir)  # of a run of an older version, whose checkpoints do not have their metrics
    metrics = {step: {**rows.get(step, {}), **of_step} for step, of_step in metrics.items()}
  return {step: of_step[metric] for step, of_step in metrics.items() if metric in of_step}


def measured(workdir: storage.Path, step: int) -> dict[str, float]:
  """Returns the finite metrics of all evaluations of a checkpoint."""
  return {**_rows(workdir).get(step, {}), **_described(workdir, step)}


def _described(workdir: storage.Path, step: int) -> dict[str, float]:
  """Returns the metrics in the description of a checkpoint; {} if it is damaged or has none."""
  try:
    return _evaluated(read_meta(workdir / 'checkpoints' / str(step)).get('metrics'))
  except (Damaged, UserError):
    return {}


def _rows(workdir: storage.Path) -> dict[int, dict[str, float]]:
  """Returns the finite metrics of evaluations by step; {} if there is no record."""
  metrics: dict[int, dict[str, float]] = {}
  try:
    for row in reader.read(workdir, most_rows=1).rows:
      metrics.setdefault(int(row['step']), {}).update(_evaluated(row))
  except (FileNotFoundError, UserError):
    return {}
  return metrics


def _evaluated(metrics: object) -> dict[str, float]:
  """Returns those of a mapping that are finite metrics of evaluations, such as `test/top1`."""
  return {name: float(value) for name, value in metrics.items() if '/' in name and not name.startswith('train/')
          and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_METRIC
          } if isinstance(metrics, Mapping) else {}
