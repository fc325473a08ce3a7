"""Every optimizer treats each layer of a stack as a tensor of its own, and optax's transformations can."""
from __future__ import annotations

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
from jax.sharding import PartitionSpec as P

from vit_jax.config import engine, schema
from vit_jax.config.durations import Lengths
from vit_jax.core import trees
from vit_jax.core.types import Array
from vit_jax.jobs import build
from vit_jax.optim import optimizers, per_layer
from vit_jax.train import step as steps

LENGTHS = Lengths(num_examples=370, batch_size=37, total_steps=100)
EVERY = {
    'adamw': schema.AdamW(weight_decay=.1),
    'adamw by schedule': schema.AdamW(weight_decay=.1, decay_by=schema.DecayBy.SCHEDULE),
    'adam': schema.Adam(weight_decay=.1),
    'adafactor': schema.Adafactor(weight_decay=.1),
    'lamb': schema.Lamb(weight_decay=.1),
    'lars': schema.Lars(weight_decay=.1),
    'lion': schema.Lion(),
    'muon': schema.Muon(weight_decay=.1, dtype=schema.DType.F32),
    'rmsprop': schema.RMSProp(weight_decay=.1),
    'schedule-free': schema.ScheduleFree(weight_decay=.1),
    'sgd': schema.Sgd(weight_decay=.1),
    'sgd, decoupled': schema.Sgd(weight_decay=.1, decay_by=schema.DecayBy.LR),
    'clipped by tensor': schema.Sgd(clip_norm=0., clip_tensor=.5),
    'clipped adaptively': schema.Sgd(clip_norm=0., clip_adaptive=.01),
    'moments in bf16': schema.AdamW(clip_norm=1., mu_dtype=schema.DType.BF16),
    'ruled': schema.AdamW(rules=(schema.PathRule('.*bias', lr=.5, frozen_until='2 steps'),
                                 schema.PathRule('.*kernel', weight_decay=schema.Ramp(1., 3., until='5 steps')))),
}
SHAPES = {'attn/query/kernel': (4, 2, 3), 'attn/query/bias': (2, 3), 'attn/out/kernel': (2, 3, 4),
          'mlp/up/kernel': (4, 5), 'norm1/scale': (4,), 'mlp/up/bias': (5,)}
DEPTH = 3


@pytest.fixture(autouse=True)
def factored(monkeypatch: pytest.MonkeyPatch) -> None:
  """Adafactor factors the second moment of the small matrices here."""
  monkeypatch.setattr('vit_jax.optim.adafactor.LEAST', 3)


def layered(seed: int) -> dict[str, object]:
  """Three stacked blocks of a network; layer i is 10 ** i times as large."""
  rng = np.random.default_rng(seed)
  size = 10. ** np.arange(DEPTH)
  leaves = {'backbone/stem/kernel': rng.normal(size=(2, 2, 3, 4)), 'head/kernel': rng.normal(size=(4, 7))} | {
      f'backbone/blocks/{name}': rng.normal(size=(DEPTH, *shape)) * size.reshape(-1, *[1] * len(shape))
      for name, shape in SHAPES.items()}
  return trees.unflatten({k: np.asarray(v, np.float32) for k, v in leaves.items()})


@pytest.mark.quick('adamw', reason='1 to 3 s: two programs')
@pytest.mark.parametrize('name', EVERY)
def test_each_layer_of_a_stack_takes_the_steps_of_a_network_of_its_own(name: str) -> None:
  """Four steps; sums of up to 28 terms are rounded in another order. Rates by layer: test_multipliers.py."""
  optimizer, start = optimizers.build(EVERY[name], lambda step: .01 * (1. + step), lengths=LENGTHS), layered(0)
  grads = jax.tree.map(lambda *x: np.stack(x), *(layered(t + 1) for t in range(4)))
  norms = jnp.stack([optax.tree.norm(layered(t + 1)) for t in range(4)])

  @jax.jit
  def after(start: object, grads: object) -> tuple[object, object]:
    def one(state: tuple[object, object], xs: tuple[object, Array, Array]) -> tuple[tuple[object, object], None]:
      (now, opt), (given, step, norm) = state, xs
      updates, opt = optimizer.update(given, opt, now, step=step, grad_norm=norm)
      return (optax.apply_updates(now, updates), opt), None

    return jax.lax.scan(one, (start, optimizer.init(start)), (grads, jnp.arange(4), norms))[0]

  got = trees.flatten(after(jax.tree.map(jnp.asarray, start), grads))
  before = trees.flatten((start,))
  for layer in range(DEPTH):
    def of_layer(name: str, x: Array, axis: int = 0, layer: int = layer) -> Array:
      return jnp.take(x, jnp.array([layer]), axis) if trees.is_stacked(name) else jnp.asarray(x)

    alone = after(trees.map_named(of_layer, start), trees.map_named(lambda name, x: of_layer(name, x, 1), grads))
    for k, want in trees.flatten(alone).items():
      zero = of_layer(k, before[k]) if k in before else 0.
      np.testing.assert_allclose(np.float32(of_layer(k, got[k]) - zero), np.float32(want - zero), rtol=2e-4, atol=1e-6,
                                 err_msg=k)
  for k, x in before.items():
    assert np.abs(got[k] - x).max() > 0, k


