"""What loaded weights give for any number of images, as files, with progress: `embed`, and the tables of `predict`."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from vit_jax import __version__
from vit_jax.config import schema
from vit_jax.core import failures, trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Source
from vit_jax.evaluate import embedding, features, resources, store
from vit_jax.evaluate.embedding import Extractor, TextRows, Work
from vit_jax.evaluate.features import Reader
from vit_jax.evaluate.store import Notes
from vit_jax.models import backbones, intermediates
from vit_jax.parallel import hosts
from vit_jax.parallel import mesh as meshes
from vit_jax.record import progress
from vit_jax.train.stopping import StopRequest
from vit_jax.weights import inference
from vit_jax.weights.network import Weights

log = logging.getLogger('vit_jax.jobs')
FEATURES, PROBABILITIES, TOKENS, VECTORS = 'features', 'probabilities', 'tokens', 'vectors'
BATCH = 64


class Stopped(Exception):
  """A signal to stop came; what is finished is kept. The text is its name."""


@dataclasses.dataclass(frozen=True)
class Wanted:
  """What to compute for each image.

  what: `features`, `probabilities`, `tokens` or `vectors`.
  blocks: features after these blocks, concatenated; () = those that the head receives.
  project: maps features to the vectors that are compared with those of texts.
  """
  what: str = FEATURES
  blocks: tuple[int, ...] = ()
  project: Callable[[Array], Array] | None = None

  def reader(self, found: Weights) -> Reader:
    """Returns the function of parameters and images.

    Raises UserError if the weights have no head, or no such blocks.
    """
    view = inference.view(found)
    if self.blocks and self.what != FEATURES:
      raise UserError(f'--blocks: expected --what=features, got --what={self.what}. Remove --blocks.')
    if self.what == PROBABILITIES and (not found.num_classes or not found.head.bias):
      raise UserError(f'--what: expected features or tokens for {found.source}, which has no classification head, got '
                      'probabilities. Use weights that were trained on classes.')
    if self.blocks:
      backbone = backbones.build(found.model, found.preprocess.image_px)
      if not intermediates.is_layered(backbone):
        raise UserError(f'--blocks: expected none for {type(found.model).__name__}, which has no blocks to read after, '
                        f'got {", ".join(map(str, self.blocks))}. Remove --blocks.')
      return functools.partial(resources.tapped, backbone, schema.FeatureLayers(self.blocks))
    readers: dict[str, Reader] = {
        FEATURES: functools.partial(resources.pooled, view),
        PROBABILITIES: functools.partial(embedding.probabilities, view, found.is_sigmoid),
        TOKENS: functools.partial(embedding.tokens, view)}
    project = self.project
    if project is not None:
      readers[VECTORS] = lambda selected, image: project(resources.pooled(view, selected, image))
    if self.what not in readers:
      raise UserError(f'what: expected one of {", ".join(readers)}, got {self.what!r}. Choose one of these.')
    return readers[self.what]


def embed(found: Weights, source: Source, to: pathlib.Path, *, wanted: Wanted, recipe: schema.Recipe,
          format: str = '', batch_size: int = BATCH, threads: int = 0, shown: bool = True) -> Notes | None:
  """Writes what weights give for a source. Every process calls it; each makes some of the shards.

  Args:
    found: the weights.
    source: the images.
    to: file or folder to write; its suffix or `format` chooses the format.
    wanted: what is written.
    recipe: how images are prepared.
    format: of a folder.
    batch_size: over the devices of a process.
    threads: that read images; 0 = one per core.
    shown: whether progress is shown.

  Returns:
    See `embedding.write`.

  Raises:
    UserError: the weights have no such output, or `to` has other content.
    Stopped: by a signal.
  """
  if not len(source):
    raise UserError(f'{source.name}: expected at least one image, got none. Choose another split or source.')
  kind = store.choose(to, format)
  extractor = extract(found, wanted.reader(found), source, recipe=recipe, batch_size=batch_size, threads=threads)
  shape = extractor.shape()
  info = {'format': store.FORMAT, 'what': wanted.what, 'shape': list(shape), 'dtype': 'float32',
          'blocks': list(wanted.blocks), 'num_examples': len(source),
          'per_shard': embedding.shard_size(len(source), shape, batch_size), 'batch_size': batch_size,
          'source': source.name, 'class_names': list(source.class_names), 'output_names': list(found.class_names),
          **describe(found, recipe),
          'identity': resources.identify(
              source, recipe=recipe, image_px=found.preprocess.image_px, network=(found.model, found.head),
              view='student', layers=schema.FeatureLayers(wanted.blocks)),
          'features_digest': features.digest(extractor.selected) if wanted.what == FEATURES else ''}
  return write(Work(to, info, kind), extractor, shown=shown)


def describe(found: Weights, recipe: schema.Recipe) -> dict[str, Any]:
  """Returns network, weights and preprocessing, as JSON has them."""
  return {'network': repr(found.model),
          'weights': {'source': found.source, 'family': found.family, 'digest': trees.digest(found.params)},
          **({'probability': inference.SIGMOID} if found.is_sigmoid else {}),
          'preprocessing': transforms.eval_summary(recipe, found.preprocess.image_px), 'version': __version__}


def extract(found: Weights, reader: Reader, source: Source, *, recipe: schema.Recipe, batch_size: int = BATCH,
            threads: int = 0) -> Extractor:
  """Returns the computation of a source on the devices of this process."""
  mesh = meshes.make(schema.Mesh(), jax.local_devices())
  meshes.check_batch(mesh, batch_size, 1, what='batch_size')
  selected = jax.device_put(inference.parameters(found), meshes.replicated(mesh))
  return Extractor(source, reader, selected, recipe, found.preprocess.image_px, batch_size, mesh, threads)


def write(work: Work, extractor: Extractor | TextRows, *, shown: bool = True) -> Notes | None:
  """Writes files with progress, images per second and the time left; see `embedding.write`.

  Raises:
    Stopped: by SIGTERM or SIGINT; a process of several ends at once.
  """
  process, num_processes = jax.process_index(), jax.process_count()
  with _progress(work.info['num_examples'], shown=shown and process == 0) as show, \
      StopRequest() if num_processes == 1 else _leaving_on_sigterm() as request:
    def compute(rows: range) -> store.Block:
      num_finished = work.num_finished()

      def count(num: int) -> None:
        show(num_finished + num)
        if request is not None and (name := request.reason(0)):
          raise Stopped(name)
      count(0)
      return dataclasses.replace(extractor, on_done=count)(rows)

    return embedding.write(work, compute, share=(process, num_processes),
                           meet=_meet if num_processes > 1 else lambda place: None)


@contextlib.contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
  """Ends this process of several at once on SIGTERM, as finished shards are kept."""
  before = signal.signal(signal.SIGTERM, lambda *_: hosts.leave(failures.TRY_AGAIN))
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)


def _meet(place: str) -> None:
  multihost_utils.sync_global_devices(f'vit_jax {place}')


@contextlib.contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
  """Yields a function of the number of images that are done; what an earlier process did does not count for speed."""
  first, began = -1, 0.
  with progress.Progress(total, start=0, shown=shown, unit='images') as bar:
    def show(done: int) -> None:
      nonlocal first, began
      if first < 0:
        first, began = done, time.monotonic()
      rate = (done - first) / max(1e-9, time.monotonic() - began)
      bar.update(done, {'train/images_per_s': rate} if rate else {})
    yield show
