"""Losses over all pairs of the images and texts of a batch: SigLIP's sigmoid (arXiv 2303.15343) and CLIP's softmax.

With unit vectors x_i of B images and y_j of their texts, logits `l_ij = s x_i·y_j + b`, and softplus(l) = ln(1 + e^l):

  sigmoid: (1/B) [sum_ij softplus(l_ij) - sum_i l_ii], which is -(1/B) sum_ij ln sigmoid(z_ij l_ij), with z_ij = 1 for
           i = j and -1 otherwise, because softplus(-l) = softplus(l) - l
  softmax: (1/2B) sum_i [ln sum_j e^(l_ij) + ln sum_j e^(l_ji) - 2 l_ii] (arXiv 2103.00020, Figure 3)

If several texts belong to an image, those of the images of its class C(i), the sums over matches have all of them: of
sigmoid `sum_i sum_(j in C(i)) l_ij` in place of `sum_i l_ii`, of softmax their mean, `sum_i mean_(j in C(i)) l_ij`
(as arXiv 2004.11362, equation 2, for both directions). Only the matrix has this form.

There are two forms. The matrix has all B^2 logits, as rows on their devices, and every device receives all texts. In
the ring each device has one part of the texts at a time, and passes it to the next one: no array is larger than the
rows of one device, so that the memory does not grow with the number of devices. The backward pass is a second ring, in
which the texts travel together with their gradient. It is written by hand: the derivative of the first ring would keep
the texts of every step, which is more memory than the matrix needs at 16 devices. What is sent does not depend on what
is computed beside it, so that both can overlap.

Rows are split over all axes of the mesh that divide them, `tensor` too.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from vit_jax.config.schema import PairForm, PairLoss
from vit_jax.core.numerics import BATCH_AXES, dividing
from vit_jax.core.types import Array, Mean
from vit_jax.parallel import kernels

AXES = (*BATCH_AXES, 'tensor')
"""Axes of the mesh that may split the rows, in the order of a ring."""
MATRIX_BYTES = 2**26
"""The most logits of one device, in bytes of f32, for which `PairForm.AUTO` is the matrix."""
_LOWEST = -1e30  # a logit of no pair; finite, so that differences of two are 0


class Plan(NamedTuple):
  """How the pairs of a batch are computed."""
  loss: PairLoss
  axes: tuple[str, ...]  # axes of the mesh that split the rows; () = the rows are not split
  size: int              # number of devices along these axes, which form the ring
  chunk: int             # number of images that are compared with the texts of a device at a time


class Pairs(NamedTuple):
  """Vectors of images and texts; their logits are `scale * (image · text) + bias`."""
  image: Array  # [B, E], any float dtype, in which products are computed
  text: Array   # likewise
  scale: Array  # f32 scalar
  bias: Array   # f32 scalar
  mask: Array | None = None   # [B] f32, 0 for rows that do not count; None = all count
  group: Array | None = None  # [B] i32, images and texts of one group match; None = each row matches itself alone


def mean_loss(pairs: Pairs, loss: PairLoss, *, form: PairForm = PairForm.AUTO, chunk: int = 256) -> Mean:
  """Returns the mean loss over the rows of a batch whose mask is not 0, in nats; differentiable in all but the mask.

  Args:
    pairs: all pairs of the batch.
    loss: the kind of loss.
    form: matrix, ring, or the choice of `choose`.
    chunk: most images that are compared at a time; the largest divisor of a device's rows up to it is used.
  """
  rows = pairs.image.shape[0]
  weight = jnp.full((), rows, jnp.float32) if pairs.mask is None else pairs.mask.sum()
  axes, size = split(rows)
  if pairs.group is not None or choose(rows, size, form) is PairForm.MATRIX:
    return Mean(_matrix(pairs, loss), weight)
  plan = Plan(loss, axes, size, _divisor(rows // size, chunk))
  return Mean(_ring(plan, *pairs[:-1]), weight)


def split(rows: int) -> tuple[tuple[str, ...], int]:
  """Returns the axes of the current mesh that split so many rows, and the number of devices along them."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return (), 1
  axes = dividing(mesh, AXES, rows) or dividing(mesh, BATCH_AXES, rows) or ()
  axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
  return axes, math.prod(mesh.shape[axis] for axis in axes)


