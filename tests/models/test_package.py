"""Tests of the package as a whole."""
from __future__ import annotations

import subprocess
import sys

import pytest

CANARY = """
import warnings
with warnings.catch_warnings(record=True) as caught:
  warnings.simplefilter('always')
  import jax, jax.numpy as jnp
  from vit_jax.config import schema
  from vit_jax.models import heads
  from vit_jax.models.vit import vit
  model = vit.build(schema.ViT(patch=8, width=32, depth=2, heads=4, mlp=schema.Mlp(48)), (16, 16))
  image = jnp.zeros((1, 16, 16, 3))
  params, _ = jax.eval_shape(model.init, jax.random.key(0), image)
  jax.eval_shape(lambda p: model.apply(p, {}, image, train=False, key=None)[0], params)
  jax.eval_shape(lambda k: heads.Head(schema.Head(pre_logits=8)).init(k, 32, 7), jax.random.key(0))
for w in caught:
  if issubclass(w.category, (DeprecationWarning, FutureWarning)):
    if 'flax' in f'{w.filename} {w.message}' or 'vit_jax' in w.filename:
      print(w.filename, w.message)
"""


@pytest.mark.slow(reason='3 s: starts a program')
def test_neither_import_nor_use_makes_flax_warn_of_a_deprecation() -> None:
  done = subprocess.run([sys.executable, '-c', CANARY], capture_output=True, text=True, check=True)
  assert done.stdout == ''
