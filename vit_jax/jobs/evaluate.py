"""`--job=evaluate`: evaluates the newest complete checkpoint of a run, or weights of any format.

`commands.Command.run` calls `run`. `run` opens a run or weights as a `Subject`, measures each view on each evaluation
of the config, and writes `evaluate.json`, `predictions.npz`, `features/` and `report.html`; for weights also
`config.json` and `weights.json`. The run may be training, since `train` writes these files only at the end of a run.

Several weights are compared by a report card (`report_card.py`). If an evaluation is impossible with some of them (no
head for these classes, no text tower, images without masks), the report card states the reason.

Other jobs with weights (`frozen_features`, `embed`, `export`) call some of these functions, in this order:
`load_weights`, `with_weights`, `make_subject`, `open_labeled`. `average` calls `check_is_run`.
"""
from __future__ import annotations

import dataclasses
import logging
import pathlib
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.config import check, engine, provenance, schema
from vit_jax.core import documents, trees
from vit_jax.core.contracts import View, Viewed
from vit_jax.core.errors import UserError, redacted
from vit_jax.core.types import Params, Shard
from vit_jax.data import opening, splits
from vit_jax.data.image import transform as transforms
from vit_jax.data.labels import classes, imagenet
from vit_jax.data.source import Part, Parts
from vit_jax.evaluate import by_class as by_classes
from vit_jax.evaluate import problems, resources, results
from vit_jax.evaluate.results import Result
from vit_jax.jobs import build, report, report_card, resume, startup
from vit_jax.models import heads
from vit_jax.models.kernels import forms
from vit_jax.objectives import distill
from vit_jax.objectives.networks import NetworkView, statistics
from vit_jax.parallel import mesh as meshes
from vit_jax.record import checkpoint_files, console, destination, run_directory, storage
from vit_jax.train import checkpoint_reader
from vit_jax.train.state import TrainState
from vit_jax.weights import inherit, init_state, loading, network, preprocess, runs
from vit_jax.weights.hints import AS_FOUND, Reading
from vit_jax.weights.network import Weights

log = logging.getLogger('vit_jax.jobs')

_MAX_CLASSES = 12  # in a message
_ADVICE = ('For weights with other classes than the data, --config.evals=knn,fewshot,logistic learns the classes of '
           'the data from features')


class Subject(NamedTuple):
  """The network to evaluate, on the devices.

  config: the config, with the settings of the network.
  mesh, shard: the devices, and the part of each batch that this process loads.
  viewed: the object with the views: the objective of a run, or a `LoadedNetwork`.
  state: the parameters and the other arrays of the network.
  digest: the digest of the parameters; '' = not needed.
  weights: the loaded weights; None = the network is that of a run.
  """
  config: schema.Config
  mesh: jax.sharding.Mesh
  shard: Shard
  viewed: Viewed
  state: TrainState
  digest: str = ''
  weights: Weights | None = None

  def open_resources(self, data: build.Data, workdir: storage.Path | None = None,
                     embedded: Sequence[pathlib.Path] = ()) -> resources.Resources:
    """Returns what the evaluators of this network share; see `build.resources`."""
    return build.resources(self.config, data, self.viewed, mesh=self.mesh, shard=self.shard, workdir=workdir,
                           bar=self.config.train.progress, weights=self.weights, embedded=embedded)


class LoadedNetwork:
  """A network of loaded weights. The only view is `student`, as of a supervised run without EMA."""

  def __init__(self, config: schema.Config, *, has_head: bool) -> None:
    backbone = build.build_backbone(config)
    self._view: View = (distill.view(backbone, heads.build(config.head, config.model)) if has_head
                        else NetworkView(backbone))

  def views(self) -> dict[str, View]:
    return {'student': self._view}