def choose(rows: int, size: int, form: PairForm) -> PairForm:
  """Returns the form for a batch of so many rows on `size` devices, and logs it."""
  if form is PairForm.AUTO:
    form = PairForm.MATRIX if 4 * rows * rows // size <= MATRIX_BYTES else PairForm.RING
  kernels.log_once(f'Loss over {rows:,} x {rows:,} pairs on {size} devices: {describe(rows, size, form)}.')
  return form


def describe(rows: int, size: int, form: PairForm) -> str:
  """Returns what a form keeps on each device, in words."""
  if form is PairForm.MATRIX:
    return f'one matrix, {4 * rows * rows / size / 2**20:,.1f} MiB of logits on each'
  return f'a ring, in which each has {rows // size:,} texts at a time'


def _divisor(rows: int, most: int) -> int:
  """Returns the largest divisor of `rows` that is at most `most`."""
  return next(size for size in range(min(rows, most), 0, -1) if rows % size == 0)


def _matrix(pairs: Pairs, loss: PairLoss) -> Array:
  """Returns the sum of the loss over the rows, from all logits at once."""
  logits_BB = pairs.scale * _dots(pairs.image, pairs.text) + pairs.bias
  own_B = pairs.scale * _own(pairs.image, pairs.text) + pairs.bias
  valid_B = jnp.ones(len(own_B)) if pairs.mask is None else pairs.mask
  counts_BB = valid_B[:, None] * valid_B[None]
  if pairs.group is not None:
    is_counted_BB = counts_BB > 0
    matches_BB = (pairs.group[:, None] == pairs.group[None]) & (counts_BB > 0)
    return _grouped(logits_BB, is_counted_BB, matches_BB, loss)
  match loss:
    case PairLoss.SIGMOID:
      return jnp.where(counts_BB > 0, jax.nn.softplus(logits_BB), 0.).sum() - jnp.where(valid_B > 0, own_B, 0.).sum()
    case PairLoss.SOFTMAX:
      logits_BB = jnp.where(counts_BB > 0, logits_BB, _LOWEST)
      both_B = jax.nn.logsumexp(logits_BB, 1) + jax.nn.logsumexp(logits_BB, 0)
      return jnp.where(valid_B > 0, both_B / 2 - own_B, 0.).sum()


def _grouped(logits_BB: Array, counts_BB: Array, matches_BB: Array, loss: PairLoss) -> Array:
  """Returns the sum of the loss over the rows that count, where several texts may match an image."""
  match loss:
    case PairLoss.SIGMOID:
      return jnp.where(counts_BB, jax.nn.softplus(logits_BB), 0.).sum() - jnp.where(matches_BB, logits_BB, 0.).sum()
    case PairLoss.SOFTMAX:
      logits_BB = jnp.where(counts_BB, logits_BB, _LOWEST)
      both_B = jax.nn.logsumexp(logits_BB, 1) + jax.nn.logsumexp(logits_BB, 0)
      own_B = jnp.where(matches_BB, logits_BB + logits_BB.T, 0.).sum(1) / jnp.maximum(matches_BB.sum(1), 1)
      return jnp.where(matches_BB.any(1), (both_B - own_B) / 2, 0.).sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(plan: Plan, image: Array, text: Array, scale: Array, bias: Array, mask: Array | None) -> Array:
  """Returns the sum of the loss over the rows, by a ring."""
  return _forward(plan, image, text, scale, bias, mask)[0]


def _forward(plan: Plan, *inputs: Any) -> tuple[Array, tuple[Any, ...]]:
  total, sums = _on_devices(plan, _sum, inputs, (False, True))
  return total, (*inputs, sums)


def _backward(plan: Plan, saved: tuple[Any, ...], cotangent: Array) -> tuple[Array | None, ...]:
  image, text, *_ = saved
  dimage, dtext, dscale, dbias = _on_devices(plan, _pull, (*saved, cotangent), (True, True, False, False))
  return dimage.astype(image.dtype), dtext.astype(text.dtype), dscale, dbias, None


