"""The result of a step does not depend on how it is run: mesh, accumulation, rematerialisation, layout."""
from __future__ import annotations

import dataclasses
import functools

import fakes
import jax
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.data.device.prepare import prepare_train
from vit_jax.jobs import build

DATA = programs.batch(size=32, px=16)
MODEL = schema.ViT(patch=4, width=32, depth=2, heads=4, mlp=64)
RECIPE = schema.Recipe(crop=schema.Crop.RESIZE, shift_px=1, rotate_degrees=10., mixup=.5)


def config(**model: object) -> schema.Config:
  return schema.Config(image_px=(16, 16), batch_size=32, model=dataclasses.replace(MODEL, **model),
                       objective=schema.Supervised(label_smoothing=.1), head=schema.Head(pre_logits=8),
                       optimizer=schema.AdamW(clip_norm=1.), train=schema.Train(ema=.9))


@functools.cache
def after(settings: str = 'one', accumulate: int = 1, unstacked_layers: bool = True,
          **model: object) -> tuple[object, object]:
  c, mesh = config(**model), programs.MESHES[settings]
  task = build.build_objective(c, build.build_backbone(c), 7, lengths=programs.LENGTHS)
  prepare = prepare_train(RECIPE, num_classes=7, on_device_geometry=True)
  program = programs.build(task, prepare, mesh, rules=build.build_rules(c), like=DATA, accumulate=accumulate,
                           unstacked_layers=unstacked_layers,
                           optimizer=schema.Sgd(clip_norm=1., weight_decay_mask=('.*/kernel',)))
  state, metrics = programs.run(program, mesh, DATA, 2)
  return state, metrics.means


@pytest.mark.parametrize('settings', [m for m in programs.MESHES if m != 'one'])
def test_steps_agree_on_every_mesh(settings: str) -> None:
  programs.assert_close(after(settings), after())


@pytest.mark.parametrize('num_devices', [2, 4])
def test_steps_agree_on_fewer_devices(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(programs.MESHES, f'data={num_devices}', schema.Mesh(num_devices, 1, 1))
  programs.assert_close(after(f'data={num_devices}'), after())


@pytest.mark.parametrize('settings', ['one', 'data=2,fsdp=4'])
def test_four_microbatches_are_the_whole_batch(settings: str) -> None:
  programs.assert_close(after(settings, accumulate=4), after())


@pytest.mark.parametrize('model', [
    {'execution': schema.Execution.SCAN},
    {'execution': schema.Execution.SCAN, 'remat': schema.Remat.NAMES},
    {'remat': schema.Remat.MLP}, {'remat': schema.Remat.QKV},
    {'remat': schema.Remat.FULL}, {'full_remat': 1},
    {'execution': schema.Execution.SCAN, 'remat': schema.Remat.MLP, 'full_remat': 1},
    {'execution': schema.Execution.SCAN, 'unroll': 2},
], ids=lambda m: ' '.join(str(getattr(v, 'value', v)) for v in m.values()))
def test_execution_and_rematerialisation_change_nothing(model: dict[str, object]) -> None:
  programs.assert_close(after(**model), after())


OPTIMIZERS = {
    'layer-wise decay': schema.AdamW(layer_decay=.6, weight_decay=.1, clip_norm=1., eps=.01,
                                     mu_dtype=schema.DType.BF16),
    'frozen': schema.AdamW(eps=.01, rules=(schema.PathRule('backbone/blocks/mlp/.*', frozen_until='1 step'),
                                           schema.PathRule('backbone/blocks/attn/.*', lr=.3))),
    'trust': schema.Lamb(weight_decay=.1, clip_tensor=1., eps=.01),
    'factored': schema.Adafactor(min_dim_size_to_factor=16, eps=1e-4),
    'momentum': schema.Sgd(clip_adaptive=.1)}


LAYERED_RULES = (('backbone/stem/kernel', ('fsdp', None)),
                 ('backbone/blocks/attn/query/kernel', (None, 'fsdp', None, None)),
                 ('backbone/blocks/mlp/.*/kernel', (None, 'fsdp', None)), ('head/kernel', ('fsdp', None)),
                 ('backbone/blocks/(norm1/scale|mlp/up/bias)', ()))


@pytest.mark.parametrize('settings', ['one', 'data=2,fsdp=4'])
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_unstacked_layers_are_trained_as_a_stack(optimizer: str, settings: str) -> None:
  """Up to the order of f32 sums: 32 x 768 products a gradient entry, over two steps, in which some optimisers divide by
  the root of the gradient's square; its floor `eps` above keeps that from magnifying rounding by more than 100."""
  mesh = programs.MESHES[settings]
  got, want = (programs.run(programs.build(fakes.LayeredTask(), fakes.normalise, mesh, rules=LAYERED_RULES, like=DATA,
                                           optimizer=OPTIMIZERS[optimizer], unstacked_layers=held), mesh, DATA, 2)
               for held in (True, False))
  assert jax.tree.structure(got) == jax.tree.structure(want)
  programs.assert_close(got, want, rtol=2e-3, atol=2e-5)


def test_a_network_with_unstacked_layers_is_trained_as_with_a_stack() -> None:
  got, want = after('data=2,fsdp=4'), after('data=2,fsdp=4', unstacked_layers=False)
  programs.assert_close(got, want)


def test_what_a_run_holds_apart() -> None:
  mesh = programs.mesh(programs.MESHES['one'])

  def held(**changes: object) -> bool:
    c = dataclasses.replace(config(), **changes)
    program = build.parts(c, mesh=mesh, num_examples=100, num_classes=8, in_memory=True).program
    return program.abstract_held is not program.abstract_state

  assert held()
  assert not held(model=dataclasses.replace(MODEL, execution=schema.Execution.SCAN))
  assert not held(train=schema.Train(unstacked_layers=False))
  assert not held(train=schema.Train(sam=schema.Sam(rho=.1)))


def test_dropout_does_not_depend_on_the_mesh() -> None:
  dropping = {'dropout': .1, 'drop_path': .2}
  programs.assert_close(after('data=2,fsdp=2,tensor=2', **dropping), after(**dropping))
  assert float(after(**dropping)[1]['loss'].sum) != float(after()[1]['loss'].sum)


def test_parameters_lie_where_the_rules_say() -> None:
  c = config()
  mesh = programs.mesh(programs.MESHES['data=2,fsdp=2,tensor=2'])
  parts = build.parts(c, mesh=mesh, num_examples=100, num_classes=8, in_memory=True)
  state = parts.program.init_fn()
  query = state.params['backbone']['blocks']['attn']['query']['kernel']
  assert query.shape == (2, 32, 4, 8) and query.addressable_shards[0].data.shape == (2, 16, 2, 8)
  mu = state.opt[1].mu['backbone']['blocks']['attn']['query']['kernel']
  average = state.extra['ema']['backbone']['blocks']['attn']['query']['kernel']
  assert mu.sharding == query.sharding == average.sharding
  assert np.asarray(state.step) == 0 and all(x.committed for x in jax.tree.leaves(state))


def test_state_is_made_in_shards_and_is_whole_on_no_device() -> None:
  c = config(width=128, mlp=512, execution=schema.Execution.SCAN)
  parts = build.parts(c, mesh=programs.mesh(programs.MESHES['fsdp=8']), num_examples=100, num_classes=8, in_memory=True)
  memory = parts.program.init_fn.lower().compile().memory_analysis()
  whole = trees.num_bytes(parts.program.abstract_state)
  assert memory.output_size_in_bytes < .2 * whole and memory.temp_size_in_bytes < .1 * whole
