"""The cost of a study before it runs: parameters, FLOPs and estimated hours of each run.

With `--dry_run`, `job.run` prints the text of `describe`. Hours are training FLOPs divided by a speed (`find_speed`).
The speed of finished runs includes evaluation and startup. Without finished runs, the speed is an assumed share of the
peak of the devices, without evaluation and startup. A dry run initializes no devices: `probe` runs in another process.
"""
from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from vit_jax.config import durations, schema, searches
from vit_jax.config.schema.data import RGB
from vit_jax.core import documents, trees
from vit_jax.core.errors import UserError
from vit_jax.jobs import build
from vit_jax.models import cost
from vit_jax.parallel import mesh as meshes
from vit_jax.plan import topologies
from vit_jax.plan.plan import ASSUMED_MFU
from vit_jax.record import clock
from vit_jax.study import halving, runs

_MATRIX_SIZE, _NUM_PRODUCTS = 1024, 8  # matrix products that measure the speed of devices without a known peak


class Cost(NamedTuple):
  """The cost of a run; FLOPs are those of training, per image and in total."""
  num_params: int
  flops_per_image: float
  num_steps: int
  flops: float


class Cache(NamedTuple):
  """Numbers that several runs have in common, by the `repr` of the settings on which the numbers depend.

  counts: numbers of examples and classes of a source, which may take long to list.
  sizes: parameters and training FLOPs per image of a network, which may take seconds to trace.
  """
  counts: dict[str, tuple[int, int]]
  sizes: dict[str, tuple[int, float]]


class Speed(NamedTuple):
  """FLOP/s of training on all devices, the source of the figure, and the number of devices (0 = not known)."""
  flops_s: float
  source: str
  num_devices: int = 0


def describe(study: schema.Study, workdir: pathlib.Path, *, topology: str) -> str:
  """Returns the table of all runs of a study, and sentences on the search of the study.

  Later stages choose their runs by results. For this choice, metrics of runs that have not finished count as 0.
  """
  cache = Cache({}, {})
  tasks: dict[str, runs.Task] = {}
  costs: dict[str, Cost] = {}
  unknown_stage = ''  # a sentence
  for number, stage in enumerate((lambda results: study.runs, *study.then)):
    try:
      configs = stage({name: task.result() if task.is_done else _zero_result(task, costs[name])
                       for name, task in tasks.items()})
    except UserError as error:
      unknown_stage = f'\nStage {number + 1} is only known when the runs before it are finished: {error}'
      break
    for name, config in configs.items():
      tasks[name] = runs.Task(name, config, workdir / 'runs' / name)
      costs[name] = estimate(config, cache)
  finished = {name: task.result() for name, task in tasks.items() if task.is_done}
  speed = find_speed(finished, topology)
  lines = [_table(study.name, costs, finished, speed)]
  for name, point in zip(study.runs, searches.draw(study.search), strict=True) if study.search else ():
    lines.append(f'{name}: ' + ', '.join(f'{setting}={value}' for setting, value in point.items()))
  return '\n'.join(lines) + _cost_of_halving(study, costs, speed) + unknown_stage


def _cost_of_halving(study: schema.Study, costs: Mapping[str, Cost], speed: Speed) -> str:
  """Returns a sentence on the cost of a search that does not train all runs to the end; '' for another study."""
  rungs = halving.rungs(study.search.method) if study.search else []
  if len(rungs) < 2:
    return ''
  fractions = [float(rung.label.removesuffix(' %')) / 100 for rung in rungs]  # of the length of a run
  num_full_runs = sum(rung.num_runs * (fraction - fraction_before)
                      for rung, fraction, fraction_before in zip(rungs, fractions, [0., *fractions[:-1]], strict=True))
  flops = statistics.fmean(costs[name].flops for name in study.runs) * num_full_runs
  counts_text = ', '.join(f'{rung.num_runs} to {rung.label}' for rung in rungs)
  return (f'\nOf these runs, halving trains {counts_text}: about {flops / 1e18:.3g} exaFLOPs and '
          f'{flops / speed.flops_s / 3600:.3g} hours from the start.')


def estimate(config: schema.Config, cache: Cache) -> Cost:
  """Returns the cost of a run; adds numbers that are not in the cache."""
  data_key = repr((config.data.source, config.data.train_split, config.data.num_examples, config.data.num_classes))
  if data_key not in cache.counts:
    cache.counts[data_key] = _count_examples_and_classes(config)
  num_examples, num_classes = cache.counts[data_key]
  model_key = repr((config.model, config.image_px, config.head, config.objective, config.train.sam,
                    config.data.recipe.views, num_classes))
  if model_key not in cache.sizes:
    cache.sizes[model_key] = _count_params_and_flops(config, num_examples, num_classes)
  num_params, flops = cache.sizes[model_key]
  num_steps = durations.lengths(config.length, num_examples=num_examples, batch_size=config.batch_size).total_steps
  return Cost(num_params, flops, num_steps, flops * num_steps * config.batch_size)


