"""The cost of a study before it runs, for `--dry_run`: parameters, FLOPs and estimated hours of each run.

Hours are training FLOPs over a speed: that of the study's finished runs, which includes evaluation and startup, or an
assumed share of the peak of the devices, which does not.
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

_SIDE, _REPEATS = 1024, 8  # size of the matrix product that measures the speed of a processor without a known peak


class Cost(NamedTuple):
  """The cost of a run: parameters, training FLOPs per image, steps, total training FLOPs."""
  num_params: int
  flops_an_image: float
  steps: int
  flops: float


class Known(NamedTuple):
  """A cache over runs.

  counts: examples and classes of a source, which may take long to list.
  sizes: parameters and FLOPs of a network, which take a second or more to trace.
  """
  counts: dict[str, tuple[int, int]]
  sizes: dict[str, tuple[int, float]]


class Speed(NamedTuple):
  """FLOP/s of training on all devices, the source of the figure, and the number of devices (0 = not known)."""
  flops_s: float
  source: str
  num_devices: int = 0


def describe(study: schema.Study, workdir: pathlib.Path, *, topology: str) -> str:
  """Returns the table of all runs. Runs that depend on results are shown as if the first choice were the best."""
  known = Known({}, {})
  tasks: dict[str, runs.Task] = {}
  costs: dict[str, Cost] = {}
  note = ''
  for number, stage in enumerate((lambda results: study.runs, *study.then)):
    try:
      configs = stage({name: task.result() if task.is_done else _placeholder(task, costs[name])
                       for name, task in tasks.items()})
    except UserError as error:
      note = f'\nStage {number + 1} is only known when the runs before it are finished: {error}'
      break
    for name, config in configs.items():
      tasks[name] = runs.Task(name, config, workdir / 'runs' / name)
      costs[name] = estimate(config, known)
  done = {name: task.result() for name, task in tasks.items() if task.is_done}
  speed = find_speed(done, topology)
  points = zip(study.runs, searches.draw(study.search), strict=True) if study.search else ()
  chosen = ''.join(f'\n{name}: ' + ', '.join(f'{key}={value}' for key, value in point.items())
                   for name, point in points)  # a line for the values of each run that a search chooses
  return _table(study.name, costs, done, speed) + chosen + _halved(study, costs, speed) + note


def _halved(study: schema.Study, costs: Mapping[str, Cost], speed: Speed) -> str:
  """Returns a sentence on the cost of a search that does not train all of its runs to the end; '' for others."""
  if study.search is None or len(rungs := halving.rungs(study.search.method)) == 1:
    return ''
  mean = statistics.fmean(costs[name].flops for name in study.runs)
  parts = [float(rung.label.removesuffix(' %')) / 100 for rung in rungs]
  steps_of = zip(rungs, parts, [0., *parts[:-1]], strict=True)
  flops = mean * sum(rung.runs * (part - before) for rung, part, before in steps_of)
  steps = ', '.join(f'{rung.runs} to {rung.label}' for rung in rungs)
  return (f'\nOf these runs, halving trains {steps}: about {flops / 1e18:.3g} exaFLOPs and '
          f'{flops / speed.flops_s / 3600:.3g} hours from the start.')


def estimate(config: schema.Config, known: Known) -> Cost:
  """Returns the cost of a run; `known` caches what several runs have in common."""
  key = repr((config.data.source, config.data.train_split, config.data.num_examples, config.data.num_classes))
  if key not in known.counts:
    known.counts[key] = _counts(config)
  num_examples, num_classes = known.counts[key]
  key = repr((config.model, config.image_px, config.head, config.objective, config.train.sam, config.data.recipe.views,
              num_classes))
  if key not in known.sizes:
    known.sizes[key] = _size(config, num_examples, num_classes)
  num_params, flops = known.sizes[key]
  steps = durations.lengths(config.length, num_examples=num_examples, batch_size=config.batch_size).total_steps
  return Cost(num_params, flops, steps, flops * steps * config.batch_size)


def _size(config: schema.Config, num_examples: int, num_classes: int) -> tuple[int, float]:
  """Returns parameters and training FLOPs per image: analytic for a plain classifier, else by tracing the run.

  Tracing takes seconds for a large network, and a study may have hundreds of them.
  """
  model, px, head = config.model, config.image_px, config.head
  is_plain = isinstance(config.objective, schema.Supervised) and not head.probe and config.data.channels == RGB
  if is_plain and not (isinstance(model, schema.ViT) and model.pool.distillation):
    flops = cost.train_flops(model, px, head=head, num_classes=num_classes) * (2 if config.train.sam.rho else 1)
    return sum(cost.forward(model, px, head=head, num_classes=num_classes).parameters.values()), flops
  alone = dataclasses.replace(config, mesh=schema.Mesh(1, 1, 1))
  mesh = AbstractMesh((1, 1, 1), meshes.AXES, axis_types=(AxisType.Auto,) * 3)
  parts = build.parts(alone, mesh=mesh, num_examples=num_examples, num_classes=num_classes,  # type: ignore[arg-type]
                      in_memory=False)
  return trees.num_elements(parts.program.abstract_state.params), build.train_flops(parts)


def find_speed(done: schema.Results, topology: str) -> Speed:
  """Returns the expected training speed."""
  if topology:
    there = topologies.parse(topology)
    peak = there.chip.peak_flops * there.num_devices
    return Speed(peak * ASSUMED_MFU, f'{ASSUMED_MFU:.0%} of the peak of {there.name}', there.num_devices)
  if done:
    seconds = sum(result.seconds for result in done.values())
    return Speed(1e18 * sum(result.exaflops for result in done.values()) / seconds, f'{len(done)} finished runs')
  answer = subprocess.run([sys.executable, '-m', 'vit_jax.study.estimate'], capture_output=True, text=True)
  if answer.returncode:
    raise UserError(f'--topology: expected hardware, or devices on this machine, got:\n{answer.stderr[-1000:]}')
  flops_s, what, num_devices = documents.parse(answer.stdout.splitlines()[-1])
  return Speed(flops_s * ASSUMED_MFU, f'{ASSUMED_MFU:.0%} of {what}', num_devices)


def probe() -> tuple[float, str, int]:
  """Returns FLOP/s of the local devices, their names and number: the known peak, or a measured product in f32."""
  kind, number = jax.devices()[0].device_kind, jax.device_count()
  if peak := clock.find_peak_flops(kind, number):
    return peak, f'the peak of {number} {kind}', number
  product, matrix = jax.jit(jnp.matmul), jnp.ones((_SIDE, _SIDE))
  product(matrix, matrix).block_until_ready()
  began = time.monotonic()
  for _ in range(_REPEATS):
    product(matrix, matrix).block_until_ready()
  flops_s = 2. * _SIDE**3 * _REPEATS * number / (time.monotonic() - began)
  return flops_s, f'a matrix product on {number} {kind}', number


def _counts(config: schema.Config) -> tuple[int, int]:
  """Returns the numbers of examples and classes, from the config if it has them, else from its source."""
  data = config.data
  if data.num_examples and data.num_classes:
    return data.num_examples, data.num_classes
  opened = build.open_data(config)
  return data.num_examples or len(opened.train), len(opened.class_names)


def _placeholder(task: runs.Task, cost: Cost) -> schema.Result:
  """Returns a result with all metrics 0, for a run that has not finished."""
  return schema.Result(task.config, str(task.folder), cost.steps, 0., cost.num_params, cost.flops / 1e18,
                       collections.defaultdict(float), 0.)


def _table(name: str, costs: dict[str, Cost], done: schema.Results, speed: Speed) -> str:
  width = max(map(len, costs)) + 2
  lines = [f'{name}: {len(costs)} runs, {len(done)} of them finished',
           f'{"run":<{width}}{"parameters":>14}{"GFLOP/image":>13}{"steps":>10}{"exaFLOPs":>12}{"hours":>9}']
  hours_left = 0.
  for run, one in costs.items():
    is_done = run in done
    hours = (done[run].seconds if is_done else one.flops / speed.flops_s) / 3600
    hours_left += 0. if is_done else hours
    lines.append(f'{run:<{width}}{one.num_params:>14,}{one.flops_an_image / 1e9:>13,.3g}{one.steps:>10,}'
                 f'{one.flops / 1e18:>12.3g}{hours:>9.3g}{" done" if is_done else ""}')
  total = sum(one.flops for one in costs.values()) / 1e18
  return '\n'.join([*lines, f'In total {total:.3g} exaFLOPs of training; about {hours_left:.3g} hours are left, '
                            f'one run at a time, at {speed.flops_s / 1e12:.3g} TFLOP/s: {speed.source}.'])


if __name__ == '__main__':
  print(json.dumps(probe()))
