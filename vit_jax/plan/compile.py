"""Compiles the train step of a config for a topology, in a process of its own, and measures the compiled program.

The parent sets the environment that the compiler needs before jax is imported (`topologies.environment`), so
that a machine's own devices and the libraries of absent ones stay out of each other's way.
"""
from __future__ import annotations

import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.config import schema
from vit_jax.core import documents, implementation
from vit_jax.core.errors import UserError
from vit_jax.plan import bundles, cards, compiled, gpu_kernels, hlo, overlap, schedule, topologies
from vit_jax.record import console

if TYPE_CHECKING:
  import jax

FAILURE_LINES = 12
"""Lines of the compiler's own output that an error shows."""
_STAGE = 'stage of vit_jax: '
"""What the child process writes before the name of each stage."""


class Request(NamedTuple):
  """A train step to compile. Of the data, only the numbers of examples and classes are needed."""
  config: schema.Config
  topology: str
  num_examples: int
  num_classes: int
  in_memory: bool

  def parse(self) -> topologies.Topology:
    """Returns the topology with the number of slices that the config has."""
    return topologies.parse(self.topology, slices=self.config.mesh.slices)


class Answer(NamedTuple):
  """The compiled step of one device; sizes in bytes. If it does not fit, `overflow` is set and the rest is 0.

  peak_bytes: highest memory use, arguments included.
  operations: those with cycles, and kernels; the most expensive first.
  schedule: the second time of the step; None if the platform has none.
  waits: time of the collectives, and what of it the core waits; None if the platform has no schedule.
  kinds: the kernels of a GPU by kind, the most time first; () on other platforms.
  """
  overflow: compiled.Overflow | None = None
  argument_bytes: int = 0
  temp_bytes: int = 0
  peak_bytes: int = 0
  costs: compiled.Costs = compiled.NOTHING
  lower_s: float = 0.
  compile_s: float = 0.
  device_kind: str = ''
  operations: Sequence[compiled.Operation] = ()
  schedule: schedule.Schedule | None = None
  waits: Sequence[overlap.Wait] | None = None
  kinds: Sequence[gpu_kernels.Kind] = ()


def ask(request: Request) -> Answer:
  """Compiles in a child process.

  Raises:
    UserError: the compiler failed for another reason than memory; shows the end of its output.
  """
  return in_process('vit_jax.plan.compile', request, request.parse())


def in_process(module: str, request: Any, topology: topologies.Topology) -> Answer:
  """Returns the answer of `main` of a module to a request, from a process with the environment of a topology.

  Raises:
    UserError: as `ask`.
  """
  root = str(pathlib.Path(__file__).resolve().parents[2])
  paths = [root, *filter(None, [os.environ.get('PYTHONPATH')])]
  environment = implementation.environment(os.environ) | {
      **topologies.environment(topology), 'PYTHONPATH': os.pathsep.join(paths)}
  with tempfile.TemporaryDirectory(prefix='vit_jax_plan_') as folder:
    asked, answer, dump = (pathlib.Path(folder, name) for name in ('request', 'answer.json', 'dump'))
    asked.write_bytes(pickle.dumps(request))
    dump.mkdir()
    if topology.chip.platform == 'tpu':  # the compiler reads its flags when its library is loaded
      environment['LIBTPU_INIT_ARGS'] += f' {bundles.flags(str(dump))}'
    status, lines = _run([sys.executable, '-m', module, str(asked), str(answer), str(dump)], environment)
    if status or not answer.exists():
      tail = '\n'.join(lines[-FAILURE_LINES:])
      if status == -signal.SIGKILL:
        tail = ('the process was killed, probably because this machine ran out of memory. A full-size model needs a '
                'few GiB.')
      raise UserError(f'Compiling for {topology.label} failed (status {status}):\n{tail}')
    return decode(documents.load(answer))


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, list[str]]:
  """Returns the exit status and the output of a process, and shows its stages as those of this one."""
  lines = []
  with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                        errors='replace') as process:
    assert process.stdout is not None
    for line in process.stdout:
      if line.startswith(_STAGE):
        console.begin_stage(line.removeprefix(_STAGE).rstrip('\n'))
      else:
        lines.append(line.rstrip('\n'))
  return process.returncode, lines


def decode(content: dict) -> Answer:
  """Decodes an answer from its JSON."""
  if 'error' in content:
    raise UserError(content['error'])
  lost, (cycles, unknown, rows, kernels) = content.pop('overflow'), content.pop('costs')
  costs = compiled.Costs(cycles, compiled.Unknown(*unknown), [compiled.Collective(*row) for row in rows],
                         [compiled.Kernel(*row) for row in kernels])
  parts = [compiled.Operation(*row) for row in content.pop('operations')]
  second, waits, kinds = content.pop('schedule'), content.pop('waits'), content.pop('kinds')
  return Answer(compiled.Overflow(*lost) if lost else None, costs=costs, operations=parts,
                schedule=schedule.Schedule(*second) if second else None,
                waits=None if waits is None else [overlap.Wait(*row) for row in waits],
                kinds=[gpu_kernels.Kind(*row) for row in kinds], **content)


