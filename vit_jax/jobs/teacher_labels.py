"""Labels by a trained classifier: label maps (`--job=prepare`), and the labels of Noisy Student's unlabeled images.

Label maps: each stored image is resized to the input size of the teacher without preserving the aspect ratio, so that
the map covers the complete image. The head of the teacher was trained on the class token or on the mean of the tokens.
Here the head is applied to each patch token, and the most likely classes are kept with their logits, as in the authors'
generate_label.py (zihangJiang/TokenLabeling@9dbfd59, whose maps cover only the central square of the image).

Noisy Student (arXiv 1911.04252): the teacher labels the images before the training of the student begins, part by part.
A run that was stopped or killed resumes after the last complete part. Each process of a run labels some of the parts;
all processes must share the directory. The teacher predicts without noise, with the preprocessing of an evaluation.

`jobs/prepare.py` calls `run` for label maps, and `jobs/train.py` calls `ensure` before it opens the data of a student.
Both functions call `answers.write`, which calls a `_Labeler` for each part that is missing.
"""
from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError, redacted
from vit_jax.core.types import Array, HostArray, PyTree
from vit_jax.data import answers, opening, user_files
from vit_jax.data import loader as loaders
from vit_jax.data.device.prepare import prepare_eval
from vit_jax.data.formats import pseudo
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Source, take
from vit_jax.jobs import build, startup
from vit_jax.models import heads
from vit_jax.parallel import mesh as meshes
from vit_jax.record import progress
from vit_jax.train.stopping import StopRequest
from vit_jax.weights import inference, init_state, loading
from vit_jax.weights.hints import AS_FOUND, Reading
from vit_jax.weights.network import Weights

log = logging.getLogger('vit_jax.jobs')
_IMAGES_PER_PART_OF_LABELS = 4_096  # a killed process loses at most one part


class _Stopped(Exception):
  """Ends `answers.write` after the signal that the argument names. Finished parts remain on the disk."""


def run(config: schema.Config, teacher_weights: str, to: pathlib.Path, reading: Reading = AS_FOUND) -> int:
  """Writes the label maps of a config's training images; returns the exit status 0.

  Args:
    config: the config of the run that will use the maps; only data, `objective.top`, `batch_size` and `mesh` are read.
    teacher_weights, reading: weights of the teacher, see `weights.loading.load`.
    to: the directory to write.

  Raises UserError if the objective is not token labeling, or the teacher has other classes or no classes per token.
  """
  check.check(config)
  objective = config.objective
  if not isinstance(objective, schema.TokenLabel):
    raise UserError('objective: expected TokenLabel, whose label maps a teacher writes, got '
                    f'{type(objective).__name__}. Name a config with this objective; to write images as shards, use '
                    'vit-jax prepare --data=folder:PATH, without --config.')
  startup.start()
  if jax.process_count() > 1:
    raise UserError(f'vit-jax prepare: expected one process, got {jax.process_count()}. Run it on one host.')
  teacher = _load_teacher(teacher_weights, reading)
  data = build.open_data(config)
  source = data.train
  config = build.with_orientation(config, source)
  init_state.check_order(teacher, data.class_names, config.data)
  grid = _token_grid(teacher)
  preprocess = teacher.preprocess
  info = answers.Info(
      source.name, source.digest, len(source), grid, objective.top, teacher.num_classes, answers.PER_PART,
      {'weights': teacher.source, 'image_px': list(preprocess.image_px)}, answers.LOGITS)
  resize = schema.Recipe(interpolation=preprocess.interpolation, antialias=preprocess.antialias,
                         truncate=preprocess.truncate, mean=preprocess.mean, std=preprocess.std)
  labeler = _Labeler(teacher, source, info, recipe=transforms.read_as(resize, config.data.recipe),
                     batch_size=config.batch_size, mesh=meshes.make(config.mesh), threads=config.data.threads)
  with progress.Progress(len(source), start=0, shown=True, unit='images') as bar:
    is_new = answers.write(to, info, functools.partial(labeler, on_done=bar.update), setting='--to')
  print(f'{"Written to" if is_new else "Already in"} {to}: {len(source):,} maps of {grid[0]} x {grid[1]}. Use them '
        f'with --config.objective.maps={to} --config.objective.map_grid={grid[0]},{grid[1]}')
  return 0