def run(config: schema.Config | None, workdir: storage.Path | None, *, to: storage.Path | None = None,
        weights: str = '', reading: Reading = AS_FOUND, embedded: Sequence[str] = (), by_class: bool = False,
        csv: pathlib.Path | None = None, overwrite: bool = False, source: str, overridden: Collection[str]) -> int:
  """Evaluates every view on every evaluation of the config; returns the exit status 0.

  Args:
    config: the config of the run or for `weights`, with overrides; None = neither a run nor `weights` are given.
    workdir: the run directory; for `weights`, the directory of the results; None = `runs/evaluate/NAME`.
    to: another directory for the results; None = `workdir`.
    weights: the weights to evaluate instead of a run, several with commas (see `report_card`); '' = the run.
    reading: how `weights` are read.
    embedded: files and folders of `vit-jax embed`, from which features of the weights are read instead of computed.
    by_class: whether to print precision, recall and F1 of each class.
    csv: the file for precision, recall and F1 of each class; None = no file.
    overwrite: whether to replace the file `csv`, and results of other weights or data.
    source: where the config was read, for messages.
    overridden: names of the settings on the command line, which override the settings of the checkpoint.
  """
  wanted_scores = by_classes.Wanted(by_class, csv)
  destination.check_free([csv] if csv else [], setting='--csv', overwrite=overwrite)
  if config is not None:
    by_classes.check(wanted_scores, config)
  if not weights:
    subject, data, out = _open_run(config, workdir, to, reading, embedded, source=source, overridden=overridden)
    report_dir = workdir or out
  else:
    assert config is not None
    if to is not None and workdir is not None:
      raise UserError('--to: expected either --workdir or --to for the results of weights, got both. Remove one.')
    names = report_card.split_weights(weights)
    if len(names) > 1 or config.name == report_card.NAME:
      if flag := '--embedded' if embedded else wanted_scores.flag:
        raise UserError(f'{flag}: expected one of --weights and another config than report_card, got more. Remove '
                        f'{flag}.')
      return _compare(config, names, reading, overridden=overridden, workdir=to or workdir)
    subject, data, out = _open_weights(config, names[0], reading, to or workdir, overwrite=overwrite,
                                       overridden=overridden)
    report_dir = out
  shared = subject.open_resources(data, out, [pathlib.Path(path) for path in embedded])
  evaluators = shared.evaluators()
  console.begin_stage('evaluating')
  final = results.measure(evaluators, subject.viewed, subject.state)
  console.end_stage()
  write_results(final, subject, data, out, shared.fingerprints(), wanted_scores)
  if subject.weights is not None:
    run_directory.write_text(out / 'config.json', engine.to_json(subject.config))
    run_directory.write_json(out / 'weights.json', {
        'source': subject.weights.source, 'family': subject.weights.family, **subject.weights.report.plain()})
  if jax.process_index() == 0:
    evaluated = {} if out == report_dir else {'evaluated': out}  # the results of a run are in the directory `to`
    print(f'Report: {report.write_or_warn(report_dir, **evaluated)}', flush=True)
  return 0


def write_results(final: results.Final, subject: Subject, data: build.Data, out: storage.Path,
                  fingerprints: Mapping[str, results.Fingerprint], wanted_scores: by_classes.Wanted) -> None:
  """Prints the results, writes them into the directory `out`, and shows the scores of each class if they are wanted."""
  config, names = subject.config, data.class_names
  if jax.process_index() == 0:
    results.show(final, num_classes=len(names), recipe=config.data.recipe)
  results.write(out, final, int(subject.state.step), fit=transforms.eval_transform(config.data.recipe, config.image_px),
                source=resources.eval_source(config, data, final.name), class_names=names,
                params_digest=subject.digest, data=fingerprints)
  if jax.process_index() == 0:
    print(f'Written to {out / "evaluate.json"}', flush=True)
    if final.headline:
      view = f', {final.view} weights' if len(final.results[final.name]) > 1 else ''
      by_classes.show(wanted_scores, final.headline.guesses, names, f'{final.name}{view}')


def _open_run(config: schema.Config | None, workdir: storage.Path | None, to: storage.Path | None, reading: Reading,
              embedded: Sequence[str], *, source: str,
              overridden: Collection[str]) -> tuple[Subject, build.Data, storage.Path]:
  """Returns the network of a run with the restored state, the data, and the directory of the results."""
  if embedded:
    raise UserError('--weights: expected weights for --embedded, got none. A run stores features in its own folder.')
  if reading.preprocess or reading.model or reading.view:
    raise UserError('--weights: expected weights for --preprocess, --model and --view, got none. A run has settings of '
                    'its own.')
  if workdir is None:
    raise UserError('--workdir: expected the directory of a run, got none. Set --workdir=DIR or --weights=FILE.')
  assert config is not None
  check.check(config)
  startup.start()
  check_is_run(workdir)
  out, setting = (to, '--to') if to else (workdir, '--workdir')
  destination.check_writable(out, setting=setting, advice='Set --to=DIR to write the results elsewhere.')
  run_directory.check_ours(out, setting)
  config = inherit.resolve(config, overridden, workdir).config
  data = _open_data(config, resume.find_classes(workdir))
  config = build.with_statistics(config, data.train)
  mesh, shard, parts = build.open_run(config, data, workdir=workdir, overridden=overridden)
  config = parts.config
  restored = _restore(workdir, parts, reading, source=source, overridden=overridden)
  return Subject(config, mesh, shard, parts.objective, restored.state, restored.about['digests']['params']), data, out


