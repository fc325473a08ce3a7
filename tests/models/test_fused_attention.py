"""The fused attention kernel against the plain form, as Pallas' interpreter runs it; where it applies; its cycles."""
from __future__ import annotations

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
from vit_jax.config.schema import AttentionKernel, QkvBias
from vit_jax.core import numerics
from vit_jax.core.types import Array
from vit_jax.models.kernels import attend, forms, fused_attention
from vit_jax.models.vit.attention import Attention
from vit_jax.models.vit.context import Context
from vit_jax.parallel import kernels

AXES = ('data', 'fsdp', 'tensor')
INTERPRETED = functools.partial(fused_attention.attend, interpret=True)


def assert_equals_the_plain_form(tokens: int, heads: int, channels: int, dtype: type = jnp.float32) -> None:
  """Result and gradients of two images, with biases, within the rounding of their sums.

  A sum of n products is within n u of the exact one, times the magnitude of its terms. Gradients have two products over
  tokens and two over channels after each other, and weights and logits are rounded to the compute dtype, u = 2^-24 or
  2^-9, once each. The scale is the largest number of all results.
  """
  width, keys = heads * channels, jax.random.split(jax.random.key(0), 5)
  arrays = [jax.random.normal(key, (2, tokens, width)).astype(dtype) for key in keys[:4]]
  biases = (.3 * jax.random.normal(keys[4], (3, width))).astype(dtype)

  def plain(query: Array, key: Array, value: Array, biases: Array) -> Array:
    inputs = zip((query, key, value), biases, strict=True)
    split = [(x + bias[None, None]).reshape(2, tokens, heads, channels) for x, bias in inputs]
    return attend.plain_attend(*split).reshape(2, tokens, width)

  def all_of(form: object, *args: Array) -> tuple[Array, ...]:
    y, pull = jax.vjp(form, *args[:-1])  # type: ignore[arg-type]
    return (y, *pull(args[-1]))

  wide = [x.astype(jnp.float32) for x in (*arrays[:3], biases, arrays[3])]
  wanted = jax.jit(functools.partial(all_of, plain))(*wide)
  found = jax.jit(functools.partial(all_of, lambda *args: INTERPRETED(*args, heads)))(*arrays[:3], biases, arrays[3])
  rounding = 2 * (tokens + channels) * 2.**-24 + (8 * 2.**-9 if dtype == jnp.bfloat16 else 0.)
  for one, other in zip(found, wanted, strict=True):
    scale = float(jnp.abs(other).max())
    np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=0, atol=4 * rounding * max(scale, 1.))


@pytest.mark.quick('19-3-64', reason='1 s: kernels are interpreted')
@pytest.mark.parametrize(('tokens', 'heads', 'channels'), [(19, 3, 64), (16, 2, 80)])
def test_result_and_gradients_are_those_of_the_plain_form(tokens: int, heads: int, channels: int) -> None:
  """Two heads in one tile with padding tokens, and one that fills no tile; heads of which one lies in two tiles."""
  assert_equals_the_plain_form(tokens, heads, channels)


@pytest.mark.slow  # 22 kernels are interpreted, about 5 s of CPU time each
@pytest.mark.parametrize('tokens', [196, 197, 256, 257, 576])
@pytest.mark.parametrize(('heads', 'channels'), [(3, 64), (3, 80), (3, 88), (1, 128)])
def test_any_number_of_tokens_and_size_of_heads_is_right(tokens: int, heads: int, channels: int) -> None:
  assert_equals_the_plain_form(tokens, heads, channels)


@pytest.mark.slow  # see above
@pytest.mark.parametrize('tokens', [196, 257])
def test_products_in_bfloat16_are_as_near_as_their_rounding(tokens: int) -> None:
  assert_equals_the_plain_form(tokens, 2, 64, jnp.bfloat16)


