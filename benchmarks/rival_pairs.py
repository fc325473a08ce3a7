"""big_vision's losses over all pairs of a batch, and its step on images and texts; needs a checkout, no TensorFlow.

The sigmoid loss is the function `loss_fn` of the checkout's trainer `trainers/proj/image_text/siglip.py`, which is read
from its text, since the trainer is a program and no module. It is called with the two towers of the checkout, or with
vectors alone. That trainer has no softmax; in its place stands `bidirectional_contrastive_loss` of the checkout's
`utils.py`, for the same vectors.
"""
from __future__ import annotations

import ast
import builtins
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import rival
from vit_jax.config.schema import PairLoss
from vit_jax.core.errors import UserError
from vit_jax.plan import compile, quick, topologies

if TYPE_CHECKING:
  import jax

TRAINER = 'big_vision/trainers/proj/image_text/siglip.py'
LENGTH, VOCABULARY, WIDTH, PX = 64, 32_000, 768, 224  # of texts and images of B/16, arXiv 2303.15343
DEPTH = 12
ADAM = {'b2': .95}


class Request(NamedTuple):
  """A train step of two towers of size B.

  checkout: folder that has the package `big_vision`.
  batch: pairs of all devices.
  whole_mib: parameters above this size are split over all devices; None = none is, as its trainer has it.
  scan: blocks in a loop, of which nothing is saved for the backward pass; else unrolled, and everything is.
  depth: blocks of each tower.
  """
  checkout: str
  topology: str
  batch: int
  loss: PairLoss
  whole_mib: int | None = None
  scan: bool = False
  depth: int = DEPTH


def ask(request: Request) -> compile.Answer:
  """Compiles in a child process.

  Raises:
    UserError: the checkout has no big_vision, or the compiler failed.
  """
  rival.check(request.checkout)
  return compile.in_process('benchmarks.rival_pairs', request, topologies.parse(request.topology))


def ask_quick(request: Request) -> compile.Answer:
  """Returns the answer by two shallow programs, as quick plans do; unrolled programs of all blocks take long."""
  if request.scan:
    return ask(request)
  low, high = (ask(request._replace(depth=depth)) for depth in quick.DEPTHS)
  return ask(request) if low.overflow or high.overflow else quick.extend(request.depth, low, high)


def measure(request: Request, dump: pathlib.Path) -> compile.Answer:
  """Compiles in this process, whose environment must have been set, with the compiler's dump in the folder `dump`."""
  topology = topologies.parse(request.topology)
  devices = topologies.open_devices(topology)
  return compile.examine(lambda: lower(request, devices), topology, dump)


def lower(request: Request, devices: Any) -> jax.stages.Lowered:
  """The step, lowered for devices that need not be here."""
  import jax
  import jax.numpy as jnp
  towers, *_ = rival.modules(request.checkout, 'models.proj.image_text.two_towers', 'models.vit',
                             'models.proj.image_text.text_transformer')
  blocks = {'scan': request.scan, 'depth': request.depth}
  network = towers.Model(
      image={'variant': 'B/16', 'pool_type': 'map', 'dtype_mm': 'bfloat16'} | blocks,
      text={'variant': 'B', 'vocab_size': VOCABULARY} | blocks,
      out_dim=(None, WIDTH), temperature_init=10., bias_init=-10. if request.loss is PairLoss.SIGMOID else None)
  batch = (jax.ShapeDtypeStruct((request.batch, PX, PX, 3), jnp.float32),
           jax.ShapeDtypeStruct((request.batch, LENGTH), jnp.int32))
  params = jax.eval_shape(network.init, jax.eval_shape(lambda: jax.random.key(0)), *batch)['params']
  return rival.lower_step(request, devices, rival.Task(
      params, mean_loss(request.checkout, request.loss, network.apply), batch, ADAM))


def mean_loss(checkout: str, loss: PairLoss, apply: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the function of parameters, a key, images and texts whose gradient big_vision takes.

  Args:
    checkout: folder that has the package `big_vision`.
    loss: which one.
    apply: of a network: vectors of images and of texts, and a dict with `t` and, for the sigmoid, `b`.
  """
  if loss is PairLoss.SIGMOID:
    return lambda params, key, images, texts: _of_trainer(checkout, apply, images, texts, key)(params)
  (utils,) = rival.modules(checkout, 'utils')

  def softmax(params: Any, key: Any, images: Any, texts: Any) -> Any:
    image, text, found = apply({'params': params}, images, texts, train=True, rngs={'dropout': key})
    return utils.bidirectional_contrastive_loss(image, text, found['t'], reduction=True)[0]

  return softmax


def _of_trainer(checkout: str, apply: Callable[..., Any], images: Any, texts: Any, key: Any) -> Callable[[Any], Any]:
  """Returns the trainer's `loss_fn` with the names that its surroundings define.

  Raises:
    UserError: the checkout's trainer has no such function.
  """
  import jax
  import jax.numpy as jnp

  class Network:
    """What the trainer calls `model`."""

  Network.apply = staticmethod(apply)  # type: ignore[attr-defined]
  path = pathlib.Path(checkout, TRAINER)
  found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
           and node.name == 'loss_fn'] if path.is_file() else []
  if len(found) != 1:
    raise UserError(f'--big_vision: expected one function loss_fn in {path}, got {len(found)}. Give a checkout of '
                    '2024 or later.')
  names = {'jax': jax, 'jnp': jnp, 'model': Network, 'images': images, 'labels': texts, 'rng_model': key}
  exec(builtins.compile(ast.Module([found[0]], []), str(path), 'exec'), names)
  return names['loss_fn']


if __name__ == '__main__':
  compile.main(*sys.argv[1:], by=measure)
