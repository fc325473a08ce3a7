"""Builds the evaluators of a config, and what they share: sources, loaders, readers of features and their store."""
from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from jax.sharding import Mesh

from vit_jax import __version__
from vit_jax.config import schema
from vit_jax.core import implementation
from vit_jax.core.contracts import Backbone, EvalLoader, View
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray, PyTree, Shard
from vit_jax.data import loader as loaders
from vit_jax.data import opening
from vit_jax.data.device.prepare import prepare_eval
from vit_jax.data.image import geometry
from vit_jax.data.source import Source, take_first, title
from vit_jax.evaluate.problems import check_masks, check_same
from vit_jax.evaluate.results import Fingerprint, Measuring, Truncated
from vit_jax.models import heads, intermediates
from vit_jax.parallel import mesh as meshes

if TYPE_CHECKING:
  from vit_jax.evaluate.features import Reader, Split, Store


class Encoder(Protocol):
  """Maps texts and features of images to vectors of unit length in one space; `rule` is how texts are simplified."""
  rule: schema.TextRule

  def at(self, selected: PyTree) -> Encoder:
    """Returns the encoder with the selected parameters of a view; itself if the view has no text tower."""
    ...

  def embed(self, prompts: Sequence[str]) -> HostArray:
    """Returns vectors of texts, `[T, E]` f32."""
    ...

  def project(self, pooled: Array) -> Array:
    """Returns vectors of images, `[…, E]` f32, of pooled features `[…, D]`; traceable."""
    ...


Make = Callable[[str], Measuring]
"""Maps the name of a view to its evaluator."""


def fingerprint(source: Source) -> Fingerprint:
  """Returns the fingerprint of a source; no image is read."""
  return Fingerprint(len(source), source.digest)


class Data(Protocol):
  """The sources of a run, and the classes that their labels are indexes of; `in_memory`: images may be held there."""

  @property
  def train(self) -> Source: ...

  @property
  def eval(self) -> Source: ...

  @property
  def class_names(self) -> tuple[str, ...]: ...

  @property
  def in_memory(self) -> bool: ...


def pooled(view: View, selected: PyTree, image: Array) -> Array:
  """Returns the input of the head of a view."""
  return view.predict(selected, image).features.pooled


def hidden(view: View, selected: PyTree, image: Array) -> Array:
  """Returns the input of the last layer of the head: after its hidden layer, if it has one."""
  features = pooled(view, selected, image)
  return heads.hidden(selected['head'], features) if 'head' in selected else features


def tapped(backbone: intermediates.LayeredBackbone, layers: schema.FeatureLayers, selected: PyTree,
           image: Array) -> Array:
  """Returns features after the chosen blocks."""
  outputs = intermediates.read(backbone, selected['backbone'], image, layers.blocks, selected['state'])
  return intermediates.concatenate(outputs, patches=layers.patches)


