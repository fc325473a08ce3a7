"""Blocks, MLPs and objectives in a person's own file work in every way of running a network, or are refused."""
from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from tests.own_kinds import captioning, experts, merging
from vit_jax.config import durations, schema
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import NativeImages
from vit_jax.jobs import build
from vit_jax.models import backbones

WIDTH, PATCH = 16, 4
ROOM = 9


def network(**settings: Any) -> tuple[Any, Any]:
  model = schema.ViT(**{'width': WIDTH, 'depth': 3, 'heads': 2, 'patch': PATCH, 'mlp': schema.Mlp(32), **settings})
  built = backbones.build(model, (16, 16))
  params, _ = built.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(0)
  return built, jax.tree.unflatten(tree, [jnp.asarray(rng.normal(0., .3, x.shape), jnp.float32) for x in leaves])


def images(num: int = 3) -> Any:
  return jnp.asarray(np.random.default_rng(1).normal(size=(num, 16, 16, 3)), jnp.float32)


def features(built: Any, params: Any, image: Any, *, train: bool = False) -> Any:
  return built.apply(params, {}, image, train=train, key=None)[0]


def native(image: Any, num_padding: int) -> NativeImages:
  """Images of 16 px as patches, with padding of large values."""
  patches = image.reshape(len(image), 4, PATCH, 4, PATCH, 3).swapaxes(2, 3).reshape(len(image), 16, -1)
  patches = jnp.pad(patches, ((0, 0), (0, num_padding), (0, 0)), constant_values=7.)
  return NativeImages(patches, jnp.full((len(image), 2), 4, jnp.int32))


EXPERTS = experts.Experts(balance=.5)


