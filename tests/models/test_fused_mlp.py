"""The fused MLP kernel against the plain form, as Pallas' interpreter runs it; where it applies; its cycles."""
from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import logging
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, MlpKernel
from vit_jax.core import numerics
from vit_jax.core.types import Array
from vit_jax.models.kernels import forms, fused_mlp, norm_act
from vit_jax.models.vit.block import Mlp
from vit_jax.models.vit.context import BlockInfo, Context
from vit_jax.parallel import kernels

AXES = ('data', 'fsdp', 'tensor')


def assert_equals_the_plain_form(shape: fused_mlp.Shape, gelu: Gelu, dtype: type = jnp.float32, *,
                                 vmem_bytes: int = fused_mlp.VMEM) -> None:
  """Result and gradients, within the rounding of their sums.

  A sum of n products is within n u of the exact one, times the magnitude of its terms. A gradient has two such sums
  after each other, over a width and over widths or tokens, and what is between them is rounded to the compute dtype,
  u = 2^-24 or 2^-9, a few times. The scale is the largest number of the result.
  """
  images, tokens, width, hidden = shape
  keys = jax.random.split(jax.random.key(0), 6)
  sides = ((images, tokens, width), (width, hidden), (hidden,), (hidden, width), (width,), (images, tokens, width))
  scales = (1., width**-.5, .3, hidden**-.5, .3, 1.)
  arrays = [(scale * jax.random.normal(key, side)).astype(dtype)
            for key, side, scale in zip(keys, sides, scales, strict=True)]

  def plain(x: Array, kernel1: Array, bias1: Array, kernel2: Array, bias2: Array) -> Array:
    return norm_act.plain_gelu(x @ kernel1 + bias1[None, None], gelu) @ kernel2 + bias2[None, None]

  def fused(*inputs: Array) -> Array:
    return fused_mlp.mlp(*inputs, gelu, vmem_bytes, True)

  def all_of(form: object, *args: Array) -> tuple[Array, ...]:
    y, pull = jax.vjp(form, *args[:-1])  # type: ignore[arg-type]
    return (y, *pull(args[-1]))

  with jax.default_matmul_precision('highest'):
    wanted = jax.jit(functools.partial(all_of, plain))(*(one.astype(jnp.float32) for one in arrays))
  found = jax.jit(functools.partial(all_of, fused))(*arrays)
  terms = width + max(hidden, images * tokens)
  rounding = terms * 2.**-24 + (6 * 2.**-9 if dtype == jnp.bfloat16 else 0.)
  for one, other in zip(found, wanted, strict=True):
    np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=0, atol=4 * rounding * float(jnp.abs(other).max()))


SMALL = 2 * 128 * 256 * 8 + 230_000
"""On-chip memory that two images of the next test fit into, of three."""


def test_result_and_gradients_are_those_of_the_plain_form() -> None:
  """Images that fill no tile and that the grid does not divide, in two steps, of which the last has one too many."""
  shape = fused_mlp.Shape(3, 5, 128, 256)
  assert shape.together(4, SMALL) == 2
  assert_equals_the_plain_form(shape, Gelu.TANH, vmem_bytes=SMALL)


@pytest.mark.slow  # kernels are interpreted, about 5 s of CPU time each
@pytest.mark.parametrize(('images', 'tokens', 'gelu', 'hidden'), [
    (3, 196, Gelu.TANH, 384), (2, 197, Gelu.EXACT, 1024), (2, 256, Gelu.QUICK, 1536), (1, 257, Gelu.TANH, 1024),
    (1, 576, Gelu.TANH, 384)])
def test_any_number_of_tokens_and_form_of_gelu_is_right(images: int, tokens: int, gelu: Gelu, hidden: int) -> None:
  """Hidden widths of one, two and three parts."""
  assert_equals_the_plain_form(fused_mlp.Shape(images, tokens, 128, hidden), gelu)


@pytest.mark.slow  # see above
def test_products_in_bfloat16_are_as_near_as_their_rounding() -> None:
  assert_equals_the_plain_form(fused_mlp.Shape(2, 196, 128, 256), Gelu.TANH, jnp.bfloat16)


