"""Blocks on joined rows, as on GPUs: the same network as on rows of images, with tokens that fill sequences up."""
from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import check, schema
from vit_jax.core import numerics
from vit_jax.core.types import Array
from vit_jax.models import backbones
from vit_jax.models.kernels import attend

PX = (16, 16)
BASE = schema.ViT(patch=4, width=16, depth=2, heads=2, mlp=schema.Mlp(24), drop_path=.3,
                  attention=schema.Attention(kernel=schema.AttentionKernel.CUDNN))
IMAGES = np.random.default_rng(0).normal(size=(3, *PX, 3)).astype(np.float32)


def by_lengths(query: Array, key: Array, value: Array, *, num_keys: int = 0) -> Array:
  """As cuDNN: the first so many keys count."""
  lengths = jnp.full(query.shape[0], num_keys or key.shape[1], jnp.int32)
  return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths, implementation='xla')


def loss_and_gradient(model: schema.ViT) -> tuple[Array, dict]:
  network = backbones.build(model, PX)
  params, state = network.init(jax.random.key(0), IMAGES[:1])

  def loss(params: dict) -> Array:
    features, _ = network.apply(params, state, IMAGES, train=True, key=jax.random.key(1))
    return jnp.sin(features.pooled).sum() + jnp.cos(features.tokens).sum()

  return jax.value_and_grad(loss)(params)


@pytest.fixture(autouse=True)
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
  """The settings of cuDNN are accepted with float32, in which the comparison is exact."""
  monkeypatch.setattr(check, 'check_model', lambda model, image_px: None)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[int, ...]]]:
  """Makes networks believe that they run on a GPU; returns the shapes that attention gets."""
  shapes = []

  def on_each_device(form: Callable[..., Array], *args: Array) -> Array:
    shapes.append(args[1].shape)
    return form(*args)

  def begin() -> list[tuple[int, ...]]:
    monkeypatch.setattr(numerics, 'mesh_platform', lambda: 'gpu')
    monkeypatch.setattr(attend, 'cudnn', by_lengths)
    monkeypatch.setattr(attend, 'on_each_device', on_each_device)
    return shapes

  return begin


@pytest.mark.parametrize(('changes', 'num_tokens'), [
    ({}, 18), ({'pool': schema.Mean()}, 16), ({'execution': schema.Execution.SCAN}, 18),
    ({'mlp': schema.SwiGlu(24), 'remat': schema.Remat.NAMES}, 18)], ids=['token', 'mean', 'scan', 'swiglu'])
def test_joined_rows_are_the_same_network(
    changes: dict, num_tokens: int, on_gpu: Callable[[], list[tuple[int, ...]]]) -> None:
  model = schema.replaced(BASE, changes)
  expected = loss_and_gradient(model)
  shapes = on_gpu()
  found = loss_and_gradient(model)
  of_images = {shape[1] for shape in shapes if shape[0] == len(IMAGES)}
  assert of_images == {num_tokens}  # 17 tokens are filled up to 18, before the first block
  chex.assert_trees_all_close(found, expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize('changes', [
    {'dropout': .1}, {'positions': schema.Rotary()}, {'block': schema.Parallel()}], ids=['dropout', 'rotary', 'block'])
def test_other_networks_keep_their_rows(changes: dict, on_gpu: Callable[[], list[tuple[int, ...]]],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
  on_gpu()
  network = backbones.build(schema.replaced(BASE, changes), PX)
  joins_rows, found = type(network)._joins_rows, []

  def noted(*args: object) -> bool:
    found.append(joins_rows(*args))
    return found[-1]

  monkeypatch.setattr(type(network), '_joins_rows', noted)
  jax.eval_shape(lambda key: network.apply(network.init(key, IMAGES[:1])[0], {}, IMAGES, train=True, key=key),
                 jax.random.key(0))
  assert found == [False]