def _restore(workdir: storage.Path, parts: build.Parts, reading: Reading, *, source: str,
             overridden: Collection[str]) -> checkpoint_reader.Restored:
  """Reads and checks the newest complete checkpoint of a run, or the best checkpoint with `checkpoints.keep_best`."""
  console.begin_stage('reading the checkpoint')
  choices: list[checkpoint_files.Chosen] = []  # The reader chooses again if a checkpoint is damaged; it uses the last.

  def choose(steps: list[int]) -> int:
    choice = checkpoint_files.choose(workdir, parts.config.checkpoints.keep_best, steps)
    assert choice is not None
    choices.append(choice)
    return choice.step

  restored = checkpoint_reader.Reader(workdir / 'checkpoints').newest(parts.program.placed_state, choose=choose)
  if restored is None:
    raise UserError(f'--workdir={workdir}: expected a run with a checkpoint, got one that has no complete checkpoint '
                    'yet. Wait for its first one.')
  provenance.check(restored.about, parts.config, said=source, overridden=overridden)
  if not reading.allow_nonfinite:
    check_finite(restored.state, f'--workdir={workdir}')
  step = int(restored.state.step)
  runs.say(workdir, choices[-1], {choice.step for choice in choices} - {step})
  log.info('Evaluating step %s of %s.', f'{step:,}', workdir)
  return restored


def _open_data(config: schema.Config, trained: tuple[str, ...]) -> build.Data:
  """Opens the data to evaluate a run. The labels are indexes into `trained`, the classes of the run; () = unknown."""
  try:
    opened = build.open_data(config, order=trained, learns=False)
  except splits.NoSplit:  # Without a training split, the evaluated split stands in for the training split.
    evaluated = opening.check_labels(opening.open_split(config.data, config.data.eval_split, image_px=config.image_px,
                                                        order=trained), config.data)
    opened = build.Data(evaluated, evaluated, evaluated.class_names, in_memory=False)
  if opened.class_names == trained or not trained:
    return opened
  known_names = set(map(classes.composed, trained))
  if unknown := [name for name in opened.class_names if classes.composed(name) not in known_names]:
    raise UserError(f'data: expected some of the {len(trained)} classes that the run was trained on, '
                    f'{documents.listed(trained, _MAX_CLASSES)}, got {len(opened.class_names)} classes, of which '
                    f'these are others: {documents.listed(unknown, _MAX_CLASSES)}. Use data with the classes of the '
                    'run.')
  evaluated = classes.renumbered(opened.eval, trained, where='the run')
  train = evaluated if opened.train is opened.eval else classes.renumbered(opened.train, trained, where='the run')
  return build.Data(train, evaluated, trained, opened.in_memory)


def _open_weights(config: schema.Config, where: str, reading: Reading, workdir: storage.Path | None, *,
                  overwrite: bool, overridden: Collection[str]) -> tuple[Subject, build.Data, storage.Path]:
  """Returns the network of weights, the data, and the directory of the results."""
  check_overridden(overridden)
  if workdir is not None and (workdir / 'checkpoints').is_dir():
    raise UserError(f'--workdir: expected a directory without a run, got {workdir}. Use another one for the results of '
                    'these weights.')
  path = re.split('[?#]', where)[0] if '://' in where else where  # without the query of 'https://host/vit.npz?download=1'
  out = workdir or pathlib.Path('runs', 'evaluate', pathlib.Path(path.rstrip('/')).name).absolute()
  destination.check_writable(out, setting='--workdir', advice='Set another --workdir.')
  run_directory.check_ours(out)
  startup.start()
  weights = load_weights(config, where, reading, overridden)
  check_head(weights, config, where=where)
  config = with_weights(config, weights, overridden)
  check.check(config)
  console.begin_stage('opening the data')
  data = open_labeled(config, weights)
  config = build.with_orientation(config, data.eval)
  digest = trees.digest(weights.params)
  if (out / 'evaluate.json').exists():
    if workdir is None and not overwrite:
      _check_same(out, digest, config.data)
    log.info('%s has the results of an earlier evaluation, which are replaced.', out)
  return make_subject(config, weights)._replace(digest=digest), data, out


