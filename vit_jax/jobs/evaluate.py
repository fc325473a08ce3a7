"""`--job=evaluate`: measures a run by its newest whole checkpoint, and writes `evaluate.json`.

The run may be under way: only `evaluate.json`, `predictions.npz` and `features/` are written, which training leaves
alone until it ends and measures for itself.
"""
from __future__ import annotations

import logging
from collections.abc import Collection

import jax

from vit_jax.config import check, provenance, schema
from vit_jax.core.errors import UserError
from vit_jax.data.pipeline import transforms
from vit_jax.evaluate import final as results
from vit_jax.jobs import build
from vit_jax.jobs import runtime as startup
from vit_jax.record import storage
from vit_jax.train import checkpoint_reader
from vit_jax.weights import inherit

log = logging.getLogger('vit_jax.jobs')


def run(config: schema.Config, workdir: storage.Path, *, said: str, overridden: Collection[str]) -> int:
  """Evaluates every view on every evaluation of the config; exit status 0.

  Args:
    config: that of the run, with what a person wants otherwise.
    workdir: the run directory.
    said: where the config comes from, for messages.
    overridden: settings that a person has given, which decide over those of the checkpoint.
  """
  check.check(config)
  startup.start()
  if not (workdir / 'checkpoints').is_dir():
    raise UserError(f'{workdir} holds no run: there is no {workdir / "checkpoints"}; want the --workdir of a training '
                    'run')
  config = inherit.resolve(config, overridden, workdir).config
  data = build.open_data(config)
  mesh, shard, parts = build.open_run(config, data, workdir=workdir, overridden=overridden)
  config = parts.config
  reader = checkpoint_reader.Reader(workdir / 'checkpoints')
  restored = reader.newest(parts.program.abstract_state, parts.program.shardings)
  if restored is None:
    raise UserError(f'{workdir}: expected a run with a checkpoint, got one that has no whole checkpoint yet. Wait '
                    'for its first one.')
  provenance.check(restored.meta, config, said=said, overridden=overridden)
  check_classes(tuple(restored.meta['class_names']), data.class_names)
  step = int(restored.state.step)
  log.info('Evaluating step %s of %s.', f'{step:,}', workdir)
  evaluators = build.evaluators(config, data, parts.objective, mesh=mesh, shard=shard, workdir=workdir,
                                bar=config.train.progress)
  final = results.measure(evaluators, parts.objective, restored.state)
  fit = transforms.eval_transform(config.data.recipe, config.image_px)
  results.write_evaluation(workdir, final, step, fit=fit)
  results.write_predictions(workdir, final, build.eval_source(config, data, final.name), data.class_names, fit)
  if jax.process_index() == 0:
    print_results(final, workdir, num_classes=len(data.class_names), recipe=config.data.recipe)
  return 0


def check_classes(trained: tuple[str, ...], found: tuple[str, ...]) -> None:
  """Raises UserError unless the classes of the data are those the run was trained on, in its order."""
  if trained != found:
    odd = [f'{a!r} against {b!r}' for a, b in zip(trained, found, strict=False) if a != b][:3]
    raise UserError(f'The run was trained on {len(trained)} classes, the data has {len(found)}, and they are not the '
                    f'same: {", ".join(odd) or "one list is longer"}; want data with the classes of the run')


def print_results(final: results.Final, workdir: storage.Path, *, num_classes: int, recipe: schema.Recipe) -> None:
  """A line a view of each evaluation, and where they are written."""
  for name, group in final.results.items():
    for view, result in group.items():
      numbers = '  '.join(f'{metric} {number:.4f}' for metric, number in result.metrics.items()
                          if results.is_telling(metric, num_classes))
      part = ', a part of them' if result.is_partial else ''
      print(f'{name} ({view}, {result.num_examples:,} images{part}): {numbers}')
    of_features = f', {s:.1f} s of it for features' if (s := final.feature_seconds[name]) else ''
    print(f'{name} took {final.seconds[name]:.1f} s{of_features}')
  print('Images are turned as their EXIF orientation says.' if recipe.exif_orientation else
        'The EXIF orientation of images is ignored, as in the published pipelines.')
  print(f'Written to {workdir / "evaluate.json"}', flush=True)
