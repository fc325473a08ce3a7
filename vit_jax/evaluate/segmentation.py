"""Semantic segmentation on frozen tokens: logistic regression and k nearest neighbors, as mIoU over all pixels.

A training token has the most frequent class of its pixels. Logistic regression is fitted to convergence on standardized
tokens (`logistic.py`). k-NN votes by cosine, `sum_i exp(s_i / T) [label_i = c]` (`knn.py`), and votes are divided by
their sum; retrieval of tokens by similarity is the protocol of Balazevic et al. 2023 (arXiv 2306.01667), whose tokens
have mixtures of classes. The scores of the tokens of a test image are interpolated at the pixels of its mask
(`pixels.py`), and each pixel of each mask that has a class counts once.

The protocol is in the name of every metric: `miou.linear.l2_sweep.b12.norm.224x224`.
"""
from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.core.contracts import Backbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray, PyTree
from vit_jax.data.image.masks import MaskedImages, MaskValues
from vit_jax.data.source import Source, origins
from vit_jax.evaluate import knn, linear, logistic, pixels
from vit_jax.evaluate.resources import Make, Resources
from vit_jax.evaluate.results import Measuring, Result, mark, named
from vit_jax.evaluate.tokens import Draw, Grids, Heads, Tokens
from vit_jax.models import intermediates
from vit_jax.parallel import mesh as meshes


class Head(NamedTuple):
  """A classifier of tokens: its name in metrics, and `[B, N, D]` to scores `[B, N, C]`."""
  name: str
  score: Heads


class Probe(NamedTuple):
  """A linear classifier of standardized tokens, as it is saved: `kernel [D, C]`, `bias [C]`, `mean std [D]`.

  class_names: of the masks.    blocks: after which tokens are read, concatenated; () = the last one.
  norm: whether the last norm is applied to them.    values: of masks, the first class and the one to ignore.
  """
  kernel: HostArray
  bias: HostArray
  mean: HostArray
  std: HostArray
  class_names: HostArray
  blocks: HostArray
  norm: HostArray
  values: HostArray

  def score(self, tokens: HostArray) -> HostArray:
    """Returns the scores `[…, C]` f32 of tokens `[…, D]`."""
    return (tokens - self.mean) / self.std @ self.kernel + self.bias


