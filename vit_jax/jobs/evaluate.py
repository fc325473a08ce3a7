"""`--job=evaluate`: evaluates the newest complete checkpoint of a run, or any weights, and writes `evaluate.json`.

The run may still be training: only `evaluate.json`, `predictions.npz`, `features/` and `report.html` are written, which
training does not touch before its own final evaluation.
"""
from __future__ import annotations

import logging
import pathlib
from collections.abc import Collection, Sequence

import jax.numpy as jnp

from vit_jax.config import check, provenance, schema
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.evaluate import by_class as by_classes
from vit_jax.evaluate import evaluators as evaluation
from vit_jax.evaluate import final as results
from vit_jax.jobs import build, evaluate_weights, report_card
from vit_jax.jobs import runtime as startup
from vit_jax.record import console, destination, storage
from vit_jax.train import checkpoint_reader
from vit_jax.train.state import TrainState
from vit_jax.weights import inherit
from vit_jax.weights.reading import AS_FOUND, Reading

log = logging.getLogger('vit_jax.jobs')

ELSEWHERE = 'Set --to=DIR to write the results elsewhere.'


def run(config: schema.Config | None, workdir: storage.Path | None, *, to: storage.Path | None = None,
        weights: str = '', reading: Reading = AS_FOUND, embedded: Sequence[str] = (), by_class: bool = False,
        csv: pathlib.Path | None = None, source: str, overridden: Collection[str]) -> int:
  """Evaluates every view on every evaluation of the config; exit status 0.

  Args:
    config: of the run, or for `weights`, with overrides; None = there is no run.
    workdir: the run directory; of `weights`, where the results go.
    to: where the results go instead; None = `workdir`.
    weights: what to evaluate instead of the run; '' = the run.
    reading: how `weights` are read.
    embedded: files and folders of `vit-jax embed`; features of these weights are read there instead of computed.
    by_class: whether precision, recall and F1 of each class are printed.
    csv: file for these numbers; None = none.
    source: of the config, for messages.
    overridden: settings on the command line, which override those of the checkpoint.
  """
  table = by_classes.Wanted(by_class, csv)
  if config is not None:
    by_classes.check(table, config)
  if weights:
    assert config is not None
    if to is not None and workdir is not None:
      raise UserError('--to: expected either --workdir or --to for the results of weights, got both. Remove one.')
    workdir = to or workdir
    specs = [evaluate_weights.WeightsSpec(one, reading) for one in report_card.split_weights(weights)]
    if len(specs) > 1 or config.name == report_card.NAME:
      if embedded:
        raise UserError('--embedded: expected one of --weights and another config than report_card, got more. Remove '
                        '--embedded.')
      if table.flag:
        raise UserError(f'{table.flag}: expected one of --weights and another config than report_card, got more. '
                        f'Remove {table.flag}.')
      return report_card.run(config, specs, overridden=overridden, workdir=workdir)
    spec, = specs
    return evaluate_weights.run(config, spec, overridden=overridden, workdir=workdir,
                                embedded=[pathlib.Path(path) for path in embedded], table=table)
  if embedded:
    raise UserError('--weights: expected weights for --embedded, got none. A run stores features in its own folder.')
  if reading.preprocess or reading.model or reading.view:
    raise UserError('--weights: expected weights for --preprocess, --model and --view, got none. A run has settings of '
                    'its own.')
  if workdir is None:
    raise UserError('--workdir: expected the directory of a run, got none. Set --workdir=DIR or --weights=FILE.')
  assert config is not None
  return _run(config, workdir, source=source, overridden=overridden, allow_nonfinite=reading.allow_nonfinite, to=to,
              table=table)


def _run(config: schema.Config, workdir: storage.Path, *, source: str, overridden: Collection[str],
         allow_nonfinite: bool, to: storage.Path | None, table: by_classes.Wanted) -> int:
  check.check(config)
  startup.start()
  check_is_run(workdir)
  out = to or workdir
  destination.check_writable(out, setting='--to' if to else '--workdir', advice=ELSEWHERE)
  config = inherit.resolve(config, overridden, workdir).config
  data = build.open_data(config)
  config = build.measured(config, data.train)
  mesh, shard, parts = build.open_run(config, data, workdir=workdir, overridden=overridden)
  config = parts.config
  console.begin_stage('reading the checkpoint')
  reader = checkpoint_reader.Reader(workdir / 'checkpoints')
  restored = reader.newest(parts.program.abstract_state, parts.program.shardings)
  if restored is None:
    raise UserError(f'--workdir={workdir}: expected a run with a checkpoint, got one that has no complete checkpoint '
                    'yet. Wait for its first one.')
  provenance.check(restored.meta, config, said=source, overridden=overridden)
  check_classes(tuple(restored.meta['class_names']), data.class_names)
  if not allow_nonfinite:
    check_finite(restored.state, f'--workdir={workdir}')
  step = int(restored.state.step)
  log.info('Evaluating step %s of %s.', f'{step:,}', workdir)
  shared = build.resources(config, data, parts.objective, mesh=mesh, shard=shard, workdir=out,
                           bar=config.train.progress)
  evaluators = evaluation.build(shared)
  console.begin_stage('evaluating')
  final = results.measure(evaluators, parts.objective, restored.state)
  console.end_stage()
  evaluate_weights.report(final, out, step, config, data, restored.meta['digests']['params'], shared.fingerprints(),
                          table)
  evaluate_weights.write_page(workdir, out)
  return 0


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


def check_classes(trained: tuple[str, ...], found: tuple[str, ...]) -> None:
  """Raises UserError unless the classes of the data are those the run was trained on, in the same order."""
  if trained != found:
    odd = [f'{a!r} / {b!r}' for a, b in zip(trained, found, strict=False) if a != b][:3]
    raise UserError(f'data: expected the {len(trained)} classes that the run was trained on, got {len(found)} classes; '
                    f'they differ: {", ".join(odd) or "one list is longer"}. Use data with the classes of the run.')
