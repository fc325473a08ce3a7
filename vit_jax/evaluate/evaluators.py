"""Evaluators of a config, put together from its data and views: one function a kind, for `build.evaluators`."""
from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

import numpy as np
from jax.sharding import Mesh

from vit_jax import __version__
from vit_jax.config import evaluations, schema
from vit_jax.core.contracts import Backbone, EvalLoader, View
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, PyTree, Shard
from vit_jax.data.pipeline import loader as loaders
from vit_jax.data.pipeline import transforms
from vit_jax.data.source import Source, most_labels
from vit_jax.data.sources import class_map, real, subset
from vit_jax.evaluate import classify, fewshot, knn, linear, stochastic, targets
from vit_jax.evaluate.features import Reader, Split
from vit_jax.evaluate.results import Measuring
from vit_jax.evaluate.store import Store
from vit_jax.models import intermediates
from vit_jax.parallel import mesh as meshes

log = logging.getLogger('vit_jax.jobs')

OfTwo = evaluations.FROZEN
Make = Callable[[str], Measuring]
"""From the name of a view to its evaluator."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pooled:
  """Reads what the head of a view sees."""
  view: View

  def __call__(self, selected: PyTree, image: Array) -> Array:
    return self.view.predict(selected, image).features.pooled


@dataclasses.dataclass(frozen=True, eq=False)
class Tapped:
  """Reads features after chosen blocks."""
  backbone: intermediates.LayeredBackbone
  features: schema.FeatureLayers

  def __call__(self, selected: PyTree, image: Array) -> Array:
    found = intermediates.read(self.backbone, selected['backbone'], image, self.features.blocks)
    return intermediates.concatenate(found, patches=self.features.patches)


class Bench:
  """What the evaluators of a job share: loaders, readers and the store of features."""

  def __init__(self, config: schema.Config, *, class_names: tuple[str, ...], in_memory: bool, views: Mapping[str, View],
               backbone: Backbone, mesh: Mesh, shard: Shard, store: Store, bar: bool) -> None:
    self.config, self.class_names, self.views, self.mesh = config, class_names, views, mesh
    self.prepare, self.store, self.bar = transforms.prepare_eval(config.data.recipe), store, bar
    self._backbone, self._shard, self._in_memory = backbone, shard, in_memory
    self._loaders: dict[tuple[str, int], loaders.EvalLoader] = {}
    self._readers: dict[tuple[str, str], Reader] = {}

  def batch_size(self, name: str, settings: schema.Evaluation) -> int:
    """Global batch size of an evaluation; raises UserError if it does not fit the mesh."""
    size = settings.batch_size or self.config.batch_size
    meshes.check_batch(self.mesh, size, 1, what=f'evals.{name}.batch_size')
    return size

  def loader(self, source: Source, batch_size: int, *, in_memory: bool) -> EvalLoader:
    """The loader of a source; one for all evaluations of the same."""
    key, data, px = (source.digest, batch_size), self.config.data, self.config.image_px
    if key not in self._loaders:
      in_memory = in_memory and self._in_memory and loaders.fits_in_memory(
          source, recipe=data.recipe, image_px=px, choice=data.in_memory)
      self._loaders[key] = loaders.eval_loader(
          source, recipe=data.recipe, image_px=px, batch_size=batch_size, shard=self._shard, threads=data.threads,
          workers=0, in_memory=in_memory, max_labels=data.max_labels)
    return self._loaders[key]

  def splits(self, name: str, settings: OfTwo, train: Source, test: Source,
             view: str) -> tuple[Split, Split]:
    """The features of a view on what is learned from and on what is measured."""
    return (self.split(name, settings, train, view, in_memory=False),
            self.split(name, settings, test, view, in_memory=True))

  def split(self, name: str, settings: OfTwo, source: Source, view: str, *, in_memory: bool) -> Split:
    """The features of a view on a source."""
    size = self.batch_size(name, settings)
    recipe = self.config.data.recipe
    pictures = (self.config.image_px, recipe.eval_resize_px, recipe.eval_geometry,
                *transforms.eval_resampling(recipe), recipe.mean, recipe.std,
                recipe.exif_orientation)
    identity = {'data': f'{source.digest} {len(source)}', 'pictures': repr(pictures),
                'network': repr((self.config.model, self.config.head)), 'view': view,
                'features': repr(settings.features), 'code': __version__}
    return Split(
        self._reader(name, settings.features, view), self.prepare, self.loader(source, size, in_memory=in_memory),
        batch_size=size, mesh=self.mesh, store=self.store, identity=identity,
        name=f'evals.{name} ({source.name}, {view})', bar=self.bar)

  def _reader(self, name: str, tap: schema.FeatureLayers, view: str) -> Reader:
    key = (view, repr(tap))
    if key not in self._readers:
      if tap.blocks and not intermediates.is_layered(self._backbone):
        raise UserError(f'evals.{name}.features.blocks={tap.blocks}: {type(self.config.model).__name__} has no '
                        'blocks to read after; want none, which reads what the head sees')
      if tap.blocks and intermediates.is_layered(self._backbone):
        self._readers[key] = Tapped(self._backbone, tap)
      else:
        self._readers[key] = Pooled(self.views[view])
    return self._readers[key]


def top_k(bench: Bench, name: str, settings: schema.TopK, source: Source) -> Make:
  """Top-k on a source, whose classes may be called otherwise than the network's."""
  own, network, where = source.class_names, bench.class_names, f'evals.{name}'
  by_class = class_map.find(own, network, path=settings.classes, where=where)
  inner = bench.loader(source, bench.batch_size(name, settings), in_memory=True)
  by_example: real.Labels | None = None
  if isinstance(settings, schema.Real):
    by_example = real.of_source(source, settings.labels)
    counts = real.count(by_example)
    log.info('%s: %s images have %s ReaL labels, %s have none and do not count.', where, f'{counts.num_scored:,}',
             f'{counts.num_labels:,}', f'{counts.num_empty:,}')
  is_same = by_class == tuple((i,) for i in range(len(network))) and by_example is None
  loader = inner if is_same else targets.Retargeted(
      inner, by_class=by_class, num_classes=len(network), by_example=by_example)
  if settings.only_present:
    _check_single(f'{where}.only_present', source)
  allowed = targets.present(by_class, subset.labels(source), len(network)) if settings.only_present else None

  def make(view: str) -> Measuring:
    return classify.TopK(
        bench.views[view].predict, bench.prepare, loader, mesh=bench.mesh, metrics=settings.metrics,
        num_classes=len(network), allowed=allowed, limit=settings.limit, name=f'{where} ({source.name}, {view})',
        bar=bench.bar)
  return make


