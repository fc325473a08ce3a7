"""The parts of a train run that `benchmarks.bench` times, each as a function of a number of repetitions."""
from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.timing import Part, Spent, now, since
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Batch
from vit_jax.jobs import build
from vit_jax.models import cost
from vit_jax.parallel import feed
from vit_jax.parallel import mesh as meshes
from vit_jax.plan import topologies
from vit_jax.record import clock as clocks
from vit_jax.record.writer import Writer
from vit_jax.train import hooks, loop

MATMUL = 'matmul'
MATMUL_SIDE = {'cpu': 2048, 'gpu': 8192, 'tpu': 8192}  # of the square matrices of a large product
_SHARE = .9  # of memory that a searched batch may take
_NEVER = 2**31  # a step that is not reached


class Compiled(NamedTuple):
  """The compiled train step: seconds to compile without and with the persistent cache, and bytes on each device."""
  cold_s: float
  cached_s: float
  bytes: int


class Own:
  """A run of a config that is ready to be timed; holds its state on the devices."""

  def __init__(self, config: schema.Config) -> None:
    self.data = build.open_data(config)
    config = build.with_orientation(config, self.data.train)
    self.num_classes = len(self.data.class_names)
    self.mesh, self.shard, self.run_parts = build.open_run(config, self.data)
    self.config = config = self.run_parts.config
    self.loader = build.train_loader(config, self.data, self.shard)
    self._rows = iter(self.loader.batches(0))
    self._fed = feed.Ahead(self.loader.batches(0), lambda batch: meshes.put_batch(batch, self.mesh, self.shard))
    program = self.run_parts.program
    self.compiled = measure_compilation(
        lambda: program.step_fn.lower(program.abstract_state, build.abstract_batch(config)))
    self._state = program.init_fn()
    self._batch = self._next()
    side = MATMUL_SIDE[jax.devices()[0].platform if jax.devices()[0].platform in MATMUL_SIDE else 'cpu']
    self.matmul_flops = 2. * side**3 * jax.device_count()
    self._square = jnp.ones((jax.device_count(), side, side), config.model.dtype.value)

  def flops(self) -> dict[str, float]:
    """Returns the FLOPs per call of each part that computes."""
    return count_flops(self.run_parts, num_classes=self.num_classes)

  def parts(self) -> dict[str, Part]:
    """Returns all parts by name; `forward` is that of evaluation; `input` is host work."""
    objective, prepare = self.run_parts.objective, self.run_parts.prepare
    key, step = jax.random.key(0), jnp.zeros((), jnp.int32)
    with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
      prepared = jax.jit(prepare)(self._batch, key, step)
    view, state = objective.views()['student'], self._state
    evaluated = jax.tree.map(jnp.copy, (state.params, state.extra))  # steps donate the buffers of the state

    @jax.jit
    def forward(params: Any, extra: Any, image: Array) -> Array:
      with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
        out = view.predict(view.select(params, extra), image)
        return out.features.pooled if out.logits is None else out.logits

    @jax.jit
    def gradient(params: Any, extra: Any, batch: Batch) -> Any:
      def mean(params: Any) -> Array:
        found = objective.loss(params, extra, batch, key, step).loss
        return found.sum / jnp.maximum(found.weight, 1.)
      with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
        return jax.grad(mean)(params)

    multiply = jax.jit(lambda x: jnp.einsum('nij,njk->nik', x, x))
    return {'forward': _repeat(lambda: forward(*evaluated, prepared['image'])),
            'gradient': _repeat(lambda: gradient(self._state.params, self._state.extra, prepared)),
            'step': _repeat(lambda: self._step(self._batch)), 'input': self._read,
            'together': _repeat(lambda: self._step(self._next())),
            'loop': lambda count: self._loop(count, is_logged=False),
            'logged loop': lambda count: self._loop(count, is_logged=True),
            MATMUL: _repeat(lambda: multiply(self._square))}

  def _loop(self, count: int, *, is_logged: bool) -> Spent:
    """Times steps in the loop of `vit-jax train`, with the hooks of every run, to show what it costs beside the step.

    The metrics of every step, or of none, are logged to a directory that is removed. A thread reads and places the
    batches.
    """
    parts, batch_size = self.run_parts, self.config.batch_size
    clock = clocks.Clock(batch_size, 0., None)
    with tempfile.TemporaryDirectory(prefix='vit_jax_bench_') as folder, Writer(
        folder, process_index=0, resumed_from=None, progress_total=_NEVER, progress=False) as writer:
      metrics = hooks.Metrics(writer, clock, log_every=1 if is_logged else _NEVER, total=_NEVER, steps_an_epoch=1.,
                              schedule=parts.schedule)
      metrics.learning_rates.at(0)  # compiles
      kept: list[loop.Hook] = [metrics, hooks.Finite(schema.OnNonfinite.STOP, lambda done: [])]
      began = now()
      # From step 1, as the first step is always logged; the last one of `count` is not the last of the run.
      self._state = jax.block_until_ready(loop.run(
          parts.program.step_fn, self._state, self._fed, start=1, total=1 + count, hooks=kept, clock=clock,
          should_stop=lambda step: '').state)
      return since(began)

  def _step(self, batch: Batch) -> Any:
    self._state, metrics = self.run_parts.program.step_fn(self._state, batch)
    return metrics.values

  def _next(self) -> Batch:
    return meshes.put_batch(next(self._rows), self.mesh, self.shard)

  def _read(self, count: int) -> Spent:
    began = now()
    for _ in range(count):
      next(self._rows)
    return since(began)

  def close(self) -> None:
    self._fed.close()
    self.loader.close()


