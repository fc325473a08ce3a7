"""One encoder block on one TPU, forward and backward, ours or big_vision's, compiled as `plan` compiles a step.

Its arrays are those of a step in bf16: input, its gradient, kernels and biases, with the parameters of norms in f32.
The forward pass ends before the backward pass begins, as it does where blocks follow each other, and nothing is
rematerialized. Optimizer, stem, head, collectives and the sharding of parameters are not in it, so that it compares
the networks alone. Of a step with 4 blocks most of the compiler's time is for the operations of one of them, too.
"""
from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import child
from vit_jax.config import schema
from vit_jax.config.schema import AttentionKernel, Gelu, Kernels, MlpKernel, Quantize
from vit_jax.plan import compile, topologies

if TYPE_CHECKING:
  import jax


class Request(NamedTuple):
  """A block to compile for the first device of a topology.

  attention, mlp_kernel, quantize: `attention.kernel`, `mlp.kernel` and `quantize` of a model, of our block.
  checkout: folder with the package `big_vision`, whose block is compiled; '' = ours.
  """
  topology: str
  images: int
  tokens: int
  width: int
  heads: int
  mlp: int
  attention: str = 'xla'
  mlp_kernel: str = 'xla'
  quantize: str = 'none'
  checkout: str = ''


def ask(request: Request) -> compile.Answer:
  """Compiles in a child process.

  Raises:
    UserError: the compiler failed.
  """
  return compile.in_process('benchmarks.tpu_block', request, topologies.parse(request.topology))


def measure(request: Request, dump: pathlib.Path) -> compile.Answer:
  """Compiles in this process, whose environment must have been set, with the compiler's dump in the folder `dump`."""
  topology = topologies.parse(request.topology)
  device = topologies.open_devices(topology)[0]
  return compile.examine(lambda: lower(request, device), topology, dump)


def lower(request: Request, device: jax.Device) -> jax.stages.Lowered:
  """Both passes of the block, lowered for a device that need not be here."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import Mesh, NamedSharding, PartitionSpec
  mesh = Mesh(np.asarray([device]).reshape(1, 1, 1), ('data', 'fsdp', 'tensor'))
  block, options = (_theirs if request.checkout else _ours)(request)

  def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    is_norm = 'norm' in jax.tree_util.keystr(path).lower()
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if is_norm else jnp.bfloat16,
                                sharding=NamedSharding(mesh, PartitionSpec()))

  def both(params: Any, x: jax.Array, dy: jax.Array) -> Any:
    y, pull = jax.vjp(lambda params, x: block.apply({'params': params}, x, **options)[0], params, x)
    return y, pull(jax.lax.optimization_barrier((dy, y))[0])

  x = placed((), jax.ShapeDtypeStruct((request.images, request.tokens, request.width), jnp.bfloat16))
  with jax.set_mesh(mesh):
    params = jax.eval_shape(lambda x: block.init(jax.random.key(0), x, **options), x)['params']
    return jax.jit(both).lower(jax.tree_util.tree_map_with_path(placed, params), x, x)


def _ours(request: Request) -> tuple[Any, dict[str, Any]]:
  import jax.numpy as jnp

  from vit_jax.models.kernels import forms
  from vit_jax.models.vit.block import Plain
  from vit_jax.models.vit.context import BlockInfo, Context
  block = Plain(heads=request.heads, attention=schema.Attention(kernel=AttentionKernel(request.attention)),
                mlp=schema.Mlp(request.mlp, kernel=MlpKernel(request.mlp_kernel)),
                context=Context(norm=schema.LayerNorm(), gelu=Gelu.TANH, dtype=jnp.bfloat16,
                                forms=forms.select(Kernels.FAST, Quantize(request.quantize))))
  return block, {'carry': {}, 'info': BlockInfo(request.images)}


def _theirs(request: Request) -> tuple[Any, dict[str, Any]]:
  sys.path.insert(0, request.checkout)
  with child.without_unused():
    vit = importlib.import_module('big_vision.models.vit')
  make: Callable[..., Any] = vit.Encoder1DBlock
  return make(mlp_dim=request.mlp, num_heads=request.heads, dtype_mm='bfloat16'), {'deterministic': True}


if __name__ == '__main__':
  compile.main(*sys.argv[1:], by=measure)