@pytest.mark.parametrize('gelu', list(Gelu))
def test_activation_and_slope_are_those_of_the_plain_form(gelu: Gelu) -> None:
  """In 12 operations on numbers of at most the magnitude of 1 and of the result, f32."""
  x = np.linspace(-6., 6., 1001, dtype=np.float32)
  value, slope = fused_mlp.activation(jnp.asarray(x), gelu)
  np.testing.assert_allclose(value, norm_act.plain_gelu(jnp.asarray(x), gelu), rtol=0, atol=12 * 6 * 2.**-24)
  np.testing.assert_allclose(slope, norm_act.slope_of_gelu(jnp.asarray(x), gelu), rtol=0, atol=12 * 6 * 2.**-24)


def test_images_are_joined_so_that_sums_over_tokens_waste_little() -> None:
  """5 images of 196 tokens fill 980 of 1,024 rows; 2 of 256 fill all of 512, and more do not fit."""
  assert fused_mlp.Shape(64, 196, 1024, 4096).together(2, fused_mlp.VMEM) == 5
  assert fused_mlp.Shape(32, 256, 1280, 5120).together(2, fused_mlp.VMEM) == 2
  assert fused_mlp.Shape(4, 196, 1024, 4096).together(2, 0) == 1
  assert [fused_mlp.Shape(1, 1, 128, hidden).part for hidden in (4096, 5120, 384, 1536 + 128)] == [512, 512, 384, 128]


def mesh_of(kind: str, platform: str = 'tpu', *, tensor: int = 1) -> AbstractMesh:
  return AbstractMesh((1, 1, tensor), AXES, abstract_device=AbstractDevice(kind, None, platform))


@pytest.mark.parametrize(('kind', 'sizes', 'tensor', 'said'), [
    ('TPU v5 lite', (196, 1024, 4096), 1, ''), ('TPU v6 lite', (256, 1280, 5120), 1, ''),
    ('TPU v4', (196, 1024, 4096), 1, 'the fused kernel runs only on TPU v5e and v6e, not on TPU v4'),
    ('TPU v6 lite', (196, 1024, 4096), 2, 'the mesh splits the hidden width over 2 devices (tensor=2)'),
    ('TPU v6 lite', (196, 192, 768), 1, 'widths of 192 and 768 do not fill tiles of 128'),
    ('TPU v6 lite', (256, 1664, 8192), 1,
     'widths of 1664 and 8192 need 174 MiB on the chip for an image of 256 tokens, more than 112')])
def test_where_the_kernel_does_not_apply_there_is_a_reason(
    kind: str, sizes: tuple[int, int, int], tensor: int, said: str) -> None:
  tokens, width, hidden = sizes
  assert fused_mlp.problem(mesh_of(kind, tensor=tensor), (8, tokens, width), hidden, 2) == said


CONTEXT = Context(norm=schema.LayerNorm(), gelu=Gelu.TANH, dtype=jnp.float32)
FUSED = schema.Mlp(4096, kernel=MlpKernel.FUSED)


@pytest.mark.parametrize(('options', 'mesh', 'said'), [
    ({}, mesh_of('TPU v6 lite'), ''), ({}, mesh_of('TPU v3'), 'the fused kernel runs only on TPU v5e and v6e'),
    ({}, mesh_of('cpu', 'cpu'), 'mlp.kernel=fused is for TPUs; on cpu XLA computes the MLP'),
    ({'dropout': .1}, mesh_of('TPU v6 lite'), 'without SwiGLU, inner_norm and dropout')])
def test_a_run_without_the_kernel_says_so(
    options: dict[str, float], mesh: AbstractMesh, said: str, caplog: pytest.LogCaptureFixture) -> None:
  caplog.set_level(logging.INFO)
  model = schema.ViT(width=1024, heads=16, mlp=FUSED, **options)  # type: ignore[arg-type]
  forms.check_devices(model, mesh, name='model')
  assert (said in caplog.text) if said else not caplog.text


def test_it_is_refused_with_plain_kernels() -> None:
  model = schema.ViT(kernels=schema.Kernels.PLAIN, mlp=FUSED)
  assert [*model.mlp.network_problems(model, 'model', 'model.mlp')] == [
      'model.mlp.kernel: expected xla with model.kernels=plain, got fused. Set model.mlp.kernel=xla.']


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
  """A mesh of CPUs counts as one of TPUs, whose kernels are interpreted."""
  interpret = functools.partial(fused_mlp.mlp, interpret=True)
  monkeypatch.setattr(numerics, 'mesh_platform', lambda: '' if jax.sharding.get_abstract_mesh().empty else 'tpu')
  monkeypatch.setattr(fused_mlp, 'problem', lambda *args: '')
  monkeypatch.setattr(fused_mlp, 'mlp', interpret)