_ring.defvjp(_forward, _backward)


def _on_devices(plan: Plan, function: Callable[..., Any], inputs: tuple[Any, ...], have_rows: tuple[bool, ...]) -> Any:
  """Calls `function(plan, *inputs)` on each device for its own rows; `have_rows` says which results have rows."""
  local = functools.partial(function, plan)
  if not plan.axes:
    return local(*inputs)
  rows, whole = PartitionSpec(plan.axes), PartitionSpec()
  in_specs = jax.tree.map(lambda x: rows if jnp.ndim(x) else whole, inputs)
  out_specs = tuple(rows if has_rows else whole for has_rows in have_rows)
  return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*inputs)


# The functions below run on one device: it has b rows of images and of texts, or chunks of c of these rows.

class Sums(NamedTuple):
  """The largest logit of each row or column so far, and the sum of `exp(logit - largest)`, `[b]` f32 each."""
  largest: Array
  total: Array

  @property
  def log(self) -> Array:
    return self.largest + jnp.log(self.total)


def _sum(plan: Plan, image_bE: Array, text_bE: Array, scale: Array, bias: Array,
         mask_b: Array | None) -> tuple[Array, tuple[Array, Array] | None]:
  """Returns the sum of the loss over all rows of all devices, and for softmax the logs of sums by image and by text."""
  empty = Sums(jnp.full(len(image_bE), _LOWEST), jnp.zeros(len(image_bE)))
  is_softmax = plan.loss is PairLoss.SOFTMAX

  def step(carry: Any, _: None) -> tuple[Any, None]:
    (text, mask), columns, rows, total = carry
    following = _next(plan, (text, mask))

    def compare(carry: Any, of_images: tuple[Array, Array | None, Sums | None]) -> tuple[Any, Sums | None]:
      """Compares a chunk of images with the texts that the device has now."""
      columns, total = carry
      image, valid, rows = of_images
      logits, counts = scale * _dots(image, text) + bias, _counts(valid, mask)
      if rows is None:
        losses = jax.nn.softplus(logits)
        return (columns, total + (losses if counts is None else jnp.where(counts > 0, losses, 0.)).sum()), None
      logits = logits if counts is None else jnp.where(counts > 0, logits, _LOWEST)
      return (_merged(columns, logits, 0), total), _merged(rows, logits, 1)

    (columns, total), rows = _chunked(plan, compare, (columns, total), (image_bE, mask_b, rows))
    return (following, _next(plan, columns), rows, total), None

  begin = ((text_bE, mask_b), *((empty, empty) if is_softmax else (None, None)), jnp.zeros(()))
  (_, columns, rows, total), _ = lax.scan(step, begin, None, plan.size)
  own_b = scale * _own(image_bE, text_bE) + bias
  if is_softmax:
    own_b = own_b - (rows.log + columns.log) / 2
  total = total - (own_b if mask_b is None else jnp.where(mask_b > 0, own_b, 0.)).sum()
  return _summed(plan, total), (rows.log, columns.log) if is_softmax else None


