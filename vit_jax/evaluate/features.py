"""Features of a view on a split: every example once, computed once for all evaluations of the same weights.

A batch is split into `count` equal parts (`core.types.Shard`); a process has the parts of its devices. The table of a
split contains, for each of these parts, the rows of all batches in sequence. It can therefore be placed on the devices
without communication between hosts, and the position of a row determines its example.

`Store` keeps the tables in memory, and on disk for later jobs, in the files of `vit-jax embed`, one for each set of
parts that a process has:

  FOLDER/<what>/<weights>/<first part>-<digest of the parts>-of-<parts>.parquet

<what> is a digest of everything but the weights that features depend on; for each, only the newest weights are kept.
If a file is missing or damaged, the features are computed again. Features of other weights than in the folder's name
are an error.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from vit_jax.core import trees
from vit_jax.core.contracts import EvalLoader, Prepare
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Array, Batch, HostArray, PyTree
from vit_jax.evaluate import store
from vit_jax.evaluate.problems import check_counted, check_finite, check_size
from vit_jax.evaluate.results import started_ahead
from vit_jax.parallel import mesh as meshes
from vit_jax.record.progress import TaskProgress

log = logging.getLogger('vit_jax.evaluate')

Reader = Callable[[PyTree, Array], Array]
"""Maps the selected parameters of a view and prepared images `[B, H, W, 3]` to features `[B, D]`, or `[B, …]`."""
_NAME_DIGITS = 16  # hexadecimal digits of a digest in the name of a folder
_OLD_FILES = ('*.parquet', '*.features.npy', '*.rows.npy', '*.json')
"""Files that make room for new ones: of other weights, and of earlier versions of this program."""
_BLOCK_ROWS = 2**12  # rows that are written at once


class Layout(NamedTuple):
  """The positions of the examples of a split in its table.

  num_examples: of the split.    batch_size: global.
  num_parts: equal parts that each batch is split into.    parts: numbers of the parts that this process loads.
  """
  num_examples: int
  batch_size: int
  num_parts: int
  parts: tuple[int, ...]

  @property
  def file_name(self) -> str:
    """Name of the file of these parts, which is the same in all processes that have them."""
    digest = hashlib.sha256(repr(self.parts).encode()).hexdigest()[:8]
    return f'{self.parts[0]:05d}-{digest}-of-{self.num_parts:05d}.parquet'

  @property
  def num_own(self) -> int:
    """Number of examples in the parts of this process."""
    return sum(int(np.count_nonzero(self.examples(part) < self.num_examples)) for part in self.parts)

  @property
  def size(self) -> int:
    """Rows of a part in one batch."""
    return self.batch_size // self.num_parts

  @property
  def num_rows(self) -> int:
    """Rows of a part in all batches."""
    return -(-self.num_examples // self.batch_size) * self.size

  def examples(self, part: int) -> HostArray:
    """Returns the example of each row of a part, `[R] i64`; numbers from `num_examples` on are padding."""
    rows = np.arange(self.num_rows)
    return rows // self.size * self.batch_size + part * self.size + rows % self.size

  def find(self, examples: HostArray) -> tuple[HostArray, HostArray]:
    """Returns part and row of examples."""
    batch, within = np.divmod(examples, self.batch_size)
    part, row = np.divmod(within, self.size)
    return part, batch * self.size + row


class Rows(NamedTuple):
  """The rows of one part of a split (or of several parts, with an additional leading axis).

  features: `[R, D]` f32.   label, example: `[R]` i32; `example` is the position in the source.
  mask: `[R]` f32, 0 for padding and for images that could not be decoded.
  """
  features: HostArray
  label: HostArray
  example: HostArray
  mask: HostArray


Table = tuple[Rows, ...]
"""This process's parts of a split."""


