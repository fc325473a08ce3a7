"""Semantic segmentation on frozen tokens: logistic regression and k nearest neighbors, as mIoU over all pixels.

A training token has the most frequent class of its pixels. Logistic regression is fitted to convergence on standardized
tokens (`logistic.py`). k-NN votes by cosine, `sum_i exp(s_i / T) [label_i = c]` (`knn.py`), and votes are divided by
their sum; retrieval of tokens by similarity is the protocol of Balazevic et al. 2023 (arXiv 2306.01667), whose tokens
have mixtures of classes. The scores of the tokens of a test image are interpolated at the pixels of its mask
(`pixels.py`), and each pixel of each mask that has a class counts once.

`Tokens` runs the network: each image is read once, and only one batch of tokens is on the devices. Every process reads
its own images. Their windows (parts of the size of the network's input) are put into batches of one size, and all
processes take part in each batch until every process has run out of windows, so images may have any number of windows.

The protocol is in the name of every metric: `miou.linear.l2_sweep.b12.norm.224x224`.
"""
from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.config import schema
from vit_jax.core.contracts import Backbone, Prepare, View
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import BATCH_AXES
from vit_jax.core.types import Array, Batch, HostArray, PyTree
from vit_jax.data import workers
from vit_jax.data.image.masks import MaskedImages, MaskValues
from vit_jax.data.source import Source, origins
from vit_jax.evaluate import features, knn, linear, logistic, pixels
from vit_jax.evaluate.linear import Data
from vit_jax.evaluate.problems import check_finite, check_size
from vit_jax.evaluate.resources import Make, Resources
from vit_jax.evaluate.results import Measuring, Result
from vit_jax.models import intermediates
from vit_jax.parallel import mesh as meshes
from vit_jax.record.progress import TaskProgress

