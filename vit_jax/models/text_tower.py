"""Text towers: transformers that map token ids to one vector a text, as CLIP, SigLIP and TIPS have them.

CLIP (arXiv 2103.00020, section 2.4): causal attention, the output at the end-of-text token, a projection without bias.
SigLIP (arXiv 2303.15343) and SigLIP 2: every token attends to all, the last token, a projection with bias.
TIPS (arXiv 2410.16512) and TIPSv2: fixed sinusoidal positions, embeddings times sqrt(D), ReLU, the mean over tokens
that are not padding, no projection.

Parameters, all f32 (a public format; leaves under `blocks` are stacked, and are those of a block of `models/vit`):

  tokens [V, D]                          one row for each entry of the vocabulary
  positions [1, N, D]                    (learned ones)
  blocks/{norm1,norm2}/{scale,bias}, blocks/attn/{query,key,value,out}/{kernel,bias}, blocks/mlp/{up,down}/{kernel,bias}
  norm/{scale,bias} [D]
  projection/{kernel [D, E], bias [E]}   (`out_width`; no bias without `projection_bias`)

Knows no file format, no tokenizer and no image.
"""
from __future__ import annotations

import dataclasses
from typing import assert_never

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.schema import Execution, Gelu, Kernels, Remat, TextPool
from vit_jax.core.axes import labelled
from vit_jax.core.numerics import constrain_batch, split_key
from vit_jax.core.types import Array, HostArray, Key, Params
from vit_jax.models import stack
from vit_jax.models.initialization import lecun_normal
from vit_jax.models.kernels.forms import select
from vit_jax.models.layers import LayerNorm, applied, initial
from vit_jax.models.vit.block import Plain
from vit_jax.models.vit.context import BlockInfo, Context

SLOWEST = 10_000.  # the longest period of a sinusoid is 2 pi times this, the shortest 2 pi (TIPS)