class Resources:
  """The resources that the evaluators of a job share.

  Args:
    config: checked.
    data: of the run.
    views: the networks to evaluate, by name.
    backbone: of these networks, for features of intermediate blocks.
    mesh: of the parameters.
    shard: the rows of each batch that this process feeds.
    folder, embedded: where features are stored; see `Store`.
    bar: whether progress may be shown as a bar.
    encoder: returns the text tower of an evaluation with texts, by its name and settings.
  """

  def __init__(self, config: schema.Config, data: Data, *, views: Mapping[str, View], backbone: Backbone, mesh: Mesh,
               shard: Shard, folder: pathlib.Path | None, embedded: Sequence[pathlib.Path], bar: bool,
               encoder: Callable[[str, schema.TextEvaluation], Encoder]) -> None:
    self.config, self.class_names, self.views, self.mesh = config, data.class_names, views, mesh
    self.prepare, self.bar, self._stored = prepare_eval(config.data.recipe), bar, (folder, embedded)
    self._data, self.backbone, self._shard, self.encoder = data, backbone, shard, encoder
    self._loaders: dict[tuple[str, int, str], loaders.EvalLoader] = {}
    self._readers: dict[tuple[str, str, bool], Reader] = {}
    self._opened: dict[str, Source] = {}
    if embedded:
      _ = self.store  # files that a person has named are checked, even if no evaluation reads features

  @functools.cached_property
  def store(self) -> Store:
    """The features that evaluations share."""
    from vit_jax.evaluate.features import Store  # only here: few runs evaluate features
    return Store(*self._stored)

  def fingerprints(self) -> dict[str, Fingerprint]:
    """Returns what the evaluations read, by source and split as in the config."""
    def find_digest(source: Source) -> str:
      # The sources of the run may have the classes of weights instead of their own, which changes the digest.
      return '' if source is self._data.train or source is self._data.eval else source.digest
    return {name: Fingerprint(len(source), find_digest(source)) for name, source in self._opened.items()}

  def _note(self, settings: schema.Evaluation, split: str, source: Source) -> None:
    run_source = self.config.data.source
    if settings.source != run_source:  # where both name it, its classes may be others (`open_split`)
      self._opened[f'{settings.source or run_source} {split}'] = source

  def evaluators(self) -> dict[str, dict[str, Measuring]]:
    """Returns the evaluators by evaluation and view. They share loaders, and features of the same weights.

    The `implementation` of the settings of an evaluation is a function `build(resources, name, settings)`. It returns
    the function that builds the evaluator of a view.

    Raises UserError if an evaluation names a view that the objective does not have, or cannot be built.
    """
    evaluators: dict[str, dict[str, Measuring]] = {}
    for name, settings in self.config.evals.items():
      chosen = settings.views or tuple(self.views)
      if not set(chosen) <= set(self.views):
        raise UserError(f'evals.{name}.views: expected some of {", ".join(self.views)}, got {", ".join(chosen)}. '
                        'Set some of these views.')
      make: Make = implementation.of(settings)(self, name, settings)
      evaluators[name] = {view: Truncated(make(view), settings.limit) if settings.limit else make(view)
                          for view in chosen}
    return evaluators

  def eval_source(self, name: str) -> Source:
    """Returns the test source of an evaluation. Raises UserError if it has masks and the evaluation needs classes."""
    settings = self.config.evals[name]
    whole = _whole_eval_source(self.config, self._data, settings)
    self._note(settings, settings.split or self.config.data.eval_split, whole)
    check_masks(f'evals.{name}', whole, settings)
    return take_first(whole, settings.limit)

  def sources(self, name: str) -> tuple[Source, Source]:
    """Returns the training and the test source of an evaluation. Raises UserError if their classes differ."""
    settings = self.config.evals[name]
    assert isinstance(settings, schema.FrozenEvaluation)
    whole, test = self._data.train, self.eval_source(name)
    if settings.train_split or settings.source or self._data.train is self._data.eval:
      whole = open_split(self.config, settings.source, settings.train_split or self.config.data.train_split,
                         order=self._data.class_names)
    self._note(settings, settings.train_split or self.config.data.train_split, whole)
    train = whole if isinstance(settings, schema.FewShot) else take_first(whole, settings.limit)  # it draws from all
    check_masks(f'evals.{name}', train, settings)
    check_same(name, train, test)
    return train, test

  def batch_size(self, name: str, settings: schema.Evaluation) -> int:
    """Returns the global batch size of an evaluation; raises UserError if the mesh cannot split it."""
    size = settings.batch_size or self.config.batch_size
    meshes.check_batch(self.mesh, size, 1, what=f'evals.{name}.batch_size')
    return size

  def loader(self, source: Source, batch_size: int, *, in_memory: bool,
             recipe: schema.Recipe | None = None) -> EvalLoader:
    """Returns the loader of a source, which all evaluations of the same images share; `recipe` if not the run's."""
    data, px = self.config.data, self.config.image_px
    recipe = recipe or data.recipe
    key = (source.digest, batch_size, repr(recipe))
    if key not in self._loaders:
      in_memory = in_memory and self._data.in_memory and loaders.fits_in_memory(
          source, recipe=recipe, image_px=px, choice=data.in_memory)
      self._loaders[key] = loaders.eval_loader(
          source, recipe=recipe, image_px=px, batch_size=batch_size, shard=self._shard, threads=data.threads,
          in_memory=in_memory, max_labels=data.max_labels)
    return self._loaders[key]

  def splits(self, name: str, settings: schema.FrozenEvaluation, train: Source, test: Source,
             view: str) -> tuple[Split, Split]:
    """Returns the features of a view on the training and the test source."""
    return (self.split(name, settings, train, view, in_memory=False),
            self.split(name, settings, test, view, in_memory=True))

  def split(self, name: str, settings: schema.FeatureEvaluation, source: Source, view: str, *, in_memory: bool,
            reader: Reader | None = None, reads: str = '') -> Split:
    """Returns the features of a view on a source; with another `reader`, `reads` says which features it returns."""
    from vit_jax.evaluate.features import Split  # only here: few runs evaluate features
    size = self.batch_size(name, settings)
    is_big_vision = isinstance(settings, schema.FewShot) and settings.protocol is schema.FewShotProtocol.BIG_VISION
    recipe = squashed_crop(self.config) if is_big_vision else self.config.data.recipe
    layers = settings.features if isinstance(settings, schema.FrozenEvaluation) else schema.FeatureLayers()
    identity = identify(source, recipe=recipe, image_px=self.config.image_px,
                        network=(self.config.model, self.config.head), view=view, layers=layers,
                        after_hidden=is_big_vision)
    if reads:
      identity['features'] = reads
    return Split(
        reader or self._reader(name, layers, view, after_hidden=is_big_vision), self.prepare,
        self.loader(source, size, in_memory=in_memory, recipe=recipe),
        batch_size=size, mesh=self.mesh, store=self.store, identity=identity,
        name=f'evals.{name} ({title(source)}, {view})', bar=self.bar)

  def _reader(self, name: str, tap: schema.FeatureLayers, view: str, *, after_hidden: bool) -> Reader:
    key = (view, repr(tap), after_hidden)
    if key not in self._readers:
      if not tap.blocks:
        self._readers[key] = functools.partial(hidden if after_hidden else pooled, self.views[view])
      elif intermediates.is_layered(self.backbone):
        self._readers[key] = functools.partial(tapped, self.backbone, tap)
      else:
        raise UserError(f'evals.{name}.features.blocks: expected () for {type(self.config.model).__name__}, which has '
                        f'no blocks to read after, got {tap.blocks}. Remove it.')
    return self._readers[key]


