"""The same questions to every variant of a Vision Transformer: `variants.py` reads them from the settings.

The forward passes are compared with NumPy in `tests/models`, and with the authors' programs in `tests/weights`.
"""
from __future__ import annotations

import dataclasses
import functools
import logging
import math
import pathlib
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import loaded
import numpy as np
import programs
import pytest
import variants
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from benchmarks import peers
from vit_jax.config import check, schema
from vit_jax.core import numerics, trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Params
from vit_jax.export import functions
from vit_jax.export import onnx as export_onnx
from vit_jax.inspect import layerwise
from vit_jax.inspect.model import Model
from vit_jax.jobs import build
from vit_jax.models import cost
from vit_jax.models.kernels import attend, dense, forms, fused_attention, fused_mlp
from vit_jax.models.vit import vit
from vit_jax.optim import clipping, masks, per_layer
from vit_jax.parallel import kernels
from vit_jax.parallel import mesh as meshes
from vit_jax.plan import plan, topologies
from vit_jax.weights import inference, loading, saving
from vit_jax.weights.network import Weights

GRID, PX = variants.GRID, variants.PX
PATCHES = math.prod(GRID)
INCOMPLETE = f'expected all {GRID[0]} x {GRID[1]} patch tokens'
SPLIT = 'data=2,fsdp=2,tensor=2'
MAE = schema.Mae(decoder_width=16, decoder_depth=1, decoder_heads=2)
NO_EFFECT = ('key/bias',)
"""Parameters without a gradient: the softmax does not change with a number that is added to all logits of a query."""
every = pytest.mark.parametrize('name', variants.names())
every_kind = pytest.mark.parametrize('name', variants.kinds())


def config(name: str, **changes: Any) -> schema.Config:
  return schema.Config(image_px=PX, batch_size=8, model=variants.network(name), **changes)


@functools.cache
def raw() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  return {'image': rng.integers(0, 256, (8, *PX, 3), dtype=np.uint8),
          'label': rng.integers(0, 7, 8).astype(np.int32), 'index': np.arange(8, dtype=np.int32)}


def batch() -> dict[str, np.ndarray]:
  return fakes.normalized(raw())


@functools.cache
def made(name: str) -> tuple[Params, Any]:
  """Shapes of the parameters and the running statistics."""
  return jax.eval_shape(vit.build(variants.network(name), PX).init, jax.random.key(0), jnp.zeros((1, *PX, 3)))


def shapes_of(name: str) -> Params:
  return made(name)[0]


def objective(c: schema.Config) -> Any:
  return build.build_objective(c, build.build_backbone(c), 7, lengths=programs.LENGTHS)


def gradients(c: schema.Config, on: str = 'one') -> dict[str, Any]:
  return programs.gradients(objective(c), programs.MESHES[on], batch=batch())


# What follows from the names and shapes of the parameters


@every
def test_adapters_reach_every_dense_layer_of_the_blocks(name: str) -> None:
  kernels = {path.removesuffix('/kernel') for path in trees.flatten(shapes_of(name)['blocks'])
             if path.endswith('/kernel')}
  assert set(schema.adapted_layers(variants.network(name))) == kernels


@every
def test_clipping_by_tensor_takes_layers_apart_and_query_key_and_value_together(name: str) -> None:
  moves, grouped = drawn(name), _grouped(shapes_of(name)['blocks'], 'backbone/blocks')
  limit, squares = .5, {}
  for path, x in trees.flatten(moves).items():
    key = grouped.get(path, path)
    squares[key] = squares.get(key, 0.) + _squares(path, x)
  found, _ = clipping.by_tensor_norm(limit).update(moves, None)
  for path, x in trees.flatten(moves).items():
    expected = x * np.minimum(1., limit / np.sqrt(squares[grouped.get(path, path)]))
    np.testing.assert_allclose(trees.flatten(found)[path], expected, rtol=1e-5, err_msg=path)


@every
def test_the_trust_ratio_is_of_each_layer(name: str) -> None:
  moves, params = drawn(name), drawn(name, seed=1)
  found, _ = per_layer.scale_by_trust(1., ['.*'], masks.find_matrices(params)).update(moves, None, params)
  for path, x in trees.flatten(moves).items():
    ratio = np.sqrt(_squares(path, trees.flatten(params)[path]) / _squares(path, x))
    np.testing.assert_allclose(trees.flatten(found)[path], x * ratio, rtol=1e-5, err_msg=path)


