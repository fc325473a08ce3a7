"""The platform is chosen from what the machine has, before jax is imported."""
from __future__ import annotations

import pathlib

import pytest

from vit_jax.parallel import hardware
from vit_jax.plan import topologies


def chosen(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *packages: str, **environ: str) -> str | None:
  monkeypatch.setattr(hardware.importlib.util, 'find_spec', lambda name: name if name in packages else None)
  hardware.choose(environ, root=root)
  return environ.get('JAX_PLATFORMS')


def touch(root: pathlib.Path, *names: str, text: str = '') -> None:
  for name in names:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_without_the_tpu_compiler_nothing_is_set(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  assert chosen(tmp_path, monkeypatch) is None


def test_with_it_and_no_tpu_jax_is_kept_from_looking_for_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  assert chosen(tmp_path, monkeypatch, 'libtpu') == 'cpu'
  touch(tmp_path, 'dev/nvidiactl')
  assert chosen(tmp_path, monkeypatch, 'libtpu') == 'cpu'
  assert chosen(tmp_path, monkeypatch, 'libtpu', 'jax_cuda13_plugin') == 'cuda,cpu'


def test_a_vfio_group_of_another_maker_is_no_tpu(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  touch(tmp_path, 'dev/vfio/3')
  touch(tmp_path, 'sys/bus/pci/devices/0000:00:01.0/vendor', text='0x8086\n')
  assert chosen(tmp_path, monkeypatch, 'libtpu') == 'cpu'
  touch(tmp_path, 'sys/bus/pci/devices/0000:00:02.0/vendor', text='0x1ae0\n')
  assert chosen(tmp_path, monkeypatch, 'libtpu') is None


def test_a_tpu_is_used(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  assert chosen(tmp_path, monkeypatch, 'libtpu', TPU_ACCELERATOR_TYPE='v5litepod-4') is None
  touch(tmp_path, 'dev/accel0')
  assert chosen(tmp_path, monkeypatch, 'libtpu') is None


def test_what_a_person_has_set_stays(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  assert chosen(tmp_path, monkeypatch, 'libtpu', JAX_PLATFORMS='tpu') == 'tpu'


def test_runs_on_a_tpu_compile_as_plans_for_it_do(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(hardware.importlib.util, 'find_spec', lambda name: name)
  for own in ('', '--a=1'):
    environ = {'TPU_NAME': 'x', 'LIBTPU_INIT_ARGS': own}
    hardware.choose(environ, root=tmp_path)
    monkeypatch.setenv('LIBTPU_INIT_ARGS', own)
    planned = topologies.environment(topologies.parse('v5e:4x4'))['LIBTPU_INIT_ARGS']
    assert environ['LIBTPU_INIT_ARGS'] == planned and own in planned and 'windowed_einsum' in planned


def test_a_machine_without_accelerator_and_one_told_so_compute_on_the_cpu(tmp_path: pathlib.Path) -> None:
  assert hardware.is_cpu_only({}, root=tmp_path)
  (tmp_path / 'dev').mkdir()
  (tmp_path / 'dev' / 'nvidiactl').touch()
  assert not hardware.is_cpu_only({}, root=tmp_path) and hardware.is_cpu_only({'JAX_PLATFORMS': 'cpu'}, root=tmp_path)
  assert not hardware.is_cpu_only({'TPU_NAME': 'x'}, root=tmp_path)


@pytest.mark.parametrize(('files', 'plugin', 'kind', 'extra'), [
    ({}, '', 'cpu', ''),
    ({'dev/accel0': ''}, '', 'tpu', 'tpu'),
    ({'dev/vfio/0': '', 'sys/bus/pci/devices/0000:00:04.0/vendor': '0x1ae0\n'}, '', 'tpu', 'tpu'),  # v5e and v6e
    ({'dev/nvidiactl': ''}, 'jax_cuda12_plugin', 'gpu', 'gpu12'),
    ({'dev/nvidiactl': ''}, 'jax_cuda13_plugin', 'gpu', 'gpu'),
    ({'dev/nvidiactl': ''}, '', 'gpu', 'gpu'),
    ({'dev/nvidiactl': '', 'proc/driver/nvidia/version': 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15'},
     '', 'gpu', 'gpu12'),
    ({'dev/nvidiactl': '', 'proc/driver/nvidia/version':
      'NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06'}, '', 'gpu', 'gpu'),
])
def test_the_extra_is_that_of_the_devices_and_keeps_the_cuda_of_an_installed_plugin(
    files: dict[str, str], plugin: str, kind: str, extra: str, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(hardware.importlib.util, 'find_spec', lambda name: name if name == plugin else None)
  for name, text in files.items():
    touch(tmp_path, name, text=text)
  assert (hardware.kind({}, root=tmp_path), hardware.extra({}, root=tmp_path)) == (kind, extra)
