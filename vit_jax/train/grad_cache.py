"""Gradients over microbatches of losses that compare all examples of a batch, by two passes (GradCache).

Gao et al. 2021 (arXiv 2101.06983). The first pass computes the rows that are compared, of one microbatch after the
other, without a gradient. The loss of all rows gives the gradient of each row. The second pass computes the rows of
each microbatch again, with the same random key, and takes their gradient on to the parameters. This is the chain rule,
so the result is that of the whole batch but for the rounding of sums. The memory is that of one microbatch and of all
rows; the time is that of one more forward pass.
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
    coupling: of the objective.
    state: with the parameters.
    batch: all rows.
    key: of the comparison.
    micros: the batch as `[count, B / count, …]`, whose microbatch i has the rows i, i + count, …
    own_key: the key of a microbatch, by its number; the same in both passes.
  """
  numbers = jnp.arange(len(jax.tree.leaves(micros)[0]))

  def embed(params: Params, micro: Batch, i: Array) -> tuple[PyTree, PyTree]:
    return coupling.embed(params, state.extra, micro, own_key(i), state.step)

  def total(params: Params, rows: PyTree) -> tuple[Array, LossOut]:
    out = coupling.compare(params, state.extra, rows, batch, key, state.step)
    return out.loss.value, out

  def second(carry: PyTree, xs: tuple[Batch, PyTree, Array]) -> tuple[PyTree, None]:
    micro, slope, i = xs
    _, pull, stats = jax.vjp(lambda params: embed(params, micro, i), state.params, has_aux=True)
    return jax.tree.map(jnp.add, carry, (*pull(slope), stats)), None

  rows = jax.lax.map(lambda xs: embed(state.params, *xs)[0], (micros, numbers))
  (grads, slopes), out = jax.grad(total, argnums=(0, 1), has_aux=True)(state.params, jax.tree.map(_joined, rows))
  _, shapes = jax.eval_shape(embed, state.params, jax.tree.map(lambda x: x[0], micros), numbers[0])
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  (grads, stats), _ = jax.lax.scan(second, (grads, zeros), (micros, divided(slopes, len(numbers)), numbers))
  return out._replace(stats=stats), grads


def divided(batch: PyTree, count: int) -> PyTree:
  """Returns arrays `[B, …]` as `[count, B / count, …]`; rows stay on their devices."""
  def split(x: Array) -> Array:
    x = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
    return numerics.constrain(x, (None, numerics.BATCH_AXES) + (None,) * (x.ndim - 2))

  return jax.tree.map(split, batch)


def _joined(x: Array) -> Array:
  """Returns an array `[count, B / count, …]` as `[B, …]`, the inverse of `divided`."""
  return numerics.constrain_batch(x.swapaxes(0, 1).reshape(-1, *x.shape[2:]))
