"""I-JEPA: predicts the features of blocks of an image from those of another block (Assran et al. 2023, 2301.08243).

The encoder sees a part of the patches, its EMA (the target encoder) all of them. A narrow predictor gets the features
of the visible patches and the positions of a target block, and predicts what the target encoder computes there. Images
have no other augmentation than crops.

Blocks have sizes of their own in each image, while shapes are those of the largest: what a block does not need is not
attended to and does not count.

Differs from the I-JEPA paper: its program draws one size of blocks for a batch, and cuts every context to the shortest
one of its device. Here sizes are drawn for each image, and a context is cut, at random, if it has more than
`context_ratio` of the patches.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.config.schema import JepaLoss
from vit_jax.core.contracts import Backbone, TokenBackbone
from vit_jax.core.numerics import counted, moments, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Mean, Params, Schedule
from vit_jax.models.decoders import Predictor
from vit_jax.objectives import patches, spec
from vit_jax.objectives.networks import TEACHER, WithTeacher, copied, init_backbone
from vit_jax.optim import schedules

DEVIATION = 'deviation'
"""Name of the metric that falls to 0 when the target encoder collapses."""
TRIES = 8  # sets of blocks that are drawn for each image, of which the first with enough context is used
NORM_EPS = 1e-5  # of LayerNorm in PyTorch


class Masks(NamedTuple):
  """Blocks of each image, as numbers of patches; with fewer patches than entries, the other entries do not count."""
  context: Array     # [B, n] i32
  is_context: Array  # [B, n] bool, which entries count
  targets: Array     # [B, M, t] i32, of M blocks
  is_target: Array   # [B, M, t] bool


class Boxes(NamedTuple):
  """Rectangles of patches: four arrays of one shape, i32."""
  top: Array
  left: Array
  height: Array
  width: Array


class IJepa(WithTeacher):
  """Objective: `L = mean over target patches j of d(p_j, t_j)` (section 3).

    t_j = LayerNorm of what the target encoder computes for the whole image, without affine
    p_j = the prediction, d = the mean over channels of squared errors, or of their smooth form
    after the update, with m of the step:    target <- m target + (1 - m) encoder

  Metric beside the loss: `deviation`, the mean standard deviation of t between images, at each place and channel: 0 if
  the target encoder computes the same for all images.

  extra: `teacher/backbone`, the target encoder.
  """
  _backbone: TokenBackbone

  def __init__(self, backbone: TokenBackbone, predictor: Predictor, settings: schema.IJepa, *,
               momentum: Schedule) -> None:
    self._backbone, self._predictor, self._settings, self._momentum = backbone, predictor, settings, momentum
    self._patch = predictor.encoder.patch

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys = split_key(key, 'backbone', 'predictor', 'mask_token')
    backbone, _, _ = init_backbone(self._backbone, keys['backbone'], batch['image'])
    params = {'backbone': backbone, 'predictor': self._predictor.init(keys['predictor']),
              'mask_token': self._predictor.init_mask(keys['mask_token'])}
    return params, {TEACHER: {'backbone': copied(backbone)}}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del step
    batch = counted(batch)
    image, keys = batch['image'], split_key(key, 'masks', 'encoder')
    masks = self.draw(keys['masks'], image)
    targets_BND = jax.lax.stop_gradient(self.targets(extra, image))
    predicted_BMtD = self.predict(params, image, masks, train=True, key=keys['encoder'])
    wanted_BMtD = patches.pick(targets_BND, masks.targets.reshape(len(image), -1)).reshape(predicted_BMtD.shape)
    error_BMt = distance(predicted_BMtD, wanted_BMtD, self._settings.loss)
    loss_B = jnp.where(masks.is_target, error_BMt, 0.).sum((1, 2)) / masks.is_target.sum((1, 2))
    weight_B = jnp.ones(len(image)) if 'mask' not in batch else batch['mask']
    deviation = jnp.sqrt(moments(targets_BND.reshape(len(image), -1), weight_B)[1]).mean()
    total = weight_B.sum()
    return LossOut(weighted_mean(loss_B, batch.get('mask')), {DEVIATION: Mean(deviation * total, total)}, {})

  def draw(self, key: Key, image: Array) -> Masks:
    """Draws the blocks of each image."""
    s, grid = self._settings, (image.shape[1] // self._patch, image.shape[2] // self._patch)
    keys, num_images = split_key(key, 'targets', 'context', 'order'), image.shape[0]
    targets = boxes(keys['targets'], (num_images, TRIES, s.num_targets), grid, area=s.target_area,
                    aspect=s.target_aspect)
    context = boxes(keys['context'], (num_images, TRIES), grid, area=s.context_area, aspect=(1., 1.))
    seen_BTN = covered(context, grid) & ~covered(targets, grid).any(2)
    chosen_B = jnp.argmax(jnp.minimum(seen_BTN.sum(-1), s.min_context), axis=1)  # the first try with enough context
    rows_B = jnp.arange(num_images)
    seen_BN = seen_BTN[rows_B, chosen_B]
    noise_BN = jax.random.uniform(keys['order'], seen_BN.shape)
    order_BN = jnp.argsort(jnp.where(seen_BN, noise_BN, 2.), axis=1)
    num_slots = s.slots(grid[0] * grid[1])
    chosen = Boxes(*(x[rows_B, chosen_B] for x in targets))
    slots = jnp.arange(largest(grid, area=s.target_area, aspect=s.target_aspect))[None, None]
    row, column = slots // chosen.width[..., None], slots % chosen.width[..., None]
    is_target = slots < (chosen.height * chosen.width)[..., None]
    numbers = (chosen.top[..., None] + row) * grid[1] + chosen.left[..., None] + column
    return Masks(order_BN[:, :num_slots], jnp.arange(num_slots)[None] < seen_BN.sum(1, keepdims=True),
                 jnp.where(is_target, numbers, 0), is_target)

  def targets(self, extra: Extra, image: Array) -> Array:
    """Returns what is predicted at each patch, `[B, N, D]`: the features of the target encoder, normalized."""
    features, _ = self._backbone.apply(extra[TEACHER]['backbone'], {}, image, train=False, key=None)
    x = features.tokens.astype(jnp.float32)
    away = x - x.mean(-1, keepdims=True)
    return away * jax.lax.rsqrt(jnp.square(away).mean(-1, keepdims=True) + NORM_EPS)

  def predict(self, params: Params, image: Array, masks: Masks, *, train: bool, key: Key | None) -> Array:
    """Returns the predictions for the target patches, `[B, M, t, D]` f32."""
    features = patches.encode(self._backbone, params['backbone'], image, masks.context, patch=self._patch, train=train,
                              key=key, mask=masks.is_context)
    return self._predictor.apply(params['predictor'], params['mask_token'], features.tokens, **masks._asdict(),
                                 grid=features.grid)


def distance(x: Array, y: Array, loss: JepaLoss) -> Array:
  """Returns the mean over the last axis of `(x - y)^2`, or of its smooth L1 form with beta 1."""
  away = jnp.abs(x - y)
  if loss is JepaLoss.SMOOTH_L1:
    return jnp.where(away < 1., jnp.square(away) / 2., away - .5).mean(-1)
  return jnp.square(away).mean(-1)


def boxes(key: Key, shape: tuple[int, ...], grid: tuple[int, int], *, area: tuple[float, float],
          aspect: tuple[float, float]) -> Boxes:
  """Draws rectangles of this share of the grid `(h, w)`, with this ratio of height to width; both uniform."""
  keys = split_key(key, 'area', 'aspect', 'top', 'left')
  share = jax.random.uniform(keys['area'], shape, minval=area[0], maxval=area[1])
  ratio = jax.random.uniform(keys['aspect'], shape, minval=aspect[0], maxval=aspect[1])
  height, width = (jnp.clip(jnp.round(x).astype(jnp.int32), 1, most)
                   for x, most in zip(sides(share * grid[0] * grid[1], ratio), grid, strict=True))

  def start(name: str, size: Array, most: int) -> Array:
    places = most - size + 1
    return jnp.minimum((jax.random.uniform(keys[name], shape) * places).astype(jnp.int32), places - 1)

  return Boxes(start('top', height, grid[0]), start('left', width, grid[1]), height, width)


def sides(count: Array | np.ndarray, ratio: Array | np.ndarray) -> tuple[Array, Array]:
  """Returns height and width of rectangles of `count` patches, not rounded."""
  return (count * ratio) ** .5, (count / ratio) ** .5  # type: ignore[return-value]


def largest(grid: tuple[int, int], *, area: tuple[float, float], aspect: tuple[float, float]) -> int:
  """Returns the number of patches of the largest rectangle that `boxes` draws.

  The rounded sides change where a side is half a number; ratios and shares are tried densely, with their ends.
  """
  share, ratio = np.meshgrid(np.linspace(*area, 101), np.linspace(*aspect, 1001))
  height, width = (np.clip(np.round(x), 1, most)
                   for x, most in zip(sides(share * grid[0] * grid[1], ratio), grid, strict=True))
  return int((height * width).max())


def covered(box: Boxes, grid: tuple[int, int]) -> Array:
  """Returns which patches rectangles of shape `[…]` have, `[…, N]` bool."""
  top, left, height, width = (x[..., None] for x in box)
  number = jnp.arange(grid[0] * grid[1]).reshape(*(1,) * (top.ndim - 1), -1)
  row, column = number // grid[1], number % grid[1]
  return (row >= top) & (row < top + height) & (column >= left) & (column < left + width)


class Spec(spec.Spec[schema.IJepa]):
  """Builds `IJepa` from a config."""
  collapse_advice = (
      'The targets of all images are nearly the same. Try a lower optimizer.lr, or a larger objective.momentum')

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> IJepa:
    s = self.settings
    encoder, model = spec.tokens(backbone)
    predictor = Predictor(s.predictor_width, s.predictor_depth, s.predictor_heads, model)
    return IJepa(encoder, predictor, s, momentum=schedules.ramp(s.momentum, lengths=lengths))

  def collapse_metrics(self) -> tuple[str, ...]:
    return (DEVIATION,)