@every
def test_every_kernel_is_split(name: str) -> None:
  backbone = vit.build(variants.network(name), PX)
  specs = programs.specs(lambda: backbone.init(jax.random.key(0), jnp.zeros((1, *PX, 3)))[0], on=mesh(2, 2, 2))
  leaves = jax.tree.leaves_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
  found = {jax.tree_util.keystr(path, simple=True, separator='/'): spec for path, spec in leaves}
  assert found.keys() == trees.flatten(shapes_of(name)).keys()
  assert not [path for path, spec in found.items() if path.endswith('/kernel') and not any(spec)]


def mesh(*shape: int, device: AbstractDevice | None = None) -> AbstractMesh:
  return AbstractMesh(shape, meshes.AXES, axis_types=(AxisType.Auto,) * 3, abstract_device=device)


def drawn(name: str, seed: int = 0) -> Params:
  """Values for each parameter: two layers of three for a stacked one, three for another; few shapes compile fast."""
  rng = np.random.default_rng(seed)
  return trees.map_named(lambda path, x: np.float32(rng.normal(size=(2, 3) if trees.is_stacked(path) else 3)),
                         {'backbone': shapes_of(name)})


def _grouped(tree: Any, path: str) -> dict[str, str]:
  """Leaves of query, key and value of each attention in a tree, with the name of the tensor that they are."""
  if not isinstance(tree, dict):
    return {}
  if tree.keys() >= {'query', 'key', 'value'}:
    return {f'{path}/{name}/{leaf}': f'{path}/qkv/{leaf}' for name in ('query', 'key', 'value') for leaf in tree[name]}
  return {k: v for name, inner in tree.items() for k, v in _grouped(inner, f'{path}/{name}').items()}


def _squares(path: str, x: np.ndarray) -> np.ndarray:
  return np.square(np.asarray(x, np.float64)).sum(-1 if trees.is_stacked(path) else None, keepdims=True)


def test_other_programs_are_timed_with_this_network_or_it_is_refused() -> None:
  """No two networks are the same to them."""
  given: dict[str, str] = {}
  for name in variants.names():
    try:
      text = repr(peers.settings(config(name), 7))
    except UserError:
      continue
    assert text not in given, (name, given[text])
    given[text] = name
  assert {'plain', 'pool=mean', 'gelu=exact'} <= set(given.values())


# What follows from a trace


@every_kind
def test_layers_one_by_one_have_the_shapes_of_the_whole(name: str) -> None:
  settings = variants.network(name)
  backbone, tokens = vit.build(settings, PX), PATCHES + settings.num_extra

  def layered(params: Params, state: Any, image: jax.Array) -> Any:
    x, captured = backbone.block(params, backbone.begin(params, image, state), layer=1, capture=True)
    features, weights = backbone.finish(params, x, grid=GRID), backbone.readout_weights(params, x)
    return features, weights, layerwise.full_attention(captured)

  image = jax.ShapeDtypeStruct((2, *PX, 3), jnp.float32)
  features, weights, attention = jax.eval_shape(layered, *made(name), image)
  assert features.pooled.shape == (2, settings.width) and features.tokens.shape == (2, PATCHES, settings.width)
  assert weights.shape == (2, tokens) and attention.shape == (2, settings.heads, tokens, tokens)


@every_kind
def test_a_part_of_the_patches_is_encoded_or_the_config_refuses_what_needs_it(name: str) -> None:
  c = config(name, objective=MAE)
  refused = [line for line in check.problems(c) if 'encodes a subset of the patches' in line]
  backbone = vit.build(c.model, PX)

  def encoded(params: Params) -> Any:
    tokens, positions = jnp.zeros((2, 4, c.model.width)), backbone.positions(params, GRID)[:4]
    return backbone.encode(params, tokens, positions, grid=GRID, train=False, key=None).tokens

  try:
    assert jax.eval_shape(encoded, shapes_of(name)).shape == (2, 4, c.model.width)
  except UserError as error:
    assert refused and str(error).startswith('model.') and INCOMPLETE in str(error)
  if not refused:
    task = objective(c)
    params, extra = jax.eval_shape(task.init, jax.random.key(0), batch())
    loss = jax.eval_shape(task.loss, params, extra, batch(), jax.random.key(0), jnp.zeros((), jnp.int32)).loss
    assert loss.sum.shape == ()


