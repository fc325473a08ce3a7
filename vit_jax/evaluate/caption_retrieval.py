"""Retrieval between images and their captions: recall@K of COCO and Flickr30k, as CLIP (arXiv 2103.00020) reports it.

  recall@K text: the share of images with one of their own captions among the K most similar captions of all images.
  recall@K image: the share of captions whose image is among the K most similar images.

Of equal similarities the example that comes first in the order of the source is more similar. An image that cannot be
decoded, or has no usable caption, counts in neither.
"""
from __future__ import annotations

import contextlib
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
from vit_jax.evaluate.resources import Encoder, Make, Resources
from vit_jax.evaluate.results import Measuring, Result, mark, named
from vit_jax.evaluate.retrieval import RANKS

log = logging.getLogger('vit_jax.evaluate')
_BLOCK = 2**24  # similarities at a time


class CaptionRetrieval:
  """Evaluator of one view: `recall1_text`, `recall1_image` and so on for each K.

  Args:
    test: split to search.
    encoder: of texts, and of the features.
    texts: captions of each example, in the order of the source, as the encoder reads them.
    ranks: values of K.
    limit: number of examples to which the split was truncated; 0 = not truncated.
  """

  def __init__(self, test: Split, encoder: Encoder, texts: Sequence[Sequence[str]], *, ranks: tuple[int, ...],
               limit: int = 0) -> None:
    self._test, self._encoder, self._texts, self._ranks, self._limit = test, encoder, texts, ranks, limit

  def measure(self, selected: PyTree) -> Result:
    """Returns recall@K both ways, and the number of images."""
    encoder = self._encoder.at(selected)
    placed = self._test.place(self._test.table(selected))
    vectors = {'features': encoder.project(placed['features']), **{name: placed[name] for name in ('example', 'mask')}}
    rows = {name: x.reshape(-1, *x.shape[2:]) for name, x in features.gather(vectors, self._test.mesh).items()}
    valid = np.flatnonzero(rows['mask'])
    order = valid[np.argsort(rows['example'][valid])]
    texts = [self._texts[example] for example in rows['example'][order].tolist()]
    owner_T = np.repeat(np.arange(len(order)), [len(captions) for captions in texts])
    self._test.check_counted(len(owner_T))
    vectors_TE = encoder.embed([text for captions in texts for text in captions])
    metrics = recall(rows['features'][order], vectors_TE, owner_T, self._ranks)
    return Result(named(metrics, self._limit), len(np.unique(owner_T)), None,
                  mark(f'recall{self._ranks[0]}_text', self._limit), self._test.spent_s)


def recall(image_SE: HostArray, text_TE: HostArray, owner_T: HostArray, ranks: Sequence[int]) -> dict[str, float]:
  """Returns recall@K of unit vectors of images and texts, both ways; text t belongs to image `owner[t]`, ascending."""
  num_images, num_texts = len(image_SE), len(text_TE)
  starts = np.searchsorted(owner_T, np.arange(num_images + 1))
  first_texts, image_ranks = [], []  # the rank of an image's first own text among all; of each text's image
  size = max(1, _BLOCK // max(1, num_texts))
  for first in range(0, num_images, size):
    for row, values_T in enumerate(image_SE[first:first + size] @ text_TE.T, first):
      if starts[row] < starts[row + 1]:
        best = starts[row] + int(np.argmax(values_T[starts[row]:starts[row + 1]]))
        first_texts.append(_rank(values_T[None], np.array([best])))
  size = max(1, _BLOCK // max(1, num_images))
  for first in range(0, num_texts, size):
    image_ranks.append(_rank(text_TE[first:first + size] @ image_SE.T, owner_T[first:first + size]))
  return {f'recall{k}_{name}': float((np.concatenate(blocks) < k).mean())
          for name, blocks in (('text', first_texts), ('image', image_ranks)) for k in ranks}


def _rank(values_QG: HostArray, own_Q: HostArray) -> HostArray:
  """Returns the rank of one entry of each row in descending order, from 0; of equal values the first one is before."""
  value_Q1 = np.take_along_axis(values_QG, own_Q[:, None], 1)
  earlier_QG = np.arange(values_QG.shape[1])[None] < own_Q[:, None]
  return np.asarray(((values_QG > value_Q1) | (values_QG == value_Q1) & earlier_QG).sum(1))


def read_texts(source: Source, rule: TextRule, most: int, where: str, *, advice: str = '') -> list[list[str]]:
  """Returns up to `most` captions of each example, simplified; none where they cannot be used.

  Args:
    source: of images with captions.
    rule, most: of the captions.
    where: begins messages.
    advice: what to do about a source without captions; '' = of an evaluation.

  Raises:
    UserError: the source has no captions.
  """
  for origin in origins(source):
    if not has_captions(origin):
      raise UserError(f'{where}: expected a source with captions, got {title(origin)}. ' + (
          advice or f'Set {where}.source=wds:PATH, or leave this evaluation out.'))
  captions: list[list[str]] = []
  for row in range(len(source)):
    captions.append([])
    with contextlib.suppress(BadImage):
      captions[-1] = [prompting.simplify(text, rule) for text in source.captions(row)[:most]]
  if without := sum(not texts for texts in captions):
    log.warning('%s: %s of %s images have no usable caption, and do not count.', where, f'{without:,}',
                f'{len(captions):,}')
  if without == len(captions):
    raise UserError(f'{where}: expected images with captions, got none in {title(source)}. Choose another source.')
  return captions


def build(resources: Resources, name: str, settings: schema.CaptionRetrieval) -> Make:
  """Builds the evaluator for each view; all views share one text tower."""
  where, test = f'evals.{name}', resources.eval_source(name)
  encoder = resources.encoder(name, settings)
  rule = encoder.rule if settings.text_rule is TextRule.AUTO else settings.text_rule
  texts = read_texts(test, rule, settings.captions, where)

  def make(view: str) -> Measuring:
    return CaptionRetrieval(resources.split(name, settings, test, view, in_memory=True), encoder, texts,
                            ranks=RANKS, limit=settings.limit)
  return make
