"""Files of `vit-jax embed`: what was changed since is refused, wherever it is read."""
from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.evaluate import embedding, store
from vit_jax.evaluate.embedding import Work
from vit_jax.evaluate.features import Layout, Store, Table
from vit_jax.evaluate.store import Block

NUM = 10
IDENTITY, WEIGHTS = {'data': 'x'}, 'abc'
FORMATS = {'npz': 'x.npz', 'parquet': 'x.parquet', 'shards': 'x'}


def compute(rows: range) -> Block:
  block = Block.empty(rows, (3,))
  block.values[:] = np.asarray(rows)[:, None] + [.25, .5, .75]
  block.label[:] = np.asarray(rows) % 3
  block.name[:] = [f'{row}.png' for row in rows]
  block.problem[:] = ['not an image' if row == 4 else '' for row in rows]
  return block


def write(folder: pathlib.Path, kind: str, change: Callable[[Block], object] = lambda block: None) -> pathlib.Path:
  """Writes a target whose values a network could give, but for a change."""
  to = folder / FORMATS[kind]
  if to.suffix == '.parquet' or kind == 'shards':
    pytest.importorskip('pyarrow')
  info = {'format': store.FORMAT, 'what': 'features', 'shape': [3], 'num_examples': NUM, 'per_shard': 4,
          'identity': IDENTITY, 'features_digest': WEIGHTS}

  def changed(rows: range) -> Block:
    block = compute(rows)
    change(block)
    return block
  embedding.write(Work(to, info, store.choose(to)), changed)
  return to


def read(path: pathlib.Path) -> Table | None:
  return Store(None, [path]).find(IDENTITY, WEIGHTS, Layout(NUM, NUM, 1, (0,)))


@pytest.mark.parametrize('kind', FORMATS)
def test_what_was_written_is_read(kind: str, tmp_path: pathlib.Path) -> None:
  found = read(write(tmp_path, kind))
  assert found is not None
  good = [row for row in range(NUM) if row != 4]
  np.testing.assert_array_equal(found[0].features[good], compute(range(NUM)).values[good])
  assert found[0].mask.tolist() == [float(row != 4) for row in range(NUM)]


def nan(block: Block) -> None:
  block.values[:] = np.nan


def one_infinity(block: Block) -> None:
  block.values[-1, -1] = -np.inf


def no_ids(block: Block) -> None:
  block.id[:] = -1


def ids_of_more(block: Block) -> None:
  block.id[:] += 5


def repeated(block: Block) -> None:
  block.id[:] = block.id[0]


def over_shards(block: Block) -> None:
  block.id[:] = np.arange(len(block.id))


@pytest.mark.parametrize('kind', FORMATS)
@pytest.mark.parametrize(('change', 'said'), [
    (nan, 'expected finite features, got NaN or infinity for image 0'),
    (one_infinity, 'expected finite features, got NaN or infinity for image 3'),
    (no_ids, 'expected ids from 0 to 9, each once, got others'), (repeated, 'each once, got others'),
    (ids_of_more, 'expected ids from 0 to 9, each once'), (over_shards, 'expected ids from 0 to 9, each once')])
def test_features_that_no_evaluation_can_use_are_refused(
    change: Callable[[Block], object], said: str, kind: str, tmp_path: pathlib.Path) -> None:
  path = write(tmp_path, kind, change)
  with pytest.raises(UserError, match=said):
    read(path)


def values(table: Table | None) -> list[HostArray]:
  return [] if table is None else list(table[0])


@pytest.mark.parametrize('kind', FORMATS)
def test_a_changed_byte_changes_nothing_or_is_refused(kind: str, tmp_path: pathlib.Path) -> None:
  path = write(tmp_path, kind)
  wanted = values(read(path))
  rng, refused = np.random.default_rng(0), 0
  files = [path] if path.is_file() else [one for one in sorted(path.iterdir()) if one.name != store.SUMS]
  for file in files:
    content = file.read_bytes()
    for place in rng.choice(len(content), min(60, len(content)), replace=False).tolist():
      file.write_bytes(content[:place] + bytes([content[place] ^ (1 << int(rng.integers(8)))]) + content[place + 1:])
      try:
        found = values(read(path))
      except UserError as error:
        assert str(path) in str(error)
        refused += 1
      else:  # of the zip's dates and names, or of padding; and a table of another name is not used
        assert not found or all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    file.write_bytes(content)
  assert refused > 25 * len(files)


def test_a_label_that_was_changed_is_refused(tmp_path: pathlib.Path) -> None:
  path = write(tmp_path, 'npz')
  with np.load(path) as file:
    arrays: dict[str, Any] = dict(file)
  arrays['label'][2] += 1
  np.savez(path, **arrays)
  with pytest.raises(UserError, match=r'expected the output of vit-jax embed as it was written, got a damaged file \('
                                      'other checksums than were written'):
    read(path)


def test_a_shard_without_checksums_is_refused(tmp_path: pathlib.Path) -> None:
  shard = min(write(tmp_path, 'shards').glob('*.parquet'))
  with pytest.raises(UserError, match='without them, such as a single shard of a folder'):
    read(shard)
