"""Hardware to plan for: names, numbers of devices, and error messages."""
from __future__ import annotations

import pytest

from vit_jax.core.errors import UserError
from vit_jax.plan import topologies


@pytest.mark.parametrize(('text', 'name', 'devices', 'cores'), [
    ('v3:16x16', 'v3:16x16', 512, 512), ('v3-512', 'v3:16x16', 512, 512), ('v4-256', 'v4:4x4x8', 128, 256),
    ('v4:4x4x4', 'v4:4x4x4', 64, 128), ('v5litepod-16', 'v5e:4x4', 16, 16), ('v6e-256', 'v6e:16x16', 256, 256),
    ('V5P-8', 'v5p:2x2x1', 4, 8), ('cpu:7', 'cpu:7', 7, 7), ('h200:3', 'h200:3', 3, 3),
    ('gpu:8', 'gpu:8', 8, 8)])
def test_a_slice_is_named_by_its_grid_or_by_cloud_providers(
    text: str, name: str, devices: int, cores: int) -> None:
  found = topologies.parse(text)
  assert (found.name, found.num_devices, found.num_cores) == (name, devices, cores)


@pytest.mark.parametrize('text', ['v3:16x17', 'v9:2x2', 'cpu', 'cpu:0', 'cpu:-3', 'v3', '', 'v4:2x2'])
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


def test_gpus_are_planned_for_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(topologies.glob, 'glob', lambda pattern: [])
  assert 'this machine has none.' in topologies.missing(topologies.parse('h200:1'))
  monkeypatch.setattr(topologies.glob, 'glob', lambda pattern: ['/dev/nvidia0'])
  assert topologies.missing(topologies.parse('h200:1')) == '' and 'has 1.' in topologies.missing(
      topologies.parse('h200:2'))


def test_the_nearest_name_is_suggested() -> None:
  with pytest.raises(UserError, match='Did you mean v3-512?'):
    topologies.parse('v3-513')


def test_a_missing_compiler_is_reported_with_install_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(topologies.importlib.util, 'find_spec', lambda name: None)
  assert "pip install 'vit-jax[plan]'" in topologies.missing(topologies.parse('v3:2x2'))
  assert topologies.missing(topologies.parse('cpu:8')) == ''


def test_the_compiling_process_uses_no_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
  assert topologies.environment(topologies.parse('v3:2x2')).items() >= {
      'JAX_PLATFORMS': 'cpu', 'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}.items()
  monkeypatch.setenv('XLA_FLAGS', '--a=1 --xla_force_host_platform_device_count=8')
  flags = topologies.environment(topologies.parse('cpu:3'))['XLA_FLAGS'].split()
  assert flags == ['--a=1', '--xla_force_host_platform_device_count=3']


def test_more_devices_than_there_are_is_refused() -> None:
  with pytest.raises(UserError, match='--topology: expected at most 8 devices, which this machine has, got cpu:9'):
    topologies.open_devices(topologies.parse('cpu:9'))
