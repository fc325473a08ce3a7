"""Tests of the classification head."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.models.heads import Head


def test_an_untrained_head_gives_its_bias() -> None:
  head = Head(schema.Head(bias_init=-10.))
  params = head.init(jax.random.key(0), 32, 7)
  shapes = {name: leaf.shape for name, leaf in trees.flatten(params).items()}
  assert shapes == {'kernel': (32, 7), 'bias': (7,)}
  np.testing.assert_array_equal(head.apply(params, jnp.ones((6, 32))), np.full((6, 7), -10.))


def test_pre_logits_are_a_tanh_layer() -> None:
  head = Head(schema.Head(pre_logits=16))
  params = head.init(jax.random.key(0), 32, 7)
  assert params['pre_logits']['kernel'].shape == (32, 16) and params['kernel'].shape == (16, 7)
  params['kernel'] = jax.random.normal(jax.random.key(1), (16, 7))
  x = jax.random.normal(jax.random.key(2), (6, 32))
  hidden = np.tanh(x @ params['pre_logits']['kernel'])
  np.testing.assert_allclose(head.apply(params, x), hidden @ params['kernel'], rtol=1e-4, atol=1e-5)


def test_logits_are_f32_for_bf16_features() -> None:
  head = Head(schema.Head(pre_logits=8))
  logits = head.apply(head.init(jax.random.key(0), 32, 7), jnp.ones((6, 32), jnp.bfloat16))
  assert logits.dtype == jnp.float32
