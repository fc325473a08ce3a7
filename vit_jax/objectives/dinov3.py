"""DINOv3: DINOv2, and patch tokens that keep the similarities of an earlier network (arXiv 2508.10104, section 4).

Long training makes features of images better and those of patches worse. Gram anchoring compares, for each global crop,
the similarities of all pairs of patches of the student with those of the Gram teacher: a network of an early step,
whose patches are still good. It changes seldom, or never. It may see the crop at a larger size; its map of features is
then reduced to the patches of the student.

As in the authors' program, the term is the mean over all pairs of patches, so that it does not depend on their number,
and the student's tokens are those of its masked crops; the paper writes the sum, and weight 2.

Differs from DINOv3's program: local and global crops share the last norm. For its largest network, not for its L/16,
the program has two.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.config.schema import PositionResize
from vit_jax.core import numerics
from vit_jax.core.contracts import Backbone, TokenBackbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Mean, Params, PyTree
from vit_jax.models.heads import Projector, normalize
from vit_jax.models.vit import interpolate
from vit_jax.objectives import dinov2
from vit_jax.objectives.dino import Rates
from vit_jax.objectives.dinov2 import Dinov2
from vit_jax.objectives.networks import TEACHER, copied, encode_views
from vit_jax.objectives.spec import Begin

GRAM = 'gram'
"""Key of `extra` for the Gram teacher, and name of the term."""


class Moments(NamedTuple):
  """When the Gram teacher is used and changes, in updates."""
  start: int  # the term is used from this update on
  taken: int  # after this update the EMA becomes the Gram teacher; 0 = the teacher is there from the beginning
  every: int  # after `start`, the EMA becomes the Gram teacher again every so many updates; 0 = never
  times: int  # how often it does so at most

  def changes(self, done: Array) -> Array:
    """Returns whether the EMA becomes the Gram teacher after `done` updates, a scalar bool."""
    since, is_new = done - self.start, jnp.zeros((), bool)
    if self.taken:
      is_new = is_new | (done == self.taken)
    if self.every:
      is_new = is_new | ((since > 0) & (since % self.every == 0) & (since // self.every <= self.times))
    return is_new


class Dinov3(Dinov2):
  """Objective: that of `Dinov2`, and from step `start` on `w_g L_Gram`, a mean over global crops of

    1 / P^2 |X X^T - X_g X_g^T|_F^2,    X, X_g [P, D]: patch tokens of student and Gram teacher, of length 1

  Metric beside those of `Dinov2`: `gram`, the term without its weight, 0 before `start`.

  extra: as of `Dinov2`, and `gram/backbone`, the Gram teacher.
  """

  def __init__(self, backbone: TokenBackbone, projector: Projector, patch_projector: Projector | None,
               settings: schema.Dinov2, patch: int, *, rates: Rates, weight: float, moments: Moments) -> None:
    super().__init__(backbone, projector, patch_projector, settings, patch, rates=rates)
    self._weight, self._moments = weight, moments

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    params, extra = super().init(key, batch)
    return params, {**extra, GRAM: {'backbone': copied(params['backbone'])}}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    batch = numerics.counted(batch)
    out, tokens_B2ND = self._losses(params, extra, batch, key, step)
    mask_B = batch.get('mask')
    weight_B = jnp.ones(len(tokens_B2ND)) if mask_B is None else (mask_B > 0).astype(jnp.float32)
    crops = batch['views_gram' if 'views_gram' in batch else 'views_global']
    views = batch['views_global'].shape
    grid = views[2] // self._patch, views[3] // self._patch

    def term() -> Array:
      with jax.named_scope(GRAM):
        fixed_B2ND = jax.lax.stop_gradient(self._map(extra[GRAM], crops, grid))
        return (distance(tokens_B2ND, fixed_B2ND).mean(1) * weight_B).sum()

    # Before the start the Gram teacher, which may see the larger images, costs nothing.
    value = jax.lax.cond(step >= self._moments.start, term, lambda: jnp.zeros(())) if self._moments.start else term()
    metrics = {**out.metrics, GRAM: Mean(jax.lax.stop_gradient(value), out.loss.weight)}
    return LossOut(Mean(out.loss.sum + self._weight * value, out.loss.weight), metrics, out.stats)

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    new, old = super().after_update(params, extra, stats, step), extra[GRAM]
    if self._moments.taken or self._moments.every:
      own = {'backbone': new[TEACHER]['backbone']}
      old = numerics.select(self._moments.changes(step + 1), own, old)
    return {**new, GRAM: old}

  def _map(self, params: Params, crops: Array, grid: tuple[int, int]) -> Array:
    """Returns the patch tokens of crops `[B, 2, H, W, 3]`, reduced to the student's `grid`, `[B, 2, N, D]`."""
    features = encode_views(self._backbone, params, crops, train=False, key=None)
    tokens = features.tokens.astype(jnp.float32)
    if features.grid != grid:
      rows, columns = interpolate.matrices(features.grid, grid, PositionResize.BICUBIC)
      tokens = jnp.einsum('ih,jw,bhwd->bijd', rows, columns, features.maps().astype(jnp.float32),
                          precision=jax.lax.Precision.HIGHEST)
    return tokens.reshape(*crops.shape[:2], grid[0] * grid[1], -1)


def distance(tokens: Array, fixed: Array) -> Array:
  """Returns the mean squared difference of the Gram matrices of tokens `[..., P, D]`, scaled to length 1; `[...]`."""
  def gram_matrix(x: Array) -> Array:
    unit = normalize(x.astype(jnp.float32), axis=-1)
    return jnp.einsum('...pd,...qd->...pq', unit, unit, precision=jax.lax.Precision.HIGHEST)

  return jnp.square(gram_matrix(tokens) - gram_matrix(fixed)).mean((-2, -1))


class Spec(dinov2.Spec):
  """Builds `Dinov3` from a config."""
  settings: schema.Dinov3

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Dinov3:
    gram = self.settings.gram
    moments = Moments(start=lengths.steps(gram.start), taken=0 if gram.weights else lengths.steps(gram.step),
                      every=lengths.steps(gram.refresh) if gram.refresh else 0, times=gram.refreshes)
    if moments.taken > moments.start:
      raise UserError(f'objective.gram.step: expected a moment before objective.gram.start={gram.start}, got '
                      f'{gram.step}. Set an earlier one.')
    return Dinov3(**self.arguments(backbone, lengths), weight=gram.weight, moments=moments)

  def begins_with(self) -> dict[str, Begin]:
    gram = self.settings.gram
    return {'gram': Begin(weights=gram.weights, part=GRAM, model=self.config.model, image_px=self.config.image_px,
                          view=gram.view, first=TEACHER)}
