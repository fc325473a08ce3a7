"""`vit-jax embed` of texts, and of images as vectors that are compared with texts."""
from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.data import images
from tests.weights import text_models
from vit_jax import main
from vit_jax.data.text import prompts
from vit_jax.weights import inference, loading, text_encoder

pytest.importorskip('tokenizers')
pytestmark = pytest.mark.usefixtures('one_device')
LINES = ['A photo of a cat', '', '  Two_dogs ', 'é']
CAPTIONS = {'b.png': ['one text', 'another'], 'a.png': ['a third']}


@pytest.fixture(scope='module')
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
  return text_models.write('clip', tmp_path_factory.mktemp('clip'))


def expected(weights: str, texts: list[str]) -> np.ndarray:
  encoder = text_encoder.load(weights, loading.load(weights))
  return encoder.embed([prompts.simplify(text, encoder.rule) for text in texts])


def embed(weights: str, to: pathlib.Path, *flags: str) -> int:
  return main.run(['embed', f'--weights={weights}', f'--to={to}', '--config.batch_size=2', *flags])


def test_each_line_of_a_file_is_a_text(weights: str, tmp_path: pathlib.Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'texts.txt').write_text('\n'.join(LINES))
  assert embed(weights, tmp_path / 'a.npz', f'--data=texts:{tmp_path}/texts.txt') == 0
  assert 'vectors of 3 texts' in capsys.readouterr().out
  found = np.load(tmp_path / 'a.npz')
  assert found['id'].tolist() == [0, 2, 3] and found['name'].tolist() == ['A photo of a cat', 'Two_dogs', 'é']
  np.testing.assert_allclose(found['texts'], expected(weights, [LINES[0], 'Two_dogs', 'é']), atol=1e-6)
  assert embed(weights, tmp_path / 'a.npz', f'--data=texts:{tmp_path}/texts.txt') == 0
  assert 'Already in' in capsys.readouterr().out
  (tmp_path / 'texts.txt').write_text('other')
  assert embed(weights, tmp_path / 'a.npz', f'--data=texts:{tmp_path}/texts.txt') == 2
  assert 'got one with other content' in capsys.readouterr().err