def test_experts_do_not_depend_on_padding_nor_on_other_images() -> None:
  built, params = network(mlp=EXPERTS, pool=schema.Mean())
  one = features(built, params, images())
  alone = jnp.concatenate([features(built, params, image[None]).pooled for image in images()])
  np.testing.assert_allclose(one.pooled, alone, rtol=1e-5, atol=1e-5)
  for num_padding in (0, ROOM):
    padded = features(built, params, native(images(), num_padding))
    np.testing.assert_allclose(padded.pooled, one.pooled, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(padded.losses['balance'], one.losses['balance'], rtol=1e-5)


@pytest.mark.parametrize('kind', [{'mlp': EXPERTS}, {'block': merging.Merging(), 'pool': schema.Mean()}],
                         ids=['experts', 'merging'])
def test_scanned_and_unrolled_networks_of_own_kinds_are_equal(kind: dict[str, Any]) -> None:
  found = []
  for execution in (schema.Execution.SCAN, schema.Execution.UNROLLED):
    for remat in (schema.Remat.NONE, schema.Remat.FULL):
      built, params = network(**kind, execution=execution, remat=remat)
      found.append(features(built, params, images()))
  for one in found[1:]:
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(one), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_merged_tokens_may_stay_in_place_or_be_removed() -> None:
  pooled = []
  for keeps_shape in (True, False):
    built, params = network(block=merging.Merging(removed=2, keeps_shape=keeps_shape), pool=schema.Mean(),
                            execution=schema.Execution.UNROLLED)
    pooled.append(features(built, params, images()).pooled)
  np.testing.assert_allclose(*pooled, rtol=1e-4, atol=1e-5)
  plain, params = network(block=merging.Merging(removed=0), pool=schema.Mean())
  assert np.abs(features(plain, params, images()).pooled - pooled[0]).max() > .01


def test_what_cannot_go_with_merged_tokens_is_refused() -> None:
  removing = merging.Merging(keeps_shape=False)
  built, params = network(block=removing, pool=schema.Mean(), execution=schema.Execution.SCAN)
  with pytest.raises(UserError, match=r'model.execution: expected unrolled for blocks that do not pass on what they'):
    features(built, params, images())
  with pytest.raises(UserError, match=r'expected positions outside of attention'):
    network(block=removing, positions=schema.Rotary(), pool=schema.Mean())
  unrolled, params = network(block=removing, pool=schema.Mean(), execution=schema.Execution.UNROLLED)
  with pytest.raises(UserError, match=r'expected positions outside of attention and images of one size'):
    features(unrolled, params, native(images(), 0))
  with pytest.raises(UserError, match='expected a token for each patch of the 4 × 4 grid, got 8'):
    features(unrolled, params, images()).maps()
  with pytest.raises(UserError, match='expected blocks that pass on nothing but tokens'):
    unrolled.block(params, unrolled.begin(params, images()), layer=0, capture=False)
  at_layers, params = network(block=removing, pool=schema.Mean(), execution=schema.Execution.UNROLLED,
                              positions=schema.Learned(at=schema.PositionsAt.SHARED))
  with pytest.raises(UserError, match='expected blocks that keep the number of tokens, with model.positions=learned'):
    features(at_layers, params, images())


def parts(objective: schema.Objective, **settings: Any) -> build.Parts:
  config = schema.Config(
      image_px=(16, 16), batch_size=8, length='10 steps', objective=objective,
      model=schema.ViT(width=WIDTH, depth=2, heads=2, patch=PATCH, mlp=EXPERTS), **settings)
  return build.parts(config, mesh=programs.mesh(schema.Mesh(1, 1, 1)), num_examples=80, num_classes=5, in_memory=False)


def test_the_loss_of_the_blocks_is_added_to_that_of_the_images() -> None:
  task = parts(schema.Supervised()).objective
  batch = {'image': images(8), 'label': jnp.arange(8) % 5}
  params, extra = task.init(jax.random.key(0), batch)
  out = task.loss(params, extra, batch, jax.random.key(1), jnp.zeros((), jnp.int32))
  stated = features(backbones.build(schema.ViT(width=WIDTH, depth=2, heads=2, patch=PATCH, mlp=EXPERTS), (16, 16)),
                    params['backbone'], batch['image']).losses['balance']
  np.testing.assert_allclose(out.metrics['balance'].value, stated, rtol=1e-6)
  logits = task.views()['student'].predict(task.views()['student'].select(params, extra), batch['image']).logits
  nll = -jax.nn.log_softmax(logits)[jnp.arange(8), batch['label']].mean()
  np.testing.assert_allclose(out.loss.value, nll + stated, rtol=1e-5)
  gradient = jax.grad(lambda p: task.loss(p, extra, batch, jax.random.key(1), jnp.zeros((), jnp.int32)).loss.value)(
      params)
  assert np.abs(gradient['backbone']['blocks']['mlp']['router']).max() > 0


def test_objectives_that_would_leave_the_loss_of_the_blocks_out_are_refused() -> None:
  with pytest.raises(UserError, match=r'objective: expected one that adds the losses of the network \(balance\)'):
    parts(schema.Mae(), head=schema.Head())


TEXT = schema.Text(length=6, width=12, depth=1, heads=2, mlp=16, causal=True)
BATCH = {'image': np.random.default_rng(0).normal(size=(8, 16, 16, 3)).astype(np.float32),
         'text': np.random.default_rng(1).integers(3, 259, (8, 6)).astype(np.int32),
         'text_mask': np.arange(6)[None] < np.array([6, 5, 4, 6, 3, 6, 6, 2])[:, None]}


def captioning_task() -> Any:
  config = schema.Config(
      image_px=(16, 16), batch_size=8, length='10 steps', objective=captioning.CoCa(text=TEXT, out_dim=10),
      model=schema.ViT(width=WIDTH, depth=2, heads=2, patch=PATCH, mlp=schema.Mlp(32)))
  lengths = durations.lengths(config.length, num_examples=80, batch_size=8)
  return build.build_objective(config, build.build_backbone(config), 0, lengths=lengths)


def test_a_captioning_objective_compares_the_whole_batch_and_averages_captions() -> None:
  task = captioning_task()
  params, extra = task.init(jax.random.key(0), BATCH)
  key, step = jax.random.key(1), jnp.zeros((), jnp.int32)
  whole = task.loss(params, extra, BATCH, key, step)
  coupling = task.coupling()
  halves = [jax.tree.map(lambda x, i=i: x[i::2], BATCH) for i in range(2)]
  rows = [coupling.embed(params, extra, half, key, step)[0] for half in halves]
  joined = jax.tree.map(lambda a, b: jnp.stack([a, b], 1).reshape(8, *a.shape[1:]), *rows)
  parted = coupling.compare(params, extra, joined, BATCH, key, step)
  np.testing.assert_allclose(parted.loss.value, whole.loss.value, rtol=1e-5)
  gradient = jax.grad(lambda p: task.loss(p, extra, BATCH, key, step).loss.value)(params)
  for part in ('backbone', 'text', 'cross', 'words', 'align'):
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient[part])), part


def test_captions_are_predicted_from_the_tokens_before_and_the_image() -> None:
  task = captioning_task()
  params, extra = task.init(jax.random.key(0), BATCH)
  caption = lambda batch: np.asarray(task.embed(params, extra, batch, jax.random.key(1), jnp.zeros(()))[0][2])
  other = {**BATCH, 'text': BATCH['text'].copy()}
  other['text'][:, 5] = 3  # the last token is predicted, and predicts nothing
  is_changed = caption(other) != caption(BATCH)
  assert is_changed.tolist() == BATCH['text_mask'][:, 5].tolist()
  assert (caption({**BATCH, 'image': BATCH['image'][::-1]}) != caption(BATCH)).all()


def test_settings_of_own_kinds_have_the_axes_and_matrices_of_their_parameters() -> None:
  from vit_jax.core import axes
  built, _ = network(mlp=dataclasses.replace(EXPERTS))
  labels = axes.trace(lambda: built.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))[0])[1]
  found = axes.matrices(labels)
  assert {name: found[name] for name in found if '/mlp/' in name} == {
      f'blocks/mlp/{name}': (1, 1) for name in ('router', 'up', 'down')}
  assert trees.flatten(labels)['blocks/mlp/up'].names == ('layers', None, 'embed', 'mlp')
