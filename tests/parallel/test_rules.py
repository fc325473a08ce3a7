"""What follows a parameter onto its devices, what may be whole on each of them, and what is refused."""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, PartitionSpec

from vit_jax.config import durations, schema
from vit_jax.core import trees
from vit_jax.core.types import PyTree
from vit_jax.models.vit import rules as vit_rules
from vit_jax.objectives import mae
from vit_jax.optim import optimizers
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel import rules

TABLE: tuple[rules.Rule, ...] = (
    ('backbone/blocks/mlp/up/kernel', (None, 'fsdp', 'tensor')), ('.*/bias', ()), ('head/kernel', ('fsdp', 'tensor')))


def leaf(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {'backbone': {'blocks': {'mlp': {'up': {'kernel': leaf(3, 64, 256), 'bias': leaf(3, 256)}}}},
          'head': {'kernel': leaf(64, 10), 'bias': leaf(10)}}
UP, HEAD, WHOLE = PartitionSpec(None, 'fsdp', 'tensor'), PartitionSpec('fsdp', 'tensor'), PartitionSpec()


@pytest.fixture(scope='module')
def mesh() -> Mesh:
  return meshes.make(schema.Mesh(1, 4, 2))


def follow(tree: PyTree, mesh: Mesh) -> PyTree:
  return rules.follow_specs(tree, PARAMS, rules.param_specs(PARAMS, TABLE, mesh))


def only(path: str, value: Any) -> PyTree:
  """A nested dict of one leaf."""
  for key in reversed(path.split('/')):
    value = {key: value}
  return value


def test_averages_teachers_and_moments_lie_as_their_parameters_however_deep(mesh: Mesh) -> None:
  specs = rules.param_specs(PARAMS, TABLE, mesh)
  assert specs['backbone']['blocks']['mlp']['up']['kernel'] == UP and specs['head']['kernel'] == HEAD
  for tree in ({'ema': PARAMS}, {'inner': {'teacher': PARAMS}, 'ema': PARAMS}, [(PARAMS, {'mu': PARAMS})]):
    found = follow(tree, mesh)
    for part in jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, dict) and 'head' in x):
      assert part == specs
  partly = follow({'teacher': {'head': PARAMS['head']}}, mesh)
  assert partly['teacher'] == {'head': specs['head']}


def test_moments_of_another_precision_follow_too(mesh: Mesh) -> None:
  assert follow({'mu': {'head': {'kernel': leaf(64, 10, dtype=jnp.bfloat16)}}}, mesh)['mu']['head']['kernel'] == HEAD


@pytest.mark.parametrize(('shape', 'spec'), [
    ((3, 64), PartitionSpec(None, 'fsdp')), ((3, 256), PartitionSpec(None, 'tensor')),
    ((64, 256), PartitionSpec('fsdp', 'tensor')), ((1,), WHOLE), ((), WHOLE)])
def test_a_factored_moment_keeps_the_axes_it_has(mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec) -> None:
  path = 'rows/backbone/blocks/mlp/up/kernel'
  assert jax.tree.leaves(follow(only(path, leaf(*shape)), mesh),
                         is_leaf=lambda x: isinstance(x, PartitionSpec)) == [spec]


@pytest.mark.parametrize('small', [
    only('count', leaf(dtype=jnp.int32)), only('center', leaf(1, 65_536)), only('model_state/norm/mean', leaf(2048)),
    only('model_state/blocks/norm/var', leaf(24, 2048)), only('mask', leaf(1, 1, 96)),
    only('inner/trained/head/kernel', leaf(128, 10)), {}])
def test_small_things_and_trained_networks_of_another_shape_are_whole(mesh: Mesh, small: PyTree) -> None:
  found = jax.tree.leaves(follow(small, mesh), is_leaf=lambda x: isinstance(x, PartitionSpec))
  assert found == [WHOLE] * len(jax.tree.leaves(small))


@pytest.mark.parametrize(('stray', 'said'), [
    (only('queue', leaf(65_536, 256)), r'  inner/queue float32\[65536, 256\]'),
    (only('small', leaf(2, 3)), r'  inner/small float32\[2, 3\]'),
    (only('blocks/sums', leaf(3, 64, 64)), r'  inner/blocks/sums float32\[3, 64, 64\]'),
    (only('center', leaf(300_000)), r'  inner/center float32\[300000\]'),
    (only('teacher/head/kernel', leaf(128, 10)),
     r'  inner/teacher/head/kernel float32\[128, 10\], where the parameter is \[64, 10\]'),
    (only('teacher/heads/kernel', leaf(64, 10)), r'  inner/teacher/heads/kernel float32\[64, 10\]\n')])
def test_what_follows_nothing_and_is_no_vector_is_named(mesh: Mesh, stray: PyTree, said: str) -> None:
  with pytest.raises(ValueError, match=said) as error:
    follow({'ema': PARAMS, 'count': leaf(), 'inner': stray, 'other': stray}, mesh)
  assert 'other/' in str(error.value) and 'ema' not in str(error.value)
  assert 'at most 1,048,576 bytes' in str(error.value)


KINDS = {'adam': schema.Adam(), 'adamw': schema.AdamW(), 'adafactor': schema.Adafactor(),
         'lamb': schema.Lamb(), 'lars': schema.Lars(), 'lion': schema.Lion(),
         'rmsprop': schema.RMSProp(), 'sgd': schema.Sgd(momentum=.9)}