MEMORY_SHARE = 4
"""The training tokens may take 1 / 4 of the memory: they are copied for the devices and standardized."""
Score = Callable[[Array], Array]
"""Maps tokens `[B, N, D]` to what is fetched for each of them, `[B, N, c]`, such as scores of classes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Grids:
  """Reads patch tokens of a view, `[B, h * w * D]` f32: after the chosen blocks, or the last ones of the network."""
  view: View
  backbone: intermediates.LayeredBackbone | None
  blocks: tuple[int, ...]
  grid: tuple[int, int]
  norm: bool

  def __call__(self, selected: PyTree, image: Array) -> Array:
    if self.backbone is None:
      tokens = self.view.predict(selected, image).features.tokens
    else:
      tokens = intermediates.grids(self.backbone, selected['backbone'], image, self.blocks, grid=self.grid,
                                  norm=self.norm, state=selected['state'])
    return tokens.reshape(len(image), -1)


class Draw(NamedTuple):
  """Which tokens of a training image are taken: at most `number` (0 = all) of those with a class, by a seed."""
  number: int
  seed: int

  def rows(self, classes: HostArray, index: int) -> HostArray:
    """Returns the rows of the tokens that are taken, ascending.

    Args:
      classes: of the tokens, `[N]`; -1 = none.
      index: of the image in its source.
    """
    rows = np.flatnonzero(classes >= 0)
    if not 0 < self.number < len(rows):
      return rows
    rng = np.random.Generator(np.random.Philox(key=[self.seed, index]))
    return np.sort(rng.choice(rows, self.number, replace=False))


class Tokens:
  """The tokens of a view on the images of a source.

  Args:
    reader: of the tokens.
    prepare: of the images.
    images: of the source.
    batch_size: of windows, global.
    mesh: of the parameters.
    threads: that decode images; 0 = one per core.
    name: for messages.
    bar: whether progress may be shown as a bar.
  """

  def __init__(self, reader: Grids, prepare: Prepare, images: MaskedImages, *, batch_size: int, mesh: Mesh,
               threads: int, name: str, bar: bool) -> None:
    check_size(name, len(images.source))
    self.images, self.mesh, self.name, self.num_examples = images, mesh, name, len(images.source)
    self._reader, self._prepare, self._threads, self._bar = reader, prepare, threads, bar
    self._shard = meshes.local_shard(mesh)
    self._num_windows = len(self._shard.rows(batch_size))

  def stream(self, selected: PyTree, score: Score) -> Iterator[tuple[Batch, HostArray]]:
    """Yields this process's images with what `score` returns for their windows, `[n, h, w, c]`.

    Every process must call it, and consume all of it.
    """
    indexes = range(jax.process_index(), self.num_examples, jax.process_count())
    examples = workers.batches(self.images, indexes, workers.Workers(self._threads))
    unfinished: list[Batch] = []  # images whose windows are not all scored
    windows: list[HostArray] = []  # of these images, not yet scored
    scored: list[HostArray] = []  # scores of windows of these images, in order
    num_done = 0
    is_first = jax.process_index() == 0
    with TaskProgress(self.name, len(indexes), unit='images', bar=self._bar, active=is_first) as progress:
      while True:
        while len(windows) < self._num_windows and (example := next(examples, None)) is not None:
          unfinished.append(example)
          windows += list(example['windows'])
        if not multihost_utils.process_allgather(np.array(bool(windows))).any():
          return
        scored += list(self._score_batch(selected, windows[:self._num_windows], score))
        windows = windows[self._num_windows:]
        while unfinished and len(scored) >= len(unfinished[0]['windows']):
          example = unfinished.pop(0)
          num = len(example['windows'])
          yield example, np.stack(scored[:num]).reshape(num, *self.images.grid, -1)
          scored, num_done = scored[num:], num_done + 1
          progress.update(num_done)

  def _score_batch(self, selected: PyTree, windows: list[HostArray], score: Score) -> HostArray:
    """Returns the scores of at most one batch of windows, `[n, N, c]`."""
    batch = np.zeros((self._num_windows, *self.images.window_px, 3), np.uint8)
    mask = np.zeros(self._num_windows, np.float32)
    if windows:
      batch[:len(windows)], mask[:len(windows)] = np.stack(windows), 1.
    placed = meshes.put_batch({'image': batch, 'mask': mask}, self.mesh, self._shard)
    try:
      flat, counts = features.read(self._reader, self._prepare, self.mesh, selected, placed)
    except UserError as error:  # raised while tracing, from shapes
      raise UserError(f'{self.name}: {error}') from None
    check_finite(self.name, int(jax.device_get(counts)[0]), selected)
    h, w = self.images.grid
    parts = features.local_parts(score(flat.reshape(len(flat), h * w, -1)))
    return parts.reshape(-1, *parts.shape[2:])[:len(windows)]

  def table(self, selected: PyTree, draw: Draw) -> Data:
    """Returns the drawn tokens of all images on the devices; `example` is the position of their image.

    Raises UserError if they do not fit into memory, or none has a class.
    """
    limit = workers.memory_bytes() // MEMORY_SHARE
    num_images = -(-self.num_examples // jax.process_count())
    drawn: list[tuple[HostArray, HostArray, int]] = []  # tokens [n, D], classes [n] and index of each image
    num_tokens = 0
    for example, tokens in self.stream(selected, lambda tokens: tokens):
      flat, label, index = tokens.reshape(-1, tokens.shape[-1]), example['tokens'].ravel(), int(example['index'])
      rows = draw.rows(label, index)
      drawn.append((flat[rows], label[rows], index))
      num_tokens += len(rows)
      token_bytes = flat.shape[1] * flat.itemsize
      if (expected := num_tokens / len(drawn) * token_bytes * num_images) > limit:
        raise UserError(
            f'{self.name}: expected training tokens that fit into {limit / 2**30:,.1f} GiB, one part in '
            f'{MEMORY_SHARE} of the memory, got about {expected / 2**30:,.1f} GiB of {num_images:,} images. '
            f'Set tokens_per_image of the evaluation to at most {limit // token_bytes // num_images:,}.')
    return self._place(drawn)

  def _place(self, drawn: list[tuple[HostArray, HostArray, int]]) -> Data:
    """Places the drawn tokens of all processes on the devices, as `[G, R, …]`."""
    num_parts = len(self._shard.parts)
    total = sum(len(label) for _, label, _ in drawn)
    num_rows = int(multihost_utils.process_allgather(np.array(-(-total // num_parts), np.int32)).max())
    if not num_rows:
      raise UserError(f'{self.name}: expected a training image with a pixel that counts, got none. '
                      'Choose another split, or another class to ignore.')
    num_local, width = num_rows * num_parts, drawn[0][0].shape[1]
    features, labels = np.zeros((num_local, width), np.float32), np.zeros(num_local, np.int32)
    weights, examples = np.zeros(num_local, np.float32), np.zeros(num_local, np.int32)
    start = 0
    for tokens, label, index in drawn:
      rows = slice(start, start + len(label))
      features[rows], labels[rows], weights[rows], examples[rows] = tokens, label, 1., index
      start += len(label)
    sharding = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))
    return Data(*(jax.make_array_from_process_local_data(
        sharding, x.reshape(num_parts, num_rows, *x.shape[1:]), (self._shard.count, num_rows, *x.shape[1:]))
        for x in (features, labels, weights, examples)))


class Head(NamedTuple):
  """A classifier of tokens: its name in metrics, such as `knn5.t0.1`, and its scores `[B, N, C]`."""
  name: str
  score: Score


class Probe(NamedTuple):
  """A linear classifier of standardized tokens, as it is saved: `kernel [D, C]`, `bias [C]`, `mean std [D]`.

  class_names: of the masks.
  blocks: numbers of the blocks after which tokens are read, concatenated; () = the last one.
  norm: whether the last norm is applied to the tokens.
  values: of pixels in masks, that of the first class and the one to ignore, `[2]`.
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


