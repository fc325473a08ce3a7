"""The predictor of I-JEPA (arXiv 2301.08243, section 3): narrow, and discarded after training.

Parameters are those of the decoder in `mae_decoder.py`, but `predict/{kernel [E, D], bias [D]}` has the width of the
encoder. Positions are fixed, 2-D sine-cosine. Products are in the compute dtype, the result is f32.
"""
from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from vit_jax.core.numerics import constrain_batch
from vit_jax.core.types import Array, Params
from vit_jax.models.layers import applied
from vit_jax.models.mae_decoder import Narrow
from vit_jax.models.vit.positions import sincos2d_mae


@dataclasses.dataclass(frozen=True)
class Predictor(Narrow):
  """Predicts the features of blocks of patches from the features of other patches."""

  def apply(self, params: Params, mask_token: Array, tokens: Array, *, context: Array, is_context: Array,
            targets: Array, is_target: Array, grid: tuple[int, int]) -> Array:
    """Predicts each target block by a pass of its own.

    Args:
      params: of this predictor.
      mask_token: `[1, 1, E]`, in place of each target patch.
      tokens: `[B, n, D]` of the encoder.
      context: `[B, n] i32`, their patches.
      is_context: `[B, n] bool`, which of them are attended to.
      targets: `[B, M, t] i32`, the patches of M blocks.
      is_target: `[B, M, t] bool`; predictions for the others have no meaning.
      grid: `(h, w)`.

    Returns:
      `[B, M, t, D]` f32.
    """
    num_images, num_blocks, size = targets.shape
    positions_NE = jnp.asarray(sincos2d_mae(grid, self.width)).astype(self._context.dtype)
    seen_BnE = applied(self._embed, params['embed'], tokens) + positions_NE[context]
    asked_BMtE = mask_token.astype(self._context.dtype)[None] + positions_NE[targets]
    seen_BMnE = jnp.broadcast_to(seen_BnE[:, None], (num_images, num_blocks, *seen_BnE.shape[1:]))
    x = jnp.concatenate([seen_BMnE, asked_BMtE], axis=2).reshape(num_images * num_blocks, -1, self.width)
    mask = jnp.concatenate([jnp.broadcast_to(is_context[:, None], seen_BMnE.shape[:3]), is_target], axis=2)
    y = self._run(params['blocks'], constrain_batch(x), mask.reshape(x.shape[0], 1, 1, -1))
    y = applied(self._norm, params['norm'], y)[:, -size:]
    predicted = applied(self._predict, params['predict'], y).astype(jnp.float32)
    return constrain_batch(predicted.reshape(num_images, num_blocks, size, -1))

  @property
  def _num_outputs(self) -> int:
    return self.encoder.width
