"""ONNX files with products in int8: near to float32, with the products that int8 spoils in float32."""
from __future__ import annotations

import json
import math
import pathlib

import jax
import loaded
import numpy as np
import pytest
from PIL import Image

from vit_jax import main
from vit_jax.core.errors import UserError
from vit_jax.export import functions, int8, job
from vit_jax.export import onnx as export_onnx
from vit_jax.weights import loading

onnx = pytest.importorskip('onnx', reason='onnx is not installed')
pytest.importorskip('onnxruntime', reason='onnxruntime is not installed')
SPOILED = 'backbone/blocks/0/mlp/down/kernel'


def images(num: int = 8) -> np.ndarray:
  return np.random.default_rng(2).normal(size=(num, *loaded.PX, 3)).astype(np.float32)


def with_large_unit() -> object:
  """Weights with one hidden unit of the MLP that is always large, and does not reach the logits much."""
  found = loaded.weights('deit')
  params = jax.tree.map(np.array, found.params)
  mlp = params['backbone']['blocks']['mlp']
  mlp['up']['bias'][0, 0] = 3000.
  mlp['down']['kernel'][0, 0] *= 1e-4
  return found._replace(params=params)


def write_float(weights: object, path: pathlib.Path) -> pathlib.Path:
  found = functions.make_subject(weights, from_pixels=False)
  export_onnx.write(path, found.function, job.inference.parameters(weights), found.image, output='logits',
                    about={'classes': 'seven'})
  return path


def test_products_are_int8_and_near_to_float32(tmp_path: pathlib.Path) -> None:
  """Errors: inputs have 255 steps and kernels 64, so that a product has about 30 dB, and six after another 20."""
  (tmp_path / 'scratch').mkdir()
  path = write_float(with_large_unit(), tmp_path / 'scratch' / 'a.onnx')
  found = int8.quantize(path, tmp_path / 'a.onnx', images(), min_sqnr=20.)
  rows = found.rows()
  assert set(rows['0']) == {'attn/query', 'attn/key', 'attn/value', 'attn/out', 'mlp/up', 'mlp/down'}
  assert set(rows['']) == {'stem', 'head', 'head_dist'}
  assert [one.kernel for one in found.products if one.sqnr < 20] == [SPOILED]
  assert found.sqnr > 20 and found.agreement >= .875
  model = onnx.load(str(tmp_path / 'a.onnx'))
  kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
  assert kinds[SPOILED] == onnx.TensorProto.FLOAT
  kernels = [onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer
             if len(tensor.dims) == 2 and tensor.data_type == onnx.TensorProto.INT8]
  assert len(kernels) == 8 and max(np.abs(kernel.astype(int)).max() for kernel in kernels) == int8.KERNEL_TOP
  assert {one.key: one.value for one in model.metadata_props}['classes'] == 'seven'
  assert sum(node.op_type == 'QuantizeLinear' for node in model.graph.node) == 6, 'query, key and value share one'
  with pytest.raises(UserError, match=r'--min_sqnr: expected at most \d\d\.\d dB, the best of 9 products, got 99\.'):
    int8.quantize(path, tmp_path / 'b.onnx', images(), min_sqnr=99.)


@pytest.mark.slow(reason='1 s: a file is quantized')
def test_a_file_far_from_float32_is_an_error(tmp_path: pathlib.Path) -> None:
  path = write_float(with_large_unit(), tmp_path / 'a.onnx')
  with pytest.raises(UserError, match=r'--quantize: expected outputs .* at least 15 dB, got .*\n.* mlp/down'):
    int8.quantize(path, tmp_path / 'b.onnx', images(), min_sqnr=-100.)


