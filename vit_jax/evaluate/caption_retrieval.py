"""Retrieval between images and their captions: recall@K of COCO and Flickr30k, as CLIP (arXiv 2103.00020) reports it.

  recall@K text: the share of images with one of their own captions among the K most similar captions of all images.
  recall@K image: the share of captions whose image is among the K most similar images.

Of equal similarities the example that comes first in the order of the source is more similar. An image that cannot be
decoded, or has no usable caption, counts in neither.
"""
from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import TextRule
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray, PyTree
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Source, has_captions, origins, title
from vit_jax.data.text import prompts as prompting
from vit_jax.evaluate import features, problems
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

  def run(self, selected: PyTree, step: int) -> dict[str, float]:
    """Returns recall@K of the view's `selected` parameters."""
    del step
    return self.measure(selected).metrics

  def measure(self, selected: PyTree) -> Result:
    """Returns recall@K both ways, and the number of images."""
    encoder = self._encoder.at(selected)
    placed = self._test.place(self._test.table(selected))
    vectors = {'features': encoder.project(placed['features']), **{name: placed[name] for name in ('example', 'mask')}}
    rows = {name: x.reshape(-1, *x.shape[2:]) for name, x in features.gather(vectors, self._test.mesh).items()}
    valid = np.flatnonzero(rows['mask'])
    order = valid[np.argsort(rows['example'][valid])]
    own = [(place, text) for place, row in enumerate(order) for text in self._texts[int(rows['example'][row])]]
    problems.check_counted(self._test.name, len(own), self._test.num_examples)
    owner_T = np.array([place for place, _ in own], np.int64)
    found = recall(rows['features'][order], encoder.embed([text for _, text in own]), owner_T, self._ranks)
    return Result(named(found, self._limit), len(np.unique(owner_T)), None,
                  mark(f'recall{self._ranks[0]}_text', self._limit), self._test.spent_s)


def recall(image_SE: HostArray, text_TE: HostArray, owner_T: HostArray, ranks: Sequence[int]) -> dict[str, float]:
  """Returns recall@K of unit vectors of images and texts, both ways; text t belongs to image `owner[t]`, ascending."""
  text_ranks, image_ranks = np.concatenate(list(_of_images(image_SE, text_TE, owner_T))), np.concatenate(
      list(_of_texts(image_SE, text_TE, owner_T)))
  return {f'recall{k}_{name}': float((found < k).mean())
          for name, found in (('text', text_ranks), ('image', image_ranks)) for k in ranks}


def _of_images(image_SE: HostArray, text_TE: HostArray, owner_T: HostArray) -> Iterator[HostArray]:
  """Yields for each image with captions the place of the first of its own among all, from 0."""
  starts = np.searchsorted(owner_T, np.arange(len(image_SE) + 1))
  size = max(1, _BLOCK // max(1, len(text_TE)))
  for first in range(0, len(image_SE), size):
    similar_ST = image_SE[first:first + size] @ text_TE.T
    for row, values_T in enumerate(similar_ST, first):
      if starts[row] < starts[row + 1]:
        best = starts[row] + int(np.argmax(values_T[starts[row]:starts[row + 1]]))
        yield _place(values_T[None], np.array([best]))


def _of_texts(image_SE: HostArray, text_TE: HostArray, owner_T: HostArray) -> Iterator[HostArray]:
  """Yields for each text the place of its image among all, from 0."""
  size = max(1, _BLOCK // max(1, len(image_SE)))
  for first in range(0, len(text_TE), size):
    yield _place(text_TE[first:first + size] @ image_SE.T, owner_T[first:first + size])


def _place(values_QG: HostArray, own_Q: HostArray) -> HostArray:
  """The place of one entry of each row in descending order, from 0; of equal values the first one is before."""
  value_Q1 = np.take_along_axis(values_QG, own_Q[:, None], 1)
  earlier_QG = np.arange(values_QG.shape[1])[None] < own_Q[:, None]
  found: HostArray = ((values_QG > value_Q1) | (values_QG == value_Q1) & earlier_QG).sum(1)
  return found


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
  for one in origins(source):
    if not has_captions(one):
      raise UserError(f'{where}: expected a source with captions, got {title(one)}. ' + (
          advice or f'Set {where}.source=wds:PATH, or leave this evaluation out.'))
  found: list[list[str]] = []
  for row in range(len(source)):
    found.append([])
    with contextlib.suppress(BadImage):
      found[-1] = [prompting.simplify(text, rule) for text in source.captions(row)[:most]]
  if without := sum(not texts for texts in found):
    log.warning('%s: %s of %s images have no usable caption, and do not count.', where, f'{without:,}',
                f'{len(found):,}')
  if without == len(found):
    raise UserError(f'{where}: expected images with captions, got none in {title(source)}. Choose another source.')
  return found


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
