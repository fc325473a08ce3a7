"""Exports: each format gives the results of the network for any batch size, and describes its input."""
from __future__ import annotations

import functools
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import loaded
import numpy as np
import pytest

from vit_jax import main
from vit_jax.config import schema
from vit_jax.config.schema import Gelu
from vit_jax.core.errors import UserError
from vit_jax.export import functions, graph, job, rules
from vit_jax.export import onnx as export_onnx
from vit_jax.inspect.model import Model
from vit_jax.models.kernels import norm_act
from vit_jax.weights import inference, loading

needs_onnx = pytest.mark.skipif(not {'onnx', 'onnxruntime'} <= {m.name for m in __import__('pkgutil').iter_modules()},
                                reason='onnx and onnxruntime are not installed')


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(loading, 'load', lambda where, **_: loaded.weights(where))
  monkeypatch.setattr(loading, 'text', lambda found: 'what was loaded')


def images(num: int = 5) -> np.ndarray:
  return np.random.default_rng(2).normal(size=(num, *loaded.PX, 3)).astype(np.float32)


@functools.cache
def reference(name: str) -> np.ndarray:
  found = loaded.weights(name)
  return np.asarray(jax.jit(lambda *a: inference.function(found)(*a).logits)(inference.parameters(found), images()))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
  """Files are not compared with the network when they are written: the test does it, with other images."""
  monkeypatch.setattr(functions, 'compare', lambda subject, runner: 0.)


SLOW = {'efficientnet', 'hybrid'}  # their operations are in other networks, or in the test of operations below


@pytest.mark.quick('deit', reason='1 to 8 s, mostly tracing')
@needs_onnx
@pytest.mark.parametrize('name', [pytest.param(name, marks=pytest.mark.slow(reason='4 to 8 s of CPU, mostly tracing'))
                                  if name in SLOW else name for name in loaded.MODELS])
@pytest.mark.usefixtures('unchecked')
def test_onnx_gives_the_results_of_the_network(name: str, tmp_path: pathlib.Path) -> None:
  path = tmp_path / f'{name}.onnx'
  job.write(loaded.weights(name), path, from_pixels=False)
  want = reference(name)
  np.testing.assert_allclose(export_onnx.run(path, images()), want, atol=1e-4 * max(1, np.abs(want).max()), rtol=0)


