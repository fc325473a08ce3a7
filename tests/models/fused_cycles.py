"""Compiles the fused attention kernels for a TPU and prints their cycles.

`python tests/models/fused_cycles.py v6e:1x1`.
A process of its own, since the compiler reads its flags when its library is loaded. No TPU is needed, but libtpu.
Further arguments: images, tokens, heads and channels of a head; by default those of L/16 with 64 images.
"""
from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile

from vit_jax.plan import bundles, topologies


def main(name: str, images: str = '64', tokens: str = '196', heads: str = '16', channels: str = '64') -> None:
  topology, folder = topologies.parse(name), tempfile.mkdtemp()
  os.environ.update(topologies.environment(topology))
  os.environ['LIBTPU_INIT_ARGS'] += ' ' + bundles.flags(folder)
  import jax
  import jax.numpy as jnp

  from vit_jax.models.kernels import fused_attention
  at = jax.sharding.SingleDeviceSharding(topologies.open_devices(topology)[0])
  width = int(heads) * int(channels)
  vmem_bytes = fused_attention.SMALL_VMEM if topology.kind == 'v4' else fused_attention.LARGE_VMEM
  x = jax.ShapeDtypeStruct((int(images), int(tokens), width), jnp.bfloat16, sharding=at)
  biases = jax.ShapeDtypeStruct((3, width), jnp.bfloat16, sharding=at)

  def gradient(query: jax.Array, key: jax.Array, value: jax.Array, biases: jax.Array, dout: jax.Array) -> tuple:
    run = lambda *inputs: fused_attention.attend(*inputs, int(heads), vmem_bytes)
    return jax.vjp(run, query, key, value, biases)[1](dout)

  jax.jit(lambda *inputs: fused_attention.attend(*inputs, int(heads), vmem_bytes)).lower(x, x, x, biases).compile()
  jax.jit(gradient).lower(x, x, x, biases, x).compile()
  found = bundles.read(pathlib.Path(folder))
  kernels = {name: count for name, count in found.items() if 'fused_attention' in name}
  print(json.dumps({'backward' if 'backward' in name else 'forward': count for name, count in kernels.items()}))


if __name__ == '__main__':
  main(*sys.argv[1:])
