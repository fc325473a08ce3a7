"""Writes golden_collectives.json: the scheduled texts of small programs for TPUs, with their collectives.

`python tests/plan/make_golden_collectives.py`, with libtpu installed; no TPU is needed. The file was made with jax
0.10.2 and libtpu 0.0.52. Each program is compiled in a process of its own, because the compiler reads its flags once.
Of each line only what is read is kept. The SparseCore program is from the compiler's dump, which has no estimates.
"""
from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from vit_jax.parallel import xla_flags
from vit_jax.plan import bundles, topologies

CASES = {'v5e': ('v5e:2x4', 'layers', ''), 'v6e': ('v6e:2x4', 'layers', ''),
         'v6e_sparsecore': ('v6e:2x4', 'layers', ' '.join(xla_flags.SETS['sparsecore'].flags)),
         'v4_permutes': ('v4:2x2x2', 'permutes', '')}
HERE = pathlib.Path(__file__).parent
WIDTH, ROWS, LAYERS = 1024, 8192, 3
DROPPED = re.compile(r'(, (metadata|frontend_attributes)=\{[^{}]*\}|, output_to_operand_aliasing=\{.*?\}\)\}'
                     r'|, (sharding|use_global_device_ids|custom_call_target|async_execution_thread)=[^,]*)')


def cut(line: str) -> str:
  """Returns a line without what no test reads; of the configuration of the backend it keeps the estimate."""
  head, _, config = line.partition(', backend_config=')
  cycles = re.search(r'"estimated_cycles":"\d+"', config)
  return DROPPED.sub('', head) + (f', backend_config={{{cycles[0]}}}' if cycles else '')


def compile_case(name: str) -> None:
  """Compiles one program in this process, whose environment has been set, and prints its text."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import Mesh, NamedSharding
  from jax.sharding import PartitionSpec as P
  topology, program, _ = CASES[name]
  mesh = Mesh(np.array(topologies.open_devices(topologies.parse(topology))).reshape(-1), ('fsdp',))
  place = NamedSharding(mesh, P('fsdp'))

  def layers(kernels: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    def loss(kernels: list[jax.Array]) -> jax.Array:
      y = x
      for kernel in kernels:
        y = jax.nn.relu(y @ kernel.astype(jnp.bfloat16))
      return jnp.square(y.astype(jnp.float32)).sum()
    return [kernel - 1e-3 * slope for kernel, slope in zip(kernels, jax.grad(loss)(kernels), strict=True)]

  def permutes(kernels: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    """Every shard goes straight to each other device, beside a product."""
    def on_each(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
      shards = [jax.lax.ppermute(kernel, 'fsdp', [(i, (i + s) % 8) for i in range(8)]) for s in range(1, 8)]
      return sum(shards[1:], shards[0]), x.T @ x
    return list(jax.shard_map(on_each, in_specs=(P('fsdp'), P('fsdp')), out_specs=P('fsdp'), mesh=mesh)(kernels[0], x))

  kernels = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=place)] * LAYERS
  x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=place)
  function = {'layers': layers, 'permutes': permutes}[program]
  text = jax.jit(function, out_shardings=place).lower(kernels, x).compile()
  print(text.as_text() if 'sparsecore' not in name else '')


def main() -> None:
  golden = {}
  for name, (topology, _, flags) in CASES.items():
    with tempfile.TemporaryDirectory() as folder:
      environment = {**os.environ, **topologies.environment(topologies.parse(topology))}
      environment['LIBTPU_INIT_ARGS'] += f' {bundles.flags(folder)} {flags}'
      ran = subprocess.run([sys.executable, __file__, name], env=environment, stdout=subprocess.PIPE, text=True,
                           check=True)
      text = ran.stdout if ran.stdout.strip() else bundles.program_text(pathlib.Path(folder))
      counts = {key: value.cycles for key, value in bundles.read(pathlib.Path(folder)).items()}
    golden[name] = {'text': [cut(line) for line in text[text.index('\n%') + 1:].splitlines()], 'cycles': counts}
  (HERE / 'golden_collectives.json').write_text(json.dumps(golden, indent=0) + '\n')


if __name__ == '__main__':
  compile_case(sys.argv[1]) if sys.argv[1:] else main()
