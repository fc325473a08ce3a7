"""Random keys for a part of the rows of a batch: they draw what the key of the whole draws for these rows.

A run that continues on fewer slices divides each microbatch into more parts, which must not change its random numbers.
So the key of a part is a key of another implementation, which draws for all rows and returns those of the part; code
that draws one number or more for each row, as dropout does, needs no change. Numbers that are drawn for no row, such as
a scalar, are the same in all parts.
"""
from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp

from vit_jax.core.types import Array, Key


def of_part(key: Key, number: Array, *, parts: int, rows: int) -> Key:
  """Returns the key of the rows `number, number + parts, number + 2 * parts, …` of `parts * rows` rows.

  An array that is drawn with it is that of `key` for all rows, reduced to these rows, if its first dimension is a
  multiple of `rows`: each row may have several consecutive entries, such as its crops.

  Args:
    key: a scalar key, of all rows.
    number: i32 scalar, 0 to `parts - 1`; may be traced.
    parts: parts that the rows are divided into.
    rows: of one part.
  """
  data = jnp.append(jax.random.key_data(key), jnp.asarray(number).astype(jnp.uint32))
  return jax.random.wrap_key_data(data, impl=_implementation(jax.random.key_impl(key), parts, rows))


@functools.cache  # jax compares implementations by identity
def _implementation(whole: Hashable, parts: int, rows: int) -> Any:
  """Returns the implementation of keys whose data are those of a key of `whole`, and the number of the part."""
  def unwrap(data: Array) -> Key:
    return jax.random.wrap_key_data(data[:-1], impl=whole)

  def seed(number: Array) -> Array:
    return jnp.append(jax.random.key_data(jax.random.key(number, impl=whole)), jnp.uint32(0))

  def split(data: Array, shape: tuple[int, ...]) -> Array:
    keys = jax.random.key_data(jax.random.split(unwrap(data), shape))
    return jnp.concatenate([keys, jnp.broadcast_to(data[-1], (*shape, 1))], axis=-1)

  def fold_in(data: Array, number: int) -> Array:
    return jnp.append(jax.random.key_data(jax.random.fold_in(unwrap(data), number)), data[-1])

  def random_bits(data: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    dtype = jnp.dtype(f'uint{bit_width}')
    if not shape or shape[0] % rows:
      return jax.random.bits(unwrap(data), shape, dtype)
    bits = jax.random.bits(unwrap(data), (shape[0] * parts, *shape[1:]), dtype)
    by_part = bits.reshape(rows, parts, shape[0] // rows, *shape[1:])
    return jax.lax.dynamic_index_in_dim(by_part, data[-1], axis=1, keepdims=False).reshape(shape)

  num = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=whole))).shape[0]
  return jax.extend.random.define_prng_impl(key_shape=(num + 1,), seed=seed, split=split, random_bits=random_bits,
                                            fold_in=fold_in, name=f'part_of_{parts}x{rows}', tag='part')
