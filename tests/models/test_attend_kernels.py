"""Kernels of attention against the plain form, and where which is taken. No kernel runs here as it does on its device.

Of cuDNN's the lowered program is looked at; `test_fused_attention.py` has the project's own.
"""
from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from vit_jax.config import schema
from vit_jax.config.schema import AttentionKernel, DType, Execution
from vit_jax.core import numerics
from vit_jax.core.types import Array
from vit_jax.models.kernels import attend
from vit_jax.models.vit import vit
from vit_jax.parallel import kernels

TINY = schema.ViT(patch=4, width=32, depth=1, heads=4, mlp=schema.Mlp(24), execution=Execution.SCAN)


@pytest.fixture(autouse=True)
def as_for_users() -> Iterator[None]:
  """The kernels add ranks up, which the suite forbids in code of ours."""
  with jax.numpy_rank_promotion('allow'):
    yield


def tensors(num_queries: int, num_keys: int, *, heads: int = 4, width: int = 8) -> tuple[Array, ...]:
  rng = np.random.default_rng(0)
  return tuple(jax.device_put(np.float32(rng.normal(size=(4, m, heads, width))))
               for m in (num_queries, num_keys, num_keys))


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
  if jax.device_count() < 8:
    pytest.skip('needs eight devices, as are simulated on a CPU')
  return jax.make_mesh(sizes, ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)


def both(form: functools.partial, *args: Array) -> tuple[Array, tuple[Array, ...]]:
  """The result, and the gradient of the sum of its sine."""
  def total(*a: Array) -> tuple[Array, Array]:
    y = form(*a)
    return jnp.sin(y.astype(jnp.float32)).sum(), y

  gradient, y = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*args)
  return y, gradient


def assert_same(found: tuple, wanted: tuple, *, num_terms: int) -> None:
  """Equal up to the rounding of f32 sums of `num_terms` products, added in another order.

  Such a sum is within `num_terms` u of the exact one, times the sum of the magnitudes of its terms (u = 2^-24). Twice
  the largest number of either side stands for that sum of magnitudes; a gradient that is zero but for cancellation has
  no scale of its own, so the scale is that of all tensors together.
  """
  scale = max(float(np.abs(np.asarray(one, np.float32)).max()) for one in jax.tree.leaves(wanted))
  for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(own, other, rtol=0, atol=2 * num_terms * 2.**-24 * scale)


@pytest.mark.parametrize('heads, is_split', [(4, True), (3, False)])
def test_each_device_computes_its_own_images_and_heads(heads: int, is_split: bool) -> None:
  mesh, args, seen = mesh_of(2, 2, 2), tensors(17, 17, heads=heads), []

  def form(*local: Array) -> Array:
    seen.append(local[0].shape)
    return attend.plain_attend(*local)

  def spread(*a: Array) -> Array:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return attend.on_each_device(form, *a)

  placed = NamedSharding(mesh, PartitionSpec(('data', 'fsdp'), None, 'tensor' if is_split else None))
  assert_same(both(spread, *jax.device_put(args, placed)), both(attend.plain_attend, *args), num_terms=17)
  assert set(seen) == {(1, 17, 2 if is_split else 3, 8)}


def learned(model: schema.ViT) -> tuple[jax.stages.Traced, Callable[[], tuple[np.ndarray, ...]]]:
  """The gradient of a small network by its parameters, data=2 x tensor=4: the program, and how to run it."""
  mesh = mesh_of(2, 1, 4)
  network = vit.build(model, (16, 16))
  image = np.random.default_rng(0).normal(size=(8, 16, 16, 3)).astype(np.float32)
  params, state = map(programs.draw, jax.eval_shape(network.init, jax.random.key(1), image))

  @jax.jit
  def gradient(params: dict) -> dict:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      def total(params: dict) -> Array:
        return jnp.sin(network.apply(params, state, image, train=True, key=None)[0].pooled).sum()
      return jax.grad(total)(params)

  params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
  return gradient.trace(params), lambda: tuple(map(np.asarray, jax.tree.leaves(gradient(params))))


@functools.cache
def learned_by_xla(dtype: DType) -> jax.stages.Traced:
  return learned(dataclasses.replace(TINY, dtype=dtype))[0]


@pytest.mark.slow(reason='1 s: lowers a network')
@pytest.mark.parametrize(('kernel', 'dtype'), [
    (AttentionKernel.FUSED, DType.F32), (AttentionKernel.CUDNN, DType.BF16)])  # cuDNN has no attention in f32
def test_on_other_devices_the_program_is_that_of_xla(kernel: AttentionKernel, dtype: DType) -> None:
  own, _ = learned(dataclasses.replace(TINY, attention=schema.Attention(kernel=kernel), dtype=dtype))
  assert own.lower().as_text() == learned_by_xla(dtype).lower().as_text()


def test_without_a_mesh_attention_is_that_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(attend, 'on_each_device', lambda *args: pytest.fail('a kernel was taken'))
  args = tensors(17, 17)
  for kernel in AttentionKernel:
    np.testing.assert_array_equal(attend.attend(*args, kernel=kernel), jax.jit(attend.xla_attend)(*args))


@pytest.mark.parametrize('num_tokens, mask', [(196, 'NO_MASK'), (17, 'PADDING')])
def test_cudnn_is_lowered_to_its_kernels_for_each_device_and_an_even_number_of_tokens(
    num_tokens: int, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
  text = lowered_for_cuda(num_tokens, monkeypatch)
  assert re.findall(r'@(__cudnn\S+?)\(', text) == ['__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward']
  even = num_tokens + num_tokens % 2
  assert f'dimensions": ["2", "2", "{even}", "{even}"]' in text.replace(r'\22', '"')
  assert f'mask_type": "{mask}"' in text.replace(r'\22', '"')


@pytest.mark.parametrize('num_tokens, is_cudnn', [(64, False), (63, False), (66, True), (128, True), (576, False)])
def test_half_a_tile_of_cudnn_is_left_to_xla(num_tokens: int, is_cudnn: bool, monkeypatch: pytest.MonkeyPatch,
                                             caplog: pytest.LogCaptureFixture) -> None:
  kernels.log_once.cache_clear()
  with caplog.at_level('INFO'):
    assert ('__cudnn$' in lowered_for_cuda(num_tokens, monkeypatch)) == is_cudnn
  assert (f"cuDNN's gradient for {num_tokens} tokens" in caplog.text) != is_cudnn


def lowered_for_cuda(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> str:
  """Returns the program of a gradient, lowered with a stand-in for cuDNN, whose version is asked for."""
  monkeypatch.setattr('jax._src.cudnn.fused_attention_stablehlo.cuda_versions',
                      SimpleNamespace(cudnn_get_version=lambda: 91_000))
  monkeypatch.setattr(numerics, 'mesh_platform', lambda: 'gpu')
  mesh = mesh_of(2, 2, 2)

  def gradient(*args: Array) -> tuple[Array, ...]:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return jax.grad(lambda *a: attend.attend(*a, kernel=AttentionKernel.CUDNN).astype(jnp.float32).sum(),
                      argnums=(0, 1, 2))(*args)

  placed = NamedSharding(mesh, PartitionSpec(('data', 'fsdp'), None, 'tensor'))
  one = jax.ShapeDtypeStruct((8, num_tokens, 4, 64), jnp.bfloat16, sharding=placed)
  return jax.jit(gradient).trace(one, one, one).lower(lowering_platforms=('cuda',)).as_text()
