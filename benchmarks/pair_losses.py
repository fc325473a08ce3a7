"""Memory and time of the loss over all pairs of a batch on TPU slices, by the TPU compiler; no TPU is needed.

    python -m benchmarks.pair_losses --pairs 2048 v5e:2x2 v5e:4x4 v5e:8x8

compiles loss and gradient alone, of bf16 vectors that are split over all chips, as a matrix and as a ring, and prints a
row for each. `temp` is the memory beside arguments and results, `time` that of the compiler's schedule without the
collectives, `sent` what a chip sends.
"""
from __future__ import annotations

import argparse
import pathlib
import sys
from typing import TYPE_CHECKING, NamedTuple

from vit_jax.config.schema import PairForm, PairLoss
from vit_jax.plan import compile, topologies

if TYPE_CHECKING:
  import jax

MIB = 2**20


class Request(NamedTuple):
  """A loss to compile: so many pairs a chip, of vectors of `width` numbers."""
  topology: str
  pairs: int
  width: int
  loss: PairLoss
  form: PairForm


def ask(request: Request) -> compile.Answer:
  """Compiles in a child process.

  Raises:
    UserError: the compiler failed.
  """
  return compile.in_process('benchmarks.pair_losses', request, topologies.parse(request.topology))


def measure(request: Request, dump: pathlib.Path) -> compile.Answer:
  """Compiles in this process, whose environment must have been set, with the compiler's dump in the folder `dump`."""
  topology = topologies.parse(request.topology)
  devices = topologies.open_devices(topology)
  return compile.examine(lambda: lower(request, list(devices)), topology, dump, kind=devices[0].device_kind)


def lower(request: Request, devices: list[jax.Device]) -> jax.stages.Lowered:
  """Loss and gradient, lowered for devices that need not be here."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import NamedSharding, PartitionSpec

  from vit_jax.config import schema
  from vit_jax.objectives.pair_losses import Pairs, mean_loss
  from vit_jax.parallel import mesh as meshes
  mesh = meshes.make(schema.Mesh(-1, 1, 1), devices)
  whole = NamedSharding(mesh, PartitionSpec())
  vectors = jax.ShapeDtypeStruct((request.pairs * len(devices), request.width), jnp.bfloat16,
                                 sharding=meshes.batch_sharding(mesh))
  scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)

  def both(pairs: Pairs) -> tuple[jax.Array, Pairs]:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return jax.value_and_grad(lambda pairs: mean_loss(pairs, request.loss, form=request.form).value)(pairs)

  return jax.jit(both).lower(Pairs(*[vectors] * 2, *[scalar] * 2))  # type: ignore[arg-type]


def row(request: Request) -> str:
  """Compiles, and returns a row of the table."""
  answer = ask(request)
  if answer.overflow:
    return f'| {request.topology} | {request.loss.value} | {request.form.value} | does not fit | | |'
  chip = topologies.parse(request.topology).chip
  time_ms = f'{1e3 * answer.schedule.cycles / chip.clock_hz:.2f} ms' if answer.schedule else ''
  sent = sum(one.sent_bytes for one in answer.costs.collectives)
  return (f'| {request.topology} | {request.loss.value} | {request.form.value} | {answer.temp_bytes / MIB:.2f} MiB | '
          f'{time_ms} | {sent / MIB:.1f} MiB |')


def run(argv: list[str]) -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser()
  parser.add_argument('topologies', nargs='+')
  parser.add_argument('--pairs', type=int, default=2048)
  parser.add_argument('--width', type=int, default=768)
  given = parser.parse_args(argv)
  print('| chips | loss | form | temp | time | sent |\n|---|---|---|---|---|---|')
  for topology in given.topologies:
    for loss in PairLoss:
      for form in (PairForm.MATRIX, PairForm.RING):
        print(row(Request(topology, given.pairs, given.width, loss, form)), flush=True)


if __name__ == '__main__':
  if len(sys.argv) == 4 and pathlib.Path(sys.argv[1]).name == 'request':
    compile.main(*sys.argv[1:], by=measure)
  else:
    run(sys.argv[1:])