class Segmentation:
  """Evaluator of one view: mIoU, pixel accuracy and IoU by class, of each classifier.

  Args:
    train: whose tokens are learned from.
    test: whose pixels are counted.
    settings: of the classifiers.
    class_names: of the masks.
    protocol: the part of the metrics' names that all classifiers share.
  """

  def __init__(self, train: Tokens, test: Tokens, *, settings: schema.Segmentation, class_names: Sequence[str],
               protocol: str) -> None:
    self._train, self._test, self._settings, self._class_names = train, test, settings, tuple(class_names)
    self._protocol, self._num_classes = protocol, len(class_names)

  def measure(self, selected: PyTree) -> Result:
    """Returns the metrics and the number of test images."""
    s = self._settings
    data = self._train.table(selected, Draw(s.tokens_per_image, s.token_seed))
    metrics: dict[str, float] = {}
    heads = [self._nearest(data, k) for k in s.neighbors]
    arrays: dict[str, HostArray] = {}
    if s.l2:
      scores, penalty = self._fit(data)
      classifier, mean, std = (jax.device_get(part) for part in scores.args)
      values = self._test.images.values
      arrays = Probe(classifier.kernel, classifier.bias, mean, std, np.array(self._class_names),
                     np.array(s.features.blocks, np.int32), np.array(s.norm),
                     np.array([values.first, values.ignore]))._asdict()
      heads.insert(0, Head(f'linear.l2_{f"{s.l2[0]:g}" if len(s.l2) == 1 else "sweep"}', scores))
      metrics[f'l2.{heads[0].name}.{self._protocol}'] = penalty
    matrices, figures = self._count(selected, heads)
    for head, matrix in zip(heads, pixels.total(matrices), strict=True):
      metrics |= self._metrics(head.name, matrix)
    headline = mark(f'miou.{heads[0].name}.{self._protocol}', s.limit)
    return Result(named(metrics, s.limit), self._test.num_examples, None, headline, figures=figures,
                  arrays=arrays)

  def _fit(self, data: linear.Data) -> tuple[functools.partial[Array], float]:
    """Returns the logistic regression with the best penalty, and the penalty."""
    s = self._settings
    mean, std = linear.moments(data.features, data.weight)
    x = linear.standardize(data.features, mean, std)
    fit = functools.partial(logistic.fit_all, num_classes=self._num_classes, max_steps=s.max_steps)
    best = linear.choose(fit, data._replace(features=x), s.l2, name=self._train.name, hold=self._hold,
                         rank=linear.by_nll, extend=True)
    return functools.partial(_linear_scores, best.linear, mean, std), best.setting

  def _hold(self) -> HostArray:
    """Returns which training images choose the penalty, `[S]` bool: evenly spaced ones."""
    size = self._train.num_examples
    number = max(1, round(self._settings.holdout * size))
    if number >= size:
      raise UserError(f'{self._train.name}: expected at least two images, one of which can be held out to choose a '
                      f'penalty, got {size}. Give a single l2 to choose nothing.')
    is_held = np.zeros(size, bool)
    is_held[(np.arange(number) * size + size // 2) // number] = True
    return is_held

  def _nearest(self, data: linear.Data, k: int) -> Head:
    s, mesh = self._settings, self._train.mesh
    parts, num_rows = data.label.shape
    step = max(1, knn.BLOCK // parts)
    blocks = [(data.features[:, at:at + step], data.label[:, at:at + step], data.weight[:, at:at + step])
              for at in range(0, num_rows, step)]

    def score(tokens: Array) -> Array:
      rows = tokens.reshape(parts, -1, tokens.shape[-1])
      similarity, label = knn.search(rows, blocks, k, mesh=mesh, size=1)
      return _votes(similarity, label, self._num_classes, s.temperature).reshape(*tokens.shape[:2], -1)
    return Head(f'knn{k}.t{s.temperature:g}', score)

  def _count(self, selected: PyTree, heads: Sequence[Head]) -> tuple[HostArray, dict[str, HostArray]]:
    """Returns the confusion matrices `[heads, C, C]` of this process's images, and the overlays."""
    size, images = self._num_classes, self._test.images
    join = jax.jit(lambda *parts: jnp.concatenate(parts, -1), out_shardings=meshes.batch_sharding(self._test.mesh))
    matrices = np.zeros((len(heads), size, size), np.int64)
    figures: dict[str, HostArray] = {}
    for example, scores in self._test.stream(selected, lambda x: join(*(head.score(x) for head in heads))):
      rows, columns = (pixels.spans(example['mask'].shape[axis], int(example['size'][axis]), images.window_px[axis],
                                    images.stride(axis), images.grid[axis]) for axis in (0, 1))
      masks = {'masks': example['mask']}
      for head, matrix, part in zip(heads, matrices, np.split(scores, len(heads), -1), strict=True):
        masks[head.name] = pixels.upsample(part, rows, columns, example['mask'].shape)
        matrix += pixels.count(example['mask'], masks[head.name], size)
      index = int(example['index'])
      if index < self._settings.overlays:
        figures[f'{index:04d}'] = pixels.draw(images.read(index)[0], masks, self._class_names)
    return matrices, figures

  def _metrics(self, name: str, matrix: HostArray) -> dict[str, float]:
    if not matrix.sum():
      raise UserError(f'{self._test.name}: expected a pixel that counts, got none. '
                      'Choose another split, or another class to ignore.')
    scores, where = pixels.scores(matrix), f'{name}.{self._protocol}'
    texts = [re.sub(r'[^A-Za-z0-9_-]', '_', class_name) for class_name in self._class_names]
    if len(set(texts)) < len(texts):  # such as of names in other letters
      texts = [f'{number}_{text}' for number, text in enumerate(texts)]
    classes = {f'iou.{where}.class_{text}': float(value)
               for text, value in zip(texts, scores.iou, strict=True) if not np.isnan(value)}
    return {f'miou.{where}': scores.miou, f'accuracy.{where}': scores.accuracy} | classes


@jax.jit
def _linear_scores(classifier: linear.Linear, mean: Array, std: Array, tokens: Array) -> Array:
  return linear.predict(classifier, linear.standardize(tokens, mean, std))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _votes(similarity: Array, label: Array, num_classes: int, temperature: float) -> Array:
  """Returns the shares of classes among the votes of neighbors, `[G, R, C]`."""
  return jax.nn.softmax(knn.log_votes(similarity, label, num_classes, temperature))


def describe(settings: schema.Segmentation, layers: str, images: MaskedImages) -> str:
  """Returns the part of the metrics' names that all classifiers share."""
  height, width = images.window_px
  size = f'{height}x{width}'
  if settings.resize_px:
    strides = dict.fromkeys((images.stride(0), images.stride(1)))
    size = f'short{settings.resize_px}.window{size}.stride{"x".join(map(str, strides))}'
  drawn = [f'tokens{settings.tokens_per_image}', f'seed{settings.token_seed}'] if settings.tokens_per_image else []
  return '.'.join([layers, 'norm' if settings.norm else 'raw', size, *drawn])


def find_grid(backbone: Backbone, image_px: tuple[int, int], *, name: str) -> tuple[int, int]:
  """Returns the grid (h, w) of the tokens of a network for images of this size, from shapes.

  Raises:
    UserError: the sides of the image are not multiples of those of the grid.
  """
  grids: list[tuple[int, int]] = []

  def look(key: Array, image: Array) -> Array:
    features, _ = backbone.apply(*backbone.init(key, image), image, train=False, key=None)
    grids.append(features.grid)
    return features.tokens

  jax.eval_shape(look, jax.random.key(0), jax.ShapeDtypeStruct((1, *image_px, 3), jnp.float32))
  (h, w), = grids
  if image_px[0] % h or image_px[1] % w:
    raise UserError(f'evals.{name}: expected an image_px of whole multiples of the {h} x {w} tokens, got {image_px}. '
                    'Set another image_px.')
  return h, w


def build(resources: Resources, name: str, settings: schema.Segmentation) -> Make:
  """Builds the evaluator for each view."""
  train, test = resources.sources(name)
  class_names = _class_names(name, settings, train)
  backbone, config = resources.backbone, resources.config
  grid = find_grid(backbone, config.image_px, name=name)
  layered = backbone if intermediates.is_layered(backbone) else None
  if layered is None and (settings.features.blocks or not settings.norm):
    raise UserError(f'evals.{name}.features.blocks: expected () and norm=true for {type(config.model).__name__}, which '
                    f'has no blocks to read after, got {settings.features.blocks} and norm={settings.norm}. '
                    'Remove both.')
  blocks = settings.features.blocks or (-1,)
  depth = getattr(config.model, 'depth', 0)
  layers = 'last' if layered is None else f'b{"+".join(map(str, intermediates.numbers(blocks, depth)))}'

  def images(source: Source) -> MaskedImages:
    first = settings.first_class if settings.first_class >= 0 else origins(source)[0].first_class  # type: ignore[attr-defined]
    return MaskedImages(source, config.data.recipe, config.image_px, settings.resize_px, settings.stride_px, grid,
                        MaskValues(first, settings.ignore, len(class_names)))

  def make(view: str) -> Measuring:
    reader = Grids(resources.views[view], layered, tuple(blocks), grid, settings.norm)
    tokens = [Tokens(reader, resources.prepare, images(source), batch_size=resources.batch_size(name, settings),
                     mesh=resources.mesh, threads=config.data.threads, bar=resources.bar,
                     name=f'evals.{name} ({source.name}, {view})') for source in (train, test)]
    return Segmentation(*tokens, settings=settings, class_names=class_names,
                        protocol=describe(settings, layers, tokens[1].images))
  return make


def _class_names(name: str, settings: schema.Segmentation, source: Source) -> tuple[str, ...]:
  """Returns the names of the classes of the masks; numbers if the source names none."""
  names = source.class_names
  if settings.num_classes not in (0, len(names)) and names or not (names or settings.num_classes):
    raise UserError(f'evals.{name}.num_classes: expected {len(names) or "the number of classes of the masks"}, got '
                    f'{settings.num_classes}. ' + (f'{source.name} names its classes; set it to 0.' if names else
                    f'{source.name} does not name its classes: set it, or list them in PATH/classes.txt.'))
  return names or tuple(f'class {i}' for i in range(settings.num_classes))