def _compare(config: schema.Config, names: Sequence[str], reading: Reading, *, overridden: Collection[str],
             workdir: storage.Path | None) -> int:
  """Evaluates several weights on every evaluation of the config, and writes the report card; returns 0."""
  process_id = startup.start()
  workdir = workdir or pathlib.Path('runs', 'report_card').absolute()
  destination.check_writable(workdir, setting='--workdir', advice='Set another --workdir.')
  workdir.mkdir(parents=True, exist_ok=True)
  columns = [_measure_column(config, where, reading, title=title, overridden=overridden, workdir=workdir)
             for where, title in zip(names, report_card.short(names), strict=True)]
  console.end_stage()
  if not any(column.results for column in columns):
    raise UserError(next(reason for column in columns for reason in column.reasons.values()))  # the first one
  if not process_id:
    content = report_card.plain(config, columns)
    page, numbers = workdir / report_card.PAGE, workdir / report_card.NUMBERS
    print(report_card.text(columns), flush=True)
    run_directory.write_json(numbers, content)
    storage.write_bytes(page, storage.encode(redacted(report_card.render(content, columns))))
    print(f'Written to {page} and {numbers}', flush=True)
  return 0


def _measure_column(config: schema.Config, where: str, reading: Reading, *, title: str, overridden: Collection[str],
                    workdir: storage.Path) -> report_card.Column:
  """Returns the results of weights on each evaluation, or the reason why an evaluation has no result."""
  weights = load_weights(config, where, reading, overridden)
  config = with_weights(config, weights, overridden)
  subject = make_subject(config, weights)
  measured: dict[str, Result] = {}
  reasons: dict[str, str] = {}
  seconds: dict[str, float] = {}
  for name, settings in config.evals.items():
    began_s = time.monotonic()
    single = dataclasses.replace(config, evals={name: settings})
    try:
      check_head(weights, single, where=weights.source)
      check.check(single)
      console.begin_stage(f'evaluating {name}')
      data = open_labeled(single, weights)
      shared = subject._replace(config=build.with_orientation(single, data.eval)).open_resources(data, workdir)
      measured[name] = results.measure(shared.evaluators(), subject.viewed, subject.state).results[name]['student']
    except UserError as error:
      reasons[name] = str(error)
      log.warning('%s of %s is not measured: %s', name, where, error)
    seconds[name] = round(time.monotonic() - began_s, 3)
  return report_card.Column(where, title, network.describe(weights.model), preprocess.describe(weights.preprocess),
                            trees.num_elements(weights.params), measured, reasons, seconds)


def _check_same(out: storage.Path, digest: str, data: schema.Data) -> None:
  """Raises UserError if a directory that the command does not name has results of other weights or data."""
  def read_document(name: str) -> Mapping[str, Any]:
    try:
      return dict(documents.load(out / name))
    except (OSError, ValueError, TypeError):
      return {}

  old_digest = read_document('evaluate.json').get('params_digest')
  old_data = read_document('config.json').get('data')
  old_split = [old_data.get(name) for name in ('source', 'eval_split')] if isinstance(old_data, dict) else []
  if old_digest != digest or old_split != [data.source, data.eval_split]:
    got = 'other weights' if old_digest != digest else f'other data ({" ".join(map(str, old_split)) or "not known"})'
    raise UserError(f'--workdir={out}: expected a new directory, or results of these weights and data, got those '
                    f'of {got}. Set another --workdir, or add --overwrite.')


def check_finite(state: TrainState, setting: str) -> None:
  """Raises UserError, with the setting that names the run, if parameters or `extra` have infinite or NaN values."""
  if bad := problems.nonfinite_leaves({'params': state.params, 'extra': state.extra}):
    raise UserError(f'{setting}: expected a network with finite values, got infinite or NaN values in '
                    f'{documents.joined(bad, 3)}. Use an earlier checkpoint, or add --allow_nonfinite to evaluate it.')


def check_is_run(workdir: storage.Path) -> None:
  """Raises UserError unless a directory holds a training run."""
  if not (workdir / 'checkpoints').is_dir():
    raise UserError(f'--workdir: expected the directory of a run, got {workdir}, which has no folder checkpoints. Pass '
                    'the --workdir of a training run.')


def check_overridden(overridden: Collection[str]) -> None:
  """Raises UserError if settings of the network are overridden, since the weights determine the network."""
  if given := [name for name in overridden if name.startswith(('model.', 'head.'))]:
    raise UserError(f'config.{given[0]}: expected the network of the weights, got an override. Set what tensors do not '
                    'determine with --model=heads=N,gelu=exact,norm_eps=1e-6.')


def load_weights(config: schema.Config, where: str, reading: Reading, overridden: Collection[str]) -> Weights:
  """Returns the weights, resized for images of `config.image_px` if the command line sets `image_px`."""
  console.begin_stage('loading the weights')
  weights = loading.load(where, **reading._asdict())
  if 'image_px' in overridden:
    weights = loading.at_size(weights, preprocess.scaled(weights.preprocess, config.image_px))
  log.info('%s', loading.text(weights))
  return weights


