"""Learning rate by layer and by path, weight decay by rule and over the run."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.optim import masks, optimizers

LENGTHS = Lengths(num_examples=370, batch_size=37, total_steps=20)
SHAPES = {'backbone/stem/kernel': (2, 2, 3, 4), 'backbone/cls': (1, 1, 4), 'backbone/positions': (1, 5, 4),
          'backbone/blocks/mlp/up/kernel': (3, 4, 5), 'backbone/blocks/norm1/scale': (3, 4),
          'backbone/norm/scale': (4,), 'head/kernel': (4, 7), 'decoder/blocks/kernel': (2, 4, 4)}
PARAMS = trees.unflatten({k: np.ones(shape, np.float32) for k, shape in SHAPES.items()})


def move(config: optimizers.Kind, step: int = 0) -> dict[str, np.ndarray]:
  """What one step at rate 1 takes off, for gradients of 1."""
  optimizer = optimizers.build(config, lambda step: jnp.ones(()), lengths=LENGTHS)
  updates = jax.jit(lambda params, step: optimizer.update(
      params, optimizer.init(params), params, step=step, grad_norm=jnp.ones(()))[0])(PARAMS, step)
  return {k: -np.asarray(v) for k, v in trees.flatten(updates).items()}


def test_layers_below_move_less() -> None:
  got = move(schema.Sgd(layer_decay=.5, clip_norm=0.))
  for k in ('stem/kernel', 'cls', 'positions'):
    np.testing.assert_allclose(got[f'backbone/{k}'], .5 ** 4)
  for k in ('mlp/up/kernel', 'norm1/scale'):
    for i in range(3):
      np.testing.assert_allclose(got[f'backbone/blocks/{k}'][i], .5 ** (3 - i))
  np.testing.assert_allclose(got['backbone/norm/scale'], 1.)
  np.testing.assert_allclose(got['head/kernel'], 1.)
  np.testing.assert_allclose(got['decoder/blocks/kernel'], 1.)


def test_layers_need_blocks() -> None:
  optimizer = optimizers.build(schema.Sgd(layer_decay=.5), lambda step: jnp.ones(()), lengths=LENGTHS)
  with pytest.raises(UserError, match='layer_decay: expected 1 for a backbone without transformer blocks'):
    optimizer.init({'backbone': {'conv': {'kernel': jnp.ones((3, 3))}}, 'head': {'kernel': jnp.ones((3, 7))}})


def test_rules_change_rate_and_decay_and_may_move_over_the_run() -> None:
  config = schema.Sgd(weight_decay=.1, clip_norm=0., rules=(
      schema.PathRule('head/.*', lr=10., weight_decay=100.),
      schema.PathRule('backbone/stem/.*', lr=schema.Ramp(0., 1., until='10 steps', curve=schema.Curve.LINEAR))))
  got = move(config, step=5)
  np.testing.assert_allclose(got['head/kernel'], 10. * (1. + 10.), rtol=1e-6)
  np.testing.assert_allclose(got['backbone/stem/kernel'], .5 * 1.1, rtol=1e-6)
  np.testing.assert_allclose(got['backbone/cls'], 1.)


@pytest.mark.quick('AdamW', reason='1 s: another program')
@pytest.mark.parametrize('kind', [schema.AdamW, schema.Adam, schema.Lion, schema.Sgd])
def test_weight_decay_may_rise_over_the_run(kind: type) -> None:
  ramp = schema.Ramp(1., 10., curve=schema.Curve.LINEAR)
  late, alike = (move(kind(weight_decay=wd, weight_decay_ramp=r, clip_norm=0.), step=10)
                 for wd, r in ((.04, ramp), (.04 * 5.5, schema.Ramp())))
  chex.assert_trees_all_close(late, alike, rtol=1e-5)


def test_decay_by_the_schedule_knows_no_factor_of_the_rate() -> None:
  by = schema.DecayBy
  config = {d: schema.AdamW(lr=2., weight_decay=.1, decay_by=d, clip_norm=0.,
                            rules=(schema.PathRule('head/.*', lr=0.),)) for d in by}
  np.testing.assert_allclose(move(config[by.LR])['head/kernel'], 0.)
  np.testing.assert_allclose(move(config[by.SCHEDULE])['head/kernel'], .05, rtol=1e-6)


@pytest.mark.parametrize(('name', 'expected'), [
    ('head/kernel', True), ('head/kernel/lora_a', False), ('head/kernel_scale', False), ('kernel', False)])
def test_a_pattern_is_of_the_whole_name(name: str, expected: bool) -> None:
  assert masks.matches(name, ('.*/kernel',)) is expected
