"""Depthwise convolution, `y[b, p, c] = sum_t x[b, s p + t, c] w[t, c]`, with a gradient written by hand.

XLA's CPU compiler has no fast form of it: on a CPU a loop over the taps of the kernel, each a multiplication of
complete maps, is 5 to 50 times as fast forwards and backwards. On other devices XLA's own convolution is used. Both
compute the same; the platform that a program is lowered for decides, so that a plan for a TPU made on a CPU is right.

Knows nothing of parameters or modules.
"""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from vit_jax.core.types import Array

LAYOUT = ('NHWC', 'HWIO', 'NHWC')
Pads = tuple[tuple[int, int], tuple[int, int]]


def plain_depthwise(x: Array, kernel: Array, stride: int, pads: Pads) -> Array:
  """The convolution of XLA.

  Args:
    x: `[B, H, W, C]`.
    kernel: `[side, side, 1, C]`, same dtype.
    stride: in both directions.
    pads: zeros before and after, of height and width.
  """
  return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=LAYOUT,
                                  feature_group_count=x.shape[-1])


def by_taps(x: Array, kernel: Array, *, stride: int, pads: Pads) -> Array:
  """The same as a loop over the taps."""
  side, x = kernel.shape[0], _padded(x, pads)
  size = (x.shape[1] - side) // stride + 1, (x.shape[2] - side) // stride + 1
  taps_TC = kernel.reshape(side * side, -1)

  def add(t: Array, y: Array) -> Array:
    return y + _shifted(x, t, side, size, stride) * lax.dynamic_index_in_dim(taps_TC, t)[:, None, None]

  return lax.fori_loop(0, side * side, add, jnp.zeros((x.shape[0], *size, x.shape[3]), x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def depthwise(x: Array, kernel: Array, stride: int, pads: Pads) -> Array:
  """Equal to `plain_depthwise`; reverse-mode differentiation only."""
  forms = (functools.partial(form, stride=stride, pads=pads) for form in (by_taps, plain_depthwise))
  cpu, other = forms
  return lax.platform_dependent(x, kernel, cpu=cpu, default=other)


def _forward(x: Array, kernel: Array, stride: int, pads: Pads) -> tuple[Array, tuple[Array, Array]]:
  return depthwise(x, kernel, stride, pads), (x, kernel)


def _backward(stride: int, pads: Pads, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
  """`dw[t, c] = sum_bp x[b, s p + t, c] dy[b, p, c]`, and dx: dy, spread by the stride, times the flipped kernel."""
  cpu, other = (functools.partial(form, stride=stride, pads=pads) for form in (_gradient_by_taps, _plain_gradient))
  dx, dkernel = lax.platform_dependent(*saved, dy, cpu=cpu, default=other)
  return dx, dkernel


def _plain_gradient(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads) -> tuple[Array, Array]:
  _, pull = jax.vjp(functools.partial(plain_depthwise, stride=stride, pads=pads), x, kernel)
  dx, dkernel = pull(dy)
  return dx, dkernel


def _gradient_by_taps(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads) -> tuple[Array, Array]:
  side, padded = kernel.shape[0], _padded(x, pads)

  def of_tap(t: Array) -> Array:
    products = _shifted(padded, t, side, (dy.shape[1], dy.shape[2]), stride) * dy
    return products.sum((0, 1, 2), dtype=jnp.float32).astype(dy.dtype)

  dkernel = lax.map(of_tap, jnp.arange(side * side)).reshape(kernel.shape)
  before = [side - 1 - pad[0] for pad in pads]
  after = [x.shape[i + 1] + side - 1 - before[i] - (dy.shape[i + 1] - 1) * stride - 1 for i in (0, 1)]
  spread = [(before[i], after[i], stride - 1) for i in (0, 1)]
  spread_dy = lax.pad(dy, jnp.zeros((), dy.dtype), [(0, 0, 0), *spread, (0, 0, 0)])
  return by_taps(spread_dy, kernel[::-1, ::-1], stride=1, pads=((0, 0), (0, 0))), dkernel


depthwise.defvjp(_forward, _backward)


def _padded(x: Array, pads: Pads) -> Array:
  return jnp.pad(x, ((0, 0), *pads, (0, 0)))


def _shifted(x: Array, t: Array, side: int, size: tuple[int, int], stride: int) -> Array:
  """What tap `t` of each place of a map of `size` reads."""
  reach = [(n - 1) * stride + 1 for n in size]
  part = lax.dynamic_slice(x, (0, t // side, t % side, 0), (x.shape[0], *reach, x.shape[3]))
  return part[:, ::stride, ::stride] if stride > 1 else part
