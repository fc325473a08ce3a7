"""Labels by a trained classifier: label maps (`--job=prepare`), and the labels of Noisy Student's unlabeled images.

Label maps: each stored image is resized to the input size of the teacher without preserving the aspect ratio, so that
the map covers all of it. The classifier's head is applied to each patch token (of networks that pool by the mean, the
tokens before pooling), and the most likely classes are kept with their logits, as in the authors' generate_label.py
(zihangJiang/TokenLabeling@9dbfd59; their maps cover the central square of the image, these the complete image).

Noisy Student (arXiv 1911.04252): the teacher labels the images before the student's run begins, part by part, so that
a run that was stopped or killed resumes there. Each process of a run labels some of the parts; all must share the
directory. The teacher is not noised: it predicts as in an evaluation, with its own preprocessing.

`jobs/prepare.py` calls `run` for label maps, and `jobs/train.py` calls `ensure` before it opens the data of a student.
Both describe what they write (`answers.Info`), and `answers.write` calls `computing` for each part that is missing.
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
from vit_jax.weights.network import Weights
from vit_jax.weights.reading import AS_FOUND, Reading

log = logging.getLogger('vit_jax.jobs')
PER_PART = 4_096  # unlabeled images in a part; a process that is killed loses at most one part


class _Stopped(Exception):
  """Ends `answers.write` after a signal to stop; the parts that are finished stay."""


def run(config: schema.Config, where: str, to: pathlib.Path, reading: Reading = AS_FOUND) -> int:
  """Writes the label maps of a config's training images; exit status 0.

  Args:
    config: of the run that will use them; its data, `objective.top`, `batch_size` and `mesh` are used.
    where, reading: weights of the teacher, see `weights.loading.load`.
    to: directory to write.

  Raises:
    UserError: the objective is not token labeling, or the teacher has other classes or no classes per token.
  """
  check.check(config)
  task = config.objective
  if not isinstance(task, schema.TokenLabel):
    raise UserError(f'objective: expected TokenLabel, whose label maps a teacher writes, got {type(task).__name__}. '
                    'Name a config with this objective; to write images as shards, use vit-jax prepare '
                    '--data=folder:PATH, without --config.')
  startup.start()
  if jax.process_count() > 1:
    raise UserError(f'vit-jax prepare: expected one process, got {jax.process_count()}. Run it on one host.')
  teacher = _load_teacher(where, reading)
  data = build.open_data(config)
  source = data.train
  config = build.with_orientation(config, source)
  init_state.check_order(teacher, data.class_names, config.data)
  grid, preprocess = _token_grid(teacher), teacher.preprocess
  info = answers.Info(
      source.name, source.digest, len(source), grid, task.top, teacher.num_classes, answers.PER_PART,
      {'weights': teacher.source, 'image_px': list(preprocess.image_px)}, answers.LOGITS)
  resize = schema.Recipe(interpolation=preprocess.interpolation, antialias=preprocess.antialias,
                         truncate=preprocess.truncate, mean=preprocess.mean, std=preprocess.std)
  with _progress(len(source), shown=True) as show:
    is_new = answers.write(to, info, computing(
        teacher, source, info, recipe=transforms.read_as(resize, config.data.recipe), batch_size=config.batch_size,
        mesh=meshes.make(config.mesh), threads=config.data.threads, on_done=show), setting='--to')
  print(f'{"Written to" if is_new else "Already in"} {to}: {len(source):,} maps of {grid[0]} x {grid[1]}. Use them '
        f'with --config.objective.maps={to} --config.objective.map_grid={grid[0]},{grid[1]}')
  return 0


def ensure(config: schema.Config) -> str:
  """Labels the unlabeled images that a config's training needs, unless that is done. All processes call it.

  Returns:
    The signal that stopped it, or ''. A run of several processes ends at once on a signal.

  Raises:
    UserError: the teacher cannot be read or has other classes, or the directory holds something else.
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
  process, num_processes = jax.process_index(), jax.process_count()
  with (StopRequest() if num_processes == 1 else contextlib.nullcontext()) as request, \
      contextlib.suppress(_Stopped), _progress(len(source), shown=config.train.progress and not process) as show:
    def count(done: int) -> None:
      if request is not None and request.reason(0):
        raise _Stopped
      show(done)

    def wait_for_all(place: str) -> None:
      if num_processes > 1:
        multihost_utils.sync_global_devices(f'vit_jax {place}')

    answers.write(folder, info, computing(
        teacher, source, info, recipe=transforms.read_as(inference.eval_recipe(teacher), config.data.recipe),
        batch_size=config.batch_size // num_processes, mesh=meshes.make(schema.Mesh(), jax.local_devices()),
        threads=config.data.threads, on_done=count),
        setting=answers.LABELS, process=(process, num_processes), barrier=wait_for_all)
    log.info('Labels of %s images are in %s', f'{len(source):,}', folder)
    return ''
  assert request is not None
  return request.reason(0)


