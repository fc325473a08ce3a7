"""Hardware to plan for: names, numbers of devices, and error messages."""
from __future__ import annotations

import os
import subprocess
import sys
import types

import jax
import pytest

from vit_jax.core.errors import UserError
from vit_jax.plan import cards, topologies


@pytest.mark.parametrize(('text', 'name', 'devices', 'cores'), [
    ('v3:16x16', 'v3:16x16', 512, 512), ('v3-512', 'v3:16x16', 512, 512), ('v4-256', 'v4:4x4x8', 128, 256),
    ('v4:4x4x4', 'v4:4x4x4', 64, 128), ('v5litepod-16', 'v5e:4x4', 16, 16), ('v6e-256', 'v6e:16x16', 256, 256),
    ('V5P-8', 'v5p:2x2x1', 4, 8), ('cpu:7', 'cpu:7', 7, 7), ('h200:3', 'h200:3', 3, 3),
    ('gpu:8', 'gpu:8', 8, 8), ('v4-4096', 'v4:8x16x16', 2048, 4096), ('v4-2048', 'v4:8x8x16', 1024, 2048),
    ('v5p-12288', 'v5p:16x16x24', 6144, 12_288), ('v5p-17920', 'v5p:16x20x28', 8960, 17_920),
    ('v5p-384', 'v5p:4x4x12', 192, 384), ('v5p:4x8x16', 'v5p:4x8x16', 512, 1024),
    ('tpu7x-128', 'tpu7x:4x4x4', 128, 128), ('ironwood-18432', 'tpu7x:16x16x36', 18_432, 18_432),
    ('trillium:8x16', 'v6e:8x16', 128, 128), ('v2-512', 'v2:16x16', 512, 512)])
def test_a_slice_is_named_by_its_grid_or_by_cloud_providers(
    text: str, name: str, devices: int, cores: int) -> None:
  found = topologies.parse(text)
  assert (found.name, found.num_devices, found.num_cores) == (name, devices, cores)


@pytest.mark.parametrize('text', ['v3:16x17', 'v9:2x2', 'cpu', 'cpu:0', 'cpu:-3', 'v3', '', 'v4:2x2', 'v4-33',
                                  'v4:4x4x20', 'v5p:8x4x4', 'v5p:4x4x6'])
def test_an_unknown_topology_lists_the_known_ones(text: str) -> None:
  with pytest.raises(UserError) as error:
    topologies.parse(text)
  said = str(error.value)
  assert f'expected one of the topologies below, got {text!r}' in said
  assert '16x16' in said and 'v3-512' in said and 'cpu:N' in said


def test_several_slices_have_the_devices_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
  found = topologies.parse('v5e:16x16', slices=3)
  assert (found.num_devices, found.label) == (768, '3 slices of v5e:16x16')
  assert topologies.parse('v5e:16x16').label == 'v5e:16x16' and topologies.parse('cpu:8', slices=2).num_devices == 8


def test_a_name_of_a_cloud_provider_is_that_of_the_most_compact_slice() -> None:
  for kind in topologies.POD_SIDES:
    for grid in topologies.GRIDS[kind]:
      named = topologies.parse(f'{kind}-{2 * topologies.num_chips(grid)}').name.partition(':')[2]
      sides = [int(side) for side in grid.split('x')]
      assert topologies.num_chips(named) == topologies.num_chips(grid)
      assert sum(int(side) for side in named.split('x')) <= sum(sides)


@pytest.mark.slow(reason='libtpu describes whole pods in seconds; what it accepts changes with its version alone')
@pytest.mark.parametrize(('text', 'slices'), [('v4-4096', 1), ('v5p-17920', 1), ('tpu7x-128', 1), ('v6e-256', 8)])
def test_the_compiler_describes_whole_pods(text: str, slices: int) -> None:
  pytest.importorskip('libtpu')
  found = topologies.parse(text, slices=slices)
  program = ('from vit_jax.plan import topologies\n'
             f'print(len(topologies.open_devices(topologies.parse({text!r}, slices={slices}))))')
  environment = {**os.environ, **topologies.environment(found)}
  done = subprocess.run([sys.executable, '-c', program], env=environment, check=True, capture_output=True, text=True)
  assert int(done.stdout) == found.num_devices


def test_gpus_are_planned_for_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(topologies.glob, 'glob', lambda pattern: [])
  assert topologies.missing(topologies.parse('a100:1')).endswith('h100 or h200, which XLA knows by a description.')
  monkeypatch.setattr(topologies.glob, 'glob', lambda pattern: ['/dev/nvidia0'])
  assert topologies.missing(topologies.parse('a100:1')) == '' and topologies.missing(topologies.parse('a100:2'))
  assert topologies.environment(topologies.parse('a100:1'))['JAX_PLATFORMS'] == 'cuda'


