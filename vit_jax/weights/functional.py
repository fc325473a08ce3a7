"""Loaded weights as a pure function of their parameters, for training loops of a person's own."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from vit_jax.core import axes, trees
from vit_jax.core.contracts import Backbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Key, Outputs, Params, PyTree
from vit_jax.models import backbones, heads, probe
from vit_jax.objectives import distill
from vit_jax.objectives.networks import NetworkView
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel import sharding
from vit_jax.weights.network import Weights


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
  """A network as a pure function: `apply(params, image, train=False, key=None)`.

  `jax.jit`, `jax.grad` and `jax.vmap` take it; `train` is static. It holds no parameters, but the running statistics of
  a network with BatchNorm, which is only evaluated.
  """
  weights: Weights
  backbone: Backbone
  num_classes: int
  logits: Callable[[PyTree, Features], Array] | None

  def __call__(self, params: Params, image: Array, *, train: bool = False, key: Key | None = None) -> Outputs:
    """Returns features and logits (None without a head).

    Args:
      params: as `make` returns them.
      image: `[B, H, W, 3]` f32, normalized as `Model.normalize` does.
      train: whether dropout and stochastic depth are used, if the network has them.
      key: random numbers for them.

    Raises:
      UserError: `train` with a network that has running statistics.
    """
    if train and self.weights.state:
      raise UserError(f'{self.weights.source}: expected a network without BatchNorm for train=True, got one whose '
                      'running statistics change in training. Use vit-jax train, or train=False.')
    features, _ = self.backbone.apply(params['backbone'], self.weights.state, image, train=train, key=key)
    return Outputs(self.logits(params, features) if self.logits else None, features)

  def shardings(self, mesh: Mesh) -> PyTree:
    """Returns a NamedSharding for each parameter, those with which `vit-jax train` trains the network.

    Args:
      mesh: with any of the axes `data`, `fsdp` and `tensor`.

    Raises:
      UserError: the mesh has another axis.
    """
    if others := set(mesh.axis_names) - set(meshes.AXES):
      raise UserError(f'mesh: expected the axes {", ".join(meshes.AXES)} or some of them, got {", ".join(others)}. '
                      "Create it with jax.make_mesh((2, 4), ('data', 'fsdp')).")
    names = (*mesh.axis_names, *(name for name in meshes.AXES if name not in mesh.axis_names))
    grid = np.reshape(mesh.devices, mesh.devices.shape + (1,) * (len(names) - mesh.devices.ndim))
    complete = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    shapes, labels = axes.trace(lambda: _init(self.weights, self.backbone, self.num_classes, jax.random.key(0)))
    return sharding.shardings(sharding.param_specs(shapes, labels, complete), mesh)


def make(weights: Weights, *, num_classes: int | None = None, seed: int = 0) -> tuple[Params, Function]:
  """Returns parameters and the function of them.

  Args:
    weights: as loaded.
    num_classes: of a new head, initialized as the network's settings say; None = the head of the weights, if they
      have one; 0 = no head.
    seed: of the parameters of a new head.

  Returns:
    Nested dicts of f32 arrays: `backbone`, and with a head `head` (and `head_dist` for a distillation token).
  """
  count = weights.num_classes if num_classes is None else num_classes
  kept = ('backbone', *(('head', distill.HEAD_DIST) if num_classes is None and count else ()))
  params = {name: jax.tree.map(jnp.asarray, weights.params[name]) for name in kept if name in weights.params}
  backbone = probe.around(backbones.build(weights.model, weights.preprocess.image_px), weights.head)
  if num_classes:
    fresh = _init(weights, backbone, num_classes, jax.random.key(seed))
    params |= {name: part for name, part in fresh.items() if name != 'backbone'}
  view = distill.view(backbone, heads.build(weights.head, weights.model)) if count else NetworkView(backbone)
  return params, Function(weights, backbone, count, view.logits)


def with_params(weights: Weights, params: Params) -> Weights:
  """Returns the weights with other parameters, as `make` returned them and a training loop changed them.

  Raises:
    UserError: a parameter is missing, or the backbone has others, or one has another shape.
  """
  host = jax.tree.map(np.asarray, jax.device_get(params))
  if wrong := trees.difference(host.get('backbone', {}), weights.params['backbone'], found_name='params',
                               wanted_name='the weights'):
    raise UserError(f'params: expected the parameters of {weights.source}, got others:\n{wrong}')
  kernel = host.get('head', {}).get('kernel')
  count = 0 if kernel is None else int(kernel.shape[-1])
  rest = {name: part for name, part in weights.params.items() if name not in ('backbone', 'head', distill.HEAD_DIST)}
  return weights._replace(params={**rest, **host}, num_classes=count,
                          class_names=weights.class_names if count == weights.num_classes else ())


def _init(weights: Weights, backbone: Backbone, num_classes: int, key: Key) -> Params:
  """Returns new parameters of the network with a head of so many classes."""
  image = jnp.zeros((1, *weights.preprocess.image_px, 3), jnp.float32)
  params, state = backbone.init(key, image)
  if not num_classes:
    return {'backbone': params}
  features = jax.eval_shape(lambda: backbone.apply(params, state, image, train=False, key=None)[0])
  head = heads.build(weights.head, weights.model)
  found = {'backbone': params, 'head': head.init(key, features.pooled.shape[-1], num_classes)}
  if features.distilled is not None:
    found[distill.HEAD_DIST] = head.init(key, features.distilled.shape[-1], num_classes)
  return found
