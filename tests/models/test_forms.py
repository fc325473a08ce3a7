"""Tests of `model.kernels`: the plain forms permit forward-mode and second-order differentiation of every network."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
import vits

from vit_jax.config import schema
from vit_jax.config.schema import Kernels
from vit_jax.core.types import Array, Params
from vit_jax.models import backbones
from vit_jax.models.heads import Head

CLASSES = 3
SLOW = pytest.mark.slow(reason='compiles three programs of a network of convolutions: about a minute')
MODELS = [
    pytest.param(schema.ViT(patch=8, width=16, depth=1, heads=2, mlp=schema.Mlp(24),
                            attention=schema.Attention(qk_norm=True)), id='vit'),
    pytest.param(schema.ViT(patch=8, width=16, depth=1, heads=2, mlp=schema.Mlp(24), pool=schema.Map()),
                 id='map', marks=SLOW),
    pytest.param(dataclasses.replace(networks.MIXER, patch=8, depth=1), id='mixer'),
    pytest.param(schema.ResNet(layers=(1,), width=32), id='resnet', marks=SLOW),
    pytest.param(schema.EfficientNet(width_factor=.25, depth_factor=.1, dropout=0., drop_path=0.), id='efficientnet',
                 marks=SLOW),
    pytest.param(schema.ViT(patch=16, width=32, depth=1, heads=4, mlp=schema.Mlp(48), stem=schema.ResNetStem((1,), 32)),
                 id='hybrid', marks=SLOW)]


def loss_of(model: Any, kernels: Kernels) -> tuple[Callable[[Params], Array], Params]:
  """A loss through a backbone and its head, and random parameters of both."""
  model = dataclasses.replace(model, kernels=kernels)
  px = (2 * getattr(model, 'patch', 8),) * 2
  backbone, head = backbones.build(model, px), Head(schema.Head(pre_logits=5), kernels)
  image = jax.random.uniform(jax.random.key(0), (2, *px, 3), minval=-1., maxval=1.)
  shapes, states = jax.eval_shape(backbone.init, jax.random.key(0), image)
  width = jax.eval_shape(lambda p, s: backbone.apply(p, s, image, train=False, key=None)[0].pooled, shapes,
                         states).shape[-1]
  of_head = jax.eval_shape(lambda: head.init(jax.random.key(0), width, CLASSES))
  params = vits.drawn({'backbone': shapes, 'head': of_head}, deviation=.2)
  state = jax.tree.map(lambda x: jnp.ones(x.shape), states)

  def loss(params: Params) -> Array:
    features, _ = backbone.apply(params['backbone'], state, image, train=False, key=None)
    return jnp.sin(head.apply(params['head'], features.pooled)).sum()

  return loss, params


def dot(a: Params, b: Params) -> float:
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return sum(float(np.vdot(np.asarray(x, np.float64), np.asarray(y, np.float64))) for x, y in pairs)


@pytest.mark.slow(
    reason='4 s to a minute: three programs of a network; tests/models/test_fast_forms.py has each kernel')
@pytest.mark.parametrize('model', MODELS)
def test_plain_kernels_equal_the_fast_ones_and_permit_every_kind_of_differentiation(model: schema.Model) -> None:
  fast, params = loss_of(model, Kernels.FAST)
  plain, _ = loss_of(model, Kernels.PLAIN)
  tangent = vits.drawn(params, deviation=.1)
  ahead = jax.jit(jax.value_and_grad(fast))
  value, gradient = ahead(params)

  @jax.jit
  def everything(params: Params, tangent: Params) -> tuple[Any, ...]:
    (value, slope), (gradient, product) = (jax.jvp(f, (params,), (tangent,)) for f in (plain, jax.grad(plain)))
    linear, pushed = jax.linearize(plain, params)
    return value, gradient, slope, product, linear, pushed(tangent)

  own, own_gradient, slope, product, linear, pushed = everything(params, tangent)
  # Sums of a few hundred products in f32, in another order; gradients are compared by the size of each array.
  np.testing.assert_allclose([own, linear], value, rtol=1e-4, atol=1e-5)
  for a, b in zip(jax.tree.leaves(own_gradient), jax.tree.leaves(gradient), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(1., float(jnp.abs(b).max())))
  np.testing.assert_allclose([slope, pushed], dot(gradient, tangent), rtol=1e-3, atol=1e-3)
  step = 1e-2
  moved = [ahead(jax.tree.map(lambda p, t, s=s: p + s * step * t, params, tangent))[1] for s in (1., -1.)]
  difference = (dot(moved[0], tangent) - dot(moved[1], tangent)) / (2 * step)
  # central differences err by step^2 times the third derivative, and by the rounding of the gradients over the step
  assert dot(product, tangent) == pytest.approx(difference, rel=5e-2, abs=5e-2 * abs(dot(gradient, tangent)))


@pytest.mark.slow(reason='1 s; tests/models/test_fast_forms.py has the kernels')
def test_fast_kernels_refuse_forward_mode() -> None:
  fast, params = loss_of(MODELS[0].values[0], Kernels.FAST)
  with pytest.raises(TypeError, match='forward-mode autodiff'):
    jax.jvp(fast, (params,), (params,))
