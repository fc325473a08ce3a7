"""Frozen parameters: nothing about them moves, and afterwards they begin as at the start of a run."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core import trees
from vit_jax.optim import optimizers

LENGTHS = Lengths(num_examples=370, batch_size=37, total_steps=20)
START = {'backbone': {'kernel': np.arange(1., 7., dtype=np.float32).reshape(2, 3)},
         'head': {'kernel': np.ones((3, 7), np.float32)}}
HEAD = {'head': START['head']}


def grads(step: int | jax.Array) -> dict[str, object]:
  return jax.tree.map(lambda x: jnp.cos(x + step), START)


def take(optimizer: optax.GradientTransformationExtraArgs, params: dict, steps: range,
         offset: int = 0) -> tuple[dict, object]:
  state = jax.jit(optimizer.init)(params)

  @jax.jit
  def after(params: dict, state: object, step: jax.Array) -> tuple[dict, object]:
    mine = {k: grads(step)[k] for k in params}
    updates, state = optimizer.update(mine, state, params, step=step - offset, grad_norm=optax.tree.norm(mine))
    return optax.apply_updates(params, updates), state

  for step in steps:
    params, state = after(params, state, jnp.asarray(step))
  return params, state


def build(kind: type, **settings: object) -> optax.GradientTransformationExtraArgs:
  return optimizers.build(kind(weight_decay=.1, **settings), lambda step: jnp.asarray(.1), lengths=LENGTHS)


def close(a: object, b: object) -> None:
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), a, b)


@pytest.mark.quick('AdamW', reason='1 s: another program')
@pytest.mark.parametrize('kind', [schema.AdamW, schema.Adafactor, schema.Sgd])
def test_what_thaws_begins_as_at_the_start_and_clipping_sees_what_moves(kind: type) -> None:
  frozen = build(kind, rules=(schema.PathRule('backbone/.*', frozen_until='3 steps'),))
  early, state = take(frozen, START, range(3))
  np.testing.assert_array_equal(early['backbone']['kernel'], START['backbone']['kernel'])
  moments = {k: v for k, v in trees.flatten(state).items() if k.endswith('backbone/kernel')}
  assert moments and all((np.asarray(v, np.float32) == 0).all() for v in moments.values())
  close(early['head'], take(build(kind, weight_decay_mask=('head/kernel',)), HEAD, range(3))[0]['head'])
  after, _ = take(build(kind, rules=(schema.PathRule('backbone/.*', frozen_until='3 steps'),), clip_norm=0.), START,
                  range(5))
  alone, _ = take(build(kind, clip_norm=0.), {'backbone': START['backbone']}, range(3, 5), offset=3)
  close(after['backbone'], alone['backbone'])


def test_what_is_frozen_for_good_has_no_state_and_no_decay() -> None:
  optimizer = build(schema.AdamW, rules=(schema.PathRule('backbone/.*', frozen_until='100 %'),))
  params, state = take(optimizer, START, range(4))
  np.testing.assert_array_equal(params['backbone']['kernel'], START['backbone']['kernel'])
  assert not [k for k in trees.flatten(state) if 'backbone' in k]
  assert np.abs(params['head']['kernel'] - 1.).min() > .02


@pytest.mark.parametrize('kind', [schema.AdamW, schema.Adafactor, schema.Sgd])
def test_all_parameters_may_be_frozen_for_some_steps(kind: type) -> None:
  optimizer = build(kind, rules=(schema.PathRule('.*', frozen_until='2 steps'),))
  for num_steps, is_moved in ((2, False), (4, True)):
    moved = take(optimizer, START, range(num_steps))[0]
    assert (moved['head']['kernel'] != START['head']['kernel']).any() == is_moved


def test_several_lengths_are_kept_apart() -> None:
  optimizer = build(schema.Sgd, rules=(schema.PathRule('backbone/.*', frozen_until='1 step'),
                                       schema.PathRule('head/.*', frozen_until='2 steps')))
  moved = [[bool(np.any(take(optimizer, START, range(n))[0][k]['kernel'] != START[k]['kernel']))
            for k in ('backbone', 'head')] for n in (1, 2, 3)]
  assert moved == [[False, False], [True, False], [True, True]]
