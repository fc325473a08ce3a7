"""A batch put together from two processes whose devices take turns along the mesh; a test runs it in each of them."""
from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.parallel import hosts
from vit_jax.parallel import mesh as meshes

ROWS = 24


def main() -> None:
  hosts.initialize()
  devices = np.array(jax.devices()).reshape(2, 2, 2)
  for shape, order in (((8, 1, 1), (1, 0, 2)), ((2, 2, 2), (2, 0, 1)), ((2, 2, 2), (1, 2, 0)), ((1, 4, 2), (1, 0, 2)),
                       ((1, 1, 8), (1, 0, 2))):
    mesh = Mesh(devices.transpose(order).reshape(shape), meshes.AXES)
    shard = meshes.local_shard(mesh)
    whole = {'image': np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3), 'index': np.arange(ROWS)}
    placed = meshes.put_batch({name: x[shard.rows(ROWS)] for name, x in whole.items()}, mesh, shard)
    gather = jax.jit(lambda x: x, out_shardings=meshes.replicated(mesh))
    for name, x in whole.items():
      np.testing.assert_array_equal(np.asarray(gather(placed[name])), x)
      for part in placed[name].addressable_shards:
        np.testing.assert_array_equal(part.data, x[part.index])
    print(f'{shape}: process {jax.process_index()} fed parts {shard.parts} of {shard.count}', flush=True)


if __name__ == '__main__':
  main()