def _pull(plan: Plan, image_bE: Array, text_bE: Array, scale: Array, bias: Array, mask_b: Array | None,
          sums: tuple[Array, Array] | None, cotangent: Array) -> tuple[Array, Array, Array, Array]:
  """Returns the gradients of images and texts `[b, E]` f32, and of scale and bias, summed over all devices.

  The derivative of the loss by a logit is `p_ij - 1[i = j]`. The texts travel around the ring one step ahead of their
  gradient `sum_i p_ij x_i`, so that a device sends its part of the gradient while it computes the next one.
  """
  rows_b, columns_b = sums or (None, None)
  zeros = jnp.zeros(text_bE.shape, jnp.float32)

  def step(carry: Any, _: None) -> tuple[Any, None]:
    (text, mask, columns), before, added, dimage, dscale, dbias = carry
    following, before = _next(plan, (text, mask, columns)), _next(plan, before + added)

    def compare(carry: Any, of_images: Any) -> tuple[Any, Array]:
      """Adds the gradients of a chunk of images and the texts that the device has now."""
      added, dscale, dbias = carry
      (image, valid, rows), dimage = of_images
      dots, counts = _dots(image, text), _counts(valid, mask)
      logits = scale * dots + bias
      if rows is None:
        p = jax.nn.sigmoid(logits)
      else:
        p = (jnp.exp(logits - rows[:, None]) + jnp.exp(logits - columns[None])) / 2
      p = p if counts is None else jnp.where(counts > 0, p, 0.)
      narrow = p.astype(image.dtype)
      added = added + jnp.dot(narrow.T, image, preferred_element_type=jnp.float32)
      dimage = dimage + jnp.dot(narrow, text, preferred_element_type=jnp.float32)
      return (added, dscale + (p * dots).sum(), dbias + p.sum()), dimage

    (added, dscale, dbias), dimage = _chunked(
        plan, compare, (zeros, dscale, dbias), ((image_bE, mask_b, rows_b), dimage))
    return (following, before, added, dimage, dscale, dbias), None

  begin = ((text_bE, mask_b, columns_b), zeros, zeros, jnp.zeros(image_bE.shape), jnp.zeros(()), jnp.zeros(()))
  (_, before, added, dimage, dscale, dbias), _ = lax.scan(step, begin, None, plan.size)
  dtext = _next(plan, before + added)
  valid_b = jnp.ones(len(image_bE)) if mask_b is None else mask_b
  dimage, dtext = dimage - valid_b[:, None] * text_bE, dtext - valid_b[:, None] * image_bE
  dscale, dbias = dscale - (valid_b * _own(image_bE, text_bE)).sum(), dbias - valid_b.sum()
  return (dimage * (scale * cotangent), dtext * (scale * cotangent), _summed(plan, dscale * cotangent),
          _summed(plan, dbias * cotangent))


def _chunked(plan: Plan, function: Callable[[Any, Any], tuple[Any, Any]], carry: Any, rows: Any) -> tuple[Any, Any]:
  """Scans a function over chunks of the rows of this device, a tree of arrays `[b, ...]`."""
  num_rows = jax.tree.leaves(rows)[0].shape[0]
  if num_rows == plan.chunk:
    return function(carry, rows)
  chunks = jax.tree.map(lambda x: x.reshape(num_rows // plan.chunk, plan.chunk, *x.shape[1:]), rows)
  carry, results = lax.scan(function, carry, chunks)
  return carry, jax.tree.map(lambda x: x.reshape(num_rows, *x.shape[2:]), results)


def _merged(sums: Sums, logits: Array, axis: int) -> Sums:
  """Returns running sums that include more logits, summed over one axis of them."""
  largest = jnp.maximum(sums.largest, logits.max(axis))
  more = jnp.exp(logits - jnp.expand_dims(largest, axis)).sum(axis)
  return Sums(largest, sums.total * jnp.exp(sums.largest - largest) + more)


def _next(plan: Plan, tree: Any) -> Any:
  """Returns the arrays of the previous device in the ring."""
  if not plan.axes:
    return tree
  route = [(i, (i + 1) % plan.size) for i in range(plan.size)]
  return jax.tree.map(lambda x: lax.ppermute(x, plan.axes, route), tree)


def _summed(plan: Plan, x: Array) -> Array:
  """Returns the sum over the devices of the ring."""
  return lax.psum(x, plan.axes) if plan.axes else x


def _dots(image: Array, text: Array) -> Array:
  """Returns the products of all pairs, f32."""
  return jnp.einsum('ie,je->ij', image, text, preferred_element_type=jnp.float32)


def _own(image: Array, text: Array) -> Array:
  """Returns the product of each image with its own text, f32."""
  return (image.astype(jnp.float32) * text.astype(jnp.float32)).sum(-1)


def _counts(valid: Array | None, mask: Array | None) -> Array | None:
  """Returns a number above 0 for each pair that counts, from the masks of images and texts; None = all pairs count."""
  return None if valid is None or mask is None else valid[:, None] * mask[None]
