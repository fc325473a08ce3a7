"""Plans a run on hardware that is not here: memory, time and cost of its train step.

The job plan makes a `Subject`, lays it out for the hardware (`lay_out`), and calls `make`; `table` and `warn` read the
`Plan`. The step that is compiled is the one that `train` runs. Neither the data nor the devices are needed. Without the
compiler for the hardware, a plan has the figures that follow from arithmetic.
"""
from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from vit_jax.config import schema
from vit_jax.core import failures, trees
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.jobs import build
from vit_jax.parallel import elastic, layout, sharding
from vit_jax.parallel import mesh as meshes
from vit_jax.plan import compile, compiled, quick, topologies
from vit_jax.record import console
from vit_jax.train import step as steps

ASSUMED_MFU = .4
"""Used if the compiler counts no cycles; published pre-training of ViT on TPUv3 reaches 32 to 43 %."""
GPU_MFU = .34
"""Used in place of `ASSUMED_MFU` for GPUs: B/16 and L/16 reached 33.4 and 34.6 % on an H200 (bfloat16, 128 images)."""
PAPER_CORE_DAYS = {'vit_l16_jft': 680, 'vit_h14_jft': 2_500, 'vit_l16_i21k': 230}  # ViT paper, Table 2, TPUv3
SECONDS_A_DAY = 86_400
LARGE_BYTES = 2**24
"""Parameters with more bytes are large: they are worth a warning if they are replicated, or split into odd shards."""
GIB = compiled.GIB


class Subject(NamedTuple):
  """A config on a topology, and the numbers of its data; `layout` describes the layout that was chosen, and why.

  fits_by_arithmetic: whether that layout needs less than the memory of a device, before anything is compiled.
  """
  config: schema.Config
  topology: topologies.Topology
  num_examples: int
  num_classes: int
  in_memory: bool
  layout: str = ''
  fits_by_arithmetic: bool = True

  def request(self) -> compile.Request:
    return compile.Request(self.config, self.topology.name, self.num_examples, self.num_classes, self.in_memory)