def ensure(config: schema.Config) -> str:
  """Labels the unlabeled images that a config's training needs, unless labels exist. All processes call this function.

  Returns:
    The name of the signal that stopped the labeling, or ''. With several processes, a signal ends the program at once.

  Raises UserError if the teacher, the content of the directory, or the batch size does not fit the config.
  """
  settings = config.data.pseudo
  folder = pathlib.Path(user_files.resolve(settings.labels, 'data.pseudo.labels'))
  if not settings.source or (folder / answers.INFO).is_file():
    return ''
  num_devices = jax.device_count()
  if config.mesh.tensor or config.batch_size >= num_devices:  # else `parallel/layout.py` sets a `tensor` that fits
    meshes.check_batch(meshes.make(config.mesh), config.batch_size, 1, what='batch_size')
  teacher = _load_teacher(settings.teacher)
  labeled = opening.open_split(config.data, config.data.train_split, image_px=config.image_px)
  init_state.check_order(teacher, labeled.class_names, config.data)
  source = opening.open_unlabeled(config.data, image_px=config.image_px)
  config = build.with_orientation(config, source)
  info = answers.Info(
      source.name, source.digest, len(source), (1, 1), settings.top, teacher.num_classes, _IMAGES_PER_PART_OF_LABELS,
      {'teacher': redacted(settings.teacher), 'weights': teacher.source, 'image_px': list(teacher.preprocess.image_px),
       'classes': pseudo.classes_digest(labeled.class_names)},
      answers.PROBABILITIES)
  mesh = meshes.make(schema.Mesh(), jax.local_devices())
  images_per_device = -(-config.batch_size // num_devices)  # rounded up: a run with mesh.tensor may have too few images
  recipe = transforms.read_as(inference.eval_recipe(teacher), config.data.recipe)
  labeler = _Labeler(teacher, source, info, recipe=recipe, batch_size=images_per_device * mesh.size, mesh=mesh,
                     threads=config.data.threads)
  process_id, num_processes = jax.process_index(), jax.process_count()
  request = StopRequest() if num_processes == 1 else None
  bar = progress.Progress(len(source), start=0, shown=config.train.progress and process_id == 0, unit='images')

  def show_or_stop(position: int, values: dict[str, float]) -> None:
    if request is not None and request.reason(0):
      raise _Stopped(request.reason(0))
    bar.update(position, values)

  def wait_for_all(barrier_name: str) -> None:
    if num_processes > 1:
      multihost_utils.sync_global_devices(f'vit_jax {barrier_name}')

  with request or contextlib.nullcontext(), bar:
    try:
      answers.write(folder, info, functools.partial(labeler, on_done=show_or_stop), setting=answers.LABELS,
                    process=(process_id, num_processes), barrier=wait_for_all)
    except _Stopped as stopped:
      return str(stopped)
    log.info('Labels of %s images are in %s', f'{len(source):,}', folder)
    return request.reason(0) if request else ''  # a signal may follow the last batch


def _load_teacher(address: str, reading: Reading = AS_FOUND) -> Weights:
  teacher = loading.load(address, **reading._asdict())
  log.info('Teacher: %s', loading.text(teacher))
  return teacher


class _Labeler:
  """Reads, resizes and classifies ranges of examples; `answers.write` calls the object for each part.

  Args:
    teacher, source: the classifier, and the source of the examples.
    info: the kind of scores (logits of tokens or probabilities of images), `top` (k below), `grid` (h and w below).
    recipe: how images are resized and normalized.
    mesh, batch_size: the devices, which all belong to this process, and the number of images over all devices.
    threads: the number of threads that read images; 0 = one per core.
  """

  def __init__(self, teacher: Weights, source: Source, info: answers.Info, *, recipe: schema.Recipe, batch_size: int,
               mesh: Mesh, threads: int) -> None:
    meshes.check_batch(mesh, batch_size, 1, what='batch_size')
    self._teacher, self._source, self._info, self._mesh = teacher, source, info, mesh
    self._recipe, self._batch_size, self._threads = recipe, batch_size, threads
    self._num_labeled, self._began_s = 0, time.monotonic()
    self._shard = meshes.local_shard(mesh)
    self._params = jax.device_put(inference.parameters(teacher), meshes.replicated(mesh))
    self._prepare, self._predict = prepare_eval(recipe), jax.jit(self._top_classes)

  def __call__(self, rows: range, *, on_done: Callable[[int, dict[str, float]], None]) -> tuple[HostArray, HostArray]:
    """Returns the classes with the highest scores, `[n, h, w, k] i32`, and the scores, `[n, h, w, k] f32`.

    The scores of unreadable images are 0. Beyond the number of classes, classes and scores are 0. Calls `on_done` after
    each batch with the position in the source, and with the images per second of all processes since their start.
    """
    part = take(self._source, rows, name=self._source.name)
    loader = loaders.eval_loader(part, recipe=self._recipe, image_px=self._teacher.preprocess.image_px,
                                 batch_size=self._batch_size, shard=self._shard, threads=self._threads)
    classes, scores = [], []
    with contextlib.closing(loader):
      for batch in loader.batches():
        image = meshes.put_batch({'image': batch['image']}, self._mesh, self._shard)
        # An evaluation does not use the key and the step.
        prepared = self._prepare(image, jax.random.key(0), jnp.zeros((), jnp.int32))['image']
        batch_classes, batch_scores = jax.device_get(self._predict(self._params, prepared))
        classes.append(batch_classes)
        scores.append(batch_scores * batch['mask'][:, None, None])
        position = min(rows.start + self._batch_size * len(classes), rows.stop)
        num_by_all = (self._num_labeled + position - rows.start) * jax.process_count()  # equal numbers by each process
        on_done(position, {'train/images_per_s': num_by_all / max(1e-9, time.monotonic() - self._began_s)})
    self._num_labeled += len(rows)
    shape = (len(rows), *self._info.grid, self._info.top)
    return (np.concatenate(classes)[:len(rows)].reshape(shape), np.concatenate(scores)[:len(rows)].reshape(shape))

  def _top_classes(self, params: PyTree, image: Array) -> tuple[Array, Array]:
    """Returns classes and scores `[B, N, k]`; N is the number of tokens for logits, and 1 for probabilities."""
    teacher, top = self._teacher, self._info.top
    if self._info.scores == answers.LOGITS:
      features, _ = inference.backbone(teacher).apply(params['backbone'], params['state'], image, train=False, key=None)
      num_images, num_tokens, width = features.tokens.shape
      head = heads.build(teacher.head, teacher.model)
      logits_RC = head.apply(params['head'], features.tokens.reshape(-1, width))
      scores_BNC = logits_RC.reshape(num_images, num_tokens, -1).astype(jnp.float32)
    else:
      logits_BC = inference.function(teacher)(params, image).logits
      assert logits_BC is not None
      scores_BNC = jax.nn.softmax(logits_BC)[:, None]
    num_kept = min(top, scores_BNC.shape[-1])
    scores_BNk, classes_BNk = jax.lax.top_k(scores_BNC, num_kept)
    padding = ((0, 0), (0, 0), (0, top - num_kept))
    return jnp.pad(classes_BNk, padding), jnp.pad(scores_BNk, padding)


def _token_grid(teacher: Weights) -> tuple[int, int]:
  """Returns rows and columns of the teacher's tokens. Raises UserError if its head does not apply to single tokens."""
  model = teacher.model
  pools_by_attention = isinstance(model, schema.ViT) and isinstance(model.pool, schema.Map)
  if pools_by_attention or (isinstance(model, schema.ViT) and model.last_norm is schema.LastNorm.POOLED):
    problem = 'pools by attention' if pools_by_attention else 'normalizes the mean of its tokens'
    raise UserError(f'{teacher.source}: expected a teacher whose head applies to single tokens, got one that '
                    f'{problem}. Use a teacher that pools by the class token or by the mean of normalized tokens.')
  grids: list[tuple[int, int]] = []  # `eval_shape` cannot return `features.grid`, which is no array

  def apply(params: PyTree, state: PyTree, image: Array) -> None:
    features, _ = inference.backbone(teacher).apply(params, state, image, train=False, key=None)
    grids.append(features.grid)

  image = jax.ShapeDtypeStruct((1, *teacher.preprocess.image_px, 3), jnp.float32)
  jax.eval_shape(apply, teacher.params['backbone'], teacher.state, image)
  return grids[0]
