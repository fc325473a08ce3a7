"""Examples that do not count change nothing, whatever they hold: one law for the objectives of `test_meshes.TASKS`."""
from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from tests.objectives import test_meshes
from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.data.device.prepare import prepare_train
from vit_jax.jobs import build
from vit_jax.objectives import kinds

TASKS = {**test_meshes.TASKS, 'supervised': (schema.Supervised(), {}),
         'contrastive matrix': (schema.Contrastive(text=test_meshes.TEXT, form=schema.PairForm.MATRIX), {}),
         'contrastive same class': (
             schema.Contrastive(text=test_meshes.TEXT, prompts='clip_best', same_class=True), {}),
         'dinov2 sinkhorn': (dataclasses.replace(test_meshes.TASKS['dinov2'][0], centering=schema.Centering.SINKHORN),
                             {'views': test_meshes.VIEWS})}
MASK = np.repeat(np.float32([1., 0.]), 8)
FEW = ('supervised', 'contrastive matrix', 'dinov2 sinkhorn')


@pytest.mark.parametrize('name', [
    *FEW, *(pytest.param(name, marks=pytest.mark.slow(reason='2 s: a gradient')) for name in TASKS if name not in FEW)])
def test_what_a_masked_example_holds_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(test_meshes.TASKS, name, TASKS[name])
  c = test_meshes.config(name)
  c = dataclasses.replace(c, model=dataclasses.replace(c.model, depth=1))
  task = build.build_objective(c, build.build_backbone(c), 7, lengths=programs.LENGTHS)
  prepare = prepare_train(c.data.recipe, num_classes=7, on_device_geometry=name == 'token label',
                          targets=kinds.of(c).targets())

  def gradient(params: Any, extra: Any, batch: Any) -> Any:
    def total(params: Any) -> Any:
      out = task.loss(params, extra, batch, jax.random.key(2), jnp.ones((), jnp.int32))
      return out.loss.value, out
    return jax.grad(total, has_aux=True)(params)

  batch = jax.jit(lambda batch: prepare(batch, jax.random.key(0), jnp.zeros((), jnp.int32)))(test_meshes.batch(c))
  shapes = jax.eval_shape(task.init, jax.random.key(1), batch)
  params, extra = (programs.draw(x) for x in shapes)
  gradient = jax.jit(gradient)

  def found(mask: np.ndarray, value: float) -> dict[str, Any]:
    given = {name: np.where(mask.reshape(-1, *(1,) * (x.ndim - 1)) > 0, x, value).astype(x.dtype)
             if x.dtype.kind == 'f' else np.asarray(x) for name, x in batch.items()}
    return trees.flatten(jax.device_get(gradient(params, extra, {**given, 'mask': mask})))

  want, got = found(MASK, 0.), found(MASK, np.nan)
  for path, leaf in want.items():
    assert np.isfinite(leaf).all(), path
    np.testing.assert_array_equal(got[path], leaf, err_msg=path)
  for path, leaf in found(np.zeros_like(MASK), np.nan).items():
    assert np.isfinite(leaf).all(), path