@pytest.mark.slow(reason='1 s each: traces of gradients; tests/models/test_fused_attention.py has the kernel')
@every_kind
def test_kernels_are_used_or_the_run_says_that_they_are_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
  caplog.set_level(logging.INFO)
  kernels.log_once.cache_clear()
  settings = with_kernels(variants.network(name), **{'width': 256, 'mlp.hidden': 512})  # as the kernels need it
  on = mesh(1, 1, 1, device=AbstractDevice('TPU v6 lite', None, 'tpu'))
  backbone, image = vit.build(settings, PX), jax.ShapeDtypeStruct((2, *PX, 3), jnp.float32)
  params, state = jax.eval_shape(backbone.init, jax.random.key(0), image)

  def loss(params: Params, state: Any, image: jax.Array) -> jax.Array:
    return backbone.apply(params, state, image, train=True, key=None)[0].pooled.sum()

  forms.check_devices(settings, on, name='model')
  with jax.sharding.use_abstract_mesh(on):
    program = str(jax.make_jaxpr(jax.grad(loss))(params, state, image))
  for kernel, operation in (('attention', 'fused_attention_backward'), ('mlp', 'fused_mlp_backward')):
    is_chosen = kernel == 'attention' or 'kernel' in vars(settings.mlp)
    assert (operation in program) == (is_chosen and f'{kernel}.kernel=fused does not apply' not in caplog.text), kernel


@pytest.mark.slow(reason='1 s each: traces of a step; tests/plan has the plain one')
@every_kind
def test_a_plan_knows_the_memory_of_the_network(name: str) -> None:
  subject = plan.Subject(config(name), topologies.parse('cpu:8'), 1437, 10, False)
  memory = plan.Plan(subject, plan.abstract_parts(subject), None, 'not asked for').memory
  assert memory['parameters'] >= trees.num_bytes(shapes_of(name)) / 8 and memory['activations'] > 0


@pytest.mark.slow(reason='1 s each: lowers a network; tests/models/test_cost.py has the plain one')
@every_kind
def test_parameters_and_flops_are_those_of_the_network(name: str) -> None:
  settings = schema.replaced(variants.network(name), {'width': 256, 'mlp.hidden': 1024})
  backbone, image = vit.build(settings, PX), jax.ShapeDtypeStruct((1, *PX, 3), jnp.float32)
  params, state = jax.eval_shape(backbone.init, jax.random.key(0), image)
  found = cost.forward(settings, PX, head=schema.Head(), num_classes=0)
  assert sum(found.parameters.values()) == trees.num_elements(params)
  counted = jax.jit(lambda p, s, x: backbone.apply(p, s, x, train=False, key=None)[0].pooled).trace(
      params, state, image).lower(lowering_platforms=('cuda',)).cost_analysis()
  assert counted is not None
  np.testing.assert_allclose(counted['flops'], sum(found.flops.values()), rtol=.07)  # XLA counts elementwise work too


# What follows from a program


@functools.cache
def learned(name: str) -> dict[str, Any]:
  """Loss and gradient on one device: scanned, and nothing is computed again."""
  return gradients(running(name, execution=schema.Execution.SCAN, remat=schema.Remat.NONE))


def unrounded(name: str) -> dict[str, Any]:
  """The same in a network of which a test has changed what a narrow dtype is."""
  return learned.__wrapped__(name)


def running(name: str, **changes: Any) -> schema.Config:
  c = config(name)
  return dataclasses.replace(c, model=dataclasses.replace(c.model, **changes))


def with_kernels(settings: schema.ViT, **changes: Any) -> schema.ViT:
  """The network with each kernel that it has a setting for."""
  mlp = {'mlp.kernel': schema.MlpKernel.FUSED} if 'kernel' in vars(settings.mlp) else {}
  return schema.replaced(settings, {'attention.kernel': schema.AttentionKernel.FUSED, **mlp, **changes})


@variants.mostly_slow('2 s each: a program')
def test_every_parameter_has_a_gradient(name: str) -> None:
  for path, leaf in trees.flatten(learned(name)['gradient']).items():
    assert np.abs(leaf).max() > (0. if not path.endswith(NO_EFFECT) else -1.), path


@pytest.mark.slow(reason='2 s each: a program')
@pytest.mark.parametrize('name', [name for name in variants.names() if name != 'plain'])
def test_every_setting_changes_the_loss_or_the_parameters(name: str) -> None:
  kind = ' '.join(name.split()[:-1]) or 'plain'
  base = kind if kind in variants.names() else 'plain'
  same = jax.tree.map(jnp.shape, shapes_of(name)) == jax.tree.map(jnp.shape, shapes_of(base))
  assert not same or learned(name)['loss'].value != learned(base)['loss'].value


