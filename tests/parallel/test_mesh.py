"""The grid of devices: how it is laid over slices, nodes and processes, and what is refused."""
from __future__ import annotations

import dataclasses
import gc
import importlib.util
import os
import subprocess
import sys
import weakref

import fakes
import jax
import numpy as np
import programs
import pytest
import slices

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.objectives.supervised import Supervised
from vit_jax.parallel import mesh as meshes
from vit_jax.plan import topologies


@dataclasses.dataclass(frozen=True)
class Gpu:
  """What a mesh asks of a device; `slice_index` is left out where the platform has none."""
  id: int
  process_index: int
  platform: str = 'gpu'
  device_kind: str = 'fake'


@dataclasses.dataclass(frozen=True)
class Tpu(Gpu):
  platform: str = 'tpu'
  device_kind: str = 'TPU v5p'
  slice_index: int = 0
  coords: tuple[int, int, int] = (0, 0, 0)
  core_on_chip: int = 0


def tpus(*, slices: int) -> list[Tpu]:
  """Slices of 2x2x1 chips, the chips of all of them in turn, as no one would want them."""
  return [Tpu(id=4 * s + x + 2 * y, process_index=s, slice_index=s, coords=(x, y, 0))
          for y in range(2) for x in range(2) for s in reversed(range(slices))]


def gpus(*counts: int) -> list[Gpu]:
  """So many GPUs of each process."""
  owners = [process for process, count in enumerate(counts) for _ in range(count)]
  return [Gpu(i, process) for i, process in enumerate(owners)]


def layout(settings: schema.Mesh, devices: list) -> np.ndarray:
  return meshes.arrange(meshes.shape(settings, len(devices)), slices=settings.slices, devices=devices)


@pytest.mark.parametrize('settings', [schema.Mesh(-1, 2, 2, slices=3), schema.Mesh(6, 2, 1, slices=3),
                                      schema.Mesh(3, 4, 1, slices=3), schema.Mesh(12, 1, 1, slices=3)])
def test_data_goes_over_slices_first_and_the_rest_stays_inside_one(settings: schema.Mesh) -> None:
  grid = layout(settings, tpus(slices=3))
  per_slice = grid.shape[0] // 3
  assert grid.shape == meshes.shape(settings, 12) and len({d.id for d in grid.flat}) == 12
  for part in range(3):
    assert {d.slice_index for d in grid[part * per_slice:(part + 1) * per_slice].flat} == {part}


def test_without_slices_the_processes_are_the_nodes() -> None:
  grid = layout(schema.Mesh(-1, 3, 1, slices=2), gpus(6, 6))
  assert grid.shape == (4, 3, 1)
  assert [[d.process_index for d in row.flat] for row in grid] == [[0] * 3, [0] * 3, [1] * 3, [1] * 3]


def test_several_processes_in_order_make_a_node_and_one_process_is_cut_in_order() -> None:
  shuffled = gpus(1, 1, 1, 1, 1, 1)[::-1]
  grid = layout(schema.Mesh(-1, 3, 1, slices=2), shuffled)
  assert [[d.process_index for d in row.flat] for row in grid] == [[0, 1, 2], [3, 4, 5]]
  grid = layout(schema.Mesh(-1, 1, 3, slices=2), gpus(6))
  assert [[d.id for d in row.flat] for row in grid] == [[0, 1, 2], [3, 4, 5]]


