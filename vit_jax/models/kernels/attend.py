"""The weighted sum of attention (ViT paper, Appendix A, eqs. 6 and 7): a plain form, fast forms, and their choice.

All forms compute the same; `attend` chooses one where the weights themselves are not needed. XLA's fast form,
`xla_attend`, runs everywhere. Unlike the plain form, it keeps the weights in the compute dtype, before they are divided
by their sum, and its gradient is written by hand from the weights p, the result o and the sums, with
`sum_k p dp = sum_k o do`. The rest is chosen when a program is lowered for a platform:

  CPU: heads before tokens, so that each product is one of plain matrices.
  elsewhere: logits lie keys first, `[B, A, M, Q]`, so that products of heads with 64 channels need no transposed copy
    of the weights (seen in compiled programs of a TPU). The sum of the weights comes out of the product with the
    values, to which a column of ones is appended: the width of a head is padded to 128 there anyway.
  TPU v6e, if the mesh is of it: likewise, but logits and their maxima are kept in place of weights, as arrays of their
    own. Each product then computes the weights while it reads the logits, and no pass over memory writes them. On v4
    and v5e this gains nothing.

Two kernels are written for one kind of device:

  cudnn: the fused kernel of cuDNN, for NVIDIA GPUs. It works on an even number of tokens, but not on `n · 128 + 64`.
  fused: the project's kernel in Pallas (`fused_attention.py`), for TPUs from v4 on. It works on whole images.

Neither keeps the weights for the backward pass: both compute them again, cuDNN from the divisors of softmax. With
`Remat.NAMES`, `fused` saves its result; the values that cuDNN would save have no name, so its forward pass runs twice.
XLA cannot partition a kernel for several devices, so that each device runs it on its own images and heads.

This module knows nothing of parameters, positions or dropout.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from vit_jax.config.schema import AttentionKernel
from vit_jax.core import numerics
from vit_jax.core.types import Array
from vit_jax.models.kernels import fused_attention
from vit_jax.models.kernels.fused_attention import LANES
from vit_jax.parallel import kernels

Saved = tuple[Array, ...]
"""Arrays for the backward pass: query, key, value, and the results of `_keys_first` or `_heads_first` (6 arrays), or of
`_logits_first` (7 arrays)."""
KEEPS_LOGITS = 'TPU v6'
"""Kind of the devices that keep logits and not weights."""
HEAD_AXES = ('tensor',)
"""Mesh axes that heads are split over."""


def attention_weights(query: Array, key: Array, *, relative: Array | None = None) -> Array:
  """Returns `softmax((q k^T + R) / sqrt(K))` over the keys (eq. 6, and Appendix D.4 for R).

  Args:
    query: `[B, Q, A, K]`, any float dtype.
    key: `[B, M, A, K]`, same dtype.
    relative: R, `[B, A, Q, M]` f32, or None for zeros.

  Returns:
    `[B, A, Q, M]` f32, query before key; rows sum to 1. Products accumulate in f32, softmax is in f32.
  """
  scale = query.shape[-1] ** -.5
  logits_BAQM = jnp.einsum('bqak,bmak->baqm', query, key, preferred_element_type=jnp.float32)
  logits_BAQM = logits_BAQM if relative is None else logits_BAQM + relative
  return jax.nn.softmax(logits_BAQM * scale, axis=-1)


def combine(weights: Array, value: Array) -> Array:
  """Returns `A v` (eq. 7): weights `[B, A, Q, M]` f32 and value `[B, M, A, K]` to `[B, Q, A, K]`, value's dtype."""
  return jnp.einsum('baqm,bmak->bqak', weights.astype(value.dtype), value)


def plain_attend(query: Array, key: Array, value: Array) -> Array:
  """Returns attention of `[B, Q, A, K]` queries to `[B, M, A, K]` keys and values; `[B, Q, A, K]`."""
  return combine(attention_weights(query, key), value)


@jax.custom_vjp
def xla_attend(query: Array, key: Array, value: Array) -> Array:
  """Returns `plain_attend` up to rounding; reverse-mode differentiation only.

  Products accumulate in f32; logits, weights and their sum are rounded to the compute dtype. The result is named
  `attention` for rematerialization.
  """
  return _forward(query, key, value)[0]


def _forward(query: Array, key: Array, value: Array) -> tuple[Array, Saved]:
  if KEEPS_LOGITS in numerics.mesh_device_kind():
    *kept, mixed = _logits_first(query, key, value)
  else:
    *kept, mixed = lax.platform_dependent(query, key, value, cpu=_heads_first, default=_keys_first)
  mixed = checkpoint_name(mixed, 'attention')
  mixed_BQAK = lax.platform_dependent(
      mixed, cpu=lambda x: _by_head(_swapped(x)), default=lambda x: x.transpose(0, 3, 1, 2))
  return mixed_BQAK, (query, key, value, *kept, mixed)


