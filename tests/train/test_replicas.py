"""Each array of a checkpoint is read once for all replicas: who reads what, and that no bit changes on the way."""
from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from typing import Any

import buckets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.config import schema
from vit_jax.parallel import mesh as meshes
from vit_jax.train import replicas

MIB = 64
"""Of a state of 24 arrays. TensorStore reads arrays that are smaller than 1 MiB together with their neighbors."""


def placed(*rows: list[int]) -> Any:
  """A mesh [data, fsdp] whose devices are in these processes."""
  devices = np.asarray([[types.SimpleNamespace(process_index=one) for one in row] for row in rows])
  return types.SimpleNamespace(devices=devices)


@pytest.mark.parametrize(('mesh', 'want'), [
    (placed([0], [1], [2], [3]), [0, 1, 2, 3]),
    (placed([0], [0], [1], [1]), [0, 2]),
    (placed([0, 1], [2, 3]), [0, 1]),
    (placed([0, 0], [0, 1], [1, 1]), [0, 2]),
    (placed([0, 1, 2, 3]), [0]),
    (placed([0, 1], [0, 1]), [0]),
])
def test_rows_of_the_mesh_without_a_common_process_read(mesh: Any, want: list[int]) -> None:
  assert replicas.readers(mesh) == want


def test_arrays_are_assigned_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(replicas, 'readers', lambda mesh: [0, 4])
  mesh = meshes.make(schema.Mesh(data=8, fsdp=1))
  shapes = [jax.ShapeDtypeStruct((mib, 2**18), jnp.float32) for mib in (3, 8, 2, 2, 1)]
  whole = NamedSharding(mesh, PartitionSpec())
  sharing = replicas.share([whole] * 5, shapes)
  assert sharing and sharing.owners == (4, 0, 4, 4, 4)
  assert sharing.target(0, whole).mesh.devices.tolist() == mesh.devices[4:5].tolist()
  split = NamedSharding(mesh, PartitionSpec('data'))
  assert replicas.share([split] * 5, shapes) is None  # nothing is replicated
  assert replicas.share([whole], [jax.ShapeDtypeStruct((9, 9), jnp.float32)]) is None  # too small to send
  monkeypatch.setattr(replicas, 'readers', lambda mesh: [0])
  assert replicas.share([whole] * 5, shapes) is None


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16', 'int32', 'int8', 'uint32', 'bool'])
def test_sending_changes_no_bit(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """Every process has all devices here, so that it puts what any of them would."""
  mesh = meshes.make(schema.Mesh(data=2, fsdp=4))
  numbers = np.random.default_rng(0).integers(0, 2**32, (8, 12), np.uint32)
  width = np.dtype(jnp.dtype(dtype)).itemsize
  values = numbers > 2**31 if dtype == 'bool' else numbers.astype(f'uint{8 * width}').view(jnp.dtype(dtype))
  if dtype.endswith(('float32', 'float16')):
    values[0, :2] = -0., np.nan
  split = NamedSharding(mesh, PartitionSpec(None, 'fsdp'))
  sharing = replicas.Sharing(mesh, (1, 0))
  target = [jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=split)] * 2
  read = [jax.device_put(values, sharing.target(i, split)) for i in range(2)]
  monkeypatch.setattr(replicas, 'CHUNK_BYTES', 1)
  for got in sharing.send(read, target):
    assert got.sharding == split and got.dtype == values.dtype
    for shard in got.addressable_shards:
      assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()


def test_a_program_sends_as_much_as_fits(monkeypatch: pytest.MonkeyPatch) -> None:
  mesh = meshes.make(schema.Mesh(data=2, fsdp=4))
  split = NamedSharding(mesh, PartitionSpec(None, 'fsdp'))
  target = [jax.ShapeDtypeStruct((rows, 4), jnp.float32, sharding=split) for rows in (3, 2, 9, 1, 1)]
  monkeypatch.setattr(replicas, 'CHUNK_BYTES', 20)
  assert replicas._chunks(target) == [[0, 1], [2], [3, 4]]


@pytest.mark.slow(reason='70 s: five runs of four processes, which restore from a bucket')
@pytest.mark.parametrize('fsdp', [1, 2])
def test_four_processes_read_each_byte_once_and_get_every_bit(fsdp: int) -> None:
  with buckets.serve() as server:
    def run(phase: str) -> tuple[set[str], float]:
      server.sent = 0
      done = subprocess.run(
          ['bash', str(runs.ROOT / 'launch' / 'local_processes.sh'), '4', '1', '--', sys.executable,
           str(runs.ROOT / 'tests' / 'restoring.py'), phase, 'gs://mine/run', str(MIB), str(fsdp)],
          env={**os.environ, 'NO_CHECK': '1', 'PYTHONPATH': f'{runs.ROOT}:{runs.ROOT / "tests"}', 'XLA_FLAGS': '',
               **server.environment()}, capture_output=True, text=True, check=False, timeout=300)
      assert done.returncode == 0, done.stdout + done.stderr
      digests = re.findall(r'(?:digest|saved) ([0-9a-f]{64})', done.stdout)
      assert len(digests) == 4
      return set(digests), server.sent / 2**20

    saved, _ = run('save')
    shared, once = run('restore')
    assert shared == saved and len(saved) == 1 and once < 1.5 * MIB
    if fsdp == 1:
      alone, often = run('alone')
      assert alone == saved and often > 3 * MIB  # random numbers are compressed a little
