"""Mixup on the device (Zhang et al., arXiv 1710.09412): convex combinations of pairs of examples.

x' = lambda x_i + (1 - lambda) x_j and the same for the labels, lambda ~ Beta(alpha, alpha), drawn once a step
as in the authors' code. Where we differ: the partner is the neighbour inside a fixed pair of rows of the
*global* batch (rows 0 and 1, 2 and 3, ...) instead of a random permutation. Batches are shuffled already, and
this way the pairs do not depend on how the batch is spread over devices.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from vit_jax.core.types import Array, Batch, Key


def mixup(batch: Batch, key: Key, *, alpha: float, num_classes: int) -> Batch:
  """Mixes images and labels of neighbouring rows; writes `labels [B, C] f32`.

  Args:
    batch: `image [B, H, W, 3] f32`; `labels [B, C]`, or else `label [B] i32`; optional `mask [B]`.
    key: of this step.
    alpha: of Beta(alpha, alpha), > 0.
    num_classes: C, of the one-hot labels made from `label`.
  """
  return mix_pairs(batch, jax.random.beta(key, alpha, alpha, dtype=jnp.float32), num_classes=num_classes)


def mix_pairs(batch: Batch, lam: Array | float, *, num_classes: int) -> Batch:
  """`mixup` with a given lambda `[] f32`. A row whose partner is padding, or missing, stays as it is."""
  labels_BC = batch['labels'] if 'labels' in batch else jax.nn.one_hot(batch['label'], num_classes)
  weight_B = jnp.full(labels_BC.shape[:1], lam, jnp.float32)
  if 'mask' in batch:
    weight_B = jnp.where(swap_pairs(batch['mask']) > 0, weight_B, 1.)

  def mix(values: Array) -> Array:
    weight = weight_B.reshape((-1,) + (1,) * (values.ndim - 1))
    return weight * values + (1. - weight) * swap_pairs(values)
  return batch | {'image': mix(batch['image']), 'labels': mix(labels_BC.astype(jnp.float32))}


def swap_pairs(values: Array) -> Array:
  """`values [B, ...]` with rows 2i and 2i + 1 exchanged; the last row of an odd batch stays."""
  even = values.shape[0] // 2 * 2
  # A reshape keeps pairs on their device where an index gather would collect the whole batch.
  pairs = values[:even].reshape((even // 2, 2) + values.shape[1:])
  swapped = pairs[:, ::-1].reshape((even,) + values.shape[1:])
  return swapped if even == values.shape[0] else jnp.concatenate([swapped, values[even:]])
