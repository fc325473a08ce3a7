"""Predictions of any number of files as one table, `FILE.csv` or `FILE.parquet`, with bounded memory; resumes.

`predict.run` calls `write`, which computes the shards of the table and joins them (`many_images.write`).

A row has `file`, `error` (empty, or why the file could not be read), and for each rank from 1 on `label_1` (the number
of the class), `class_1` and `probability_1`. Rows are in the order of the files.
"""
from __future__ import annotations

import csv
import dataclasses
import json
import logging
import pathlib
import shutil
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from vit_jax.core import extras, failures, files
from vit_jax.core.contracts import View
from vit_jax.core.types import Array, PyTree
from vit_jax.data.formats import image_list
from vit_jax.evaluate import embedding, embedding_files
from vit_jax.evaluate.embedding_files import Block, Format, Info, Notes
from vit_jax.inspect import many_images
from vit_jax.inspect.many_images import Stopped
from vit_jax.inspect.model import Model
from vit_jax.inspect.zeroshot import ZeroShot
from vit_jax.record import console
from vit_jax.weights import inference

log = logging.getLogger('vit_jax.jobs')
FORMAT = 'vit_jax predictions 1'


@dataclasses.dataclass(frozen=True, eq=False)
class ByTexts:
  """Reads the probabilities of names of classes in words, `[B, C]`."""
  view: View
  classifier: ZeroShot

  def __call__(self, selected: PyTree, image: Array) -> Array:
    return self.classifier.probabilities(self.view.predict(selected, image).features.pooled)


def write(network: Model, classifier: Model | ZeroShot, paths: Sequence[str], to: pathlib.Path, *, top: int) -> int:
  """Writes the classes of files; exit status 2 if a file could not be read, 75 after a signal to stop, else 0.

  Raises:
    UserError: `to` has other content, or a package is missing.
  """
  weights, names = network.weights, tuple(classifier.class_names)
  view = inference.view(weights)
  reader = ByTexts(view, classifier) if isinstance(classifier, ZeroShot) else embedding.Probabilities(
      view, weights.is_sigmoid)
  recipe = network.recipe
  source = image_list.ImageList(paths)
  extractor = many_images.extract(weights, reader, source, recipe=recipe, batch_size=many_images.BATCH)
  shape, batch_size = extractor.shape(), extractor.batch_size
  info = {'format': FORMAT, 'what': 'predictions', 'num_examples': len(source), 'files': source.digest,
          'per_shard': embedding.shard_size(len(source), shape, batch_size), 'top': min(top, len(names)),
          'class_names': list(names), **many_images.describe(weights, recipe)}
  if to.suffix == '.parquet':
    extras.load('pyarrow.parquet', 'parquet', f'--to={to}')
  console.begin_stage('compiling, reading the first images')
  try:
    notes = many_images.write(embedding.Work(to, info, SUFFIXES[to.suffix]), extractor)
  except Stopped as stopped:
    log.warning('Stopped by %s. The same command resumes.', stopped)
    return failures.TRY_AGAIN
  console.end_stage()
  bad = sum(note['num_bad'] for note in notes or ())
  if bad:
    log.error('%s of %s files could not be read; the column error says why.', f'{bad:,}', f'{len(paths):,}')
  if jax.process_index() == 0:
    print(f'{"Already in" if notes is None else "Written to"} {to}: {len(paths):,} files.', flush=True)
  return 2 if bad else 0


def columns(info: Info) -> list[str]:
  """Returns the names of the columns."""
  return ['file', 'error', *(f'{name}_{rank}' for rank in range(1, info['top'] + 1)
                             for name in ('label', 'class', 'probability'))]


def rows(block: Block, info: Info) -> Iterator[list[str | int | np.float32 | None]]:
  """Yields the rows of a block; None for the classes of a file that could not be read."""
  best = np.argsort(-block.values, axis=1, kind='stable')[:, :info['top']]
  for name, problem, chosen, values in zip(block.name, block.problem, best.tolist(), block.values, strict=True):
    classes: list[str | int | np.float32 | None] = [None] * (3 * info['top'])
    if not problem:
      classes = [field for label in chosen for field in (label, info['class_names'][label], values[label])]
    yield [embedding_files.text(name), problem, *classes]


def _write_csv(path: pathlib.Path, block: Block, info: Info) -> int:
  with open(path, 'w', newline='', encoding='utf-8') as file:
    csv.writer(file, lineterminator='\n').writerows(rows(block, info))
  return len(block.id)


def _finish_csv(part: pathlib.Path, target: pathlib.Path, info: Info, notes: Notes) -> None:
  with files.replacing(target, beside=part, is_new=True) as half:
    with open(half, 'w', newline='', encoding='utf-8') as file:
      csv.writer(file, lineterminator='\n').writerow(columns(info))
    with open(half, 'ab') as out:
      for note in notes:
        with open(part / note['file'], 'rb') as shard:
          shutil.copyfileobj(shard, out)


def _write_parquet(path: pathlib.Path, block: Block, info: Info) -> int:
  import pyarrow as pa
  from pyarrow import parquet
  kinds = {'label': pa.int32(), 'probability': pa.float32()}
  schema = pa.schema([(name, kinds.get(name.partition('_')[0], pa.string())) for name in columns(info)],
                     metadata={'vit_jax': json.dumps(info)})
  by_column = list(zip(*rows(block, info), strict=True))
  arrays = [pa.array(column, field.type) for column, field in zip(by_column, schema, strict=True)]
  parquet.write_table(pa.Table.from_arrays(arrays, schema=schema), path)
  return len(block.id)


def _finish_parquet(part: pathlib.Path, target: pathlib.Path, info: Info, notes: Notes) -> None:
  with files.replacing(target, beside=part, is_new=True) as half:
    embedding_files.join_parquet(part, half, info, notes)


SUFFIXES = {
    '.csv': Format('.csv', _write_csv, _finish_csv, lambda path: None),
    '.parquet': Format('.parquet', _write_parquet, _finish_parquet, embedding_files.read_parquet_info)}
"""Formats of tables."""
