"""The configs that use the optimizers: each makes the state it should for a full-size model, in shapes."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import check, files
from vit_jax.core import trees
from vit_jax.jobs import build
from vit_jax.optim import optimizers

PARAMS: dict[str, object] = {}
"""Shapes of the parameters, by model, head and objective."""
CHANGES = ('none', 'adam', 'adafactor', 'lamb', 'lion', 'agc', 'wsd', 'steps')


def state(spec: str) -> tuple[object, object]:
  config = files.load(spec, [])
  check.check(config)
  if (text := repr((config.model, config.head, config.objective))) not in PARAMS:
    task = build.build_objective(config, build.build_backbone(config), 7, lengths=programs.LENGTHS)
    image = np.zeros((1, *config.image_px, 3), np.float32)
    PARAMS[text], _ = jax.eval_shape(task.init, jax.random.key(0), {'image': image})
  optimizer = optimizers.build(config.optimizer, lambda step: jnp.asarray(.1), lengths=programs.LENGTHS)
  return PARAMS[text], jax.eval_shape(optimizer.init, PARAMS[text])


@pytest.mark.slow(reason='1 to 2 s of tracing')
@pytest.mark.parametrize('change', CHANGES)
def test_each_change_builds_with_as_many_moments_as_it_has(change: str) -> None:
  params, opt = state(f'optimizers_s16_i1k:change={change}')
  copies = sum(x.size for x in jax.tree.leaves(opt)) / trees.num_elements(params)
  assert copies == pytest.approx({'lion': 1., 'adafactor': 1.}.get(change, 2.), abs=.03)  # the stem is not factored


@pytest.mark.slow(reason='5 s: traces B/16')
def test_adafactor_keeps_half_a_copy_of_the_parameters() -> None:
  params, opt = state('vit_g14_jft3b')
  assert trees.num_bytes(opt) / trees.num_bytes(params) == pytest.approx(.5, abs=.01)  # Scaling ViT, section 3.4