def measure(request: Request, dump: pathlib.Path) -> Answer:
  """Compiles in this process, whose environment must have been set, with the compiler's dump in the folder `dump`."""
  from vit_jax.jobs import build
  from vit_jax.parallel import mesh as meshes
  topology, depth = request.parse(), getattr(request.config.model, 'depth', 0)
  print(f'{_STAGE}tracing the step' + f' of {depth} blocks' * bool(depth), flush=True)
  devices = topologies.open_devices(topology)
  parts = build.parts(request.config, mesh=meshes.make(request.config.mesh, devices),
                      num_examples=request.num_examples, num_classes=request.num_classes, in_memory=request.in_memory)
  program, batch = parts.program, build.abstract_batch(request.config)
  return examine(lambda: program.step_fn.lower(program.abstract_state, batch), topology, dump,
                 kind=devices[0].device_kind)


def examine(lower: Callable[[], jax.stages.Lowered], topology: topologies.Topology, dump: pathlib.Path, *,
            kind: str) -> Answer:
  """Compiles a program that `lower` makes for devices of a `kind`, and reads its report."""
  import jax
  began = time.monotonic()
  lowered = lower()
  lower_s, began = time.monotonic() - began, time.monotonic()
  print(f'{_STAGE}compiling it for {topology.label}', flush=True)
  try:
    program = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    lost = compiled.overflow(str(error))
    if lost is None:
      raise
    return Answer(overflow=lost, lower_s=lower_s, compile_s=time.monotonic() - began, device_kind=kind)
  compile_s = time.monotonic() - began
  print(f'{_STAGE}reading the compiled program', flush=True)
  memory = program.memory_analysis()
  assert memory is not None, 'every backend that plans are made for reports its memory'
  # The CPU compiler leaves temporaries out of its peak; this sum is an upper bound.
  total = (memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
           - memory.alias_size_in_bytes)
  peak = memory.peak_memory_in_bytes if topology.chip.platform == 'tpu' else total
  text, counts = scheduled_text(program, dump), bundles.read(dump)
  kinds: list[gpu_kernels.Kind] = []
  if topology.chip.platform == 'gpu' and topology.chip.clock_hz:
    text, kinds = gpu_kernels.annotate(text, topology.chip.hbm_bytes_s)
  second, found = times(text, counts, topology.chip)
  return Answer(None, memory.argument_size_in_bytes, memory.temp_size_in_bytes, peak,
                compiled.read(text, num_devices=topology.num_devices), lower_s, compile_s, kind, found, second,
                waits(text, counts, topology), kinds)


def scheduled_text(program: jax.stages.Compiled, dump: pathlib.Path) -> str:
  """Returns the text of a compiled program, or that of the dump where jaxlib cannot print it.

  jaxlib 0.10.2 cannot read calls of SparseCores back. The text of the dump has no estimates of cycles.
  """
  import jax
  try:
    return program.as_text() or ''
  except jax.errors.JaxRuntimeError:
    if text := bundles.program_text(dump):
      return text
    raise


def waits(text: str, counts: Mapping[str, bundles.Count], topology: topologies.Topology) -> list[overlap.Wait] | None:
  """Returns how long the collectives of a program take and are waited for; None if its operations have no times."""
  chip = topology.chip
  if not chip.clock_hz:
    return None

  def seconds(program: hlo.Program) -> Callable[[hlo.Instruction, str], float]:
    clock = schedule.Clock(program, counts, chip.hbm_bytes_s / chip.clock_hz)
    return lambda one, within: (clock.cycles(one, within) if counts else one.cycles) / chip.clock_hz

  apart = (cards.A_NODE, cards.NIC_BYTES_S) if chip.platform == 'gpu' else ()
  return overlap.read(text, overlap.Links(chip.ring_bytes_s, topology.num_devices, *apart), seconds)


def times(text: str, counts: Mapping[str, bundles.Count],
          chip: topologies.Chip) -> tuple[schedule.Schedule | None, list[compiled.Operation]]:
  """Returns the second time of a program's text, None without counts, and its operations with both times."""
  found = compiled.operations(text)
  if not counts or not chip.clock_hz:
    return None, found
  second, by_place = schedule.read(text, counts, bytes_a_cycle=chip.hbm_bytes_s / chip.clock_hz)
  return second, [one._replace(scheduled=by_place.get((one.phase, one.place), 0)) for one in found]


def main(asked: str, answer: str, dump: str, *, by: Callable[[Any, pathlib.Path], Answer] = measure) -> None:
  """Runs the child process: reads a request, and writes the answer of `by` or the message of a `UserError`."""
  try:
    content = by(pickle.loads(pathlib.Path(asked).read_bytes()), pathlib.Path(dump))._asdict()
  except UserError as error:
    content = {'error': str(error)}
  pathlib.Path(answer).write_text(json.dumps(content))


if __name__ == '__main__':
  main(*sys.argv[1:])