class Store:
  """Tables of features by identity; with `folder` None they are only in memory. Every process creates one.

  `embedded` are files and folders that `vit-jax embed` wrote: their features are used where everything that features
  depend on is the same.
  """

  def __init__(self, folder: pathlib.Path | None, embedded: Sequence[pathlib.Path] = ()) -> None:
    self._folder = folder
    self._kept: dict[str, tuple[str, Layout, Table]] = {}
    self._embedded = [store.open_complete(path) for path in embedded]

  def find(self, identity: Mapping[str, str], weights: str, layout: Layout) -> Table | None:
    """Returns the table if every process has its part of it, else None.

    Raises UserError if the folder of these weights contains features of other weights.
    """
    what = _name(identity)
    kept = self._kept.get(what)
    if kept is not None and kept[:2] == (weights, layout):
      return kept[2]
    table = self._read_embedded(identity, weights, layout)
    if table is None and self._folder is not None:
      table = _read_folder(self._folder / what / weights[:_NAME_DIGITS], identity, weights, layout)
    is_everywhere = multihost_utils.process_allgather(np.array(table is not None)).all()
    if table is None or not is_everywhere:  # computing features needs all processes
      return None
    self._kept[what] = (weights, layout, table)
    return table

  def make(self, identity: Mapping[str, str], weights: str, layout: Layout, batches: Iterable[Rows]) -> Table:
    """Stores the rows of all batches, `[P, b, …]` each, and returns them as a table."""
    what = _name(identity)
    folder = self._folder and self._folder / what / weights[:_NAME_DIGITS]
    self._kept.pop(what, None)
    if folder is not None:
      # Every process removes old files before any writes a new one, as batches are computed by all together.
      _remove_old(folder)
      folder.mkdir(parents=True, exist_ok=True)
    table: Table = ()
    for number, batch in enumerate(batches):
      table = table or _empty(layout, batch.features.shape[-1], folder)
      rows = slice(number * layout.size, (number + 1) * layout.size)
      for i, part in enumerate(table):
        part.features[rows], part.label[rows], part.mask[rows] = batch.features[i], batch.label[i], batch.mask[i]
    if folder is not None:
      num_rows = sum(int(np.count_nonzero(part.mask)) for part in table)
      store.write_file(
          folder / layout.file_name, lambda: _blocks(table),
          {'format': store.FORMAT, 'what': 'features', 'shape': [table[0].features.shape[1]],
           'identity': dict(identity), 'features_digest': weights, 'num_rows': num_rows,
           'num_bad': layout.num_own - num_rows})
    self._kept[what] = (weights, layout, table)
    return table

  def _read_embedded(self, identity: Mapping[str, str], weights: str, layout: Layout) -> Table | None:
    """Reads this process's rows from the first of the embedded files that has them."""
    others = []
    for file in self._embedded:
      differing = _differing(file, identity, weights)
      if not differing:
        log.info('Features are read from %s.', file.path)
        return _read([file], layout)
      others.append(f'{file.path} ({differing})')
    if others:
      log.warning('Features are computed for %s examples of %s: expected files of vit-jax embed with the same data, '
                  'images, network and weights, got others in what is named: %s.', f'{layout.num_examples:,}',
                  identity.get('data', '')[:_NAME_DIGITS], '; '.join(others))
    return None


def _name(identity: Mapping[str, str]) -> str:
  """Returns the name of the folder of an identity."""
  return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:_NAME_DIGITS]


def _remove_old(folder: pathlib.Path) -> None:
  """Removes the files in a folder of weights and in the folders beside it, and those folders if they are empty then."""
  for path in [path for pattern in _OLD_FILES for path in folder.parent.glob(f'*/{pattern}')]:
    path.unlink(missing_ok=True)
    if path.parent != folder:
      with contextlib.suppress(OSError):  # the folder has other files
        path.parent.rmdir()


def _differing(file: store.Written, identity: Mapping[str, str], weights: str) -> str:
  """Returns the names of what differs between the features in a file and those of an identity and weights."""
  names = [name for name in identity if file.info['identity'].get(name) != identity[name]]
  if file.info['features_digest'] != weights:
    names.append('weights')
  return ', '.join(sorted(names))


def _empty(layout: Layout, width: int, folder: pathlib.Path | None) -> Table:
  """Returns a table of padding, which may be larger than the memory if there is a folder for a temporary file."""
  shape = (layout.num_rows, width)
  table = []
  for part in layout.parts:
    features: HostArray
    if folder is None:
      features = np.zeros(shape, np.float32)
    else:
      with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, 'posix_fallocate'):  # so that a full disk is an error here, and no signal at a write
          os.posix_fallocate(file.fileno(), 0, max(1, layout.num_rows * width * 4))
        features = np.memmap(file, np.float32, 'w+', shape=shape)
    table.append(Rows(features, np.full(layout.num_rows, -1, np.int32), layout.examples(part).astype(np.int32),
                      np.zeros(layout.num_rows, np.float32)))
  return tuple(table)


def _blocks(table: Table) -> Iterator[store.Block]:
  """Yields the rows of a table as they are written to files, without padding."""
  for part in table:
    for start in range(0, len(part.label), _BLOCK_ROWS):
      rows = Rows(*(column[start:start + _BLOCK_ROWS] for column in part))
      yield store.Block(rows.example.astype(np.int64), [''] * len(rows.label), rows.label, rows.features,
                        ['' if mask else 'bad' for mask in rows.mask.tolist()])