def test_smoothing_changes_no_result_and_evens_out_channels(tmp_path: pathlib.Path) -> None:
  path = write_float(loaded.weights('deit'), tmp_path / 'a.onnx')
  model = onnx.load(str(path))
  products = int8.find(model.graph)
  names = list(dict.fromkeys(one.source for one in products))
  before = int8.measure(model, names, images(), tmp_path / 'b.onnx')
  said = int8.smooth(model.graph, products, before)
  export_onnx.save(model, tmp_path / 'c.onnx')
  wanted = export_onnx.run(path, images())
  np.testing.assert_allclose(export_onnx.run(tmp_path / 'c.onnx', images()), wanted, atol=1e-4 * np.abs(wanted).max())
  after = int8.measure(model, names, images(), tmp_path / 'b.onnx')
  moved = [name for name in names if not np.allclose(before[name].highest, after[name].highest, rtol=1e-3)]
  assert len(moved) == 2, 'the norms before attention and before the MLP; those of the head have two readers'
  for name in names:
    np.testing.assert_allclose(said[name].highest, after[name].highest, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(said[name].rows, after[name].rows, rtol=1e-4, atol=1e-4)
  stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
  for name in moved:  # each channel of the inputs has the range of its rows of the kernels, as both had factors
    kernels = [stored[node.input[1]] for node in model.graph.node if name in node.input]
    largest = np.maximum(np.abs(said[name].lowest), np.abs(said[name].highest))
    np.testing.assert_allclose(largest, np.max([np.abs(kernel).max(1) for kernel in kernels], 0), rtol=1e-4)
  assert not {tensor.name for tensor in model.graph.initializer} - {x for node in model.graph.node for x in node.input}


def test_the_ratio_of_a_product_counts_each_token() -> None:
  rows = np.array([[1., 0.], [0., 1.]])
  values = int8.Values(np.zeros(2), np.ones(2), rows)
  assert int8.ratio(values, np.eye(2)) == math.inf, 'ones and zeros are steps of both'
  values = int8.Values(np.zeros(2), np.array([1., 1000.]), np.array([[1., 0.], [0., 1000.]]))
  assert int8.ratio(values, np.eye(2)) == pytest.approx(int8.decibel(2., 1.)), 'the first token is lost, half of them'
  small = np.array([[1., 0.], [0., .001]])
  assert int8.ratio(int8.Values(np.zeros(2), np.ones(2), rows), small) == math.inf, 'each output has its own scale'
  assert int8.decibel(100., 1.) == 20. and int8.decibel(1., 0.) == math.inf
  assert 2 * int8.STEPS * int8.KERNEL_TOP < 2**15


def test_what_is_not_a_number_has_no_ratio() -> None:
  assert math.isnan(int8.decibel(1., math.nan)) and math.isnan(int8.decibel(math.nan, 1.))
  assert int8.decibel(1., 0.) == math.inf and int8.decibel(0., 1.) == -math.inf


def test_the_table_of_a_product_without_error_is_json() -> None:
  products = [int8.Product('a', 'x', 'backbone/blocks/0/mlp/up/kernel', 30.), int8.Product('b', 'y', 'head/kernel')]
  found = int8.Quantized(products, -math.inf, 4, math.inf, 1.).plain()
  assert json.loads(json.dumps(found, allow_nan=False))['sqnr_db'] == {'0': {'mlp/up': 30.}, '': {'head': None}}


@pytest.mark.slow(reason='3 s: two exports through the command line')
def test_the_command_writes_a_file_a_table_and_a_card(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(loading, 'load', lambda where, **_: loaded.weights(where))
  monkeypatch.setattr(loading, 'text', lambda found: 'what was loaded')
  for number in range(12):
    path = tmp_path / 'photos' / 'train' / str(number % 2) / f'{number}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(path)
  words = ['export', '--quantize=int8', f'--data=folder:{tmp_path / "photos"}', '--images=8', '--from_pixels']
  assert main.run([*words, '--weights=vit', f'--to={tmp_path / "a.onnx"}']) == 0
  said = capsys.readouterr().out
  assert 'products are in int8, with ranges of 8 images, on which' in said and '\nblock attn/query' in said
  assert sorted(one.name for one in tmp_path.iterdir()) == ['a.onnx', 'a.onnx.int8.json', 'a.onnx.md', 'photos']
  found = json.loads((tmp_path / 'a.onnx.int8.json').read_text())
  assert found['images'] == 8 and found['agreement'] >= .75 and len(found['sqnr_db']['1']) == 6
  assert 'Then products were quantized to int8' in (tmp_path / 'a.onnx.md').read_text()
  pixels = np.random.default_rng(0).integers(0, 256, (3, *loaded.PX, 3), dtype=np.uint8)
  assert export_onnx.run(tmp_path / 'a.onnx', pixels).shape == (3, loaded.CLASSES)
  assert main.run([*words, '--weights=mixer', f'--to={tmp_path / "b.onnx"}']) == 0
  mixer = json.loads((tmp_path / 'b.onnx.int8.json').read_text())['sqnr_db']
  assert set(mixer['0']) == {'tokens/up', 'tokens/down', 'channels/up', 'channels/down'}


@pytest.mark.parametrize('words, said', [
    ('vit --quantize=int8 --data=folder:x --to=a.stablehlo', '--quantize: expected --to=FILE.onnx, got '),
    ('vit --quantize=int8 --to=a.onnx', '--data: expected images for --quantize, got none. Set --data=folder:PATH'),
    ('vit --data=folder:x --to=a.onnx', '--data: expected none without --quantize, got folder:x. Set --quantize=int8'),
    ('vit --min_sqnr=10 --to=a.onnx', '--min_sqnr: expected --quantize=int8 as well, got --min_sqnr=10.0 alone.'),
    ('vit --min_sqnr=20 --images=64 --split=test --to=a.onnx', '--split: expected --quantize=int8 as well'),
    ('vit --images=64 --to=a.onnx', '--images: expected --quantize=int8 as well, got --images=64 alone.'),
    ('vit --quantize=int8 --data=digits --split=trian --to=a.onnx',
     "split of digits: expected one of test, train, got 'trian'. Did you mean train? Change --split."),
    ('bit --quantize=int8 --data=folder:x --to=a.onnx',
     '--quantize: expected a Vision Transformer or a Mixer, got ResNet'),
    ('vit --quantize=int8 --data=folder:x --to=a.onnx', 'got no folder. Set --data=folder:PATH')])
def test_what_cannot_be_quantized_is_an_error(words: str, said: str, tmp_path: pathlib.Path,
                                              monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(loading, 'load', lambda where, **_: loaded.weights(where))
  monkeypatch.setattr(loading, 'text', lambda found: 'what was loaded')
  assert main.run(['export', *f'--weights={words}'.split()]) == 2
  assert said in capsys.readouterr().err
  assert list(tmp_path.iterdir()) == []


def test_a_damaged_image_to_measure_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(loading, 'load', lambda where, **_: loaded.weights(where))
  monkeypatch.setattr(loading, 'text', lambda found: 'what was loaded')
  path = tmp_path / 'photos' / 'train' / 'a' / '0.png'
  path.parent.mkdir(parents=True)
  path.write_bytes(b'\x89PNG\r\n\x1a\nbroken')
  words = f'export --weights=vit --quantize=int8 --data=folder:{tmp_path / "photos"} --to={tmp_path / "a.onnx"}'
  assert main.run(words.split()) == 2
  assert '0.png: expected an image, got a damaged record (' in capsys.readouterr().err
  assert [one.name for one in tmp_path.iterdir()] == ['photos']
