"""Keys of parts of rows: what they draw is what the key of the whole draws for these rows."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.core import row_keys

ROWS, PARTS = 4, 3
ALL = ROWS * PARTS


def derived(key: jax.Array) -> jax.Array:
  """As blocks of a network get theirs."""
  return jax.vmap(lambda one: jax.random.fold_in(one, 5))(jax.random.split(key, 6))[4]


DRAWS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    'uniform': lambda key, rows: jax.random.uniform(key, (rows, 5)),
    'bernoulli': lambda key, rows: jax.random.bernoulli(key, .5, (rows, 3, 2)),
    'randint': lambda key, rows: jax.random.randint(key, (rows, 7), 1, 9),
    'bits of 16': lambda key, rows: jax.random.bits(key, (rows,), jnp.uint16),
    'crops of an image after one another': lambda key, rows: jax.random.uniform(key, (2 * rows, 3)),
    'of a derived key': lambda key, rows: jax.random.normal(derived(key), (rows, 3))}


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg'])
@pytest.mark.parametrize('name', DRAWS)
def test_a_part_draws_its_rows_of_the_whole(name: str, impl: str) -> None:
  key = jax.random.key(3, impl=impl)
  whole = np.asarray(DRAWS[name](key, ALL))
  by_part = whole.reshape(ROWS, PARTS, len(whole) // ALL, *whole.shape[1:])
  for i in range(PARTS):
    got = jax.jit(lambda key, i: DRAWS[name](row_keys.of_part(key, i, parts=PARTS, rows=ROWS), ROWS))(key, i)
    np.testing.assert_array_equal(got, by_part[:, i].reshape(got.shape))
  assert not np.array_equal(by_part[:, 0], by_part[:, 1])


def test_what_is_drawn_for_no_row_is_the_same_in_all_parts() -> None:
  key = jax.random.key(0)
  for shape in ((), (ROWS + 1, 2)):
    found = [jax.random.uniform(row_keys.of_part(key, i, parts=PARTS, rows=ROWS), shape) for i in range(PARTS)]
    np.testing.assert_array_equal(found, [jax.random.uniform(key, shape)] * PARTS)


def test_keys_of_parts_pass_scans_and_rematerialization() -> None:
  def draw(key: jax.Array, rows: int) -> jax.Array:
    body = jax.checkpoint(lambda x, one: (x, x * jax.random.uniform(one, (rows,))))
    return jax.lax.scan(body, jnp.ones(rows), jax.random.split(key, 3))[1]

  key = jax.random.key(1)
  got = jax.jit(lambda i: draw(row_keys.of_part(key, i, parts=PARTS, rows=ROWS), ROWS))(1)
  np.testing.assert_array_equal(got, draw(key, ALL)[:, 1::PARTS])