def identify(source: Source, *, recipe: schema.Recipe, image_px: tuple[int, int],
             network: tuple[schema.Model, schema.Head], view: str, layers: schema.FeatureLayers,
             after_hidden: bool = False) -> dict[str, str]:
  """Returns everything but the weights that features depend on, as text by name."""
  pictures: tuple[object, ...] = (
      image_px, recipe.eval_resize_px, recipe.eval_geometry, *geometry.eval_resampling(recipe), recipe.mean, recipe.std,
      recipe.upright, recipe.truncate)
  if recipe.eval_native_patch:
    pictures += (recipe.eval_native_patch,)
  return {'data': f'{source.digest} {len(source)}', 'pictures': repr(pictures), 'network': repr(network), 'view': view,
          'features': repr(layers) + ' after the hidden layer' * after_hidden, 'code': __version__}


def squashed_crop(config: schema.Config) -> schema.Recipe:
  """Returns the images of big_vision's few-shot evaluation: `resize(256)|central_crop(224)`, or as much larger.

  Both sides are resized, bilinearly and without antialias, whatever the images of the run are (configs/
  common_fewshot.py). Images that are not square are resized to a square too.
  """
  resize_px = round(max(config.image_px) * 256 / 224)
  return dataclasses.replace(
      config.data.recipe, eval_resize_px=resize_px, eval_geometry=schema.Geometry.HUGGINGFACE,
      interpolation=schema.Interpolation.BILINEAR, antialias=False, eval_area=False, truncate=True,
      eval_native_patch=0, native_lengths=())


def eval_source(config: schema.Config, data: Data, evaluation: str) -> Source:
  """Returns the test source of an evaluation, up to its limit."""
  settings = config.evals.get(evaluation)
  return take_first(_whole_eval_source(config, data, settings), settings.limit) if settings else data.eval


def _whole_eval_source(config: schema.Config, data: Data, settings: schema.Evaluation) -> Source:
  """Returns the test source of an evaluation without its limit."""
  # Evaluations of features do not use the classes of loaded weights.
  has_classes_of_weights = isinstance(settings, schema.FeatureEvaluation) and data.train is data.eval
  if settings.split or settings.source or has_classes_of_weights:
    return open_split(config, settings.source, settings.split or config.data.eval_split, order=data.class_names)
  return data.eval


def open_split(config: schema.Config, source: str, split: str, *, order: Sequence[str] = ()) -> Source:
  """Opens a split of the source of an evaluation; '' = that of the run, with the classes of its config.

  `order` has the classes of the run.
  """
  data = config.data
  if source:  # the evaluation itself maps the classes of this source
    data = dataclasses.replace(data, source=source, classes='', num_classes=0, num_examples=0, label_column='',
                               image_column='', caption_column='', label_offset=0)
  return opening.check_labels(opening.open_split(
      data, split, image_px=config.image_px, order=() if source else order), data)
