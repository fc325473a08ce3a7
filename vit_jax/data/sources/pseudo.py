"""Adds images labeled by a teacher to the training data: Noisy Student (Xie et al. 2020, arXiv 1911.04252, section 2).

The teacher's predictions are label maps with one position (`label_maps`): the most likely classes of each image and
their probabilities. Images are selected by the highest probability, and the same number for each class: those with the
highest probability, or copies if there are too few. They have a fixed share of the training batches; their targets are
the stored probabilities, normalized to a sum of 1, and those of the other images their class. The recipe is the same.
"""
from __future__ import annotations

import hashlib
import logging
import pathlib

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, HostArray
from vit_jax.data.files import access
from vit_jax.data.files.user_files import OWN, Rules
from vit_jax.data.labels import label_maps
from vit_jax.data.labels.label_maps import LabelMaps
from vit_jax.data.source import Record, Source
from vit_jax.data.sources.mixture import Mixture

log = logging.getLogger('vit_jax.data')


class TeacherLabeled:
  """The selected images of a source, each with the class that the teacher finds most likely."""

  def __init__(self, source: Source, rows: HostArray, label: HostArray, *, class_names: tuple[str, ...]) -> None:
    """Takes indexes `rows [R] i64` of the source and their classes `label [R] i32`."""
    self.name, self.class_names, self.rows = f'{source.name} as labeled', class_names, rows
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


class PseudoLabeled(Mixture):
  """Labeled images, followed by those that a teacher has labeled."""

  def __init__(self, own: Source, taught: TeacherLabeled, *, share: float, maps: LabelMaps) -> None:
    numbers = np.arange(len(own.class_names), dtype=np.int32)
    super().__init__((own, taught), (1. - share, share), name=f'{own.name} and {taught.name}',
                     class_names=own.class_names, labels=(numbers, numbers))
    self.num_own, self.rows, self._folder, self._rules = len(own), taught.rows, maps.folder, maps.rules
    self.digest = hashlib.sha256(f'{self.digest} {maps.info}'.encode()).hexdigest()

  def maps(self) -> LabelMaps:
    """Opens the teacher's predictions, which are not sent to loader processes."""
    return LabelMaps(self._folder, self._rules)


class TeacherLabels:
  """Adds the teacher's predictions to batches: `token_labels [B, 1, k]`, `token_scores [B, 1, k]`."""
  digest = ''

  def __init__(self, source: PseudoLabeled) -> None:
    self._maps, self._rows, self._num_own = source.maps(), source.rows, source.num_own

  def add(self, batch: Batch, positions: HostArray) -> Batch:
    """Returns the batch with predictions; labeled images, and those that replace a bad image, have their class."""
    del positions
    shape = (len(batch['label']), 1, self._maps.info.top)
    labels, scores = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    labels[:, 0, 0], scores[:, 0, 0] = batch['label'], 1.
    taught = np.flatnonzero((batch['index'] >= self._num_own) & ~batch['bad'])
    labels[taught], scores[taught] = self._maps.read(self._rows[batch['index'][taught] - self._num_own])
    return {**batch, 'token_labels': labels, 'token_scores': scores}


def add(own: Source, unlabeled: Source, settings: schema.Pseudo, rules: Rules = OWN) -> PseudoLabeled:
  """Returns the training source `own` together with the images of `unlabeled` that the teacher has labeled.

  Raises:
    UserError: the predictions are missing, or of other images or another teacher; or no image is selected.
  """
  folder = pathlib.Path(access.resolve(settings.labels, 'data.pseudo.labels'))
  if not (folder / label_maps.INFO).is_file():
    raise UserError(f'data.pseudo.labels: expected a folder of label maps, got {folder}, which has none yet. They are '
                    'written when training starts.')
  maps = LabelMaps(folder, rules)
  label_maps.check(maps.info, {'digest': unlabeled.digest, 'num_examples': len(unlabeled), 'top': settings.top,
                               'num_classes': len(own.class_names), 'grid': (1, 1)}, folder=folder)
  if maps.info.made['teacher'] != settings.teacher:
    raise UserError(f'data.pseudo.labels: expected labels of data.pseudo.teacher={settings.teacher}, got those of '
                    f'{maps.info.made["teacher"]} in {folder}. Set another folder.')
  classes_S, scores_S = maps.surest()
  rows = select(classes_S, scores_S, threshold=settings.threshold, per_class=settings.per_class)
  if not len(rows):
    raise UserError(f'data.pseudo.threshold: expected at most {scores_S.max():.3g}, the highest probability of the '
                    f'{len(unlabeled):,} images of {unlabeled.name}, got {settings.threshold}. Set a lower one.')
  log.info('%s of the %s images of %s are selected, of %d of the %d classes; training uses %s, with copies.',
           f'{len(np.unique(rows)):,}', f'{len(unlabeled):,}', unlabeled.name, len(np.unique(classes_S[rows])),
           len(own.class_names), f'{len(rows):,}')
  taught = TeacherLabeled(unlabeled, rows, classes_S[rows].astype(np.int32), class_names=own.class_names)
  return PseudoLabeled(own, taught, share=settings.share, maps=maps)


def select(classes_S: HostArray, scores_S: HostArray, *, threshold: float, per_class: int) -> HostArray:
  """Returns the selected images, `[R] i64`, ascending, with copies.

  Args:
    classes_S: most likely class.
    scores_S: its probability; 0 = the image could not be read.
    threshold: smallest probability.
    per_class: number of images of each class, those with the highest probability (the first of equal ones); if a class
      has fewer, each is used equally often or once more, in order of probability. 0 = all above the threshold.
  """
  rows = np.flatnonzero((scores_S >= threshold) & (scores_S > 0))
  if not per_class or not len(rows):
    return rows
  rows = rows[np.lexsort((rows, -scores_S[rows].astype(np.float32), classes_S[rows]))]
  groups = np.split(rows, np.flatnonzero(np.diff(classes_S[rows])) + 1)
  return np.sort(np.concatenate([np.resize(group[:per_class], per_class) for group in groups]))
