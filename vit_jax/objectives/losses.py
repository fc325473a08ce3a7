"""Classification losses per example, in nats, computed in f32."""
from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from vit_jax.core.types import Array


def smooth(targets_BC: Array, amount: float) -> Array:
  """Smooths labels: `(1 - amount) * targets + amount / C` (Szegedy et al. 2016, section 7).

  The same for sigmoid losses, as in timm: the target of every other class is `amount / C`. Each of several targets
  becomes `1 - amount + amount / C`: big_vision's `onehot` with these values as `on` and `off`.
  """
  return (1. - amount) * targets_BC + amount / targets_BC.shape[-1] if amount else targets_BC


def softmax_xent(logits_BC: Array, targets_BC: Array) -> Array:
  """Returns `-sum_c t_c log softmax(logits)_c`, shape `[B]`."""
  return -(targets_BC * jax.nn.log_softmax(logits_BC.astype(jnp.float32))).sum(-1)


def sigmoid_xent(logits_BC: Array, targets_BC: Array) -> Array:
  """Returns a binary loss for each class, summed, shape `[B]`.

  It is `-sum_c t_c log sigmoid(z_c) + (1 - t_c) log sigmoid(-z_c)`.
  """
  z_BC = logits_BC.astype(jnp.float32)
  return -(targets_BC * jax.nn.log_sigmoid(z_BC) + (1. - targets_BC) * jax.nn.log_sigmoid(-z_BC)).sum(-1)


def binary_xent(logits_BC: Array, targets_BC: Array) -> Array:
  """Returns `sigmoid_xent / C`, the mean over classes of DeiT III (Touvron et al. 2022), shape `[B]`."""
  return sigmoid_xent(logits_BC, targets_BC) / logits_BC.shape[-1]


def harden(targets_BC: Array, threshold: float) -> Array:
  """Replaces targets above `threshold` by 1 and others by 0, so that a mixed image has both classes.

  A negative threshold changes nothing.
  """
  return (targets_BC > threshold).astype(jnp.float32) if threshold >= 0. else targets_BC


def example_weights(targets_BC: Array, class_weights: Sequence[float]) -> Array:
  """Returns the weight of each example, `sum_c t_c w_c / sum_c t_c`, shape `[B]`; 0 where it has no target."""
  total_B = targets_BC.sum(-1)
  return targets_BC @ jnp.asarray(class_weights, jnp.float32) / jnp.where(total_B > 0., total_B, 1.)


def hit(logits_BC: Array, targets_BC: Array) -> Array:
  """Returns 1 where the most likely class is a target with the largest weight, else 0; shape `[B]` f32."""
  chosen_B1 = jnp.argmax(logits_BC, -1, keepdims=True)
  weight_B = jnp.take_along_axis(targets_BC, chosen_B1, -1)[:, 0]
  return ((weight_B >= targets_BC.max(-1)) & (weight_B > 0)).astype(jnp.float32)
