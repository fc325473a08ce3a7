"""Attention by kernels that are written for one kind of device, and the choice between them and XLA's form.

  cudnn: the fused kernel of cuDNN, for NVIDIA GPUs. It works on an even number of tokens.
  splash: jax's kernel in Pallas, for TPUs. It works on blocks whose sides are multiples of 128 tokens; those that fill
    the last block are kept apart from the others by segment ids.

Neither keeps the weights for the backward pass: both compute them again, from what softmax divided by. With
`Remat.NAMES` splash saves its result and that; what cuDNN would save has no name, so its forward pass runs twice.

XLA cannot cut a kernel into parts for several devices, so that each device runs it on its own images and heads. Knows
nothing of parameters, positions or dropout.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple, assert_never

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import AbstractMesh, PartitionSpec

from vit_jax.config.schema import AttentionKernel
from vit_jax.core import numerics
from vit_jax.core.types import Array
from vit_jax.models.kernels import attend as by_xla

LANES = 128          # sides of splash's blocks are multiples of it
MOST_TOKENS = 1_024  # of a side; such blocks compile for v4, v5e, v5p and v6e, in bf16 and f32 (libtpu 0.0.52)
HEAD_AXES = ('tensor',)
"""Mesh axes that heads are split over."""


def attend(query: Array, key: Array, value: Array, *, kernel: AttentionKernel) -> Array:
  """Equal to `attend.plain_attend` up to rounding; reverse-mode differentiation only.

  A kernel is taken where the current mesh is of devices that it is for. Elsewhere, and without a mesh, as for single
  pictures, exported networks and parameters in the making, it is XLA's form.
  """
  if numerics.mesh_platform() != kernel.platform:
    return by_xla.attend(query, key, value)
  match kernel:
    case AttentionKernel.XLA:
      return by_xla.attend(query, key, value)
    case AttentionKernel.CUDNN:
      return on_each_device(cudnn, query, key, value)
    case AttentionKernel.SPLASH:
      return on_each_device(splash, query, key, value)
    case _:
      assert_never(kernel)


def cudnn(query: Array, key: Array, value: Array) -> Array:
  """`[B, Q, A, K]` queries to `[B, M, A, K]` keys and values, bf16, on one GPU; `[B, Q, A, K]`.

  jax 0.10.2 refuses the gradient for odd numbers of tokens (197 with the class token), which cuDNN itself does not: it
  takes a placeholder for a bias. They are made even; the kernel is told how many keys count.
  """
  num_images, num_queries, num_keys = query.shape[0], query.shape[1], key.shape[1]
  lengths = None if num_keys % 2 == 0 else jnp.full(num_images, num_keys, jnp.int32)
  mixed_BQAK = jax.nn.dot_product_attention(_even(query), _even(key), _even(value), key_value_seq_lengths=lengths,
                                            implementation='cudnn')
  return mixed_BQAK[:, :num_queries]


def _even(x: Array) -> Array:
  """`[B, M, A, K]` with a token of zeros more if M is odd."""
  return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))


def splash(query: Array, key: Array, value: Array, *, interpret: bool = False) -> Array:
  """`[B, Q, A, K]` queries to `[B, M, A, K]` keys and values, on one TPU; `[B, Q, A, K]`.

  `interpret` runs the kernel's Python on any device, slowly.
  """
  num_queries, num_heads = query.shape[1:3]
  q, m = blocks(num_queries), blocks(key.shape[1])
  sizes = splash_attention.BlockSizes(block_q=q.side, block_kv=m.side, block_q_dkv=q.side, block_kv_dkv=m.side,
                                      use_fused_bwd_kernel=True)
  whole = splash_attention.MultiHeadMask([splash_attention.FullMask((q.tokens, m.tokens))] * num_heads)
  run = splash_attention.make_splash_mha(whole, block_sizes=sizes, head_shards=1, q_seq_shards=1,
                                         residual_checkpoint_name='attention', interpret=interpret)
  ids = None
  if m.tokens > key.shape[1]:
    ids = splash_attention.SegmentIds(_is_filling(q, num_queries), _is_filling(m, key.shape[1]))
  mixed_BAQK = jax.vmap(lambda *each: run(*each, segment_ids=ids))(
      _filled(by_xla.scaled(query), q), _filled(key, m), _filled(value, m))
  return mixed_BAQK[:, :, :num_queries].transpose(0, 2, 1, 3)


class Blocks(NamedTuple):
  """Side of a block, and tokens of all blocks together."""
  side: int
  tokens: int


def blocks(num_tokens: int) -> Blocks:
  """The fewest blocks of splash that hold so many tokens, and of those the smallest."""
  count = -(-num_tokens // MOST_TOKENS)
  side = -(-num_tokens // (count * LANES)) * LANES
  return Blocks(side, count * side)


def _filled(x: Array, to: Blocks) -> Array:
  """`[B, M, A, K]` to `[B, A, all tokens, K]`, with zeros at the end."""
  return jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, to.tokens - x.shape[1]), (0, 0)))


def _is_filling(to: Blocks, num_tokens: int) -> Array:
  """`[all tokens]` i32: 1 for those that only fill blocks. They attend to each other; what comes of it is cut off."""
  return (jnp.arange(to.tokens) >= num_tokens).astype(jnp.int32)


def on_each_device(form: Callable[[Array, Array, Array], Array], query: Array, key: Array, value: Array) -> Array:
  """`form` of the images and heads that each device of the current mesh holds.

  An axis of the mesh that does not divide them is left out: all its devices then compute the same.
  """
  mesh = jax.sharding.get_abstract_mesh()
  spec = PartitionSpec(_dividing(mesh, numerics.BATCH_AXES, query.shape[0]), None,
                       _dividing(mesh, HEAD_AXES, query.shape[2]), None)
  return jax.shard_map(form, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(query, key, value)


def _dividing(mesh: AbstractMesh, axes: Sequence[str], size: int) -> tuple[str, ...] | None:
  """The axes that the mesh has, if it has any and all of them together divide `size`."""
  known = tuple(axis for axis in axes if axis in mesh.axis_names)
  return known if known and size % prod(mesh.shape[axis] for axis in known) == 0 else None
