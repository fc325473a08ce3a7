"""Adds images labeled by a teacher to the training data: Noisy Student (Xie et al. 2020, arXiv 1911.04252, section 2).

The teacher's answer to an image is the most likely classes of the image and their probabilities, in the files of
`data/answers.py`. Images whose highest probability reaches `threshold` are selected. With `per_class`, each class has
that many images: those with the highest probability, repeated if there are too few; a class without a selected image
has none. The selected images have a fixed share of the training batches. The targets of a selected image are the
probabilities of its answer, normalized to a sum of 1; a labeled image has its class. One recipe augments all images.

`jobs/teacher_labels.py` writes the answers. Then `data/opening.py` opens both kinds of images and calls
`add_labeled_by_teacher`. The loader adds the targets by `PseudoLabeled.extra`. Axes: S unlabeled, R selected images.
"""
from __future__ import annotations

import decimal
import hashlib
import json
import logging
import pathlib
from collections.abc import Sequence

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError, redacted
from vit_jax.core.types import HostArray
from vit_jax.data import answers, user_files
from vit_jax.data.answers import Answers
from vit_jax.data.formats.mixture import Mixture
from vit_jax.data.orientation import has_own_files
from vit_jax.data.source import Record, Rows, Source, read_one
from vit_jax.data.user_files import OWN, Rules

log = logging.getLogger('vit_jax.data')


class TeacherLabeled(Rows):
  """The selected images of a source, each with the class that the teacher finds most likely."""

  def __init__(self, source: Source, rows: HostArray, classes_R: HostArray, *, class_names: tuple[str, ...]) -> None:
    """Takes the selected `rows [R] i64` of the source, perhaps with copies, and their classes `[R] i32`."""
    self.name, self.class_names, self.rows = f'{source.name} as labeled', class_names, rows
    self._source, self._classes_R = source, classes_R
    self.digest = hashlib.sha256(source.digest.encode() + rows.tobytes() + classes_R.tobytes()).hexdigest()

  @property
  def own_files(self) -> bool:
    """Whether the images are a person's own files, see `data/orientation.py`."""
    return has_own_files(self._source)

  def __len__(self) -> int:
    return len(self.rows)

  def example(self, row: int) -> Record:
    return read_one(self._source, int(self.rows[row]))._replace(labels=self.labels(row))

  def labels(self, row: int) -> tuple[int, ...]:
    return (int(self._classes_R[row]),)

  def describe(self, row: int) -> str:
    return self._source.describe(int(self.rows[row]))


class PseudoLabeled(Mixture):
  """The labeled images, followed by the selected images with their classes; `rows` are the rows of `TeacherLabeled`."""

  def __init__(self, labeled: Source, selected: TeacherLabeled, *, share: float, teacher_answers: Answers) -> None:
    """Takes both sources, the share of `selected` in training batches, and the answers for all unlabeled images."""
    classes = range(len(labeled.class_names))
    super().__init__((labeled, selected), (1. - share, share), name=f'{labeled.name} and {selected.name}',
                     class_names=labeled.class_names, labels=(classes, classes))  # no class gets another number
    self.num_labeled, self.rows = len(labeled), selected.rows
    self._folder, self._rules = teacher_answers.folder, teacher_answers.rules
    self.digest = hashlib.sha256(f'{self.digest} {teacher_answers.info}'.encode()).hexdigest()

  def extra(self) -> answers.AddAnswers:
    """Opens the answers, which the loader adds to batches in the main process; they are not pickled to its workers."""
    answer_rows = np.concatenate([np.full(self.num_labeled, -1), self.rows])  # -1: a labeled image has no answer
    return answers.AddAnswers(Answers(self._folder, self._rules, setting=answers.LABELS), answer_rows)


