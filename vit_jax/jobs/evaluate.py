"""`--job=evaluate`: evaluates the newest complete checkpoint of a run, or weights of any format.

Both are a network with views, and end in one path: every view on every evaluation of the config, `evaluate.json`,
`predictions.npz`, `features/` and `report.html`; for weights also `config.json` and `weights.json`. A run may still be
training, which does not touch these files before its own final evaluation.
"""
from __future__ import annotations

import logging
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.config import check, json_files, provenance, schema
from vit_jax.core import documents, trees
from vit_jax.core.contracts import Viewed
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.data.image import transform as transforms
from vit_jax.data.labels import classes
from vit_jax.data.sources import opening, splits
from vit_jax.evaluate import by_class as by_classes
from vit_jax.evaluate import evaluators as evaluation
from vit_jax.evaluate import final as results
from vit_jax.evaluate import resources
from vit_jax.jobs import build, evaluate_weights, report_card, report_page, resume
from vit_jax.jobs import runtime as startup
from vit_jax.models.kernels import devices
from vit_jax.record import checkpoint_files, console, destination, run_directory, storage
from vit_jax.train import checkpoint_reader
from vit_jax.train.state import TrainState
from vit_jax.weights import inherit, runs
from vit_jax.weights.network import Weights
from vit_jax.weights.reading import AS_FOUND, Reading

log = logging.getLogger('vit_jax.jobs')

_SHOWN = 12  # classes in a message


class Subject(NamedTuple):
  """What is evaluated.

  config: with the settings of the network.
  viewed: provides its views.
  digest: of its parameters.
  weights: that it is of; None = a run.
  """
  config: schema.Config
  data: build.Data
  mesh: jax.sharding.Mesh
  shard: Shard
  viewed: Viewed
  state: TrainState
  digest: str
  weights: Weights | None = None


def run(config: schema.Config | None, workdir: storage.Path | None, *, to: storage.Path | None = None,
        weights: str = '', reading: Reading = AS_FOUND, embedded: Sequence[str] = (), by_class: bool = False,
        csv: pathlib.Path | None = None, overwrite: bool = False, source: str,
        overridden: Collection[str]) -> int:
  """Evaluates every view on every evaluation of the config; exit status 0.

  Args:
    config: of the run, or for `weights`, with overrides; None = there is no run.
    workdir: the run directory; of `weights`, where the results go; None = `runs/evaluate/NAME`.
    to: where the results go instead; None = `workdir`.
    weights: what to evaluate instead of the run; '' = the run. Several with commas: see `report_card`.
    reading: how `weights` are read.
    embedded: files and folders of `vit-jax embed`; features of these weights are read there instead of computed.
    by_class: whether precision, recall and F1 of each class are printed.
    csv: file for these numbers; None = none.
    overwrite: replace this file, and results of other weights or data.
    source: of the config, for messages.
    overridden: settings on the command line, which override those of the checkpoint.
  """
  table = by_classes.Wanted(by_class, csv)
  destination.check_free([csv] if csv else [], setting='--csv', overwrite=overwrite)
  if config is not None:
    by_classes.check(table, config)
  if not weights:
    found, out = _open_run(config, workdir, to, reading, embedded, source=source, overridden=overridden)
    page_of = workdir or out
  else:
    assert config is not None
    if to is not None and workdir is not None:
      raise UserError('--to: expected either --workdir or --to for the results of weights, got both. Remove one.')
    names = report_card.split_weights(weights)
    if len(names) > 1 or config.name == report_card.NAME:
      if flag := '--embedded' if embedded else table.flag:
        raise UserError(f'{flag}: expected one of --weights and another config than report_card, got more. Remove '
                        f'{flag}.')
      return report_card.run(config, names, reading, overridden=overridden, workdir=to or workdir)
    found, out = _open_weights(config, names[0], reading, to or workdir, overwrite=overwrite, overridden=overridden)
    page_of = out
  shared = build.resources(found.config, found.data, found.viewed, mesh=found.mesh, shard=found.shard, workdir=out,
                           bar=found.config.train.progress, weights=found.weights,
                           embedded=[pathlib.Path(path) for path in embedded])
  evaluators = evaluation.build(shared)
  console.begin_stage('evaluating')
  final = results.measure(evaluators, found.viewed, found.state)
  console.end_stage()
  report(final, found, out, shared.fingerprints(), table)
  if found.weights is not None:
    run_directory.write_text(out / 'config.json', json_files.to_json(found.config))  # not of a run that continues
    run_directory.write_json(out / 'weights.json', {
        'source': found.weights.source, 'family': found.weights.family, **found.weights.report.plain()})
  if jax.process_index() == 0:
    more = {} if out == page_of else {'evaluated': out}
    print(f'Report: {report_page.write_or_warn(page_of, **more)}', flush=True)
  return 0