@variants.mostly_slow('4 s each: two programs')
def test_a_mesh_unrolled_layers_and_remat_change_no_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  # A value between two integers may be rounded to either if its sums are added in another order, so the integers of
  # int8 are kept as numbers in both programs. `test_quantized.py` shows that the products of integers have the same
  # bits on a mesh, and each integer is rounded by itself.
  monkeypatch.setitem(dense.NARROW, schema.Quantize.INT8, dense.Narrow(jnp.float32, 127., jnp.float32))
  own = unrounded if 'int8' in name else learned
  if 'int8' in name:
    jax.clear_caches()  # traces of before have integers
  found = gradients(running(name, execution=schema.Execution.UNROLLED, remat=schema.Remat.NAMES), SPLIT)
  for part, want in own(name).items():
    # The longest sums are over the 8 x 27 tokens of the batch; two layers have some 30 operations, forth and back.
    programs.assert_reordered(found[part], want, terms=216, operations=30)
  if 'int8' in name:
    jax.clear_caches()  # and these have none


@pytest.mark.slow(reason='4 s each: two programs, whose kernels are interpreted')
@every_kind
def test_kernels_change_no_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  wide = {'width': 128, 'mlp.hidden': 128, 'execution': schema.Execution.SCAN}  # which fills a tile
  c = config(name)
  plain = dataclasses.replace(c, model=schema.replaced(c.model, wide))
  want = gradients(plain)
  for module, function in ((fused_attention, 'attend'), (fused_mlp, 'mlp')):
    monkeypatch.setattr(module, function, functools.partial(getattr(module, function), interpret=True))
  for module, function in ((attend, 'fused_problem'), (fused_mlp, 'problem')):
    monkeypatch.setattr(module, function, lambda *args: '')
  monkeypatch.setattr(numerics, 'mesh_platform', lambda: '' if jax.sharding.get_abstract_mesh().empty else 'tpu')
  found = gradients(dataclasses.replace(plain, model=with_kernels(plain.model)))
  for part in ('loss', 'gradient'):
    programs.assert_reordered(found[part], want[part], terms=216, operations=30)


@pytest.mark.slow(reason='5 s each: two programs; every parameter has a gradient, above')
@every_kind
def test_a_few_steps_from_the_initial_values_move_every_parameter(name: str) -> None:
  """A few, as no gradient passes through what begins at zero: the head, and the last norm of a ResNet's unit."""
  c = config(name)
  program = programs.build(objective(c), fakes.normalize, programs.MESHES['one'], like=raw(),
                           optimizer=schema.Sgd(clip_norm=1., weight_decay=0.))
  begun = jax.device_get(program.init_fn())
  after, metrics = programs.run(program, programs.MESHES['one'], raw(), 8, start=begun)
  assert np.isfinite(metrics.means['loss'].value)
  for path, leaf in trees.flatten(after.params).items():
    moved = np.abs(leaf - trees.flatten(begun.params)[path]).max()
    assert np.isfinite(leaf).all() and (moved > 0. or path.endswith(NO_EFFECT)), path


@variants.mostly_slow('2 s each: a program')
def test_every_adapter_learns_and_nothing_else_of_the_network(name: str) -> None:
  c = config(name, lora=schema.Lora(rank=2))
  task, key, step = objective(c), jax.random.key(0), jnp.zeros((), jnp.int32)
  params, extra = map(programs.draw, jax.eval_shape(task.init, key, batch()))
  slope = jax.jit(jax.grad(lambda params: task.loss(params, extra, batch(), key, step).loss.value))(params)
  found = trees.flatten(slope)
  adapted = [f'backbone/blocks/{layer}/lora_{part}' for layer in schema.adapted_layers(c.model) for part in 'ab']
  assert found.keys() == {*adapted, 'head/kernel', 'head/bias'}
  assert not [path for path, leaf in found.items() if not np.abs(leaf).max() > 0.]


@variants.mostly_slow('3 s each: programs of a network')
def test_tokens_that_are_not_attended_to_count_as_absent(name: str) -> None:
  settings = variants.network(name)
  backbone, params = vit.build(settings, PX), programs.draw(shapes_of(name))
  kept = np.array([4, 0, 17])
  tokens = np.random.default_rng(1).normal(size=(2, PATCHES, settings.width)).astype(np.float32)

  def encoded(tokens: Any, positions: Any, mask: Any) -> Any:
    return backbone.encode(params, tokens, positions, grid=GRID, train=False, key=None, mask=mask).tokens

  places, mask = backbone.positions(params, GRID), np.broadcast_to(np.isin(np.arange(PATCHES), kept), (2, PATCHES))
  try:
    part = jax.jit(lambda x, p: encoded(x, p, None))(tokens[:, kept], places[kept])
  except UserError as error:
    assert INCOMPLETE in str(error)
    try:
      assert jax.eval_shape(encoded, tokens, places, mask).shape == tokens.shape
    except UserError as refusal:
      assert str(refusal).startswith('model.') and 'got a mask of tokens' in str(refusal)
    return
  whole = jax.jit(encoded)(tokens, places, mask)
  programs.assert_reordered(part, whole[:, kept], terms=48, operations=20)


