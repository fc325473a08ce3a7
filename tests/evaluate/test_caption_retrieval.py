"""Recall between images and captions against a sort by hand, and captions that are missing."""
from __future__ import annotations

import pathlib

import numpy as np
import pytest

from tests.data import packed
from tests.evaluate import rows
from tests.evaluate.test_zeroshot import Toy
from vit_jax.config import schema
from vit_jax.config.schema import TextRule
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.evaluate import caption_retrieval

RANKS = (1, 3, 10)
RNG = np.random.default_rng(5)
IMAGES, TEXTS = RNG.normal(size=(13, 24)), RNG.normal(size=(30, 24))
OWNER = np.sort(RNG.integers(0, 13, 30))
TEXTS += IMAGES[OWNER]


class Listed(Toy):
  """An encoder whose text `n` is row n of TEXTS."""

  def embed(self, texts: object) -> np.ndarray:
    found = TEXTS[[int(text) for text in texts]]  # type: ignore[attr-defined]
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def by_hand(kept: np.ndarray) -> dict[str, float]:
  """From complete sorts in f64 of the images that are kept."""
  x, y = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (IMAGES, TEXTS))
  texts = np.flatnonzero(np.isin(OWNER, kept))
  with_text = [i for i in kept if i in OWNER]
  found = {}
  for k in RANKS:
    found[f'recall{k}_text'] = np.mean([
        i in OWNER[texts[np.argsort(-(y[texts] @ x[i]), kind='stable')[:k]]] for i in with_text])
    found[f'recall{k}_image'] = np.mean([
        OWNER[t] in kept[np.argsort(-(x[kept] @ y[t]), kind='stable')[:k]] for t in texts])
  return found


@pytest.mark.quick('8-data=2-bad1', reason='1 s each: programs')
@pytest.mark.parametrize('bad', [(), (2, 7)])
@pytest.mark.parametrize(('size', 'mesh'), [(6, 'one'), (8, 'data=2')])
def test_recall_is_that_of_a_complete_sort(size: int, mesh: str, bad: tuple[int, ...]) -> None:
  loader = rows.Loader(IMAGES.astype(np.float32), np.zeros(13, np.int32), size, bad=bad)
  texts = [[str(t) for t in np.flatnonzero(i == OWNER)] for i in range(13)]
  result = caption_retrieval.CaptionRetrieval(rows.split(loader, mesh), Listed(), texts, ranks=RANKS).measure(
      rows.weights())
  assert result.metrics == pytest.approx(by_hand(np.delete(np.arange(13), bad)))
  assert result.headline == 'recall1_text' and 0. < result.score < 1.


def test_images_of_which_none_has_both_pixels_and_a_caption_are_refused() -> None:
  loader = rows.Loader(IMAGES.astype(np.float32), np.zeros(13, np.int32), 6, bad=(0,))
  texts: list[list[str]] = [['0'], *([] for _ in range(12))]
  with pytest.raises(UserError, match='can be decoded and has a label or a caption, got none among 13'):
    caption_retrieval.CaptionRetrieval(rows.split(loader), Listed(), texts, ranks=RANKS).measure(rows.weights())


def test_of_equal_similarities_the_first_example_is_before() -> None:
  same = np.ones((4, 2), np.float32)
  found = caption_retrieval.recall(same, same, np.arange(4), (1, 2))
  assert found == {'recall1_text': .25, 'recall2_text': .5, 'recall1_image': .25, 'recall2_image': .5}


def test_captions_are_the_first_ones_and_images_without_one_are_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  packed.write_tars(tmp_path / 'tars', 'train', packed.examples(5), 1, texts={0: b'A b\nC\nD', 1: b'\xff', 2: b' '})
  source = opening.open_split(schema.Data(source=f'wds:{tmp_path}/tars'), 'train', image_px=(8, 8))
  found = caption_retrieval.read_texts(source, TextRule.LOWER, 2, 'evals.coco')
  assert found[:3] == [['a b', 'c'], [], []] and '2 of 5 images have no usable caption' in caplog.text
  with pytest.raises(UserError, match='evals.coco: expected a source with captions, got digits'):
    caption_retrieval.read_texts(opening.open_split(schema.Data(), 'test', image_px=(8, 8)), TextRule.NONE, 5,
                                 'evals.coco')
