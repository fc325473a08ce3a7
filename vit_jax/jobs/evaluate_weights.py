"""`--job=evaluate --weights=…`: evaluates weights of any format on a dataset, and writes `evaluate.json`."""
from __future__ import annotations

import dataclasses
import logging
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.config import check, json_files, schema
from vit_jax.core import trees
from vit_jax.core.contracts import View
from vit_jax.core.errors import UserError
from vit_jax.core.types import Params
from vit_jax.data.image import transform as transforms
from vit_jax.data.labels import classes, imagenet
from vit_jax.data.sources import opening
from vit_jax.evaluate import by_class, resources
from vit_jax.evaluate import evaluators as evaluation
from vit_jax.evaluate import final as results
from vit_jax.jobs import build, report_page
from vit_jax.jobs import runtime as startup
from vit_jax.models import heads
from vit_jax.models.kernels import devices
from vit_jax.objectives import distill
from vit_jax.objectives.networks import NetworkView, statistics
from vit_jax.parallel import mesh as meshes
from vit_jax.record import console, destination, run_directory, storage
from vit_jax.train.state import TrainState
from vit_jax.weights import init_state, loading, preprocess
from vit_jax.weights.network import Weights
from vit_jax.weights.reading import AS_FOUND, Reading

log = logging.getLogger('vit_jax.jobs')

_LEARNING = ('For weights with other classes than the data, --config.evals=knn,fewshot,logistic learns the classes of '
             'the data from features')


class WeightsSpec(NamedTuple):
  """Weights on the command line, and how they are read; see `weights.loading.load`."""
  where: str
  reading: Reading = AS_FOUND


class Network:
  """Loaded weights with views, as evaluations need them."""

  def __init__(self, config: schema.Config, *, has_head: bool) -> None:
    backbone = build.build_backbone(config)
    self._view: View = (distill.view(backbone, heads.build(config.head, config.model)) if has_head
                        else NetworkView(backbone))

  def views(self) -> dict[str, View]:
    return {'student': self._view}


def run(config: schema.Config, spec: WeightsSpec, *, overridden: Collection[str], workdir: storage.Path | None,
        embedded: Sequence[pathlib.Path] = (), table: by_class.Wanted = by_class.NOTHING) -> int:
  """Evaluates weights on every evaluation of the config; exit status 0.

  Args:
    config: of data and evaluations; network and preprocessing are those of the weights.
    spec: which weights.
    overridden: settings on the command line, which override those of the weights.
    workdir: directory for `evaluate.json`; None = `runs/evaluate/NAME`.
    embedded: files of `vit-jax embed`, whose features are read instead of computed.
    table: what is shown of each class.
  """
  check_overridden(overridden)
  if workdir is not None and (workdir / 'checkpoints').is_dir():
    raise UserError(f'--workdir: expected a directory without a run, got {workdir}. Use another one for the results of '
                    'these weights.')
  workdir = workdir or default_workdir(spec.where)
  destination.check_writable(workdir, setting='--workdir', advice='Set another --workdir.')
  startup.start()
  if (workdir / 'evaluate.json').exists():
    log.info('%s has the results of an earlier evaluation, which are replaced.', workdir)
  found = load(config, spec, overridden)
  check_head(found, config, where=spec.where)
  config = with_weights(config, found, overridden)
  check.check(config)
  console.begin_stage('opening the data')
  data = open_data(config, found)
  mesh, shard = build.open_mesh(config)
  devices.check_devices(config.model, mesh, name='model')
  network = Network(config, has_head=bool(found.num_classes))
  shared = build.resources(config, data, network, mesh=mesh, shard=shard, workdir=workdir, bar=config.train.progress,
                           weights=found, embedded=embedded)
  evaluators = evaluation.build(shared)
  console.begin_stage('evaluating')
  final = results.measure(evaluators, network, state(found, mesh))
  console.end_stage()
  report(final, workdir, 0, config, data, trees.digest(found.params), shared.fingerprints(), table)
  run_directory.write_text(workdir / 'config.json', json_files.to_json(config))  # not of a run that continues
  run_directory.write_json(workdir / 'weights.json',
                           {'source': found.source, 'family': found.family, **found.report.plain()})
  write_page(workdir, workdir)
  return 0


def check_overridden(overridden: Collection[str]) -> None:
  """Raises UserError for overrides of the network, which is that of the weights."""
  if given := [name for name in overridden if name.startswith(('model.', 'head.'))]:
    raise UserError(f'config.{given[0]}: expected the network of the weights, got an override. Set what tensors do not '
                    'determine with --model=heads=N,gelu=exact,norm_eps=1e-6.')


