"""Which kernels of attention the devices of a mesh can run (`models/kernels/attend_kernels.py` has the kernels)."""
from __future__ import annotations

import logging
from collections.abc import Iterator

from jax.sharding import AbstractMesh, Mesh

from vit_jax.config import schema
from vit_jax.config.schema import AttentionKernel
from vit_jax.core.errors import UserError

log = logging.getLogger('vit_jax.parallel')

NARROW = 128
"""Most channels of a head that cuDNN knows below compute capability 9.0."""
OLD_TPUS = ('v2', 'v3')
"""Mosaic, which compiles Pallas, multiplies no bf16 for them: `Unsupported matmul RHS type` (libtpu 0.0.52)."""


def check(model: schema.Model, mesh: Mesh | AbstractMesh, *, name: str) -> None:
  """Makes sure that the devices run the kernel that a model asks for, or says that XLA's form runs in its place.

  `name` says where the model is in its config.

  Raises:
    UserError: the kernel is for such devices, but not for these.
  """
  device = mesh.abstract_mesh.abstract_device
  if not isinstance(model, schema.ViT) or model.attention is AttentionKernel.XLA or device is None:
    return
  if device.platform != model.attention.platform:
    log.info('%s.attention=%s is for %ss; on %s XLA computes attention, as with attention=xla.', name,
             model.attention.value, model.attention.platform.upper(), device.device_kind)
  elif wrong := [*_faults(name, model, device.device_kind, _capability(mesh))]:
    raise UserError('\n'.join(wrong))


def _capability(mesh: Mesh | AbstractMesh) -> float:
  """Compute capability of GPUs, 9.0 and the like; infinite where there is no telling."""
  found = getattr(mesh.devices.flat[0], 'compute_capability', '') if isinstance(mesh, Mesh) else ''
  return float(found) if found.replace('.', '', 1).isdecimal() else float('inf')


def _faults(name: str, model: schema.ViT, kind: str, capability: float) -> Iterator[str]:
  own, width = f'{name}.attention={model.attention.value}', model.width // model.heads
  if model.attention is AttentionKernel.SPLASH:
    if model.dtype is schema.DType.BF16 and any(old in kind.lower() for old in OLD_TPUS):
      yield (f'{own} does not compile for {kind} with dtype=bfloat16: its products are not for chips before v4; want '
             f'{name}.attention=xla')
  elif capability < 8:
    yield (f'{own} needs compute capability 8.0 (Ampere) or more, but {kind} has {capability:.1f}; want '
           f'{name}.attention=xla')
  elif capability < 9 and width > NARROW:
    yield (f'{own} knows heads of at most {NARROW} channels on {kind}, compute capability {capability:.1f}, and of 256 '
           f'from 9.0 on; width={model.width} and heads={model.heads} give {width}; want {name}.attention=xla')
