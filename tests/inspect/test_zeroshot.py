"""Classification by names through the Python interface: logits of transformers, probabilities, refusals."""
from __future__ import annotations

import pathlib

import jax
import numpy as np
import pytest

import vit_jax
from tests.weights import text_models
from vit_jax.core.errors import UserError
from vit_jax.inspect import zeroshot
from vit_jax.inspect.model import Model
from vit_jax.weights import inference, loading, text_encoder

pytest.importorskip('tokenizers')
pytest.importorskip('sentencepiece')
NAMES = ('cat', 'red boat', 'old wooden house')
IMAGES = np.random.default_rng(0).integers(0, 255, (3, 32, 32, 3)).astype(np.uint8)


@pytest.fixture(scope='module')
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
  root = tmp_path_factory.mktemp('models')
  return {family: vit_jax.load(text_models.write(family, root / family)) for family in ('clip', 'siglip')}


@pytest.mark.quick('siglip', reason='1 s each: two programs; vectors of texts of all are compared elsewhere')
@pytest.mark.parametrize('family', text_models.FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: pathlib.Path) -> None:
  """From the vectors of its texts on: those from texts on are compared where the tokenizer is."""
  image = loading.load(text_models.write(family, tmp_path))
  encoder = text_encoder.load(str(tmp_path), image)
  golden = text_models.golden()
  texts = golden[f'{family}/text'] / np.linalg.norm(golden[f'{family}/text'], axis=1, keepdims=True)
  outputs = jax.jit(inference.function(image))(inference.parameters(image), text_models.image())
  pooled = np.asarray(outputs.features.pooled)
  found = np.asarray(encoder.project(pooled)) @ texts.T * encoder.scale + encoder.bias
  np.testing.assert_allclose(found, golden[f'{family}/logits'], atol=1e-5)


def test_logits_of_names_are_those_of_the_vectors(models: dict[str, Model]) -> None:
  model = models['clip']
  found = model.zero_shot(NAMES, prompts='a photo of a {}.')
  encoder = text_encoder.load(model.weights.source, model.weights)
  images = np.asarray(encoder.project(model.features(list(IMAGES))))
  want = images @ encoder.embed([f'a photo of a {name}.' for name in NAMES]).T * encoder.scale
  np.testing.assert_allclose(found.logits(list(IMAGES)), want, atol=1e-5)
  prepared = np.stack([model.prepare(image) for image in IMAGES])
  np.testing.assert_allclose(found.logits(prepared, prepared=True), want, atol=1e-5)


def test_clip_gives_a_softmax_and_siglip_a_sigmoid(models: dict[str, Model]) -> None:
  for family, model in models.items():
    first = model.classify(IMAGES[0], names=NAMES, top=3)[0]
    assert {guess.name for guess in first} == set(NAMES)
    assert [guess.probability for guess in first] == sorted((guess.probability for guess in first), reverse=True)
    logits = model.zero_shot(NAMES).logits(IMAGES[0])[0]
    shares = np.exp(logits) / np.exp(logits).sum()
    want = 1. / (1. + np.exp(-logits)) if family == 'siglip' else shares
    found = [guess.share for guess in sorted(first)]
    assert found == (pytest.approx(shares.tolist(), rel=1e-5) if family == 'siglip' else [None] * 3)
    found = [guess.probability for guess in first]
    np.testing.assert_allclose(found, want[[guess.label for guess in first]], rtol=1e-4)
  assert 'softmax' in models['clip'].zero_shot(NAMES).probability
  assert 'sigmoid' in models['siglip'].zero_shot(NAMES).probability


def test_a_comma_is_part_of_a_given_name(models: dict[str, Model]) -> None:
  model = models['clip']
  encoder = text_encoder.load(model.weights.source, model.weights)
  images = np.asarray(encoder.project(model.features(list(IMAGES[:1]))))
  want = images @ encoder.embed(['a photo of a boat, red.', 'a photo of a boat red.']).T * encoder.scale
  found = model.zero_shot(['boat, red', 'boat red']).logits(IMAGES[:1])
  np.testing.assert_allclose(found, want, atol=1e-5)
  assert abs(want[0, 0] - want[0, 1]) > 1e-3  # the texts differ
  one, two = models['siglip'].zero_shot(['boat, red', 'boat red']).logits(IMAGES[:1])[0]
  np.testing.assert_allclose(one, two, rtol=1e-6)  # whose rule removes punctuation


def test_names_must_be_a_list_of_words(models: dict[str, Model]) -> None:
  for wrong in ('cat', [], ['cat', ' ']):
    with pytest.raises(UserError, match='names: expected (a list of names of classes in words|1 to 1,000 characters)'):
      models['clip'].zero_shot(wrong)


def test_weights_without_texts_and_without_a_tokenizer_are_refused(tmp_path: pathlib.Path) -> None:
  bare = Model(loading.load(text_models.write('clip', tmp_path / 'bare', has_tokenizer=False)))
  with pytest.raises(UserError, match=r'tokenizer: expected the tokenizer of .*bare beside its weights, got none'):
    bare.classify(IMAGES[0], names=NAMES)
  found = bare.zero_shot(NAMES, tokenizer=str(text_models.HERE / 'text_files' / 'clip'))
  assert found.logits(IMAGES).shape == (3, 3)
  images = {name: x for name, x in text_models.tensors('clip').items() if name.startswith(('vision', 'visual'))}
  alone = Model(loading.load(text_models.write('clip', tmp_path / 'images', own=images)))
  with pytest.raises(UserError, match='expected weights with a text tower, got weights of images alone'):
    alone.classify(IMAGES[0], names=NAMES)


def test_a_tokenizer_with_a_larger_vocabulary_is_refused(models: dict[str, Model], tmp_path: pathlib.Path) -> None:
  small = text_models.tensors('siglip') | {
      'text_model.embeddings.token_embedding.weight': np.zeros((9, 32), np.float32)}
  model = Model(loading.load(text_models.write('siglip', tmp_path, own=small)))
  with pytest.raises(UserError, match=r'expected the tokenizer of a vocabulary of 9, got the id \d+'):
    model.classify(IMAGES[0], names=NAMES)


def test_ranks_are_those_of_the_logits() -> None:
  found = zeroshot.rank(np.float32([-2., 1., 1., 0.]), 'abcd', top=3, is_sigmoid=True)
  assert [guess.name for guess in found] == ['b', 'c', 'd'] and found[2].probability == .5


@pytest.mark.parametrize(('is_sigmoid', 'scale'), [(False, 1000.), (True, 100.)])
def test_equal_rounded_probabilities_are_ranked_by_logits(is_sigmoid: bool, scale: float) -> None:
  logits = scale * np.float32([1, 3, 2, 4])
  found = zeroshot.rank(logits, 'abcd', top=4, is_sigmoid=is_sigmoid)
  assert ''.join(guess.name for guess in found) == 'dbca' and found[1].probability == found[2].probability
