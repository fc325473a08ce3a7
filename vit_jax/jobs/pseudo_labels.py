"""The teacher's part of Noisy Student (arXiv 1911.04252): it labels pictures before the student's run begins.

Part by part, so that a run that is stopped or killed goes on where it was. Each process of a run takes some of the
parts; they must see the same directory. The teacher is not noised: it predicts as in an evaluation, with the
preprocessing of its own.
"""
from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import time

import jax
from jax.experimental import multihost_utils

from vit_jax.config import schema
from vit_jax.core.types import Array, PyTree
from vit_jax.data.pipeline import transforms
from vit_jax.data.source import Source
from vit_jax.data.sources import label_maps, local_paths, opening, pseudo
from vit_jax.jobs import inference, init_state, token_labels
from vit_jax.parallel import mesh as meshes
from vit_jax.record import progress
from vit_jax.train.stopping import StopRequest
from vit_jax.weights import loading
from vit_jax.weights.loading import Weights

log = logging.getLogger('vit_jax.jobs')
PER_PART = 4_096  # examples that a kill may cost


class _Stopped(Exception):
  """This process was asked to stop."""


def ensure(config: schema.Config) -> str:
  """Writes the labels that a config's training wants, if they are not there. All processes call it.

  Returns:
    The signal by which it was stopped before it was done, or ''. Several processes end by it at once.

  Raises:
    UserError: the teacher cannot be had, or knows other classes; or the directory holds something else.
  """
  wanted = config.data.pseudo
  folder = pathlib.Path(local_paths.resolve(wanted.labels, 'data.pseudo.labels'))
  if not wanted.source or (folder / label_maps.INFO).is_file():
    return ''
  found = loading.load(wanted.teacher)
  log.info('Teacher: %s', loading.text(found))
  own = opening.open_split(config.data, config.data.train_split, image_px=config.image_px)
  init_state.check_order(found, own.class_names, is_listed=bool(config.data.classes))
  source = pseudo.open_unlabelled(config.data, image_px=config.image_px)
  info = label_maps.Info(
      source.name, source.digest, len(source), (1, 1), wanted.top, found.num_classes, PER_PART,
      {'teacher': wanted.teacher, 'weights': found.source, 'image_px': list(found.preprocess.image_px)})
  is_alone = jax.process_count() == 1
  with StopRequest() if is_alone else contextlib.nullcontext() as asked:
    try:
      _write(config, found, source, info, folder, asked)
    except _Stopped:
      assert asked is not None
      return asked.reason(0)
  return ''


def _write(config: schema.Config, found: Weights, source: Source, info: label_maps.Info, folder: pathlib.Path,
           asked: StopRequest | None) -> None:
  """Labels the parts of this process, with a progress bar."""
  started_s, share = time.monotonic(), (jax.process_index(), jax.process_count())
  with progress.Progress(len(source), start=0, shown=config.train.progress and not share[0]) as bar:
    def count(done: int) -> None:
      if asked is not None and asked.reason(0):
        raise _Stopped
      bar.update(done, {'train/images_per_s': done / max(1e-9, time.monotonic() - started_s)})

    compute = token_labels.computing(
        found, source, jax.jit(functools.partial(classify, found, top=info.top)),
        recipe=transforms.read_as(inference.eval_recipe(found), config.data.recipe),
        batch_size=config.batch_size // share[1], mesh=meshes.make(schema.Mesh(), jax.local_devices()),
        threads=config.data.threads, grid=(1, 1), on_done=count)
    label_maps.write(folder, info, compute, share=share, meet=_meet)
  log.info('Labels of %s pictures are in %s', f'{len(source):,}', folder)


def classify(found: Weights, params: PyTree, image: Array, *, top: int) -> tuple[Array, Array]:
  """`classes [B, 1, top] i32` and probabilities `[B, 1, top]` f32 of normalised images."""
  logits_BC = inference.function(found)(params, image).logits
  assert logits_BC is not None
  return token_labels.highest(jax.nn.softmax(logits_BC)[:, None], top=top)


def _meet(place: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(f'vit_jax {place}')