@pytest.mark.parametrize('name', ['h100:8', 'h200:1'])
def test_described_gpus_are_compiled_for_without_any(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
  found = topologies.parse(name)
  monkeypatch.setattr(topologies.glob, 'glob', lambda pattern: [])
  monkeypatch.setattr(cards, 'is_installed', lambda: False)
  assert topologies.missing(found).startswith("XLA's compiler for GPUs is not installed (Linux; no GPU is needed). Run")
  monkeypatch.setattr(cards, 'is_installed', lambda: True)
  monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=8 --xla_gpu_enable_triton_gemm=true')
  environment = topologies.environment(found)
  assert topologies.missing(found) == '' and environment['JAX_PLATFORMS'] == 'cpu'
  assert 'host_platform' not in environment['XLA_FLAGS'] and 'gemm=true' in environment['XLA_FLAGS']
  monkeypatch.setattr(topologies.glob, 'glob', lambda pattern: [f'/dev/nvidia{i}' for i in range(8)])
  assert topologies.environment(found)['JAX_PLATFORMS'] == 'cpu'  # the GPUs of this machine may be of another kind
  monkeypatch.setattr(cards, 'is_installed', lambda: False)
  assert topologies.missing(found) == '' and topologies.environment(found)['JAX_PLATFORMS'] == 'cuda'


@pytest.mark.parametrize(('device_kind', 'of_kind', 'others'), [
    ('NVIDIA A100-SXM4-80GB', 'a100', ('h100', 'h200')), ('NVIDIA H100 80GB HBM3', 'h100', ('a100', 'h200')),
    ('NVIDIA GH200 480GB', 'gpu', ('h200',))])
def test_gpus_of_another_kind_are_refused(
    monkeypatch: pytest.MonkeyPatch, device_kind: str, of_kind: str, others: tuple[str, ...]) -> None:
  devices = [types.SimpleNamespace(device_kind=device_kind)] * 4
  monkeypatch.setattr(jax, 'devices', lambda: devices)
  monkeypatch.setattr(cards, 'is_installed', lambda: False)
  assert topologies.open_devices(topologies.parse(f'{of_kind}:2')) == devices[:2]
  for kind in others:
    with pytest.raises(UserError, match=f'expected the GPUs of this machine, {device_kind}, got {kind}:2. Set .*gpu:2'):
      topologies.open_devices(topologies.parse(f'{kind}:2'))


def test_the_nearest_name_is_suggested() -> None:
  for text, near in (('v3-513', 'v3-512'), ('v5e:16', 'v5e-16'), ('v5e-4x4', 'v5e:4x4'), ('v6e:16x17', 'v6e:16x16')):
    with pytest.raises(UserError, match=rf'Did you mean {near}\?$'):
      topologies.parse(text)
  with pytest.raises(UserError) as refused:
    topologies.parse('v9:4x4')
  assert 'Did you mean' not in str(refused.value)


def test_a_missing_compiler_is_reported_with_install_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(topologies.importlib.util, 'find_spec', lambda name: None)
  assert "Run: pip install 'libtpu>=" in topologies.missing(topologies.parse('v3:2x2'))
  assert topologies.missing(topologies.parse('cpu:8')) == ''


def test_the_compiling_process_uses_no_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
  assert topologies.environment(topologies.parse('v3:2x2')).items() >= {
      'JAX_PLATFORMS': 'cpu', 'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}.items()
  monkeypatch.setenv('XLA_FLAGS', '--xla_cpu_x=false --a=1 --xla_gpu_y --xla_force_host_platform_device_count=8')
  flags = topologies.environment(topologies.parse('v3:2x2'))['XLA_FLAGS'].split()
  assert flags == ['--a=1', '--xla_force_host_platform_device_count=8']
  monkeypatch.setenv('XLA_FLAGS', '--a=1 --xla_force_host_platform_device_count=8')
  flags = topologies.environment(topologies.parse('cpu:3'))['XLA_FLAGS'].split()
  assert flags == ['--a=1', '--xla_force_host_platform_device_count=3']


def test_more_devices_than_there_are_is_refused() -> None:
  with pytest.raises(UserError, match='--topology: expected at most 8 devices, which this machine has, got cpu:9'):
    topologies.open_devices(topologies.parse('cpu:9'))