def _backward(saved: Saved, dmixed: Array) -> tuple[Array, Array, Array]:
  if len(saved) == 7:
    query, key, value, logits_BAMQ, largest_BA1Q, inverse, mixed = saved
    return _pull_keys_first(query, key, value, _weights(logits_BAMQ, largest_BA1Q), inverse, mixed, dmixed)
  return lax.platform_dependent(*saved, dmixed, cpu=_pull_heads_first, default=_pull_keys_first)


def _keys_first(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
  """Returns undivided weights `[B, A, M, Q]`, 1 / their sums `[B, A, 1, Q]` f32, and the result `[B, A, K, Q]`."""
  weights_BAMQ = _weights(*_logits(query, key))
  return weights_BAMQ, *_mix(weights_BAMQ, value)


def _logits_first(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array, Array]:
  """Returns logits `[B, A, M, Q]`, their maxima `[B, A, 1, Q]`, and the results of `_keys_first` without the weights.

  The barrier makes arrays of both: without one, the compiler computes the maxima again wherever they are used, for
  which it writes the weights in a pass of its own.
  """
  logits_BAMQ, largest_BA1Q = lax.optimization_barrier(_logits(query, key))
  return logits_BAMQ, largest_BA1Q, *_mix(_weights(logits_BAMQ, largest_BA1Q), value)


def _logits(query: Array, key: Array) -> tuple[Array, Array]:
  """Returns logits `[B, A, M, Q]` and their maxima `[B, A, 1, Q]`, in the compute dtype."""
  logits_BAMQ = jnp.einsum('bmak,bqak->bamq', key, scaled(query))
  return logits_BAMQ, jax.lax.stop_gradient(logits_BAMQ.max(2, keepdims=True))


def _weights(logits: Array, largest: Array) -> Array:
  """Returns weights before division, in the dtype of the logits."""
  return jnp.exp((logits - largest).astype(jnp.float32)).astype(logits.dtype)


def _mix(weights_BAMQ: Array, value: Array) -> tuple[Array, Array]:
  """Returns 1 / the sums of the weights, `[B, A, 1, Q]` f32, and the result `[B, A, K, Q]`."""
  dtype = value.dtype
  with_ones = jnp.concatenate([value, jnp.ones((*value.shape[:-1], 1), dtype)], axis=-1)
  sums_BAJQ = jnp.einsum('bmak,bamq->bakq', with_ones, weights_BAMQ)
  # Cut before they are widened: the product itself is then stored in the compute dtype.
  inverse_BA1Q = 1. / sums_BAJQ[:, :, -1:].astype(jnp.float32)
  return inverse_BA1Q, (sums_BAJQ[:, :, :-1].astype(jnp.float32) * inverse_BA1Q).astype(dtype)


def _pull_keys_first(query: Array, key: Array, value: Array, weights_BAMQ: Array, inverse_BA1Q: Array,
                     mixed_BAKQ: Array, dmixed: Array) -> tuple[Array, Array, Array]:
  """Returns the gradients of query, key and value from the arrays that `_keys_first` returned."""
  dtype = query.dtype
  dmixed_BAKQ = dmixed.transpose(0, 2, 3, 1).astype(jnp.float32) * inverse_BA1Q
  shared_BA1Q = (dmixed_BAKQ * mixed_BAKQ.astype(jnp.float32)).sum(2, keepdims=True)
  dmixed_BAKQ = dmixed_BAKQ.astype(dtype)
  dweights_BAMQ = jnp.einsum('bmak,bakq->bamq', value, dmixed_BAKQ).astype(jnp.float32)
  dlogits_BAMQ = (weights_BAMQ.astype(jnp.float32) * (dweights_BAMQ - shared_BA1Q)).astype(dtype)
  dquery = scaled(jnp.einsum('bamq,bmak->bqak', dlogits_BAMQ, key))
  dkey = scaled(jnp.einsum('bamq,bqak->bmak', dlogits_BAMQ, query))
  return dquery, dkey, jnp.einsum('bamq,bakq->bmak', weights_BAMQ, dmixed_BAKQ)


def _heads_first(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
  """Returns the results of `_keys_first`, each with its last two axes in the other order, `_swapped`."""
  query_BAQK, key_BAMK, value_BAMK = _by_head(scaled(query)), _by_head(key), _by_head(value)
  logits_BAQM = jnp.einsum('baqk,bamk->baqm', query_BAQK, key_BAMK)
  largest_BAQ1 = jax.lax.stop_gradient(logits_BAQM.max(3, keepdims=True))
  weights_BAQM = jnp.exp((logits_BAQM - largest_BAQ1).astype(jnp.float32)).astype(query.dtype)
  inverse_BAQ1 = 1. / weights_BAQM.sum(3, keepdims=True, dtype=jnp.float32)
  mixed_BAQK = jnp.einsum('baqm,bamk->baqk', weights_BAQM, value_BAMK).astype(jnp.float32) * inverse_BAQ1
  return _swapped(weights_BAQM), _swapped(inverse_BAQ1), _swapped(mixed_BAQK.astype(query.dtype))


def _pull_heads_first(query: Array, key: Array, value: Array, weights: Array, inverse: Array, mixed: Array,
                      dmixed: Array) -> tuple[Array, Array, Array]:
  """Returns the gradients of query, key and value from the arrays that `_heads_first` returned."""
  dtype = query.dtype
  weights_BAQM, inverse_BAQ1, mixed_BAQK = _swapped(weights), _swapped(inverse), _swapped(mixed)
  dmixed_BAQK = _by_head(dmixed).astype(jnp.float32) * inverse_BAQ1
  shared_BAQ1 = (dmixed_BAQK * mixed_BAQK.astype(jnp.float32)).sum(3, keepdims=True)
  dmixed_BAQK = dmixed_BAQK.astype(dtype)
  dweights_BAQM = jnp.einsum('baqk,bamk->baqm', dmixed_BAQK, _by_head(value)).astype(jnp.float32)
  dlogits_BAQM = (weights_BAQM.astype(jnp.float32) * (dweights_BAQM - shared_BAQ1)).astype(dtype)
  dquery_BAQK = scaled(jnp.einsum('baqm,bamk->baqk', dlogits_BAQM, _by_head(key)))
  dkey_BAMK = jnp.einsum('baqm,baqk->bamk', dlogits_BAQM, _by_head(scaled(query)))
  dvalue_BAMK = jnp.einsum('baqm,baqk->bamk', weights_BAQM, dmixed_BAQK)
  return _by_head(dquery_BAQK), _by_head(dkey_BAMK), _by_head(dvalue_BAMK)


def _by_head(x: Array) -> Array:
  """Returns `[B, M, A, K]` as `[B, A, M, K]`; it is its own inverse."""
  return x.transpose(0, 2, 1, 3)


def _swapped(x: Array) -> Array:
  """Returns numbers `[B, A, I, J]` in the same order as `[B, A, J, I]`: branches for platforms must agree in shapes."""
  return x.reshape(*x.shape[:2], x.shape[3], x.shape[2])


def scaled(x: Array) -> Array:
  """Returns `x / sqrt(K)`, computed in f32, in the dtype of `x`."""
  return (x.astype(jnp.float32) * x.shape[-1] ** -.5).astype(x.dtype)


xla_attend.defvjp(_forward, _backward)


_xla_traced_once = jax.jit(xla_attend, inline=True)  # for each shape and mesh


def attend(query: Array, key: Array, value: Array, *, kernel: AttentionKernel, num_keys: int = 0) -> Array:
  """Returns `plain_attend` of the first `num_keys` keys up to rounding; reverse-mode differentiation only.

  The kernel is used if it is for the devices of the current mesh. Elsewhere, and without a mesh (single images,
  exported networks and initial parameters), XLA's form is used.
  """
  assert num_keys in (0, key.shape[1]) or padded_tokens(kernel, num_keys) == key.shape[1], (kernel, num_keys, key.shape)
  is_for_mesh = bool(kernel.platform) and numerics.mesh_platform() == kernel.platform
  if is_for_mesh and kernel is AttentionKernel.CUDNN:
    problem = kernels.half_tile_problem(key.shape[1])
    if not problem:
      return on_each_device(functools.partial(cudnn, num_keys=num_keys), query, key, value)
    kernels.log_once(f'attention.kernel=cudnn does not apply, and XLA computes attention: {problem}.')
  elif is_for_mesh:
    shape = fused_attention.Shape(*query.shape[1:])
    if key.shape == query.shape and is_fused(kernel, shape, query.dtype):
      flat = tuple(x.reshape(*x.shape[:2], -1) for x in (query, key, value))
      biases = jnp.zeros((3, flat[0].shape[2]), query.dtype)
      return attend_projected(flat, biases, heads=shape.heads).reshape(query.shape)
  return _xla_traced_once(query, key, value)


def is_fused(kernel: AttentionKernel, shape: fused_attention.Shape, dtype: DTypeLike) -> bool:
  """Returns whether the fused kernel is chosen, and runs on the devices of the current mesh."""
  if kernel is not AttentionKernel.FUSED or numerics.mesh_platform() != kernel.platform:
    return False
  mesh, itemsize = jax.sharding.get_abstract_mesh(), jnp.dtype(dtype).itemsize
  problem = fused_problem(mesh, shape, itemsize)
  if problem and not fused_problem(mesh, shape._replace(tokens=1), itemsize):  # others `forms.check_devices` logs
    kernels.log_once('attention.kernel=fused does not apply, and XLA computes attention, as with kernel=xla: '
                     f'{problem}.')
  return not problem


def fused_vmem_bytes(mesh: Mesh | AbstractMesh) -> int:
  """Returns the bytes of on-chip memory of a mesh's TPUs that the fused kernel may use."""
  device = mesh.abstract_mesh.abstract_device
  is_small = device is None or 'v4' in device.device_kind.lower()
  return fused_attention.SMALL_VMEM if is_small else fused_attention.LARGE_VMEM


def fused_problem(mesh: Mesh | AbstractMesh, shape: fused_attention.Shape, itemsize: int) -> str:
  """Returns why the fused kernel does not run on TPUs of a mesh; '' if it does."""
  device = mesh.abstract_mesh.abstract_device
  kind = device.device_kind if device else ''
  num_parts = prod(mesh.shape[axis] for axis in HEAD_AXES if axis in mesh.axis_names)
  own = shape._replace(heads=shape.heads // num_parts) if shape.heads % num_parts == 0 else shape
  need = own.vmem_bytes(itemsize)
  if problem := kernels.fused_heads_problem(shape.channels, kind):
    return problem
  if own.heads * own.channels % LANES:
    return f'{own.heads} heads of {own.channels} channels on a device do not fill tiles of {LANES}'
  if need > fused_vmem_bytes(mesh):
    return f'{shape.tokens} tokens need {need / 2**20:.0f} MiB on the chip, more than {kind} has'
  return ''


def attend_projected(inputs: tuple[Array, ...], biases: Array, *, heads: int) -> Array:
  """Returns `fused_attention.attend` by each device for its own images and heads.

  `inputs` are query, key and value, all `[B, N, D]`; `biases` are `[3, D]`.
  """
  mesh, (query, key, value) = jax.sharding.get_abstract_mesh(), inputs
  image_axes = numerics.dividing(mesh, numerics.BATCH_AXES, query.shape[0])
  head_axes = numerics.dividing(mesh, HEAD_AXES, heads)
  spec = PartitionSpec(image_axes, None, head_axes)
  own_heads = heads // prod(mesh.shape[axis] for axis in head_axes or ())
  vmem_bytes = fused_vmem_bytes(mesh)

  def form(query: Array, key: Array, value: Array, biases: Array) -> Array:
    return fused_attention.attend(query, key, value, biases, own_heads, vmem_bytes)

  return jax.shard_map(form, in_specs=(spec,) * 3 + (PartitionSpec(None, head_axes),), out_specs=spec,
                       check_vma=False)(query, key, value, biases)


def padded_tokens(kernel: AttentionKernel, num_tokens: int) -> int:
  """Returns the number of tokens with the padding that a kernel needs on the devices of the current mesh."""
  is_used = kernel is AttentionKernel.CUDNN and numerics.mesh_platform() == kernel.platform
  if is_used and not kernels.half_tile_problem(num_tokens):
    return num_tokens + num_tokens % 2
  return num_tokens


def cudnn(query: Array, key: Array, value: Array, *, num_keys: int = 0) -> Array:
  """Returns attention of `[B, Q, A, K]` queries to `[B, M, A, K]` keys and values, bf16, on one GPU; `[B, Q, A, K]`.

  jax 0.10.2 refuses the gradient for odd numbers of tokens (197 with the class token), as it mistakes a placeholder for
  a bias; cuDNN itself does not. Numbers are made even here, and the kernel gets the number of keys that count. The
  gradients of the other keys and values are zero.

  Args:
    query, key, value: of the images and heads of one GPU.
    num_keys: the first so many keys count; 0 = all of them.
  """
  num_images, num_queries, num_keys = query.shape[0], query.shape[1], num_keys or key.shape[1]
  lengths = None if num_keys == key.shape[1] and num_keys % 2 == 0 else jnp.full(num_images, num_keys, jnp.int32)
  even = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value))
  mixed_BQAK = jax.nn.dot_product_attention(*even, key_value_seq_lengths=lengths, implementation='cudnn')
  return mixed_BQAK[:, :num_queries]


def on_each_device(form: Callable[[Array, Array, Array], Array], query: Array, key: Array, value: Array) -> Array:
  """Returns the result of `form`, which each device of the current mesh computes for its own images and heads.

  An axis of the mesh that does not divide them is left out: all its devices then compute the same.
  """
  mesh = jax.sharding.get_abstract_mesh()
  spec = PartitionSpec(numerics.dividing(mesh, numerics.BATCH_AXES, query.shape[0]), None,
                       numerics.dividing(mesh, HEAD_AXES, query.shape[2]), None)
  return jax.shard_map(form, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(query, key, value)
