"""Numerical functions that objectives, optimizers and evaluators share: means, finite checks, sharding constraints.

Sums are accumulated in f32.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from vit_jax.core import trees
from vit_jax.core.types import Array, Batch, Key, Mean, PyTree

BATCH_AXES = ('data', 'fsdp')
"""Mesh axes over which the batch is split."""


def class_targets(batch: Batch, num_classes: int) -> Array:
  """Returns the targets `[B, C]` f32 of a batch: `labels`, else `label_list` as multi-hot, else `label` as one-hot.

  A class that an image lists twice counts once. An image without a class has a row of zeros. The targets are computed
  on the device, so only a few integers per image are transferred.
  """
  if 'labels' in batch:
    return batch['labels'].astype(jnp.float32)
  if 'label_list' not in batch:
    return jax.nn.one_hot(batch['label'], num_classes, dtype=jnp.float32)
  labels_BT = batch['label_list']
  targets_BC = jnp.zeros((labels_BT.shape[0], num_classes), jnp.float32)
  for slot in range(labels_BT.shape[1]):  # one slot at a time: an array [B, T, C] would be T times as large
    targets_BC = jnp.maximum(targets_BC, jax.nn.one_hot(labels_BT[:, slot], num_classes, dtype=jnp.float32))
  return targets_BC


def split_key(key: Key, *purposes: str) -> dict[str, Key]:
  """Returns one key for each purpose, by purpose. Use each key only once."""
  return dict(zip(purposes, jax.random.split(key, len(purposes)), strict=True))


def weighted_mean(values_B: Array, mask_B: Array | None = None) -> Mean:
  """Returns the mean of `values [B]` over the rows with `mask [B] > 0`, weighted by the mask.

  Masked rows are replaced with `where`, not multiplied by 0, so that a NaN in a padding row does not spread.
  """
  values_B = values_B.astype(jnp.float32)
  if mask_B is None:
    return Mean(values_B.sum(), jnp.asarray(values_B.size, jnp.float32))
  mask_B = mask_B.astype(jnp.float32)
  return Mean(jnp.where(mask_B > 0, values_B * mask_B, 0.).sum(), mask_B.sum())


def counted(batch: Batch) -> Batch:
  """Returns the batch with floating-point values of 0 for the examples with `mask [B]` of 0; unchanged without a mask.

  So the values of masked examples, even NaN, change no loss, gradient or statistic.
  """
  if 'mask' not in batch:
    return batch
  mask_B = batch['mask']

  def zeroed(x: Array) -> Array:
    is_counted = mask_B.reshape(-1, *(1,) * (x.ndim - 1)) > 0
    return jnp.where(is_counted, x, 0) if jnp.issubdtype(x.dtype, jnp.floating) else x

  return {name: zeroed(x) for name, x in batch.items()}


def moments(x: Array, weight: Array) -> tuple[Array, Array]:
  """Returns mean and variance `[1, D]` of the rows of `x [R, D]` with a `weight [R]` of 1; other weights are 0."""
  num_rows = jnp.maximum(weight.sum(), 1.)
  is_counted = weight[:, None] > 0
  mean = jnp.where(is_counted, x, 0.).sum(0, keepdims=True) / num_rows
  return mean, jnp.where(is_counted, jnp.square(x - mean), 0.).sum(0, keepdims=True) / num_rows


def is_finite(tree: PyTree) -> Array:
  """Returns whether all entries of all floating-point leaves are finite, as a scalar bool."""
  are_finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
  return jnp.stack(are_finite).all() if are_finite else jnp.asarray(True)


def select(condition: Array | bool, on_true: PyTree, on_false: PyTree) -> PyTree:
  """Returns `on_true` if `condition` (a scalar bool) holds, else `on_false`, leaf by leaf.

  bf16 leaves are selected in f32. The result is the same, but a TPU then updates an optimizer's bf16 moments in the
  same pass over memory as the f32 arrays, instead of a second pass.
  """
  def choose(a: Array, b: Array) -> Array:
    if a.dtype != jnp.bfloat16:
      return jnp.where(condition, a, b)
    return jnp.where(condition, a.astype(jnp.float32), b.astype(jnp.float32)).astype(a.dtype)

  return trees.map_once(choose, on_true, on_false)


def constrain(x: Array, spec: Sequence[str | tuple[str, ...] | None]) -> Array:
  """Returns `x` with its sharding constrained to `spec`: for each dimension one mesh axis, several, or None.

  Axes that are not in the current mesh are dropped; without a mesh (`jax.set_mesh`) `x` is returned unchanged.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x

  def in_mesh(axes: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    names = (axes,) if isinstance(axes, str) else axes or ()
    kept = tuple(name for name in names if name in mesh.axis_names)
    return kept[0] if len(kept) == 1 else kept or None

  return jax.lax.with_sharding_constraint(x, PartitionSpec(*map(in_mesh, spec)))


def mesh_platform() -> str:
  """Returns JAX's name of the current mesh's platform: cpu, gpu or tpu; '' if there is no mesh or no known platform."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device else ''


def mesh_device_kind() -> str:
  """Returns the kind of the current mesh's devices, such as `TPU v6 lite`; '' if there is no mesh or no known kind."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.device_kind if device else ''


def dividing(mesh: AbstractMesh, axes: Sequence[str], size: int) -> tuple[str, ...] | None:
  """Returns those of the axes that the mesh has, if it has any and all of them together divide `size`; else None."""
  known = tuple(axis for axis in axes if axis in mesh.axis_names)
  return known if known and size % prod(mesh.shape[axis] for axis in known) == 0 else None


def constrain_batch(x: Array) -> Array:
  """Returns `x` with its first dimension split over the batch axes, and with other dimensions not split."""
  return constrain(x, (BATCH_AXES,) + (None,) * (x.ndim - 1))
