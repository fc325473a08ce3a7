"""Pretrained networks as modules of `flax.nnx`: `vit_jax.nnx.load(…)`.

    network = vit_jax.nnx.load('vit.safetensors', num_classes=10)
    optimizer = nnx.Optimizer(network, optax.adamw(1e-4), wrt=nnx.Param)
    logits = network(images).logits

The parameters are `nnx.Param`s with the parameter paths of this package, so that `nnx.jit`, `nnx.grad`, `nnx.split`
and `nnx.Optimizer` work as with any module. A `Network` computes with the functions of this package, so that the
outputs are the same to the last bit. (`nnx.bridge.ToNNX` would keep a linen module, and start with new parameters.)
"""
from __future__ import annotations

import os
from typing import Any

from flax import nnx

from vit_jax import api
from vit_jax.core.types import Array, Key, Outputs, Params
from vit_jax.inspect.model import Model


class Network(nnx.Module):
  """A network with its parameters, which nnx can train.

  model: the loaded weights, whose methods `prepare` and `normalize` make the input from images.
  params: the parameters, nested as in `Model.functional`.
  """

  def __init__(self, model: Model, *, num_classes: int | None = None, seed: int = 0) -> None:
    """Copies the parameters of a loaded network; see `Model.functional` for `num_classes` and `seed`."""
    params, self.function = model.functional(num_classes=num_classes, seed=seed)
    self.model = model
    self.params = _module(params)

  def __call__(self, image: Array, *, train: bool = False, key: Key | None = None) -> Outputs:
    """Returns features and logits (None without a head) of normalized images `[B, H, W, 3]` f32.

    Dropout and stochastic depth are active if `train` is True, and draw from `key`.
    """
    return self.function(self.pure_params(), image, train=train, key=key)

  def pure_params(self) -> Params:
    """Returns the parameters as nested dicts of arrays."""
    params: Params = nnx.to_pure_dict(nnx.state(self.params))
    return params

  def save(self, to: str | os.PathLike[str], *, family: str = '', overwrite: bool = False) -> list[str]:
    """Writes the network with its current parameters, and returns what `Model.save` returns."""
    return self.model.save(to, params=self.pure_params(), family=family, overwrite=overwrite)


def load(where: str | os.PathLike[str], *, num_classes: int | None = None, seed: int = 0, **options: Any) -> Network:
  """Returns the network of weights in any format as a module.

  Args:
    where: the weights, see `vit_jax.load`, which also takes `options`.
    num_classes: the number of classes of a new head; None = the head of the weights, if they have one; 0 = no head.
    seed: the seed of the parameters of a new head.

  Raises:
    UserError: the weights cannot be read.
  """
  return Network(api.load(where, **options), num_classes=num_classes, seed=seed)


def _module(params: Params) -> nnx.Dict[Any]:
  """Returns nested dicts of arrays as nested modules of `nnx.Param`."""
  return nnx.Dict({name: _module(part) if isinstance(part, dict) else nnx.Param(part)
                   for name, part in params.items()})
