"""Loaded weights as a function of images, for prediction and export."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax

from vit_jax.config import schema
from vit_jax.core.contracts import Backbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Outputs, PyTree
from vit_jax.data.labels import classes as naming
from vit_jax.data.labels import imagenet
from vit_jax.models import backbones, heads, probe
from vit_jax.objectives import distill
from vit_jax.objectives.networks import NetworkView, statistics
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
  return ' '.join([_origin(weights, classes), *([SIGMOID] if weights.is_sigmoid and weights.num_classes else [])])


def _origin(weights: Weights, classes: str) -> str:
  if not weights.num_classes:
    return f'{weights.source} has no head, so it predicts no classes.'
  if not weights.class_names and (assumed := imagenet.by_count(weights.num_classes)):
    return (f'{weights.source} does not name its classes. It has {weights.num_classes:,}, so the names of '
            f'{assumed.title} are used. Pass others with --classes=FILE.')
  if not weights.class_names:
    return (f'{weights.source} does not name its {weights.num_classes:,} classes, which are shown by number. Pass '
            'their names with --classes=FILE.')
  origin = f'from --classes={classes}' if classes else 'saved with the weights'
  return (f'Class names of {weights.source}: {weights.num_classes:,} {origin}, from {weights.class_names[0]!r} to '
          f'{weights.class_names[-1]!r}.')


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
