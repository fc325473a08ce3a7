"""Compiles the train step of a config for a topology, in another process, and reads memory and time of the program.

`ask` starts the process with the environment that the compiler needs before jax is imported (`topologies.environment`),
so that the devices of this machine and the libraries of absent devices do not affect each other. In that process,
`main` calls `measure`, which builds the train step, and `examine`, which compiles it and returns the `Answer`.
Benchmarks compile other programs with `in_process`, `main` and `examine`.
"""
from __future__ import annotations

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
from vit_jax.core import implementation
from vit_jax.core.errors import UserError
from vit_jax.plan import bundles, cards, compiled, gpu_kernels, hlo, overlap, schedule, topologies
from vit_jax.record import console

if TYPE_CHECKING:
  import jax

FAILURE_LINES = 12
"""Lines of the compiler's own output that an error shows."""
_STAGE = 'stage of vit_jax: '
"""The child process writes this before the name of each stage."""


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
  schedule: the second estimate of the time; None if the platform has none.
  waits: time of the collectives, and the part for which the core waits; None if the platform has no schedule.
  kinds: the kernels of a GPU by kind, the most time first; () on other platforms.
  """
  overflow: compiled.Overflow | None = None
  argument_bytes: int = 0
  temp_bytes: int = 0
  peak_bytes: int = 0
  costs: compiled.Costs = compiled.NOTHING
  lower_s: float = 0.
  compile_s: float = 0.
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
    request_file, answer_file, dump = (pathlib.Path(folder, name) for name in ('request', 'answer', 'dump'))
    request_file.write_bytes(pickle.dumps(request))
    dump.mkdir()
    if topology.chip.platform == 'tpu':  # the compiler reads its flags when its library is loaded
      environment['LIBTPU_INIT_ARGS'] += f' {bundles.flags(str(dump))}'
    command = [sys.executable, '-m', module, str(request_file), str(answer_file), str(dump)]
    status, lines = _run(command, environment)
    if status or not answer_file.exists():
      tail = '\n'.join(lines[-FAILURE_LINES:])
      if status == -signal.SIGKILL:
        tail = ('the process was killed, probably because this machine ran out of memory. A full-size model needs a '
                'few GiB.')
      raise UserError(f'Compiling for {topology.label} failed (status {status}):\n{tail}')
    content = pickle.loads(answer_file.read_bytes())
  if isinstance(content, UserError):
    raise content
  return Answer(**content)


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


def measure(request: Request, dump: pathlib.Path) -> Answer:
  """Compiles in this process, whose environment must have been set, with the compiler's dump in the folder `dump`."""
  from vit_jax.jobs import build
  from vit_jax.parallel import mesh as meshes
  topology = request.parse()
  depth = getattr(request.config.model, 'depth', 0)
  print(f'{_STAGE}tracing the step' + (f' of {depth} blocks' if depth else ''), flush=True)
  devices = topologies.open_devices(topology)
  parts = build.parts(request.config, mesh=meshes.make(request.config.mesh, devices),
                      num_examples=request.num_examples, num_classes=request.num_classes, in_memory=request.in_memory)
  program, batch = parts.program, build.abstract_batch(request.config)
  return examine(lambda: program.step_fn.lower(program.abstract_state, batch), topology, dump)


def examine(lower: Callable[[], jax.stages.Lowered], topology: topologies.Topology, dump: pathlib.Path) -> Answer:
  """Compiles the program that `lower` returns, and reads its report, the compiler's dump included."""
  import jax
  start_s = time.monotonic()
  lowered = lower()
  lowered_at_s = time.monotonic()
  print(f'{_STAGE}compiling it for {topology.label}', flush=True)
  overflow = None
  try:
    program = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    overflow = compiled.overflow(str(error))
    if overflow is None:
      raise
  answer = Answer(overflow, lower_s=lowered_at_s - start_s, compile_s=time.monotonic() - lowered_at_s)
  if overflow:
    return answer
  print(f'{_STAGE}reading the compiled program', flush=True)
  memory = program.memory_analysis()
  assert memory is not None, 'every backend that plans are made for reports its memory'
  # The CPU compiler leaves temporaries out of its peak; this sum is an upper bound.
  total_bytes = (memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
                 - memory.alias_size_in_bytes)
  text, counts = scheduled_text(program, dump), bundles.read(dump)
  kinds: list[gpu_kernels.Kind] = []
  if topology.chip.platform == 'gpu' and topology.chip.clock_hz:
    text, kinds = gpu_kernels.annotate(text, topology.chip.hbm_bytes_s)
  second_estimate, operations = times(text, counts, topology.chip)
  return answer._replace(
      argument_bytes=memory.argument_size_in_bytes, temp_bytes=memory.temp_size_in_bytes,
      peak_bytes=memory.peak_memory_in_bytes if topology.chip.platform == 'tpu' else total_bytes,
      costs=compiled.read(text, num_devices=topology.num_devices), operations=operations, schedule=second_estimate,
      waits=waits(text, counts, topology), kinds=kinds)


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
  """Returns time and waiting time of the collectives of a program; None if its operations have no times."""
  chip = topology.chip
  if not chip.clock_hz:
    return None

  def make_seconds(program: hlo.Program) -> Callable[[hlo.Instruction, str], float]:
    clock = schedule.Clock(program, counts, chip.hbm_bytes_s / chip.clock_hz)

    def seconds(instruction: hlo.Instruction, computation: str) -> float:
      cycles = clock.cycles(instruction, computation) if counts else instruction.cycles
      return cycles / chip.clock_hz
    return seconds

  links = overlap.Links(chip.ring_bytes_s, topology.num_devices)
  if chip.platform == 'gpu':
    links = links._replace(node=cards.A_NODE, out_bytes_s=cards.NIC_BYTES_S)
  return overlap.read(text, links, make_seconds)


def times(text: str, counts: Mapping[str, bundles.Count],
          chip: topologies.Chip) -> tuple[schedule.Schedule | None, list[compiled.Operation]]:
  """Returns the second estimate of a program's time, None without counts, and its operations with both times."""
  operations = compiled.operations(text)
  if not counts or not chip.clock_hz:
    return None, operations
  second_estimate, cycles_by_place = schedule.read(text, counts, bytes_a_cycle=chip.hbm_bytes_s / chip.clock_hz)
  return second_estimate, [
      operation._replace(scheduled=cycles_by_place.get((operation.phase, operation.place), 0))
      for operation in operations]


def main(request_file: str, answer_file: str, dump: str, *,
         by: Callable[[Any, pathlib.Path], Answer] = measure) -> None:
  """Runs the child process: reads a request, and writes the answer of `by`, or a `UserError` that it raises."""
  content: dict[str, Any] | UserError
  try:  # a dict of the fields, because the parent could not unpickle the class `Answer` of the module `__main__`
    content = by(pickle.loads(pathlib.Path(request_file).read_bytes()), pathlib.Path(dump))._asdict()
  except UserError as error:
    content = UserError(str(error))
  pathlib.Path(answer_file).write_bytes(pickle.dumps(content))


if __name__ == '__main__':
  main(*sys.argv[1:])
