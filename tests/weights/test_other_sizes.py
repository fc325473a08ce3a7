"""Weights for images of another size than they were trained with, not square either: by each job and the API."""
from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import loaded
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.weights import made
from vit_jax import main
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.export import onnx
from vit_jax.weights import inference, loading, preprocess, saving

PX = (64, 32)
SMALL = schema.ViT(patch=16, width=32, depth=1, heads=2, mlp=schema.Mlp(48))


@pytest.mark.parametrize('how', ['bicubic_offset', 'bilinear_antialias'])
def test_positions_resized_when_loading_are_those_of_the_forward_pass(
    how: str, monkeypatch: pytest.MonkeyPatch) -> None:
  learned = schema.Learned(resize=schema.PositionResize(how))
  monkeypatch.setitem(loaded.MODELS, how, dataclasses.replace(SMALL, positions=learned))
  own = loaded.weights(how)
  other = loading.at_size(own, preprocess.scaled(own.preprocess, PX))
  image = jax.device_put(np.float32(np.random.default_rng(0).normal(size=(2, *PX, 3))))
  first, second = (jax.jit(lambda x, one=one: inference.function(one)(inference.parameters(one), x).features.pooled)(
      image) for one in (own, other))
  assert other.params['backbone']['positions'].shape == (1, 1 + 8, 32)
  np.testing.assert_allclose(first, second, rtol=0, atol=1e-5)  # tables rounded once, in f64 and in f32


@pytest.mark.parametrize(('model', 'px', 'said'), [
    (SMALL, (40, 40), 'image=40x40: expected multiples of the patch side, 16 px'),
    (dataclasses.replace(SMALL, positions=schema.Relative()), PX,
     'image=64x32: expected 32x48, as this ViT with positions relative takes one size of images only'),
    (loaded.MODELS['mixer'], PX, 'image=64x32: expected 32x48, as this Mixer takes one size of images only'),
    (schema.AxialResNet(), PX, 'image=64x32: expected 32x48, as this AxialResNet takes one size of images only')])
def test_a_size_that_cannot_be_is_refused_with_the_reason(
    model: schema.Model, px: tuple[int, int], said: str) -> None:
  own = loaded.weights('vit')._replace(model=model)
  with pytest.raises(UserError, match=said):
    loading.at_size(own, preprocess.scaled(own.preprocess, px))


def test_convolutions_take_any_size() -> None:
  own = loaded.weights('bit')
  other = loading.at_size(own, preprocess.scaled(own.preprocess, (40, 72)))
  assert other.params is own.params and other.preprocess.image_px == (40, 72)


@pytest.mark.slow(reason='9 s: five programs')
@pytest.mark.usefixtures('one_device', 'no_page')
def test_every_job_and_the_api_take_images_of_the_size_that_is_asked_for(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  file = tmp_path / 'a.npz'
  saving.save(made.network(), str(file))
  rng = np.random.default_rng(0)
  for name in ('0', '1'):
    folder = tmp_path / 'set' / 'test' / made.CLASSES[int(name)].split()[0]
    folder.mkdir(parents=True)
    for number in range(4):
      Image.fromarray(rng.integers(0, 256, (50, 90, 3), dtype=np.uint8)).save(folder / f'{number}.png')
  image = str(folder / '0.png')
  api = vit_jax.load(file, preprocess='image=32x48')
  assert api.features(image).shape == (1, 32) and api.prepare(image).shape == (32, 48, 3)
  assert api.features(image, layer=1).shape == (1, 1 + 4 * 6, 32)
  assert main.run(['predict', f'--weights={file}', '--preprocess=image=32x48', '--json', image]) == 0
  line = json.loads(capsys.readouterr().out.splitlines()[1])
  assert line['classes'][0]['name'] == api.classify(image)[0][0].name
  assert main.run(['export', f'--weights={file}', '--preprocess=image=32x48', f'--to={tmp_path / "a.onnx"}']) == 0
  pixels = np.asarray(api.normalize(api.prepare(image)[None]))
  np.testing.assert_allclose(onnx.run(tmp_path / 'a.onnx', pixels), api.logits(image), rtol=0, atol=1e-4)
  for number, setting in enumerate(('--preprocess=image=32x48', '--config.image_px=(32, 48)')):
    out = tmp_path / f'out{number}'
    assert main.run(['evaluate', f'--weights={file}', f'--config.data.source=folder:{tmp_path / "set"}', setting,
                     '--config.batch_size=4', f'--workdir={out}']) == 0
    assert json.loads((out / 'config.json').read_text())['image_px'] == [32, 48]
    assert json.loads((out / 'evaluate.json').read_text())
