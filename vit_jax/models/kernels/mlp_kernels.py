"""The choice of what computes the MLP of a block, and the devices that the fused kernel runs on (`model.mlp.kernel`).

XLA cannot partition a kernel for several devices, so that each device runs it on its own images, with all of both
matrices of the MLP. Where `fsdp` splits these, their shards are gathered beside the kernel, so that what becomes of the
gather in the backward pass is a scatter of gradients; given whole, they would be summed whole. Knows nothing of
parameters or dropout.
"""
from __future__ import annotations

import logging
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, MlpKernel
from vit_jax.core import numerics
from vit_jax.core.types import Array
from vit_jax.models.kernels import fused_mlp
from vit_jax.models.kernels.shards import dividing, log_once
from vit_jax.models.kernels.tiles import LANES
from vit_jax.parallel import kernels

log = logging.getLogger('vit_jax.models')

PLATFORM = 'tpu'
UNSPLIT = ('tensor',)
"""Mesh axes that the hidden width is split over, which the kernel does not support."""
SHARDS = 'fsdp'
"""Mesh axis that splits both matrices along the width of the network (`parallel/sharding.py`)."""


def is_fused(kernel: MlpKernel, shape: tuple[int, ...], hidden: int, dtype: DTypeLike, *, is_adapted: bool) -> bool:
  """Whether the fused kernel is chosen for an input `[B, N, D]`, and runs on the devices of the current mesh.

  `is_adapted`: whether adapters (LoRA) are added to the products, which the kernel does not do.
  """
  if kernel is not MlpKernel.FUSED or numerics.mesh_platform() != PLATFORM or len(shape) != 3:
    return False
  wrong_text = 'adapters are added to its products' if is_adapted else problem(
      jax.sharding.get_abstract_mesh(), shape, hidden, jnp.dtype(dtype).itemsize)
  if wrong_text:
    log_once(f'mlp.kernel=fused does not apply, and XLA computes the MLP, as with kernel=xla: {wrong_text}.')
  return not wrong_text


def problem(mesh: Mesh | AbstractMesh, shape: tuple[int, ...], hidden: int, itemsize: int) -> str:
  """What the fused kernel needs and does not have, on TPUs of a mesh; '' if it runs there."""
  device = mesh.abstract_mesh.abstract_device
  kind = device.device_kind if device else ''
  places = prod(mesh.shape[axis] for axis in UNSPLIT if axis in mesh.axis_names)
  images, tokens, width = shape
  need = fused_mlp.Shape(images, tokens, width, hidden).vmem_bytes(itemsize)
  if wrong_text := kernels.mlp_chip_problem(kind):
    return wrong_text
  if places > 1:
    return f'the mesh splits the hidden width over {places} devices (tensor={places})'
  if width % LANES or hidden % LANES:
    return f'widths of {width} and {hidden} do not fill tiles of {LANES}'
  if need > fused_mlp.VMEM:
    return (f'widths of {width} and {hidden} need {need / 2**20:.0f} MiB on the chip for an image of {tokens} '
            f'tokens, more than {fused_mlp.VMEM / 2**20:.0f}')
  return ''


def mlp(x: Array, kernel1: Array, bias1: Array, kernel2: Array, bias2: Array, gelu: Gelu) -> Array:
  """`fused_mlp.mlp` of the images that each device holds."""
  mesh, whole = jax.sharding.get_abstract_mesh(), PartitionSpec()
  images = PartitionSpec(dividing(mesh, numerics.BATCH_AXES, x.shape[0]))
  shards = dividing(mesh, (SHARDS,), x.shape[-1])
  rows, columns = PartitionSpec(shards), PartitionSpec(None, shards)

  def form(x: Array, kernel1: Array, bias1: Array, kernel2: Array, bias2: Array) -> Array:
    if shards:
      kernel1 = jax.lax.all_gather(kernel1, SHARDS, axis=0, tiled=True)
      kernel2 = jax.lax.all_gather(kernel2, SHARDS, axis=1, tiled=True)
    return fused_mlp.mlp(x, kernel1, bias1, kernel2, bias2, gelu)

  return jax.shard_map(form, in_specs=(images, rows, whole, columns, whole), out_specs=images,
                       check_vma=False)(x, kernel1, bias1, kernel2, bias2)


def check_devices(model: schema.Model, mesh: Mesh | AbstractMesh, *, name: str) -> None:
  """Logs where XLA computes the MLP in place of a kernel; `name` is the dotted path of the model in its config."""
  device = mesh.abstract_mesh.abstract_device
  if not isinstance(model, schema.ViT) or model.mlp.kernel is not MlpKernel.FUSED or device is None:
    return
  if device.platform != PLATFORM:
    log.info('%s.mlp.kernel=fused is for TPUs; on %s XLA computes the MLP, as with kernel=xla.', name,
             device.device_kind)
  elif wrong_text := _unfused(model, mesh):
    log.info('%s.mlp.kernel=fused does not apply, and XLA computes the MLP, as with kernel=xla: %s.', name,
             wrong_text)


def _unfused(model: schema.ViT, mesh: Mesh | AbstractMesh) -> str:
  """Why the fused kernel does not compute the MLP in training; '' if it does. Of tokens only the images are known."""
  return kernels.unfused_mlp(model) or problem(mesh, (1, 1, model.width), model.mlp.hidden, 2)