@dataclasses.dataclass(frozen=True)
class Segmentation:
  """Evaluator of one view: mIoU, pixel accuracy and IoU by class, of each classifier.

  train: whose tokens are learned from.
  test: whose pixels are counted.
  settings: of the classifiers.
  class_names: of the masks.
  protocol: the part of the metrics' names that all classifiers share.
  """
  train: Tokens
  test: Tokens
  settings: schema.Segmentation
  class_names: Sequence[str]
  protocol: str

  def measure(self, selected: PyTree) -> Result:
    """Returns the metrics and the number of test images."""
    s = self.settings
    data = self.train.table(selected, Draw(s.tokens_per_image, s.token_seed))
    metrics: dict[str, float] = {}
    heads: list[Head] = []
    arrays: dict[str, HostArray] = {}
    if s.l2:
      score, penalty = self._fit(data)
      heads.append(Head(f'linear.l2_{f"{s.l2[0]:g}" if len(s.l2) == 1 else "sweep"}', score))
      metrics[f'l2.{heads[0].name}.{self.protocol}'] = penalty
      classifier, mean, std = (jax.device_get(part) for part in score.args)
      values = self.test.images.values
      arrays = Probe(
          kernel=classifier.kernel, bias=classifier.bias, mean=mean, std=std, class_names=np.array(self.class_names),
          blocks=np.array(s.features.blocks, np.int32), norm=np.array(s.norm),
          values=np.array([values.first, values.ignore]))._asdict()
    heads += [self._nearest(data, k) for k in s.neighbors]
    matrices, figures = self._count(selected, heads)
    for head, matrix in zip(heads, pixels.total(matrices), strict=True):
      metrics |= self._score(head.name, matrix)
    return Result(metrics, self.test.num_examples, None, f'miou.{heads[0].name}.{self.protocol}', figures=figures,
                  arrays=arrays)

  def _fit(self, data: Data) -> tuple[functools.partial[Array], float]:
    """Returns the logistic regression with the best penalty, and the penalty."""
    s = self.settings
    mean, std = linear.moments(data.features, data.weight)
    standardized = data._replace(features=linear.standardize(data.features, mean, std))
    fit = functools.partial(logistic.fit_all, num_classes=len(self.class_names), max_steps=s.max_steps)
    best = linear.choose(fit, standardized, s.l2, name=self.train.name, hold=self._hold, rank=linear.by_nll,
                         extend=True)
    return functools.partial(_linear_scores, best.linear, mean, std), best.setting

  def _hold(self) -> HostArray:
    """Returns which training images choose the penalty, `[S]` bool: evenly spaced ones."""
    size = self.train.num_examples
    number = max(1, round(self.settings.holdout * size))
    if number >= size:
      raise UserError(f'{self.train.name}: expected at least two images, one of which can be held out to choose a '
                      f'penalty, got {size}. Give a single l2 to choose nothing.')
    is_held = np.zeros(size, bool)
    is_held[(np.arange(number) * size + size // 2) // number] = True
    return is_held

  def _nearest(self, data: Data, k: int) -> Head:
    """Returns the classifier by the k nearest training tokens, which scores classes by their shares of the votes."""
    num_parts, num_rows = data.label.shape
    step = max(1, knn.BLOCK // num_parts)
    blocks = [(data.features[:, at:at + step], data.label[:, at:at + step], data.weight[:, at:at + step])
              for at in range(0, num_rows, step)]
    temperature = self.settings.temperature

    def score(tokens: Array) -> Array:
      rows = tokens.reshape(num_parts, -1, tokens.shape[-1])
      found = knn.search(rows, blocks, k, mesh=self.train.mesh, size=1)
      return _votes(*found, len(self.class_names), temperature).reshape(*tokens.shape[:2], -1)
    return Head(f'knn{k}.t{temperature:g}', score)

  def _count(self, selected: PyTree, heads: Sequence[Head]) -> tuple[HostArray, dict[str, HostArray]]:
    """Returns the confusion matrices `[heads, C, C]` of this process's images, and the overlays by name."""
    num_classes, images = len(self.class_names), self.test.images
    join = jax.jit(lambda *parts: jnp.concatenate(parts, -1), out_shardings=meshes.batch_sharding(self.test.mesh))
    matrices = np.zeros((len(heads), num_classes, num_classes), np.int64)
    figures: dict[str, HostArray] = {}
    for example, scores in self.test.stream(selected, lambda x: join(*(head.score(x) for head in heads))):
      true = example['mask']
      rows, columns = (pixels.spans(true.shape[axis], int(example['size'][axis]), images.window_px[axis],
                                    images.stride(axis), images.grid[axis]) for axis in (0, 1))
      masks = {'masks': true}
      for head, matrix, of_head in zip(heads, matrices, np.split(scores, len(heads), -1), strict=True):
        masks[head.name] = pixels.upsample(of_head, rows, columns, true.shape)
        matrix += pixels.count(true, masks[head.name], num_classes)
      index = int(example['index'])
      if index < self.settings.overlays:
        figures[f'{index:04d}'] = pixels.draw(images.read(index)[0], masks, self.class_names)
    return matrices, figures

  def _score(self, name: str, matrix: HostArray) -> dict[str, float]:
    """Returns the metrics of a classifier from its confusion matrix `[C, C]`."""
    if not matrix.sum():
      raise UserError(f'{self.test.name}: expected a pixel that counts, got none. '
                      'Choose another split, or another class to ignore.')
    scores, ending = pixels.scores(matrix), f'{name}.{self.protocol}'
    texts = [re.sub(r'[^A-Za-z0-9_-]', '_', class_name) for class_name in self.class_names]
    if len(set(texts)) < len(texts):  # such as of names in other letters
      texts = [f'{number}_{text}' for number, text in enumerate(texts)]
    of_classes = {f'iou.{ending}.class_{text}': float(value)
                  for text, value in zip(texts, scores.iou, strict=True) if not np.isnan(value)}
    return {f'miou.{ending}': scores.miou, f'accuracy.{ending}': scores.accuracy} | of_classes


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

  Raises UserError if the sides of the image are not multiples of those of the grid.
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
  layered = backbone if intermediates.is_layered(backbone) else None  # None = it has no blocks to read after
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
    def tokens(source: Source) -> Tokens:
      return Tokens(reader, resources.prepare, images(source), batch_size=resources.batch_size(name, settings),
                    mesh=resources.mesh, threads=config.data.threads, bar=resources.bar,
                    name=f'evals.{name} ({source.name}, {view})')
    return Segmentation(tokens(train), tokens(test), settings, class_names,
                        protocol=describe(settings, layers, images(test)))
  return make


def _class_names(name: str, settings: schema.Segmentation, source: Source) -> tuple[str, ...]:
  """Returns the names of the classes of the masks; numbers if the source names none."""
  names, num_classes = source.class_names, settings.num_classes
  if names and num_classes not in (0, len(names)):
    raise UserError(f'evals.{name}.num_classes: expected {len(names)}, got {num_classes}. {source.name} names its '
                    'classes; set it to 0.')
  if not names and not num_classes:
    raise UserError(f'evals.{name}.num_classes: expected the number of classes of the masks, got 0. {source.name} does '
                    'not name its classes: set it, or list them in PATH/classes.txt.')
  return names or tuple(f'class {i}' for i in range(num_classes))