def add_labeled_by_teacher(labeled: Source, unlabeled: Source, settings: schema.Pseudo,
                           rules: Rules = OWN) -> PseudoLabeled:
  """Returns the training source `labeled` together with the images of `unlabeled` that the teacher has labeled.

  Raises UserError if the answers are missing, or are for other images or of another teacher; or no image is selected.
  """
  teacher_answers = _open_answers(labeled, unlabeled, settings, rules)
  classes_S, scores_S = teacher_answers.read_most_likely()
  if not scores_S.any():
    raise UserError(f'data.pseudo.source: expected images that the teacher can label, got {len(unlabeled):,} in '
                    f'{unlabeled.name} of which none could be read, so that no threshold would help. Repair the images '
                    'or set another source, and set another folder in data.pseudo.labels.')
  rows = select(classes_S, scores_S, threshold=settings.threshold, per_class=settings.per_class)
  if not len(rows):  # the message has the highest probability rounded down, so that it can be set as the threshold
    highest = decimal.Context(prec=3, rounding=decimal.ROUND_FLOOR).create_decimal(float(scores_S.max()))
    raise UserError(f'data.pseudo.threshold: expected at most {highest}, the highest probability of the '
                    f'{len(unlabeled):,} images of {unlabeled.name}, got {settings.threshold}. Set a lower one.')
  log.info('%s of the %s images of %s are selected, of %d of the %d classes; training uses %s, with copies.',
           f'{len(np.unique(rows)):,}', f'{len(unlabeled):,}', unlabeled.name, len(np.unique(classes_S[rows])),
           len(labeled.class_names), f'{len(rows):,}')
  selected = TeacherLabeled(unlabeled, rows, classes_S[rows].astype(np.int32), class_names=labeled.class_names)
  return PseudoLabeled(labeled, selected, share=settings.share, teacher_answers=teacher_answers)


def _open_answers(labeled: Source, unlabeled: Source, settings: schema.Pseudo, rules: Rules) -> Answers:
  """Opens the answers in `data.pseudo.labels`. Raises UserError if they are missing or do not match the settings."""
  folder = pathlib.Path(user_files.resolve(settings.labels, 'data.pseudo.labels'))
  if not (folder / answers.INFO).is_file():
    raise UserError(f'data.pseudo.labels: expected a folder with labels of a teacher, got {folder}, which has none '
                    'yet. Start the training, which writes them first.')
  teacher_answers = Answers(folder, rules, setting=answers.LABELS)
  teacher_answers.check_matches({
      'digest': unlabeled.digest, 'num_examples': len(unlabeled), 'top': settings.top,
      'num_classes': len(labeled.class_names), 'grid': (1, 1), 'scores': answers.PROBABILITIES})
  origin = teacher_answers.info.made  # the teacher and the classes of the answers
  teacher = redacted(settings.teacher)
  if teacher != origin.get('teacher'):
    raise UserError(f'data.pseudo.labels: expected labels of data.pseudo.teacher={teacher}, got those of '
                    f'{origin.get("teacher")} in {folder}. Set another folder.')
  digest = classes_digest(labeled.class_names)
  if origin.get('classes', digest) != digest:  # earlier versions did not write the digest of the classes
    raise UserError(f'data.pseudo.labels: expected labels for the {len(labeled.class_names):,} classes of '
                    f'{labeled.name} in this order, got those for other names or another order in {folder}. Set '
                    'another folder.')
  return teacher_answers


def classes_digest(class_names: Sequence[str]) -> str:
  """Returns the SHA-256 of the names of classes in their order."""
  return hashlib.sha256(json.dumps(list(class_names)).encode()).hexdigest()


def select(classes_S: HostArray, scores_S: HostArray, *, threshold: float, per_class: int) -> HostArray:
  """Returns the selected images, `[R] i64`, ascending, with copies.

  Args:
    classes_S: the most likely class of each image.
    scores_S: the probability of the most likely class of each image; 0 = the image could not be read.
    threshold: the smallest probability of a selected image.
    per_class: number of images of each class: those with the highest probability, and the first of equal images. If a
      class has fewer images, they are repeated in order of probability. 0 = all images that reach the threshold.
  """
  rows = np.flatnonzero((scores_S >= threshold) & (scores_S > 0))
  if not per_class or not len(rows):
    return rows
  rows = rows[np.lexsort((rows, -scores_S[rows].astype(np.float32), classes_S[rows]))]  # by class, then by score
  rows_by_class = np.split(rows, np.flatnonzero(np.diff(classes_S[rows])) + 1)  # splits where the class changes
  return np.sort(np.concatenate([np.resize(class_rows[:per_class], per_class) for class_rows in rows_by_class]))
