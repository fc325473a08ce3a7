"""Both towers as files that run without the package: equal results, equal ids, and what cannot be exported."""
from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax import export

from tests.weights import text_models
from vit_jax import main
from vit_jax.config import schema
from vit_jax.config.schema import TextRule
from vit_jax.core.errors import UserError
from vit_jax.data.text import exported, prompts
from vit_jax.data.text.tokenizer import Tokenizer
from vit_jax.export import towers
from vit_jax.objectives import contrastive
from vit_jax.weights import inference, loading, text_encoder
from vit_jax.weights import text as texts

pytest.importorskip('onnx')
ort = pytest.importorskip('onnxruntime')
tokenizers = pytest.importorskip('tokenizers')


def written(family: str, folder: pathlib.Path, *flags: str, suffix: str = 'onnx') -> tuple[str, towers.Files]:
  where, to = text_models.write(family, folder / family), folder / 'out' / f'pair.{suffix}'
  to.parent.mkdir()
  assert main.run(['export', f'--weights={where}', f'--to={to}', '--texts', *flags]) == 0
  return where, towers.files(to)


def vectors(where: str, given: list[str]) -> tuple[np.ndarray, np.ndarray]:
  """What this package computes for texts and images."""
  image = loading.load(where)
  encoder = text_encoder.load(where, image)
  found = inference.function(image)(inference.parameters(image), text_models.image())
  return encoder.embed([prompts.simplify(one, encoder.rule) for one in given]), np.asarray(
      encoder.project(found.features.pooled))


TEXTS = ['a photo of a cat', 'Two_dogs, here!']


@pytest.mark.parametrize('family', [one if one == 'clip' else pytest.param(one, marks=pytest.mark.slow(reason='4 s'))
                                    for one in ('clip', 'siglip', 'siglip2', 'naflex')])
def test_both_files_give_the_vectors_of_the_networks(family: str, tmp_path: pathlib.Path) -> None:
  where, files = written(family, tmp_path)
  of_texts, images = vectors(where, TEXTS)
  tokenizer = tokenizers.Tokenizer.from_file(str(files.tokenizer))
  found = [tokenizer.encode(one) for one in TEXTS]
  about = json.loads(files.pairs.read_text())
  given: dict[str, Any] = {'tokens': np.array([one.ids for one in found], np.int32)}
  if 'mask' in about['inputs']:
    given['mask'] = np.array([one.attention_mask for one in found], np.int32)
  got, = ort.InferenceSession(str(files.text)).run(None, given)
  np.testing.assert_allclose(got, of_texts, atol=1e-5)
  got, = ort.InferenceSession(str(files.image)).run(None, {'image': text_models.image()})
  np.testing.assert_allclose(got, images, atol=1e-5)
  encoder = text_encoder.load(where, loading.load(where))
  assert (about['scale'], about['bias']) == (encoder.scale, encoder.bias)
  assert about['probability'] == ('sigmoid' if encoder.is_sigmoid else 'softmax')


@pytest.mark.slow(reason='5 s')
def test_stablehlo_gives_the_vectors_of_the_networks(tmp_path: pathlib.Path) -> None:
  where, files = written('clip', tmp_path, suffix='stablehlo')
  tokenizer = tokenizers.Tokenizer.from_file(str(files.tokenizer))
  call = export.deserialize(bytearray(files.text.read_bytes())).call
  got = call(np.array([tokenizer.encode(one).ids for one in TEXTS], np.int32))
  np.testing.assert_allclose(got, vectors(where, TEXTS)[0], atol=1e-5)


@pytest.mark.parametrize('rule', [TextRule.CANONICAL, TextRule.LOWER, TextRule.NONE])
def test_bytes_have_a_tokenizer_file_too(tmp_path: pathlib.Path, rule: TextRule) -> None:
  exported.write(Tokenizer(None, family='bytes', length=24), rule, tmp_path / 'a.json', samples=towers.SAMPLES)
  made = tokenizers.Tokenizer.from_file(str(tmp_path / 'a.json')).encode('é')
  assert made.ids == [0xC3 + 3, 0xA9 + 3, 1, *[0] * 21] and sum(made.attention_mask) == 3


