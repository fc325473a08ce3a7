"""Memory and time of the loss over all pairs of a batch on TPU slices, by the TPU compiler; no TPU is needed.

    python -m benchmarks.pair_losses --pairs 2048 v5e:2x2 v5e:4x4 v5e:8x8 [--big_vision=CHECKOUT]

compiles loss and gradient alone, of vectors that are split over all chips, as a matrix and as a ring, and prints a row
for each. With a checkout of big_vision its losses follow, of vectors in f32, as its trainer has them, and in bf16. With
`--parts=losses,steps` the train steps of `configs/siglip_b16.py` follow, in the layout and the form that a run chooses,
and those of big_vision with two towers of the same sizes; unrolled ones from programs of 2 and 4 blocks a tower.

`temp` is the memory beside arguments and results, `peak` that with them, `estimate` the compiler's time and `schedule`
that of its schedule, both without the collectives, `collectives` their time, `exposed` what of it the chip waits, and
`sent` what a chip sends.
"""
from __future__ import annotations

import argparse
import itertools
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import rival, rival_pairs
from vit_jax.config import files
from vit_jax.config.schema import PairForm, PairLoss
from vit_jax.core.errors import UserError
from vit_jax.plan import compile, plan, quick, table, topologies

if TYPE_CHECKING:
  import jax

MIB, GIB = 2**20, 2**30
HEAD = ('chips', 'what', 'loss', 'temp', 'peak', 'estimate, ms', 'schedule, ms', 'collectives, ms', 'exposed, ms',
        'sent')


class Request(NamedTuple):
  """A loss to compile: so many pairs a chip, of vectors of `width` numbers of a dtype.

  checkout: folder with the package `big_vision`, whose loss is compiled in place of a form of ours; '' = ours.
  """
  topology: str
  pairs: int
  width: int
  loss: PairLoss
  form: PairForm
  dtype: str = 'bfloat16'
  checkout: str = ''


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
  return compile.examine(lambda: lower(request, list(devices)), topology, dump)


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
  vectors = jax.ShapeDtypeStruct((request.pairs * len(devices), request.width), request.dtype,
                                 sharding=meshes.batch_sharding(mesh))
  scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)

  given: Any = Pairs(*[vectors] * 2, *[scalar] * 2)  # type: ignore[arg-type]
  if request.checkout:
    given = {'zimg': vectors, 'ztxt': vectors, 't': scalar} | (
        {'b': scalar} if request.loss is PairLoss.SIGMOID else {})
    theirs = rival_pairs.mean_loss(request.checkout, request.loss, lambda variables, *_, **__: (
        variables['params']['zimg'], variables['params']['ztxt'], variables['params']))

  def both(given: Any) -> tuple[jax.Array, Any]:
    if request.checkout:
      return jax.value_and_grad(lambda params: theirs(params, None, None, None))(given)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return jax.value_and_grad(lambda pairs: mean_loss(pairs, request.loss, form=request.form).value)(given)

  return jax.jit(both, out_shardings=(whole, jax.tree.map(lambda x: x.sharding, given))).lower(given)


def cells(answer: compile.Answer, chip: topologies.Chip) -> tuple[str, ...]:
  """The cells of a program from `temp` on."""
  if answer.overflow:
    return ('does not fit', *[''] * 6)
  ms, waits = 1e3 / chip.clock_hz, answer.waits or ()

  def size(num_bytes: int) -> str:
    return f'{num_bytes / MIB:.2f} MiB' if num_bytes < GIB else f'{num_bytes / GIB:.2f} GiB'

  kernels = sum(one.scheduled or 0 for one in answer.operations if not one.cycles)  # they have no estimate
  return (size(answer.temp_bytes), size(answer.peak_bytes), f'{(answer.costs.cycles + kernels) * ms:.2f}',
          f'{answer.schedule.cycles * ms:.2f}' if answer.schedule else '', f'{sum(one.ns for one in waits) / 1e6:.2f}',
          f'{sum(one.exposed_ns for one in waits) / 1e6:.2f}',
          f'{sum(one.sent_bytes for one in answer.costs.collectives) / MIB:.1f} MiB')


def row(request: Request) -> tuple[str, ...]:
  """Compiles, and returns the cells of a loss alone."""
  what = f'big_vision, {request.dtype}' if request.checkout else request.form.value
  return (request.topology, what, request.loss.value, *cells(ask(request), topologies.parse(request.topology).chip))


def losses(topology: str, loss: PairLoss, given: argparse.Namespace) -> Iterator[tuple[str, ...]]:
  """Compiles a loss alone, in its forms, for a topology, and returns their cells."""
  for form in (PairForm.MATRIX, PairForm.RING):
    yield row(Request(topology, given.pairs, given.width, loss, form))
  for dtype in ('float32', 'bfloat16') if given.big_vision else ():
    yield row(Request(topology, given.pairs, given.width, loss, PairForm.MATRIX, dtype, given.big_vision))


def steps(topology: str, loss: PairLoss, given: argparse.Namespace) -> Iterator[tuple[str, ...]]:
  """Compiles the train steps of two towers of size B for a topology, and returns their cells."""
  parsed = topologies.parse(topology)
  batch = given.pairs * parsed.num_devices
  config = files.load('siglip_b16', [f'batch_size={batch}', f'objective.loss={loss.value}'])
  subject = plan.lay_out(plan.Subject(config, parsed, *plan.numbers(config)))
  yield topology, 'step', loss.value, *cells(quick.ask(subject.request()), parsed.chip)
  for scan in (False, True) if given.big_vision else ():
    answer = rival_pairs.ask_quick(rival_pairs.Request(given.big_vision, topology, batch, loss, scan=scan))
    yield topology, 'step of big_vision' + ', scanned' * scan, loss.value, *cells(answer, parsed.chip)


def run(argv: list[str]) -> None:
  """Prints the rows as they are compiled, and then the table."""
  parser = argparse.ArgumentParser()
  parser.add_argument('topologies', nargs='+')
  parser.add_argument('--pairs', type=int, default=2048)
  parser.add_argument('--width', type=int, default=768)
  parser.add_argument('--big_vision', default='', help='a checkout of big_vision; without it, its rows are left out')
  parser.add_argument('--parts', default='losses', help='losses alone, or steps of two towers of size B; with commas')
  parser.add_argument('--loss', default='sigmoid,softmax', help='with commas')
  given = parser.parse_args(argv)
  if given.big_vision:
    rival.check(given.big_vision)
  rows = {'losses': losses, 'steps': steps}
  found = []
  for topology, loss, part in itertools.product(given.topologies, given.loss.split(','), given.parts.split(',')):
    for line in rows[part](topology, PairLoss(loss), given):
      print(*line, sep='  ', flush=True)
      found.append(line)
  print(table.table(HEAD, found))


if __name__ == '__main__':
  if len(sys.argv) == 4 and pathlib.Path(sys.argv[1]).name == 'request':
    compile.main(*sys.argv[1:], by=measure)
  else:
    try:
      run(sys.argv[1:])
    except UserError as error:
      sys.exit(f'error: {error}')
