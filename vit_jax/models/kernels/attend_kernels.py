"""Attention by kernels that are written for one kind of device, the choice of one, and the devices that each runs on.

  cudnn: the fused kernel of cuDNN, for NVIDIA GPUs. It works on an even number of tokens, but not on `n · 128 + 64`.
  fused: the project's kernel in Pallas (`fused.py`), for TPUs from v4 on. It works on whole images.

None keeps the weights for the backward pass: both compute them again, cuDNN from what softmax divided by. With
`Remat.NAMES` fused saves its result; what cuDNN would save has no name, so its forward pass runs twice.

XLA cannot partition a kernel for several devices, so that each device runs it on its own images and heads. Knows
nothing of parameters, positions or dropout.
"""
from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from math import prod
from typing import assert_never

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.schema import AttentionKernel, checks
from vit_jax.config.schema.vit import OLD_CUDNN_WIDTH
from vit_jax.core import numerics
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array
from vit_jax.models.kernels import attend as by_xla
from vit_jax.models.kernels import fused_attention
from vit_jax.models.kernels.shards import dividing, log_once
from vit_jax.models.kernels.tiles import LANES
from vit_jax.parallel import kernels
from vit_jax.parallel.kernels import HOPPER, LEAST_CAPABILITY

log = logging.getLogger('vit_jax.models')

HEAD_AXES = ('tensor',)
"""Mesh axes that heads are split over."""


_by_xla = jax.jit(by_xla.attend, inline=True)  # traced once for each shape and mesh


def attend(query: Array, key: Array, value: Array, *, kernel: AttentionKernel, num_keys: int = 0) -> Array:
  """Equal to `attend.plain_attend` of the first `num_keys` keys up to rounding; reverse-mode differentiation only.

  A kernel is used where the current mesh is of devices that it is for. Elsewhere, and without a mesh, as for single
  images, exported networks and initial parameters, XLA's form is used.
  """
  assert num_keys in (0, key.shape[1]) or padded_tokens(kernel, num_keys) == key.shape[1], (kernel, num_keys, key.shape)
  if numerics.mesh_platform() != kernel.platform:
    return _by_xla(query, key, value)
  match kernel:
    case AttentionKernel.XLA | AttentionKernel.AUTO:
      return _by_xla(query, key, value)
    case AttentionKernel.CUDNN:
      if wrong_text := kernels.half_tile_problem(key.shape[1]):
        log_once(f'attention.kernel=cudnn does not apply, and XLA computes attention: {wrong_text}.')
        return _by_xla(query, key, value)
      return on_each_device(functools.partial(cudnn, num_keys=num_keys), query, key, value)
    case AttentionKernel.FUSED:
      shape = fused_attention.Shape(*query.shape[1:])
      if key.shape != query.shape or not is_fused(kernel, shape, query.dtype):
        return _by_xla(query, key, value)
      flat = tuple(x.reshape(*x.shape[:2], -1) for x in (query, key, value))
      biases = jnp.zeros((3, flat[0].shape[2]), query.dtype)
      return attend_projected(flat, biases, heads=shape.heads).reshape(query.shape)
    case _:
      assert_never(kernel)


def is_fused(kernel: AttentionKernel, shape: fused_attention.Shape, dtype: DTypeLike) -> bool:
  """Whether the fused kernel is chosen, and runs on the devices of the current mesh."""
  if kernel is not AttentionKernel.FUSED or numerics.mesh_platform() != kernel.platform:
    return False
  mesh, itemsize = jax.sharding.get_abstract_mesh(), jnp.dtype(dtype).itemsize
  wrong_text = fused_problem(mesh, shape, itemsize)
  if wrong_text and not fused_problem(mesh, shape._replace(tokens=1), itemsize):  # others `check_devices` logs
    log_once(f'attention.kernel=fused does not apply, and XLA computes attention, as with kernel=xla: {wrong_text}.')
  return not wrong_text


def fused_vmem_bytes(mesh: Mesh | AbstractMesh) -> int:
  """On-chip memory of a mesh's TPUs that the fused kernel may use."""
  device = mesh.abstract_mesh.abstract_device
  is_small = device is None or 'v4' in device.device_kind.lower()
  return fused_attention.SMALL_VMEM if is_small else fused_attention.LARGE_VMEM


