"""Every task takes the same steps on any mesh, and goes on bit for bit from a checkpoint."""
from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import numpy as np
import programs
import pytest

from vit_jax.config import check, engine, schema
from vit_jax.core import trees
from vit_jax.data.device.prepare import prepare_train
from vit_jax.jobs import build
from vit_jax.objectives import kinds
from vit_jax.train import checkpoint
from vit_jax.train.state import TrainState
from vit_jax.train.step import Program

MODEL = schema.ViT(patch=8, width=16, depth=2, heads=4, mlp=schema.Mlp(16), execution=schema.Execution.SCAN)
OTHER = schema.ViT(patch=8, width=12, depth=1, heads=2, mlp=schema.Mlp(8))
VIEWS = schema.Views(on=True, num_local=2, local_px=8)
TEXT = schema.Text(length=6, width=16, depth=2, heads=4, mlp=24, pool=schema.TextPool.MEAN)
TASKS: dict[str, tuple[schema.Objective, dict[str, Any]]] = {
    'mae': (schema.Mae(decoder_width=16, decoder_depth=1, decoder_heads=4), {}),
    'masked patch': (schema.MaskedPatch(), {}),
    'dino': (schema.Dino(out_dim=24, hidden_dim=16, bottleneck_dim=8, norm_last_layer=False), {'views': VIEWS}),
    'dino sinkhorn': (schema.Dino(out_dim=24, hidden_dim=16, bottleneck_dim=8, centering=schema.Centering.SINKHORN),
                      {'views': VIEWS}),
    'dinov2': (schema.Dinov2(out_dim=24, hidden_dim=16, bottleneck_dim=8, patch_out_dim=16, patch_bottleneck_dim=8,
                             group=4), {'views': VIEWS}),
    'dinov3': (schema.Dinov3(out_dim=24, hidden_dim=16, bottleneck_dim=8, patch_out_dim=16, patch_bottleneck_dim=8,
                             group=4, gram=schema.Gram(start='1 steps', step='1 steps')),
               {'views': dataclasses.replace(VIEWS, gram_scale=2.)}),
    'dinov2 distill': (schema.Dinov2Distill(out_dim=24, hidden_dim=16, bottleneck_dim=8, patch_out_dim=16,
                                            patch_bottleneck_dim=8, group=4,
                                            teacher=schema.FeatureTeacher(model=OTHER, px=24)), {'views': VIEWS}),
    'byol': (schema.Byol(hidden_dim=16, out_dim=8), {'views': dataclasses.replace(VIEWS, num_local=0)}),
    'lejepa': (schema.LeJepa(hidden_dim=16, out_dim=8, directions=6), {'views': VIEWS}),
    'ijepa': (schema.IJepa(predictor_width=16, predictor_depth=1, predictor_heads=4, num_targets=2, min_context=1), {}),
    'token label': (schema.TokenLabel(maps='x', map_grid=(3, 5), top=2), {}),
    'feature distill': (schema.FeatureDistill(schema.FeatureTeacher(model=OTHER, px=24)), {}),
    'contrastive': (schema.Contrastive(text=TEXT, out_dim=12, form=schema.PairForm.RING, chunk=1), {}),
    'contrastive softmax': (schema.Contrastive(text=TEXT, loss=schema.PairLoss.SOFTMAX, scale_max=100.), {}),
    'distill': (schema.Distill(schema.Teacher(model=OTHER), distill_type=schema.DistillType.SOFT, temperature=2.),
                {'mixup': .3}),
}
FULL = 'data=2,fsdp=2,tensor=2'
MOST = tuple(name for name in TASKS if name not in ('dino sinkhorn', 'contrastive softmax'))


def config(name: str) -> schema.Config:
  objective, recipe = TASKS[name]
  model = dataclasses.replace(MODEL, pool=schema.ClassToken(distillation=name == 'distill'))
  found = schema.Config(image_px=(16, 16), batch_size=16, model=model, objective=objective,
                        data=schema.Data(recipe=schema.Recipe(shift_px=1 if name == 'token label' else 0, **recipe)))
  check.check(found)
  return found


def batch(c: schema.Config) -> dict[str, np.ndarray]:
  rng, found = np.random.default_rng(0), {}
  for name, x in build.abstract_batch(c).items():
    found[name] = (rng.integers(0, 7 if 'label' in name else 256, x.shape) if x.dtype.kind in 'iu'
                   else np.arange(x.shape[-1]) < rng.integers(1, 6, (16, 1)) if name == 'text_mask'
                   else rng.uniform(0., 1., x.shape)).astype(x.dtype)
  if 'box' in found:
    found['box'] = np.tile(np.array([[.1, .9, .7, .2]], np.float32), (16, 1))
  return found