def test_a_head_reads_the_tiles_that_it_lies_in() -> None:
  assert [fused_attention.Shape(196, 4, 64).window(i) for i in range(4)] == [(0, 128), (0, 128), (128, 256), (128, 256)]
  assert [fused_attention.Shape(196, 3, 80).window(i) for i in range(3)] == [(0, 128), (0, 240), (128, 240)]
  assert [fused_attention.Shape(tokens, 1, 64).rows for tokens in (196, 197, 256, 257)] == [208, 208, 256, 272]


def mesh_of(kind: str, platform: str = 'tpu', *, tensor: int = 1) -> AbstractMesh:
  return AbstractMesh((1, 1, tensor), AXES, abstract_device=AbstractDevice(kind, None, platform))


@pytest.mark.parametrize(('kind', 'shape', 'tensor', 'said'), [
    ('TPU v4', (196, 16, 64), 1, ''), ('TPU v5 lite', (576, 16, 64), 1, ''), ('TPU v6 lite', (257, 16, 88), 1, ''),
    ('TPU v6 lite', (197, 16, 80), 2, ''),
    ('TPU v3', (196, 16, 64), 1, 'the fused kernel runs only on TPU v4 and later, not on TPU v3'),
    ('TPU v4', (196, 16, 32), 1, 'the heads have 32 channels, and the fused kernel takes 64, 72, … 128'),
    ('TPU v4', (196, 12, 64), 4, '3 heads of 64 channels on a device do not fill tiles of 128'),
    ('TPU v4', (576, 16, 64), 1, '576 tokens need 26 MiB on the chip, more than TPU v4 has')])
def test_where_the_kernel_does_not_apply_there_is_a_reason(
    kind: str, shape: tuple[int, int, int], tensor: int, said: str) -> None:
  assert attend.fused_problem(mesh_of(kind, tensor=tensor), fused_attention.Shape(*shape), 2) == said


def test_images_with_too_many_tokens_are_left_to_xla_with_one_message(caplog: pytest.LogCaptureFixture) -> None:
  """When they are traced, as only then the number of tokens is known; other reasons are logged at the start."""
  caplog.set_level(logging.INFO)
  kernels.log_once.cache_clear()
  for kind, tokens, said in (('TPU v4', 196, 0), ('TPU v3', 576, 0), ('TPU v4', 576, 1), ('TPU v4', 576, 1)):
    with jax.sharding.use_abstract_mesh(mesh_of(kind)):
      is_fused = attend.is_fused(AttentionKernel.FUSED, fused_attention.Shape(tokens, 16, 64), jnp.bfloat16)
    assert is_fused == (kind == 'TPU v4' and tokens == 196)
    assert caplog.text.count('attention.kernel=fused does not apply, and XLA computes attention, as with kernel=xla: '
                             '576 tokens need 26 MiB on the chip, more than TPU v4 has.') == said


def test_as_many_heads_are_computed_together_as_fit_on_the_chip() -> None:
  large, small = fused_attention.LARGE_VMEM, fused_attention.SMALL_VMEM
  assert [fused_attention.Shape(196, 16, 64).group(2, vmem) for vmem in (large, small)] == [8, 8]
  assert [fused_attention.Shape(257, 16, 80).group(2, vmem) for vmem in (large, small)] == [8, 1]
  assert fused_attention.Shape(576, 16, 64).group(2, large) == 8


CONTEXT = Context(norm=schema.LayerNorm(), gelu=schema.Gelu.TANH, dtype=jnp.float32)
FUSED = schema.Attention(kernel=AttentionKernel.FUSED)
VIT = schema.ViT(width=1024, heads=16, attention=FUSED)


@pytest.mark.parametrize(('model', 'mesh', 'said'), [
    (VIT, mesh_of('TPU v6 lite'), ''), (VIT, mesh_of('TPU v3'), 'the fused kernel runs only on TPU v4 and later'),
    (VIT, mesh_of('cpu', 'cpu'), 'attention.kernel=fused is for TPUs; on cpu XLA computes attention'),
    (schema.replaced(VIT, {'attention.dropout': .1}), mesh_of('TPU v4'),
     'does not apply, and XLA computes attention, as with kernel=xla: only XLA has dropout of attention weights'),
    (schema.replaced(VIT, {'positions': schema.Relative()}), mesh_of('TPU v4'), 'only XLA has relative positions')])
