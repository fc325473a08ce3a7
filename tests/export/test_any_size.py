"""Files for images of any size: one file gives the results of the network at every size that its patches tile."""
from __future__ import annotations

import dataclasses
import pathlib

import jax
import loaded
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.config.schema import LastNorm, PositionResize, PositionsAt
from vit_jax.core.errors import UserError
from vit_jax.export import functions, job
from vit_jax.export import onnx as export_onnx

needs_onnx = pytest.mark.skipif(not {'onnx', 'onnxruntime'} <= {m.name for m in __import__('pkgutil').iter_modules()},
                                reason='onnx and onnxruntime are not installed')
SMALL = schema.ViT(patch=8, width=32, depth=1, heads=2, mlp=schema.Mlp(48))
SIZES = ((32, 48), (16, 16), (64, 40), (8, 72), (128, 128))
"""The own one, a square one, a higher one, a single row of patches, and one that is larger on both sides."""
NETWORKS = {
    **{one.value: {'positions': schema.Learned(resize=one)} for one in PositionResize},
    'learned2d': {'positions': schema.Learned2d(resize=PositionResize.BICUBIC_OFFSET)},
    'in the blocks': {'positions': schema.Learned(PositionsAt.LAYERS)},
    'sincos': {'positions': schema.SinCos(schema.Frequencies.MAE), 'pool': schema.Map(), 'registers': 2},
    'sincos of big_vision': {'positions': schema.SinCos(), 'pool': schema.Mean(), 'block': schema.Axial()},
    'rotary in the unit interval': {'positions': schema.Rotary(coordinates=schema.UnitInterval()),
                                    'block': schema.Plain(.5)},
    'rotary and learned': {'positions': schema.LearnedRotary(coordinates=schema.ByIndex(4)),
                           'pool': schema.Map(class_token=True), 'norm': schema.RmsNorm(),
                           'mlp': schema.SwiGlu(48, inner_norm=True)},
    'rotary by number': {'positions': schema.Rotary(10_000.), 'pool': schema.Mean(class_token=True),
                         'last_norm': LastNorm.POOLED},
    'none': {'positions': schema.NoPositions(), 'attention': schema.Attention(qk_norm=True)},
}


def subject(monkeypatch: pytest.MonkeyPatch, name: str) -> functions.Subject:
  monkeypatch.setitem(loaded.MODELS, f'any size {name}', dataclasses.replace(SMALL, **NETWORKS[name]))
  return functions.make_subject(loaded.weights(f'any size {name}'), from_pixels=False, any_size=True)


def write(found: functions.Subject, path: pathlib.Path) -> pathlib.Path:
  export_onnx.write(path, found.function, {}, found.image, output='logits', about={}, multiple=found.multiple)
  return path


@needs_onnx
@pytest.mark.quick('bicubic_offset', reason='3 s of CPU each: five programs')
@pytest.mark.parametrize('name', NETWORKS)
def test_one_onnx_file_gives_the_results_of_the_network_at_five_sizes(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  found = subject(monkeypatch, name)
  path, function = write(found, tmp_path / 'a.onnx'), jax.jit(found.function)
  for px in SIZES:
    image = np.random.default_rng(0).normal(size=(2, *px, 3)).astype(np.float32)
    want = np.asarray(function(image))
    np.testing.assert_allclose(export_onnx.run(path, image), want, atol=1e-4 * max(1, np.abs(want).max()), rtol=0,
                               err_msg=f'{px}')


@pytest.mark.slow(reason='4 s: five programs, twice')
def test_one_stablehlo_file_gives_the_results_of_the_network_at_five_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
  found = subject(monkeypatch, 'bicubic_antialias')
  run, function = functions.from_stablehlo(functions.to_stablehlo(found)), jax.jit(found.function)
  for px in SIZES:
    image = np.random.default_rng(0).normal(size=(2, *px, 3)).astype(np.float32)
    want = np.asarray(function(image))
    np.testing.assert_allclose(run(image), want, atol=1e-4 * max(1, np.abs(want).max()), rtol=0, err_msg=f'{px}')


@needs_onnx
@pytest.mark.slow(reason='3 s: an export and its check')
def test_a_file_of_any_size_says_so_and_is_checked_at_three_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  import onnx
  monkeypatch.setitem(loaded.MODELS, 'any size', SMALL)
  job.write(loaded.weights('any size'), tmp_path / 'a.onnx', from_pixels=True, any_size=True)
  said = capsys.readouterr().out
  assert 'image [batch, height, width, 3] uint8 to logits' in said
  assert 'any height and width that are multiples of 8 px' in said
  assert 'any height and width that are multiples of 8 px' in (tmp_path / 'a.onnx.md').read_text()
  graph = onnx.load(str(tmp_path / 'a.onnx')).graph
  named = [[side.dim_param or side.dim_value for side in one.type.tensor_type.shape.dim]
           for one in (*graph.input, *graph.output)]
  assert named == [['batch', 'height', 'width', 3], ['batch', loaded.CLASSES]]


@needs_onnx
def test_the_output_is_declared_with_its_own_dtype_and_symbols(tmp_path: pathlib.Path) -> None:
  import onnx
  image = jax.ShapeDtypeStruct((1, 32, 48, 3), np.uint8)
  export_onnx.write(tmp_path / 'a.onnx', lambda image: image.transpose(0, 2, 3, 1), {}, image, output='turned',
                    about={}, multiple=8)
  output, = onnx.load(str(tmp_path / 'a.onnx')).graph.output
  assert output.type.tensor_type.elem_type == onnx.TensorProto.UINT8
  assert [side.dim_param or side.dim_value for side in output.type.tensor_type.shape.dim] == [
      'batch', 'width', 3, 'height']


def test_the_check_is_at_the_own_size_and_at_one_wider_and_one_higher() -> None:
  image = jax.ShapeDtypeStruct((1, 32, 48, 3), np.float32)
  assert functions.sizes(functions.Subject(lambda x: x, image, 'logits')) == [(32, 48)]
  assert functions.sizes(functions.Subject(lambda x: x, image, 'logits', 8)) == [(32, 48), (16, 56), (40, 32)]


@pytest.mark.parametrize('name, said', [
    ('mixer', 'got the network Mixer'), ('hybrid', 'got a stem of convolutions'),
    ('relative', 'got relative positions')])
def test_networks_of_one_size_are_refused_by_name(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(loaded.MODELS, 'relative', dataclasses.replace(SMALL, positions=schema.Relative()))
  with pytest.raises(UserError, match=f'--any_size: expected a Vision Transformer of patches .* {said}'):
    functions.make_subject(loaded.weights(name), from_pixels=False, any_size=True)
