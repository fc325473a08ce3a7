"""`norms.f32`: the norms of all parameters at the logged steps of a run, in binary, beside `metrics.jsonl`.

The first line is a JSON object, `{"leaves": [["grad", "head/bias", 0], ["grad", "blocks/kernel", 24], …]}`: what each
norm is of, and the number of its layers, 0 without layers. Each record behind it is the step, i64, and all norms in
that order, f32 (little endian). A record whose step is not larger than those before it repeats work that was lost.
"""
from __future__ import annotations

import io
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple, overload

import numpy as np

from vit_jax.core.types import HostArray
from vit_jax.record import appending, storage

FILE = 'norms.f32'
Norms = Mapping[str, Mapping[str, Any]]
"""Norms by kind (`grad`, `param`, `update`) and parameter path: a number, or one for each layer."""


class _Leaf(NamedTuple):
  """A kind of norm of a parameter; `layers` is 0 if the parameter has no layers."""
  kind: str
  path: str
  layers: int

  @property
  def size(self) -> int:
    return self.layers or 1


class NormsFile:
  """Appends norms to the file of a run; raises OSError if it cannot be written.

  Args:
    path: of the file; it is created with the first record.
    is_new: whether the run begins at step 0; an existing file is then replaced.
  """

  def __init__(self, path: str, *, is_new: bool) -> None:
    self._path, self._is_new = path, is_new
    self._file: appending.Appender | None = None

  def write(self, step: int, norms: Norms) -> None:
    """Adds the norms of a step."""
    if self._file is None:
      with _open(self._path, _leaves(norms), is_new=self._is_new) as opened:
        opened.flush()
        self._file = appending.Appender(self._path, os.dup(opened.fileno()))
    values = [np.ravel(np.asarray(value, np.float32)) for by_path in norms.values() for value in by_path.values()]
    self._file.write(np.int64(step).tobytes() + np.concatenate([np.zeros(0, np.float32), *values]).tobytes())

  def settle(self) -> None:
    """Makes what was written durable."""
    if self._file is not None:
      self._file.settle()

  def close(self) -> None:
    if self._file is not None:
      self._file.close()


def _leaves(norms: Norms) -> list[_Leaf]:
  return [_Leaf(kind, path, int(np.size(value)) if np.ndim(value) else 0)
          for kind, by_path in norms.items() for path, value in by_path.items()]


def _open(path: str, leaves: Sequence[_Leaf], *, is_new: bool) -> IO[bytes]:
  """Opens a file behind its last complete record; a file of other norms is started again."""
  header = json.dumps({'leaves': leaves}).encode() + b'\n'
  if not is_new and os.path.exists(path):
    with open(path, 'rb') as old:
      is_same = old.read(len(header)) == header
    if is_same:
      file: IO[bytes] = open(path, 'rb+')
      file.truncate(len(header) + (os.path.getsize(path) - len(header)) // _dtype(leaves).itemsize
                    * _dtype(leaves).itemsize)
      file.seek(0, os.SEEK_END)
      return file
  file = open(path, 'wb')
  file.write(header)
  return file


def _dtype(leaves: Sequence[_Leaf]) -> np.dtype[Any]:
  return np.dtype([('step', '<i8'), ('norms', '<f4', (sum(leaf.size for leaf in leaves),))])


def read(workdir: storage.PathLike) -> Sequence[dict[str, Any]]:
  """Returns the norms of a run, as `Events` do; none if it has no such file.

  Raises:
    OSError: the file cannot be read.
    ValueError: it is damaged.
  """
  path = os.path.join(os.fspath(workdir), FILE)
  try:
    with storage.open_growing(path) as file:
      if not isinstance(file, io.BytesIO):
        return Events(pathlib.Path(path))
      with tempfile.NamedTemporaryFile(prefix='vit_jax_') as copied:
        copied.write(file.getbuffer())
        copied.flush()
        return Events(pathlib.Path(copied.name))  # mapped to memory, also when its name is gone
  except FileNotFoundError:
    return []


class Events(Sequence[dict[str, Any]]):
  """The records of a file, without repeated ones, read from disk when they are accessed.

  Each is `step`, and norms by kind and path: a number, or a list of the layers'.

  Raises:
    OSError: the file cannot be read.
    ValueError: it is damaged.
  """

  def __init__(self, path: pathlib.Path) -> None:
    with open(path, 'rb') as file:
      header = file.readline()
    try:
      self._leaves = [_Leaf(str(kind), str(name), int(layers)) for kind, name, layers in json.loads(header)['leaves']]
    except (TypeError, KeyError, ValueError) as error:
      raise ValueError(f'{path}: expected norms behind a header, got one that is damaged') from error
    dtype = _dtype(self._leaves)
    count = (os.path.getsize(path) - len(header)) // dtype.itemsize
    self._records = np.memmap(path, dtype, 'r', len(header), (count,)) if count else np.zeros(0, dtype)
    steps = np.array(self._records['step'])
    lowest_later = np.minimum.accumulate(np.append(steps[1:], np.iinfo(np.int64).max)[::-1])[::-1]
    self._rows: HostArray = np.flatnonzero(steps < lowest_later)

  def __len__(self) -> int:
    return len(self._rows)

  @overload
  def __getitem__(self, index: int) -> dict[str, Any]: ...
  @overload
  def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

  def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    record = self._records[self._rows[index]]
    found: dict[str, Any] = {'event': 'norms', 'step': int(record['step']), 'grad': {}, 'param': {}, 'update': {}}
    start = 0
    for leaf in self._leaves:
      values = record['norms'][start:start + leaf.size].tolist()
      found.setdefault(leaf.kind, {})[leaf.path] = values if leaf.layers else values[0]
      start += leaf.size
    return found