MATRICES = optax.contrib.MuonDimensionNumbers(0, -1)
OPTAX = {
    'trust ratio': optax.scale_by_trust_ratio(), 'block rms': optax.clip_by_block_rms(.1), 'lamb': optax.lamb(.1),
    'adafactor': optax.adafactor(.1, min_dim_size_to_factor=3), 'muon': optax.contrib.muon(.1),
    'muon with dimensions': optax.contrib.muon(.1, muon_weight_dimension_numbers=lambda params: jax.tree.map(
        lambda x: MATRICES if x.ndim in (2, 4) else None, params))}


@pytest.mark.parametrize('name', OPTAX)
def test_a_transformation_of_optax_acts_on_each_layer(name: str) -> None:
  """Two steps, beside a tree in which each layer is a leaf; two stacks of different depths and leaves in no stack."""
  rng = np.random.default_rng(0)
  shapes = {'encoder/blocks/up/kernel': (3, 4, 5), 'encoder/blocks/up/bias': (3, 5), 'head/kernel': (4, 7),
            'decoder/blocks/up/kernel': (2, 6, 4), 'encoder/blocks/row/conv': (3, 2, 1, 1, 6)}
  params, *grads = (trees.unflatten({k: np.float32(rng.normal(size=shape)) for k, shape in shapes.items()})
                    for _ in range(3))

  def apart(tree: object) -> dict[str, Array]:
    return {f'{k}{i}'.replace('/', '_'): layer for k, x in trees.flatten(tree).items()
            for i, layer in enumerate(x if trees.is_stacked(k) else [x])}

  def updates(transformation: optax.GradientTransformation, params: object, grads: list[object]) -> object:
    state = transformation.init(params)
    for given in grads:
      before = jax.tree.structure(state)
      found, state = transformation.update(given, state, params)
      assert jax.tree.structure(state) == before
    return found

  got = apart(updates(per_layer.per_layer(OPTAX[name]), params, grads))
  want = updates(OPTAX[name], apart(params), [apart(one) for one in grads])
  assert got.keys() == want.keys()
  for k, x in want.items():
    np.testing.assert_allclose(got[k], x, rtol=1e-5, atol=1e-6, err_msg=k)
    assert np.abs(x).max() > 0, k


def test_labels_by_the_last_key_and_one_layer_at_a_time_work_on_the_state_of_a_run() -> None:
  """The state of optax's transformations is placed by the sharding rules like that of our own optimizers."""
  def labels(params: object) -> object:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params)

  def is_matrix(params: object) -> object:
    return trees.map_named(lambda name, _: name.endswith(('up/kernel', 'down/kernel')), params)

  config = schema.Config(image_px=(8, 8), batch_size=8,
                         model=schema.ViT(patch=4, width=8, depth=2, heads=2, mlp=schema.Mlp(16)))
  objective = build.build_objective(config, build.build_backbone(config), 8, lengths=LENGTHS)
  muon = optax.contrib.scale_by_muon(weight_dimension_numbers=lambda x: jax.tree.map(lambda _: MATRICES, x))
  inner = optax.with_extra_args_support(optax.chain(
      optax.multi_transform({'kernel': optax.sgd(1.), 'bias': optax.sgd(0.), 'scale': optax.sgd(0.),
                             'positions': optax.sgd(0.), 'cls': optax.sgd(0.)}, labels),
      optax.masked(per_layer.per_layer(muon), is_matrix)))
  optimizer = optax.GradientTransformationExtraArgs(lambda params, matrices: inner.init(params), inner.update)
  program = steps.build(objective, optimizer, fakes.normalize, mesh=programs.mesh(schema.Mesh(2, 2, 2)),
                        batch=programs.batch(8), seed=0, accumulate=1)
  abstract = program.abstract_state
  moments = {name: (leaf.shape, at.spec) for (name, leaf), at in zip(
      trees.flatten(abstract.opt).items(), jax.tree.leaves(program.shardings.opt), strict=True) if '/mu/' in name}
  assert [shape for shape, _ in moments.values()] == [(2, 16, 8), (2, 8, 16)]
  assert [spec for _, spec in moments.values()] == [P(None, 'tensor', 'fsdp'), P(None, 'fsdp', 'tensor')]
  ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), abstract.params)
  updates, _ = inner.update(ones, inner.init(ones), ones)
  moved = {name for name, x in trees.flatten(updates).items() if np.abs(x).max() > 0}
  assert moved == {name for name in trees.flatten(abstract.params) if name.endswith('/kernel')}


def test_every_optimizer_is_tried_above() -> None:
  assert {type(c) for c in EVERY.values()} == set(engine.kinds(schema.AnyOptimizer).values())
