"""Retrieval between images and their captions: recall@K of COCO and Flickr30k, as CLIP (arXiv 2103.00020) reports it.

  recall@K text: the share of images with one of their own captions among the K most similar captions of all images.
  recall@K image: the share of captions whose image is among the K most similar images.

Of equal similarities the example that comes first in the order of the source is more similar. An image that cannot be
decoded, or has no usable caption, counts in neither.
"""
from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import TextRule
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray, PyTree
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Source, has_captions, origins, title
from vit_jax.data.text import prompts as prompting
from vit_jax.evaluate import features
from vit_jax.evaluate.features import Split
from vit_jax.evaluate.knn import RANKS
from vit_jax.evaluate.resources import Encoder, Make, Resources
from vit_jax.evaluate.results import Measuring, Result

log = logging.getLogger('vit_jax.evaluate')
_BLOCK = 2**24  # similarities that are computed at a time


@dataclasses.dataclass(frozen=True)
class CaptionRetrieval:
  """Evaluator of one view: `recall1_text`, `recall1_image` and so on for each K.

  test: split to search.
  encoder: of texts, and of the features.
  texts: captions of each example, in the order of the source, as the encoder reads them.
  ranks: values of K.
  """
  test: Split
  encoder: Encoder
  texts: Sequence[Sequence[str]]
  ranks: tuple[int, ...]

  def measure(self, selected: PyTree) -> Result:
    """Returns recall@K both ways, and the number of images."""
    encoder = self.encoder.at(selected)
    placed = self.test.place(self.test.table(selected))
    placed = {**placed, 'features': encoder.project(placed['features'])}
    rows = {name: x.reshape(-1, *x.shape[2:]) for name, x in features.gather(placed, self.test.mesh).items()}
    valid = np.flatnonzero(rows['mask'])
    order = valid[np.argsort(rows['example'][valid])]
    texts = [self.texts[example] for example in rows['example'][order].tolist()]
    image_of_text_T = np.repeat(np.arange(len(order)), [len(captions) for captions in texts])
    self.test.check_counted(len(image_of_text_T))
    vectors_TE = encoder.embed([text for captions in texts for text in captions])
    metrics = recall(rows['features'][order], vectors_TE, image_of_text_T, self.ranks)
    return Result(metrics, len(np.unique(image_of_text_T)), None, f'recall{self.ranks[0]}_text', self.test.spent_s)


def recall(image_SE: HostArray, text_TE: HostArray, image_of_text_T: HostArray,
           ranks: Sequence[int]) -> dict[str, float]:
  """Returns recall@K both ways.

  Args:
    image_SE: vectors of images, of unit length.
    text_TE: vectors of texts, of unit length.
    image_of_text_T: the row of the image that a text belongs to, ascending.
    ranks: values of K.
  """
  num_images, num_texts = len(image_SE), len(text_TE)
  starts = np.searchsorted(image_of_text_T, np.arange(num_images + 1))  # an image's texts are starts[i]:starts[i + 1]
  text_ranks = []  # for each image with texts the rank of its most similar one among all texts
  num_rows = max(1, _BLOCK // max(1, num_texts))
  for first in range(0, num_images, num_rows):
    for image, values_T in enumerate(image_SE[first:first + num_rows] @ text_TE.T, first):
      start, stop = starts[image:image + 2]
      if start < stop:
        best = start + int(np.argmax(values_T[start:stop]))
        text_ranks.append(_rank(values_T[None], np.array([best])))
  image_ranks = []  # for each text the rank of its image among all images
  num_rows = max(1, _BLOCK // max(1, num_images))
  for first in range(0, num_texts, num_rows):
    rows = slice(first, first + num_rows)
    image_ranks.append(_rank(text_TE[rows] @ image_SE.T, image_of_text_T[rows]))
  return {f'recall{k}_{name}': float((np.concatenate(found) < k).mean())
          for name, found in (('text', text_ranks), ('image', image_ranks)) for k in ranks}


def _rank(values_QG: HostArray, column_Q: HostArray) -> HostArray:
  """Returns the rank of one column of each row in descending order, from 0; of equal values the first is before."""
  value_Q1 = np.take_along_axis(values_QG, column_Q[:, None], 1)
  is_larger_QG = values_QG > value_Q1
  is_equal_before_QG = (values_QG == value_Q1) & (np.arange(values_QG.shape[1])[None] < column_Q[:, None])
  return np.asarray((is_larger_QG | is_equal_before_QG).sum(1))


def read_texts(source: Source, rule: TextRule, most: int, where: str, *, advice: str = '') -> list[list[str]]:
  """Returns up to `most` captions of each example, simplified; none where they cannot be used.

  Args:
    source: of images with captions.
    rule: how captions are simplified.
    most: captions of an example.
    where: the setting that begins messages.
    advice: what to do about a source without captions; '' = of an evaluation.

  Raises UserError if the source has no captions.
  """
  for origin in origins(source):
    if not has_captions(origin):
      raise UserError(f'{where}: expected a source with captions, got {title(origin)}. ' + (
          advice or f'Set {where}.source=wds:PATH, or leave this evaluation out.'))
  captions: list[list[str]] = []
  for row in range(len(source)):
    texts: list[str] = []
    with contextlib.suppress(BadImage):
      texts = [prompting.simplify(text, rule) for text in source.captions(row)[:most]]
    captions.append(texts)
  num_without = sum(not texts for texts in captions)
  if num_without:
    log.warning('%s: %s of %s images have no usable caption, and do not count.', where, f'{num_without:,}',
                f'{len(captions):,}')
  if num_without == len(captions):
    raise UserError(f'{where}: expected images with captions, got none in {title(source)}. Choose another source.')
  return captions


def build(resources: Resources, name: str, settings: schema.CaptionRetrieval) -> Make:
  """Builds the evaluator for each view; all views share one text tower."""
  where, test = f'evals.{name}', resources.eval_source(name)
  encoder = resources.encoder(name, settings)
  rule = encoder.rule if settings.text_rule is TextRule.AUTO else settings.text_rule
  texts = read_texts(test, rule, settings.captions, where)

  def make(view: str) -> Measuring:
    return CaptionRetrieval(resources.split(name, settings, test, view, in_memory=True), encoder, texts, RANKS)
  return make
