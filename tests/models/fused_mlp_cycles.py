"""Compiles the fused MLP kernels for a TPU and prints their cycles.

`python tests/models/fused_mlp_cycles.py v6e:1x1`.
A process of its own, since the compiler reads its flags when its library is loaded. No TPU is needed, but libtpu.
Further arguments: images, tokens, width and hidden width; by default those of L/16 with 64 images.
"""
from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile

from vit_jax.plan import bundles, topologies


def main(name: str, images: str = '64', tokens: str = '196', width: str = '1024', hidden: str = '4096') -> None:
  topology, folder = topologies.parse(name), tempfile.mkdtemp()
  os.environ.update(topologies.environment(topology))
  os.environ['LIBTPU_INIT_ARGS'] += ' ' + bundles.flags(folder)
  import jax
  import jax.numpy as jnp

  from vit_jax.config.schema import Gelu
  from vit_jax.models.kernels import fused_mlp
  at = jax.sharding.SingleDeviceSharding(topologies.open_devices(topology)[0])
  d, f = int(width), int(hidden)
  x, *weights = (jax.ShapeDtypeStruct(sides, jnp.bfloat16, sharding=at)
                 for sides in ((int(images), int(tokens), d), (d, f), (f,), (f, d), (d,)))

  def form(*inputs: jax.Array) -> jax.Array:
    return fused_mlp.mlp(*inputs, Gelu.TANH)

  jax.jit(lambda *inputs: jax.vjp(form, *inputs[:-1])[1](inputs[-1])).lower(x, *weights, x).compile()
  found = bundles.read(pathlib.Path(folder))
  kernels = {name: count for name, count in found.items() if 'fused_mlp' in name}
  print(json.dumps({'backward' if 'backward' in name else 'forward': count for name, count in kernels.items()}))


if __name__ == '__main__':
  main(*sys.argv[1:])