def report(final: results.Final, out: storage.Path, step: int, config: schema.Config, data: build.Data,
           params_digest: str, read: Mapping[str, resources.Fingerprint],
           table: by_class.Wanted = by_class.NOTHING) -> None:
  """Prints the results, and then writes them into the directory `out`, and a table of the classes if it is wanted."""
  if jax.process_index() == 0:
    results.show(final, num_classes=len(data.class_names), recipe=config.data.recipe)
  results.write(out, final, step, fit=transforms.eval_transform(config.data.recipe, config.image_px),
                source=resources.eval_source(config, data, final.name), class_names=data.class_names,
                params_digest=params_digest, data=read)
  if jax.process_index() == 0:
    print(f'Written to {out / "evaluate.json"}', flush=True)
    if final.headline:
      view = f', {final.view} weights' if len(final.results[final.name]) > 1 else ''
      by_class.show(table, final.headline.guesses, data.class_names, f'{final.name}{view}')


def write_page(workdir: storage.Path, out: storage.Path) -> None:
  """Writes the report of a run with the results in the directory `out`, and prints its path."""
  if jax.process_index() == 0:
    more = {} if out == workdir else {'evaluated': out}
    print(f'Report: {report_page.write_or_warn(workdir, **more)}', flush=True)


def default_workdir(where: str) -> pathlib.Path:
  """Returns the directory for the results of weights: `runs/evaluate/NAME`, by the last part of their path."""
  plain = re.split('[?#]', where)[0] if '://' in where else where
  return pathlib.Path('runs', 'evaluate', pathlib.Path(plain.rstrip('/')).name).absolute()


def check_head(found: Weights, config: schema.Config, *, where: str) -> None:
  """Raises UserError if an evaluation needs the head of classes, and the weights have none, or a projection."""
  is_projection = found.num_classes and not found.head.bias and found.family != 'run'  # as of CLIP
  if needs_head(config) and (is_projection or not found.num_classes):
    got = f'a projection to {found.num_classes} numbers' if is_projection else 'weights without one'
    raise UserError(f'--weights={where}: expected weights with a classification head, got {got}. Use weights that were '
                    'trained on classes, or --config.evals=knn,fewshot,logistic.')


def load(config: schema.Config, spec: WeightsSpec, overridden: Collection[str]) -> Weights:
  """Returns the weights, for images of `config.image_px` if that is on the command line."""
  console.begin_stage('loading the weights')
  found = loading.load(spec.where, **spec.reading._asdict())
  if 'image_px' in overridden:
    found = loading.at_size(found, preprocess.scaled(found.preprocess, config.image_px))
  log.info('%s', loading.text(found))
  return found


def with_weights(config: schema.Config, found: Weights, overridden: Collection[str]) -> schema.Config:
  """Returns the config with network and preprocessing of the weights, except for settings on the command line."""
  p, recipe = found.preprocess, config.data.recipe
  kept: dict[str, Any] = {name: value for name, value in preprocess.recipe_values(p).items()
                          if f'data.recipe.{name}' not in overridden}
  if recipe.eval_native_patch and 'data.recipe.eval_resize_px' not in overridden:
    kept['eval_resize_px'] = 0  # complete images
  return dataclasses.replace(
      config, model=found.model, head=found.head, image_px=p.image_px,
      data=dataclasses.replace(config.data, channels=found.channels, recipe=dataclasses.replace(recipe, **kept)))


def open_data(config: schema.Config, found: Weights) -> build.Data:
  """Opens the data to evaluate, with labels that index the outputs of the head.

  Raises:
    UserError: the order of the classes is unknown or different.
  """
  source = opening.check_labels(
      opening.open_split(config.data, config.data.eval_split, image_px=config.image_px), config.data)
  if not needs_head(config):
    return build.Data(source, source, source.class_names, in_memory=False)
  known = None if config.data.classes else imagenet.by_ids(source.class_names, found.num_classes, found.class_names)
  try:
    if known:
      log.info('The %s classes of the data are WordNet ids, and are evaluated as outputs of the %s classes of %s.',
               f'{len(source.class_names):,}', f'{found.num_classes:,}', known.title)
      source = classes.renumbered(source, known.lines(), where=known.title)
    elif not config.data.classes and found.class_names and source.class_names != found.class_names:
      source = classes.renumbered(source, found.class_names, where=found.source)
    else:
      init_state.check_order(found, source.class_names, is_listed=bool(config.data.classes))
  except UserError as error:
    raise UserError(f'{str(error).rstrip(".")}. {_LEARNING}.') from None
  return build.Data(source, source, source.class_names, in_memory=False)


def needs_head(config: schema.Config) -> bool:
  """Returns whether an evaluation uses the classes of the head.

  The other evaluations are trained on the data's classes.
  """
  return any(isinstance(one, schema.TopK) for one in config.evals.values())


def state(found: Weights, mesh: jax.sharding.Mesh) -> TrainState:
  """Returns the weights as a train state, replicated on all devices."""
  params: Params = {name: found.params[name] for name in ('backbone', 'head', 'head_dist') if name in found.params}
  step, params, extra = jax.device_put((jnp.zeros((), jnp.int32), params, statistics(found.state)),
                                       meshes.replicated(mesh))
  return TrainState(step, params, {}, extra)
