"""What must hold on an NVIDIA GPU: kernels, a network, steps and weights of others there. Skipped elsewhere.

`bash benchmarks/gpu_check.sh` runs them, with f32 products in f32; with `--rehearse` on a CPU, but for cuDNN.
"""
from __future__ import annotations

import dataclasses
import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights import test_golden as golden
from vit_jax.config import schema
from vit_jax.config.schema import AttentionKernel, DType, Remat
from vit_jax.core.types import Array
from vit_jax.jobs import build
from vit_jax.models.kernels import attend, forms
from vit_jax.parallel import mesh as meshes

NO_GPU = 'jax.default_backend() != "gpu"'  # evaluated when a test is about to run
pytestmark = [pytest.mark.skipif('False' if os.environ.get('VIT_JAX_REHEARSE') else NO_GPU,
                                 reason='needs an NVIDIA GPU: benchmarks/gpu_check.sh')]
CUDNN = pytest.mark.skipif(NO_GPU, reason='cuDNN needs an NVIDIA GPU')

NEAR = 2e-2  # relative, of bf16
STEPS = 3


def distance(found: Array, wanted: Array) -> float:
  """Norm of the difference, over that of what is wanted."""
  found, wanted = (x.astype(jnp.float32) for x in (found, wanted))
  return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


@CUDNN
@pytest.mark.parametrize('num_tokens, width', [(196, 64), (197, 64), (50, 80), (257, 128)])
def test_cudnn_is_as_near_to_f32_as_bf16_is(num_tokens: int, width: int) -> None:
  args = [jax.random.normal(jax.random.key(i), (4, num_tokens, 3, width)).astype(jnp.bfloat16) for i in range(3)]

  def both(form: object, *args: Array) -> list[Array]:
    def total(*a: Array) -> tuple[Array, Array]:
      y = form(*a)  # type: ignore[operator]
      return jnp.sin(y.astype(jnp.float32)).sum(), y
    gradient, y = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*args)
    return [y, *gradient]

  exact = both(attend.plain_attend, *(x.astype(jnp.float32) for x in args))
  for form in (attend.cudnn, attend.xla_attend):
    found = [distance(a, b) for a, b in zip(both(form, *args), exact, strict=True)]
    assert max(found) < NEAR, (form.__name__, found)


@CUDNN
@pytest.mark.parametrize('filling', [0., 1., float('nan')])
def test_a_token_that_fills_the_keys_up_has_no_effect_and_gradients_of_zero(filling: float) -> None:
  query, key, value = (jax.random.normal(jax.random.key(i), (4, 198, 3, 64)).astype(jnp.bfloat16) for i in range(3))
  args = query, key.at[:, 197].mul(filling), value.at[:, 197].mul(filling)

  def total(form: object, *args: Array) -> Array:
    return jnp.sin(form(*args)[:, :197].astype(jnp.float32)).sum()  # type: ignore[operator]

  gradient = jax.jit(jax.grad(functools.partial(total, functools.partial(attend.cudnn, num_keys=197)),
                              argnums=(0, 1, 2)))(*args)
  cut = jax.jit(jax.grad(functools.partial(total, attend.cudnn), argnums=(0, 1, 2)))(
      *(x[:, :197] for x in args))
  assert all(bool((one[:, 197] == 0).all()) for one in gradient)
  assert max(distance(a[:, :197], b) for a, b in zip(gradient, cut, strict=True)) < NEAR


@CUDNN
@pytest.mark.parametrize('num_tokens', [64, 66, 192])
def test_gradients_are_finite_where_all_logits_are_far_below_0(num_tokens: int) -> None:
  query, key, value = (jax.random.normal(jax.random.key(i), (2, num_tokens, 3, 64)) for i in range(3))
  query, key = .1 * query.at[..., 0].set(10.), (.1 * key).at[..., 0].set(-120. * 8)  # each logit is near -120

  mesh = meshes.make(schema.Mesh(1, 1, 1), jax.devices()[:1])

  def total(*args: Array) -> Array:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return jnp.sin(attend.attend(*args, kernel=AttentionKernel.CUDNN).astype(jnp.float32)).sum()

  found = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*(x.astype(jnp.bfloat16) for x in (query, key, value)))
  assert all(bool(jnp.isfinite(x).all()) for x in found)


