"""Tests of the options of a ViT on a mesh: each parameter has a rule, and gradients are the same on any mesh."""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import vits

from vit_jax.config import check, schema
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.jobs import build
from vit_jax.recipes import sizes

DATA = fakes.normalized(programs.batch(size=16, px=16))
SPLIT = 'data=2,fsdp=2,tensor=2'


def config(model: schema.ViT) -> schema.Config:
  return schema.Config(image_px=(16, 16), batch_size=16, model=model)


@functools.cache
def found(name: str, settings: str) -> dict[str, Any]:
  c = config(dataclasses.replace(vits.MODELS[name], width=16, mlp=24, execution=schema.Execution.SCAN,
                                 attention_dropout=0., dropout=0., drop_path=0.))  # random masks: test_invariance.py
  task = build.build_objective(c, build.build_backbone(c), 7, lengths=programs.LENGTHS)
  return programs.gradients(task, programs.MESHES[settings], batch=DATA)


@pytest.mark.slow(reason='4 to 11 s: two programs of a network')
@pytest.mark.parametrize('name', ['gated', *(pytest.param(name, marks=pytest.mark.slow(reason='4 s'))
                                             for name in ('parallel', 'axial'))])
def test_gradients_agree_on_one_device_and_on_a_mesh_split_three_ways_and_reach_every_parameter(name: str) -> None:
  for path, leaf in trees.flatten(found(name, 'one')['gradient']).items():
    assert np.abs(leaf).max() > 0. or path.endswith('key/bias'), path
  for part, want in found(name, 'one').items():
    # The longest sums are over the 16 x 9 tokens of the batch; two layers have some 30 operations, forth and back.
    programs.assert_reordered(found(name, SPLIT)[part], want, terms=144, operations=30)


@pytest.mark.parametrize('name', [*vits.MODELS, *sizes.POSITION_ABLATION])
def test_parameters_are_split_as_their_axes_say(name: str) -> None:
  if (model := vits.MODELS.get(name)) is None:
    kind, at = sizes.POSITION_ABLATION[name]
    model = dataclasses.replace(sizes.vit('mu/8'), positions=kind, positions_at=at)
  c = config(dataclasses.replace(model, patch=8, heads=4))
  specs, _ = programs.specs(build.build_backbone(c).init, jax.random.key(0), jnp.zeros((1, 16, 16, 3)),
                            on=programs.mesh(programs.MESHES[SPLIT]))
  blocks = specs['blocks']['row'] if c.model.axial else specs['blocks']
  assert tuple(blocks['attn']['query']['kernel']) == (None, 'fsdp', 'tensor', None)
  if name == 'gated':
    assert tuple(blocks['mlp']['gate']['kernel']) == (None, 'fsdp', 'tensor')
    assert tuple(specs['pool']['mlp']['down']['kernel']) == ('tensor', 'fsdp')
  if name == 'relative':
    assert tuple(blocks['attn']['relative']) == (None, None, 'tensor', None)


def test_options_that_do_not_fit_are_refused_with_their_values() -> None:
  wrong = schema.ViT(axial=True, parallel=True, layer_scale=1e-5, positions=schema.Positions.NONE,
                     positions_at=schema.PositionsAt.SHARED, registers=-1)
  with pytest.raises(UserError) as error:
    check.check(schema.Config(model=wrong))
  for said in ('model.registers: expected at least 0, got -1.',
               'model.positions_at: expected stem with model.positions=none, got shared.',
               'model.layer_scale: expected 0 with model.parallel=True, which has one sum of both branches, got 1e-05.',
               'model.pool: expected mean or map, which have no class token, with model.axial=True, got cls.',
               'model.parallel: expected False with model.axial=True, as no such model is defined, got True.'):
    assert said in str(error.value)
