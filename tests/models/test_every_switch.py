"""Each switch of a ViT through everything that is not the forward pass: sharding, cost, plan, MAE, layers, export.

The forward pass itself is compared with numpy in `test_switches.py` and `test_options.py`, and with other programs in
`tests/weights`.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import loaded
import numpy as np
import programs
import pytest
import vits
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from vit_jax.config import schema
from vit_jax.config.schema import Execution, Gelu, Kernels, LastNorm, PositionsAt, QkvBias
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.export import job
from vit_jax.export import onnx as export_onnx
from vit_jax.inspect.model import Model
from vit_jax.models.mae_decoder import Decoder
from vit_jax.models.vit import vit
from vit_jax.objectives.mae import Mae
from vit_jax.parallel import mesh as meshes
from vit_jax.plan import plan, topologies

SWITCHES: dict[str, dict[str, Any]] = {
    'none of them': {},
    'pool mean': {'pool': schema.Mean()}, 'pool mean beside a class token': {'pool': schema.Mean(class_token=True)},
    'pool first': {'pool': schema.First()}, 'pool map': {'pool': schema.Map()},
    'pool map with its own sizes': {'pool': schema.Map(heads=2, hidden=40)},
    'pool map over the class token': {'pool': schema.Map(class_token=True), 'registers': 1},
    'norm after pooling': {'pool': schema.Mean(), 'last_norm': LastNorm.POOLED},
    'norm after pooling beside a class token': {
        'pool': schema.Mean(class_token=True), 'last_norm': LastNorm.POOLED},
    'sincos': {'positions': schema.SinCos()}, 'sincos of MAE': {'positions': schema.SinCos(schema.Frequencies.MAE)},
    'no positions': {'positions': schema.NoPositions()}, 'learned2d': {'positions': schema.Learned2d()},
    'relative': {'positions': schema.Relative()}, 'shared': {'positions.at': PositionsAt.SHARED},
    'at layers': {'positions.at': PositionsAt.LAYERS, 'registers': 1},
    'rotary': {'positions': schema.Rotary(10_000., coordinates=schema.ByIndex(offset=1.))},
    'rotary in the unit interval': {'positions': schema.Rotary(coordinates=schema.UnitInterval())},
    'rotary and learned': {'positions': schema.LearnedRotary(coordinates=schema.ByIndex(5))},
    'rotary, mixed': {'positions': schema.Rotary(10., mixed=True), 'registers': 1},
    'registers': {'registers': 3}, 'distilled': {'pool.distillation': True},
    'rms': {'norm': schema.RmsNorm()}, 'rms everywhere': {
        'norm': schema.RmsNorm(), 'norm_before': True, 'stem.norm': True, 'attention.qk_norm': True,
        'attention.inner_norm': True, 'mlp.inner_norm': True, 'pool': schema.Map()},
    'norm before': {'norm_before': True}, 'norm of the stem': {'stem.norm': True},
    'no last norm': {'last_norm': LastNorm.NONE},
    'norm of query and key': {'attention.qk_norm': True}, 'inner norm of attention': {'attention.inner_norm': True},
    'inner norm of the MLP': {'mlp.inner_norm': True}, 'gated': {'mlp': schema.SwiGlu(48)},
    'gated with an inner norm': {'mlp': schema.SwiGlu(48, inner_norm=True)}, 'parallel': {'block': schema.Parallel()},
    'axial': {'block': schema.Axial(), 'pool': schema.Mean()}, 'layer scale': {'block.layer_scale': 1e-5},
    'layer scale of attention': {'block': schema.Plain(1e-5, mlp_scale=False)},
    'branch scale': {'block.branch_scale': .5}, 'exact GELU': {'gelu': Gelu.EXACT}, 'quick GELU': {'gelu': Gelu.QUICK},
    'no bias of query, key and value': {'attention.qkv_bias': QkvBias.NONE},
    'no bias of the key': {'attention.qkv_bias': QkvBias.QUERY_VALUE},
    'no bias of the output': {'attention.out_bias': False},
    'no bias of the MLP': {'mlp': schema.SwiGlu(48, bias=False)},
    'no bias of the stem': {'stem.bias': False},
}
ORDERED = ('relative', 'at layers', 'axial')
"""Their positions follow from the order of all patches, so that MAE refuses them by name."""
OF_TRAINING = {'dropout', 'drop_path', 'drop_path_even', 'dtype', 'execution', 'unroll', 'remat', 'full_remat',
               'kernels', 'init'}
MESH = AbstractMesh((2, 2, 2), meshes.AXES, axis_types=(AxisType.Auto,) * 3)
OF_SIZE = {'patch', 'width', 'depth', 'heads'}


MADE = Decoder(16, 1, 2, schema.ViT(**vits.PLAIN))


@functools.cache
def decoder() -> Any:
  return jax.eval_shape(lambda key: {'decoder': MADE.init(key), 'mask_token': MADE.init_mask(key)}, jax.random.key(0))


def tiny(name: str) -> schema.ViT:
  changes = {'execution': Execution.UNROLLED, 'kernels': Kernels.PLAIN, **SWITCHES[name]}
  return schema.replaced(schema.ViT(**vits.PLAIN), changes)


def test_every_setting_of_the_network_is_switched() -> None:
  switched = {name.partition('.')[0] for changes in SWITCHES.values() for name in changes}
  assert {field.name for field in dataclasses.fields(schema.ViT)} - OF_TRAINING - OF_SIZE == switched


@pytest.mark.parametrize('name', SWITCHES)
def test_every_kernel_is_split(name: str) -> None:
  settings = tiny(name)
  shapes, backbone = vits.shapes_of(settings), vit.build(settings, vits.PX)
  specs = programs.specs(lambda: backbone.init(jax.random.key(0), vits.some_image())[0], on=MESH)
  parts = jax.tree.leaves_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
  whole = {jax.tree_util.keystr(path, simple=True, separator='/') for path, spec in parts if not any(spec)}
  assert not [path for path in whole if path.endswith('/kernel')] and len(parts) == len(trees.flatten(shapes))


@pytest.mark.quick('rms everywhere', 'pool map over the class token', 'rotary and learned', 'norm after pooling',
                   'no last norm', 'relative', reason='0.3 s each: traces of steps and layers')
@pytest.mark.parametrize('name', SWITCHES)
def test_layers_one_by_one_and_a_part_of_the_patches_have_the_shapes_of_the_whole(name: str) -> None:
  settings = tiny(name)
  shapes, backbone, heads = vits.shapes_of(settings), vit.build(settings, vits.PX), settings.heads
  image, num_patches = jax.ShapeDtypeStruct((2, *vits.PX, 3), jnp.float32), math.prod(vits.GRID)
  num_tokens = cost_tokens(settings)

  def layered(params: Any, image: jax.Array) -> Any:
    tokens, captured = backbone.block(params, backbone.begin(params, image), layer=1, capture=True)
    return (backbone.finish(params, tokens, grid=vits.GRID), backbone.readout_weights(params, tokens),
            captured.get('attention'))

  features, weights, attention = jax.eval_shape(layered, shapes, image)
  assert features.pooled.shape == (2, settings.width) and features.tokens.shape == (2, num_patches, settings.width)
  assert weights.shape == (2, num_tokens)
  assert attention is None if name == 'axial' else attention.shape == (2, heads, num_tokens, num_tokens)
  mae = Mae(backbone, MADE, patch=settings.patch, hidden=.5, normalized=True)

  batch = {'image': image}
  params = {'backbone': shapes, **decoder()}

  def loss() -> Any:
    def total(params: Any, batch: Any, key: jax.Array) -> jax.Array:
      return mae.loss(params, {}, batch, key, jnp.zeros((), jnp.int32)).loss.sum

    return jax.eval_shape(total, params, batch, jax.random.key(0))

  if name in ORDERED:
    with pytest.raises(UserError, match='expected all 2 x 3 patch tokens of an image, got 3'):
      loss()
  else:
    assert loss().shape == ()


def cost_tokens(settings: schema.ViT) -> int:
  return math.prod(vits.GRID) + settings.num_extra


@pytest.mark.slow(reason='5 s each: three programs, two exports')
@pytest.mark.skipif(not {'onnx', 'onnxruntime'} <= {m.name for m in __import__('pkgutil').iter_modules()},
                    reason='onnx and onnxruntime are not installed')
@pytest.mark.parametrize('name', SWITCHES)
def test_inspection_and_both_exports_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  settings = schema.replaced(schema.ViT(patch=16, width=32, depth=1, heads=4, mlp=schema.Mlp(48)), SWITCHES[name])
  monkeypatch.setitem(loaded.MODELS, name, settings)
  found = loaded.weights(name)
  model, pictures = Model(found), loaded.pictures(2)
  last = model.features(pictures, layer=-1)
  pooled = model.driver.finish(jnp.asarray(last), grid=model.grid).pooled
  np.testing.assert_allclose(pooled, model.features(pictures), rtol=0, atol=2e-4)  # once layer by layer
  np.testing.assert_allclose(model.attention(pictures).sum(-1), 1., atol=1e-5)
  assert model.rollout(pictures).shape == (2, 2, 3)
  if name != 'axial':
    assert np.isfinite(model.relevance(pictures[:1])).all()
  planned = plan.Subject(schema.Config(model=settings, image_px=loaded.PX, batch_size=8),
                         topologies.parse('cpu:8'), 1437, 10, False)
  memory = plan.Plan(planned, plan.abstract_parts(planned), None, 'not asked for').memory
  assert memory['parameters'] >= trees.num_bytes(found.params['backbone']) / 8 and memory['activations'] > 0
  job.write(found, tmp_path / 'a.onnx', from_pixels=False, any_size=settings.positions.is_resizable)  # and compares
  job.write(found, tmp_path / 'a.stablehlo', from_pixels=False)
  assert export_onnx.run(tmp_path / 'a.onnx', np.zeros((2, 32, 48, 3), np.float32)).shape == (2, loaded.CLASSES)
