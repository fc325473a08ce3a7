"""Mimetic initialization of attention (arXiv 2305.09828): it starts like that of pretrained networks.

In each head `W_Q W_K^T` is near `0.7 I`, so that a token attends to those that resemble it, and `W_V W_O` is near
`-0.4 I`. It helps on small datasets, above all with sine-cosine positions (`model.positions=sincos`), as in the paper.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from vit_jax.core.axes import labelled
from vit_jax.core.numerics import split_key
from vit_jax.core.types import Array, Key, Params
from vit_jax.models.vit.attention import OUT, PROJECTION

NEAR_QK, NEAR_VO = .7, -.4  # section 3: factors of the identity; the noise around it has the same size


def attention(params: Params, key: Key) -> Params:
  """Returns the parameters of one attention with other kernels.

  `W_Q W_K^T = 0.7 (Z + I)` in each head, but for its smallest singular values, and `W_V W_O = 0.4 (Z - I)`, where each
  Z is normal with variance 1 / D. A product `U S V^T` is divided into `U S^(1/2)` and `S^(1/2) V^T`.

  Args:
    params: kernels `query`, `key` and `value [D, A, K]`, and `out [A, K, D]`; biases and norms stay as they are.
    key: of the noise.
  """
  width, heads, head_width = params['query']['kernel'].shape
  keys = split_key(key, 'query_key', 'value_out')
  query, keys_of = _factors(keys['query_key'], NEAR_QK, heads, width)
  value, out = (factor[0] for factor in _factors(keys['value_out'], NEAR_VO, 1, width))
  kernels = {'query': labelled(query[..., :head_width].swapaxes(0, 1), PROJECTION, (1, 2)),
             'key': labelled(keys_of[:, :head_width].transpose(2, 0, 1), PROJECTION, (1, 2)),
             'value': labelled(value.reshape(width, heads, head_width), PROJECTION, (1, 2)),
             'out': labelled(out.reshape(heads, head_width, width), OUT, (2, 1))}
  return {name: {**leaves, 'kernel': kernels[name]} if name in kernels else leaves for name, leaves in params.items()}


def _factors(key: Key, near: float, count: int, width: int) -> tuple[Array, Array]:
  """Returns two factors `[count, D, D]` of `abs(near) Z + near I`; the largest singular values come first."""
  noise = jax.random.normal(key, (count, width, width)) * abs(near) * width ** -.5
  left, sizes, right = jnp.linalg.svd(noise + near * jnp.eye(width)[None])
  roots = jnp.sqrt(sizes)
  return left * roots[:, None], roots[..., None] * right