@dataclasses.dataclass(frozen=True)
class Plan:
  """A planned run; times are in ms. Times of a step are None if the program does not fit; others, if not known.

  answer: the compiler's report; None = not compiled, for this `reason`.
  is_quick: whether figures of two shallow programs are extended, see `quick`.
  of_lengths: where steps have sequences of several lengths, the plan of each; this one is then of the longest, but the
    times of a step with and without collectives are the mean over all steps.
  hourly_price: of one chip or GPU, in any currency; 0 = unknown.
  """
  subject: Subject
  parts: build.Parts
  answer: compile.Answer | None
  reason: str
  is_quick: bool = False
  of_lengths: dict[int, Plan] = dataclasses.field(default_factory=dict)
  hourly_price: float = 0.

  @property
  def chip(self) -> topologies.Chip:
    """The properties of one device."""
    return self.subject.topology.chip

  @property
  def report(self) -> compile.Answer:
    """The compiler's report; an empty one if the program was not compiled."""
    return self.answer or compile.Answer()

  @property
  def memory(self) -> dict[str, int]:
    """Bytes of one device by content; activations are an estimate."""
    state, mesh = self.parts.program.abstract_state, self.parts.mesh
    specs = jax.tree.map(lambda s: s.spec, self.parts.program.shardings)
    params = sharding.bytes_per_device(state.params, specs.params, mesh)
    return {'parameters': params,
            'optimizer': sharding.bytes_per_device(state.opt, specs.opt, mesh),
            'extra': sharding.bytes_per_device(state.extra, specs.extra, mesh),
            'batch': trees.num_bytes(build.abstract_batch(self.parts.config)) // self._batch_shards,
            'gradients': params,
            'activations': self.rows * build.kept_bytes(self.parts, self.parts.config.model)}

  @property
  def _batch_shards(self) -> int:
    return self.parts.mesh.shape['data'] * self.parts.mesh.shape['fsdp']

  @property
  def rows(self) -> int:
    """Images of one device in one microbatch."""
    return self.parts.config.batch_size // self._batch_shards // self.parts.config.microbatches

  @property
  def peak_gib(self) -> float:
    """Peak memory: as compiled, or as requested by a program that does not fit, or by arithmetic."""
    if self.answer is None:
      return sum(self.memory.values()) / GIB
    overflow = self.answer.overflow
    if overflow is None:
      return self.answer.peak_bytes / GIB
    if overflow.what != 'temporaries':
      return overflow.need_gib
    arguments = sum(self.memory[part] for part in ('parameters', 'optimizer', 'extra', 'batch'))
    return overflow.need_gib + arguments / GIB

  @property
  def fits(self) -> bool:
    return self.report.overflow is None and self.peak_gib <= self.chip.hbm_gib

  @property
  def replicated_bytes(self) -> int:
    """Bytes of large parameters that are replicated although the mesh has an axis to split them over."""
    program, mesh = self.parts.program, self.parts.mesh
    if mesh.shape['fsdp'] * mesh.shape['tensor'] == 1:
      return 0
    pairs = zip(jax.tree.leaves(program.abstract_state.params), jax.tree.leaves(program.shardings.params), strict=True)
    return sum(trees.num_bytes(leaf) for leaf, placed in pairs
               if placed.shard_shape(leaf.shape) == leaf.shape and trees.num_bytes(leaf) > LARGE_BYTES)

  @property
  def flops_per_step(self) -> float:
    """FLOPs of the complete batch, forward and backward, without rematerialization."""
    return build.train_flops(self.parts) * self.parts.config.batch_size

  @property
  def _device_flops(self) -> float:
    return self.flops_per_step / self.subject.topology.num_devices

  @property
  def roofline_ms(self) -> float:
    """A lower bound: products at peak rate, or one read and one write of state and saved activations."""
    if self.of_lengths:
      return self._mean(lambda plan: plan.roofline_ms) or 0.
    memory = self.memory
    moved_bytes = 2 * (memory['parameters'] + memory['optimizer'] + memory['extra'] + memory['gradients']
                       + memory['activations'] * self.parts.config.microbatches)
    return 1e3 * max(self._device_flops / self.chip.peak_flops, moved_bytes / self.chip.hbm_bytes_s)

  def _mean(self, figure: Callable[[Plan], float | None]) -> float | None:
    """Returns the mean of a figure over the steps of all lengths; None if one of them has none."""
    values = [figure(self.of_lengths[length]) for length in self.parts.config.data.recipe.native_lengths]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None

  @property
  def has_cycles(self) -> bool:
    """Whether the compiler has estimated the cycles of the step."""
    return bool(self.report.costs.cycles and self.chip.clock_hz)

  @property
  def uncounted(self) -> list[compiled.Kernel]:
    """Kernels whose cycles are missing in `step_ms`, which is then too short."""
    return self.report.costs.kernels if self.has_cycles else []

  @property
  def step_ms(self) -> float | None:
    """Time without collectives: by the compiler's cycles, or else by the schedule, or else by the assumed MFU."""
    if not self.fits:
      return None
    if self.of_lengths:
      return self._mean(lambda plan: plan.step_ms)
    if self.has_cycles:
      return 1e3 * self.report.costs.cycles / self.chip.clock_hz
    return self.scheduled_ms or 1e3 * self._device_flops / self.dtype_flops / self.assumed_mfu

  @property
  def step_ms_source(self) -> str:
    """The source of `step_ms`: `compiler_cycles`, `schedule` or `assumed_mfu`."""
    if self.has_cycles:
      return 'compiler_cycles'
    return 'schedule' if self.scheduled_ms else 'assumed_mfu'

  @property
  def assumed_mfu(self) -> float:
    """The share of the peak that a step is assumed to reach."""
    return GPU_MFU if self.chip.platform == 'gpu' else ASSUMED_MFU

  @property
  def dtype_flops(self) -> float:
    """The peak of a device for products in the dtype of the config, FLOP/s: GPUs multiply float32 as TF32."""
    is_tf32 = self.chip.platform == 'gpu' and self.parts.config.model.dtype is schema.DType.F32
    return self.chip.peak_flops / 2 if is_tf32 else self.chip.peak_flops

  @property
  def scheduled_ms(self) -> float | None:
    """The second estimate of the time of a step, by schedule and memory, without collectives."""
    if self.report.schedule is None or not self.fits:
      return None
    return 1e3 * self.report.schedule.cycles / self.chip.clock_hz

  def sent_bytes(self, *, between_slices: bool = False) -> int:
    """Returns the bytes that a device sends in one step, as compiled: within its slice, or to other slices."""
    return sum(collective.sent_bytes for collective in self.report.costs.collectives
               if (collective.kind == compiled.BETWEEN_SLICES) is between_slices)

  @property
  def collectives_ms(self) -> float:
    """Time of all collectives within a slice around one ring of neighbors, without any overlap."""
    if self.report.waits is not None:
      return sum(wait.ns for wait in self.report.waits) / 1e6
    return 1e3 * self.sent_bytes() / self.chip.ring_bytes_s

  @property
  def exposed_ms(self) -> float | None:
    """Time that the core waits for collectives within a slice, by the schedule; None if there is no schedule."""
    if self.report.waits is None:
      return None
    return sum(wait.exposed_ns for wait in self.report.waits) / 1e6

  @property
  def step_ms_with_collectives(self) -> float | None:
    """Time of a step with the collectives that it waits for: all of them if there is no schedule."""
    if self.step_ms is None:
      return None
    if self.of_lengths:
      return self._mean(lambda plan: plan.step_ms_with_collectives)
    return self.step_ms + (self.collectives_ms if self.exposed_ms is None else self.exposed_ms)

  @property
  def between_slices_ms(self) -> float | None:
    """Time of transfers between slices, which no other figure includes. None if the bandwidth is unknown."""
    sent_bytes, rate = self.sent_bytes(between_slices=True), self.chip.between_bytes_s
    if not sent_bytes:
      return 0.
    return 1e3 * sent_bytes / rate if rate else None

  def mfu(self, step_ms: float) -> float:
    """Returns the share of the peak that a step of this time reaches."""
    return self._device_flops / self.chip.peak_flops * 1e3 / step_ms

  def hours(self, step_ms: float) -> float:
    """Returns the hours of all steps."""
    return step_ms / 3.6e6 * self.parts.lengths.total_steps

  def core_days(self, step_ms: float) -> float:
    """Returns the days of all steps, times the number of cores."""
    return step_ms / 1e3 * self.parts.lengths.total_steps * self.subject.topology.num_cores / SECONDS_A_DAY

  def price(self, step_ms: float) -> float:
    """Returns the price of all chips for the hours of the steps, in the currency of `hourly_price`."""
    return self.hourly_price * self.subject.topology.num_chips * self.hours(step_ms)

  def to_json(self) -> dict[str, Any]:
    """Returns the content of `plan.json`; null where a figure is undefined because the program does not fit.

    `hours`, `mfu` and `core_days` are of steps without collectives. `price`, and keys that end with
    `_with_collectives`, include those that a step waits for.
    """
    step_ms, both_ms = self.step_ms, self.step_ms_with_collectives
    source = None if step_ms is None else self.step_ms_source
    config, topology, report = self.parts.config, self.subject.topology, self.report
    is_compiled = self.answer is not None
    times_by_kind = {wait.kind: {'ms': wait.ns / 1e6, 'exposed_ms': wait.exposed_ns / 1e6}
                     for wait in report.waits or ()}

    def at(figure: Callable[[float], float], ms: float | None) -> float | None:
      return None if ms is None else figure(ms)

    return {
        'config': config.name, 'topology': topology.name, 'slices': topology.slices,
        'num_devices': topology.num_devices, 'num_cores': topology.num_cores, 'mesh': dict(self.parts.mesh.shape),
        'measured': False, 'layout': self.subject.layout, 'dtype': config.model.dtype.value,
        'quantize': getattr(config.model, 'quantize', schema.Quantize.NONE).value,
        'compiled': is_compiled, 'reason': self.reason, 'fits': self.fits,
        'quick': self.is_quick and quick.is_shorter(config),
        'peak_gib_per_device': self.peak_gib, 'hbm_gib_per_device': self.chip.hbm_gib,
        'memory_bytes_per_device': self.memory, 'large_whole_bytes': self.replicated_bytes,
        'argument_bytes': report.argument_bytes if is_compiled else None,
        'temp_bytes': report.temp_bytes if is_compiled else None,
        'estimated_step_ms': step_ms, 'step_ms_source': source,
        'assumed_mfu': self.assumed_mfu if source == 'assumed_mfu' else None,
        'collectives_ms': self.collectives_ms, 'exposed_collectives_ms': self.exposed_ms,
        'between_slices_ms': self.between_slices_ms, 'scheduled_step_ms': self.scheduled_ms,
        'schedule': report.schedule._asdict() if report.schedule else None,
        'step_ms_with_collectives': both_ms, 'roofline_ms': self.roofline_ms,
        'num_params': trees.num_elements(self.parts.program.abstract_state.params),
        'flops_per_step': self.flops_per_step, 'mfu': at(self.mfu, step_ms),
        'mfu_with_collectives': at(self.mfu, both_ms), 'total_steps': self.parts.lengths.total_steps,
        'hours': at(self.hours, step_ms), 'hours_with_collectives': at(self.hours, both_ms),
        'price': at(self.price, both_ms) if self.hourly_price else None,
        'core_days': at(self.core_days, step_ms), 'core_days_with_collectives': at(self.core_days, both_ms),
        'paper_core_days': PAPER_CORE_DAYS.get(config.name),
        'lengths': [{'tokens': length, 'microbatches': plan.parts.config.train.microbatches,
                     'peak_gib_per_device': plan.peak_gib, 'estimated_step_ms': plan.step_ms}
                    for length, plan in self.of_lengths.items()],
        'collectives': [{'kind': row.kind, 'count': row.calls, 'bytes': row.num_bytes, 'sent_bytes': row.sent_bytes,
                         **times_by_kind.get(row.kind, {})} for row in report.costs.collectives],
        'operations': [operation._asdict() for operation in report.operations],
        'kernels_by_kind': [kind._asdict() for kind in report.kinds],
        'uncounted_kernels': {kernel.name: kernel.calls for kernel in self.uncounted},
        'unknown_loops': report.costs.unknown._asdict() if is_compiled else None,
        'lower_s': report.lower_s if is_compiled else None, 'compile_s': report.compile_s if is_compiled else None,
        'overflow': report.overflow._asdict() if report.overflow else None, 'versions': versions(),
        'date': time.strftime('%Y-%m-%d')}


