"""The metrics of a step leave the devices as one array."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Mean
from vit_jax.train.state import Norms, Packed, StepMetrics, pack


def test_metrics_leave_a_step_as_one_array_and_come_back_bit_by_bit() -> None:
  norms = Norms({'b': jnp.asarray([1., jnp.inf, 3.])}, {'a': jnp.asarray(0.1), 'b': jnp.asarray([[4., 5.]])}, {})
  given = StepMetrics({'loss': Mean(jnp.asarray(jnp.nan), jnp.asarray(7.))}, jnp.asarray(1e-30), norms,
                      jnp.asarray(False))
  packed = jax.jit(pack)(given)
  assert isinstance(packed, Packed) and [x.shape for x in jax.tree.leaves(packed)] == [(3 + 1 + 2 + 2 + 1 + 1,)]
  got = packed.unpack()
  assert not bool(got.ok) and bool(pack(given._replace(ok=jnp.asarray(True))).unpack().ok)
  chex.assert_trees_all_equal(got, given)
  assert jax.tree.all(jax.tree.map(lambda x: isinstance(x, np.ndarray), got))  # no device has to be asked again
