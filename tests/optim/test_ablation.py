"""The configs that use the optimisers: each makes the state it should for a full-size model, in shapes."""
from __future__ import annotations

import jax
import programs
import pytest

from vit_jax.config import check, files, schema
from vit_jax.core import trees
from vit_jax.jobs import build

CHANGES = ('none', 'adam', 'adafactor', 'lamb', 'lion', 'agc', 'wsd', 'steps')


def state(spec: str) -> tuple[object, object]:
  config = files.load(spec, [])
  check.check(config)
  parts = build.parts(config, mesh=programs.mesh(schema.Mesh(1, 1, 1)), num_examples=config.data.num_examples,
                      num_classes=7, in_memory=False)
  return parts.program.abstract_state.params, parts.program.abstract_state.opt


@pytest.mark.parametrize('change', CHANGES)
def test_each_change_builds_with_as_many_moments_as_it_has(change: str) -> None:
  params, opt = state(f'optimizers_s16_i1k:change={change}')
  copies = sum(x.size for x in jax.tree.leaves(opt)) / trees.num_elements(params)
  assert copies == pytest.approx({'lion': 1., 'adafactor': 1.}.get(change, 2.), abs=.03)  # the stem is not factored


def test_adafactor_keeps_half_a_copy_of_the_parameters() -> None:
  params, opt = state('vit_g14_jft3b')
  assert trees.num_bytes(opt) / trees.num_bytes(params) == pytest.approx(.5, abs=.01)  # Scaling ViT, section 3.4
