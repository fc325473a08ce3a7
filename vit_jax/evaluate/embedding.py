"""What a network gives for every image of a source, as files: features, probabilities or tokens.

The examples are divided into shards in the order of the source. A shard is computed as a whole, in batches of its own,
and is written under a temporary name, so that its bytes do not depend on the process that makes it, nor on kills. Each
process of several makes some of the shards; all must share the folder. Finished shards have a note beside them
(`NAME.done`). Everything is in the folder of `files.Unfinished` until the end; then process 0 compares the checksums
and completes the target.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.config import schema
from vit_jax.core import documents, failures, files
from vit_jax.core.contracts import View
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Array, HostArray, PyTree
from vit_jax.data import loader as loaders
from vit_jax.data import user_files
from vit_jax.data.device.prepare import prepare_eval
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Source, take
from vit_jax.evaluate import features, store
from vit_jax.evaluate.features import Reader
from vit_jax.evaluate.store import INFO, SUMS, Block, Format, Notes

SHARD_BYTES, SHARD_EXAMPLES = 2**28, 2**12
"""The most that a shard holds: a shard is in memory while it is made, and a kill loses it."""
SHARDS = 16
"""The number of shards of a small source, so that several processes have some each."""


def probabilities(view: View, is_sigmoid: bool, selected: PyTree, image: Array) -> Array:
  """Returns the softmax, or the sigmoids, of the logits of a view, `[B, C]`."""
  logits = view.predict(selected, image).logits
  assert logits is not None
  return (jax.nn.sigmoid if is_sigmoid else jax.nn.softmax)(logits.astype(jnp.float32))


def tokens(view: View, selected: PyTree, image: Array) -> Array:
  """Returns the patch tokens that a view ends with, row by row, after its last norm: `[B, N, D]`."""
  return view.predict(selected, image).features.tokens


@dataclasses.dataclass(frozen=True)
class Extractor:
  """Computes consecutive examples of a source on the devices of this process.

  Args:
    source: of the examples.
    reader, selected: what is computed, and the parameters for it.
    recipe, image_px: how images are prepared.
    batch_size: over the devices of the mesh.
    mesh: devices of this process alone.
    threads: that read images; 0 = one per core.
    on_done: called with the number of examples of the shard that are done, after each batch.
  """
  source: Source
  reader: Reader
  selected: PyTree
  recipe: schema.Recipe
  image_px: tuple[int, int]
  batch_size: int
  mesh: Mesh
  threads: int = 0
  on_done: Callable[[int], None] = lambda num: None

  def shape(self) -> tuple[int, ...]:
    """Returns the shape of the values of an example, without computing any."""
    image = jax.ShapeDtypeStruct((1, *self.image_px, self.recipe.channels), jnp.float32)
    return tuple(jax.eval_shape(self.reader, self.selected, image).shape[1:])

  def __call__(self, rows: range) -> Block:
    """Returns the values of a range of examples; those that cannot be decoded are zeros, and have a problem."""
    part = take(self.source, rows, name=self.source.name)
    shard = features.meshes.local_shard(self.mesh)
    loader = loaders.eval_loader(part, recipe=self.recipe, image_px=self.image_px, batch_size=self.batch_size,
                                 shard=shard, threads=self.threads)
    split = features.Split(self.reader, prepare_eval(self.recipe), loader, batch_size=self.batch_size, mesh=self.mesh,
                           store=features.Store(None), identity={}, name=self.source.name)
    block = Block.empty(rows, self.shape())
    fit = transforms.eval_transform(self.recipe, self.image_px)
    try:
      for number, (parts, _) in enumerate(split.extract(self.selected)):
        start = number * self.batch_size
        stop = min(start + self.batch_size, len(rows))
        batch = features.Rows(*(column.reshape(-1, *column.shape[2:])[:stop - start] for column in parts))
        block.values[start:stop], block.label[start:stop] = batch.features, batch.label
        block.name[start:stop] = [part.describe(index) for index in range(start, stop)]
        for row in np.flatnonzero(batch.mask == 0).tolist():
          block.problem[start + row] = loaders.reason_bad(part, start + row, fit)
        self.on_done(stop)
    finally:
      loader.close()
    return block


@dataclasses.dataclass(frozen=True)
class TextRows:
  """Computes the vectors of texts.

  encode: maps texts to vectors of unit length, `[T, E]` f32.
  texts: as they are written to the files; `ids [T] i64` are their lines, or the images that they belong to.
  simplify: what the tower gets of a text.
  on_done: called with the number of texts of the shard that are done.
  """
  encode: Callable[[Sequence[str]], HostArray]
  texts: Sequence[str]
  ids: HostArray
  simplify: Callable[[str], str]
  on_done: Callable[[int], None] = lambda num: None

  def __call__(self, rows: range) -> Block:
    texts = self.texts[rows.start:rows.stop]
    values = self.encode([self.simplify(text) for text in texts])
    self.on_done(len(texts))
    block = Block.empty(rows, values.shape[1:])
    return dataclasses.replace(block, id=self.ids[rows.start:rows.stop], name=list(texts), values=values)


def shard_size(num_examples: int, shape: Sequence[int], batch_size: int) -> int:
  """Returns the number of examples of a shard, whole batches, given the shape of the values of an example."""
  most = min(SHARD_EXAMPLES, SHARD_BYTES // (4 * math.prod(shape)), -(-num_examples // SHARDS))
  return max(1, most // batch_size) * batch_size


@dataclasses.dataclass(frozen=True)
class Work:
  """Files to write.

  target: a file or a folder, by the format.
  info: what the files hold, as JSON has it; the same for every process. Its `num_examples` and `per_shard` say which
    examples a shard has.
  """
  target: pathlib.Path
  info: Mapping[str, Any]
  format: Format

  @property
  def unfinished(self) -> files.Unfinished:
    names = {self._name(number) for number in range(len(self.shards))}
    return files.Unfinished(self.target, json.dumps(self.info), names | {INFO, SUMS})

  @property
  def shards(self) -> list[range]:
    num, each = self.info['num_examples'], self.info['per_shard']
    return [range(start, min(start + each, num)) for start in range(0, num, each)]

  def path(self, number: int) -> pathlib.Path:
    """Returns the path of an unfinished target's shard."""
    return self.unfinished.folder / self._name(number)

  def _name(self, number: int) -> str:
    return f'{self.info["what"]}-{number:05d}-of-{len(self.shards):05d}{self.format.suffix}'

  def note(self, number: int) -> pathlib.Path:
    return self.path(number).with_name(f'{self.path(number).name}{files.NOTE}')

  def num_finished(self) -> int:
    """Returns the number of examples of the shards that are finished, by any process."""
    return sum(len(rows) for number, rows in enumerate(self.shards) if self.note(number).exists())