@variants.mostly_slow('3 s each: programs of a network')
def test_inspection_layer_by_layer_gives_what_the_network_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(loaded.MODELS, name, variants.network(name))
  model, images = Model(loaded.weights(name)), loaded.pictures(2)
  last, grid = model.features(images, layer=-1), model.grid
  pooled = model.driver.finish(jnp.asarray(last), grid=grid).pooled
  np.testing.assert_allclose(pooled, model.features(images), rtol=0, atol=2e-4)  # once layer by layer
  np.testing.assert_allclose(model.attention(images).sum(-1), 1., atol=1e-5)
  assert model.rollout(images).shape == (2, *grid)
  try:
    assert np.isfinite(model.relevance(images[:1])).all()
  except UserError as error:
    assert 'relevance' in str(error)


needs_onnx = pytest.mark.skipif(not {'onnx', 'onnxruntime'} <= {m.name for m in __import__('pkgutil').iter_modules()},
                                reason='onnx and onnxruntime are not installed')


@needs_onnx
@variants.mostly_slow('3 s each: two exports')
def test_both_exports_give_what_the_network_does(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  monkeypatch.setitem(loaded.MODELS, name, variants.network(name))
  subject = functions.make_subject(loaded.weights(name), from_pixels=False)
  image = np.random.default_rng(0).normal(size=(3, *subject.image.shape[1:])).astype(np.float32)
  want = np.asarray(jax.jit(subject.function)(image))
  export_onnx.write(tmp_path / 'a.onnx', subject.function, {}, subject.image, output='logits', about={}, multiple=0)
  read = functions.from_stablehlo(functions.to_stablehlo(subject))
  for found in (export_onnx.run(tmp_path / 'a.onnx', image), read(image)):
    np.testing.assert_allclose(found, want, atol=1e-4 * max(1., np.abs(want).max()), rtol=0)


FILES = [('vision_transformer', 'a.npz'), ('big_vision', 'b.npz'), ('timm', 'c.safetensors'), ('timm', 'd'),
         ('huggingface', 'e'), ('run', 'f')]
"""Formats that weights are written in, and a name of such a file or folder."""


def unquantized(weights: Weights) -> Weights:
  model = weights.model
  return weights._replace(model=dataclasses.replace(model, quantize=schema.Quantize.NONE)) if isinstance(
      model, schema.ViT) else weights


@variants.mostly_slow('3 s each: six files, and programs of a network')
def test_weights_come_back_from_each_format_or_it_refuses_them(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  monkeypatch.setitem(loaded.MODELS, name, variants.network(name))
  weights, written = loaded.weights(name), []
  image = np.random.default_rng(0).normal(size=(2, *loaded.PX, 3)).astype(np.float32)

  def logits(found: Weights) -> np.ndarray:
    return np.asarray(jax.jit(inference.function(found))(inference.parameters(found), image).logits)

  for family, file in FILES:
    try:
      path, _ = saving.save(weights, str(tmp_path / file), family=family)
    except UserError:
      continue
    again = loading.load(str(path))
    written.append(family)
    if repr(again.model) != repr(weights.model):  # the same parameters: `save` compares them
      want = logits(unquantized(weights))  # files do not say how products were trained
      np.testing.assert_allclose(logits(again), want, rtol=0, atol=1e-4 * np.abs(want).max(), err_msg=family)
  assert 'run' in written


@every_kind
def test_images_may_have_any_number_of_channels(name: str) -> None:
  backbone, image = build.build_backbone(config(name)), jax.ShapeDtypeStruct((2, *PX, 5), jnp.float32)
  params, state = jax.eval_shape(backbone.init, jax.random.key(0), image)
  found, _ = jax.eval_shape(lambda p, s, x: backbone.apply(p, s, x, train=False, key=None), params, state, image)
  assert found.pooled.shape[0] == 2
  assert 5 in {leaf.shape[2] for leaf in jax.tree.leaves(params['stem']) if leaf.ndim == 4}
