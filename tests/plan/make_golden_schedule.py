"""Writes golden_schedule.json: a small program for v6e chips, its text, and the dump of its operations.

`python tests/plan/make_golden_schedule.py`, with libtpu installed; no TPU is needed. The file was made with jax 0.10.2
and libtpu 0.0.52. Of the dump only what a count reads is kept: of each bundle its address, labels and depth, the
stages of the pipeline, and the tests of loops; of the text, the computations.
"""
from __future__ import annotations

import json
import os
import pathlib
import re
import tempfile
from typing import Any, TypeAlias

from vit_jax.plan import bundles, topologies

TOPOLOGY, FOLDER = topologies.parse('v6e:2x2'), tempfile.mkdtemp()
os.environ.update(topologies.environment(TOPOLOGY))  # before jax is imported
os.environ['LIBTPU_INIT_ARGS'] += ' ' + bundles.flags(FOLDER)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

Ref: TypeAlias = Any  # of a kernel: an array that can be written; JAX has no public name for its type
HERE = pathlib.Path(__file__).parent
KEPT = re.compile(r'iteration index, stage = \d|(scmp\.\w+\.s32\.totalorder [^,]+, [^ ]+ /\* )?loop exit test')


def cut(line: str) -> str | None:
  """The part of a line of the dump that is read; None if there is none."""
  head, brace, rest = line.partition('{')
  is_bundle = re.match(r'\s*(0x[0-9a-f]+|0)\s', line) is not None
  found = [one[0] for one in KEPT.finditer(rest if is_bundle else line)]
  if not is_bundle:
    return ' '.join(found) or None
  return head + brace + ' ' + ' ;; '.join(dict.fromkeys(found))


def add(x_ref: Ref, y_ref: Ref, out_ref: Ref) -> None:
  """A kernel with a loop inside the loop over its grid."""
  def rows(i: jax.Array, _: int) -> int:
    some = pl.ds(i * 16, 16)
    out_ref[some] = x_ref[some] + y_ref[some]
    return 0

  jax.lax.fori_loop(0, 8, rows, 0, unroll=False)


def program(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
  """A kernel, a product, an update in place, and a sum over devices."""
  def on_each(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    block = pl.BlockSpec((128, 256), lambda i: (i, 0))
    added = pl.pallas_call(add, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(x.shape[0] // 128,),
                           in_specs=[block, block], out_specs=block, name='added')(x, jnp.tanh(x))
    return added @ w, jax.lax.dynamic_update_slice(x, w[:8], (8, 0)), jax.lax.psum(w.astype(jnp.float32), 'devices')

  return jax.shard_map(on_each, in_specs=(P('devices'), P()), out_specs=(P('devices'), P('devices'), P()),
                       check_vma=False)(x, w)


def main() -> None:
  mesh = Mesh(np.array(topologies.open_devices(TOPOLOGY)), ('devices',))
  with jax.set_mesh(mesh):
    x, w = (jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for rows, spec in ((4096, P('devices')), (256, P())))
    text = jax.jit(program, donate_argnums=0).lower(x, w).compile().as_text()
  dump = {}
  for path in sorted(pathlib.Path(FOLDER).glob('*-0[0-9]-final_bundles.txt')):
    if not re.search('<late-|-TLP-', path.name):  # what surrounds the program
      dump[path.name] = [part for line in path.read_text(errors='replace').splitlines() if (part := cut(line))]
  golden = {'text': text[text.index('\n%') + 1:].splitlines(), 'dump': dump}
  (HERE / 'golden_schedule.json').write_text(json.dumps(golden, indent=0) + '\n')


if __name__ == '__main__':
  main()