def _count_params_and_flops(config: schema.Config, num_examples: int, num_classes: int) -> tuple[int, float]:
  """Returns parameters and training FLOPs per image: by formulas for a plain classifier, else by tracing the run.

  Tracing takes seconds for a large network, and a study may have hundreds of networks.
  """
  model, px, head = config.model, config.image_px, config.head
  is_plain = isinstance(config.objective, schema.Supervised) and not head.probe and config.data.channels == RGB
  if is_plain and not (isinstance(model, schema.ViT) and model.pool.distillation):
    flops = cost.train_flops(model, px, head=head, num_classes=num_classes) * (2 if config.train.sam.rho else 1)
    return sum(cost.forward(model, px, head=head, num_classes=num_classes).parameters.values()), flops
  on_one_device = dataclasses.replace(config, mesh=schema.Mesh(1, 1, 1))
  mesh = AbstractMesh((1, 1, 1), meshes.AXES, axis_types=(AxisType.Auto,) * 3)
  parts = build.parts(on_one_device, mesh=mesh, num_examples=num_examples,  # type: ignore[arg-type]
                      num_classes=num_classes, in_memory=False)
  return trees.num_elements(parts.program.abstract_state.params), build.train_flops(parts)


def find_speed(results: schema.Results, topology: str) -> Speed:
  """Returns the expected speed: of a topology such as `v3:4x4`, else of finished runs, else of this machine."""
  if topology:
    hardware = topologies.parse(topology)
    peak = hardware.chip.peak_flops * hardware.num_devices
    return Speed(peak * ASSUMED_MFU, f'{ASSUMED_MFU:.0%} of the peak of {hardware.name}', hardware.num_devices)
  if results:
    seconds = sum(run.seconds for run in results.values())
    return Speed(1e18 * sum(run.exaflops for run in results.values()) / seconds, f'{len(results)} finished runs')
  process = subprocess.run([sys.executable, '-m', 'vit_jax.study.estimate'], capture_output=True, text=True)
  if process.returncode:
    raise UserError(f'--topology: expected hardware, or devices on this machine, got:\n{process.stderr[-1000:]}')
  flops_s, source, num_devices = documents.parse(process.stdout.splitlines()[-1])
  return Speed(flops_s * ASSUMED_MFU, f'{ASSUMED_MFU:.0%} of {source}', num_devices)


def probe() -> tuple[float, str, int]:
  """Returns FLOP/s of the local devices, the source (the known peak or a measured product in f32), and their number."""
  device_kind, num_devices = jax.devices()[0].device_kind, jax.device_count()
  if peak_flops_s := clock.find_peak_flops(device_kind, num_devices):
    return peak_flops_s, f'the peak of {num_devices} {device_kind}', num_devices
  multiply, matrix = jax.jit(jnp.matmul), jnp.ones((_MATRIX_SIZE, _MATRIX_SIZE))
  multiply(matrix, matrix).block_until_ready()  # compiles
  began_s = time.monotonic()
  for _ in range(_NUM_PRODUCTS):
    multiply(matrix, matrix).block_until_ready()
  flops_s = 2. * _MATRIX_SIZE**3 * _NUM_PRODUCTS * num_devices / (time.monotonic() - began_s)
  return flops_s, f'a matrix product on {num_devices} {device_kind}', num_devices


def _count_examples_and_classes(config: schema.Config) -> tuple[int, int]:
  """Returns the numbers of training examples and classes in the config, or else in the opened source."""
  data = config.data
  if data.num_examples and data.num_classes:
    return data.num_examples, data.num_classes
  opened = build.open_data(config)
  return data.num_examples or len(opened.train), len(opened.class_names)


def _zero_result(task: runs.Task, cost: Cost) -> schema.Result:
  """Returns a result with all metrics 0, for a run that has not finished."""
  return schema.Result(task.config, str(task.folder), cost.num_steps, 0., cost.num_params, cost.flops / 1e18,
                       collections.defaultdict(float), 0.)


def _table(name: str, costs: dict[str, Cost], finished: schema.Results, speed: Speed) -> str:
  """Returns a line for each run of the study `name`, and the sums; hours of finished runs are measured."""
  width = max(map(len, costs)) + 2
  lines = [f'{name}: {len(costs)} runs, {len(finished)} of them finished',
           f'{"run":<{width}}{"parameters":>14}{"GFLOP/image":>13}{"steps":>10}{"exaFLOPs":>12}{"hours":>9}']
  hours_left = 0.
  for run, run_cost in costs.items():
    hours = (finished[run].seconds if run in finished else run_cost.flops / speed.flops_s) / 3600
    hours_left += 0. if run in finished else hours
    note = ' done' if run in finished else ''
    lines.append(f'{run:<{width}}{run_cost.num_params:>14,}{run_cost.flops_per_image / 1e9:>13,.3g}'
                 f'{run_cost.num_steps:>10,}{run_cost.flops / 1e18:>12.3g}{hours:>9.3g}{note}')
  exaflops = sum(run_cost.flops for run_cost in costs.values()) / 1e18
  return '\n'.join([*lines, f'In total {exaflops:.3g} exaFLOPs of training; about {hours_left:.3g} hours are left, '
                            f'one run at a time, at {speed.flops_s / 1e12:.3g} TFLOP/s: {speed.source}.'])


if __name__ == '__main__':
  print(json.dumps(probe()))
