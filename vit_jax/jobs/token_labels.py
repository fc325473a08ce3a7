"""`--job=prepare --config=… --weights=… --to=…`: label maps of a config's training pictures, by any trained classifier.

Each stored picture is squashed to the size that the teacher knows, so that every part of it is on the map. The
classifier's head is applied to each patch token (of networks that pool by the mean: what the head sees the mean of)
and the most likely classes are kept, with their logits, as in the authors' generate_label.py
(zihangJiang/TokenLabeling@9dbfd59; there the maps are of the central square of the image, here of all of it).
"""
from __future__ import annotations

import functools
import logging
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray, PyTree
from vit_jax.data.pipeline import loader as loaders
from vit_jax.data.pipeline import transforms
from vit_jax.data.source import Part, Parts, Source
from vit_jax.data.sources import label_maps
from vit_jax.jobs import build, inference, init_state
from vit_jax.jobs import runtime as startup
from vit_jax.models import heads
from vit_jax.parallel import mesh as meshes
from vit_jax.record import progress
from vit_jax.weights import loading
from vit_jax.weights.loading import Weights

log = logging.getLogger('vit_jax.jobs')

Compute = Callable[[range], tuple[HostArray, HostArray]]


def run(config: schema.Config, where: str, to: pathlib.Path, *, preprocess: str = '', model: str = '',
        view: str = '') -> int:
  """Writes the maps.

  Args:
    config: of the run that will use them: its data, `objective.top`, `batch_size` and `mesh` count.
    where: the weights of the teacher, as for `weights.loading.load`, like `preprocess`, `model` and `view`.
    to: directory to write.

  Returns:
    The exit status.

  Raises:
    UserError: the config is not one of token labelling, the teacher knows other classes or no single tokens, or
      something else is in the way.
  """
  check.check(config)
  if not isinstance(config.objective, schema.TokenLabel):
    raise UserError(f'config {config.name!r} has objective {type(config.objective).__name__}; label maps are for '
                    'TokenLabel')
  startup.start()
  if jax.process_count() > 1:
    raise UserError(f'{jax.process_count()} processes: label maps are written by one; want one host')
  found = loading.load(where, preprocess=preprocess, model=model, view=view)
  log.info('Teacher: %s', loading.text(found))
  data = build.open_data(config)
  init_state.check_order(found, data.class_names, is_listed=bool(config.data.classes))
  _check_tokens(found)
  write(config, config.objective, found, data.train, to)
  return 0


def write(config: schema.Config, task: schema.TokenLabel, found: Weights, source: Source, to: pathlib.Path) -> None:
  """Writes the maps of a source with a progress bar, and says how to use them."""
  predict = functools.partial(classify_tokens, found, top=task.top)
  grid = _grid(found)
  info = label_maps.Info(
      source.name, source.digest, len(source), grid, task.top, found.num_classes, label_maps.PER_PART,
      {'weights': found.source, 'image_px': list(found.preprocess.image_px)}, label_maps.LOGITS)
  started_s = time.monotonic()
  with progress.Progress(len(source), start=0, shown=True) as bar:
    def count(done: int) -> None:
      bar.update(done, {'train/images_per_s': done / max(1e-9, time.monotonic() - started_s)})

    mesh = meshes.make(config.mesh)
    recipe = transforms.read_as(_recipe(found), config.data.recipe)
    compute = computing(found, source, jax.jit(predict), recipe=recipe, batch_size=config.batch_size, mesh=mesh,
                        threads=config.data.threads, grid=grid, on_done=count)
    is_new = label_maps.write(to, info, compute)
  print(f'{"Written" if is_new else "There already"}: {to} ({len(source):,} maps of {grid[0]} x {grid[1]}). Use them '
        f'by --config.objective.maps={to} --config.objective.map_grid={grid[0]},{grid[1]}')


def classify_tokens(found: Weights, params: PyTree, image: Array, *, top: int) -> tuple[Array, Array]:
  """`classes [B, N, top] i32` and logits `[B, N, top]` f32 of each token of normalised images."""
  backbone, head = build.build_backbone(inference.run_config(found)), heads.Head(found.head)
  features, _ = backbone.apply(params['backbone'], params['state'], image, train=False, key=None)
  num_images, num_tokens, width = features.tokens.shape
  logits_RC = head.apply(params['head'], features.tokens.reshape(-1, width))
  return highest(logits_RC.reshape(num_images, num_tokens, -1).astype(jnp.float32), top=top)


