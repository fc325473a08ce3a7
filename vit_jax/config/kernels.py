"""Which kernels compute attention and the MLP of a Vision Transformer where the config leaves the choice (`auto`).

`choose` is the one place of this choice, for the layout of a run and for the text that says why. What a kernel supports
is decided by the functions beside it, which the kernels themselves use too (`models/kernels/`).
"""
from __future__ import annotations

from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema import AttentionKernel, DType, Kernels, MlpKernel
from vit_jax.config.schema.vit import MOST_CUDNN_WIDTH, OLD_CUDNN_WIDTH

FUSED_CHANNELS = range(64, 129, 8)
"""Channels of a head that the fused attention kernel is for."""
OLD_TPUS = ('v2', 'v3')
"""Mosaic, which compiles Pallas, multiplies no bf16 for them: `Unsupported matmul RHS type` (libtpu 0.0.52)."""
LEAST_CAPABILITY, HOPPER = 8., 9.
"""Compute capabilities of GPUs: the lowest one with cuDNN's attention, and that from which it has wide heads."""


class Choice(NamedTuple):
  """The kernels of a model, and for those of XLA why there is no other; '' where another one is chosen."""
  attention: AttentionKernel
  mlp: MlpKernel
  why_attention: str = ''
  why_mlp: str = ''


def choose(model: schema.Model, *, platform: str, name: str, capability: float = 0.) -> Choice:
  """Returns the kernels with which a model is trained on devices.

  Args:
    model: the network.
    platform: of the devices: `cpu`, `gpu` or `tpu`.
    name: of a device, such as `v5e` or `NVIDIA H100`.
    capability: the compute capability of a GPU; 0 = not known.
  """
  if not isinstance(model, schema.ViT):
    return Choice(AttentionKernel.XLA, MlpKernel.XLA, *['it is not a Vision Transformer'] * 2)
  if platform == 'tpu':
    unknown = '' if model.dtype is DType.BF16 else f'its times are known for bfloat16, not {model.dtype.value}'
    attention, why_attention = AttentionKernel.FUSED, fused_attention_problem(model, name) or unknown
    why_mlp = fused_mlp_problem(model, name) or unknown
  else:
    attention, why_mlp = AttentionKernel.CUDNN, 'it is for TPUs'
    why_attention = cudnn_problem(model, capability) if platform == 'gpu' else 'kernels are for TPUs and GPUs'
  if model.kernels is not Kernels.FAST:
    why_attention = why_mlp = f'kernels={model.kernels.value}'
  return Choice(AttentionKernel.XLA if why_attention else attention, MlpKernel.XLA if why_mlp else MlpKernel.FUSED,
                why_attention, why_mlp)


def fused_attention_problem(model: schema.ViT, name: str) -> str:
  """Returns why the fused kernel does not compute the attention of a model on TPUs of this name; '' if it does."""
  return fused_heads_problem(model.width // model.heads, name) or unfused_attention(model)


def fused_heads_problem(channels: int, name: str) -> str:
  """Returns why the fused kernel is not for heads of so many channels on TPUs of this name; '' if it is."""
  if any(old in name.lower() for old in OLD_TPUS):
    return f'it needs TPU v4 or later, not {name}'
  first, second, *_, last = FUSED_CHANNELS
  return '' if channels in FUSED_CHANNELS else f'heads have {channels} channels, not {first}, {second}, … {last}'


def unfused_attention(model: schema.ViT) -> str:
  """Returns what the attention of a model has that no kernel computes in training; '' if there is nothing."""
  if model.attention.dropout:
    return f'it has no dropout of weights (attention.dropout={model.attention.dropout}), in training'
  return 'it has no relative positions' if isinstance(model.positions, schema.Relative) else ''


def fused_mlp_problem(model: schema.ViT, name: str) -> str:
  """Returns why the fused kernel is not chosen for the MLP of a model on TPUs of this name; '' if it is.

  It runs on v5e too, where the products alone take nearly as long as XLA's MLP.
  """
  if 'v6' not in name.lower():
    return f'it is faster on TPU v6e, not on {name}'
  return unfused_mlp(model)


def unfused_mlp(model: schema.ViT) -> str:
  """Returns what the MLP of a model has that the fused kernel does not compute; '' if there is nothing."""
  return '' if model.has_simple_mlp else 'it is for an MLP with biases, without SwiGLU, inner_norm or dropout'


def cudnn_problem(model: schema.ViT, capability: float) -> str:
  """Returns why cuDNN does not compute the attention of a model on GPUs of this capability; '' if it does."""
  width = model.width // model.heads
  most = MOST_CUDNN_WIDTH if capability >= HOPPER else OLD_CUDNN_WIDTH
  if capability < LEAST_CAPABILITY:
    return f'it needs compute capability {LEAST_CAPABILITY}, not {capability or "an unknown one"}'
  if model.dtype is not DType.BF16:
    return f'it is for bfloat16, not {model.dtype.value}'
  if width % 8 or width > most:
    return f'heads have {width} channels, not 8, 16, … {most}'
  return unfused_attention(model)