def _read_folder(folder: pathlib.Path, identity: Mapping[str, str], weights: str, layout: Layout) -> Table | None:
  """Reads this process's rows from the files of all processes that wrote them; None if some are missing or damaged.

  Raises UserError if the files are of other weights or features.
  """
  try:
    files = [store.open_complete(path) for path in sorted(folder.glob('*.parquet'))]
    differing = {file.path: _differing(file, identity, weights) for file in files}
    of_process = [file for file in files if file.path.name == layout.file_name]  # hosts may have disks of their own
    if not any(differing.values()):
      if layout.num_examples == _num_examples(files):
        return _read(files, layout, folder)
      if of_process and layout.num_own == _num_examples(of_process):
        return _read(of_process, layout, folder)
  except (UserError, TemporaryError, OSError) as error:
    log.warning('The features in %s are damaged and computed again: %s', folder, error)
    return None
  for path, names in differing.items():
    if names:
      raise UserError(f'{path}: expected the features that its folder is named after, got others ({names} differ). '
                      f'Remove {folder}, so that they are extracted again.')
  return None


def _num_examples(files: Sequence[store.Written]) -> int:
  return sum(file.info['num_rows'] + file.info['num_bad'] for file in files)


def _read(files: Sequence[store.Written], layout: Layout, folder: pathlib.Path | None = None) -> Table:
  """Returns the parts of a layout from files with examples in any order; those that are missing have mask 0.

  Args:
    files: with different examples.
    layout: of the table.
    folder: see `_empty`.

  Raises UserError if an example is not one of the source or is there twice, or a value is not finite.
  """
  table = _empty(layout, files[0].info['shape'][0], folder)
  is_read = np.zeros(layout.num_examples, bool)
  for path, block in ((file.path, block) for file in files for block in file.blocks()):
    is_inside = (block.id >= 0) & (block.id < layout.num_examples)
    if not is_inside.all() or is_read[block.id].any() or len(np.unique(block.id)) < len(block.id):
      raise UserError(f'{path}: expected ids from 0 to {layout.num_examples - 1:,}, each once, got others. Write the '
                      'features again with vit-jax embed.')
    is_finite = np.isfinite(block.values).all(tuple(range(1, block.values.ndim)))
    if not is_finite.all():
      raise UserError(f'{path}: expected finite features, got NaN or infinity for image '
                      f'{int(block.id[~is_finite][0]):,}. Write them again with vit-jax embed; if they are the same '
                      'then, the weights give no finite features.')
    is_read[block.id] = True
    part_of_example, row_of_example = layout.find(block.id)
    for part, columns in zip(layout.parts, table, strict=True):
      is_in_part = part_of_example == part
      rows = row_of_example[is_in_part]
      columns.features[rows], columns.label[rows] = block.values[is_in_part], block.label[is_in_part]
      columns.mask[rows] = 1.
  num_read, num_rows = int(is_read.sum()), sum(file.info['num_rows'] for file in files)
  if num_read != num_rows:
    raise UserError(f'{files[0].path}: expected {num_rows:,} rows, got {num_read:,}. Write the features again with '
                    'vit-jax embed.')
  return table