def count_flops(parts: build.Parts, *, num_classes: int) -> dict[str, float]:
  """Returns the FLOPs per call of each part of a run that computes."""
  one, config = build.train_flops(parts), parts.config
  forward = sum(cost.forward(config.model, config.image_px, head=config.head, num_classes=num_classes,
                             num_channels=config.data.channels).flops.values())
  return {'forward': forward * config.batch_size, **dict.fromkeys(
      ('gradient', 'step', 'together', 'loop', 'logged loop'), one * config.batch_size)}


def _repeat(call: Callable[[], Any]) -> Part:
  def run(count: int) -> Spent:
    began, last = now(), None
    for _ in range(count):
      last = call()
    jax.block_until_ready(last)
    return since(began)
  return run


def measure_compilation(lower: Callable[[], jax.stages.Lowered]) -> Compiled:
  """Compiles twice: with an empty persistent cache, and with the entries of the first time.

  The in-memory cache of jax is cleared before each, so that the second one does not reuse the program of the first.
  """
  names = ('jax_compilation_cache_dir', 'jax_persistent_cache_min_compile_time_secs',
           'jax_persistent_cache_min_entry_size_bytes')
  before = {name: getattr(jax.config, name) for name in names}
  seconds = []
  try:
    with tempfile.TemporaryDirectory(prefix='vit_jax_bench_') as folder:
      for name, value in zip(names, (folder, 0., -1), strict=True):
        jax.config.update(name, value)
      compilation_cache.reset_cache()
      for _ in range(2):
        jax.clear_caches()
        lowered = lower()
        began = now()
        program = lowered.compile()
        seconds.append(since(began).clock_s)
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()
  return Compiled(seconds[0], seconds[1], count_bytes(program))


def count_bytes(program: jax.stages.Compiled) -> int:
  """Returns the peak memory of the program on a device: arguments, temporaries and outputs, without aliases."""
  memory = program.memory_analysis()
  if memory is None:
    return 0
  return (memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
          - memory.alias_size_in_bytes)


def largest_batch(config: schema.Config) -> int:
  """Returns the largest batch whose step fits in the memory of a device, doubling the config's batch and compiling.

  Raises:
    UserError: the config's batch does not fit.
  """
  room, found, batch_size = _SHARE * _device_bytes(), 0, config.batch_size
  for size in _doubled(batch_size):
    try:
      needed = _step_bytes(dataclasses.replace(config, batch_size=size))
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      break
    if needed > room:
      break
    found = size
  if not found:
    raise UserError(f'batch_size: expected a batch that fits in {room / 2**30:.1f} GiB per device, got {batch_size}. '
                    'Set a smaller --config.batch_size.')
  return found


def _step_bytes(config: schema.Config) -> int:
  """Compiles the train step of a config and returns its peak memory on a device."""
  data = build.open_data(config)
  mesh, _ = build.open_mesh(config)
  run_parts = build.parts(config, mesh=mesh, num_examples=config.data.num_examples or len(data.train),
                          num_classes=len(data.class_names), in_memory=data.in_memory)
  program = run_parts.program
  return count_bytes(program.step_fn.lower(program.abstract_state, build.abstract_batch(config)).compile())


def _doubled(size: int) -> Iterator[int]:
  while True:
    yield size
    size *= 2


def _device_bytes() -> float:
  """Returns the memory of a device: as reported; for a CPU the machine's free memory; else the known size by kind."""
  device = jax.devices()[0]
  stats = device.memory_stats() or {}
  if 'bytes_limit' in stats:
    return stats['bytes_limit']
  if device.platform == 'cpu':
    with open('/proc/meminfo', encoding='ascii') as file:
      rows = dict(line.split(':') for line in file)
    return 1024. * int(rows['MemAvailable'].split()[0]) / jax.local_device_count()
  kinds = [chip for name, chip in topologies.CHIPS.items() if name in device.device_kind.lower()]
  return (kinds[0].hbm_gib if kinds else 8.) * 2**30
