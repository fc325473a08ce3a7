"""LoRA and DoRA: the merged network is the unmerged one, at every layer and for every kind of network."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vits

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.types import Array, Key, Params
from vit_jax.models import adapters, backbones

PLAIN = schema.ViT(**vits.PLAIN)
MIXER = schema.Mixer(patch=8, width=32, depth=2, tokens_mlp=16, channels_mlp=48)
ROUNDING = 4 * 2 ** -23
"""Relative to the largest entry: two orders of about 200 f32 terms, whose errors add like sqrt(200) eps / 2."""


def begun(frozen: Params, lora: schema.Lora) -> dict[str, jax.Array]:
  return jax.jit(lambda key, frozen: adapters.init(key, frozen, lora))(jax.random.key(0), frozen)


def drawn(model: schema.Model, lora: schema.Lora) -> tuple[dict[str, Any], dict[str, Any]]:
  """Adapters with nothing zero, and the frozen backbone."""
  shapes, _ = jax.eval_shape(backbones.build(model, vits.PX).init, jax.random.key(0), vits.some_image())
  frozen = {'backbone': vits.drawn(shapes, deviation=.2)}
  new = begun(frozen['backbone'], lora)
  rng = np.random.default_rng(1)
  new = {name: jax.device_put(np.float32(np.asarray(x) + .1 * rng.normal(size=x.shape))) for name, x in new.items()}
  return trees.unflatten(new), frozen


def plain(params: Params, frozen: Params, lora: schema.Lora, key: Key | None) -> Params:
  del params, lora, key
  return frozen


def merged(params: Params, frozen: Params, lora: schema.Lora, key: Key | None) -> Params:
  del key
  return adapters.merge(params, frozen, lora)


def unmerged(params: Params, frozen: Params, lora: schema.Lora, key: Key | None) -> Params:
  return adapters.network(params, frozen, lora, key=key)


_PROGRAMS: dict[str, Callable[..., jax.Array]] = {}


def outputs(how: Callable[..., Params], model: schema.Model, lora: schema.Lora, params: Params, frozen: Params,
            key: Key | None = None) -> jax.Array:
  if (text := f'{how.__name__} {model!r} {lora!r}') not in _PROGRAMS:
    backbone = backbones.build(model, vits.PX)
    _PROGRAMS[text] = jax.jit(lambda params, frozen, key, image: backbone.apply(
        how(params, frozen, lora, key)['backbone'], {}, image, train=False, key=None)[0].tokens)
  return _PROGRAMS[text](params, frozen, key, vits.some_image())


_SLOW = pytest.mark.slow(reason='3 s each: the plain network with DoRA and the Mixer without are by default')


@pytest.mark.parametrize(('model', 'dora'), [
    pytest.param(PLAIN, True, id='plain dora'), pytest.param(MIXER, False, id='mixer'),
    pytest.param(PLAIN, False, id='plain', marks=_SLOW), pytest.param(MIXER, True, id='mixer dora', marks=_SLOW),
    *(pytest.param(vits.MODELS[name], dora, id=f'{name}{" dora" if dora else ""}', marks=_SLOW)
      for name in ('gated', 'axial') for dora in (False, True))])
def test_the_merged_network_is_the_unmerged_one(model: schema.Model, dora: bool) -> None:
  lora = schema.Lora(rank=3, alpha=5., dora=dora)
  params, frozen = drawn(model, lora)
  layers = adapters.kernels(trees.flatten(frozen), lora)
  assert {layer.removeprefix(adapters.BLOCKS) for layer in layers} == set(schema.adapted_layers(model))
  apart, joined, without = (np.asarray(outputs(how, model, lora, params, frozen)) for how in (unmerged, merged, plain))
  scale = np.abs(joined).max()
  assert np.abs(joined - without).max() > 1000 * ROUNDING * scale
  assert np.abs(joined - apart).max() / scale < ROUNDING


def test_new_adapters_leave_the_network_as_it_is() -> None:
  lora = schema.Lora(rank=3, dora=True)
  _, frozen = drawn(PLAIN, lora)
  new = trees.unflatten(begun(frozen['backbone'], lora))
  adapted, without = (np.asarray(outputs(how, PLAIN, lora, new, frozen)) for how in (unmerged, plain))
  np.testing.assert_allclose(adapted, without, atol=ROUNDING * np.abs(without).max())


def test_a_begins_uniform_within_the_bound_of_pytorch_and_b_at_zero() -> None:
  lora = schema.Lora(rank=8, targets='attn/out,mlp/down')
  _, frozen = drawn(PLAIN, lora)
  new = begun(frozen['backbone'], lora)
  out, down = (new[f'backbone/blocks/{name}/lora_a'] for name in ('attn/out', 'mlp/down'))
  assert out.shape == (2, 4, 8, 8) and down.shape == (2, 48, 8)
  assert .95 * 32 ** -.5 < float(jnp.abs(out).max()) <= 32 ** -.5
  assert .95 * 48 ** -.5 < float(jnp.abs(down).max()) <= 48 ** -.5
  assert not any(bool(x.any()) for name, x in new.items() if name.endswith('lora_b')) and len(new) == 4


@pytest.mark.parametrize(('lora', 'scale'), [
    (schema.Lora(rank=4), 1.), (schema.Lora(rank=4, alpha=8.), 2.), (schema.Lora(rank=4, alpha=8., rslora=True), 4.)])
def test_the_scale_is_alpha_over_the_rank_or_its_root(lora: schema.Lora, scale: float) -> None:
  assert lora.scale == scale
  rng = np.random.default_rng(0)
  w, a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 6, 5), (2, 6, 4), (2, 4, 5)))
  got = adapters.merged(w, a, b, None, scale=lora.scale)
  np.testing.assert_allclose(got, w + scale * np.einsum('lir,lro->lio', a, b), rtol=1e-5, atol=1e-5)
  assert isinstance(got, np.ndarray)


def test_doras_outputs_have_the_norm_of_the_magnitude() -> None:
  rng = np.random.default_rng(0)
  w, a, b, m = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 6, 5), (2, 6, 4), (2, 4, 5), (2, 5)))
  got = adapters.merged(w, a, b, np.abs(m), scale=2.)
  np.testing.assert_allclose(np.linalg.norm(got, axis=1), np.abs(m), rtol=1e-5)


def test_no_gradient_flows_through_doras_norm() -> None:
  rng = np.random.default_rng(0)
  w, a, b, m = (jax.device_put(np.float32(rng.normal(size=s))) for s in ((1, 6, 5), (1, 6, 4), (1, 4, 5), (1, 5)))
  lora = schema.Lora(rank=4, dora=True)
  path = 'backbone/blocks/mlp/up/'

  def total(a: jax.Array, weight: jax.Array) -> jax.Array:
    params = trees.unflatten({f'{path}lora_a': a, f'{path}lora_b': b, f'{path}lora_magnitude': m})
    leaves = trees.flatten(adapters.network(params, trees.unflatten({f'{path}kernel': w}), lora, key=None))
    changed = w + leaves[f'{path}lora_a'] @ leaves[f'{path}lora_b']
    return (changed * leaves[f'{path}lora_gain'][:, None] * weight).sum()

  weight = jax.device_put(np.float32(rng.normal(size=w.shape)))
  gain = m / jnp.linalg.norm(w + a @ b, axis=1)
  want = (weight * gain[:, None]) @ b.swapaxes(1, 2)
  np.testing.assert_allclose(jax.jit(jax.grad(total))(a, weight), want, rtol=1e-4, atol=1e-5)


def test_dropout_acts_on_the_adapters_alone_and_depends_on_the_key() -> None:
  lora = schema.Lora(rank=3, dropout=.5)
  params, frozen = drawn(PLAIN, lora)
  first, again, other, without = (np.asarray(outputs(unmerged, PLAIN, lora, params, frozen, key))
                                  for key in (*map(jax.random.key, (0, 0, 1)), None))
  assert (first == again).all() and not (first == other).all() and not (first == without).all()
  zero = jax.tree.map(np.zeros_like, params)
  np.testing.assert_array_equal(*(outputs(unmerged, PLAIN, lora, zero, frozen, key)
                                  for key in (jax.random.key(0), None)))


@pytest.mark.parametrize('dora', [False, True])
def test_dropout_is_that_of_the_formula(dora: bool) -> None:
  rng = np.random.default_rng(0)
  x, w, a, b, bias, gain = (jax.device_put(np.float32(rng.normal(size=s)))
                            for s in ((7, 6), (6, 5), (6, 3), (3, 5), (5,), (5,)))
  key = jax.random.key(3)
  adapter = {'lora_a': a, 'lora_b': b, 'lora_key': jax.random.key_data(key), 'lora_rate': jnp.float32(.25)}
  adapter |= {'lora_gain': gain} if dora else {}

  def dense(x: Array, w: Array, b: Array) -> Array:
    return x @ w + b[None]

  got = adapters.product(dense, x, w, bias, adapter, dense)
  kept = jnp.where(jax.random.bernoulli(key, .75, x.shape), x / .75, 0.)
  want = x @ w + bias[None] + (((gain - 1.)[None] * (kept @ w) + gain[None] * (kept @ a @ b)) if dora
                               else kept @ a @ b)  # PEFT: DoraLinearLayer.forward without a base result
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(reason='6 s: three programs; steps with stacked layers are in objectives/test_adapters.py')
def test_adapters_run_in_the_compute_dtype_and_under_scan_and_remat() -> None:
  lora = schema.Lora(rank=3, dora=True, dropout=.2)
  params, frozen = drawn(PLAIN, lora)
  given = lora, params, frozen, jax.random.key(0)
  want = np.asarray(outputs(unmerged, PLAIN, *given))
  unrolled = dataclasses.replace(PLAIN, execution=schema.Execution.UNROLLED, remat=schema.Remat.NAMES)
  np.testing.assert_allclose(outputs(unmerged, unrolled, *given), want, atol=ROUNDING * np.abs(want).max())
  half = outputs(unmerged, dataclasses.replace(PLAIN, dtype=schema.DType.BF16), *given)
  assert 0 < np.abs(half - want).max() < .1 * np.abs(want).max()