def test_texts_with_other_numbers_are_other_content(weights: str, tmp_path: pathlib.Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
  for number, text in enumerate(('a\nb\n', '\na\nb\n')):  # the same texts, in other lines
    (tmp_path / 'texts.txt').write_text(text)
    assert embed(weights, tmp_path / 'a.npz', f'--data=texts:{tmp_path}/texts.txt') == 2 * number
  assert 'got one with other content' in capsys.readouterr().err


def test_vectors_of_another_tokenizer_are_other_content(weights: str, tmp_path: pathlib.Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'texts.txt').write_text('a photo of a cat')
  vocabulary = json.loads((pathlib.Path(weights) / 'vocab.json').read_text())
  for number, names in enumerate(('at', 'ta')):  # the ids of two pieces are exchanged
    shutil.copytree(weights, tmp_path / names)
    ids = dict(zip(names, (vocabulary['a'], vocabulary['t']), strict=True))
    (tmp_path / names / 'vocab.json').write_text(json.dumps(vocabulary | ids))
    flags = f'--data=texts:{tmp_path}/texts.txt', f'--tokenizer={tmp_path / names}/vocab.json'
    assert embed(weights, tmp_path / 'a.npz', *flags) == 2 * number
  assert 'got one with other content' in capsys.readouterr().err


def test_a_file_of_texts_below_the_home_of_nobody_is_not_there(tmp_path: pathlib.Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
  assert embed('clip', tmp_path / 'a.npz', '--data=texts:~nobody_of_this_name/a.txt') == 2
  assert 'expected a file with a text in each line, got no file of this name' in capsys.readouterr().err


def test_texts_of_files_are_refused_before_weights_are_loaded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(loading, 'load', None)
  (tmp_path / 'x.png').touch()
  assert embed('clip', tmp_path / 'a.npz', '--what=texts', str(tmp_path / 'x.png')) == 2
  assert '--what: expected --data with texts, got files, which have no captions.' in capsys.readouterr().err


def test_other_separators_than_those_of_editors_end_no_line(weights: str, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'texts.txt').write_bytes('one\u2028two\r\nthree\x0cfour\u0085five\n'.encode())
  assert embed(weights, tmp_path / 'a.npz', f'--data=texts:{tmp_path}/texts.txt') == 0
  found = np.load(tmp_path / 'a.npz')
  assert (found['id'].tolist(), found['name'].tolist()) == ([0, 1], ['one\u2028two', 'three\x0cfour\x85five'])


@pytest.mark.slow(reason='4 s')
def test_captions_and_images_of_a_source_have_vectors_of_one_space(weights: str, tmp_path: pathlib.Path) -> None:
  rng = np.random.default_rng(0)
  for name in CAPTIONS:
    Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / name)
  (tmp_path / 'captions_train.jsonl').write_text('\n'.join(
      json.dumps({'image': name, 'captions': texts}) for name, texts in CAPTIONS.items()))
  for what in ('texts', 'vectors'):
    assert embed(weights, tmp_path / f'{what}.npz', f'--data=folder:{tmp_path}', f'--what={what}') == 0
  texts, images = np.load(tmp_path / 'texts.npz'), np.load(tmp_path / 'vectors.npz')
  names = [pathlib.Path(one).name for one in images['name']]
  assert texts['name'].tolist() == [text for name in names for text in CAPTIONS[name]]
  assert [names[i] for i in texts['id']] == [name for name in names for _ in CAPTIONS[name]]
  found = loading.load(weights)
  encoder, recipe = text_encoder.load(weights, found), inference.eval_recipe(found)
  pixels = np.stack([np.asarray(Image.open(tmp_path / name)) for name in names]) / 255.
  image = ((pixels - recipe.mean) / recipe.std).astype(np.float32)
  own = inference.function(found)(inference.parameters(found), image).features.pooled
  np.testing.assert_allclose(images['vectors'], np.asarray(encoder.project(own)), atol=1e-5)
  np.testing.assert_allclose(texts['texts'], expected(weights, texts['name'].tolist()), atol=1e-6)


@pytest.mark.parametrize(('content', 'flags', 'said'), [
    ('\n \n', (), 'expected a text in each line, got none'),
    ('a', ('--what=tokens',), '--what: expected texts with --data=texts:FILE, got tokens'),
    ('a', ('--what=features',), '--what: expected texts with --data=texts:FILE, got features. Remove --what.'),
    ('a', ('--blocks=1,2',), '--blocks: expected none with texts, got 1,2. Remove it.'),
    ('a', ('--follow_links',), '--follow_links: expected none with texts, got true. Remove it.'),
    ('a', ('--split=train',), '--split: expected none with --data=texts:FILE'),
    (None, (), 'texts.txt: expected a file with a text in each line, got no file of this name. Correct the path.')])
def test_what_cannot_be_embedded_is_named(weights: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str],
                                          content: str | None, flags: tuple[str, ...], said: str) -> None:
  if content is not None:
    (tmp_path / 'texts.txt').write_text(content)
  assert embed(weights, tmp_path / 'a.npz', f'--data=texts:{tmp_path}/texts.txt', *flags) == 2
  assert said in capsys.readouterr().err and not (tmp_path / 'a.npz').exists()


def test_texts_of_a_source_without_captions_are_refused_with_where_to_name_another(
    weights: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert embed(weights, tmp_path / 'a.npz', '--data=digits', '--what=texts') == 2
  said = capsys.readouterr().err
  assert '--what=texts: expected a source with captions, got digits/train. Name another source with --data' in said
  assert embed(weights, tmp_path / 'a.npz', '--data=digits', '--split=all') == 2
  assert "got 'all'. Change --split." in capsys.readouterr().err


def test_a_tokenizer_without_texts_is_refused(weights: str, tmp_path: pathlib.Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
  assert embed(weights, tmp_path / 'a.npz', '--tokenizer=x', str(tmp_path)) == 2
  assert '--tokenizer: expected --what=texts or vectors, got --what=features' in capsys.readouterr().err


def test_a_table_of_other_prompts_is_other_content(weights: str, tmp_path: pathlib.Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'x.png').write_bytes(images.encode(images.random_image(1)))
  words = ['predict', f'--weights={weights}', '--names=cat,dog', f'--to={tmp_path}/t.parquet', str(tmp_path / 'x.png')]
  for template, status in (('{}', 0), ('{}', 0), ('a drawing of a {}', 2)):
    assert main.run([*words, f'--prompts={template}']) == status
  shown = capsys.readouterr()
  assert 'Already in' in shown.out and 'got one with other content' in shown.err
