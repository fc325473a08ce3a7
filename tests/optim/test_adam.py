"""Adam's moments against optax, and that a gradient that is not finite leaves them as they were."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.optim import adam, optimizers

LENGTHS = Lengths(num_examples=370, batch_size=37, total_steps=100)
KINDS = [schema.AdamW(), schema.AdamW(mu_dtype=schema.DType.BF16), schema.Adam(weight_decay=.1), schema.Lamb(),
         schema.Lars(trust_ratio_mask=['.*']), schema.Lion(), schema.Sgd(), schema.Adafactor(),
         schema.Muon(matrices=('head/kernel',), dtype=schema.DType.F32), schema.ScheduleFree()]


@pytest.fixture(autouse=True)
def factored(monkeypatch: pytest.MonkeyPatch) -> None:
  """Adafactor factors the second moment of the small matrices here."""
  monkeypatch.setattr('vit_jax.optim.adafactor.LEAST', 2)


def tree(seed: int) -> dict[str, dict[str, jax.Array]]:
  rng = np.random.default_rng(seed)
  return {'head': {'kernel': jax.device_put(np.float32(rng.normal(size=(5, 7)))),
                   'bias': jax.device_put(np.float32(rng.normal(size=7)))}}


def test_equals_optax() -> None:
  ours, theirs = adam.scale_by_adam(.9, .99, 1e-8, jnp.float32), optax.scale_by_adam(.9, .99, 1e-8)
  mine, other = ours.init(tree(0)), theirs.init(tree(0))
  assert jax.tree.structure(mine) == jax.tree.structure(other)
  both = jax.jit(lambda grads, mine, other: (ours.update(grads, mine), theirs.update(grads, other)))
  for step in range(5):
    (got, mine), (want, other) = both(tree(step), mine, other)
    chex.assert_trees_all_close((got, mine), (want, other), rtol=2e-6)


@pytest.mark.parametrize('kind', KINDS, ids=lambda kind: '-'.join(
    [type(kind).__name__, *([kind.mu_dtype.name] if hasattr(kind, 'mu_dtype') else [])]))
def test_a_gradient_that_is_not_finite_leaves_the_state_as_it_was(kind: optimizers.Kind) -> None:
  optimizer = optimizers.build(kind, lambda step: jnp.asarray(.1), lengths=LENGTHS)
  update = jax.jit(optimizer.update)
  more = {'step': jnp.zeros((), jnp.int32), 'grad_norm': jnp.ones(())}
  state = update(tree(1), optimizer.init(tree(0)), tree(0), ok=jnp.asarray(True), **more)[1]
  bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan), tree(2))
  kept = update(bad, state, tree(0), ok=jnp.asarray(False), **more)[1]
  chex.assert_trees_all_equal(kept, state)
  moved = update(tree(2), state, tree(0), ok=jnp.asarray(True), **more)[1]
  assert any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(state), strict=True))