def test_a_run_without_the_kernel_says_so(
    model: schema.ViT, mesh: AbstractMesh, said: str, caplog: pytest.LogCaptureFixture) -> None:
  caplog.set_level(logging.INFO)
  forms.check_devices(model, mesh, name='model')
  assert (said in caplog.text) if said else not caplog.text
  assert not list(model.attention.network_problems(model, 'model', 'model.attention'))


@pytest.mark.slow(reason='2 s: kernels are interpreted, as above')
@pytest.mark.parametrize('options', [{}, {'qkv_bias': QkvBias.NONE, 'qk_norm': True}])
def test_the_module_has_the_same_parameters_result_and_gradients(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
  """Images over four devices and heads over two; with norms the kernel gets queries that are no projections."""
  if jax.device_count() < 8:
    pytest.skip('needs eight devices, as are simulated on a CPU')
  mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
  x = jax.random.normal(jax.random.key(0), (4, 5, 32))
  found = []
  for kernel in (AttentionKernel.XLA, AttentionKernel.FUSED):
    module = Attention(heads=2, kernel=kernel, laws=CONTEXT.laws.attention, context=CONTEXT, **options)

    def run(params: dict, x: Array, module: Attention = module) -> Array:
      return jnp.sin(module.apply(params, x, x, num_sequences=4, dropout_key=None, capture=False)[0]).sum()

    params = jax.jit(lambda module=module: module.init(
        jax.random.key(1), x, x, num_sequences=4, dropout_key=None, capture=False))()
    everywhere = NamedSharding(mesh, PartitionSpec())
    args = jax.device_put((jax.tree.map(lambda p: p + .1, params), x), everywhere)  # biases are not zero
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      traced = jax.jit(jax.value_and_grad(run, argnums=(0, 1))).trace(*args)
      assert ('fused_attention_backward' in str(traced.jaxpr)) == (kernel is AttentionKernel.FUSED)
      found.append(jax.tree.map(np.asarray, traced.lower().compile()(*args)))
    monkeypatch.setattr(numerics, 'mesh_platform', lambda: '' if jax.sharding.get_abstract_mesh().empty else 'tpu')
    monkeypatch.setattr(attend, 'fused_problem', lambda *args: '')
    monkeypatch.setattr(fused_attention, 'attend', INTERPRETED)
  assert jax.tree.structure(found[0]) == jax.tree.structure(found[1])
  for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[0]), strict=True):
    # sums of 640 terms of all images, tokens and channels, each of the magnitude of the largest result
    np.testing.assert_allclose(one, other, rtol=0, atol=640 * 2.**-24 * max(1., np.abs(other).max()))


CYCLES = {'forward': 203_723, 'backward': 331_034}
"""Of 64 images of L/16 on v6e, by bundles (libtpu 0.0.52)."""


@pytest.mark.slow  # compiles two kernels for a TPU, 30 s of CPU time
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='needs the TPU compiler')
def test_the_kernels_take_no_more_cycles_than_before() -> None:
  script = pathlib.Path(__file__).with_name('fused_cycles.py')
  root = script.parents[2]
  environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}  # libtpu knows none for CPUs
  done = subprocess.run([sys.executable, str(script), 'v6e:1x1'], capture_output=True, text=True, check=False, cwd=root,
                        env=environment)
  assert done.returncode == 0, done.stderr[-2000:]
  found = {name: count[0] for name, count in json.loads(done.stdout.splitlines()[-1]).items()}
  assert found.keys() == CYCLES.keys()
  assert all(.5 * CYCLES[name] < cycles < 1.05 * CYCLES[name] for name, cycles in found.items()), found
