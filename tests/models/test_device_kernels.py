"""Tests of which attention kernels devices can run, on meshes of devices that are absent."""
from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from vit_jax.config import schema
from vit_jax.config.schema import AttentionKernel, DType
from vit_jax.core.errors import UserError
from vit_jax.models.kernels import forms
from vit_jax.parallel import kernels
from vit_jax.plan import topologies


@dataclasses.dataclass(frozen=True)
class Gpu:
  """As jax shows one."""
  device_kind: str
  compute_capability: str
  platform: str = 'gpu'
  core_count: int = 1


def abstract(kind: str, platform: str) -> AbstractMesh:
  return AbstractMesh((2,), ('data',), abstract_device=AbstractDevice(kind, None, platform))


def gpu(kind: str, capability: str) -> Mesh:
  return Mesh(np.array([Gpu(kind, capability)]), ('data',))


def model(kernel: AttentionKernel, *, width: int = 64, dtype: DType = DType.BF16) -> schema.ViT:
  return schema.ViT(width=4 * width, heads=4, dtype=dtype, attention=schema.Attention(kernel=kernel))


@pytest.mark.parametrize('kernel, mesh, said', [
    (AttentionKernel.FUSED, abstract('cpu', 'cpu'),
     'attention.kernel=fused is for TPUs; on cpu XLA computes attention'),
    (AttentionKernel.FUSED, abstract('NVIDIA H200', 'gpu'), 'on NVIDIA H200 XLA computes attention'),
    (AttentionKernel.CUDNN, abstract('TPU v5 lite', 'tpu'), 'attention.kernel=cudnn is for GPUs; on TPU v5 lite XLA')])
def test_a_kernel_for_other_devices_is_reported_once(
    kernel: AttentionKernel, mesh: AbstractMesh, said: str, caplog: pytest.LogCaptureFixture) -> None:
  caplog.set_level(logging.INFO)
  forms.check_devices(model(kernel), mesh, name='model')
  (record,) = caplog.records
  assert said in record.getMessage()


@pytest.mark.parametrize('kernel, mesh', [
    (AttentionKernel.XLA, abstract('TPU v3', 'tpu')), (AttentionKernel.FUSED, abstract('TPU v4', 'tpu')),
    (AttentionKernel.CUDNN, gpu('NVIDIA A100-SXM4-80GB', '8.0')), (AttentionKernel.CUDNN, abstract('h200', 'gpu')),
    (AttentionKernel.FUSED, AbstractMesh((2,), ('data',)))])
def test_nothing_is_logged_for_devices_that_run_a_kernel_or_are_unknown(
    kernel: AttentionKernel, mesh: Mesh | AbstractMesh, caplog: pytest.LogCaptureFixture) -> None:
  caplog.set_level(logging.INFO)
  forms.check_devices(model(kernel), mesh, name='model')
  assert not caplog.records


@pytest.mark.parametrize('asked, mesh, said', [
    (model(AttentionKernel.CUDNN), gpu('Tesla V100-SXM2-16GB', '7.0'),
     'model.attention.kernel: expected xla on Tesla V100-SXM2-16GB, as cuDNN needs compute capability 8.0 (Ampere), '
     'not 7.0, got cudnn. Set model.attention.kernel=xla.'),
    (model(AttentionKernel.CUDNN, width=256), gpu('NVIDIA A100', '8.0'),
     'model.attention.kernel: expected xla on NVIDIA A100 for heads of more than 128 channels (width=1024 and heads=4 '
     'give 256), which cuDNN supports from compute capability 9.0 on, got cudnn. Set model.attention.kernel=xla.')])
def test_devices_that_cannot_run_a_kernel_are_named_with_a_remedy(
    asked: schema.ViT, mesh: Mesh | AbstractMesh, said: str) -> None:
  with pytest.raises(UserError) as error:
    forms.check_devices(asked, mesh, name='model')
  assert str(error.value) == said


def test_hopper_has_wide_heads(caplog: pytest.LogCaptureFixture) -> None:
  caplog.set_level(logging.INFO)
  forms.check_devices(model(AttentionKernel.CUDNN, width=256), gpu('NVIDIA H200', '9.0'), name='model')
  assert not caplog.records, 'no other kernel is taken'


def test_other_networks_have_no_kernels() -> None:
  forms.check_devices(schema.Mixer(), abstract('TPU v3', 'tpu'), name='model')
  assert all(topologies.CHIPS[name].platform == 'tpu' for name in kernels.OLD_TPUS)
