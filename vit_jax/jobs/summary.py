"""The lines that a run logs: `start` and `parameters` at its start, `evaluated` after each evaluation, and at its end
`best`, `spent` and `last_line`. `train` calls them; they compute nothing on devices.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.config import elastic, layout, schema
from vit_jax.core import documents, trees
from vit_jax.data.source import title
from vit_jax.evaluate import final as results
from vit_jax.evaluate.results import Result
from vit_jax.jobs import build
from vit_jax.optim import freezing
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel.sharding import with_frozen
from vit_jax.record import clock, reader, storage
from vit_jax.record.checkpoint_files import Chosen
from vit_jax.record.clock import LOST, STEP, TRAINING
from vit_jax.record.progress import format_duration
from vit_jax.weights import network

NAMES = {STEP: 'steps', 'data_wait': 'waiting for data', 'evaluate': 'evaluation', 'checkpoint': 'checkpoints',
         LOST: 'lost work', 'restore': 'restoring'}


def start(parts: build.Parts, data: build.Data, workdir: storage.Path, *, text: str = '') -> str:
  """Returns the summary at the start: network, data, layout, memory and schedule; computed without devices.

  Args:
    parts, data, workdir: the objects, the data and the directory of the run.
    text: one of the texts that it trains on; '' = it trains on none, or none can be shown.
  """
  config, lengths, state = parts.config, parts.lengths, parts.program.abstract_state
  optimizer, num_params = config.optimizer, trees.num_elements(state.params)
  frozen = trees.num_elements(with_frozen(state.params, state.extra)) - num_params
  on_slices = elastic.describe(config, meshes.count_slices(jax.devices()))
  microbatches = elastic.text(**on_slices) if on_slices else (
      f'{config.microbatches} microbatch{"es" * (config.microbatches > 1)}')
  mesh = ' '.join(f'{axis}={size}' for axis, size in parts.mesh.shape.items())
  warmup = lengths.steps(optimizer.schedule.warmup)
  state_mib = trees.num_bytes((state.params, state.opt, state.extra)) / 2**20
  opt_mib = trees.num_bytes(state.opt) / 2**20
  return '\n'.join([
      f'Run       {config.name}, in {workdir}',
      f'Network   {network.describe(config.model)}',
      f'          {num_params:,} parameters{f" to train, {frozen:,} frozen" * bool(frozen)}, '
      f'{build.train_flops(parts) / 1e9:,.3g} GFLOP an image and training step',
      *_frozen(parts),
      f'Training  {lengths.num_examples:,} images of {parts.num_classes:,} classes ({title(data.train)})'
      + (', in memory' if data.in_memory else ''),
      *([f'          texts such as {documents.describe(text)}'] if text else []),
      'Evaluated ' + '\n          '.join(_evaluations(config, data)),
      f'Schedule  {lengths.total_steps:,} steps of {config.batch_size:,} images, '
      f'{lengths.total_steps / lengths.steps_an_epoch:,.1f} epochs',
      f'          {type(optimizer).__name__}, learning rate {optimizer.lr:g}, {optimizer.schedule.decay.value}, '
      f'warm-up of {warmup:,} step{"s" * (warmup != 1)}',
      *([f'          patches left out: {share:g}'] if (share := getattr(config.model, 'patch_dropout', 0.)) else []),
      *_watched(config),
      f'Layout    {jax.device_count()} x {jax.devices()[0].device_kind}: {mesh}, {layout.dtype_text(config.model)}, '
      f'{microbatches} a step',
      f'Memory    {state_mib:,.1f} MiB of state over all devices, {opt_mib:,.1f} MiB of it of the optimizer'])


def _frozen(parts: build.Parts) -> list[str]:
  """Returns a line on the parts whose parameters are all frozen to the end by rules of the optimizer, if there are any.
  """
  frozen_for, sizes = freezing.until(parts.config.optimizer.rules, parts.lengths.steps), dict[str, list[int]]()
  for name, leaf in trees.flatten(parts.program.abstract_state.params).items():
    is_frozen = frozen_for(name) >= parts.lengths.total_steps
    sizes.setdefault(name.partition('/')[0], []).append(int(np.prod(leaf.shape, dtype=np.int64)) if is_frozen else -1)
  frozen = {part: sum(each) for part, each in sizes.items() if min(each) >= 0}
  return [f'          frozen for the whole run: {", ".join(frozen)} ({sum(frozen.values()):,} of these parameters)'
          ] if frozen else []


def _watched(config: schema.Config) -> list[str]:
  """Returns which values of a metric are the best ones, if the run keeps its best checkpoint or ends early."""
  def shown(metric: str) -> str:
    return f'the {"lowest" if reader.is_lower_better(metric) else "highest"} {metric}'
  best, stop = config.checkpoints.keep_best, config.train.early_stop
  lines = [f'the checkpoint with {shown(best)} is kept, and stands for the run'] if best else []
  lines += [f'ends after {stop.patience} evaluations without a new best one by {shown(stop.metric)}'
            ] if stop.metric else []
  return [('Best      ' if number == 0 else '          ') + line for number, line in enumerate(lines)]


def _evaluations(config: schema.Config, data: build.Data) -> list[str]:
  """Returns which evaluations measure the test images of the run, and which measure others, that are not open yet."""
  by_split: dict[tuple[str, str], list[str]] = {}
  for name, settings in config.evals.items():
    by_split.setdefault((settings.source, settings.split), []).append(name)
  of_run = by_split.pop(('', ''), [])
  lines = [f'{len(data.eval):,} images ({title(data.eval)}): {", ".join(of_run)}'] if of_run else []
  lines += [f'{source or config.data.source}, {split or config.data.eval_split}: {", ".join(names)}'
            for (source, split), names in by_split.items()]
  return lines or ['nothing']


def parameters(parts: build.Parts) -> str:
  """Returns the number of parameters by part of the network."""
  by_part: dict[str, int] = {}
  for name, leaf in trees.flatten(parts.program.abstract_state.params).items():
    key = '/'.join(name.split('/')[:2])
    by_part[key] = by_part.get(key, 0) + int(np.prod(leaf.shape, dtype=np.int64))
  return '\n'.join(['Parameters:', *(f'  {name:<28}{count:>14,}' for name, count in by_part.items())])


def evaluated(name: str, step: int, total: int, by_view: Mapping[str, Result]) -> str:
  """Returns a line about an evaluation: its main metric by view, and the number of images."""
  words = []
  for view, result in by_view.items():
    if result.headline:
      words.append(f'{results.metric_name(name, result.headline, view)} {result.score:.2%}')
    else:
      metric, number = next(iter(result.metrics.items()))
      words.append(f'{results.metric_name(name, metric, view)} {number:.4g}')
  return f'step {step:,}/{total:,}  {"  ".join(words)}  of {next(iter(by_view.values())).num_examples:,} images'


def best(final: results.Final, rows: Sequence[Mapping[str, float]], used: Chosen | None) -> str:
  """Returns a line about the best value of the main metric in the record, and the weights of the run; '' if both are of
  the last step.

  `used` is the step of these weights, as it is on the disk.
  """
  if used is None:
    return ''
  weights = f'the weights of the run are those of step {used.step:,}' + (f', {used.reason}' if used.metric else '')
  name = final.headline_name
  measured = [(row[name], int(row['step'])) for row in rows if name in row]
  if final.headline is None or not measured:
    return '' if used.is_newest else f'{weights[0].upper()}{weights[1:]}.'
  sign = -1. if reader.is_lower_better(final.headline.headline) else 1.
  value, step = max(measured, key=lambda point: (sign * point[0], point[1]))
  if used.is_newest and sign * value <= sign * final.headline.score:
    return ''
  if step == used.step:
    weights = 'its checkpoint is kept, and predict, evaluate and other jobs use it'
  return f'The best {name} was {value:.2%}, at step {step:,}; {weights}.'


def spent(events: Sequence[reader.Event], *, num_steps: int, batch_size: int) -> str:
  """Returns a line about the time of a run over all its starts: by phase, the speed, and device-hours."""
  goodput, starts = clock.sum_starts(events), clock.count_starts(events)
  shown = sorted(((seconds, NAMES.get(name, name)) for name, seconds in goodput.seconds.items() if seconds >= .5),
                 reverse=True)
  by_phase = ', '.join(f'{name} {format_duration(seconds)}' for seconds, name in shown)
  training_s = sum(goodput.seconds.get(name, 0.) for name in TRAINING)
  speed = f' {num_steps * batch_size / training_s:,.0f} images/s in training.' if num_steps and training_s > 0 else ''
  return (f'Time: {format_duration(goodput.total_s)}{f" in {starts} starts" * (starts > 1)} ({by_phase}).{speed} '
          f'{clock.device_s(events) / 3600:.2g} device-hours on {jax.device_count()} x {jax.devices()[0].device_kind}.')


def last_line(final: Mapping[str, Any], used: Chosen | None, page: str) -> str:
  """Returns the last line that a run prints.

  Args:
    final: the content of `final.json`.
    used: the checkpoint whose weights are those of the run.
    page: the path of its report.
  """
  name, seconds, step = final.get('headline'), final['seconds'], final['step']
  if not name or final['metrics'].get(name) is None:
    return f'Done in {seconds:.0f} s{", without an evaluation" * (name == "")}. Report: {page}'
  evaluation, _, view = name.partition('@')
  shown = evaluation + f' of the {view} weights' * bool(view)
  shown += f' at the last step, {step:,}' if used and used.step != step else ''
  size = final['num_examples'][evaluation.split('/')[0]]
  return f'{shown}: {final["metrics"][name]:.2%} of {size:,} images, {seconds:.0f} s. Report: {page}'
