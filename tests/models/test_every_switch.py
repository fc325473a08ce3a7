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
from vit_jax.config.schema import Execution, Gelu, Kernels, Norm, Pool, Positions, PositionsAt, RotaryPlaces
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
    'pool mean': {'pool': Pool.MEAN}, 'pool patches': {'pool': Pool.PATCHES}, 'pool first': {'pool': Pool.FIRST},
    'pool map': {'pool': Pool.MAP}, 'pool map with its own sizes': {'pool': Pool.MAP, 'pool_heads': 2, 'pool_mlp': 40},
    'pool map over the class token': {'pool': Pool.MAP_CLS, 'registers': 1},
    'norm after pooling': {'pool': Pool.MEAN, 'norm_after_pool': True},
    'norm after pooling beside a class token': {'pool': Pool.PATCHES, 'norm_after_pool': True},
    'sincos': {'positions': Positions.SINCOS2D}, 'sincos of MAE': {'positions': Positions.SINCOS2D_MAE},
    'no positions': {'positions': Positions.NONE}, 'learned2d': {'positions': Positions.LEARNED2D},
    'relative': {'positions': Positions.RELATIVE}, 'shared': {'positions_at': PositionsAt.SHARED},
    'at layers': {'positions_at': PositionsAt.LAYERS, 'registers': 1},
    'rotary': {'positions': Positions.ROTARY2D, 'rotary_base': 10_000., 'rotary_offset': 1.},
    'rotary in the unit interval': {'positions': Positions.ROTARY2D, 'rotary_places': RotaryPlaces.UNIT},
    'rotary and learned': {'positions': Positions.LEARNED_ROTARY2D, 'rotary_grid': 5},
    'rotary, mixed': {'positions': Positions.ROTARY2D, 'rotary_mixed': True, 'rotary_base': 10., 'registers': 1},
    'registers': {'registers': 3}, 'distilled': {'distilled': True},
    'rms': {'norm': Norm.RMS}, 'rms everywhere': {
        'norm': Norm.RMS, 'norm_before': True, 'stem_norm': True, 'qk_norm': True, 'attn_norm': True, 'mlp_norm': True,
        'pool': Pool.MAP},
    'norm before': {'norm_before': True}, 'norm of the stem': {'stem_norm': True},
    'no last norm': {'final_norm': False},
    'norm of query and key': {'qk_norm': True}, 'inner norm of attention': {'attn_norm': True},
    'inner norm of the MLP': {'mlp_norm': True}, 'gated': {'swiglu': True},
    'gated with an inner norm': {'swiglu': True, 'mlp_norm': True}, 'parallel': {'parallel': True},
    'axial': {'axial': True, 'pool': Pool.MEAN}, 'layer scale': {'layer_scale': 1e-5},
    'layer scale of attention': {'layer_scale': 1e-5, 'mlp_scale': False},
    'branch scale': {'branch_scale': .5}, 'exact GELU': {'gelu': Gelu.EXACT}, 'quick GELU': {'gelu': Gelu.QUICK},
    'no bias of query, key and value': {'qkv_bias': False}, 'no bias of the key': {'key_bias': False},
    'no bias of the output': {'out_bias': False}, 'no bias of the MLP': {'mlp_bias': False, 'swiglu': True},
    'no bias of the stem': {'stem_bias': False},
}
ORDERED = ('relative', 'at layers', 'axial')
"""Their positions follow from the order of all patches, so that MAE refuses them by name."""
OF_TRAINING = {'dropout', 'drop_path', 'drop_path_even', 'attention_dropout', 'dtype', 'execution', 'unroll', 'remat',
               'full_remat', 'attention', 'mlp_kernel', 'kernels', 'position_resize', 'norm_eps', 'init'}
MESH = AbstractMesh((2, 2, 2), meshes.AXES, axis_types=(AxisType.Auto,) * 3)
OF_SIZE = {'patch', 'width', 'depth', 'heads', 'mlp', 'stem'}


MADE = Decoder(16, 1, 2, schema.ViT(**vits.PLAIN))


@functools.cache
def decoder() -> Any:
  return jax.eval_shape(lambda key: {'decoder': MADE.init(key), 'mask_token': MADE.init_mask(key)}, jax.random.key(0))


def tiny(name: str) -> schema.ViT:
  changes = {'execution': Execution.UNROLLED, 'kernels': Kernels.PLAIN, **SWITCHES[name]}
  return dataclasses.replace(schema.ViT(**vits.PLAIN), **changes)


def test_every_setting_of_the_network_is_switched() -> None:
  switched = {field for changes in SWITCHES.values() for field in changes}
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
  assert attention is None if settings.axial else attention.shape == (2, heads, num_tokens, num_tokens)
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
  return math.prod(vits.GRID) + settings.registers + settings.distilled + settings.pool.has_class_token


@pytest.mark.slow(reason='5 s each: three programs, two exports')
@pytest.mark.skipif(not {'onnx', 'onnxruntime'} <= {m.name for m in __import__('pkgutil').iter_modules()},
                    reason='onnx and onnxruntime are not installed')
@pytest.mark.parametrize('name', SWITCHES)
def test_inspection_and_both_exports_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  settings = dataclasses.replace(schema.ViT(patch=16, width=32, depth=1, heads=4, mlp=48), **SWITCHES[name])
  monkeypatch.setitem(loaded.MODELS, name, settings)
  found = loaded.weights(name)
  model, pictures = Model(found), loaded.pictures(2)
  last = model.features(pictures, layer=-1)
  pooled = model.driver.finish(jnp.asarray(last), grid=model.grid).pooled
  np.testing.assert_allclose(pooled, model.features(pictures), rtol=0, atol=2e-4)  # once layer by layer
  np.testing.assert_allclose(model.attention(pictures).sum(-1), 1., atol=1e-5)
  assert model.rollout(pictures).shape == (2, 2, 3)
  if not settings.axial:
    assert np.isfinite(model.relevance(pictures[:1])).all()
  planned = plan.Subject(schema.Config(model=settings, image_px=loaded.PX, batch_size=8),
                         topologies.parse('cpu:8'), 1437, 10, False)
  memory = plan.Plan(planned, plan.abstract_parts(planned), None, 'not asked for').memory
  assert memory['parameters'] >= trees.num_bytes(found.params['backbone']) / 8 and memory['activations'] > 0
  job.write(found, tmp_path / 'a.onnx', from_pixels=False, any_size=settings.positions.is_resizable)  # and compares
  job.write(found, tmp_path / 'a.stablehlo', from_pixels=False)
  assert export_onnx.run(tmp_path / 'a.onnx', np.zeros((2, 32, 48, 3), np.float32)).shape == (2, loaded.CLASSES)
