"""Loaded weights as a function of images, for prediction and export, and for training loops of a person's own."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from vit_jax.config import schema
from vit_jax.core import axes, trees
from vit_jax.core.contracts import Backbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Key, Outputs, Params, PyTree
from vit_jax.data.labels import classes as naming
from vit_jax.data.labels import imagenet
from vit_jax.models import backbones, heads, probe
from vit_jax.objectives import distill
from vit_jax.objectives.networks import NetworkView, statistics
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel import sharding
from vit_jax.weights import loading
from vit_jax.weights import preprocess as preprocessing
from vit_jax.weights.hints import AS_FOUND, Reading
from vit_jax.weights.network import Weights

SIGMOID = 'Each probability is the sigmoid of one class alone, as in training; they need not add up to 1.'


def load(where: str, reading: Reading = AS_FOUND, *, classes: str = '') -> Weights:
  """Loads weights as `loading.load` does, and names their outputs as the file `classes` does ('' = unchanged).

  Raises:
    UserError: the weights or the file cannot be read, or the file has another number of names.
  """
  names = naming.read(classes, setting='--classes') if classes else ()
  found = loading.load(where, **reading._asdict())
  return with_class_names(found, names, source=f'--classes={classes}')


def with_class_names(weights: Weights, names: Sequence[str], *, source: str = 'classes') -> Weights:
  """Returns the weights with these names of their outputs; unchanged if `names` is empty. `source` is for the error.

  Raises:
    UserError: the weights have another number of outputs.
  """
  if names and len(names) != weights.num_classes:
    raise UserError(f'{source}: expected {weights.num_classes:,} names, one per output of the weights, got '
                    f'{len(names):,}. Pass the classes of these weights in the order of their outputs.')
  return weights._replace(class_names=tuple(names)) if names else weights


def describe_class_names(weights: Weights, *, classes: str) -> str:
  """Returns a line on the outputs' names and probabilities; `classes` is the file passed to `load`."""
  source, count = weights.source, weights.num_classes
  if not count:
    return f'{source} has no head, so it predicts no classes.'
  if weights.class_names:
    origin = f'from --classes={classes}' if classes else 'saved with the weights'
    found = (f'Class names of {source}: {count:,} {origin}, from {weights.class_names[0]!r} to '
             f'{weights.class_names[-1]!r}.')
  elif assumed := imagenet.by_count(count):
    found = (f'{source} does not name its classes. It has {count:,}, so the names of {assumed.title} are used. Pass '
             'others with --classes=FILE.')
  else:
    found = (f'{source} does not name its {count:,} classes, which are shown by number. Pass their names with '
             '--classes=FILE.')
  return f'{found} {SIGMOID}' if weights.is_sigmoid else found


def backbone(weights: Weights) -> Backbone:
  """Returns the network under the head of these weights, for a forward pass alone.

  On CPUs it loops over its blocks, if the weights' settings leave that open: a loop compiles in a third of the time and
  is as fast. Unrolled, XLA also copies the parameters of all blocks out of their stack, as much memory again.
  """
  model = weights.model
  if jax.default_backend() == 'cpu' and getattr(model, 'execution', None) is schema.Execution.AUTO:
    model = dataclasses.replace(model, execution=schema.Execution.SCAN)  # type: ignore[arg-type]
  return probe.around(backbones.build(model, weights.preprocess.image_px), weights.head)


def eval_recipe(weights: Weights) -> schema.Recipe:
  """Returns the preprocessing of images for these weights."""
  return schema.Recipe(**preprocessing.recipe_values(weights.preprocess))


def parameters(weights: Weights) -> PyTree:
  """Returns the parameters that `function` takes."""
  return view(weights).select(weights.params, statistics(weights.state))


def function(weights: Weights) -> Callable[[PyTree, Array], Outputs]:
  """Maps `(parameters, image [B, H, W, 3] f32, normalized)` to features and logits (None without a head)."""
  return view(weights).predict


def head(weights: Weights, params: PyTree) -> Callable[[Features], Array] | None:
  """Maps features to logits `[B, C]` with these parameters; None without a head."""
  logits = view(weights).logits
  return functools.partial(jax.jit(logits), params) if logits else None


def view(weights: Weights) -> NetworkView:
  """Returns the network of these weights as the view of a run, with a head if they have one."""
  network = backbone(weights)
  if not weights.num_classes:
    return NetworkView(network)
  return distill.view(network, heads.build(weights.head, weights.model))


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
      params: as `make_function` returns them.
      image: `[B, H, W, 3]` f32, normalized as `Model.normalize` does.
      train: whether dropout and stochastic depth are used, if the network has them.
      key: random numbers for them.

    Raises:
      AssertionError: the image has another number of axes, or is not of a floating type, such as pixels in u8.
      UserError: `train` with a network that has running statistics.
    """
    import chex  # takes 0.1 s
    chex.assert_rank(image, 4)
    chex.assert_type(image, float)
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


def make_function(weights: Weights, *, num_classes: int | None = None, seed: int = 0) -> tuple[Params, Function]:
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
  logits = distill.view(backbone, heads.build(weights.head, weights.model)).logits if count else None
  return params, Function(weights, backbone, count, logits)


def with_params(weights: Weights, params: Params) -> Weights:
  """Returns the weights with other parameters, as `make_function` returned them and a training loop changed them.

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


def _init(weights: Weights, network: Backbone, num_classes: int, key: Key) -> Params:
  """Returns new parameters of the network with a head of so many classes."""
  image = jnp.zeros((1, *weights.preprocess.image_px, 3), jnp.float32)
  params, state = network.init(key, image)
  if not num_classes:
    return {'backbone': params}
  features = jax.eval_shape(lambda: network.apply(params, state, image, train=False, key=None)[0])
  head = heads.build(weights.head, weights.model)
  found = {'backbone': params, 'head': head.init(key, features.pooled.shape[-1], num_classes)}
  if features.distilled is not None:
    found[distill.HEAD_DIST] = head.init(key, features.distilled.shape[-1], num_classes)
  return found