def report(final: results.Final, found: Subject, out: storage.Path, read: Mapping[str, resources.Fingerprint],
           table: by_classes.Wanted) -> None:
  """Prints the results, and then writes them into the directory `out`, and a table of the classes if it is wanted."""
  config, names = found.config, found.data.class_names
  if jax.process_index() == 0:
    results.show(final, num_classes=len(names), recipe=config.data.recipe)
  results.write(out, final, int(found.state.step), fit=transforms.eval_transform(config.data.recipe, config.image_px),
                source=resources.eval_source(config, found.data, final.name), class_names=names,
                params_digest=found.digest, data=read)
  if jax.process_index() == 0:
    print(f'Written to {out / "evaluate.json"}', flush=True)
    if final.headline:
      view = f', {final.view} weights' if len(final.results[final.name]) > 1 else ''
      by_classes.show(table, final.headline.guesses, names, f'{final.name}{view}')


def _open_run(config: schema.Config | None, workdir: storage.Path | None, to: storage.Path | None, reading: Reading,
              embedded: Sequence[str], *, source: str,
              overridden: Collection[str]) -> tuple[Subject, storage.Path]:
  """Returns the newest complete checkpoint of a run, and the directory of the results."""
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
  out, setting = to or workdir, '--to' if to else '--workdir'
  destination.check_writable(out, setting=setting, advice='Set --to=DIR to write the results elsewhere.')
  run_directory.check_ours(out, setting)
  config = inherit.resolve(config, overridden, workdir).config
  data = _open_data(config, resume.find_classes(workdir))
  config = build.measured(config, data.train)
  mesh, shard, parts = build.open_run(config, data, workdir=workdir, overridden=overridden)
  config = parts.config
  console.begin_stage('reading the checkpoint')
  tries: list[checkpoint_files.Chosen] = []

  def choose(steps: list[int]) -> int:
    tries.extend(filter(None, [checkpoint_files.choose(workdir, config.checkpoints.keep_best, steps)]))
    return tries[-1].step

  restored = checkpoint_reader.Reader(workdir / 'checkpoints').newest(
      parts.program.placed_state, choose=choose)
  if restored is None:
    raise UserError(f'--workdir={workdir}: expected a run with a checkpoint, got one that has no complete checkpoint '
                    'yet. Wait for its first one.')
  provenance.check(restored.about, config, said=source, overridden=overridden)
  if not reading.allow_nonfinite:
    check_finite(restored.state, f'--workdir={workdir}')
  step = int(restored.state.step)
  runs.say(workdir, tries[-1], {one.step for one in tries} - {step})
  log.info('Evaluating step %s of %s.', f'{step:,}', workdir)
  return Subject(config, data, mesh, shard, parts.objective, restored.state, restored.about['digests']['params']), out


def _open_data(config: schema.Config, trained: tuple[str, ...]) -> build.Data:
  """Opens the data to evaluate a run on, whose classes are numbered as `trained` has them if they are some of these.

  Data without the training split of the run are evaluated alone.

  Raises:
    UserError: the data cannot be opened, or have other classes.
  """
  try:
    found = build.open_data(config, order=trained, learns=False)
  except splits.NoSplit:
    only = opening.check_labels(opening.open_split(config.data, config.data.eval_split, image_px=config.image_px,
                                                   order=trained), config.data)
    found = build.Data(only, only, only.class_names, in_memory=False)
  if found.class_names == trained or not trained:
    return found
  known = set(map(classes.composed, trained))
  if odd := [name for name in found.class_names if classes.composed(name) not in known]:
    raise UserError(f'data: expected some of the {len(trained)} classes that the run was trained on, '
                    f'{documents.listed(trained, _SHOWN)}, got {len(found.class_names)} classes, of which these are '
                    f'others: {documents.listed(odd, _SHOWN)}. Use data with the classes of the run.')
  is_same = found.train is found.eval
  evaluated = classes.renumbered(found.eval, trained, where='the run')
  train = evaluated if is_same else classes.renumbered(found.train, trained, where='the run')
  return build.Data(train, evaluated, trained, found.in_memory)