def check_head(weights: Weights, config: schema.Config, *, where: str) -> None:
  """Raises UserError if an evaluation needs a classification head, and the weights have none, or only a projection."""
  is_projection = weights.num_classes and not weights.head.bias and weights.family != 'run'  # such as CLIP
  if needs_head(config) and (is_projection or not weights.num_classes):
    got = f'a projection to {weights.num_classes} numbers' if is_projection else 'weights without one'
    raise UserError(f'--weights={where}: expected weights with a classification head, got {got}. Use weights that were '
                    'trained on classes, or --config.evals=knn,fewshot,logistic.')


def with_weights(config: schema.Config, weights: Weights, overridden: Collection[str]) -> schema.Config:
  """Returns the config with network and preprocessing of the weights, except for settings that are overridden."""
  images, recipe = weights.preprocess, config.data.recipe
  values: dict[str, Any] = {name: value for name, value in preprocess.recipe_values(images).items()
                            if f'data.recipe.{name}' not in overridden}
  if images.native_patch and 'data.recipe.eval_native_patch' not in overridden:
    recipe = dataclasses.replace(recipe, eval_native_patch=images.native_patch)
  if recipe.eval_native_patch and 'data.recipe.eval_resize_px' not in overridden:
    values['eval_resize_px'] = 0  # images that keep their aspect ratio are not cropped
  data = dataclasses.replace(config.data, channels=weights.channels, recipe=dataclasses.replace(recipe, **values))
  return dataclasses.replace(config, model=weights.model, head=weights.head, image_px=images.image_px, data=data)


def open_labeled(config: schema.Config, weights: Weights) -> build.Data:
  """Opens the data to evaluate. The labels are indexes of outputs of the head, if an evaluation uses the head.

  Raises UserError if it is unknown which output of the head stands for which class.
  """
  source = opening.check_labels(
      opening.open_split(config.data, config.data.eval_split, image_px=config.image_px), config.data)
  if not needs_head(config):
    return build.Data(source, source, source.class_names, in_memory=False)
  names = source.class_names
  imagenet_list = None if config.data.classes else imagenet.by_ids(names, weights.num_classes, weights.class_names)
  # The names may be numbers, one for each output of the head, although the weights have other names for the outputs.
  are_numbers = (bool(classes.numbered(names)) and len(names) == weights.num_classes and names != weights.class_names
                 and not set(names) & set(weights.class_names))
  try:
    if imagenet_list:
      log.info('The %s classes of the data are WordNet ids, and are evaluated as outputs of the %s classes of %s.',
               f'{len(names):,}', f'{weights.num_classes:,}', imagenet_list.title)
      source = classes.renumbered(source, imagenet_list.lines(), where=imagenet_list.title)
    elif not config.data.classes and are_numbers:
      log.info('The %s classes of the data are numbers, and are evaluated as these outputs of %s.',
               f'{len(names):,}', weights.source)
      source = Parts([Part(source, labels=classes.numbered(names))],
                     class_names=weights.class_names or classes.ordered(names))
    elif not config.data.classes and weights.class_names and names != weights.class_names:
      source = classes.renumbered(source, weights.class_names, where=weights.source)
    else:
      init_state.check_order(weights, names, config.data)
  except UserError as error:
    raise UserError(f'{str(error).rstrip(".")}. {_ADVICE}.') from None
  return build.Data(source, source, source.class_names, in_memory=False)


def needs_head(config: schema.Config) -> bool:
  """Returns whether an evaluation uses the classes of the head; the others learn the classes of the data."""
  return any(isinstance(settings, schema.TopK) for settings in config.evals.values())


def make_subject(config: schema.Config, weights: Weights, *, has_head: bool = True) -> Subject:
  """Returns weights on the devices, without their head if `has_head` is False. `config` is from `with_weights`."""
  mesh, shard = build.open_mesh(config)
  forms.check_devices(config.model, mesh, name='model')
  params: Params = {name: weights.params[name] for name in ('backbone', 'head', 'head_dist') if name in weights.params}
  step = jnp.asarray(min(max(weights.step, 0), 2**31 - 1), jnp.int32)  # an unknown step is 0
  step, params, extra = jax.device_put((step, params, statistics(weights.state)), meshes.replicated(mesh))
  viewed = LoadedNetwork(config, has_head=has_head and bool(weights.num_classes))
  return Subject(config, mesh, shard, viewed, TrainState(step, params, {}, extra), weights=weights)
