"""The operations that have a fast form and a plain one, and the choice between them (`model.kernels`).

Both forms compute the same up to rounding. The fast ones have gradients written by hand, which is faster and saves
memory, but permits reverse-mode differentiation of the first order only. The plain ones are differentiated by JAX: with
them `jax.jvp`, `jax.linearize` and Hessian-vector products work through a complete network.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh

from vit_jax.config import schema
from vit_jax.config.schema import AttentionKernel, Kernels, MlpKernel, Quantize, checks
from vit_jax.config.schema.vit import OLD_CUDNN_WIDTH
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array
from vit_jax.models.kernels import attend, dense, fused_attention, fused_mlp, norm_act
from vit_jax.parallel.kernels import HOPPER, LEAST_CAPABILITY, unfused_attention, unfused_mlp

log = logging.getLogger('vit_jax.models')
BF16_BYTES = 2


class Forms(NamedTuple):
  """One form of each operation; arguments and results are those of the functions named `plain_…`.

  `low_rank` is `dense` for the products of adapters, which are never quantized.
  """
  dense: Callable[[Array, Array, Array], Array]
  low_rank: Callable[[Array, Array, Array], Array]
  shared: Callable[..., tuple[Array, ...]]
  layer_norm: Callable[..., Array]
  gelu: Callable[..., Array]
  attend: Callable[..., Array]


def _plain_attend(query: Array, key: Array, value: Array, *, kernel: AttentionKernel, num_keys: int = 0) -> Array:
  """Returns `plain_attend` with the arguments of `attend.attend`; there is no kernel and no padding."""
  assert not kernel.platform and not num_keys, (kernel, num_keys)
  return checkpoint_name(attend.plain_attend(query, key, value), 'attention')


def _once(form: Callable[..., Array], *static: int) -> Callable[..., Array]:
  """Returns a form that is traced once for each shape, and inlined in the program of each layer as without `jit`."""
  return jax.jit(form, static_argnums=static, inline=True)


_FAST_DENSE, _PLAIN_DENSE = _once(dense.dense), _once(dense.plain_dense)
FAST = Forms(dense=_FAST_DENSE, low_rank=_FAST_DENSE, shared=dense.shared, layer_norm=_once(norm_act.layer_norm, 3),
             gelu=_once(norm_act.gelu, 1), attend=attend.attend)
PLAIN = Forms(dense=_PLAIN_DENSE, low_rank=_PLAIN_DENSE, shared=dense.plain_shared,
              layer_norm=_once(norm_act.plain_layer_norm, 3), gelu=_once(norm_act.plain_gelu, 1), attend=_plain_attend)


def _quantized(how: Quantize) -> Forms:
  """Returns the fast forms with quantized products; `dense` is a new function, as traces are kept by function."""

  def form(x: Array, kernel: Array, bias: Array) -> Array:
    return dense.quantized_dense(x, kernel, bias, how)

  return FAST._replace(dense=_once(form))


QUANTIZED = {how: _quantized(how) for how in dense.NARROW}


def select(kernels: Kernels, quantize: Quantize = Quantize.NONE) -> Forms:
  """Returns the forms that a network with these settings computes with; only the fast ones can be quantized."""
  assert kernels is Kernels.FAST or quantize is Quantize.NONE, (kernels, quantize)
  return QUANTIZED.get(quantize) or {Kernels.FAST: FAST, Kernels.PLAIN: PLAIN}[kernels]


def check_devices(model: schema.Model, mesh: Mesh | AbstractMesh, *, name: str) -> None:
  """Makes sure that the devices run the kernels of a model, or logs that XLA's forms run in their place.

  The number of tokens is not known yet: a kernel that takes one token is taken to run. `name` is the dotted path of the
  model in its config.

  Raises:
    UserError: the attention kernel is for such devices, but not for these.
  """
  device = mesh.abstract_mesh.abstract_device
  if not isinstance(model, schema.ViT) or device is None:
    return
  kernel, kind = model.attention.kernel, device.device_kind
  if kernel.platform and device.platform != kernel.platform:
    log.info('%s.attention.kernel=%s is for %ss; on %s XLA computes attention, as with kernel=xla.', name, kernel.value,
             kernel.platform.upper(), kind)
  elif kernel is AttentionKernel.FUSED:
    of_one_token = fused_attention.Shape(tokens=1, heads=model.heads, channels=model.width // model.heads)
    reason = unfused_attention(model) or attend.fused_problem(mesh, of_one_token, BF16_BYTES)
    if reason:
      log.info('%s.attention.kernel=fused does not apply, and XLA computes attention, as with kernel=xla: %s.', name,
               reason)
  elif kernel is AttentionKernel.CUDNN:
    found = getattr(mesh.devices.flat[0], 'compute_capability', '') if isinstance(mesh, Mesh) else ''
    capability = float(found) if found.replace('.', '', 1).isdecimal() else float('inf')
    if problem := _cudnn_problem(name, model, kind, capability):
      raise UserError(problem)
  if model.mlp.kernel is MlpKernel.FUSED and device.platform != fused_mlp.PLATFORM:
    log.info('%s.mlp.kernel=fused is for TPUs; on %s XLA computes the MLP, as with kernel=xla.', name, kind)
  elif model.mlp.kernel is MlpKernel.FUSED:
    reason = unfused_mlp(model) or fused_mlp.problem(mesh, (1, 1, model.width), model.mlp.hidden, BF16_BYTES)
    if reason:
      log.info('%s.mlp.kernel=fused does not apply, and XLA computes the MLP, as with kernel=xla: %s.', name, reason)


def _cudnn_problem(name: str, model: schema.ViT, kind: str, capability: float) -> str:
  """Returns why a GPU of this kind and compute capability (infinite = not known) does not run cuDNN; '' if it does."""
  own, width = f'{name}.attention.kernel', model.width // model.heads
  if capability < LEAST_CAPABILITY:
    expected = f'xla on {kind}, as cuDNN needs compute capability {LEAST_CAPABILITY} (Ampere), not {capability:.1f}'
  elif capability < HOPPER and width > OLD_CUDNN_WIDTH:
    expected = (f'xla on {kind} for heads of more than {OLD_CUDNN_WIDTH} channels (width={model.width} and '
                f'heads={model.heads} give {width}), which cuDNN supports from compute capability {HOPPER} on')
  else:
    return ''
  return checks.problem(own, expected, model.attention.kernel, f'Set {own}=xla.')
