"""Chooses the kernels of attention and of the MLP of a Vision Transformer where the config leaves them `auto`.

`layout` calls `choose`, which returns the kernels and the reasons. The functions whose names end in `_problem` decide
what a kernel supports; the kernels (`models/kernels/`) call them too. This module does not import jax.
"""
from __future__ import annotations

import functools
import logging
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema import AttentionKernel, DType, Kernels, MlpKernel, Quantize
from vit_jax.config.schema.vit import MOST_CUDNN_WIDTH, OLD_CUDNN_WIDTH

log = logging.getLogger('vit_jax.models')

FUSED_CHANNELS = range(64, 129, 8)
"""Channels of a head that the fused attention kernel is for."""
OLD_TPUS = ('v2', 'v3')
"""Mosaic, which compiles Pallas, multiplies no bf16 for them: `Unsupported matmul RHS type` (libtpu 0.0.52)."""
MLP_CHIPS = {'v5e': ('v5e', 'v5 lite'), 'v6e': ('v6e', 'v6 lite')}
"""TPUs with enough memory for both kernels of an MLP and their gradients, and their names among jax's devices."""
CUDNN_TILE = 128
"""Keys that the backward pass of cuDNN's attention takes at a time, on GPUs of compute capability 9.0."""
LEAST_CAPABILITY, HOPPER = 8., 9.
"""Compute capabilities of GPUs: the lowest one with cuDNN's attention, and that from which it has wide heads."""
FLOAT8_CAPABILITY = 8.9
"""The lowest compute capability of GPUs with products in float8."""


class Choice(NamedTuple):
  """The kernels of a model, and the reason for each of XLA's kernels; '' where another kernel is chosen."""
  attention: AttentionKernel
  mlp: MlpKernel
  why_attention: str = ''
  why_mlp: str = ''


def choose(model: schema.Model, *, platform: str, name: str, capability: float = 0.,
           is_native: bool = False, num_tokens: int = 0) -> Choice:
  """Returns the kernels with which a model is trained on devices.

  Args:
    model: the network.
    platform: platform of the devices: `cpu`, `gpu` or `tpu`.
    name: name of a device, such as `v5e` or `NVIDIA H100`.
    capability: the compute capability of a GPU; 0 = not known.
    is_native: whether it is trained on images at their own aspect.
    num_tokens: number of tokens of an image; 0 = not known.
  """
  if not isinstance(model, schema.ViT):
    reason = 'the network is not a Vision Transformer'
    return Choice(AttentionKernel.XLA, MlpKernel.XLA, reason, reason)
  attention = AttentionKernel.FUSED if platform == 'tpu' else AttentionKernel.CUDNN
  if platform == 'cpu':
    why_attention = 'the other kernels run only on TPUs and GPUs'
  else:
    why_attention = attention_problem(model, attention, platform=platform, name=name, capability=capability,
                                      is_native=is_native, num_tokens=num_tokens)
  why_mlp = mlp_problem(model, name)
  if platform == 'tpu' and model.dtype is not DType.BF16:
    unknown = f'the times of the fused kernel are known only for bfloat16, not for {model.dtype.value}'
    why_attention, why_mlp = why_attention or unknown, why_mlp or unknown
  if platform == 'tpu' and 'v6' not in name.lower():  # on v5e the products alone take nearly as long as XLA's MLP
    why_mlp = f'the fused kernel is faster than XLA only on TPU v6e, not on {name}'
  if model.kernels is not Kernels.FAST:
    why_attention = why_mlp = f'model.kernels={model.kernels.value} is set'
  return Choice(AttentionKernel.XLA if why_attention else attention, MlpKernel.XLA if why_mlp else MlpKernel.FUSED,
                why_attention, why_mlp)