@dataclasses.dataclass(frozen=True)
class TextTower:
  """A text tower.

  Attributes:
    vocabulary: V.
    length: N, tokens of a text with its padding.
    width: D.
    depth: L.
    heads: A.
    mlp: F.
    gelu: form of the activation; None = `max(x, 0)`.
    norm_eps: of all norms.
    pool: how the tokens become one vector.
    is_causal: whether a token attends only to itself and to those before it.
    is_sinusoidal: whether positions are fixed sinusoids, and embeddings are multiplied by sqrt(D).
    out_width: E, of the projection; 0 = there is none, and E = D.
    projection_bias: whether the projection has a bias.
    dtype: of the products.
    execution, remat, kernels: how the blocks are run, what they save for the backward pass, and their forms.
  """
  vocabulary: int
  length: int
  width: int
  depth: int
  heads: int
  mlp: int
  gelu: Gelu | None
  norm_eps: float
  pool: TextPool
  is_causal: bool = False
  is_sinusoidal: bool = False
  out_width: int = 0
  projection_bias: bool = True
  dtype: DTypeLike = jnp.float32
  execution: Execution = Execution.SCAN
  remat: Remat = Remat.NONE
  kernels: Kernels = Kernels.FAST

  def init(self, key: Key) -> Params:
    """Returns new parameters."""
    keys = split_key(key, 'tokens', 'positions', 'blocks', 'projection')
    normal = initializers.normal(self.width ** -.5)  # big_vision, text_transformer.py, of positions

    def block(key: Key) -> Params:
      x_BND = jnp.zeros((1, 1, self.width))
      return initial(self._block, key, x_BND, {}, BlockInfo(1))

    params: Params = {
        'tokens': labelled(normal(keys['tokens'], (self.vocabulary, self.width)), ('vocabulary', 'features')),
        'blocks': jax.vmap(block)(jax.random.split(keys['blocks'], self.depth)),
        'norm': initial(self._norm, keys['tokens'], jnp.zeros((1, self.width)))}
    if not self.is_sinusoidal:
      params['positions'] = labelled(normal(keys['positions'], (1, self.length, self.width)), (None, 'tokens', None))
    if self.out_width:
      kernel = lecun_normal(keys['projection'], (self.width, self.out_width))
      params['projection'] = {'kernel': labelled(kernel, ('embed', 'classes'), matrix=(1, 1))}
      if self.projection_bias:
        params['projection']['bias'] = labelled(jnp.zeros(self.out_width), (None,))
    return params

  def apply(self, params: Params, tokens: Array, mask: Array) -> Array:
    """Returns one vector a text, `[B, E]` f32, not normalized.

    Args:
      params: of this tower.
      tokens: ids `[B, N]` i32.
      mask: `[B, N]` bool, False for padding; only `TextPool.MEAN` reads it.
    """
    return self.pooled(params, self.tokens(params, tokens, mask), tokens, mask)

  def tokens(self, params: Params, tokens: Array, mask: Array) -> Array:
    """Returns all tokens after the last norm, `[B, N, D]` f32; the arguments are those of `apply`."""
    # Without the constraint, XLA (jaxlib 0.10.2) gives wrong gradients of the tower on a mesh of three axes.
    x_BND = constrain_batch(jnp.take(params['tokens'], tokens, axis=0))
    if self.is_sinusoidal:
      x_BND = x_BND * self.width ** .5 + jnp.asarray(sinusoids(self.length, self.width))[None]
    else:
      x_BND = x_BND + params['positions']
    attended = self._attended(mask)

    def layer(params: Params, x_BND: Array, rate: Array | None, key: Key | None) -> tuple[Array, stack.Sums]:
      return applied(self._block, params, x_BND, {}, BlockInfo(x_BND.shape[0], rate, key, mask=attended))[0], {}

    ready: stack.Ready = stack.cast(self.dtype) if self.dtype != jnp.float32 else lambda params: params
    x_BND, _ = stack.run(layer, params['blocks'], x_BND.astype(self.dtype), ready=ready, rates=None, keys=None,
                         execution=self.execution, remat=self.remat)
    normed_BND: Array = applied(self._norm, params['norm'], x_BND)
    return normed_BND

  def pooled(self, params: Params, tokens_BND: Array, tokens: Array, mask: Array) -> Array:
    """Returns the vectors `[B, E]` f32 of texts, from what `tokens` returns for them."""
    pooled_BD = self._pooled(tokens_BND, tokens, mask)
    if not self.out_width:
      return pooled_BD
    projected_BE = jnp.dot(pooled_BD, params['projection']['kernel'])
    return projected_BE + params['projection']['bias'][None] if self.projection_bias else projected_BE

  def _attended(self, mask_BN: Array) -> Array | None:
    """Returns which keys each query attends to, `[1 or B, 1, N or 1, N]` bool; None = all."""
    if self.is_causal:
      return jnp.tril(jnp.ones((self.length, self.length), bool))[None, None]
    return mask_BN[:, None, None] if self.pool is TextPool.MEAN else None

  def _pooled(self, x_BND: Array, tokens_BN: Array, mask_BN: Array) -> Array:
    """Returns one vector of each text, `[B, D]`, before the projection."""
    match self.pool:
      case TextPool.LAST:
        return x_BND[:, -1]
      case TextPool.END:
        end_B = jnp.argmax(tokens_BN, axis=1)
        return jnp.take_along_axis(x_BND, end_B[:, None, None], axis=1)[:, 0]
      case TextPool.MEAN:
        weight_BN = mask_BN.astype(jnp.float32)
        return (x_BND * weight_BN[:, :, None]).sum(1) / jnp.maximum(weight_BN.sum(1, keepdims=True), 1.)
      case _:
        assert_never(self.pool)

  @property
  def _block(self) -> Plain:
    context = Context(norm=schema.LayerNorm(self.norm_eps), gelu=self.gelu, dtype=self.dtype,
                      forms=select(self.kernels))
    return Plain(heads=self.heads, attention=schema.Attention(), mlp=schema.Mlp(self.mlp), context=context)

  @property
  def _norm(self) -> LayerNorm:
    return LayerNorm(self.norm_eps, select(self.kernels))


def sinusoids(length: int, width: int) -> HostArray:
  """Returns fixed positions `[N, D]` f32: sines in the first half of the channels, cosines in the second.

  Position n has the angles `n w_i` with `w_i = 10000^(-i / (D/2 - 1))` for i = 0 … D/2 - 1, as in TIPS.
  """
  half = width // 2
  rates = SLOWEST ** (-np.arange(half) / max(half - 1, 1))
  angles = np.arange(length)[:, None] * rates[None]
  return np.concatenate([np.sin(angles), np.cos(angles), np.zeros((length, width % 2))], axis=1).astype(np.float32)
