"""Features of a teacher for the crops of a run, stored by `--job=prepare` for objective FeatureDistill.

The batches are those of the run's own loader, so the teacher sees the crops that the student will see. Their order and
crops follow from the seed, the data and the recipe; batch size, network, length and optimizer of the run may differ.
"""
from __future__ import annotations

import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.device.prepare import normalize
from vit_jax.data.labels import stored_features
from vit_jax.data.labels.stored_features import PATCHES, POOLED, SUMS, Compute, Info
from vit_jax.jobs import build
from vit_jax.jobs import runtime as startup
from vit_jax.objectives import feature_distill, kinds
from vit_jax.parallel import mesh as meshes
from vit_jax.record import progress
from vit_jax.weights import inherit, init_state, loading
from vit_jax.weights.reading import Reading

log = logging.getLogger('vit_jax.jobs')


def run(config: schema.Config, where: str, to: pathlib.Path, reading: Reading) -> int:
  """Writes the features of a teacher for the first `objective.stored_epochs` passes of a run; exit status 0.

  Args:
    config: of the run that will use them, but for `objective.features`.
    where, reading: weights of the teacher, see `weights.loading.load`.
    to: directory to write.

  Raises:
    UserError: the config or the teacher cannot be used, or the directory has other content.
  """
  startup.start()
  if jax.process_count() > 1:
    raise UserError(f'vit-jax prepare: expected one process, got {jax.process_count()}. Run it on one host.')
  assert isinstance(config.objective, schema.FeatureDistill), config.objective
  epochs = config.objective.stored_epochs
  found = loading.load(where, **reading._asdict())
  log.info('Teacher: %s', loading.text(found))
  teacher = inherit.feature_teacher(dataclasses.replace(config.objective.teacher, weights=where), found, config.model)
  objective = dataclasses.replace(config.objective, teacher=teacher, features='', stored_epochs=1)
  config = dataclasses.replace(config, objective=objective)
  check.check(config)
  data = build.open_data(dataclasses.replace(config, data=dataclasses.replace(
      config.data, in_memory=schema.InMemory.NO)))
  spec = kinds.of(config)
  assert isinstance(spec, feature_distill.Spec), spec
  trained = spec.teacher()
  params, _ = init_state.adapted_teacher(found, config)
  shapes = jax.eval_shape(trained.features, params, jax.ShapeDtypeStruct((1, *config.image_px, 3), np.float32))
  num = shapes[PATCHES].shape[1] if PATCHES in shapes else 0
  info = Info(epochs * len(data.train), shapes[POOLED].shape[-1], num, {
      'source': data.train.name, 'digest': data.train.digest, 'seed': config.seed, 'weights': found.source,
      'teacher_px': list(teacher.image_px(config.image_px)), 'image_px': list(config.image_px)})
  began = time.monotonic()
  with progress.Progress(info.num_rows, start=0, shown=config.train.progress, unit='images') as bar:
    is_new = stored_features.write(to, info, computing(config, data, trained, params, lambda done: bar.update(
        done, {'train/images_per_s': done / max(1e-9, time.monotonic() - began)})))
  print(f'{"Written to" if is_new else "Already in"} {to}: {info.num_rows:,} crops, {info.width} features'
        f'{f" of each and of {num} patches" * bool(num)}. Use them with --config.objective.features={to}'
        f'{f" --config.objective.stored_epochs={epochs}" * (epochs > 1)}')
  return 0


def computing(config: schema.Config, data: build.Data, trained: feature_distill.Trained, params: object,
              on_done: Callable[[int], None]) -> Compute:
  """Returns a function that maps positions of the run's stream to features; `on_done` gets the number that is done."""
  mesh, shard = build.open_mesh(config)
  loader = build.train_loader(config, data._replace(in_memory=False), shard)
  params = jax.device_put(params, meshes.replicated(mesh))
  size, recipe = config.batch_size, config.data.recipe
  apply = jax.jit(lambda params, image: trained.features(params, normalize(image, recipe)))

  def compute(rows: range) -> dict[str, HostArray]:
    parts: list[dict[str, HostArray]] = []
    first, last = rows.start // size, -(-rows.stop // size)
    for number, batch in zip(range(first, last), loader.batches(first), strict=False):
      image = meshes.put_batch({'image': batch['image']}, mesh, shard)['image']
      own = np.arange(number * size, (number + 1) * size)
      inside = (own >= rows.start) & (own < rows.stop)
      found = {**jax.device_get(apply(params, image)), SUMS: stored_features.checksums(batch['image'])}
      parts.append({name: x[inside] for name, x in found.items()})
      on_done(min((number + 1) * size, rows.stop))
    loader.close()
    return {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}

  return compute