def lay_out(subject: Subject) -> Subject:
  """Returns the subject with the layout that its run gets on the topology.

  With `mesh.slices=0`, a run that began on `mesh.chosen_slices` slices keeps the layout for these.
  """
  console.begin_stage('choosing the layout')
  config, now = subject.config, subject.topology.hardware
  first = now  # the hardware of the first start
  if not config.mesh.slices and config.mesh.chosen_slices:
    first = elastic.on_slices(now, config.mesh.chosen_slices)
  laid_out = build.lay_out(layout.reopen(config, first), first, build.Numbers(
      subject.num_examples, subject.num_classes, subject.in_memory))
  try:
    fitted = elastic.fit(laid_out.config, first, now)
  except TemporaryError as error:  # a run would wait for its slices
    raise UserError(str(error)) from error
  text = laid_out.text
  if now.slices != first.slices:
    text += f'\nOn {elastic.text(**elastic.describe(fitted, now.slices))}.'
  return subject._replace(config=layout.put(fitted, {'mesh.slices': now.slices}), layout=text,
                          fits_by_arithmetic=laid_out.fits)


def make(subject: Subject, *, is_quick: bool = False) -> Plan:
  """Plans a subject, and compiles it if the compiler for its hardware is installed; `is_quick`: see `quick`."""
  console.begin_stage('building the network')
  parts, lengths = abstract_parts(subject), subject.config.data.recipe.native_lengths
  reason = topologies.missing(subject.topology)
  if len(set(lengths)) > 1:
    plans = {length: make(at_length(subject, length), is_quick=is_quick) for length in sorted(set(lengths))}
    return Plan(subject, parts, plans[max(lengths)].answer, reason, is_quick, plans)
  ask = quick.ask if is_quick else compile.ask
  return Plan(subject, parts, None if reason else ask(subject.request()), reason, is_quick)