def highest(scores_BNC: Array, *, top: int) -> tuple[Array, Array]:
  """The classes with the highest scores, `[B, N, top] i32`, and these; zeros beyond the number of classes."""
  num = min(top, scores_BNC.shape[-1])
  scores_BNk, classes_BNk = jax.lax.top_k(scores_BNC, num)
  missing = ((0, 0), (0, 0), (0, top - num))
  return jnp.pad(classes_BNk, missing), jnp.pad(scores_BNk, missing)


def computing(found: Weights, source: Source, predict: Callable[..., tuple[Array, Array]], *, recipe: schema.Recipe,
              batch_size: int, mesh: Mesh, threads: int, grid: tuple[int, int],
              on_done: Callable[[int], None]) -> Compute:
  """How the maps of some examples are made: read, resize, classify. Pictures that cannot be decoded get zeros.

  Args:
    found: the teacher.
    source: of the examples.
    predict: parameters and images to `classes [B, N, k]` and `scores [B, N, k]`.
    recipe: how pictures are resized and normalised.
    batch_size: over the devices of the mesh, which are all of this process.
    mesh: where it is computed.
    threads: that read pictures; 0 = one a core.
    grid: rows and columns of N.
    on_done: told how far it is, in examples.
  """
  meshes.check_batch(mesh, batch_size, 1, what='batch_size')
  shard = meshes.local_rows(mesh)
  params = jax.device_put(inference.parameters(found), meshes.replicated(mesh))
  prepare = transforms.prepare_eval(recipe)

  def compute(rows: range) -> tuple[HostArray, HostArray]:
    part = Parts([Part(source, rows.start, rows.stop)], name=source.name)
    loader = loaders.eval_loader(part, recipe=recipe, image_px=found.preprocess.image_px, batch_size=batch_size,
                                 shard=shard, threads=threads, workers=0)
    classes, scores = [], []
    for batch in loader.batches():
      image = meshes.put_batch({'image': batch['image']}, mesh, shard)
      prepared = prepare(image, jax.random.key(0), jnp.zeros((), jnp.int32))['image']
      one = jax.device_get(predict(params, prepared))
      classes.append(one[0])
      scores.append(one[1] * batch['mask'][:, None, None])
      on_done(min(rows.start + batch_size * len(classes), rows.stop))
    loader.close()
    shape = (len(rows), *grid, classes[0].shape[-1])
    return tuple(np.concatenate(x)[:len(rows)].reshape(shape) for x in (classes, scores))  # type: ignore[return-value]

  return compute


def _recipe(found: Weights) -> schema.Recipe:
  """The teacher's, but squashing instead of cropping."""
  how = found.preprocess
  return schema.Recipe(interpolation=how.interpolation, antialias=how.antialias, mean=how.mean, std=how.std)


def _grid(found: Weights) -> tuple[int, int]:
  """Rows and columns of the teacher's tokens."""
  backbone = build.build_backbone(inference.run_config(found))
  image = jax.ShapeDtypeStruct((1, *found.preprocess.image_px, 3), jnp.float32)
  grids: list[tuple[int, int]] = []

  def tell(params: PyTree, state: PyTree, image: Array) -> Array:
    features, _ = backbone.apply(params, state, image, train=False, key=None)
    grids.append(features.grid)
    return features.tokens

  jax.eval_shape(tell, found.params['backbone'], found.state, image)
  return grids[0]


def _check_tokens(found: Weights) -> None:
  model = found.model
  if isinstance(model, schema.ViT) and model.pool is schema.Pool.MAP:
    raise UserError(f'{found.source} pools by attention, so its head knows no single tokens; want a teacher that pools '
                    'by the class token or the mean')
  if isinstance(model, schema.ViT) and model.norm_after_pool:
    raise UserError(f'{found.source}: expected a teacher that normalises each token, got one that normalises their '
                    'mean, so that its head knows no single tokens. Take another teacher.')