def _check_single(where: str, source: Source) -> None:
  if most_labels(source):
    raise UserError(f'{where}: expected a source whose images have one class each, got {source.name}, which has '
                    'several for an image. Measure it with TopK, or choose another source.')


def few_shot(bench: Bench, name: str, settings: schema.FewShot, train: Source, test: Source) -> Make:
  """Few-shot: unless the features of the training split are stored, only the examples that some seed draws are read."""
  check_same(name, train, test)
  draws = fewshot.draw(subset.labels(train), train.class_names, shots=settings.shots, num_seeds=settings.num_seeds,
                       name=f'evals.{name}: {train.name}')
  examples = np.unique(np.concatenate([one.examples for one in draws]))
  shots = subset.Subset(train, examples, name=f'{train.name}, {len(examples):,} shots')

  def make(view: str) -> Measuring:
    return fewshot.FewShot(
        *bench.splits(name, settings, shots, test, view),
        whole=bench.split(name, settings, train, view, in_memory=False), examples=examples, draws=draws,
        num_classes=len(train.class_names), penalty=settings.l2, sweep=settings.l2_sweep, limit=settings.limit)
  return make


def nearest(bench: Bench, name: str, settings: schema.Knn, train: Source, test: Source) -> Make:
  """k nearest neighbours."""
  check_same(name, train, test)

  def make(view: str) -> Measuring:
    return knn.Knn(
        *bench.splits(name, settings, train, test, view),
        num_classes=len(train.class_names), neighbours=settings.neighbours, temperature=settings.temperature,
        headline=settings.headline, limit=settings.limit)
  return make


def logistic(bench: Bench, name: str, settings: schema.Logistic, train: Source, test: Source) -> Make:
  """Logistic regression."""
  check_same(name, train, test)

  def make(view: str) -> Measuring:
    return linear.Logistic(
        *bench.splits(name, settings, train, test, view),
        num_classes=len(train.class_names), penalties=settings.l2, holdout=settings.holdout,
        max_steps=settings.max_steps, tolerance=settings.tolerance, limit=settings.limit)
  return make


def probe(bench: Bench, name: str, settings: schema.Probe, train: Source, test: Source) -> Make:
  """A linear probe by gradient descent."""
  check_same(name, train, test)
  size = min(settings.train_batch_size, len(train))
  recipe = stochastic.Recipe(
      epochs=settings.epochs, batch_size=size, momentum=settings.momentum, warmup_epochs=settings.warmup_epochs,
      trust_coefficient=settings.trust_coefficient, normalize=settings.batch_norm)
  base = settings.base_batch_size
  rates = [rate * size / base if base else rate for rate in settings.learning_rates]

  def make(view: str) -> Measuring:
    return linear.Probe(
        *bench.splits(name, settings, train, test, view),
        num_classes=len(train.class_names), recipe=recipe, rates=rates, holdout=settings.holdout, limit=settings.limit)
  return make


def check_same(name: str, train: Source, test: Source) -> None:
  """Raises UserError unless both splits have the same classes, and each image one of them."""
  for source in (train, test):
    _check_single(f'evals.{name}', source)
  if train.class_names != test.class_names:
    raise UserError(f'evals.{name}: {train.name} has {len(train.class_names)} classes, {test.name} has '
                    f'{len(test.class_names)}, and they are not the same; want two splits of one set')