def losses(attention: AttentionKernel, dtype: DType, remat: Remat = Remat.NONE, *, steps: int = STEPS,
           platform: str | None = None) -> list[float]:
  """Of some steps of a small ViT on the same random images, 17 tokens, on one device."""
  model = schema.ViT(patch=8, width=64, depth=3, heads=2, mlp=schema.Mlp(96), dtype=dtype,
                     attention=schema.Attention(kernel=attention), remat=remat)
  config = schema.Config(batch_size=24, image_px=(32, 32), length='10 steps', model=model,
                         optimizer=schema.AdamW(lr=1e-3, schedule=schema.Schedule(warmup='0 steps')))
  mesh = meshes.make(schema.Mesh(1, 1, 1), jax.devices(platform)[:1])
  program = build.parts(config, mesh=mesh, num_examples=240, num_classes=7, in_memory=False).program
  rng = np.random.default_rng(0)
  batch = jax.tree.map(lambda x: (rng.integers(0, 7, x.shape) if len(x.shape) == 1 else rng.integers(0, 256, x.shape)
                                  ).astype(x.dtype) * (x.dtype != bool), build.abstract_batch(config))
  batch = jax.device_put(batch, meshes.batch_sharding(mesh))
  state, found = program.init_fn(), []
  for _ in range(steps):
    state, metrics = program.step_fn(state, batch)
    found.append(float(metrics.unpack().means['loss'].value))
  return found


def test_twenty_steps_are_those_of_the_cpu() -> None:
  """The first loss up to f32 sums of at most 408 x 192 products in another order: sqrt(8e4) x 2^-24 = 2e-5.

  Adam moves an entry whose gradient is only rounding by up to the learning rate, 1e-3, in either direction.
  """
  found, wanted = (losses(AttentionKernel.XLA, DType.F32, steps=20, platform=name) for name in (None, 'cpu'))
  assert wanted[-1] < wanted[0]
  np.testing.assert_allclose(found[0], wanted[0], rtol=2e-5)
  np.testing.assert_allclose(found, wanted, rtol=1e-3)


@CUDNN
def test_training_with_cudnn_is_training_without() -> None:
  wanted = losses(AttentionKernel.XLA, DType.F32)
  assert wanted[-1] < wanted[0]
  for attention in (AttentionKernel.XLA, AttentionKernel.CUDNN):
    np.testing.assert_allclose(losses(attention, DType.BF16), wanted, rtol=NEAR, err_msg=attention.value)
  np.testing.assert_allclose(losses(AttentionKernel.CUDNN, DType.BF16, Remat.NAMES), wanted, rtol=NEAR)


@pytest.mark.parametrize('name', ['timm_vit', 'hf_vit', 'npz_vit'])
def test_weights_of_others_give_their_logits_in_bf16(name: str, tmp_path: pathlib.Path) -> None:
  """In f32 they are those of `tests/weights/test_golden.py`, which is run there too."""
  found = golden.load(name, tmp_path)
  half = found._replace(model=dataclasses.replace(found.model, dtype=DType.BF16))
  wanted = jnp.asarray(golden.GOLDEN[f'{name}/logits'])
  assert distance(jnp.asarray(golden.compute(half)['logits']), wanted) < NEAR


@CUDNN
def test_this_gpu_runs_the_kernel() -> None:
  model = schema.ViT(dtype=DType.BF16, attention=schema.Attention(kernel=AttentionKernel.CUDNN))
  forms.check_devices(model, meshes.make(schema.Mesh(1, 1, 1), jax.devices()[:1]), name='model')
