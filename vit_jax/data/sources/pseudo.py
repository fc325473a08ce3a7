"""Pictures that a teacher has labelled beside those with labels of their own: Noisy Student (Xie et al. 2020,
arXiv 1911.04252, section 2).

A teacher's answers are label maps of one position (`label_maps`): for each picture its most likely classes and their
probabilities. Of these pictures those are taken that it is sure enough of, and of each class as many: the surest, or
copies where there are too few. In training they have a fixed share; their targets are the stored probabilities, made to
add up to 1, and those of the others their class. Both go through the same recipe.
"""
from __future__ import annotations

import dataclasses
import hashlib
import logging
import pathlib
from collections.abc import Iterator

import jax
import numpy as np

from vit_jax.config import schema
from vit_jax.core.contracts import Loader, Prepare
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Batch, HostArray, Key
from vit_jax.data.source import Record, Source
from vit_jax.data.sources import label_maps, local_paths, opening
from vit_jax.data.sources.label_maps import LabelMaps
from vit_jax.data.sources.mixture import Mixture

log = logging.getLogger('vit_jax.data')


class Labelled:
  """The chosen pictures of a source, each with the class that the teacher finds most likely."""

  def __init__(self, source: Source, rows: HostArray, label: HostArray, *, class_names: tuple[str, ...]) -> None:
    """Takes places `rows [R] i64` in the source and their classes `label [R] i32`."""
    self.name, self.class_names, self.rows = f'{source.name} as labelled', class_names, rows
    self._source, self._label = source, label
    self.digest = hashlib.sha256(source.digest.encode() + rows.tobytes() + label.tobytes()).hexdigest()

  def __len__(self) -> int:
    return len(self.rows)

  def __getitem__(self, index: int) -> Record:
    return self._source[int(self.rows[index])]._replace(label=self.label(index), labels=None)

  def label(self, index: int) -> int:
    return int(self._label[index])

  def describe(self, index: int) -> str:
    return self._source.describe(int(self.rows[index]))


class Beside(Mixture):
  """Labelled pictures, and after them those that a teacher has labelled."""

  def __init__(self, own: Source, taught: Labelled, *, share: float, maps: LabelMaps) -> None:
    numbers = np.arange(len(own.class_names), dtype=np.int32)
    super().__init__((own, taught), (1. - share, share), name=f'{own.name} and {taught.name}',
                     class_names=own.class_names, labels=(numbers, numbers))
    self.num_own, self.rows, self._folder = len(own), taught.rows, maps.folder
    self.digest = hashlib.sha256(f'{self.digest} {maps.info}'.encode()).hexdigest()

  def maps(self) -> LabelMaps:
    """All answers of the teacher, read where they lie: not part of what goes to loader processes."""
    return LabelMaps(self._folder)


class SoftLoader:
  """A loader whose batches also have the teacher's answers: `token_labels [B, 1, k]`, `token_scores [B, 1, k]`."""

  def __init__(self, inner: Loader, source: Beside):
    self._inner, self._maps, self._rows, self._num_own = inner, source.maps(), source.rows, source.num_own
    self.info, self.describe = inner.info, inner.describe

  def batches(self, start: int) -> Iterator[Batch]:
    """This process's rows of the global batches from step `start` on; one that replaces a bad image has its class."""
    for batch in self._inner.batches(start):
      shape = (len(batch['label']), 1, self._maps.info.top)
      labels, scores = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
      labels[:, 0, 0], scores[:, 0, 0] = batch['label'], 1.
      taught = np.flatnonzero((batch['index'] >= self._num_own) & ~batch['bad'])
      labels[taught], scores[taught] = self._maps.read(self._rows[batch['index'][taught] - self._num_own])
      yield {**batch, 'token_labels': labels, 'token_scores': scores}

  def close(self) -> None:
    """Stops workers and frees what they held."""
    self._inner.close()


def softening(inner: Prepare, *, num_classes: int) -> Prepare:
  """Answers become `labels [B, C]`, and then the recipe's device part, which may mix them."""
  def prepare(batch: Batch, key: Key, step: Array) -> Batch:
    batch = dict(batch)
    classes_Bk, scores_Bk = batch.pop('token_labels')[:, 0], batch.pop('token_scores')[:, 0]
    labels_BC = (jax.nn.one_hot(classes_Bk, num_classes) * scores_Bk[..., None]).sum(1)
    return inner(batch | {'labels': labels_BC / labels_BC.sum(-1, keepdims=True)}, key, step)
  return prepare


def open_unlabelled(data: schema.Data, *, image_px: tuple[int, int]) -> Source:
  """The pictures to be labelled, with whatever classes their source has."""
  own = dataclasses.replace(data, source=data.pseudo.source, classes='', num_classes=0, num_examples=0)
  return opening.open_split(own, data.pseudo.split, image_px=image_px)


def beside(own: Source, data: schema.Data, *, image_px: tuple[int, int]) -> Beside:
  """The training source of `data`, as it is without them, and the pictures that the teacher has labelled.

  Raises:
    UserError: the answers are not there, or of other pictures or another teacher; or it is sure of none.
  """
  wanted, folder = data.pseudo, pathlib.Path(local_paths.resolve(data.pseudo.labels, 'data.pseudo.labels'))
  if not (folder / label_maps.INFO).is_file():
    raise UserError(f'there are no labels in data.pseudo.labels={folder} yet; they are written when training begins')
  maps, source = LabelMaps(folder), open_unlabelled(data, image_px=image_px)
  label_maps.check(maps.info, {'digest': source.digest, 'num_examples': len(source), 'top': wanted.top,
                               'num_classes': len(own.class_names), 'grid': (1, 1)}, folder=folder)
  if maps.info.made['teacher'] != wanted.teacher:
    raise UserError(f'{folder} has labels of the teacher {maps.info.made["teacher"]}, but data.pseudo.teacher='
                    f'{wanted.teacher}; want another data.pseudo.labels')
  classes_S, scores_S = maps.surest()
  rows = select(classes_S, scores_S, threshold=wanted.threshold, per_class=wanted.per_class)
  if not len(rows):
    raise UserError(f'the teacher is sure of none of the {len(source):,} pictures of {source.name}: the highest '
                    f'probability is {scores_S.max():.3g}, data.pseudo.threshold={wanted.threshold}; want a lower one')
  log.info('%s of the %s pictures of %s are taken, of %d of the %d classes; training sees %s, with copies.',
           f'{len(np.unique(rows)):,}', f'{len(source):,}', source.name, len(np.unique(classes_S[rows])),
           len(own.class_names), f'{len(rows):,}')
  return Beside(own, Labelled(source, rows, classes_S[rows].astype(np.int32), class_names=own.class_names),
                share=wanted.share, maps=maps)


def select(classes_S: HostArray, scores_S: HostArray, *, threshold: float, per_class: int) -> HostArray:
  """Which pictures are taken, `[R] i64`, ascending, with copies.

  Args:
    classes_S: most likely class.
    scores_S: its probability; 0 = the picture could not be read.
    threshold: least probability.
    per_class: of each class so many, the surest ones (the first of equals); of a class with fewer each of them is taken
      as often as the others or once more, the surest first. 0 = all that are sure enough.
  """
  rows = np.flatnonzero((scores_S >= threshold) & (scores_S > 0))
  if not per_class or not len(rows):
    return rows
  rows = rows[np.lexsort((rows, -scores_S[rows].astype(np.float32), classes_S[rows]))]
  groups = np.split(rows, np.flatnonzero(np.diff(classes_S[rows])) + 1)
  return np.sort(np.concatenate([np.resize(group[:per_class], per_class) for group in groups]))