def _open_weights(config: schema.Config, where: str, reading: Reading, workdir: storage.Path | None, *,
                  overwrite: bool, overridden: Collection[str]) -> tuple[Subject, storage.Path]:
  """Returns weights as what is evaluated, and the directory of the results."""
  evaluate_weights.check_overridden(overridden)
  if workdir is not None and (workdir / 'checkpoints').is_dir():
    raise UserError(f'--workdir: expected a directory without a run, got {workdir}. Use another one for the results of '
                    'these weights.')
  path = re.split('[?#]', where)[0] if '://' in where else where
  out = workdir or pathlib.Path('runs', 'evaluate', pathlib.Path(path.rstrip('/')).name).absolute()
  destination.check_writable(out, setting='--workdir', advice='Set another --workdir.')
  run_directory.check_ours(out)
  startup.start()
  found = evaluate_weights.load(config, where, reading, overridden)
  evaluate_weights.check_head(found, config, where=where)
  config = evaluate_weights.with_weights(config, found, overridden)
  check.check(config)
  console.begin_stage('opening the data')
  data = evaluate_weights.open_data(config, found)
  config = build.oriented(config, data.eval)
  digest = trees.digest(found.params)
  if (out / 'evaluate.json').exists():
    if workdir is None and not overwrite:
      _check_same(out, digest, config.data)
    log.info('%s has the results of an earlier evaluation, which are replaced.', out)
  mesh, shard = build.open_mesh(config)
  devices.check_devices(config.model, mesh, name='model')
  network = evaluate_weights.Network(config, has_head=bool(found.num_classes))
  return Subject(config, data, mesh, shard, network, evaluate_weights.state(found, mesh), digest, found), out


def _check_same(out: storage.Path, digest: str, data: schema.Data) -> None:
  """Raises UserError if a directory that the person did not name has results of other weights or data."""
  def read(name: str) -> Mapping[str, Any]:
    try:
      return dict(documents.load(out / name))
    except (OSError, ValueError, TypeError):
      return {}

  earlier, before = read('config.json').get('data'), read('evaluate.json').get('params_digest')
  read_data = [earlier.get(name) for name in ('source', 'eval_split')] if isinstance(earlier, dict) else []
  if before != digest or read_data != [data.source, data.eval_split]:
    got = 'other weights' if before != digest else f'other data ({" ".join(map(str, read_data)) or "not known"})'
    raise UserError(f'--workdir={out}: expected a new directory, or results of these weights and data, got those '
                    f'of {got}. Set another --workdir, or add --overwrite.')


def check_finite(state: TrainState, said: str) -> None:
  """Raises UserError if parameters, or a copy of them such as the EMA, have infinite or NaN values."""
  leaves = trees.flatten({'params': state.params, 'extra': state.extra})
  bad = [name for name, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)
         and not bool(jnp.isfinite(leaf).all())]
  if bad:
    more = f' and {len(bad) - 3} more' if len(bad) > 3 else ''
    raise UserError(f'{said}: expected a network with finite values, got infinite or NaN values in '
                    f'{", ".join(bad[:3])}{more}. Use an earlier checkpoint, or add --allow_nonfinite to evaluate it.')


def check_is_run(workdir: storage.Path) -> None:
  """Raises UserError unless a directory holds a training run."""
  if not (workdir / 'checkpoints').is_dir():
    raise UserError(f'--workdir: expected the directory of a run, got {workdir}, which has no folder checkpoints. Pass '
                    'the --workdir of a training run.')
