"""DINOv2: DINO, prediction of masked patches (iBOT), and features of images that are spread (arXiv 2304.07193).

The student sees a part of the global crops with blocks of patches masked, the teacher sees all of them whole. On the
masked patches the student learns to predict the teacher's output for the same patch. KoLeo draws the features of each
image away from those of the nearest other one.

Images of the batch form groups of a fixed size, which stand for the batch of one device in the authors' program: the
shares of masked patches are spread evenly over the crops of a group, and KoLeo looks for neighbors in it. So the loss
does not depend on the number of devices, and a group has a fixed number of slots for masked patches.

Differs from the DINOv2 program: blocks of masked patches are drawn on the device, in at most 64 tries an image, which
leaves out less than 1 % of the patches that the program masks; KoLeo and masks have groups of a set size, not a
device's batch; and without local crops L_DINO is a mean over two pairs, where the program divides by three.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.config.schema import Centering
from vit_jax.core.axes import labelled
from vit_jax.core.contracts import Backbone, TokenBackbone
from vit_jax.core.numerics import constrain_batch, counted, split_key
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Mean, Params, PyTree
from vit_jax.models.heads import Projector
from vit_jax.models.vit.vit import TOKENS
from vit_jax.objectives import dino, patches, spec
from vit_jax.objectives.dino import CENTER, Dino, Rates
from vit_jax.objectives.networks import TEACHER, copied

PATCH_CENTER = 'patch_center'
"""Key of `extra` for the center of the outputs for masked patches."""
PATCH_INFORMATION = 'patch_information'
"""Name of the metric that falls to 0 when the teacher's outputs for masked patches collapse."""
NUM_GLOBAL = 2
TRIES, FAILURES = 64, 10  # most rectangles that are drawn for a crop, and most that in a row do not fit
LEAST, LARGEST = 4, .5  # least number of patches of a rectangle, and their largest share of the image
ASPECT = .3, 1 / .3  # least and largest ratio of height to width
KOLEO_EPS = 1e-8


class Masks(NamedTuple):
  """Masked patches of B images, and s slots for them in each of G groups of images; unused slots have the weight 0."""
  is_masked: Array  # [B, 2, N] bool
  number: Array     # [G, s] i32, the number of a slot's patch among the `group * 2 * N` patches of its group
  weight: Array     # [G, s] f32, 1 / (number of masked patches in the crop of a slot's patch)


class Encoded(NamedTuple):
  """What a network computes for global crops."""
  pooled: Array         # [B, 2, D], features
  patch_outputs: Array  # [G, s, K], outputs of the head for the patches of the slots
  tokens: Array         # [B, 2, N, D], patch tokens


