"""Mixup and cutmix on the device: each example is mixed with a partner.

`device/prepare.py` calls `mix` after normalization. `objectives/token_label.py` mixes tokens with `outside_box` and
`swap_pairs`. Random numbers depend only on the key and the group of rows.

Mixup (Zhang et al., arXiv 1710.09412) takes convex combinations of images and of labels:

  x' = lambda x_i + (1 - lambda) x_j,   lambda ~ Beta(alpha, alpha)

Lambda is drawn once per step, or once for each group of `mix_group` consecutive rows, as DeiT, MAE and timm draw it on
each device. Row i and its partner j are a fixed pair of rows of the *global* batch (rows 0 and 1, 2 and 3, ...), as
batches are already shuffled. So neither pairs nor groups depend on the distribution of the batch over devices.

Cutmix (Yun et al., arXiv 1905.04899) replaces a box of x_i by the same box of x_j, with the same pairs and one box per
group. The sides of the box are H and W times sqrt(1 - lambda), lambda ~ Beta(alpha, alpha). The center is uniform, the
box is clipped at the border, and labels are mixed by the area that was replaced.

Differs from big_vision, which mixes row i with row i - 1; and from timm, and so from DeiT and MAE, which mix row i of a
group of B with row B - 1 - i. After the shuffle each of these partners is random. With repeated augmentation, as in
timm, two copies of an example often have copies of the same other example as partners.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.numerics import class_targets
from vit_jax.core.types import Array, Batch, Key


def mix(batch: Batch, key: Key, *, recipe: schema.Recipe, num_classes: int) -> Batch:
  """Mixes a batch as `mix_pairs` by mixup, by cutmix, by one of the two at random, or by none, as the recipe says."""
  batch_size, height, width, _ = batch['image'].shape
  num_groups = schema.num_groups(batch_size, recipe.mix_group)
  if num_groups == 1:
    return mix_pairs(batch, draw(key, (height, width), recipe), num_classes=num_classes)
  lam = jax.vmap(lambda group_key: draw(group_key, (height, width), recipe))(jax.random.split(key, num_groups))
  return mix_pairs(batch, lam, num_classes=num_classes)


def draw(key: Key, size: tuple[int, ...], recipe: schema.Recipe) -> Array:
  """Returns lambda of one group, the weight of a row's own pixels: `[] f32` if mixup is always used, else `[H, W]`."""
  if recipe.mix_probability == 1 and not recipe.cutmix:
    return jax.random.beta(key, recipe.mixup, recipe.mixup, dtype=jnp.float32)
  mixup_key, cutmix_key, share_key, is_mixed_key = jax.random.split(key, 4)
  lam_HW = jnp.ones(size, jnp.float32)
  if recipe.mixup:
    lam_HW = lam_HW * jax.random.beta(mixup_key, recipe.mixup, recipe.mixup, dtype=jnp.float32)
  if recipe.cutmix:
    cutmix_lam_HW = draw_kept(cutmix_key, size, alpha=recipe.cutmix)
    cutmix_share = recipe.cutmix_share if recipe.mixup else 1.
    lam_HW = jnp.where(jax.random.bernoulli(share_key, cutmix_share), cutmix_lam_HW, lam_HW)
  is_mixed = jax.random.bernoulli(is_mixed_key, recipe.mix_probability)
  return jnp.where(is_mixed, lam_HW, 1.)


def draw_kept(key: Key, size: tuple[int, ...], *, alpha: float) -> Array:
  """Returns `[H, W] f32`, lambda of each pixel in cutmix: 0 in the box that is replaced, 1 around the box."""
  area_key, center_key = jax.random.split(key)
  return outside_box(center_key, size, area=1. - jax.random.beta(area_key, alpha, alpha, dtype=jnp.float32))


def outside_box(key: Key, size: tuple[int, ...], *, area: Array) -> Array:
  """Returns `[H, W] f32`: 0 in a box at a random center, 1 elsewhere.

  The box has the aspect ratio of the image and the fraction `area [] f32` of its pixels; it is clipped at the border.
  """
  sides_2 = jnp.floor(jnp.sqrt(area) * jnp.array(size, jnp.float32))
  center_2 = jax.random.randint(key, (2,), 0, jnp.array(size))
  start_2 = center_2 - sides_2 // 2
  stop_2 = center_2 + sides_2 // 2
  rows_H = jnp.arange(size[0])
  columns_W = jnp.arange(size[1])
  in_rows_H = (rows_H >= start_2[0]) & (rows_H < stop_2[0])
  in_columns_W = (columns_W >= start_2[1]) & (columns_W < stop_2[1])
  return 1. - (in_rows_H[:, None] & in_columns_W[None, :]).astype(jnp.float32)


def mix_pairs(batch: Batch, lam: Array | float, *, num_classes: int) -> Batch:
  """Mixes images and labels of neighboring rows with a given lambda; writes `image` and `labels [B, C] f32`.

  A row whose partner is padding or missing stays as it is.

  Args:
    batch: `image [B, H, W, 3] f32`; `labels [B, C]`, or else `label_list [B, T] i32`, or else `label [B] i32`;
      optional `mask [B]`, 0 for rows of padding.
    lam: `[] f32`, or `[H, W] f32`, whose mean is the weight of the labels; for G groups `[G]` or `[G, H, W]`.
    num_classes: C of the labels that are made from `label_list` or `label`.
  """
  labels_BC = class_targets(batch, num_classes)
  lam = jnp.asarray(lam, jnp.float32)
  lam = lam[None] if lam.ndim in (0, 2) else lam  # one group
  batch_size = labels_BC.shape[0]
  assert batch_size % lam.shape[0] == 0, 'groups of equal size'

  def combine(values: Array, lam: Array) -> Array:
    """Mixes `values [B, ...]` by lambda of each group, `[G]` or `[G, H, W]`."""
    weight = jnp.broadcast_to(lam[:, None], (lam.shape[0], batch_size // lam.shape[0], *lam.shape[1:]))
    weight = weight.reshape((batch_size, *lam.shape[1:]) + (1,) * (values.ndim - lam.ndim))
    if 'mask' in batch:
      has_partner_B = swap_pairs(batch['mask']) > 0
      weight = jnp.where(has_partner_B.reshape((-1,) + (1,) * (values.ndim - 1)), weight, 1.)
    return weight * values + (1. - weight) * swap_pairs(values)
  return batch | {'image': combine(batch['image'], lam),
                  'labels': combine(labels_BC, lam.reshape(lam.shape[0], -1).mean(1))}


def swap_pairs(values: Array) -> Array:
  """Returns `values [B, ...]` with rows 2i and 2i + 1 exchanged; the last row of an odd batch stays."""
  num_paired = values.shape[0] // 2 * 2
  # A reshape keeps pairs on their device; indexing would gather the complete batch.
  pairs = values[:num_paired].reshape((num_paired // 2, 2) + values.shape[1:])
  swapped = pairs[:, ::-1].reshape((num_paired,) + values.shape[1:])
  return swapped if num_paired == values.shape[0] else jnp.concatenate([swapped, values[num_paired:]])
