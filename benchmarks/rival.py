"""The train step of big_vision for a topology, compiled as `plan` compiles ours; needs a checkout, no TensorFlow.

Its network, optimizer and sharding rules are those of the checkout. The step around them does what its trainer does:
the gradient of softmax cross-entropy, clipping, Adam with the first moment in bf16, decoupled decay, and the norms of
gradients, parameters and updates, without mixup. The batch is split over all devices.
"""
from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import child
from vit_jax.core.errors import UserError
from vit_jax.plan import compile, topologies

if TYPE_CHECKING:
  import jax

WHOLE_MIB = 4
"""Largest parameters that big_vision's rule for sharding leaves on every device, if nothing else is asked of it."""
STEPS = {'total_steps': 100_000, 'batch_size': 1_024, 'data_size': 1_281_167}
"""Numbers of the learning-rate schedule; they do not change the program's size."""


class Request(NamedTuple):
  """A train step of big_vision.

  checkout: folder that has the package `big_vision`.
  network: width, depth, mlp, heads, patch, px and classes.
  batch: images of all devices.
  whole_mib: parameters above this size are split over all devices; None = none is.
  scan: blocks in a loop, of which nothing is saved for the backward pass; else unrolled, and everything is.
  """
  checkout: str
  topology: str
  network: dict[str, int]
  batch: int
  whole_mib: int | None = WHOLE_MIB
  scan: bool = False


class _Settings(dict):
  """A part of big_vision's config: it is read by key, by attribute and with `get`."""
  __getattr__ = dict.__getitem__


def ask(request: Request) -> compile.Answer:
  """Compiles in a child process.

  Raises:
    UserError: the checkout has no big_vision, or the compiler failed.
  """
  check(request.checkout)
  return compile.in_process('benchmarks.rival', request, topologies.parse(request.topology))


def check(checkout: str) -> None:
  """Raises a `UserError` if a folder has no big_vision."""
  if not (pathlib.Path(checkout) / 'big_vision' / 'sharding.py').is_file():
    raise UserError(f'--big_vision: expected a folder with the package big_vision, got {checkout}. '
                    'Give a checkout of its repository.')


def modules(checkout: str, *names: str) -> list[Any]:
  """Imports modules of a checkout."""
  sys.path.insert(0, checkout)
  with child.without_unused():
    return [importlib.import_module(f'big_vision.{name}') for name in names]


def measure(request: Request, dump: pathlib.Path) -> compile.Answer:
  """Compiles in this process, whose environment must have been set, with the compiler's dump in the folder `dump`."""
  topology = topologies.parse(request.topology)
  devices = topologies.open_devices(topology)
  return compile.examine(lambda: lower(request, devices), topology, dump)


def lower(request: Request, devices: Any) -> jax.stages.Lowered:
  """The step, lowered for devices that need not be here."""
  import jax
  import jax.numpy as jnp
  sizes, (vit,) = request.network, modules(request.checkout, 'models.vit')
  network = vit.Model(sizes['classes'], patch_size=(sizes['patch'],) * 2, width=sizes['width'], depth=sizes['depth'],
                      mlp_dim=sizes['mlp'], num_heads=sizes['heads'], pool_type='gap', scan=request.scan,
                      dtype_mm='bfloat16')

  def loss(params: Any, key: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits, _ = network.apply({'params': params}, images, train=True, rngs={'dropout': key})
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, 1))

  batch = [jax.ShapeDtypeStruct((request.batch, *shape), jnp.float32)
           for shape in ((sizes['px'], sizes['px'], 3), (sizes['classes'],))]
  params = jax.eval_shape(network.init, jax.eval_shape(lambda: jax.random.key(0)), batch[0])['params']
  return lower_step(request, devices, Task(params, loss, batch, {'mu_dtype': 'bfloat16'}))


class Task(NamedTuple):
  """What a step learns.

  params: shapes of the parameters.
  loss: of parameters, a key, and the arrays of a batch.
  batch: shapes of these arrays, without sharding.
  adam: settings of big_vision's Adam.
  """
  params: Any
  loss: Callable[..., Any]
  batch: Sequence[Any]
  adam: dict[str, Any]


def lower_step(request: Any, devices: Any, task: Task) -> jax.stages.Lowered:
  """The step of a task; `request` says which parameters are sharded, and where the checkout is."""
  import flax.linen as nn
  import jax
  import numpy as np
  from jax.sharding import Mesh, NamedSharding, PartitionSpec
  optimizers, shardings = modules(request.checkout, 'optax', 'sharding')
  mesh = Mesh(np.asarray(devices).reshape(-1), ('data',))
  split = NamedSharding(mesh, PartitionSpec('data'))
  batch = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=split) for one in task.batch]
  optimizer = _optimizer(optimizers, task)
  state = {'params': task.params, 'opt': jax.eval_shape(optimizer.init, task.params)}
  rule = 'replicate' if request.whole_mib is None else (
      f"fsdp(axis='data', min_size_to_shard_mb={request.whole_mib})")
  placed = shardings.infer_sharding(state, strategy=[('.*', rule)], mesh=mesh)
  state = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, placed)
  step = jax.jit(_step(task.loss, optimizer), donate_argnums=0,
                 out_shardings=(placed, NamedSharding(mesh, PartitionSpec())))
  with jax.set_mesh(mesh), nn.logical_axis_rules([('act_batch', 'data')]):
    return step.lower(state, jax.eval_shape(lambda: jax.random.key(0)), *batch)


def _optimizer(optimizers: Any, task: Task) -> Any:
  config = _Settings(grad_clip_norm=1., optax_name='scale_by_adam', optax=task.adam, lr=1e-3, wd=1e-4,
                     schedule={'warmup_steps': 10_000, 'decay_type': 'cosine'})
  return optimizers.make(config, task.params, sched_kw=STEPS)[0]


def _step(loss: Callable[..., Any], optimizer: Any) -> Any:
  """The function of a step: state, key and the arrays of a batch to the next state and four numbers."""
  import jax
  import jax.numpy as jnp
  import optax

  def norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree)))

  def step(state: Any, key: jax.Array, *batch: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(state['params'], key, *batch)
    updates, opt = optimizer.update(gradients, state['opt'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {'params': params, 'opt': opt}, (value, norm(gradients), norm(params), norm(updates))

  return step


if __name__ == '__main__':
  compile.main(*sys.argv[1:], by=measure)