class Dinov2(Dino):
  """Objective: `w_d L_DINO + w_i L_iBOT + w_k (KoLeo(x_1) + KoLeo(x_2))`, x_v the class features of a global crop.

    L_iBOT = 1 / (2 B) sum over masked patches j of -1 / n_j sum_k P_t(j, k) log P_s(j, k),  n_j: masked in its crop
    KoLeo(x) = -mean over images i of log |x_i - x_nn(i)|,  x of length 1, nn(i) the nearest other one in the group

  L_DINO is that of `Dino`, with masked global crops, and `local_weight` times the pairs with a local crop. With
  Sinkhorn centering, P_t of patches is `sinkhorn(g_t / T_t)` over the masked patches of the whole batch.

  KoLeo is summed over `koleo_crops` global crops.

  Metrics beside those of DINO: `dino`, `ibot` and `koleo` (the terms, the last one without its weight), `masked`, the
  share of masked patches of all global crops, and of the targets of masked patches `patch_entropy`,
  `patch_information` and `patch_used_prototypes`, as DINO has them of crops.

  extra: as of `Dino`, and `patch_center [1, K]`.
  """
  hides = True
  """Whether the student does not see the patches that the masks name."""

  def __init__(self, backbone: TokenBackbone, projector: Projector, patch_projector: Projector | None,
               settings: schema.Dinov2, patch: int, *, rates: Rates) -> None:
    super().__init__(backbone, projector, student_temperature=settings.student_temperature, rates=rates,
                     centering=settings.centering, center_momentum=settings.center_momentum)
    self._tokens, self._patch_projector, self._settings, self._patch = backbone, patch_projector, settings, patch

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    params, extra = super().init(key, batch)
    width = jax.eval_shape(lambda: self._tokens.embed(params['backbone'], batch['views_global'][:, 0])).shape[-1]
    new: Params = {'mask_token': labelled(jnp.zeros((1, 1, width)), TOKENS)}
    num, projector = self._projector.prototypes, self._patch_projector
    if projector is not None:
      new['patch_projector'] = projector.init(jax.random.fold_in(key, 2), width)
      num = projector.prototypes
    teacher = {**extra[TEACHER], **copied(new)}
    return {**params, **new}, {**extra, TEACHER: teacher, PATCH_CENTER: jnp.zeros((1, num))}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    return self._losses(params, extra, batch, key, step)[0]

  def _losses(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> tuple[LossOut, Array]:
    """Returns the loss, and the student's patch tokens of the global crops, `[B, 2, N, D]`, some of them masked."""
    batch = counted(batch)
    mask_B = batch.get('mask')
    weight_B = jnp.ones(len(batch['views_global'])) if mask_B is None else (mask_B > 0).astype(jnp.float32)
    views, keys = batch['views_global'], split_key(key, 'global', 'local', 'masks')
    masks = self.draw(keys['masks'], views)
    student = self._encode(params, views, masks, hide=self.hides, train=True, key=keys['global'])
    student_BVK = self._project(params, student.pooled)
    if 'views_local' in batch:
      local_BVK = self._outputs(params, batch['views_local'], train=True, key=keys['local'])
      student_BVK = jnp.concatenate([student_BVK, local_BVK], axis=1)
    teacher_BtK, teacher_GsK = jax.lax.stop_gradient(self._taught(extra, views, masks))
    targets_BtK = self._targets(teacher_BtK, extra[CENTER], mask_B, step)
    log_p_BVK = jax.nn.log_softmax(student_BVK / self._student_temperature)
    dino_B = dino.cross_entropy(targets_BtK, log_p_BVK, local_weight=self._settings.local_weight)
    weight_Gs = masks.weight * jnp.take_along_axis(
        weight_B.reshape(masks.number.shape[0], -1), masks.number // masks.is_masked[0].size, axis=1)
    wanted_GsK = self._targets(teacher_GsK, extra[PATCH_CENTER], weight_Gs, step)
    error_Gs = -(wanted_GsK * jax.nn.log_softmax(student.patch_outputs / self._student_temperature)).sum(-1)
    s, total = self._settings, weight_B.sum()
    terms = {'dino': (dino_B * weight_B).sum(), 'ibot': (error_Gs * weight_Gs).sum() / NUM_GLOBAL,
             'koleo': (koleo(student.pooled[:, :s.koleo_crops], weight_B, s.group).sum(1) * weight_B).sum()}
    value = s.dino_weight * terms['dino'] + s.ibot_weight * terms['ibot'] + s.koleo_weight * terms['koleo']
    terms['masked'] = (masks.is_masked.mean((1, 2)) * weight_B).sum()
    used_Gs1 = (weight_Gs > 0)[..., None]
    metrics = {**self._health(targets_BtK, log_p_BVK, dino_B, extra, mask_B), **_patch_health(wanted_GsK, used_Gs1),
               **{name: Mean(jax.lax.stop_gradient(x), total) for name, x in terms.items()}}
    stats = {'sum': (teacher_BtK * weight_B[:, None, None]).sum((0, 1))[None], 'count': NUM_GLOBAL * total,
             'patch_sum': jnp.where(used_Gs1, teacher_GsK, 0.).sum((0, 1))[None], 'patch_count': used_Gs1.sum() * 1.}
    return LossOut(Mean(value, total), metrics, stats), student.tokens

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    center, m = extra[PATCH_CENTER], self._center_momentum
    if self._centering is Centering.MEAN:
      center = m * center + (1. - m) * stats['patch_sum'] / jnp.maximum(stats['patch_count'], 1.)
    return {**super().after_update(params, extra, stats, step), PATCH_CENTER: center}

  def draw(self, key: Key, views: Array) -> Masks:
    """Draws the masked patches of global crops `[B, 2, H, W, 3]`."""
    s, keys = self._settings, split_key(key, 'counts', 'order', 'blocks')
    grid = views.shape[2] // self._patch, views.shape[3] // self._patch
    num_patches, num_groups, num_crops = grid[0] * grid[1], views.shape[0] // s.group, NUM_GLOBAL * s.group
    num_hidden = int(num_crops * s.mask_share + 1e-6)
    edges = np.linspace(*s.mask_ratio, num_hidden + 1)
    share_Gh = edges[None, :-1] + np.diff(edges)[None] * jax.random.uniform(keys['counts'], (num_groups, num_hidden))
    count_Gh = jnp.minimum((num_patches * share_Gh).astype(jnp.int32), slots(edges, num_patches)[None])
    count_Gc = jnp.pad(count_Gh, ((0, 0), (0, num_crops - num_hidden)))
    order_Gc = jnp.argsort(jax.random.uniform(keys['order'], count_Gc.shape), axis=1)
    wanted_Gc = jnp.take_along_axis(count_Gc, order_Gc, axis=1)
    is_masked_GcN = blocks(keys['blocks'], wanted_Gc, grid)
    flat_Gn = is_masked_GcN.reshape(num_groups, -1)
    number_Gs = jnp.argsort(~flat_Gn, axis=1, stable=True)[:, :int(slots(edges, num_patches).sum())]
    each_Gc = 1. / jnp.maximum(is_masked_GcN.sum(-1), 1)
    weight_Gs = jnp.where(jnp.take_along_axis(flat_Gn, number_Gs, axis=1),
                          jnp.take_along_axis(each_Gc, number_Gs // num_patches, axis=1), 0.)
    return Masks(constrain_batch(is_masked_GcN.reshape(*views.shape[:2], num_patches)), number_Gs, weight_Gs)

  def _encode(self, params: Params, views: Array, masks: Masks, *, hide: bool, train: bool,
              key: Key | None) -> Encoded:
    """Encodes global crops `[B, 2, H, W, 3]`; the backbone does not see the masked patches if `hide`."""
    images = views.reshape(-1, *views.shape[2:])
    grid, backbone = (images.shape[1] // self._patch, images.shape[2] // self._patch), params['backbone']
    tokens = self._tokens.embed(backbone, images)
    if hide:
      is_masked = masks.is_masked.reshape(*tokens.shape[:2], 1)
      tokens = jnp.where(is_masked, params['mask_token'].astype(tokens.dtype), tokens)
    features = self._tokens.encode(backbone, tokens, self._tokens.positions(backbone, grid), grid=grid, train=train,
                                   key=key)
    tokens_B2ND = features.tokens.reshape(*views.shape[:2], *features.tokens.shape[1:])
    return Encoded(pooled=features.pooled.reshape(*views.shape[:2], -1),
                   patch_outputs=self._project_patches(params, tokens_B2ND, masks), tokens=tokens_B2ND)

  def _taught(self, extra: Extra, views: Array, masks: Masks) -> tuple[Array, Array]:
    """Returns the teacher's outputs for global crops, `[B, 2, K]`, and for masked patches, `[G, s, K]`."""
    teacher = self._encode(extra[TEACHER], views, masks, hide=False, train=False, key=None)
    return self._project(extra[TEACHER], teacher.pooled), teacher.patch_outputs

  def _project(self, params: Params, pooled_BVD: Array) -> Array:
    """Returns the outputs of the head for crops, `[B, V, K]`."""
    outputs_RK = self._projector.apply(params['projector'], pooled_BVD.reshape(-1, pooled_BVD.shape[-1]))
    return outputs_RK.reshape(*pooled_BVD.shape[:2], -1)

  def _project_patches(self, params: Params, tokens_B2ND: Array, masks: Masks) -> Array:
    """Returns the outputs for the patches of the slots, `[G, s, K]`."""
    picked_GsD = patches.pick(tokens_B2ND.reshape(len(masks.number), -1, tokens_B2ND.shape[-1]), masks.number)
    picked_RD = picked_GsD.reshape(-1, picked_GsD.shape[-1])
    if self._patch_projector is None:
      outputs_RK = self._projector.apply(params['projector'], picked_RD)
    else:
      outputs_RK = self._patch_projector.apply(params['patch_projector'], picked_RD)
    return outputs_RK.reshape(*masks.number.shape, -1)


def _patch_health(targets_GsK: Array, used_Gs1: Array) -> dict[str, Mean]:
  """Returns entropy, information and share of prototypes of the targets of masked patches, as metrics."""
  rows_RK, used_R = targets_GsK.reshape(-1, targets_GsK.shape[-1]), used_Gs1.reshape(-1).astype(jnp.float32)
  total = jnp.maximum(used_R.sum(), 1.)
  mean_K = jnp.where(used_R[:, None] > 0, rows_RK, 0.).sum(0) / total
  each = jnp.where(used_R > 0, dino.entropy(rows_RK), 0.).sum() / total
  values = {'patch_entropy': each, PATCH_INFORMATION: dino.entropy(mean_K) - each,
            'patch_used_prototypes': dino.share_used(rows_RK[:, None], used_R)}
  return {name: Mean(jax.lax.stop_gradient(x) * total, total) for name, x in values.items()}


def slots(edges: np.ndarray, num_patches: int) -> np.ndarray:
  """Returns the largest numbers of patches for shares between two neighbors of `edges`, `[h] i32`."""
  return (num_patches * edges[1:] + 1e-6).astype(np.int32)


def blocks(key: Key, wanted: Array, grid: tuple[int, int]) -> Array:
  """Returns masks of up to `wanted [...]` patches by rectangles, `[..., N]` bool (BEiT, with DINOv2's constants).

  A rectangle has 4 patches to half of the image, at most as many as are still wanted, and a ratio of height to width
  of 0.3 to 3.3, uniform in its logarithm. One that does not fit, or that adds none or too many patches, is drawn again;
  after 10 of them in a row the image is left as it is.
  """
  (height, width), wanted_R = grid, wanted.reshape(-1)
  noise_TR4 = jax.random.uniform(key, (TRIES, wanted_R.size, 4))
  row_1N, column_1N = jnp.divmod(jnp.arange(height * width)[None], width)
  most = int(LARGEST * height * width)

  def add_rectangle(carry: tuple[Array, Array], noise_R4: Array) -> tuple[tuple[Array, Array], None]:
    """Adds one more rectangle, if it fits, for each crop; `noise_R4` gives its area, its ratio and its place."""
    masked_RN, failures_R = carry
    room_R = jnp.minimum(wanted_R - masked_RN.sum(1), most)
    area_R = LEAST + noise_R4[:, 0] * (room_R - LEAST)
    ratio_R = jnp.exp(np.log(ASPECT[0]) + noise_R4[:, 1] * np.log(ASPECT[1] / ASPECT[0]))
    h_R, w_R = (jnp.round(jnp.sqrt(jnp.maximum(x, 0.))).astype(jnp.int32) for x in (area_R * ratio_R, area_R / ratio_R))
    down_R, right_R = noise_R4[:, 2], noise_R4[:, 3]
    top_R = (down_R * (height - h_R + 1)).astype(jnp.int32)
    left_R = (right_R * (width - w_R + 1)).astype(jnp.int32)
    inside_RN = ((row_1N >= top_R[:, None]) & (row_1N < (top_R + h_R)[:, None])
                 & (column_1N >= left_R[:, None]) & (column_1N < (left_R + w_R)[:, None]))
    new_R = (inside_RN & ~masked_RN).sum(1)
    fits_R = (h_R < height) & (w_R < width) & (new_R > 0) & (new_R <= room_R) & (failures_R < FAILURES)
    return (masked_RN | (inside_RN & fits_R[:, None]), jnp.where(fits_R, 0, failures_R + 1)), None

  start = jnp.zeros((wanted_R.size, height * width), bool), jnp.zeros(wanted_R.size, jnp.int32)
  (masked_RN, _), _ = jax.lax.scan(add_rectangle, start, noise_TR4)
  return masked_RN.reshape(*wanted.shape, -1)


def koleo(features: Array, weight: Array, group: int) -> Array:
  """Returns `-log` of the distance of each of the features `[B, V, D]` to the nearest one of its view, `[B, V]`.

  Neighbors are looked for in groups of `group` consecutive images with `weight [B]` above 0.
  """
  x_BVD = features.astype(jnp.float32)
  x_BVD = x_BVD * jax.lax.rsqrt(jnp.maximum(jnp.square(x_BVD).sum(-1, keepdims=True), KOLEO_EPS ** 2))
  x_GVgD = x_BVD.reshape(-1, group, *x_BVD.shape[1:]).swapaxes(1, 2)
  fixed_GVgD = jax.lax.stop_gradient(x_GVgD)
  dots = jnp.einsum('avid,avjd->avij', fixed_GVgD, fixed_GVgD, precision=jax.lax.Precision.HIGHEST)
  dots = jnp.where(jnp.eye(group, dtype=bool)[None, None], -1., dots)
  dots = jnp.where(weight.reshape(-1, 1, 1, group) > 0, dots, -2.)
  nearest_GVgD = jnp.take_along_axis(x_GVgD, dots.argmax(-1)[..., None], axis=2)
  distance_GVg = jnp.sqrt(jnp.square(x_GVgD - nearest_GVgD + KOLEO_EPS).sum(-1))
  return -jnp.log(distance_GVg + KOLEO_EPS).swapaxes(1, 2).reshape(x_BVD.shape[:2])


class Spec(dino.Spec):
  """Builds `Dinov2` from a config."""
  settings: schema.Dinov2

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Dinov2:
    return Dinov2(**self.arguments(backbone, lengths))

  def arguments(self, backbone: Backbone, lengths: Lengths) -> dict[str, Any]:
    """Returns the arguments of `Dinov2`."""
    s, (tokens, model) = self.settings, spec.tokens(backbone)
    patch_projector = self.projector(s.patch_out_dim, s.patch_bottleneck_dim) if s.patch_out_dim else None
    return {'backbone': tokens, 'projector': self.projector(s.out_dim, s.bottleneck_dim),
            'patch_projector': patch_projector, 'settings': s, 'patch': model.patch, 'rates': self.rates(lengths)}

  def collapse_metrics(self) -> tuple[str, ...]:
    weights = {dino.INFORMATION: self.settings.dino_weight, PATCH_INFORMATION: self.settings.ibot_weight}
    return tuple(name for name, weight in weights.items() if weight > 0)