def attention_problem(model: schema.ViT, kernel: AttentionKernel, *, platform: str, name: str, capability: float,
                      is_native: bool, num_tokens: int) -> str:
  """Returns why a kernel does not compute the attention of a model on devices; '' if it does.

  Arguments are those of `choose`.
  """
  if platform != kernel.platform:
    kinds = {AttentionKernel.CUDNN: 'NVIDIA GPUs', AttentionKernel.FUSED: 'TPUs from v4 on'}
    return f'this kernel runs only on {kinds[kernel]}, not on {name}'
  if is_native:
    return 'images at their own aspect are padded, and padding needs a mask, which only XLA has'
  match kernel:
    case AttentionKernel.FUSED:
      return fused_heads_problem(model.width // model.heads, name) or unfused_attention(model)
    case AttentionKernel.CUDNN:
      return cudnn_problem(model, capability) or half_tile_problem(num_tokens)
  return unfused_attention(model)


def mlp_problem(model: schema.ViT, name: str) -> str:
  """Returns why the fused kernel does not compute the MLP of a model on devices of this name; '' if it does."""
  return mlp_chip_problem(name) or unfused_mlp(model)


def mlp_chip_problem(name: str) -> str:
  """Returns why the fused kernel for the MLP does not run on devices of this name; '' if it does."""
  if any(chip_name in name.lower() for chip_names in MLP_CHIPS.values() for chip_name in chip_names):
    return ''
  return f'the fused kernel runs only on TPU {" and ".join(MLP_CHIPS)}, not on {name}'


def fused_heads_problem(channels: int, name: str) -> str:
  """Returns why the fused kernel is not for heads of so many channels on TPUs of this name; '' if it is."""
  if any(old in name.lower() for old in OLD_TPUS):
    return f'the fused kernel runs only on TPU v4 and later, not on {name}'
  if channels in FUSED_CHANNELS:
    return ''
  first, second, *_, last = FUSED_CHANNELS
  return f'the heads have {channels} channels, and the fused kernel takes {first}, {second}, … {last}'


def unfused_attention(model: schema.ViT) -> str:
  """Returns what the attention of a model has that no kernel computes in training; '' if there is nothing."""
  if model.attention.dropout:
    return f'only XLA has dropout of attention weights (attention.dropout={model.attention.dropout})'
  return 'only XLA has relative positions' if isinstance(model.positions, schema.Relative) else ''


def unfused_mlp(model: schema.ViT) -> str:
  """Returns what the MLP of a model has that the fused kernel does not compute; '' if there is nothing."""
  if not model.has_simple_mlp:
    return 'the fused kernel takes an MLP with biases, without SwiGLU, inner_norm and dropout'
  return '' if model.quantize is Quantize.NONE else (
      f'the products of the fused kernel are not quantized, as quantize={model.quantize.value} asks')


def quantize_problem(quantize: Quantize, *, platform: str, name: str, capability: float = 0.) -> str:
  """Returns why products in 8 bits are no faster than in bfloat16 on devices of this name; '' if they may be.

  Of TPUs, those from v5e on double the rate in int8, and TPU7x in float8; GPUs have float8 from capability 8.9 on.
  Arguments are those of `choose`.
  """
  is_slow = False
  if quantize is Quantize.INT8 and platform == 'tpu':
    is_slow = any(old in name.lower() for old in (*OLD_TPUS, 'v4'))
  elif quantize is Quantize.FP8 and platform == 'tpu':
    is_slow = '7' not in name
  elif quantize is Quantize.FP8 and platform == 'gpu':
    if capability == HOPPER:
      return ('by the estimate of the compiler a step of L/16 takes 12 % longer than in bfloat16, as each product is '
              'scaled by a pass of its own')
    is_slow = 0 < capability < FLOAT8_CAPABILITY
  return f'{name} multiplies no faster in {quantize.value} than in bfloat16' if is_slow else ''


def cudnn_problem(model: schema.ViT, capability: float) -> str:
  """Returns why cuDNN does not compute the attention of a model on GPUs of this capability; '' if it does."""
  width = model.width // model.heads
  most = MOST_CUDNN_WIDTH if capability >= HOPPER else OLD_CUDNN_WIDTH
  if capability < LEAST_CAPABILITY:
    return (f"cuDNN's attention needs compute capability {LEAST_CAPABILITY}, and that of this GPU is "
            f'{capability or "not known"}')
  if model.dtype is not DType.BF16:
    return f"cuDNN's attention takes bfloat16, not {model.dtype.value}"
  if width % 8 or width > most:
    return f"the heads have {width} channels, and cuDNN's attention takes 8, 16, … {most}"
  return unfused_attention(model)


def half_tile_problem(num_keys: int) -> str:
  """Returns why cuDNN's kernel is not used for so many keys; '' if it is.

  Its backward pass takes 128 keys at a time. If only 64 are left for the last time, it fills the other half with logits
  of 0, which overflow if all true logits of a query are below about -88: the gradient is then NaN (seen with 64 tokens
  on an H100; pytorch/pytorch#196678). Logits can become that low, since a shift of all of them, as by the bias of keys,
  does not change the result.
  """
  if (num_keys + num_keys % 2) % CUDNN_TILE != CUDNN_TILE // 2:
    return ''
  return f"cuDNN's gradient for {num_keys} tokens, of which the last {CUDNN_TILE // 2} fill half a tile, can be NaN"


def may_join_rows(model: schema.ViT) -> bool:
  """Returns whether blocks can run on joined rows `[B * M, D]`: plain ones, and without dropout, whose masks change."""
  is_plain = (type(model.block) is schema.Plain and type(model.attention) is schema.Attention
              and type(model.mlp) in (schema.Mlp, schema.SwiGlu))
  return is_plain and not model.dropout and not model.attention.dropout


@functools.cache
def log_once(text: str) -> None:
  """Logs a choice that a program makes while it is traced, once for all blocks."""
  log.info('%s', text)