def run(kernel: MlpKernel, params: dict, x: Array, mesh: AbstractMesh) -> tuple[str, list[np.ndarray]]:
  """The program of value and gradients, and these."""
  module = Mlp(hidden=128, context=CONTEXT, kernel=kernel)
  with jax.sharding.use_abstract_mesh(mesh):
    traced = jax.jit(jax.value_and_grad(lambda params, x: jnp.sin(module.apply(params, x, BlockInfo(len(x)))).sum(),
                                        argnums=(0, 1))).trace(params, x)
    return str(traced.jaxpr), jax.tree.map(np.asarray, traced.lower().compile()(params, x))


def parameters() -> dict:
  module = Mlp(hidden=128, context=CONTEXT)
  params = jax.jit(lambda: module.init(jax.random.key(1), jnp.zeros((1, 1, 128)), BlockInfo(1)))()
  return jax.tree.map(lambda p: p + .1, params)  # biases are not zero


@pytest.mark.slow(reason='2 s: kernels are interpreted, as above')
@pytest.mark.usefixtures('interpreted')
def test_the_module_has_the_same_parameters_result_and_gradients() -> None:
  """Images over four devices."""
  if jax.device_count() < 8:
    pytest.skip('needs eight devices, as are simulated on a CPU')
  mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
  x = jax.random.normal(jax.random.key(0), (4, 5, 128))
  args = jax.device_put((parameters(), x), NamedSharding(mesh, PartitionSpec()))
  (plain, wanted), (fused, found) = (run(kernel, *args, mesh.abstract_mesh) for kernel in (MlpKernel.XLA,
                                                                                           MlpKernel.FUSED))
  assert 'fused_mlp_backward' in fused and 'fused_mlp' not in plain
  assert fused.count('reduce_scatter[') == fused.count('all_gather[') == 2  # of both matrices, over fsdp
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    # sums of 2,560 terms of all images, tokens and channels, each of the magnitude of the largest result
    np.testing.assert_allclose(one, other, rtol=0, atol=2_560 * 2.**-24 * max(1., np.abs(other).max()))


@pytest.mark.usefixtures('interpreted')
def test_adapters_dropout_and_rows_without_images_are_left_to_xla(caplog: pytest.LogCaptureFixture) -> None:
  caplog.set_level(logging.INFO)
  kernels.log_once.cache_clear()
  params, x, key = parameters(), jnp.zeros((2, 3, 128)), jax.random.key(0)
  adapted = {**params['params'], 'up': {**params['params']['up'], 'lora_a': jnp.ones((128, 2)),
                                        'lora_b': jnp.ones((2, 128)), 'lora_gain': jnp.ones(128)}}
  for options, leaves, given, expected in (
      ({}, params['params'], (x, None), True), ({'dropout': .1}, params['params'], (x, None), True),
      ({'dropout': .1}, params['params'], (x, key), False), ({}, adapted, (x, None), False),
      ({}, params['params'], (x[0], None), False)):
    module = Mlp(hidden=128, context=dataclasses.replace(CONTEXT, **options), kernel=MlpKernel.FUSED)
    with jax.sharding.use_abstract_mesh(mesh_of('TPU v6 lite')):
      assert module.bind({'params': leaves})._is_fused(*given) == expected
    assert ('adapters are added to its products' in caplog.text) == (leaves is adapted)
    caplog.clear()


CYCLES = {'forward': 446_452, 'backward': 998_506}
"""Of 64 images of L/16 on v6e, by bundles (libtpu 0.0.52)."""


@pytest.mark.slow  # compiles two kernels for a TPU, 40 s of CPU time
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='needs the TPU compiler')
def test_the_kernels_take_no_more_cycles_than_before() -> None:
  script = pathlib.Path(__file__).with_name('fused_mlp_cycles.py')
  environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}  # libtpu knows none for CPUs
  done = subprocess.run([sys.executable, str(script), 'v6e:1x1'], capture_output=True, text=True, check=False,
                        cwd=script.parents[2], env=environment)
  assert done.returncode == 0, done.stderr[-2000:]
  found = {name: count[0] for name, count in json.loads(done.stdout.splitlines()[-1]).items()}
  assert found.keys() == CYCLES.keys()
  assert all(.5 * CYCLES[name] < cycles < 1.05 * CYCLES[name] for name, cycles in found.items()), found