@functools.cache
def program(name: str, settings: str = 'one') -> Program:
  c = config(name)
  task = build.build_objective(c, build.build_backbone(c), 7, lengths=programs.LENGTHS)
  prepare = prepare_train(c.data.recipe, num_classes=7, on_device_geometry=name == 'token label',
                          targets=kinds.of(c).targets())
  return programs.build(task, prepare, programs.MESHES[settings], like=batch(c),
                        optimizer=schema.AdamW(lr=1e-3, eps=1e-3))


@functools.cache
def after(name: str, settings: str = 'one') -> tuple[Any, Any]:
  state, metrics = programs.run(program(name, settings), programs.MESHES[settings], batch(config(name)), 2,
                                start=begin(name))
  return state, metrics.means


@functools.cache
def begin(name: str) -> TrainState:
  """The initial state; a teacher that has learned nothing would teach nothing."""
  found: TrainState = jax.device_get(program(name).init_fn())
  return found._replace(extra=programs.draw(found.extra)) if 'distill' in name else found


def chosen(*names: str) -> list[Any]:
  """All tasks, of which the default suite has some."""
  return [*names, *(pytest.param(name, marks=pytest.mark.slow(reason='5 s')) for name in MOST if name not in names)]


@pytest.mark.slow(
    reason='10 to 15 s: two programs; tests/test_contracts.py and tests/objectives/test_dino.py have tasks on meshes')
@pytest.mark.parametrize('name', chosen('mae', 'dino'))
def test_a_task_takes_the_same_steps_on_a_mesh_of_all_axes(name: str) -> None:
  _compare(name, FULL)


@pytest.mark.slow(reason='20 programs, 2 minutes')
@pytest.mark.parametrize(('name', 'settings'), [
    (name, settings) for name in TASKS for settings in programs.MESHES
    if settings != 'one' and (settings != FULL or name not in MOST)])
def test_a_task_takes_the_same_steps_on_every_mesh(name: str, settings: str) -> None:
  _compare(name, settings)


def test_every_objective_is_tried_above() -> None:
  field = next(field for field in dataclasses.fields(schema.Config) if field.name == 'objective')
  tried = {type(objective) for objective, _ in TASKS.values()} | {schema.Supervised}  # tests/test_invariance.py
  missing = set(engine.kinds(field.type).values()) - tried
  assert not missing, f'tests/objectives/test_meshes.py: add an example of {missing} to TASKS.'


@pytest.mark.slow(reason='5 s each: a program')
@pytest.mark.parametrize('name', TASKS)
def test_two_steps_move_every_parameter_that_is_trained(name: str) -> None:
  start, (state, _) = begin(name), after(name)
  for path, leaf in trees.flatten(state.params).items():
    moved = np.abs(leaf - trees.flatten(start.params)[path]).max()
    assert moved > 0. or path.endswith('key/bias'), path


def _compare(name: str, settings: str) -> None:
  (state, means), (want, wanted_means) = after(name, settings), after(name)
  assert np.isfinite(float(want.step)) and float(wanted_means['loss'].sum) != 0
  programs.assert_close(means, wanted_means, rtol=1e-3, atol=1e-4)
  (own, rounded), (wanted, wanted_rounded) = map(_split, (state, want))
  programs.assert_close(own, wanted, rtol=2e-3, atol=2e-5)
  programs.assert_close(rounded, wanted_rounded, rtol=0., atol=1e-4)


def _split(state: TrainState) -> tuple[TrainState, Any]:
  """Returns the state without the biases of keys, and these: softmax ignores them, so that they are rounding alone."""
  params = trees.flatten(state.params)
  rounded = {path: leaf for path, leaf in params.items() if path.endswith('key/bias')}
  return state._replace(params={path: leaf for path, leaf in params.items() if path not in rounded}), rounded


@pytest.mark.slow(reason='5 to 11 s: a program; tests/train/test_checkpoint.py has what is saved')
@pytest.mark.parametrize('name', chosen('dino'))
def test_a_task_goes_on_bit_for_bit(name: str, tmp_path: pathlib.Path) -> None:
  one, mesh = program(name), programs.MESHES['one']
  placed = programs.meshes.put_batch(batch(config(name)), programs.mesh(mesh), programs.Shard((0,), 1))
  state, _ = one.step_fn(jax.device_put(begin(name), one.shardings), placed)
  folder = checkpoint.Checkpointer(tmp_path / 'checkpoints', keep=checkpoint.Keep(1))
  folder.save(state, {}, {})
  folder.wait()
  restored = folder.restore(one.placed_state)
  folder.close()
  assert restored is not None
  state, metrics = one.step_fn(restored.state, placed)
  want, wanted_means = after(name)
  programs.assert_close(jax.device_get(state), want, rtol=0, atol=0)
  programs.assert_close(metrics.unpack().means, wanted_means, rtol=0, atol=0)
