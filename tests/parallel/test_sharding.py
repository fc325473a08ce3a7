"""What follows a parameter onto its devices, what may be whole on each of them, and what is refused."""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, PartitionSpec

from vit_jax.config import durations, schema
from vit_jax.core import trees
from vit_jax.core.axes import Axes
from vit_jax.core.errors import UserError
from vit_jax.core.types import PyTree
from vit_jax.optim import optimizers
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel import sharding


def leaf(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {'backbone': {'blocks': {'mlp': {'up': {'kernel': leaf(3, 64, 256), 'bias': leaf(3, 256)}}}},
          'head': {'kernel': leaf(64, 10), 'bias': leaf(10)}}
AXES = {'backbone': {'blocks': {'mlp': {'up': {'kernel': Axes(('layers', 'embed', 'mlp')),
                                               'bias': Axes(('layers', 'embed'))}}}},
        'head': {'kernel': Axes(('embed', 'classes')), 'bias': Axes(('embed',))}}
UP, HEAD, WHOLE = PartitionSpec(None, 'fsdp', 'tensor'), PartitionSpec('fsdp', 'tensor'), PartitionSpec()


@pytest.fixture(scope='module')
def mesh() -> Mesh:
  return meshes.make(schema.Mesh(1, 4, 2))


def follow(tree: PyTree, mesh: Mesh) -> PyTree:
  return sharding.follow_specs(tree, PARAMS, sharding.param_specs(PARAMS, AXES, mesh))


def only(path: str, value: Any) -> PyTree:
  """A nested dict of one leaf."""
  for key in reversed(path.split('/')):
    value = {key: value}
  return value


def test_averages_teachers_and_moments_lie_as_their_parameters_however_deep(mesh: Mesh) -> None:
  specs = sharding.param_specs(PARAMS, AXES, mesh)
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
  with pytest.raises(UserError, match=said) as error:
    follow({'ema': PARAMS, 'count': leaf(), 'inner': stray, 'other': stray}, mesh)
  assert 'other/' in str(error.value) and 'ema' not in str(error.value)
  assert 'at most 1,048,576 bytes' in str(error.value)


KINDS = {'adam': schema.Adam(), 'adamw': schema.AdamW(), 'adafactor': schema.Adafactor(),
         'lamb': schema.Lamb(), 'lars': schema.Lars(), 'lion': schema.Lion(), 'muon': schema.Muon(),
         'rmsprop': schema.RMSProp(), 'schedule-free': schema.ScheduleFree(),
         'sgd': schema.Sgd(momentum=.9)}


@pytest.mark.parametrize('kind', KINDS)
def test_no_optimizer_keeps_more_whole_than_the_parameters_do(mesh: Mesh, kind: str) -> None:
  lengths = durations.Lengths(num_examples=1000, batch_size=8, total_steps=100)
  optimizer = optimizers.build(KINDS[kind], lambda step: jnp.asarray(.1), lengths=lengths)
  state = jax.eval_shape(optimizer.init, PARAMS)
  specs = trees.flatten(sharding.shardings(
      sharding.follow_specs(state, PARAMS, sharding.param_specs(PARAMS, AXES, mesh)), mesh))
  whole = {name for name, x in trees.flatten(state).items() if specs[name].is_fully_replicated and x.size > 3}
  assert all(name.endswith('bias') for name in whole), whole
  assert any(not sharding.is_fully_replicated for sharding in specs.values())


def test_bytes_of_a_device_are_those_of_its_shards(mesh: Mesh) -> None:
  specs = sharding.param_specs(PARAMS, AXES, mesh)
  assert sharding.bytes_per_device(PARAMS, specs, mesh) == 4 * (3 * 16 * 128 + 3 * 256 + 16 * 5 + 10)


QUERY, OUT = ('layers', 'embed', 'heads', 'head'), ('layers', 'heads', 'head', 'embed')
BY_WIDTH, BY_HEADS = PartitionSpec(None, 'fsdp', None, None), PartitionSpec(None, None, 'fsdp', None)
BY_BOTH = PartitionSpec(None, 'fsdp', 'tensor', None)


def tpu(kind: str, *shape: int, platform: str = 'tpu') -> Any:
  return AbstractMesh(shape, meshes.AXES, abstract_device=AbstractDevice(kind, None, platform))


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
  mesh = tpu('any', 1, fsdp, tensor, platform=platform)
  found = sharding.param_specs({'kernel': leaf(*shape)}, {'kernel': Axes(QUERY)}, mesh)['kernel']
  assert found == spec
  moment = sharding.follow_specs({'mu': {'kernel': leaf(*shape)}}, {'kernel': leaf(*shape)}, {'kernel': found})
  assert moment['mu']['kernel'] == spec


def test_without_gradients_a_tpu_has_no_reason_for_another_choice() -> None:
  params, axes = {'kernel': leaf(24, 1024, 16, 64)}, {'kernel': Axes(QUERY)}
  found = sharding.param_specs(params, axes, tpu('TPU v3', 1, 16, 1), differentiated=False)
  assert found['kernel'] == BY_WIDTH


@pytest.mark.parametrize(('kind', 'fsdp', 'is_second'), [
    ('v3', 8, True), ('TPU v3', 8, True), ('v2', 8, True), ('TPU v4', 8, False), ('v6e', 8, False), ('v3', 1, False),
    ('v3', 32, False)])  # 32 devices do not divide 16 heads
def test_kernels_of_attention_are_split_by_heads_where_a_tpu_scatters_rows_only(kind: str, fsdp: int,
                                                                                is_second: bool) -> None:
  kernels = {'query': (QUERY, (24, 4096, 16, 64)), 'out': (OUT, (24, 16, 64, 4096)),
             'up': (('layers', 'embed', 'mlp'), (24, 4096, 1024)),
             'down': (('layers', 'mlp', 'embed'), (24, 1024, 4096))}
  found = sharding.param_specs({name: leaf(*shape) for name, (_, shape) in kernels.items()},
                               {name: Axes(names) for name, (names, _) in kernels.items()}, tpu(kind, 2, fsdp, 1))
  places = {name: list(spec).index('fsdp') if 'fsdp' in spec else None for name, spec in found.items()}
  if fsdp == 1:
    assert set(places.values()) == {None}
  else:
    by_width = {'query': 1, 'out': 3, 'up': 1, 'down': 2}
    down = 1 if kind == 'v3' and fsdp == 32 else 2  # 32 devices divide the hidden width
    assert places == ({'query': 2, 'out': 1, 'up': 1, 'down': 1} if is_second else {**by_width, 'down': down})


def test_fsdp_splits_matrices_and_no_vectors(mesh: Mesh) -> None:
  axes = {'norm': Axes(('layers', 'embed')), 'bias': Axes(('layers', 'heads', 'head')), 'conv': Axes(('out',)),
          'kernel': Axes(('patch', 'patch', 'in', 'out'))}
  shapes = {'norm': leaf(3, 64), 'bias': leaf(3, 4, 16), 'conv': leaf(64), 'kernel': leaf(3, 3, 8, 64)}
  assert {name: tuple(spec) for name, spec in sharding.param_specs(shapes, axes, mesh).items()} == {
      'norm': (), 'bias': (None, 'tensor', None), 'conv': (), 'kernel': (None, None, None, 'fsdp')}


@pytest.mark.parametrize(('names', 'said'), [
    (None, '  head/kernel: expected logical axes, got none.'),
    (('embbed', 'classes'), "got 'embbed'. Did you mean 'embed'?"),
    (('embed', 'out'), "  head/kernel: expected axes that different axes of the mesh split, got ('embed', 'out')"),
    (('bias:0', 'classes'), "head/kernel: expected the axis of a parameter, got 'bias:0', which does not exist.")])
def test_a_parameter_without_axes_or_with_an_unknown_one_is_refused_with_its_path(
    mesh: Mesh, names: Any, said: str) -> None:
  axes = {**AXES, 'head': {'kernel': Axes(names), 'bias': Axes(('embed',))}}
  with pytest.raises(UserError) as error:
    sharding.param_specs(PARAMS, axes, mesh)
  assert said in str(error.value) and 'head/bias' not in str(error.value)
