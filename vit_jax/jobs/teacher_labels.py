"""Labels by a trained classifier: label maps (`--job=prepare`), and the labels of Noisy Student's unlabeled images.

Label maps: each stored image is resized to the input size of the teacher without preserving the aspect ratio, so that
the map covers the complete image. The head of the teacher is applied to each patch token (in networks that pool by the
mean, to the tokens before pooling), and the most likely classes are kept with their logits, as in the authors'
generate_label.py (zihangJiang/TokenLabeling@9dbfd59, whose maps cover only the central square of the image).

Noisy Student (arXiv 1911.04252): the teacher labels the images before the training of the student begins, part by part.
A run that was stopped or killed resumes after the last complete part. Each process of a run labels some of the parts;
all processes must share the directory. The teacher predicts without noise, with the preprocessing of an evaluation.

`jobs/prepare.py` calls `run` for label maps, and `jobs/train.py` calls `ensure` before it opens the data of a student.
Both functions call `answers.write`, which calls a `_Labeler` for each part that is missing.
"""
from __future__ import annotations

import contextlib
import logging
import pathlib
import time
from collections.abc import Callable, Iterator

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
PER_PART = 4_096  # unlabeled images in a part; a killed process loses at most one part


class _Stopped(Exception):
  """Is raised in `answers.write` after a signal to stop. Finished parts remain on the disk."""


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
  with _progress(len(source), shown=True) as show:
    is_new = answers.write(to, info, _Labeler(
        teacher, source, info, recipe=transforms.read_as(resize, config.data.recipe), batch_size=config.batch_size,
        mesh=meshes.make(config.mesh), threads=config.data.threads, on_done=show), setting='--to')
  print(f'{"Written to" if is_new else "Already in"} {to}: {len(source):,} maps of {grid[0]} x {grid[1]}. Use them '
        f'with --config.objective.maps={to} --config.objective.map_grid={grid[0]},{grid[1]}')
  return 0


def ensure(config: schema.Config) -> str:
  """Labels the unlabeled images that a config's training needs, unless labels exist. All processes call this function.

  Returns:
    The name of the signal that stopped the labeling, or ''. With several processes, a signal ends the program at once.

  Raises UserError if the teacher cannot be read or has other classes, or the directory has other content.
  """
  settings = config.data.pseudo
  folder = pathlib.Path(user_files.resolve(settings.labels, 'data.pseudo.labels'))
  if not settings.source or (folder / answers.INFO).is_file():
    return ''
  teacher = _load_teacher(settings.teacher)
  labeled = opening.open_split(config.data, config.data.train_split, image_px=config.image_px)
  init_state.check_order(teacher, labeled.class_names, config.data)
  source = opening.open_unlabeled(config.data, image_px=config.image_px)
  config = build.with_orientation(config, source)
  info = answers.Info(
      source.name, source.digest, len(source), (1, 1), settings.top, teacher.num_classes, PER_PART,
      {'teacher': redacted(settings.teacher), 'weights': teacher.source, 'image_px': list(teacher.preprocess.image_px),
       'classes': pseudo.classes_digest(labeled.class_names)},
      answers.PROBABILITIES)
  process_id, num_processes = jax.process_index(), jax.process_count()
  with (StopRequest() if num_processes == 1 else contextlib.nullcontext()) as request, \
      contextlib.suppress(_Stopped), _progress(len(source), shown=config.train.progress and not process_id) as show:
    def show_or_stop(num_done: int) -> None:
      if request is not None and request.reason(0):
        raise _Stopped
      show(num_done)

    def wait_for_all(barrier_name: str) -> None:
      if num_processes > 1:
        multihost_utils.sync_global_devices(f'vit_jax {barrier_name}')

    answers.write(folder, info, _Labeler(
        teacher, source, info, recipe=transforms.read_as(inference.eval_recipe(teacher), config.data.recipe),
        batch_size=config.batch_size // num_processes, mesh=meshes.make(schema.Mesh(), jax.local_devices()),
        threads=config.data.threads, on_done=show_or_stop),
        setting=answers.LABELS, process=(process_id, num_processes), barrier=wait_for_all)
    log.info('Labels of %s images are in %s', f'{len(source):,}', folder)
    return ''
  assert request is not None  # `_Stopped` was raised
  return request.reason(0)


def _load_teacher(address: str, reading: Reading = AS_FOUND) -> Weights:
  teacher = loading.load(address, **reading._asdict())
  log.info('Teacher: %s', loading.text(teacher))
  return teacher


@contextlib.contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
  """Shows a progress bar with images per second; yields a function that updates the bar to a number of done images."""
  began_s = time.monotonic()
  with progress.Progress(total, start=0, shown=shown, unit='images') as bar:
    yield lambda done: bar.update(done, {'train/images_per_s': done / max(1e-9, time.monotonic() - began_s)})


class _Labeler:
  """Reads, resizes and classifies ranges of examples; `answers.write` calls the object for each part.

  Args:
    teacher, source: the classifier, and the source of the examples.
    info: the kind of scores (logits of tokens or probabilities of images), `top` (k below), `grid` (h and w below).
    recipe: how images are resized and normalized.
    mesh, batch_size: the devices, which all belong to this process, and the number of images over all devices.
    threads: the number of threads that read images; 0 = one per core.
    on_done: called with the number of finished examples of the source.
  """

  def __init__(self, teacher: Weights, source: Source, info: answers.Info, *, recipe: schema.Recipe, batch_size: int,
               mesh: Mesh, threads: int, on_done: Callable[[int], None]) -> None:
    meshes.check_batch(mesh, batch_size, 1, what='batch_size')
    self._teacher, self._source, self._info, self._mesh, self._on_done = teacher, source, info, mesh, on_done
    self._recipe, self._batch_size, self._threads = recipe, batch_size, threads
    self._shard = meshes.local_rows(mesh)
    self._params = jax.device_put(inference.parameters(teacher), meshes.replicated(mesh))
    self._prepare, self._predict = prepare_eval(recipe), jax.jit(self._top_classes)

  def __call__(self, rows: range) -> tuple[HostArray, HostArray]:
    """Returns the classes with the highest scores, `[n, h, w, k] i32`, and the scores, `[n, h, w, k] f32`.

    The scores of unreadable images are 0. Beyond the number of classes, classes and scores are 0.
    """
    part = take(self._source, rows, name=self._source.name)
    loader = loaders.eval_loader(part, recipe=self._recipe, image_px=self._teacher.preprocess.image_px,
                                 batch_size=self._batch_size, shard=self._shard, threads=self._threads)
    classes, scores = [], []
    for batch in loader.batches():
      image = meshes.put_batch({'image': batch['image']}, self._mesh, self._shard)
      prepared = self._prepare(image, jax.random.key(0), jnp.zeros((), jnp.int32))['image']
      batch_classes, batch_scores = jax.device_get(self._predict(self._params, prepared))
      classes.append(batch_classes)
      scores.append(batch_scores * batch['mask'][:, None, None])
      self._on_done(min(rows.start + self._batch_size * len(classes), rows.stop))
    loader.close()
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
