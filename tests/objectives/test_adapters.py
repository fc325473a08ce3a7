"""Training of adapters: what has gradients and optimizer state, what stays, and what any objective makes of it."""
from __future__ import annotations

from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.models import adapters as models
from vit_jax.models import backbones, heads
from vit_jax.objectives import adapters, ema
from vit_jax.objectives.supervised import Supervised

MODEL = schema.ViT(patch=4, width=16, depth=2, heads=4, mlp=schema.Mlp(24))
LORA = schema.Lora(rank=2, alpha=4., dora=True, targets='query,out,mlp/.*')


def config(lora: schema.Lora = LORA, **more: Any) -> schema.Config:
  return schema.Config(image_px=(8, 8), model=MODEL, lora=lora, **more)


def supervised(lora: schema.Lora, *, decay: float = 0.) -> Any:
  task = adapters.around(Supervised(backbones.build(MODEL, (8, 8)), heads.Head(schema.Head()), num_classes=7,
                                    loss=schema.Loss.SOFTMAX, label_smoothing=0.), lora)
  return ema.Ema(task, ema.Growing(decay)) if decay else task


def program(mesh: str = 'one', lora: schema.Lora = LORA, **how: Any) -> Any:
  return programs.build(supervised(lora, decay=how.pop('decay', 0.)), fakes.normalize, programs.MESHES[mesh],
                        like=programs.batch(), optimizer=schema.AdamW(), **how)


def test_only_adapters_and_head_are_parameters_and_have_optimizer_state() -> None:
  state = program().abstract_state
  names = trees.flatten(state.params).keys()
  layers = [f'backbone/blocks/{name}' for name in ('attn/query', 'attn/out', 'mlp/up', 'mlp/down')]
  assert names == {'head/kernel', 'head/bias', *(f'{layer}/{leaf}' for layer in layers for leaf in models.STORED)}
  moments = [x for x in jax.tree.leaves(state.opt) if x.ndim]
  assert trees.num_bytes(moments) == 2 * trees.num_bytes(state.params)
  whole, _ = jax.eval_shape(backbones.build(MODEL, (8, 8)).init, jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
  assert trees.flatten(state.extra['frozen']['backbone']).keys() == trees.flatten(whole).keys()


@pytest.mark.slow(reason='2 s: compiles a train step')
def test_the_backbone_does_not_change_while_adapters_and_head_do() -> None:
  made = program(decay=.5)
  before = jax.device_get(made.init_fn())
  after, metrics = programs.run(made, programs.MESHES['one'], programs.batch(), 3, start=before)
  frozen = (trees.flatten(state.extra['inner']['frozen']) for state in (before, after))
  for a, b in zip(*(one.values() for one in frozen), strict=True):
    np.testing.assert_array_equal(a, b)
  old, new = trees.flatten(before.params), trees.flatten(after.params)
  assert all((old[name] != new[name]).any() for name in old)
  assert set(metrics.norms.grad) == set(old)
  view = supervised(LORA, decay=.5).views()['ema']
  selected = view.select(after.params, after.extra)
  assert 'lora_a' not in selected['backbone']['blocks']['attn']['query']


@pytest.mark.slow(reason='6 s: compiles train steps for several meshes')
def test_a_step_is_the_same_on_every_mesh_and_shards_the_frozen_kernels() -> None:
  start = jax.device_get(program().init_fn())
  want, _ = programs.run(program(), programs.MESHES['one'], programs.batch(), 2, start=start)
  sharded = program('data=2,fsdp=2,tensor=2')
  got, _ = programs.run(sharded, programs.MESHES['data=2,fsdp=2,tensor=2'], programs.batch(), 2, start=start)
  for name, x in trees.flatten(want.params).items():
    np.testing.assert_allclose(trees.flatten(got.params)[name], x, rtol=1e-3, atol=2e-4, err_msg=name)
  kernel = sharded.shardings.extra['frozen']['backbone']['blocks']['mlp']['up']['kernel']
  assert kernel.shard_shape((2, 16, 24)) == (2, 8, 12)


@pytest.mark.parametrize('targets', ['query', 'value,mlp/down', 'out,up'])
def test_every_choice_of_layers_has_the_rules_that_it_needs(targets: str) -> None:
  lora = schema.Lora(rank=2, targets=targets)
  assert program(lora=lora).shardings  # raises if a leaf has no rule, or a rule no leaf


def test_an_objective_with_a_teacher_gets_the_merged_parameters() -> None:
  class Teaching:
    def after_update(self, params: Any, extra: Any, stats: Any, step: Any) -> Any:
      return {'teacher': jax.tree.map(lambda t, p: t + p, extra['teacher'], params)}

  rng = np.random.default_rng(0)
  path = 'backbone/blocks/mlp/up/'
  leaves = {name: jax.device_put(np.float32(rng.normal(size=s)))
            for name, s in (('kernel', (1, 6, 5)), ('lora_a', (1, 6, 2)), ('lora_b', (1, 2, 5)))}
  lora = schema.Lora(rank=2, alpha=6.)
  params = trees.unflatten({f'{path}{name}': leaves[name] for name in ('lora_a', 'lora_b')})
  frozen = trees.unflatten({f'{path}kernel': leaves['kernel']})
  got = adapters.Adapters(Teaching(), lora).after_update(  # type: ignore[arg-type]
      params, {'frozen': frozen, 'inner': {'teacher': jax.tree.map(jnp.zeros_like, frozen)}}, {}, jnp.asarray(0))
  want = leaves['kernel'] + 3. * leaves['lora_a'] @ leaves['lora_b']
  np.testing.assert_allclose(trees.flatten(got['inner']['teacher'])[f'{path}kernel'], want, rtol=1e-5, atol=1e-5)
  assert got['frozen'] is frozen


def test_a_step_costs_about_two_thirds_of_full_training() -> None:
  full, of_lora = (programs.train_flops(schema.Config(lora=lora)) for lora in (schema.Lora(), schema.Lora(rank=8)))
  # B/16: of 3 products of each kernel one is left out; attention itself keeps its 3; rank 8 adds 1.6 %.
  kernels = 12 * 197 * (4 * 768 ** 2 + 2 * 768 * 3072)
  added = 12 * 197 * 8 * (4 * 2 * 768 + 2 * (768 + 3072))
  stem = 196 * 768 * 768  # is frozen too
  assert of_lora == full + 2 * (3 * added - kernels - stem) and .66 < of_lora / full < .72