def _load_teacher(where: str, reading: Reading = AS_FOUND) -> Weights:
  teacher = loading.load(where, **reading._asdict())
  log.info('Teacher: %s', loading.text(teacher))
  return teacher


@contextlib.contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
  """Shows a progress bar with images per second; yields a function of the number of images that are done."""
  began = time.monotonic()
  with progress.Progress(total, start=0, shown=shown, unit='images') as bar:
    yield lambda done: bar.update(done, {'train/images_per_s': done / max(1e-9, time.monotonic() - began)})


def computing(teacher: Weights, source: Source, info: answers.Info, *, recipe: schema.Recipe, batch_size: int,
              mesh: Mesh, threads: int,
              on_done: Callable[[int], None]) -> Callable[[range], tuple[HostArray, HostArray]]:
  """Returns a function that reads, resizes and classifies a range of examples. Unreadable images get zeros.

  It returns the classes with the highest scores, `[n, h, w, k] i32`, and the scores, `[n, h, w, k] f32`; both are 0
  beyond the number of classes.

  Args:
    teacher: the classifier.
    source: the source of the examples.
    info: `scores` tells whether the teacher gives logits of each token or probabilities of the image; with `top`, which
      is k, and `grid`, which is h and w.
    recipe: how images are resized and normalized.
    batch_size: the number of images over all devices of the mesh.
    mesh: the devices, which all belong to this process.
    threads: the number of threads that read images; 0 = one per core.
    on_done: called with the number of examples that are done.
  """
  meshes.check_batch(mesh, batch_size, 1, what='batch_size')
  shard = meshes.local_rows(mesh)
  params = jax.device_put(inference.parameters(teacher), meshes.replicated(mesh))
  prepare = prepare_eval(recipe)

  @jax.jit
  def predict(params: PyTree, image: Array) -> tuple[Array, Array]:
    if info.scores == answers.LOGITS:
      features, _ = inference.backbone(teacher).apply(params['backbone'], params['state'], image, train=False, key=None)
      num_images, num_tokens, width = features.tokens.shape
      head = heads.build(teacher.head, teacher.model)
      logits_RC = head.apply(params['head'], features.tokens.reshape(-1, width))
      scores_BNC = logits_RC.reshape(num_images, num_tokens, -1).astype(jnp.float32)
    else:
      logits_BC = inference.function(teacher)(params, image).logits
      assert logits_BC is not None
      scores_BNC = jax.nn.softmax(logits_BC)[:, None]
    num = min(info.top, scores_BNC.shape[-1])
    scores_BNk, classes_BNk = jax.lax.top_k(scores_BNC, num)
    missing = ((0, 0), (0, 0), (0, info.top - num))
    return jnp.pad(classes_BNk, missing), jnp.pad(scores_BNk, missing)

  def compute(rows: range) -> tuple[HostArray, HostArray]:
    part = take(source, rows, name=source.name)
    loader = loaders.eval_loader(part, recipe=recipe, image_px=teacher.preprocess.image_px, batch_size=batch_size,
                                 shard=shard, threads=threads)
    classes, scores = [], []
    for batch in loader.batches():
      image = meshes.put_batch({'image': batch['image']}, mesh, shard)
      prepared = prepare(image, jax.random.key(0), jnp.zeros((), jnp.int32))['image']
      best, score = jax.device_get(predict(params, prepared))
      classes.append(best)
      scores.append(score * batch['mask'][:, None, None])
      on_done(min(rows.start + batch_size * len(classes), rows.stop))
    loader.close()
    shape = (len(rows), *info.grid, info.top)
    return tuple(np.concatenate(x)[:len(rows)].reshape(shape) for x in (classes, scores))  # type: ignore[return-value]

  return compute


def _token_grid(teacher: Weights) -> tuple[int, int]:
  """Returns rows and columns of the teacher's tokens. Raises UserError if its head does not apply to single tokens."""
  model = teacher.model
  pools_by_attention = isinstance(model, schema.ViT) and isinstance(model.pool, schema.Map)
  if pools_by_attention or (isinstance(model, schema.ViT) and model.last_norm is schema.LastNorm.POOLED):
    got = 'pools by attention' if pools_by_attention else 'normalizes the mean of its tokens'
    raise UserError(f'{teacher.source}: expected a teacher whose head applies to single tokens, got one that {got}. '
                    'Use a teacher that pools by the class token or by the mean of normalized tokens.')
  grids: list[tuple[int, int]] = []

  def apply(params: PyTree, state: PyTree, image: Array) -> None:
    features, _ = inference.backbone(teacher).apply(params, state, image, train=False, key=None)
    grids.append(features.grid)

  image = jax.ShapeDtypeStruct((1, *teacher.preprocess.image_px, 3), jnp.float32)
  jax.eval_shape(apply, teacher.params['backbone'], teacher.state, image)
  return grids[0]