def write(work: Work, compute: Callable[[range], Block], *, share: tuple[int, int] = (0, 1),
          meet: Callable[[str], None] = lambda place: None) -> Notes | None:
  """Writes what a network gives for a source.

  Args:
    work: the files.
    compute: the values of a range of examples.
    share: index of this process, and the number of processes.
    meet: a barrier: returns when all processes have called it with this name.

  Returns:
    On process 0, a note of each shard: `num_rows`, `num_bad`. None if the same files exist already.

  Raises UserError if the target, or its unfinished files, have other content, or cannot be written.
  """
  unfinished = work.unfinished
  is_taken = work.target.is_dir() and work.format is not store.FOLDER  # even by an empty folder
  if is_taken or not files.is_vacant(work.target):
    if store.planned(store.read_info(work.target)) != documents.parse(unfinished.plan):
      raise UserError(f'--to={work.target}: expected a new file or folder, got one with other content. Choose another, '
                      'or remove it.')
    unfinished.discard()
    return None
  notes: Notes = []
  meet('embedding seen')
  try:
    process, num_processes = share
    is_first = process == 0
    with unfinished.open() if is_first else contextlib.nullcontext(unfinished.folder) as part:
      meet('embedding begun')
      has_all_shards = (part / INFO).is_file()  # an earlier command was interrupted in its last step
      for number in range(process, 0 if has_all_shards else len(work.shards), num_processes):
        if not work.note(number).exists():
          _write_shard(work, number, compute(work.shards[number]))
      meet('embedding computed')
      if is_first:
        if not has_all_shards:
          notes = [_read_note(work, number) for number in range(len(work.shards))]
        _finish(work, notes)
      meet('embedding whole')
  except OSError as error:
    raise failures.writing(f'--to={work.target}', error) from error
  return notes


def _write_shard(work: Work, number: int, block: Block) -> None:
  """Writes a shard, and then its note, which says that the shard is finished."""
  path = work.path(number)
  with files.replacing(path) as unfinished:
    num_rows = work.format.write(unfinished, block, work.info)
    note = {'file': path.name, 'num_rows': num_rows, 'num_bytes': unfinished.stat().st_size,
            'sha256': user_files.sha256(unfinished), 'num_bad': sum(map(bool, block.problem)),
            'name_bytes': block.name_bytes()}
  files.replace(work.note(number), json.dumps(note).encode())


def _read_note(work: Work, number: int) -> dict[str, Any]:
  """Returns the note of a finished shard, whose checksum is compared; one with another is removed."""
  path, note = work.path(number), work.note(number)
  if not path.is_file() or not note.is_file():
    raise UserError(f'--to={work.target}: expected a folder that all processes share, got no {path.name} of another '
                    f'process in {path.parent}. Choose a shared folder.')
  try:
    content = documents.read(note, advice='The same command writes it again.')
    for name in ('num_rows', 'num_bytes', 'num_bad', 'name_bytes'):
      content.field(name).whole()
    if content.field('file').text() != path.name or user_files.sha256(path) != content.field('sha256').text():
      raise UserError(f'{path}: expected the SHA-256 {content.field("sha256").value}, got another, as the file was '
                      'changed or the disk is damaged. The same command writes it again.')
  except UserError as error:
    note.unlink()
    raise TemporaryError(str(error)) from None
  return content.object()


def _finish(work: Work, notes: Sequence[Mapping[str, Any]]) -> None:
  """Completes the target from all shards, and removes what was only needed for it."""
  part = work.unfinished.folder
  work.format.finish(part, work.target, work.info, notes)
  if (part / INFO).is_file():
    work.unfinished.complete(store.files_of(part))
  else:  # the target is a file
    work.unfinished.discard()