class Split:
  """The features of one view on one split, computed once for each state of the weights.

  Args:
    reader: computes the features.
    prepare: of the images.
    loader: of the split, in batches of `batch_size`.
    batch_size: global.
    mesh: of the parameters, and of the batches.
    store: stores tables for all evaluations of a job, and on disk.
    identity: everything but the weights that the features depend on, as text by name.
    name: for messages.
    bar: whether progress may be shown as a bar.
  """

  def __init__(self, reader: Reader, prepare: Prepare, loader: EvalLoader, *, batch_size: int, mesh: Mesh,
               store: Store, identity: Mapping[str, str], name: str, bar: bool = False) -> None:
    check_size(name, loader.num_examples)
    self.name, self.mesh, self.num_examples = name, mesh, loader.num_examples
    self._reader, self._prepare, self._loader, self._store = reader, prepare, loader, store
    self._identity, self._bar = identity, bar
    self._shard = meshes.local_shard(mesh)
    self.layout = Layout(loader.num_examples, batch_size, num_parts=self._shard.count, parts=self._shard.parts)
    self.spent_s = 0.
    """Seconds that the last call of `table` needed to compute features; 0 = they were stored."""

  def check_counted(self, num_counted: int) -> None:
    """Raises UserError if the split has no valid example."""
    check_counted(self.name, num_counted, self.num_examples)

  def count(self, unit: str, total: int, *, repeats: int = 1) -> TaskProgress:
    """Returns the progress display of work on the split, the first of several if it is done `repeats` times."""
    return TaskProgress(self.name, total, unit=unit, bar=self._bar, active=jax.process_index() == 0, repeats=repeats)

  def table(self, selected: PyTree) -> Table:
    """Returns the features of these weights. Every process must call it.

    Raises UserError if features are not finite, there is no valid example, or the features on disk are of other
    weights.
    """
    table = self.stored(selected)
    began, self.spent_s = time.monotonic(), 0.
    if table is None:
      table = self._store.make(self._identity, digest(selected), self.layout, self._counted(selected))
      self.spent_s = time.monotonic() - began
    return table

  def stored(self, selected: PyTree) -> Table | None:
    """Returns the features of these weights if they are stored, else None. Every process must call it.

    Raises UserError if the features on disk are of other weights.
    """
    return self._store.find(self._identity, digest(selected), self.layout)

  def place(self, table: Table, start: int = 0, stop: int | None = None) -> dict[str, Array]:
    """Places rows `start` to `stop` of all G parts on the mesh: `features [G, R, D]`, `label example mask [G, R]`.

    Rows beyond the end are padding with mask 0.
    """
    stop = self.layout.num_rows if stop is None else stop

    def put(name: str) -> Array:
      parts = [getattr(rows, name)[start:stop] for rows in table]
      local = np.zeros((len(parts), stop - start, *parts[0].shape[1:]), parts[0].dtype)
      for number, part in enumerate(parts):
        local[number, :len(part)] = part
      return jax.make_array_from_process_local_data(
          meshes.batch_sharding(self.mesh), local, (self._shard.count, *local.shape[1:]))

    return {name: put(name) for name in Rows._fields}

  def place_chosen(self, table: Table, examples: HostArray) -> dict[str, Array]:
    """Places the rows of some examples, given by their positions in the split, on the mesh; see `place`."""
    part, row = self.layout.find(examples)
    most = int(np.bincount(part).max())
    chosen = tuple(Rows(*(column[row[part == number]] for column in rows))
                   for number, rows in zip(self.layout.parts, table, strict=True))
    return self.place(chosen, 0, most)

  def extract(self, selected: PyTree) -> Iterator[tuple[Rows, int]]:
    """Yields rows `[P, b, …]` batch by batch, with the number of valid examples on all processes.

    Each batch is fetched while the next is computed. Every process must take all of them.

    Raises UserError if features are not finite.
    """
    for features, counts, batch in started_ahead(self._begin(selected, batch) for batch in self._loader.batches()):
      broken, counted = jax.device_get(counts).tolist()
      check_finite(self.name, broken, selected)
      others = (np.asarray(batch[name]).reshape(-1, self.layout.size) for name in ('label', 'index', 'mask'))
      yield Rows(local_parts(features), *others), counted

  def _counted(self, selected: PyTree) -> Iterator[Rows]:
    """Yields the rows of all batches, with progress."""
    num_counted = 0
    with self.count('images', self.num_examples) as progress:
      for number, (rows, counted) in enumerate(self.extract(selected), 1):
        num_counted += counted
        progress.update(number * self.layout.batch_size)
        yield rows
    self.check_counted(num_counted)

  def _begin(self, selected: PyTree, batch: Batch) -> tuple[Array, Array, Batch]:
    placed = meshes.put_batch({name: batch[name] for name in ('image', 'mask')}, self.mesh, self._shard)
    try:
      features, counts = read(self._reader, self._prepare, self.mesh, selected, placed)
    except UserError as error:  # raised while tracing, from shapes
      raise UserError(f'{self.name}: {error}') from None
    return features, counts, batch


def local_parts(x: Array) -> HostArray:
  """Returns this process's parts of an array `[B, …]` that is split over the mesh by batch: `[P, b, …]`."""
  by_start = {shard.index[0].start or 0: shard for shard in x.addressable_shards}
  return np.stack([np.asarray(by_start[start].data) for start in sorted(by_start)])


def gather(placed: dict[str, Array], mesh: jax.sharding.Mesh) -> dict[str, HostArray]:
  """Gathers arrays that are split over a mesh on every host. Every process must call it."""
  return jax.device_get(jax.jit(lambda x: x, out_shardings=meshes.replicated(mesh))(placed))


def digest(selected: PyTree) -> str:
  """Returns the digest of all weights that features depend on."""
  return trees.digest({name: selected[name] for name in ('backbone', 'state') if name in selected})


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def read(reader: Reader, prepare: Prepare, mesh: Mesh, selected: PyTree, batch: Batch) -> tuple[Array, Array]:
  """Returns features `[B, …]` f32, split as the batch, and the numbers of non-finite and of valid rows, `[2]` i32."""
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    prepared = prepare(batch, jax.random.key(0), jnp.zeros((), jnp.int32))
    features = reader(selected, prepared['image']).astype(jnp.float32)
    others = tuple(range(1, features.ndim))
    counts_B = batch['mask'] > 0
    broken_B = ~jnp.isfinite(features).all(others) & counts_B
    features = jnp.where(jnp.expand_dims(counts_B, others), features, 0.)
  counts = jnp.stack([broken_B.sum(), counts_B.sum()]).astype(jnp.int32)
  return (jax.lax.with_sharding_constraint(features, meshes.batch_sharding(mesh)),
          jax.lax.with_sharding_constraint(counts, meshes.replicated(mesh)))