def fused_problem(mesh: Mesh | AbstractMesh, shape: fused_attention.Shape, itemsize: int) -> str:
  """What the fused kernel needs and does not have, on TPUs of a mesh; '' if it runs there."""
  device = mesh.abstract_mesh.abstract_device
  kind = device.device_kind if device else ''
  places = prod(mesh.shape[axis] for axis in HEAD_AXES if axis in mesh.axis_names)
  own = shape._replace(heads=shape.heads // places) if shape.heads % places == 0 else shape
  need = own.vmem_bytes(itemsize)
  if wrong_text := kernels.fused_heads_problem(shape.channels, kind):
    return wrong_text
  if own.heads * own.channels % LANES:
    return f'{own.heads} heads of {own.channels} channels on a device do not fill tiles of {LANES}'
  if need > fused_vmem_bytes(mesh):
    return f'{shape.tokens} tokens need {need / 2**20:.0f} MiB on the chip, more than {kind} has'
  return ''


def attend_projected(inputs: tuple[Array, ...], biases: Array, *, heads: int) -> Array:
  """`fused.attend` of the images and heads that each device holds; `inputs`: query, key and value, all `[B, N, D]`."""
  mesh, (query, key, value) = jax.sharding.get_abstract_mesh(), inputs
  images, own = dividing(mesh, numerics.BATCH_AXES, query.shape[0]), dividing(mesh, HEAD_AXES, heads)
  spec, places = PartitionSpec(images, None, own), prod(mesh.shape[axis] for axis in own or ())
  vmem_bytes = fused_vmem_bytes(mesh)

  def form(query: Array, key: Array, value: Array, biases: Array) -> Array:
    return fused_attention.attend(query, key, value, biases, heads // places, vmem_bytes)

  return jax.shard_map(form, in_specs=(spec,) * 3 + (PartitionSpec(None, own),), out_specs=spec,
                       check_vma=False)(query, key, value, biases)


def padded_tokens(kernel: AttentionKernel, num_tokens: int) -> int:
  """Number of tokens with those that fill them up for a kernel on the devices of the current mesh."""
  is_used = kernel is AttentionKernel.CUDNN and numerics.mesh_platform() == kernel.platform
  return num_tokens + (num_tokens % 2 if is_used and not kernels.half_tile_problem(num_tokens) else 0)


def cudnn(query: Array, key: Array, value: Array, *, num_keys: int = 0) -> Array:
  """`[B, Q, A, K]` queries to `[B, M, A, K]` keys and values, bf16, on one GPU; `[B, Q, A, K]`.

  jax 0.10.2 refuses the gradient for odd numbers of tokens (197 with the class token), which cuDNN itself does not: it
  mistakes a placeholder for a bias. They are made even; the kernel gets the number of keys that count. The gradients of
  the other keys and values are zero.

  Args:
    query, key, value: of the images and heads of one GPU.
    num_keys: the first so many keys count; 0 = all of them.
  """
  num_images, num_queries, num_keys = query.shape[0], query.shape[1], num_keys or key.shape[1]
  lengths = None if num_keys == key.shape[1] and num_keys % 2 == 0 else jnp.full(num_images, num_keys, jnp.int32)
  mixed_BQAK = jax.nn.dot_product_attention(_even(query), _even(key), _even(value), key_value_seq_lengths=lengths,
                                            implementation='cudnn')
  return mixed_BQAK[:, :num_queries]


def _even(x: Array) -> Array:
  """`[B, M, A, K]` with a token of zeros more if M is odd."""
  return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))


def on_each_device(form: Callable[[Array, Array, Array], Array], query: Array, key: Array, value: Array) -> Array:
  """`form` of the images and heads that each device of the current mesh holds.

  An axis of the mesh that does not divide them is left out: all its devices then compute the same.
  """
  mesh = jax.sharding.get_abstract_mesh()
  spec = PartitionSpec(dividing(mesh, numerics.BATCH_AXES, query.shape[0]), None,
                       dividing(mesh, HEAD_AXES, query.shape[2]), None)
  return jax.shard_map(form, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(query, key, value)


def check_devices(model: schema.Model, mesh: Mesh | AbstractMesh, *, name: str) -> None:
  """Makes sure that the devices run the attention kernel of a model, or logs that XLA's form runs in its place.

  `name` is the dotted path of the model in its config.

  Raises:
    UserError: the kernel is for such devices, but not for these.
  """
  device = mesh.abstract_mesh.abstract_device
  if not isinstance(model, schema.ViT) or not model.attention.kernel.platform or device is None:
    return
  kernel = model.attention.kernel
  if device.platform != kernel.platform:
    log.info('%s.attention.kernel=%s is for %ss; on %s XLA computes attention, as with kernel=xla.', name, kernel.value,
             kernel.platform.upper(), device.device_kind)
  elif kernel is AttentionKernel.FUSED:
    if wrong_text := _unfused(model, mesh):
      log.info('%s.attention.kernel=fused does not apply, and XLA computes attention, as with kernel=xla: %s.', name,
               wrong_text)
  elif wrong := [*_device_problems(name, model, device.device_kind, _capability(mesh))]:
    raise UserError('\n'.join(wrong))


def _unfused(model: schema.ViT, mesh: Mesh | AbstractMesh) -> str:
  """Why the fused kernel does not compute attention in training; '' if it does. Of tokens only the images are known."""
  wrong_text = kernels.unfused_attention(model)
  return wrong_text or fused_problem(mesh, fused_attention.Shape(1, model.heads, model.width // model.heads), 2)


def _capability(mesh: Mesh | AbstractMesh) -> float:
  """Compute capability of GPUs, 9.0 and the like; infinite where it is not known."""
  found = getattr(mesh.devices.flat[0], 'compute_capability', '') if isinstance(mesh, Mesh) else ''
  return float(found) if found.replace('.', '', 1).isdecimal() else float('inf')


def _device_problems(name: str, model: schema.ViT, kind: str, capability: float) -> Iterator[str]:
  kernel, own, width = model.attention.kernel, f'{name}.attention.kernel', model.width // model.heads
  advice = f'Set {own}=xla.'
  if capability < LEAST_CAPABILITY:
    yield checks.problem(own, f'xla on {kind}, as cuDNN needs compute capability {LEAST_CAPABILITY} (Ampere), '
                         f'not {capability:.1f}', kernel, advice)
  elif capability < HOPPER and width > OLD_CUDNN_WIDTH:
    yield checks.problem(own, f'xla on {kind} for heads of more than {OLD_CUDNN_WIDTH} channels (width={model.width} '
                         f'and heads={model.heads} give {width}), which cuDNN supports from compute capability '
                         f'{HOPPER} on', kernel, advice)