@pytest.mark.parametrize('rule', [TextRule.CANONICAL, TextRule.LOWER, TextRule.NONE])
def test_unigrams_of_sentencepiece_become_a_tokenizer_file(tmp_path: pathlib.Path, rule: TextRule) -> None:
  where = pathlib.Path(text_models.write('siglip', tmp_path / 'siglip'))
  made = Tokenizer(where / 'spiece.model', family='siglip', length=16)
  exported.write(made, rule, tmp_path / 'a.json', samples=(*towers.SAMPLES, 'the theory of 3 cats, 4 hats'))
  text = 'The theory of 3 Cats, 4 hats!'
  ids, mask = made([prompts.simplify(text, rule)])
  again = tokenizers.Tokenizer.from_file(str(tmp_path / 'a.json')).encode(text)
  assert again.ids == ids[0].tolist() and again.attention_mask == mask[0].tolist()


def test_the_tokenizer_file_beside_a_sentencepiece_model_is_taken_and_must_be_that_of_the_same_model(
    tmp_path: pathlib.Path) -> None:
  where, tips = (pathlib.Path(text_models.write(one, tmp_path / one)) for one in ('siglip', 'tips'))
  other = Tokenizer(tips / 'tokenizer.model', family='tips', length=16)
  with pytest.raises(UserError, match=r'--tokenizer: expected tokenizer.json, .*, got .*tokenizer.model. Put'):
    exported.write(other, TextRule.LOWER, tmp_path / 'a.json', samples=towers.SAMPLES)
  shutil.copy(pathlib.Path(text_models.write('siglip2', tmp_path / 'siglip2')) / 'tokenizer.json', where)
  made = Tokenizer(where / 'spiece.model', family='siglip', length=16)
  with pytest.raises(UserError, match='expected a tokenizer whose file gives the same ids'):
    exported.write(made, TextRule.CANONICAL, tmp_path / 'a.json', samples=towers.SAMPLES)


@pytest.mark.slow(reason='3 s')
def test_a_tower_that_pools_over_its_tokens_takes_a_mask(tmp_path: pathlib.Path) -> None:
  text = schema.Text(length=24, width=16, depth=1, heads=2, mlp=24, pool=schema.TextPool.MEAN)
  tower = contrastive.tower(text, out_width=8)
  found = texts.of_config(schema.Config(objective=schema.Contrastive(text=text, out_dim=8), evals={}), {
      'text': tower.init(jax.random.key(0))}, 'a run')
  tokenizer = Tokenizer(None, family='bytes', length=24)
  assert towers._write_text(found, tokenizer, tmp_path / 'a.onnx') < 1e-5
  names = [one.name for one in ort.InferenceSession(str(tmp_path / 'a.onnx')).get_inputs()]
  assert names == ['tokens', 'mask']


def test_a_tokenizer_that_gives_other_ids_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(exported, '_add_simplification', lambda *_: None)
  with pytest.raises(UserError, match="--tokenizer: expected .* the same ids, got others for 'A photo of TWO dogs"):
    exported.write(Tokenizer(None, family='bytes', length=24), TextRule.LOWER, tmp_path / 'a.json',
                   samples=towers.SAMPLES)


def test_weights_without_a_text_tower_are_refused_and_no_file_is_left(tmp_path: pathlib.Path,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
  where = text_models.write('clip', tmp_path / 'clip', own={
      name: x for name, x in text_models.tensors('clip').items() if not name.startswith('text')})
  (tmp_path / 'out').mkdir()
  assert main.run(['export', f'--weights={where}', f'--to={tmp_path}/out/a.onnx', '--texts']) == 2
  assert 'text tower' in capsys.readouterr().err and not list((tmp_path / 'out').iterdir())
  assert main.run(['export', f'--weights={where}', f'--to={tmp_path}/out/a.onnx', '--tokenizer=x']) == 2
  assert '--tokenizer: expected --texts as well' in capsys.readouterr().err


@pytest.mark.slow(reason='5 s')
def test_the_files_need_neither_this_package_nor_jax(tmp_path: pathlib.Path) -> None:
  _, files = written('clip', tmp_path)
  code = ('import sys, json, numpy as np, onnxruntime as ort, tokenizers\n'
          f't = tokenizers.Tokenizer.from_file({str(files.tokenizer)!r})\n'
          f's = ort.InferenceSession({str(files.text)!r})\n'
          'r = s.run(None, {"tokens": np.array([t.encode("a").ids], np.int32)})\n'
          'assert abs(float((r[0] ** 2).sum()) - 1) < 1e-5\n'
          'assert not {"jax", "vit_jax"} & set(sys.modules)')
  subprocess.run([sys.executable, '-c', code], check=True, cwd=tmp_path)
