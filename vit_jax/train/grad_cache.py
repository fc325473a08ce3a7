"""Gradients over microbatches of losses that compare all examples of a batch (GradCache, Gao et al. 2021).

Such a loss, as that of CLIP, compares the embedding of each example with the embeddings of all others
(`contracts.Coupling`). `step.py` calls `gradients`, which makes two passes (arXiv 2101.06983). The first pass computes
the embeddings of one microbatch after the other, without a gradient. The loss of all embeddings gives the gradient with
respect to each embedding. The second pass computes the embeddings of each microbatch again, with the same random key,
and propagates the gradients of the embeddings to the parameters. By the chain rule, the result is the gradient of the
complete batch, except for rounding. It takes one more forward pass, but only the memory of one microbatch and of all
embeddings.
"""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.core import numerics
from vit_jax.core.contracts import Coupling
from vit_jax.core.types import Array, Batch, Key, LossOut, Params, PyTree
from vit_jax.train.state import TrainState


def gradients(coupling: Coupling, state: TrainState, batch: Batch, key: Key, micros: Batch,
              own_key: Callable[[Array], Key]) -> tuple[LossOut, PyTree]:
  """Returns loss and gradient of the complete batch.

  Args:
    coupling: of the objective: `embed` and `compare`.
    batch: the complete batch, of B examples.
    key: of the comparison.
    micros: the result of `divided` for the batch: all microbatches.
    own_key: returns the key of microbatch i.
  """
  indexes = jnp.arange(len(jax.tree.leaves(micros)[0]))  # i of each microbatch

  def embed(params: Params, micro: Batch, i: Array) -> tuple[PyTree, PyTree]:
    return coupling.embed(params, state.extra, micro, own_key(i), state.step)

  def loss(params: Params, embeddings: PyTree) -> tuple[Array, LossOut]:
    out = coupling.compare(params, state.extra, embeddings, batch, key, state.step)
    return out.loss.value, out

  def add_gradient(sums: PyTree, xs: tuple[Batch, PyTree, Array]) -> tuple[PyTree, None]:
    micro, embedding_grads, i = xs
    _, propagate, stats = jax.vjp(lambda params: embed(params, micro, i), state.params, has_aux=True)
    return jax.tree.map(jnp.add, sums, (*propagate(embedding_grads), stats)), None

  embeddings = jax.lax.map(lambda xs: embed(state.params, *xs)[0], (micros, indexes))
  # `compare` may use parameters too, such as a temperature: the sum begins with the gradient of `compare`.
  (grads, embedding_grads), out = jax.grad(loss, argnums=(0, 1), has_aux=True)(
      state.params, jax.tree.map(_joined, embeddings))
  _, stats_shapes = jax.eval_shape(embed, state.params, jax.tree.map(lambda x: x[0], micros), indexes[0])
  zero_stats = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats_shapes)
  xs = (micros, divided(embedding_grads, len(indexes)), indexes)
  (grads, stats), _ = jax.lax.scan(add_gradient, (grads, zero_stats), xs)
  return out._replace(stats=stats), grads


def divided(batch: PyTree, count: int) -> PyTree:
  """Returns arrays `[B, …]` as `[count, B / count, …]`: part i has the rows i, i + count, …, on the same devices."""
  def split(x: Array) -> Array:
    x = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
    return numerics.constrain(x, (None, numerics.BATCH_AXES) + (None,) * (x.ndim - 2))
  return jax.tree.map(split, batch)


def _joined(x: Array) -> Array:
  """Returns an array `[count, B / count, …]` as `[B, …]`, the inverse of `divided`."""
  return numerics.constrain_batch(x.swapaxes(0, 1).reshape(-1, *x.shape[2:]))
