"""One block for the tables of TPUs: the arrays of a step in bf16, both passes, ours and that of a checkout."""
from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from benchmarks import tpu_block

REQUEST = tpu_block.Request('cpu:1', images=2, tokens=4, width=16, heads=2, mlp=32)
THEIRS = """
import flax.linen as nn
import einops

class Encoder1DBlock(nn.Module):
  mlp_dim: int
  num_heads: int
  dtype_mm: str

  @nn.compact
  def __call__(self, x, deterministic):
    assert (self.mlp_dim, self.num_heads, self.dtype_mm, deterministic) == (32, 2, 'bfloat16', True)
    y = nn.Dense(16, dtype=self.dtype_mm)(nn.LayerNorm()(x))
    return x + y, {'sa': y}
"""


@pytest.fixture
def checkout(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
  """A program with the names and calls of big_vision."""
  (tmp_path / 'big_vision' / 'models').mkdir(parents=True)
  (tmp_path / 'big_vision' / 'models' / 'vit.py').write_text(THEIRS)
  monkeypatch.setattr(sys, 'path', [*sys.path])
  yield str(tmp_path)
  for name in [name for name in sys.modules if name.partition('.')[0] == 'big_vision']:
    del sys.modules[name]


def _check(lowered: jax.stages.Lowered, num_matrices: int) -> None:
  """The output, and a gradient for each array, norms of which are f32; products of both passes, in bf16."""
  params, x, dy = lowered.in_avals[0]
  y, (dparams, dx) = lowered.out_info
  assert x.shape == dy.shape == y.shape == dx.shape == (2, 4, 16) and x.dtype == y.dtype == dx.dtype == jnp.bfloat16
  assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(params)] == [
      (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(dparams)]
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    assert leaf.dtype == (jnp.float32 if 'norm' in jax.tree_util.keystr(path).lower() else jnp.bfloat16), path
  assert sum(leaf.ndim > 1 and leaf.size >= 256 for leaf in jax.tree.leaves(params)) == num_matrices
  assert 'optimization_barrier' in lowered.as_text()


def test_our_block_is_lowered_with_both_passes() -> None:
  _check(tpu_block.lower(REQUEST, jax.devices()[0]), num_matrices=6)


def test_our_block_is_lowered_with_quantized_products() -> None:
  for quantize, dtype in (('none', ''), ('int8', 'xi8>'), ('fp8', 'xf8E4M3FN>')):
    text = tpu_block.lower(REQUEST._replace(quantize=quantize), jax.devices()[0]).as_text()
    lines = [line for line in text.splitlines() if 'dot_general' in line and any(
        name in line for name in ('xi8>', 'xf8E4M3FN>'))]
    assert len(lines) == (12 if dtype else 0) and all(dtype in line for line in lines), quantize


def test_the_block_of_a_checkout_is_lowered_in_the_same_way(checkout: str) -> None:
  _check(tpu_block.lower(REQUEST._replace(checkout=checkout), jax.devices()[0]), num_matrices=1)
