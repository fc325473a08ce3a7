"""Zero-shot classification against NumPy, and what the rules for texts are worth on a toy vocabulary."""
from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import pytest

from tests.evaluate import rows
from vit_jax.config import schema
from vit_jax.config.schema import TextRule
from vit_jax.data.text import prompts
from vit_jax.evaluate import zeroshot
from vit_jax.evaluate.results import Truncated

WIDTH, CLASSES = 24, 7
NAMES = ('Red Fox', 'gray-wolf', 'Polar_Bear', "St. Bernard's dog", 'cat', 'HORSE', 'sea lion.')
TEST = rows.clusters(61, classes=CLASSES, width=WIDTH, seed=3, spread=1.5)
CENTERS = np.random.default_rng(99).normal(size=(CLASSES, WIDTH))  # those of `rows.clusters`


class Toy:
  """An encoder with a vocabulary of whole words in lower case; a class's word points to the center of its images.

  Unknown words have one vector, as the unknown token of a tokenizer has.
  """
  source, rule = 'toy', TextRule.CANONICAL

  def at(self, selected: object) -> Toy:
    return self

  def __init__(self) -> None:
    words = [prompts.simplify(name, TextRule.CANONICAL).split() for name in NAMES]
    self._known = {word: center for every, center in zip(words, CENTERS, strict=True) for word in every}
    rng = np.random.default_rng(1)
    self._known |= {word: .3 * rng.normal(size=WIDTH) for word in ('a', 'photo', 'of', 'the', 'itap')}
    self._unknown = rng.normal(size=WIDTH) * 2.

  def embed(self, texts: Sequence[str]) -> np.ndarray:
    sums = np.stack([sum((self._known.get(word, self._unknown) for word in text.split()), np.zeros(WIDTH))
                     for text in texts])
    return (sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32)

  def project(self, pooled: jax.Array) -> jax.Array:
    return pooled / jax.numpy.linalg.norm(pooled, axis=-1, keepdims=True)


TEMPLATES = ('a photo of a {}.', 'itap of the {}.', 'A photo of the {}!')


def evaluator(rule: TextRule = TextRule.CANONICAL, *, size: int = 6, mesh: str = 'one',
              bad: tuple[int, ...] = ()) -> zeroshot.ZeroShot:
  built = prompts.build(NAMES, TEMPLATES, rule)
  test = rows.split(rows.Loader(*TEST, size, bad=bad), mesh)
  return zeroshot.ZeroShot(test, Toy(), built, protocol=f'own_{rule.value}')


def by_hand(keep: np.ndarray) -> dict[str, float]:
  """Accuracies in float64."""
  toy, classes = Toy(), []
  for every in prompts.build(NAMES, TEMPLATES, TextRule.CANONICAL):
    mean = toy.embed(every).astype(np.float64).mean(0)
    classes.append(mean / np.linalg.norm(mean))
  order = np.argsort(-(TEST[0][keep] @ np.stack(classes).T), axis=1)
  return {'top1_own_canonical': (order[:, 0] == TEST[1][keep]).mean(),
          'top5_own_canonical': (order[:, :5] == TEST[1][keep][:, None]).any(1).mean()}


@pytest.mark.quick('8-data=2', reason='1 s: a program for each mesh')
@pytest.mark.parametrize(('size', 'mesh'), [(6, 'one'), (8, 'data=2')])
def test_it_equals_numpy_for_any_batch_and_mesh_and_counts_each_example_once(size: int, mesh: str) -> None:
  result = evaluator(size=size, mesh=mesh).measure(rows.weights())
  assert result.metrics == pytest.approx(by_hand(np.arange(len(TEST[1])))) and result.num_examples == len(TEST[1])
  assert result.headline == 'top1_own_canonical' and 0. < result.score < 1.


def test_bad_images_do_not_count_and_a_limit_is_named() -> None:
  keep = np.delete(np.arange(len(TEST[1])), [3, 50])
  result = Truncated(evaluator(bad=(3, 50)), 61).measure(rows.weights())
  assert result.num_examples == len(keep)
  assert result.metrics == pytest.approx({f'{k}.partial61': x for k, x in by_hand(keep).items()})


def test_without_lower_case_and_without_removed_punctuation_accuracy_is_lost() -> None:
  canonical, lower, none = (next(iter(evaluator(rule).measure(rows.weights()).metrics.values()))
                            for rule in (TextRule.CANONICAL, TextRule.LOWER, TextRule.NONE))
  assert canonical > .9
  assert canonical - lower > .2 and lower - none > .05, (canonical, lower, none)


def test_the_vector_of_a_class_is_the_mean_of_unit_vectors() -> None:
  found = zeroshot.class_vectors(Toy(), [['cat', 'a photo of the cat'], ['horse']])
  np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1., rtol=1e-6)
  both = Toy().embed(['cat', 'a photo of the cat'])
  np.testing.assert_allclose(found[0] @ both[0], found[0] @ both[1], rtol=1e-5)  # as the mean of two unit vectors is
  np.testing.assert_allclose(found[1], Toy().embed(['horse'])[0], rtol=1e-6)


def test_the_protocol_is_part_of_the_name() -> None:
  settings = schema.ZeroShot(prompts='clip_paper')
  assert zeroshot.protocol(settings, TextRule.LOWER) == 'clip_paper_lower'
  settings = schema.ZeroShot(prompts='a {}', synonyms=True)
  assert zeroshot.protocol(settings, TextRule.CANONICAL) == 'template_canonical_synonyms'