@pytest.mark.slow(reason='1 s: an export')
@needs_onnx
def test_an_onnx_file_describes_itself(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  import onnx
  assert main.run(['export', '--weights=vit', f'--to={tmp_path / "a.onnx"}']) == 0
  said = capsys.readouterr().out
  assert 'image [batch, 32, 48, 3] float32 to logits' in said and 'For 1 and 3 images, its results differ' in said
  model = onnx.load(str(tmp_path / 'a.onnx'))
  about = {p.key: p.value for p in model.metadata_props}
  assert about['opset'] == '20' == str(model.opset_import[0].version) and json.loads(about['classes'])[6] == 'kind 6'
  assert about['resize'] == 'short side to 40 px, then center crop of 32 x 48, bicubic, antialiased'
  assert about['values'] == '(RGB / 255 - [0.5, 0.4, 0.3]) / [0.2, 0.3, 0.4]' and about['source'] == 'small vit'
  stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
  block = loaded.weights('vit').params['backbone']['blocks']
  np.testing.assert_array_equal(stored['backbone/blocks/1/mlp/up/kernel'], block['mlp']['up']['kernel'][1])
  assert stored['backbone/blocks/0/attn/query/kernel'].size == block['attn']['query']['kernel'][0].size
  assert [side.dim_param or side.dim_value for side in model.graph.input[0].type.tensor_type.shape.dim] == [
      'batch', 32, 48, 3]


@needs_onnx
@pytest.mark.usefixtures('unchecked')
def test_parameters_of_a_large_network_get_a_file_of_their_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(export_onnx, 'MAX_BYTES', 1000)
  job.write(loaded.weights('vit'), tmp_path / 'a.onnx', from_pixels=False)
  assert sorted(p.name for p in tmp_path.iterdir()) == ['a.onnx', 'a.onnx.data', 'a.onnx.md']
  np.testing.assert_allclose(export_onnx.run(tmp_path / 'a.onnx', images()), reference('vit'), atol=1e-4)


@pytest.mark.slow(reason='6 s: starts a program; the test of pixels exports StableHLO too')
@pytest.mark.usefixtures('unchecked')
def test_stablehlo_runs_without_this_project(tmp_path: pathlib.Path) -> None:
  for name in ('vit', 'bit'):
    job.write(loaded.weights(name), tmp_path / f'{name}.stablehlo', from_pixels=False)
  card = (tmp_path / 'vit.stablehlo.md').read_text()
  assert "pathlib.Path('vit.stablehlo').read_bytes()" in card and 'largest difference from the network' in card
  np.save(tmp_path / 'in.npy', images())
  code = ('import sys, jax, numpy as np\nfrom jax import export\n'
          'for name in ("vit", "bit"):\n'
          '  found = export.deserialize(bytearray(open(name + ".stablehlo", "rb").read()))\n'
          '  assert set(found.platforms) == {"cpu", "cuda", "rocm", "tpu"}, found.platforms\n'
          '  np.save(name + ".npy", found.call(np.load("in.npy")))\n'
          'assert not [name for name in sys.modules if name.startswith("vit_jax")]')
  subprocess.run([sys.executable, '-c', code], check=True, cwd=tmp_path)
  for name in ('vit', 'bit'):
    want = reference(name)
    np.testing.assert_allclose(np.load(tmp_path / f'{name}.npy'), want, atol=1e-4 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize('suffix', ['.stablehlo', pytest.param('.onnx', marks=needs_onnx)])
@pytest.mark.usefixtures('unchecked')
def test_pixels_are_normalized_inside_on_request(suffix: str, tmp_path: pathlib.Path) -> None:
  path, found = tmp_path / f'a{suffix}', loaded.weights('mixer')
  job.write(found, path, from_pixels=True)
  model = Model(found)
  pixels = np.stack([model.prepare(picture) for picture in loaded.pictures(2)])
  got = export_onnx.run(path, pixels) if suffix == '.onnx' else functions.from_stablehlo(path.read_bytes())(pixels)
  np.testing.assert_allclose(got, model.logits(pixels, prepared=True), atol=1e-4, rtol=1e-4)
  card = path.with_name(f'{path.name}.md').read_text()
  assert 'RGB from 0 to 255, u8' in card and f'image = np.zeros({(1, *pixels.shape[1:])}, np.uint8)' in card


@pytest.mark.slow(reason='1 s: an export')
@pytest.mark.usefixtures('unchecked')
def test_networks_without_a_head_give_features(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  job.write(loaded.weights('vit', num_classes=0), tmp_path / 'a.stablehlo', from_pixels=False)
  assert 'to features' in capsys.readouterr().out
  assert functions.from_stablehlo((tmp_path / 'a.stablehlo').read_bytes())(images()).shape == (5, 32)


@needs_onnx
def test_a_file_with_other_results_is_not_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(rules.RULES.same_name, 'add', 'Sub')
  with pytest.raises(UserError, match='differ from those of the network by at most 1e-04 .*, got .*not kept'):
    job.write(loaded.weights('vit'), tmp_path / 'a.onnx', from_pixels=False)
  assert list(tmp_path.iterdir()) == []


def test_a_wrong_shape_and_nan_are_errors() -> None:
  shape = jax.ShapeDtypeStruct((1, 4, 4, 3), jnp.float32)
  subject = functions.Subject(lambda image: image.mean((1, 2)), shape, 'logits')
  with pytest.raises(UserError, match=r'expected logits \(1, 3\) for 1 images, got \(1, 2\)'):
    functions.compare(subject, lambda image: image.mean((1, 2))[:, :2])
  with pytest.raises(UserError, match='of the largest value, got nan'):
    functions.compare(subject, lambda image: image.mean((1, 2)) * np.nan)
  assert functions.compare(subject, lambda image: image.mean((1, 2)) + 5e-5) == pytest.approx(5e-5, rel=.1)


@needs_onnx
def test_an_operation_without_a_rule_is_named(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match="expected operations that have an ONNX rule, got 'sort'"):
    export_onnx.write(tmp_path / 'a', lambda image: jnp.sort(image, axis=1), {},
                      jax.ShapeDtypeStruct((1, 4, 4, 3), jnp.float32), output='x', about={})


@needs_onnx
def test_operations_that_no_small_network_has_are_correct(tmp_path: pathlib.Path) -> None:
  def function(image: jax.Array) -> jax.Array:
    x = jax.nn.gelu(image, approximate=False) + jnp.sqrt(jnp.maximum(image, .5)) * jax.lax.erf(-image)
    x = jnp.pad(x, ((0, 0), (1, 0), (0, 2), (0, 0)), constant_values=.5)
    x = jax.lax.slice_in_dim(jax.lax.slice_in_dim(x, 0, 5, 2, axis=1), 1, 8, axis=2)
    x = jnp.concatenate([x, jnp.broadcast_to(jnp.arange(3.), x.shape)], axis=-1)
    x = jnp.concatenate([part[:, None] for part in jnp.split(x, 2, axis=-1)], axis=1) ** 3 + jax.lax.rsqrt(
        1. + x[:, None, ..., :3] ** 2)
    x = jnp.squeeze(jnp.expand_dims(x, 0), 0)
    depthwise = jax.lax.conv_general_dilated(
        jax.nn.silu(image), kernel, (2, 2), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'), feature_group_count=3)
    squeezed = depthwise * jax.nn.sigmoid(depthwise.mean((1, 2), keepdims=True))
    return x.max(1)[:, ::2, 1::3, 1] + x[:, 1, ::2, 1::3, 2] + squeezed.sum((1, 2, 3))[:, None, None]
  image, kernel = (np.random.default_rng(0).normal(size=size).astype(np.float32)
                   for size in ((3, 4, 6, 3), (3, 3, 1, 3)))
  with jax.numpy_rank_promotion('allow'):
    export_onnx.write(tmp_path / 'a', function, {}, jax.ShapeDtypeStruct((1, 4, 6, 3), jnp.float32), output='x',
                      about={})
    want = jax.jit(function)(image)
  np.testing.assert_allclose(export_onnx.run(tmp_path / 'a', image), want, atol=1e-5)


@needs_onnx
@pytest.mark.parametrize('kind', Gelu)
def test_every_gelu_is_itself(kind: Gelu, tmp_path: pathlib.Path) -> None:
  image = np.linspace(-4., 4., 48, dtype=np.float32).reshape(1, 4, 4, 3)
  export_onnx.write(tmp_path / 'a', lambda image: norm_act.gelu(image, kind), {},
                    jax.ShapeDtypeStruct(image.shape, jnp.float32), output='x', about={})
  want = norm_act.plain_gelu(jnp.asarray(image), kind)
  np.testing.assert_allclose(export_onnx.run(tmp_path / 'a', image), want, atol=1e-5)  # forms differ by 2e-4


@pytest.mark.parametrize(('to', 'said'), [
    ('a.pb', '--to: expected a name that ends in .stablehlo or .onnx, got'),
    ('no-such/a.onnx', '--to: expected a path in an existing directory'),
    ('large.onnx', 'large.onnx.data exists. Choose another'),
    ('there.onnx', 'there.onnx exists. Choose another'),
])
def test_a_target_that_cannot_be_is_refused(to: str, said: str, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'there.onnx').touch()
  (tmp_path / 'large.onnx.data').touch()
  with pytest.raises(UserError, match=said):
    job.write(loaded.weights('vit'), tmp_path / to, from_pixels=False)


def test_equal_tensors_are_stored_once_and_have_the_names_of_parameters() -> None:
  params = {'a': {'blocks': {'w': np.arange(6.).reshape(2, 3)}}, 'b': np.ones(4)}
  names = export_onnx.names_of(params)
  writer = graph.Writer(None, names, rules.RULES)
  assert writer.tensor(params['a']['blocks']['w'][1]) == 'a/blocks/1/w' == writer.tensor(np.arange(3., 6.))
  assert writer.tensor(np.arange(3., 6.)[None]) != 'a/blocks/1/w' and writer.tensor(np.ones((2, 2))) == 'b'
  assert len(writer.stored) == 3 and names[graph.digest(np.arange(6.))] == 'a/blocks/w'


def test_constants_are_moved_as_jax_moves_them() -> None:
  def function(x: jax.Array) -> list[jax.Array]:
    first, second = jax.lax.split(x, (1, 3), axis=1)
    return [jax.lax.transpose(x, (2, 0, 1)), first, second, jax.lax.squeeze(first, (1,)),
            jax.lax.broadcast_in_dim(x, (5, 2, 4, 3), (1, 2, 3)), jax.lax.slice(x, (0, 1, 0), (2, 4, 2)),
            jax.lax.slice(x, (0, 0, 1), (2, 4, 3), (1, 2, 1))]

  x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
  traced = jax.make_jaxpr(function)(x)
  assert {equation.primitive.name for equation in traced.eqns} == set(graph.MOVES)
  found = graph.Writer(None, {}, rules.RULES).write(traced.jaxpr, traced.consts, [x])
  for ours, want in zip(found, function(jnp.asarray(x)), strict=True):
    np.testing.assert_array_equal(ours, want)


def test_networks_are_exported_in_f32() -> None:
  found = loaded.weights('vit')
  slow = found._replace(model=schema.ViT(**{**vars(found.model), 'dtype': schema.DType.BF16,
                                            'quantize': schema.Quantize.INT8,
                                            'execution': schema.Execution.SCAN}))
  subject = functions.make_subject(slow, from_pixels=False)
  np.testing.assert_allclose(jax.jit(subject.function)(images()), reference('vit'), rtol=1e-5, atol=1e-5)


@needs_onnx
def test_a_choice_between_two_arrays_is_exported(tmp_path: pathlib.Path) -> None:
  """As of the logits of tokens that are attended to and of others."""
  def function(x: jax.Array) -> jax.Array:
    return jnp.where(x[..., :1, :1, :1] < 0., x, -1e30)

  image = np.random.default_rng(0).normal(size=(3, 4, 4, 3)).astype(np.float32)
  export_onnx.write(tmp_path / 'a.onnx', function, {}, jax.ShapeDtypeStruct((1, 4, 4, 3), jnp.float32), output='y',
                    about={}, multiple=0)
  np.testing.assert_array_equal(export_onnx.run(tmp_path / 'a.onnx', image), function(image))
