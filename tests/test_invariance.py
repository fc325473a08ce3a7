"""The result of a step does not depend on how it is run: mesh, accumulation, rematerialization, layout."""
from __future__ import annotations

import dataclasses
import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.types import Batch, Shard
from vit_jax.data.device.prepare import prepare_train
from vit_jax.jobs import build
from vit_jax.parallel import mesh as meshes
from vit_jax.train.state import TrainState
from vit_jax.train.step import Program

DATA = programs.batch(size=16, px=16)
MODEL = schema.ViT(patch=8, width=16, depth=2, heads=4, mlp=schema.Mlp(24))
RECIPE = schema.Recipe(crop=schema.Crop.RESIZE, shift_px=1, rotate_degrees=10., mixup=.5)
FULL = 'data=2,fsdp=2,tensor=2'
OPTIMIZER = schema.AdamW(layer_decay=.6, weight_decay=.1, clip_norm=1., eps=.01, rules=(
    schema.PathRule('backbone/blocks/mlp/.*', frozen_until='1 step'),
    schema.PathRule('backbone/blocks/attn/.*', lr=.3)))
SAME = {'rtol': 2e-3, 'atol': 2e-5}
"""A gradient is a sum of up to 16 x 5 f32 products after some 30 operations: 1.5e-4 at most. Adam divides it by its own
root mean square, whose floor `eps` is .01: it can magnify that in small gradients, but not beyond ten times."""


def config(**model: object) -> schema.Config:
  return schema.Config(image_px=(16, 16), batch_size=16, model=dataclasses.replace(MODEL, **model),
                       objective=schema.Supervised(label_smoothing=.1), head=schema.Head(pre_logits=8),
                       optimizer=schema.AdamW(clip_norm=1.), train=schema.Train(ema=.9))


@functools.cache
def after(settings: str = 'one', accumulate: int = 1, **model: object) -> tuple[object, object]:
  """State and metrics after two steps from one start. That a mesh has the same start is a test of its own, below."""
  c, mesh = config(**model), programs.MESHES[settings]
  task = build.build_objective(c, build.build_backbone(c), 7, lengths=programs.LENGTHS)
  program = programs.build(task, fakes.normalize, mesh, like=DATA, accumulate=accumulate, optimizer=OPTIMIZER)
  return programs.run(program, mesh, DATA, 2, start=start(program.abstract_state))


def start(abstract: TrainState) -> TrainState:
  params, extra = programs.draw(abstract.params), programs.draw(abstract.extra)
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (abstract.step, abstract.opt))
  return TrainState(zeros[0], params, zeros[1], extra)


def dear(*names: object) -> list[object]:
  return [pytest.param(name, marks=pytest.mark.slow(reason='3 s')) for name in names]


@pytest.mark.parametrize('settings', [FULL, *dear('data=8', 'fsdp=8', 'data=2,fsdp=4', 'data=2,tensor=4')])
def test_steps_agree_on_every_mesh(settings: str) -> None:
  programs.assert_close(after(settings), after(), **SAME)


@pytest.mark.parametrize('num_devices', dear(2, 4))
def test_steps_agree_on_fewer_devices(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(programs.MESHES, f'data={num_devices}', schema.Mesh(num_devices, 1, 1))
  programs.assert_close(after(f'data={num_devices}'), after(), **SAME)


@pytest.mark.parametrize('settings', ['one', *dear(FULL)])
def test_four_microbatches_are_the_whole_batch(settings: str) -> None:
  programs.assert_close(after(settings, accumulate=4), after(), **SAME)


@pytest.mark.slow(reason='3 s each; tests/models/test_stack.py has the networks alone')
@pytest.mark.parametrize('model', [
    {'execution': schema.Execution.SCAN},
    {'execution': schema.Execution.SCAN, 'remat': schema.Remat.NAMES},
    {'remat': schema.Remat.MLP}, {'remat': schema.Remat.QKV},
    {'remat': schema.Remat.FULL}, {'full_remat': 1},
    {'execution': schema.Execution.SCAN, 'remat': schema.Remat.MLP, 'full_remat': 1},
    {'execution': schema.Execution.SCAN, 'unroll': 2},
], ids=lambda m: ' '.join(str(getattr(v, 'value', v)) for v in m.values()))
def test_execution_and_rematerialization_change_nothing(model: dict[str, object]) -> None:
  programs.assert_close(after(**model), after(), **SAME)


@pytest.mark.slow(reason='4 s: two programs; tests/data/test_transforms.py has each transform')
def test_images_are_prepared_alike_on_every_mesh() -> None:
  def prepared(settings: str) -> object:
    mesh = programs.mesh(programs.MESHES[settings])
    prepare = prepare_train(RECIPE, num_classes=7, on_device_geometry=True)

    @jax.jit
    def run(batch: Batch) -> Batch:
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return prepare(batch, jax.random.key(0), jnp.zeros((), jnp.int32))

    return jax.device_get(run(meshes.put_batch(DATA, mesh, Shard((0,), 1))))

  # A pixel is a sum of some ten products, of values up to 3; the place it is read from is off by 16 px times 2^-24.
  programs.assert_close(prepared(FULL), prepared('one'), rtol=0., atol=10 * 3 * 16 * 2.**-24)


@pytest.mark.slow(reason='6 s: two programs; tests/train/test_randomness.py has what devices draw')
def test_dropout_does_not_depend_on_the_mesh() -> None:
  def found(settings: str) -> dict[str, object]:
    c = config(depth=1, dropout=.1, attention=schema.Attention(dropout=.1), drop_path=.2, drop_path_even=True)
    task = build.build_objective(c, build.build_backbone(c), 7, lengths=programs.LENGTHS)
    return programs.gradients(task, programs.MESHES[settings],
                              batch=fakes.normalized(DATA))['gradient']

  programs.assert_reordered(found(FULL), found('one'), terms=80, operations=30)


@functools.cache
def made(settings: str) -> tuple[Program, TrainState]:
  c, mesh = config(width=128, mlp=schema.Mlp(256)), programs.mesh(programs.MESHES[settings])
  program = build.parts(c, mesh=mesh, num_examples=100, num_classes=8, in_memory=True).program
  return program, program.init_fn()


@pytest.mark.slow(reason='5 s: two programs that make a state; tests/parallel/test_sharding.py has the rules')
def test_parameters_lie_where_the_rules_say_and_are_those_of_one_device() -> None:
  _, state = made(FULL)
  query = state.params['backbone']['blocks']['attn']['query']['kernel']
  assert query.shape == (2, 128, 4, 32) and query.addressable_shards[0].data.shape == (2, 64, 2, 32)
  mu = state.opt[1].mu['backbone']['blocks']['attn']['query']['kernel']
  average = state.extra['ema']['backbone']['blocks']['attn']['query']['kernel']
  assert mu.sharding == query.sharding == average.sharding
  assert np.asarray(state.step) == 0 and all(x.committed for x in jax.tree.leaves(state))
  # A draw from the normal distribution is a polynomial of some twenty f32 operations.
  programs.assert_close(*(jax.device_get(made(settings)[1]) for settings in (FULL, 'one')), rtol=20 * 2.**-24, atol=0)


@pytest.mark.slow(reason='5 s: compiles what makes a state; where parameters lie is a test above')
def test_state_is_made_in_shards_and_is_whole_on_no_device() -> None:
  program, _ = made(FULL)
  memory = program.init_fn.lower().compile().memory_analysis()
  whole = trees.num_bytes(program.abstract_state)
  assert memory.output_size_in_bytes < .3 * whole and memory.temp_size_in_bytes < .1 * whole  # fsdp=2 x tensor=2
