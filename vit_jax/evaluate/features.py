"""Features of a view on a split: every example once, and each process stores the rows that it loaded.

A batch is split into `count` equal parts (`core.types.Shard`); a process has the parts of its devices. The table of a
split contains, for each of these parts, the rows of all batches in sequence. It can therefore be placed on the devices
without communication between hosts, and the position of a row determines its example.
"""
from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.core import trees
from vit_jax.core.contracts import EvalLoader, Prepare
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import BATCH_AXES
from vit_jax.core.types import Array, Batch, HostArray, PyTree
from vit_jax.evaluate import problems
from vit_jax.evaluate.store import Layout, Rows, Store, Table
from vit_jax.parallel import mesh as meshes
from vit_jax.record.progress import TaskProgress

Reader = Callable[[PyTree, Array], Array]
"""Maps the selected parameters of a view and prepared images `[B, H, W, 3]` to features `[B, D]`, or `[B, …]`."""


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
    problems.check_size(name, loader.num_examples)
    self.name, self.mesh, self.num_examples = name, mesh, loader.num_examples
    self._reader, self._prepare, self._loader, self._store = reader, prepare, loader, store
    self._identity, self._bar = identity, bar
    self._shard = meshes.local_shard(mesh)
    self._layout = Layout(loader.num_examples, batch_size, self._shard.count, self._shard.parts)
    self.spent_s = 0.
    """Seconds that the last call of `table` needed to compute features; 0 = they were stored."""

  @property
  def layout(self) -> Layout:
    return self._layout

  def count(self, unit: str, total: int, *, repeats: int = 1) -> TaskProgress:
    """Returns the progress display of work on the split, the first of several if it is done `repeats` times."""
    return TaskProgress(self.name, total, unit=unit, bar=self._bar, active=jax.process_index() == 0, repeats=repeats)

  def table(self, selected: PyTree) -> Table:
    """Returns the features of these weights. Every process must call it.

    Raises:
      UserError: features are not finite, there is no valid example, or the features on disk are of other weights.
    """
    table = self.stored(selected)
    began, self.spent_s = time.monotonic(), 0.
    if table is None:
      table = self._store.make(self._identity, digest(selected), self._layout, self._counted(selected))
      self.spent_s = time.monotonic() - began
    return table

  def stored(self, selected: PyTree) -> Table | None:
    """Returns the features of these weights if they are stored, else None. Every process must call it.

    Raises:
      UserError: the features on disk are of other weights.
    """
    return self._store.find(self._identity, digest(selected), self._layout)

  def place(self, table: Table, start: int = 0, stop: int | None = None) -> dict[str, Array]:
    """Places rows `start` to `stop` of all G parts on the mesh: `features [G, R, D]`, `label example mask [G, R]`.

    Rows beyond the end are padding with mask 0.
    """
    return self._put(table, start, self._layout.num_rows if stop is None else stop)

  def place_chosen(self, table: Table, examples: HostArray) -> dict[str, Array]:
    """Places the rows of some examples, given by their positions in the split, on the mesh; see `place`."""
    part, row = self._layout.find(examples)
    most = int(np.bincount(part).max())
    chosen = tuple(Rows(*(x[row[part == own]] for x in rows))
                   for own, rows in zip(self._layout.parts, table, strict=True))
    return self._put(chosen, 0, most)

  def _put(self, table: Table, start: int, stop: int) -> dict[str, Array]:
    sharding = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    def put(name: str) -> Array:
      parts = [getattr(rows, name)[start:stop] for rows in table]
      local = np.zeros((len(parts), stop - start, *parts[0].shape[1:]), parts[0].dtype)
      for place, part in enumerate(parts):
        local[place, :len(part)] = part
      return jax.make_array_from_process_local_data(sharding, local, (self._shard.count, *local.shape[1:]))

    return {name: put(name) for name in Rows._fields}

  def extract(self, selected: PyTree) -> Iterator[tuple[Rows, int]]:
    """Yields rows `[P, b, …]` batch by batch, with the number of valid examples on all processes.

    Each batch is fetched while the next is computed. Every process must take all of them.

    Raises:
      UserError: features are not finite.
    """
    waiting: tuple[Array, Array, Batch] | None = None
    for batch in itertools.chain(self._loader.batches(), [None]):
      ahead = None if batch is None else self._begin(selected, batch)
      if waiting is not None:
        features, counts, rows = waiting
        broken, counted = jax.device_get(counts).tolist()
        problems.check_finite(self.name, broken, selected)
        yield self._fetch(features, rows), counted
      waiting = ahead

  def _counted(self, selected: PyTree) -> Iterator[Rows]:
    """Yields the rows of all batches, with progress."""
    num_counted = 0
    with self.count('images', self.num_examples) as progress:
      for number, (rows, counted) in enumerate(self.extract(selected), 1):
        num_counted += counted
        progress.update(number * self._layout.batch_size)
        yield rows
    problems.check_counted(self.name, num_counted, self.num_examples)

  def _begin(self, selected: PyTree, batch: Batch) -> tuple[Array, Array, Batch]:
    placed = meshes.put_batch({name: batch[name] for name in ('image', 'mask')}, self.mesh, self._shard)
    try:
      features, counts = read(self._reader, self._prepare, self.mesh, selected, placed)
    except UserError as error:  # raised while tracing, from shapes
      raise UserError(f'{self.name}: {error}') from None
    return features, counts, batch

  def _fetch(self, features: Array, batch: Batch) -> Rows:
    """Returns this process's rows of one batch, part by part."""
    own = local_parts(features)
    size = self._layout.size
    other = [np.asarray(batch[name]).reshape(-1, size) for name in ('label', 'index', 'mask')]
    return Rows(own, *other)


def local_parts(x: Array) -> HostArray:
  """Returns this process's parts of an array `[B, …]` that is split over the mesh by batch: `[P, b, …]`."""
  by_start = {shard.index[0].start or 0: shard for shard in x.addressable_shards}
  return np.stack([np.asarray(by_start[start].data) for start in sorted(by_start)])


def gather(placed: dict[str, Array], mesh: jax.sharding.Mesh) -> dict[str, HostArray]:
  """Gathers arrays that are split over a mesh on every host. Every process must call it."""
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.device_get(jax.jit(lambda x: x, out_shardings=whole)(placed))


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