def test_gpus_that_say_they_are_in_one_slice_are_laid_out_by_process() -> None:
  devices = [Tpu(i, i // 2, platform='gpu', device_kind='fake') for i in range(6)]
  assert [d.process_index for d in layout(schema.Mesh(-1, 2, 1, slices=3), devices)[:, 0, 0]] == [0, 1, 2]


def test_slices_are_counted_by_their_index_and_on_cpus_by_processes() -> None:
  assert meshes.count_slices(tpus(slices=3)) == 3
  assert meshes.count_slices([dataclasses.replace(d, platform='cpu') for d in gpus(2, 2, 2)]) == 3
  assert meshes.count_slices(gpus(2, 2)) == 1  # without an index
  assert meshes.count_slices(jax.devices()) == 1


def test_a_mesh_of_as_many_slices_as_there_are_is_that_of_their_number() -> None:
  devices = tpus(slices=3)
  counted = meshes.make(schema.Mesh(-1, 2, 1, slices=0), devices)
  assert counted.shape == {'data': 6, 'fsdp': 2, 'tensor': 1}
  np.testing.assert_array_equal(counted.devices, meshes.make(schema.Mesh(-1, 2, 1, slices=3), devices).devices)


@pytest.mark.parametrize(('slices', 'devices', 'said'), [
    (2, tpus(slices=4), 'mesh.slices: expected 4, for 16 devices in 4 slices, got 2'),
    (2, tpus(slices=1), 'mesh.slices: expected 1, for 4 devices in 1 slices, got 2'),
    (2, gpus(2, 2, 2), 'a divisor of 3, such as the number of nodes, for 6 devices in 3 processes, got 2'),
    (4, gpus(4, 4), 'a divisor of 2, such as the number of nodes, for 8 devices in 2 processes, got 4'),
    (2, gpus(5, 3), 'mesh.slices: expected processes with equal numbers of devices, got 5, 3.'),
    (3, gpus(8), 'mesh.slices: expected a divisor of data=8 (of 8 devices with fsdp=1, tensor=1), got 3'),
])
def test_what_does_not_fit_is_refused_with_its_values(slices: int, devices: list, said: str) -> None:
  with pytest.raises(UserError) as error:
    layout(schema.Mesh(slices=slices), devices)
  assert said in str(error.value)


def test_several_slices_without_the_setting_are_refused_with_the_setting_that_would_do() -> None:
  with pytest.raises(UserError, match='expected 3, the number of slices that the 12 devices are in, got 1'):
    meshes.make(schema.Mesh(), tpus(slices=3))  # type: ignore[arg-type]


def test_a_mesh_of_slices_has_the_same_axes_and_holds_rows_in_order() -> None:
  mesh = meshes.make(schema.Mesh(-1, 2, 1, slices=2), jax.devices())
  plain = meshes.make(schema.Mesh(-1, 2, 1), jax.devices())
  assert dict(mesh.shape) == {'data': 4, 'fsdp': 2, 'tensor': 1} and mesh.axis_types == plain.axis_types
  assert meshes.local_shard(mesh) == Shard(tuple(range(8)), 8)


@pytest.mark.slow(reason='2 s each: two programs')
@pytest.mark.parametrize('settings', [schema.Mesh(4, 2, 1, slices=2), schema.Mesh(2, 2, 2, slices=2)])
def test_a_step_over_two_slices_is_the_step_of_one_device(settings: schema.Mesh) -> None:
  data = programs.batch(size=24)
  task = Supervised(fakes.PlainNet(), fakes.LinearHead(), num_classes=7, loss=schema.Loss.SOFTMAX, label_smoothing=0.)
  one = programs.MESHES['one']
  want, first = programs.run(programs.build(task, fakes.normalize, one, like=data), one, data)
  got, second = programs.run(
      programs.build(task, fakes.normalize, settings, like=data), settings, data)
  programs.assert_close(got.params, want.params)
  assert second.grad_norm == pytest.approx(float(first.grad_norm), rel=1e-5)


SLICES = ('v3:4x4', 'v3:16x16', 'v4:2x2x4', 'v4:4x4x8', 'v5e:4x4', 'v5e:16x16', 'v5p:4x4x4', 'v6e:8x8')
LAYOUTS = {'data': (-1, 1, 1), 'fsdp': (1, -1, 1), 'fsdp=4': (-1, 4, 1), 'fsdp=8': (-1, 8, 1), 'tensor=4': (-1, 1, 4),
           'fsdp=2,tensor=2': (-1, 2, 2)}


def test_the_fake_slices_are_laid_over_hosts_as_recorded() -> None:
  assert tuple((d.id, d.process_index, d.coords) for d in slices.devices('v5e:4x4')) == slices.RECORDED


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('name', SLICES)
def test_a_host_feeds_the_rows_that_its_devices_hold_and_no_others(name: str, layout: str) -> None:
  devices = slices.devices(name)
  mesh = meshes.make(schema.Mesh(*LAYOUTS[layout]), devices)  # type: ignore[arg-type]
  batch_size = 3 * mesh.shape['data'] * mesh.shape['fsdp']
  held = meshes.batch_sharding(mesh).devices_indices_map((batch_size,))
  for process in {d.process_index for d in devices}:
    wanted = {row for device, index in held.items() if device.process_index == process
              for row in range(batch_size)[index[0]]}
    assert meshes.local_shard(mesh, process).rows(batch_size).tolist() == sorted(wanted)


@pytest.mark.parametrize('num_devices', [1, 2])
def test_a_batch_lies_over_the_devices(num_devices: int) -> None:
  mesh = meshes.make(schema.Mesh(data=num_devices), jax.devices()[:num_devices])
  given = {'image': np.full((4, 2), 7, np.uint8), 'index': np.array([1, 2, 3, 2**32 + 4])}
  placed = meshes.put_batch(given, mesh, Shard(tuple(range(num_devices)), num_devices))
  assert all(x.sharding == meshes.batch_sharding(mesh) and x.committed for x in placed.values())
  np.testing.assert_array_equal(placed['image'], 7)
  np.testing.assert_array_equal(placed['index'], [1, 2, 3, 4])
  assert placed['index'].dtype == np.int32


@pytest.mark.parametrize('num_devices', [1, 2])
def test_memory_of_the_host_that_a_batch_lies_in_is_kept(num_devices: int) -> None:
  """On CPUs, jax takes aligned memory as it is; loader processes use it again when nothing refers to it."""
  mesh = meshes.make(schema.Mesh(data=num_devices), jax.devices()[:num_devices])
  memory = np.zeros(64 + 8, np.uint8)
  dropped: list[bool] = []
  weakref.finalize(memory, dropped.append, True)
  start = -memory.ctypes.data % 64
  image = memory[start:start + 8].reshape(4, 2)
  image[:] = 7
  first = memory.ctypes.data
  placed = meshes.put_batch({'image': image}, mesh, Shard(tuple(range(num_devices)), num_devices))['image']
  del memory, image
  gc.collect()
  lies_there = any(first <= one.data.unsafe_buffer_pointer() < first + 72 for one in placed.addressable_shards)
  assert lies_there != bool(dropped)
  np.testing.assert_array_equal(placed, 7)


def test_the_rows_of_a_host_need_not_be_neighbors() -> None:
  mesh = meshes.make(schema.Mesh(), slices.devices('v5e:4x4'))  # type: ignore[arg-type]
  shard = meshes.local_shard(mesh, 0)
  assert shard == Shard((0, 1, 6, 15), 16)
  assert shard.rows(32).tolist() == [0, 1, 2, 3, 12, 13, 30, 31]


TRUE_SLICES = """
import sys
from vit_jax.plan import topologies
import slices
for name in sys.argv[1:]:
  true = [(d.id, d.process_index, tuple(d.coords), d.core_on_chip, d.device_kind)
          for d in topologies.open_devices(topologies.parse(name))]
  assert true == [(d.id, d.process_index, d.coords, d.core_on_chip, d.device_kind) for d in slices.devices(name)], name
"""


@pytest.mark.slow(reason='2 s: starts a program')
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
def test_the_fake_slices_are_those_that_the_tpu_compiler_knows() -> None:
  environment = os.environ | {'PYTHONPATH': ':'.join(path for path in sys.path if path)} | topologies.environment(
      topologies.parse(SLICES[0]))
  done = subprocess.run([sys.executable, '-c', TRUE_SLICES, *SLICES], env=environment, capture_output=True, text=True,
                        timeout=120)
  assert done.returncode == 0, done.stderr[-2000:]