def at_length(subject: Subject, length: int) -> Subject:
  """Returns the subject with the steps of one of its lengths of sequences alone, and with their microbatches."""
  config = subject.config
  share = length / max(config.data.recipe.native_lengths)
  return subject._replace(config=layout.put(config, {
      'data.recipe.native_lengths': (length,), 'mesh.chosen_parts': 1,
      'train.accumulate': steps.fewest_microbatches(config.microbatches, share)}))


def abstract_mesh(subject: Subject) -> AbstractMesh:
  """Returns the mesh of a run on hardware that is not here."""
  sizes = meshes.shape(subject.config.mesh, subject.topology.num_devices)
  device = AbstractDevice(subject.topology.kind, None, subject.topology.chip.platform)
  return AbstractMesh(sizes, meshes.AXES, axis_types=(AxisType.Auto,) * len(sizes), abstract_device=device)


def abstract_parts(subject: Subject) -> build.Parts:
  """Builds the run on a mesh without devices."""
  return build.parts(
      subject.config, mesh=abstract_mesh(subject), num_examples=subject.num_examples,  # type: ignore[arg-type]
      num_classes=subject.num_classes, in_memory=subject.in_memory)


def numbers(config: schema.Config) -> build.Numbers:
  """Returns the numbers of the data: from the config, else from the source, which is opened.

  Raises:
    UserError or TemporaryError: the source cannot be opened; the message says which settings replace it.
  """
  data = config.data
  has_classes = data.num_classes or config.objective.takes_texts  # captions take the place of classes
  if data.num_examples and has_classes and data.in_memory is not schema.InMemory.YES:
    return build.Numbers(data.num_examples, data.num_classes, False)
  try:
    opened = build.open_data(config)
  except (UserError, OSError) as error:
    raise failures.error_class(error)(f'{error}\nSet --config.data.num_examples and --config.data.num_classes to plan '
                                      f'without the data; they are {data.num_examples} and {data.num_classes}; 0 asks '
                                      'the source.') from error
  return build.Numbers(data.num_examples or len(opened.train), len(opened.class_names), opened.in_memory)


def versions() -> dict[str, str]:
  """Returns the versions of the packages that compile."""
  version_by_package = {}
  for package in ('jax', 'jaxlib', 'libtpu'):
    try:
      version_by_package[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return version_by_package


def overflow_text(overflow: compiled.Overflow) -> str:
  """Returns by how much a program does not fit."""
  if not overflow.need_gib:
    return 'the program does not fit in the memory of a device; the compiler does not report by how much'
  need_gib, have_gib = overflow.need_gib, overflow.have_gib
  return (f'{overflow.what} need {need_gib:.2f} GiB, {need_gib - have_gib:.2f} GiB more than the {have_gib:.2f} GiB of '
          'a device')
