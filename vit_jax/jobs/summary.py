"""The texts about a run that `train` logs or prints. The functions compute nothing on devices.

`train` calls `start` and `parameters` first, `evaluated` after each evaluation, `best`, `spent`, `last_line` last.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from vit_jax.config import schema
from vit_jax.core import documents, trees
from vit_jax.data.source import title
from vit_jax.evaluate import results
from vit_jax.evaluate.results import Result
from vit_jax.jobs import build
from vit_jax.optim import rules
from vit_jax.parallel import elastic, layout
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel.sharding import with_frozen
from vit_jax.record import clock, reader, storage
from vit_jax.record.checkpoint_files import Chosen
from vit_jax.record.clock import LOST, STEP, TRAINING
from vit_jax.record.progress import format_duration
from vit_jax.weights import network

_TEXT_BY_PHASE = {STEP: 'steps', 'data_wait': 'waiting for data', 'evaluate': 'evaluation', 'checkpoint': 'checkpoints',
                  LOST: 'lost work', 'restore': 'restoring'}  # for other phases, the name of the clock is shown


def start(parts: build.Parts, data: build.Data, workdir: storage.Path, *, text: str = '') -> str:
  """Returns a table of the network, data, evaluations, schedule, layout and memory: a heading and a text in each line.

  Args:
    parts, data, workdir: the objects, the data and the directory of the run.
    text: an example of the texts that the run trains on; '' = no line about texts.
  """
  config, lengths, state = parts.config, parts.lengths, parts.program.abstract_state
  optimizer, num_params = config.optimizer, trees.num_elements(state.params)
  num_frozen = trees.num_elements(with_frozen(state.params, state.extra)) - num_params  # parameters outside of `params`
  slice_fields = elastic.describe(config, meshes.count_slices(jax.devices()))  # {} = the run is not elastic
  microbatches = elastic.text(**slice_fields) if slice_fields else (
      f'{config.microbatches} microbatch{"es" if config.microbatches > 1 else ""}')
  mesh = ' '.join(f'{axis}={size}' for axis, size in parts.mesh.shape.items())
  warmup = lengths.steps(optimizer.schedule.warmup)
  state_mib, optimizer_mib = (
      trees.num_bytes(arrays) / 2**20 for arrays in ((state.params, state.opt, state.extra), state.opt))
  patch_dropout = getattr(config.model, 'patch_dropout', 0.)  # only some networks have this setting
  return '\n'.join([
      f'Run       {config.name}, in {workdir}',
      f'Network   {network.describe(config.model)}',
      f'          {num_params:,} parameters{f" to train, {num_frozen:,} frozen" if num_frozen else ""}, '
      f'{build.train_flops(parts) / 1e9:,.3g} GFLOP an image and training step',
      *_describe_frozen(parts),
      f'Training  {lengths.num_examples:,} images of {parts.num_classes:,} classes ({title(data.train)})'
      + (', in memory' if data.in_memory else ''),
      *([f'          texts such as {documents.describe(text)}'] if text else []),
      'Evaluated ' + '\n          '.join(_describe_evaluations(config, data)),
      f'Schedule  {lengths.total_steps:,} steps of {config.batch_size:,} images, '
      f'{lengths.total_steps / lengths.steps_an_epoch:,.1f} epochs',
      f'          {type(optimizer).__name__}, learning rate {optimizer.lr:g}, {optimizer.schedule.decay.value}, '
      f'warm-up of {warmup:,} step{"" if warmup == 1 else "s"}',
      *([f'          patches left out: {patch_dropout:g}'] if patch_dropout else []),
      *_describe_best(config),
      f'Layout    {jax.device_count()} x {jax.devices()[0].device_kind}: {mesh}, {layout.dtype_text(config.model)}, '
      f'{microbatches} a step',
      f'Memory    {state_mib:,.1f} MiB of state over all devices, {optimizer_mib:,.1f} MiB of it of the optimizer'])


def _describe_frozen(parts: build.Parts) -> list[str]:
  """Returns a line on the top-level parts of the network that are frozen for the whole run; [] if no part is."""
  frozen_steps = rules.until(parts.config.optimizer.rules, parts.lengths.steps)  # a function of a parameter path
  num_params_by_part: dict[str, int] = {}
  trained = set()
  for path, leaf in trees.flatten(parts.program.abstract_state.params).items():
    part = path.partition('/')[0]
    num_params_by_part[part] = num_params_by_part.get(part, 0) + trees.num_elements(leaf)
    if frozen_steps(path) < parts.lengths.total_steps:
      trained.add(part)
  frozen = [part for part in num_params_by_part if part not in trained]
  num_frozen = sum(num_params_by_part[part] for part in frozen)
  text = f'          frozen for the whole run: {", ".join(frozen)} ({num_frozen:,} of these parameters)'
  return [text] if frozen else []


def _describe_best(config: schema.Config) -> list[str]:
  """Returns a line on the metric for the best checkpoint, and a line on the metric for early stopping, if set."""
  def best_of(metric: str) -> str:
    return f'the {"lowest" if reader.is_lower_better(metric) else "highest"} {metric}'

  best_metric, early_stop = config.checkpoints.keep_best, config.train.early_stop
  lines = []
  if best_metric:
    lines.append(f'the checkpoint with {best_of(best_metric)} is kept, and stands for the run')
  if early_stop.metric:
    lines.append(f'ends after {early_stop.patience} evaluations without a new best one by {best_of(early_stop.metric)}')
  return [('          ' if i else 'Best      ') + line for i, line in enumerate(lines)]


def _describe_evaluations(config: schema.Config, data: build.Data) -> list[str]:
  """Returns a line for each evaluated split, with the names of the evaluations; the split of the run is the first."""
  names_by_split: dict[tuple[str, str], list[str]] = {}
  for name, settings in config.evals.items():
    names_by_split.setdefault((settings.source, settings.split), []).append(name)
  names_of_run = names_by_split.pop(('', ''), [])  # evaluations of the run's own split, the only one that is open
  lines = [f'{len(data.eval):,} images ({title(data.eval)}): {", ".join(names_of_run)}'] if names_of_run else []
  lines += [f'{source or config.data.source}, {split or config.data.eval_split}: {", ".join(names)}'
            for (source, split), names in names_by_split.items()]
  return lines or ['nothing']


def parameters(parts: build.Parts) -> str:
  """Returns a line with the number of parameters for each part of the network, such as `backbone/encoder`."""
  num_params_by_part: dict[str, int] = {}
  for path, leaf in trees.flatten(parts.program.abstract_state.params).items():
    part = '/'.join(path.split('/')[:2])
    num_params_by_part[part] = num_params_by_part.get(part, 0) + trees.num_elements(leaf)
  return '\n'.join(['Parameters:', *(f'  {part:<28}{num:>14,}' for part, num in num_params_by_part.items())])


def evaluated(name: str, step: int, total: int, by_view: Mapping[str, Result]) -> str:
  """Returns a line about an evaluation: the main or first metric of each view, and the number of images."""
  texts, num_examples = [], next(iter(by_view.values())).num_examples  # all views measure the same images
  for view, result in by_view.items():
    if result.headline:
      texts.append(f'{results.metric_name(name, result.headline, view)} {result.score:.2%}')
    else:
      metric, value = next(iter(result.metrics.items()))
      texts.append(f'{results.metric_name(name, metric, view)} {value:.4g}')
  return f'step {step:,}/{total:,}  {"  ".join(texts)}  of {num_examples:,} images'


def best(final: results.Final, rows: Sequence[Mapping[str, float]], checkpoint: Chosen | None) -> str:
  """Returns a line about the best main metric in the record and the weights of the run; '' if the last step has both.

  `checkpoint` is the one whose weights are those of the run; None = there is none, and the line is ''.
  """
  if checkpoint is None:
    return ''
  weights_text = f'the weights of the run are those of step {checkpoint.step:,}'
  weights_text += f', {checkpoint.reason}' if checkpoint.metric else ''
  name = final.headline_name
  measured = [(row[name], int(row['step'])) for row in rows if name in row]
  if final.headline is None or not measured:
    return '' if checkpoint.is_newest else f'{weights_text[0].upper()}{weights_text[1:]}.'
  sign = -1. if reader.is_lower_better(final.headline.headline) else 1.
  best_value, best_step = max(measured, key=lambda point: (sign * point[0], point[1]))
  if checkpoint.is_newest and sign * best_value <= sign * final.headline.score:
    return ''
  if best_step == checkpoint.step:
    weights_text = 'its checkpoint is kept, and predict, evaluate and other jobs use it'
  return f'The best {name} was {best_value:.2%}, at step {best_step:,}; {weights_text}.'


def spent(events: Sequence[reader.Event], *, num_steps: int, batch_size: int) -> str:
  """Returns a line about the time of a run over all its starts: each phase of at least 0.5 s, speed, device-hours."""
  goodput, num_starts = clock.sum_starts(events), clock.count_starts(events)
  phases = [(seconds, _TEXT_BY_PHASE.get(name, name)) for name, seconds in goodput.seconds.items() if seconds >= .5]
  phases_text = ', '.join(f'{text} {format_duration(seconds)}' for seconds, text in sorted(phases, reverse=True))
  training_s = sum(goodput.seconds.get(name, 0.) for name in TRAINING)
  speed = f' {num_steps * batch_size / training_s:,.0f} images/s in training.' if num_steps and training_s > 0 else ''
  in_starts = f' in {num_starts} starts' if num_starts > 1 else ''
  return (f'Time: {format_duration(goodput.total_s)}{in_starts} ({phases_text}).{speed} '
          f'{clock.device_s(events) / 3600:.2g} device-hours on {jax.device_count()} x {jax.devices()[0].device_kind}.')


def last_line(final: Mapping[str, Any], checkpoint: Chosen | None, page: str) -> str:
  """Returns the last line that a run prints.

  Args:
    final: the content of `final.json`.
    checkpoint: the one whose weights are those of the run; None = there is none.
    page: the path of the report.
  """
  name, seconds, step = final.get('headline'), final['seconds'], final['step']
  if not name or final['metrics'].get(name) is None:  # `name` is None in files of older versions
    return f'Done in {seconds:.0f} s{", without an evaluation" if name == "" else ""}. Report: {page}'
  metric, _, view = name.partition('@')  # such as `test/top1@ema`
  num_examples = final['num_examples'][metric.split('/')[0]]
  of_view = f' of the {view} weights' if view else ''
  at_step = f' at the last step, {step:,}' if checkpoint and checkpoint.step != step else ''
  return (f'{metric}{of_view}{at_step}: {final["metrics"][name]:.2%} of {num_examples:,} images, {seconds:.0f} s. '
          f'Report: {page}')
