"""Every optimizer treats each layer of a stack as a tensor of its own, as it does layers that are no stack."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core import trees, unstacked
from vit_jax.core.types import Array
from vit_jax.optim import optimizers

LENGTHS = Lengths(num_examples=370, batch_size=37, total_steps=100)
EVERY = {
    'adamw': schema.AdamW(weight_decay=.1),
    'adamw by schedule': schema.AdamW(weight_decay=.1, decay_by=schema.DecayBy.SCHEDULE),
    'adam': schema.Adam(weight_decay=.1),
    'adafactor': schema.Adafactor(weight_decay=.1, min_dim_size_to_factor=3),
    'lamb': schema.Lamb(weight_decay=.1),
    'lars': schema.Lars(weight_decay=.1),
    'lion': schema.Lion(),
    'rmsprop': schema.RMSProp(weight_decay=.1),
    'sgd': schema.Sgd(weight_decay=.1),
    'sgd, decoupled': schema.Sgd(weight_decay=.1, decay_by=schema.DecayBy.LR),
    'clipped by tensor': schema.Sgd(clip_norm=0., clip_tensor=.5),
    'clipped adaptively': schema.Sgd(clip_norm=0., clip_adaptive=.01),
    'layer-wise': schema.AdamW(layer_decay=.6, clip_norm=1., mu_dtype=schema.DType.BF16),
    'ruled': schema.AdamW(rules=(schema.PathRule('.*bias', lr=.5, frozen_until='2 steps'),
                                 schema.PathRule('.*kernel', weight_decay=schema.Ramp(1., 3., until='5 steps')))),
}
SHAPES = {'attn/query/kernel': (4, 2, 3), 'attn/query/bias': (2, 3), 'attn/out/kernel': (2, 3, 4),
          'mlp/up/kernel': (4, 5), 'norm1/scale': (4,), 'mlp/up/bias': (5,)}
DEPTH = 3


def layered(seed: int) -> dict[str, object]:
  """Three stacked blocks of a network; layer i is 10 ** i times as large."""
  rng = np.random.default_rng(seed)
  size = 10. ** np.arange(DEPTH)
  leaves = {'backbone/stem/kernel': rng.normal(size=(2, 2, 3, 4)), 'head/kernel': rng.normal(size=(4, 7))} | {
      f'backbone/blocks/{name}': rng.normal(size=(DEPTH, *shape)) * size.reshape(-1, *[1] * len(shape))
      for name, shape in SHAPES.items()}
  return trees.unflatten({k: np.asarray(v, np.float32) for k, v in leaves.items()})


@pytest.mark.quick('adamw', reason='1 to 3 s: two programs; test_multipliers.py has rates by layer')
@pytest.mark.parametrize('name', EVERY)
def test_a_stack_and_its_unstacked_layers_take_the_same_steps(name: str) -> None:
  """One program takes four steps with both; their sums, of up to 28 terms, are rounded in another order."""
  optimizer, start = optimizers.build(EVERY[name], lambda step: .01 * (1. + step), lengths=LENGTHS), layered(0)

  @jax.jit
  def both() -> tuple[object, object]:
    stacked = jax.tree.map(jnp.asarray, start), optimizer.init(start)

    def one(states: tuple[object, object], xs: tuple[object, Array]) -> tuple[tuple[object, object], None]:
      grads, step = xs
      return tuple(_update(optimizer, now, state, given, step) for (now, state), given in zip(
          states, (grads, unstacked.split(grads)), strict=True)), None

    grads = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(leaf) for leaf in x]), *(layered(t + 1) for t in range(4)))
    return jax.lax.scan(one, (stacked, unstacked.split(stacked)), (grads, jnp.arange(4)))[0]

  want, held = both()
  got = unstacked.join(held)
  assert jax.tree.structure(got) == jax.tree.structure(want)
  before = trees.flatten(start)
  for (k, x), y in zip(trees.flatten(got[0]).items(), trees.flatten(want[0]).values(), strict=True):
    np.testing.assert_allclose(x - before[k], y - before[k], rtol=2e-4, atol=1e-6, err_msg=k)
    assert np.abs(y - before[k]).max() > 0, k
  for (k, x), y in zip(trees.flatten(got[1]).items(), trees.flatten(want[1]).values(), strict=True):
    np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2e-4, atol=1e-6, err_msg=k)


def _update(optimizer: optimizers.Optimizer, now: object, state: object, grads: object,
            step: Array) -> tuple[object, object]:
  updates, state = optimizer.update(grads, state, now, step=step, grad_norm=optax.tree.norm(grads))
  return optax.apply_updates(now, updates), state


def test_every_optimizer_is_tried_above() -> None:
  assert {type(c) for c in EVERY.values()} == set(schema.Optimizer.__subclasses__())
