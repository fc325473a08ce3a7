"""Health of features, without labels: whether they collapse, and how much of their space they use.

Of the features `f [S, D]` of some images:

  rank_me     exp(entropy of the normalized singular values of f) (Garrido et al. 2023, arXiv 2210.02885, eq. 3):
              from 1, all features in one direction, to min(S, D)
  deviation   mean over dimensions of the standard deviation of unit features, times sqrt(D): 0 if all are the same,
              about 1 if they have all directions
  uniformity  log of the mean over pairs of images of exp(-2 |u_i - u_j|^2), of unit features (Wang and Isola 2020,
              arXiv 2005.10242, section 4.1.2): 0 if all are the same, below -3 if they are spread well
  alignment   mean over images of |u - u'|^2, where u' is of the mirrored middle of the image, 3/4 of its sides (section
              4.1.1, with one augmentation for all recipes): 0 if both have the same features

Low alignment is good only where deviation and uniformity are: it is 0 after a collapse, too. The features are those
that a head would read. All numbers are computed on the host in float64.
"""
from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.core.contracts import View
from vit_jax.core.types import Array, HostArray, PyTree
from vit_jax.data.source import Source, take
from vit_jax.evaluate import features
from vit_jax.evaluate.features import Split
from vit_jax.evaluate.resources import Make, Resources, pooled
from vit_jax.evaluate.results import Low, Measuring, Result

TINY = 1e-7  # added to shares of singular values (RankMe)
MIDDLE = .75  # share of each side of the image that the middle has
BLOCK = 1024  # images at a time that are compared with all others
ADVICE = ('The features of all images are nearly the same. Look at train/deviation, train/spread or train/information '
          'of the objective, and try a lower optimizer.lr')


def pairs(view: View, selected: PyTree, image: Array) -> Array:
  """Returns the features of an image, and after them those of its mirrored middle: `[B, 2 D]`."""
  height, width = image.shape[1:3]
  h, w = round(MIDDLE * height), round(MIDDLE * width)
  top, left = (height - h) // 2, (width - w) // 2
  mirrored = jax.image.resize(image[:, top:top + h, left:left + w], image.shape, 'bilinear')[:, :, ::-1]
  return jnp.concatenate([pooled(view, selected, x) for x in (image, mirrored)], axis=-1)


@dataclasses.dataclass(frozen=True)
class Health:
  """Evaluator of one view: `rank_me`, `deviation`, `uniformity` and `alignment`.

  split: of features as `pairs` reads them.
  min_rank: RankMe below which an alarm is raised.
  setting: the name of the setting `min_rank`, for the alarm.
  """
  split: Split
  min_rank: float
  setting: str

  def measure(self, selected: PyTree) -> Result:
    """Returns the metrics, and the alarm if RankMe is low."""
    rows = features.gather(self.split.place(self.split.table(selected)), self.split.mesh)
    both = rows['features'][rows['mask'] > 0].astype(np.float64)
    self.split.check_counted(len(both))
    of_image, of_mirrored = np.split(both, 2, axis=-1)
    units = unit(of_image)
    rank = rank_me(of_image)
    metrics = {'rank_me': rank,
               'deviation': float(units.std(0).mean() * units.shape[1] ** .5),
               'uniformity': uniformity(units),
               'alignment': float(np.square(units - unit(of_mirrored)).sum(-1).mean())}
    alarms = (Low('rank_me', rank, self.min_rank, self.setting, ADVICE),) if rank < self.min_rank else ()
    return Result(metrics, len(both), None, '', self.split.spent_s, alarms=alarms)


def unit(x: HostArray) -> HostArray:
  """Returns the rows of `x [S, D]` divided by their lengths; rows of zeros stay."""
  return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def rank_me(x: HostArray) -> float:
  """Returns the exponential of the entropy of the singular values of `x [S, D]`, divided by their sum."""
  values = np.linalg.svd(x, compute_uv=False)
  p = values / max(values.sum(), 1e-300) + TINY
  return float(np.exp(-(p * np.log(p)).sum()))


def uniformity(units: HostArray) -> float:
  """Returns the log of the mean of `exp(-2 |u_i - u_j|^2)` over pairs of different rows; 0 for a single row.

  The rows of `units [S, D]` have length 1, or are zeros.
  """
  total, num = 0., len(units)
  if num < 2:
    return 0.
  lengths = np.any(units, axis=-1).astype(np.float64)  # 1, or 0 for a row of zeros
  for start in range(0, num, BLOCK):
    cosine = units[start:start + BLOCK] @ units.T
    squared_distance = lengths[start:start + BLOCK, None] + lengths[None] - 2. * cosine
    total += float(np.exp(-2. * squared_distance).sum())
  self_pairs = float(np.exp(-4. * (lengths - np.square(units).sum(-1))).sum())
  return float(np.log((total - self_pairs) / (num * (num - 1))))


def spread(source: Source, num: int) -> Source:
  """Returns `num` examples at equal distances, as a source may be in the order of its classes; all if it has fewer."""
  if num >= len(source):
    return source
  return take(source, np.arange(num) * len(source) // num, name=f'{num} of {source.name}')


def build(resources: Resources, name: str, settings: schema.Health) -> Make:
  """Builds the evaluator for each view."""
  source = spread(resources.eval_source(name), settings.images)

  def make(view: str) -> Measuring:
    split = resources.split(name, settings, source, view, in_memory=True,
                            reader=functools.partial(pairs, resources.views[view]),
                            reads=f'pairs with the mirrored middle {MIDDLE}')
    return Health(split, min_rank=settings.min_rank, setting=f'evals.{name}.min_rank')
  return make
