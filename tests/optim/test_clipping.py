"""Clipping by part, by tensor and by unit, against NumPy; each layer for itself."""
from __future__ import annotations

import jax
import numpy as np
import optax

from vit_jax.core import trees
from vit_jax.optim import clipping, masks

RNG = np.random.default_rng(0)
GRADS = {'blocks/query/kernel': RNG.normal(size=(3, 4, 2, 5)) * np.array([.01, 1, 10]).reshape(3, 1, 1, 1),
         'blocks/out/kernel': RNG.normal(size=(3, 2, 5, 4)), 'blocks/norm1/scale': RNG.normal(size=(3, 4)),
         'head/kernel': RNG.normal(size=(4, 7)), 'cls': RNG.normal(size=(1, 1, 4))}
PARAMS = {k: RNG.normal(size=v.shape) * (k != 'cls') for k, v in GRADS.items()}


def clip(optimizer: optax.GradientTransformationExtraArgs) -> dict[str, np.ndarray]:
  grads, params = (trees.unflatten({k: v.astype(np.float32) for k, v in t.items()}) for t in (GRADS, PARAMS))
  updates = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(grads, params)
  return {k: np.asarray(v) for k, v in trees.flatten(updates).items()}


def test_each_tensor_keeps_to_the_limit_and_short_ones_stay() -> None:
  got = clip(clipping.by_tensor_norm(2.))
  for k, g in GRADS.items():
    for layer in range(3) if k.startswith('blocks') else [...]:
      want = g[layer] * min(1, 2 / np.linalg.norm(g[layer]))
      np.testing.assert_allclose(got[k][layer], want, rtol=1e-5, err_msg=k)
  np.testing.assert_allclose(got['blocks/query/kernel'][0], GRADS['blocks/query/kernel'][0], rtol=1e-6)


def test_parts_are_clipped_apart_and_the_rest_is_one_more() -> None:
  optimizer = clipping.by_norm(2., ['head/.*', 'blocks', 'blocks/(query|out)/.*'])  # whole names
  grads = trees.unflatten({k: v.astype(np.float32) for k, v in GRADS.items()})
  updates = jax.jit(lambda g: optimizer.update(g, optimizer.init(g), grad_norm=np.float32(0))[0])(grads)
  parts = [['head/kernel'], ['blocks/query/kernel', 'blocks/out/kernel'], ['blocks/norm1/scale', 'cls']]
  norms = [np.sqrt(sum((GRADS[name] ** 2).sum() for name in names)) for names in parts]
  assert min(norms) > 2. > np.linalg.norm(GRADS['cls'])
  for names, norm in zip(parts, norms, strict=True):
    for name in names:
      want = GRADS[name] * min(1., 2. / norm)
      np.testing.assert_allclose(trees.flatten(updates)[name], want, rtol=1e-5, err_msg=name)


def test_query_key_and_value_are_clipped_as_the_one_tensor_that_dino_has() -> None:
  # dino/utils.py@7c446df, clip_gradients: p.grad times clip / (norm + 1e-6) if that is below 1; p is attn.qkv.weight.
  grads = {f'blocks/attn/{name}/kernel': RNG.normal(size=(3, 4, 2, 5)) * scale
           for name, scale in (('query', 1.), ('key', 2.), ('value', .01))}
  norm = np.sqrt(sum((g ** 2).sum((1, 2, 3), keepdims=True) for g in grads.values()))
  tree = trees.unflatten({k: v.astype(np.float32) for k, v in grads.items()})
  clipper = clipping.by_tensor_norm(2.)

  @jax.jit
  def clip_all(grads: object) -> object:
    return clipper.update(grads, clipper.init(grads))[0]

  for name, got in trees.flatten(clip_all(tree)).items():
    want = grads[name] * np.minimum(1, 2. / (norm + 1e-6))
    np.testing.assert_allclose(got, want, rtol=1e-5)  # 40 squares in f32, and the 1e-6


def test_adaptive_clipping_goes_by_output_unit_and_spares_the_head() -> None:
  got = clip(clipping.adaptive(.1, masks.find_matrices(trees.unflatten(PARAMS))))
  fan_in = {'blocks/query/kernel': (1,), 'blocks/out/kernel': (1, 2), 'blocks/norm1/scale': (1,), 'cls': (0, 1, 2)}
  for k, axes in fan_in.items():
    norm = lambda x, axes=axes: np.sqrt((x ** 2).sum(axes, keepdims=True))
    limit = .1 * np.maximum(norm(PARAMS[k]), 1e-3)
    np.testing.assert_allclose(got[k], GRADS[k] * np.minimum(1, limit / norm(GRADS[k])), rtol=1e-5, err_msg=k)
  np.testing.assert_array_equal(got['head/kernel'], GRADS['head/kernel'].astype(np.float32))
  assert 0 < np.linalg.norm(got['cls']) < 1.01e-4
