"""Writes the classes of any number of files as one table, `FILE.csv` or `FILE.parquet`, with bounded memory.

`predict.run` calls `write`, in every process. `write` calls `many_images.write`, which computes the table in shards, on
the devices: it writes each shard with the functions of `SUFFIXES`, and then joins the shards. A command that was
stopped resumes after the last complete shard. Rows are in the order of the files; with `top` = 1 they are:

  file,error,label_1,class_1,probability_1
  cat.jpg,,281,tabby,0.93                    `label_1` is the index of the class
  bad.jpg,why it could not be read,,,
"""
from __future__ import annotations

import csv
import dataclasses
import functools
import json
import logging
import pathlib
import shutil
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from vit_jax.core import failures, files
from vit_jax.core.contracts import View
from vit_jax.core.types import Array, PyTree
from vit_jax.data.formats import image_list
from vit_jax.evaluate import embedding, store
from vit_jax.evaluate.store import Block, Format, Info, Notes
from vit_jax.inspect import many_images
from vit_jax.inspect.model import Model
from vit_jax.inspect.zeroshot import ZeroShot
from vit_jax.record import console
from vit_jax.weights import inference

log = logging.getLogger('vit_jax.jobs')
FORMAT = 'vit_jax predictions 1'


@dataclasses.dataclass(frozen=True, eq=False)
class ByTexts:
  """Computes the probabilities `[B, C]` of classes that texts describe, from the features of `view`'s network."""
  view: View
  classifier: ZeroShot

  def __call__(self, selected: PyTree, image: Array) -> Array:
    return self.classifier.probabilities(self.view.predict(selected, image).features.pooled)


def write(model: Model, classifier: Model | ZeroShot, *, paths: Sequence[str], to: pathlib.Path, top: int) -> int:
  """Writes the classes of files as a table, and returns the exit status.

  The status is 75 after a signal to stop, 2 if a file could not be read, else 0. A Parquet file that has the table
  already is not written again, and the status is 0.

  Args:
    model: the network.
    classifier: `model` itself, or the classifier that compares its images with texts.
    paths, to: the image files, and the table, whose suffix is one of `SUFFIXES`.
    top: number of classes per file.

  Raises UserError if a file with other content is at `to`.
  """
  source = image_list.ImageList(paths)
  view = inference.view(model.weights)
  output = ByTexts(view, classifier) if isinstance(classifier, ZeroShot) else functools.partial(
      embedding.probabilities, view, model.weights.is_sigmoid)
  extractor = many_images.extract(model.weights, output, source, recipe=model.recipe, batch_size=many_images.BATCH)
  info = _describe(model, classifier, source, extractor=extractor, top=top)
  console.begin_stage('compiling, reading the first images')
  try:
    notes = many_images.write(embedding.Work(to, info, SUFFIXES[to.suffix]), extractor)
  except many_images.Stopped as stopped:
    log.warning('Stopped by %s. The same command resumes.', stopped)
    return failures.TRY_AGAIN
  console.end_stage()
  num_bad = sum(note['num_bad'] for note in notes or ())  # `notes` is None if the table was complete before
  if num_bad:
    log.error('%s of %s files could not be read; the column error says why.', f'{num_bad:,}', f'{len(paths):,}')
  if jax.process_index() == 0:
    print(f'{"Already in" if notes is None else "Written to"} {to}: {len(paths):,} files.', flush=True)
  return failures.USER_ERROR if num_bad else 0


def _describe(model: Model, classifier: Model | ZeroShot, source: image_list.ImageList, *,
              extractor: embedding.Extractor, top: int) -> Info:
  """Returns `embedding.Work.info`, the description of the table. A table is resumed if it has the same one."""
  names = list(classifier.class_names)
  per_shard = embedding.shard_size(len(source), extractor.shape(), extractor.batch_size)
  return {'format': FORMAT, 'what': 'predictions', 'num_examples': len(source), 'files': source.digest,
          'per_shard': per_shard, 'top': min(top, len(names)), 'class_names': names,
          **({'texts_digest': classifier.digest} if isinstance(classifier, ZeroShot) else {}),
          **many_images.describe(model.weights, model.recipe)}


def columns(info: Info) -> list[str]:
  """Returns the names of the columns of a table."""
  return ['file', 'error', *(f'{name}_{rank}' for rank in range(1, info['top'] + 1)
                             for name in ('label', 'class', 'probability'))]


def rows(block: Block, info: Info) -> Iterator[list[str | int | np.float32 | None]]:
  """Yields the rows of a block, in the order of `columns`; None for the classes of a file that could not be read."""
  best_labels = np.argsort(-block.values, axis=1, kind='stable')[:, :info['top']].tolist()
  for name, problem, labels, probabilities in zip(block.name, block.problem, best_labels, block.values, strict=True):
    fields: list[str | int | np.float32 | None] = [None] * (3 * info['top'])
    if not problem:
      fields = [field for label in labels for field in (label, info['class_names'][label], probabilities[label])]
    yield [store.text(name), problem, *fields]


def _write_csv(path: pathlib.Path, block: Block, info: Info) -> int:
  with open(path, 'w', newline='', encoding='utf-8') as file:
    csv.writer(file, lineterminator='\n').writerows(rows(block, info))
  return len(block.id)


def _finish_csv(part: pathlib.Path, target: pathlib.Path, info: Info, notes: Notes) -> None:
  with files.replacing(target, beside=part, is_new=True) as unfinished:
    with open(unfinished, 'w', newline='', encoding='utf-8') as table:
      csv.writer(table, lineterminator='\n').writerow(columns(info))
    with open(unfinished, 'ab') as table_bytes:
      for note in notes:
        with open(part / note['file'], 'rb') as shard:
          shutil.copyfileobj(shard, table_bytes)


def _write_parquet(path: pathlib.Path, block: Block, info: Info) -> int:
  import pyarrow as pa
  from pyarrow import parquet
  types = {'label': pa.int32(), 'probability': pa.float32()}  # the other columns are texts
  schema = pa.schema([(name, types.get(name.partition('_')[0], pa.string())) for name in columns(info)],
                     metadata={'vit_jax': json.dumps(info)})
  by_column = list(zip(*rows(block, info), strict=True))
  arrays = [pa.array(column, field.type) for column, field in zip(by_column, schema, strict=True)]
  parquet.write_table(pa.Table.from_arrays(arrays, schema=schema), path)
  return len(block.id)


def _finish_parquet(part: pathlib.Path, target: pathlib.Path, info: Info, notes: Notes) -> None:
  with files.replacing(target, beside=part, is_new=True) as unfinished:
    store.join_parquet(part, unfinished, info, notes)


SUFFIXES = {
    '.csv': Format('.csv', _write_csv, _finish_csv),
    '.parquet': Format('.parquet', _write_parquet, _finish_parquet)}
"""Formats of tables, by suffix; `predict.TABLES` has the same suffixes."""
