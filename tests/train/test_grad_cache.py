"""Microbatches of objectives that compare the examples of a batch: the gradient is that of the whole batch."""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import fakes, programs
from vit_jax.config import check, schema
from vit_jax.config.schema import PairForm, PairLoss
from vit_jax.core import contracts, trees
from vit_jax.core.contracts import Objective
from vit_jax.jobs import build
from vit_jax.parallel import layout
from vit_jax.train import grad_cache
from vit_jax.train.state import TrainState

MODEL = schema.ViT(patch=4, width=16, depth=1, heads=2, mlp=schema.Mlp(16))
TEXT = schema.Text(length=6, width=12, depth=1, heads=2, mlp=16)
RNG = np.random.default_rng(0)
PAIRS = {'image': RNG.integers(0, 256, (32, 8, 8, 3), dtype=np.uint8),
         'text': RNG.integers(3, 259, (32, 6)).astype(np.int32), 'text_mask': np.ones((32, 6), bool),
         'mask': (np.arange(32) % 5 > 0).astype(np.float32)}
LARGE = {name: np.repeat(x, 16, 0) for name, x in PAIRS.items()}
FROZEN = schema.AdamW(rules=(schema.PathRule('backbone/.*', frozen_until='100 %'),))
SAME = {'rtol': 2e-5, 'atol': 2e-6}


def contrastive(**objective: Any) -> schema.Config:
  return schema.Config(image_px=(8, 8), model=MODEL, length='10 steps', batch_size=32,
                       objective=schema.Contrastive(**{'text': TEXT, 'scale_init': 3., **objective}))


def task(config: schema.Config) -> Objective:
  config = layout.plain(config)
  check.check(config)
  lengths = build.durations.lengths(config.length, num_examples=100, batch_size=32)
  return build.build_objective(config, build.build_backbone(config), 0, lengths=lengths)


def step(config: schema.Config, settings: str = 'one', accumulate: int = 1,
         batch: dict[str, np.ndarray] = PAIRS) -> tuple[Any, Any]:
  """Parameters, metrics and gradient norm after one step of plain gradient descent."""
  program = programs.build(task(config), fakes.normalize, programs.MESHES[settings], like=batch, accumulate=accumulate,
                           optimizer=schema.Sgd(weight_decay=0., clip_norm=0., momentum=0.))
  state, metrics = programs.run(program, programs.MESHES[settings], batch)
  return state.params, (metrics.means, metrics.grad_norm)


@functools.cache
def whole(loss: PairLoss) -> tuple[Any, Any]:
  return step(contrastive(loss=loss))


@pytest.mark.parametrize(('loss', 'settings', 'form'), [
    (PairLoss.SIGMOID, 'one', PairForm.MATRIX), (PairLoss.SOFTMAX, 'data=8', PairForm.MATRIX),
    (PairLoss.SIGMOID, 'data=2,fsdp=2,tensor=2', PairForm.RING)])
def test_microbatches_have_the_loss_and_the_gradient_of_the_whole_batch(
    loss: PairLoss, settings: str, form: PairForm) -> None:
  programs.assert_close(step(contrastive(loss=loss, form=form), settings, accumulate=4), whole(loss), **SAME)


@pytest.mark.slow(reason='5 s: compiles two steps')
def test_the_compiled_step_needs_less_memory_with_microbatches() -> None:
  def temporaries(accumulate: int) -> int:
    program = programs.build(task(contrastive()), fakes.normalize, programs.MESHES['one'], like=LARGE,
                             accumulate=accumulate, optimizer=schema.Sgd(weight_decay=0., clip_norm=0., momentum=0.))
    return int(program.step_fn.lower(program.abstract_state, LARGE).compile().memory_analysis().temp_size_in_bytes)

  assert temporaries(16) < .5 * temporaries(1)


def test_scale_and_bias_learn_from_all_pairs_and_a_frozen_tower_does_not() -> None:
  config = dataclasses.replace(contrastive(), optimizer=FROZEN)
  begun = task(config).init(jax.random.key(0), {name: jnp.asarray(x) for name, x in PAIRS.items()})[0]
  params, _ = step(config, accumulate=4)
  programs.assert_close(params, step(config)[0], **SAME)
  for name, moved in trees.flatten(params['logits']).items():
    assert moved != begun['logits'][name]


def test_both_passes_draw_the_same_dropout() -> None:
  """The gradient is that of all rows, each microbatch drawn with its key."""
  objective = task(dataclasses.replace(contrastive(), model=dataclasses.replace(MODEL, dropout=.3, drop_path=.3)))
  batch = {**PAIRS, 'image': jnp.asarray(PAIRS['image'], jnp.float32) / 255.}
  params, extra = objective.init(jax.random.key(0), batch)
  state, coupling = TrainState(jnp.zeros((), jnp.int32), params, {}, extra), contracts.coupling(objective)
  keys, micros = jax.random.split(jax.random.key(1), 4), grad_cache.divided(batch, 4)
  assert coupling

  def total(params: Any) -> jax.Array:
    rows = [coupling.embed(params, extra, jax.tree.map(lambda x, i=i: x[i], micros), keys[i], state.step)[0]
            for i in range(4)]
    joined = jax.tree.map(lambda *parts: jnp.stack(parts, 1).reshape(-1, *parts[0].shape[1:]), *rows)
    return coupling.compare(params, extra, joined, batch, keys[0], state.step).loss.value

  out, grads = grad_cache.gradients(coupling, state, batch, keys[0], micros, lambda i: keys[i])
  programs.assert_close((out.loss.value, grads), jax.value_and_grad(total)(params), **SAME)


@pytest.mark.slow(reason='3 s: two compiled steps')
def test_an_average_and_adapters_keep_the_comparison_of_the_whole_batch() -> None:
  config = dataclasses.replace(contrastive(), lora=schema.Lora(rank=2), train=schema.Train(ema=.9))
  programs.assert_close(step(config, accumulate=4), step(config), **SAME)


@pytest.mark.slow(reason='3 s: two compiled steps')
def test_lejepa_compares_the_views_of_the_whole_batch() -> None:
  views = {'views_global': RNG.normal(size=(16, 2, 8, 8, 3)).astype(np.float32),
           'views_local': RNG.normal(size=(16, 2, 4, 4, 3)).astype(np.float32)}
  config = schema.Config(image_px=(8, 8), model=dataclasses.replace(MODEL, pool=schema.Mean()), batch_size=16,
                         objective=schema.LeJepa(hidden_dim=16, out_dim=8, directions=16), length='10 steps',
                         head=schema.Head())
  lengths = build.durations.lengths('10 steps', num_examples=100, batch_size=16)
  made = build.build_objective(layout.plain(config), build.build_backbone(layout.plain(config)), 0, lengths=lengths)

  def after(accumulate: int) -> Any:
    program = programs.build(made, lambda batch, key, step: batch, programs.MESHES['one'], like=views,
                             accumulate=accumulate, optimizer=schema.Sgd(weight_decay=0., clip_norm=0.))
    state, metrics = programs.run(program, programs.MESHES['one'], views)
    return state.params['backbone'], metrics.means['sigreg']

  # SIGReg draws its directions once for the batch, with the same key for any number of microbatches.
  programs.assert_close(after(4), after(1), **SAME)