@pytest.mark.parametrize('kind', KINDS)
def test_no_optimizer_keeps_more_whole_than_the_parameters_do(mesh: Mesh, kind: str) -> None:
  lengths = durations.Lengths(num_examples=1000, batch_size=8, total_steps=100)
  optimizer = optimizers.build(KINDS[kind], lambda step: jnp.asarray(.1), lengths=lengths)
  state = jax.eval_shape(optimizer.init, PARAMS)
  specs = trees.flatten(rules.shardings(
      rules.follow_specs(state, PARAMS, rules.param_specs(PARAMS, TABLE, mesh)), mesh))
  whole = {name for name, x in trees.flatten(state).items() if specs[name].is_fully_replicated and x.size > 3}
  assert all(name.endswith('bias') for name in whole), whole
  assert any(not sharding.is_fully_replicated for sharding in specs.values())


def test_bytes_of_a_device_are_those_of_its_shards(mesh: Mesh) -> None:
  specs = rules.param_specs(PARAMS, TABLE, mesh)
  assert rules.bytes_per_device(PARAMS, specs, mesh) == 4 * (3 * 16 * 128 + 3 * 256 + 16 * 5 + 10)


HEADS: tuple[rules.Rule, ...] = (('kernel', (None, 'fsdp', 'tensor', None), (None, None, ('tensor', 'fsdp'), None)),)
BY_WIDTH, BY_HEADS = PartitionSpec(None, 'fsdp', None, None), PartitionSpec(None, None, 'fsdp', None)
BY_BOTH = PartitionSpec(None, 'fsdp', 'tensor', None)


@pytest.mark.parametrize(('platform', 'fsdp', 'tensor', 'shape', 'spec'), [
    ('tpu', 16, 1, (24, 1024, 16, 64), BY_HEADS),   # L/16: 64 of the width a shard
    ('tpu', 8, 1, (24, 1024, 16, 64), BY_WIDTH),    # 128 of the width are a full tile
    ('tpu', 16, 1, (32, 1280, 16, 80), BY_HEADS),   # H/14
    ('tpu', 64, 1, (24, 1024, 16, 64), BY_WIDTH),   # 64 devices do not divide 16 heads
    ('tpu', 8, 1, (12, 384, 6, 64), BY_WIDTH),      # S/16: 8 devices do not divide 6 heads
    ('tpu', 4, 2, (24, 384, 16, 64), PartitionSpec(None, None, ('tensor', 'fsdp'), None)),
    ('tpu', 8, 2, (12, 768, 12, 64), BY_BOTH),      # 16 places do not divide 12 heads
    ('tpu', 1, 1, (12, 96, 3, 32), PartitionSpec(None, None, None, None)),
    ('gpu', 16, 1, (24, 1024, 16, 64), BY_WIDTH), ('cpu', 16, 1, (24, 1024, 16, 64), BY_WIDTH)])
def test_heads_are_split_where_shards_of_the_width_would_be_narrower_than_a_tile_of_a_tpu(
    platform: str, fsdp: int, tensor: int, shape: tuple[int, ...], spec: PartitionSpec) -> None:
  mesh = AbstractMesh((1, fsdp, tensor), meshes.AXES, abstract_device=AbstractDevice('any', None, platform))
  found = rules.param_specs({'kernel': leaf(*shape)}, HEADS, mesh)['kernel']  # type: ignore[arg-type]
  assert found == spec
  moment = rules.follow_specs({'mu': {'kernel': leaf(*shape)}}, {'kernel': leaf(*shape)}, {'kernel': found})
  assert moment['mu']['kernel'] == spec


@pytest.mark.parametrize(('kind', 'fsdp', 'is_second'), [
    ('v3', 8, True), ('TPU v3', 8, True), ('v2', 8, True), ('TPU v4', 8, False), ('v6e', 8, False), ('v3', 1, False),
    ('v3', 32, False)])  # 32 devices do not divide 16 heads
def test_kernels_of_attention_are_split_by_heads_where_a_tpu_scatters_rows_only(kind: str, fsdp: int,
                                                                                is_second: bool) -> None:
  mesh = AbstractMesh((2, fsdp, 1), meshes.AXES, abstract_device=AbstractDevice(kind, None, 'tpu'))
  table = [rule for rule in vit_rules.ALL if 'kernel' in rule[0] and 'stem' not in rule[0]]
  shapes = {'attn/query': (24, 4096, 16, 64), 'attn/out': (24, 16, 64, 4096), 'mlp/up': (24, 4096, 1024),
            'mlp/down': (24, 1024, 4096)}
  found = rules.param_specs({f'backbone/blocks/{name}/kernel': leaf(*shape) for name, shape in shapes.items()}, table,
                            mesh)  # type: ignore[arg-type]
  places = {name.split('/')[-2]: list(spec).index('fsdp') if 'fsdp' in spec else None for name, spec in found.items()}
  if fsdp == 1:
    assert set(places.values()) == {None}
  else:
    by_width = {'query': 1, 'out': 3, 'up': 1, 'down': 2}
    down = 1 if kind == 'v3' and fsdp == 32 else 2  # 32 devices divide the hidden width
    assert places == ({'query': 2, 'out': 1, 'up': 1, 'down': 1} if is_second else {**by_width, 'down': down})


def test_query_key_and_value_of_every_network_have_a_second_spec() -> None:
  tables = (*vit_rules.ALL, *mae.RULES)
  kernels = [rule for rule in tables if 'query|key|value' in rule[0] and rule[0].endswith('kernel')]
  assert len(kernels) == 2 and all(rule[1:] == HEADS[0][1:] for rule in kernels)
