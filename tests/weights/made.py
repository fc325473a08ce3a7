"""Small networks with random weights, as `weights.loading` loads them."""
from __future__ import annotations

from typing import Any

import numpy as np

from tests.weights import drawn
from vit_jax.config import schema
from vit_jax.config.schema import Geometry, Interpolation, checks
from vit_jax.core import trees
from vit_jax.core.types import Params
from vit_jax.weights import loading
from vit_jax.weights.network import Report, Weights
from vit_jax.weights.preprocess import Preprocess

MODEL = schema.ViT(patch=8, width=32, depth=2, heads=4, mlp=schema.Mlp(48))
MIXER = schema.Mixer(patch=8, width=32, depth=2, tokens_mlp=10, channels_mlp=40)
BIT = schema.ResNet((1, 2), 32)
EFFICIENTNET = schema.EfficientNet(dropout=.2, drop_path=.2)  # B0, as only published ones are known by their shapes
DECODER = schema.Mae(decoder_width=16, decoder_depth=2, decoder_heads=2)
CLASSES = tuple(f'n{i:08d} kind {i}, sort {i}' for i in range(7))
HOW = Preprocess(Geometry.TORCHVISION, 36, (32, 32), Interpolation.BICUBIC, True, (.5, .5, .5), (.5, .5, .5), 'made')


_SHAPES: dict[str, dict[str, Any]] = {}
_trace = loading.expected  # before `conftest.py` puts the function below in its place


def expected(*args: Any, with_dist: bool) -> Params:
  """Returns what `loading.expected` does, which traces a network, and keeps it for the next call."""
  key = repr((*args, with_dist))
  if key not in _SHAPES:
    _SHAPES[key] = trees.flatten(_trace(*args, with_dist=with_dist))
  return trees.unflatten(_SHAPES[key])


def network(model: schema.Model = MODEL, *, num_classes: int = 7, head: schema.Head | None = None,
            decoder: schema.Mae | None = None, preprocess: Preprocess = HOW, class_names: tuple[str, ...] = CLASSES,
            **changes: Any) -> Weights:
  """Weights of a network; `changes` are settings of its model by dotted names."""
  model, head = checks.replaced(model, changes), head or schema.Head()
  shapes = trees.flatten(expected(model, head, num_classes, decoder, preprocess.image_px,
                                  with_dist=isinstance(model, schema.ViT) and model.pool.distillation))
  params = trees.unflatten({name: drawn.tensor(name, leaf.shape) for name, leaf in shapes.items()})
  state = params.pop('state', {})
  return Weights(model, head, num_classes, params, state, decoder, preprocess, class_names, 'made', 'made',
                         Report())


def assert_same(a: Weights, b: Weights) -> None:
  """Every bit of every parameter and running statistic."""
  one, two = (trees.flatten({**x.params, 'state': x.state}) for x in (a, b))
  assert one.keys() == two.keys()
  for name, leaf in one.items():
    assert leaf.shape == two[name].shape and np.asarray(leaf).tobytes() == np.asarray(two[name]).tobytes(), name
