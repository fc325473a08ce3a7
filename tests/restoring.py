"""Restores a large checkpoint in several processes: `python tests/restoring.py PHASE WORKDIR MIB FSDP`.

PHASE `save` writes a state of so many MiB, sharded over FSDP devices and replicated over the others; `restore` reads it
and prints seconds and the digest. `alone` makes each process read what it needs, as without `train/replicas.py`. `copy`
restores, and copies the state to the disk of each process, `LOCAL/PROCESS`; `restore` uses copies if LOCAL is set.
"""
from __future__ import annotations

import os
import sys
import time

import buckets
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.parallel import hosts
from vit_jax.parallel import mesh as meshes
from vit_jax.record import storage
from vit_jax.train import checkpoint, replicas
from vit_jax.train.local_copies import LocalCopies
from vit_jax.train.state import TrainState

LEAVES = 24


def main(phase: str, workdir: str, mib: str, fsdp: str) -> None:
  buckets.install()
  hosts.initialize()
  mesh = meshes.make(schema.Mesh(fsdp=int(fsdp)))
  size = int(mib) * 2**20 // 4 // LEAVES // 1024
  shapes = {f'w{i}': jax.ShapeDtypeStruct((size, 1024), jnp.float32) for i in range(LEAVES)}
  whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(None, 'fsdp'))
  abstract = TrainState(jax.ShapeDtypeStruct((), jnp.int32), shapes, {}, {})
  shardings = TrainState(whole, {name: split for name in shapes}, {}, {})
  root = storage.open_path(workdir)
  local = LocalCopies(root, f'{os.environ["LOCAL"]}/{jax.process_index()}') if 'LOCAL' in os.environ else None
  one = checkpoint.Checkpointer(root / 'checkpoints', keep=checkpoint.Keep(2), local=local)
  if phase == 'save':
    values = {name: np.random.default_rng(i).standard_normal(x.shape, np.float32)
              for i, (name, x) in enumerate(shapes.items())}
    for array in values.values():
      array[0, :2] = -0., np.nan
    placed = {name: jax.make_array_from_callback(array.shape, split, array.__getitem__)
              for name, array in values.items()}
    state = TrainState(jax.device_put(np.int32(7), whole), placed, {}, {})
    print('saved', one.save(7, state, data={}, meta={}, metrics={}))
    one.wait()
  else:
    if phase == 'alone':
      replicas.LEAST_BYTES = 2**60
    one.steps()
    jax.experimental.multihost_utils.sync_global_devices('begin')
    began = time.monotonic()
    found = one.restore(abstract, shardings)
    assert found
    print(f'{phase} {time.monotonic() - began:.2f} s, digest {trees.digest(found.state.params)}', flush=True)
    if phase == 'copy':
      for step in (8, 9):  # the first one compiles
        began = time.monotonic()
        one.save_local(step, found.state, data={}, meta={})
        print(f'copied in {time.monotonic() - began:.2f} s', flush=True)
  one.close()


if __name__ == '__main__':
  main(*sys.argv[1:])
