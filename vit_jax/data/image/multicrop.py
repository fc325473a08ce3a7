"""Several views of one image for self-supervision: two large crops and some small ones (DINO, arXiv 2104.14294).

Each view: random crop, resize, flip, colour jitter, grayscale, blur, solarize, in this order. The two global
views differ in how often they are blurred and solarized.
"""
from __future__ import annotations

import dataclasses

import numpy as np

from vit_jax.config import schema
from vit_jax.core.types import HostArray
from vit_jax.data.image import colors, crops, headers, image_ops, photometric
from vit_jax.data.source import Record

FIRST, SECOND, LOCAL = 0, 1, 2  # places in `schema.Views.blur` and `.solarize`


@dataclasses.dataclass(frozen=True)
class ViewsTransform:
  """The host part of a recipe with views: `views_global [2, H, W, 3] u8`, `views_local [V, h, w, 3] u8`, `label`."""
  recipe: schema.Recipe
  image_px: tuple[int, int]

  def __call__(self, record: Record, rng: np.random.Generator) -> dict[str, HostArray | np.int32]:
    stored, views = image_ops.as_rgb(record.image, headers.reading(self.recipe)), self.recipe.views
    both = [self.view(stored, rng, kind=kind) for kind in (FIRST, SECOND)]
    example: dict[str, HostArray | np.int32] = {'views_global': np.stack(both),
                                                'label': np.int32(record.label)}
    if views.num_local:
      example['views_local'] = np.stack([self.view(stored, rng, kind=LOCAL) for _ in range(views.num_local)])
    return example

  def view(self, stored: HostArray, rng: np.random.Generator, *, kind: int) -> HostArray:
    """One view of the stored picture `[H, W, 3] u8`."""
    recipe, views = self.recipe, self.recipe.views
    local = kind == LOCAL
    window = crops.sample(recipe.crop_sampler, (stored.shape[0], stored.shape[1]), rng=rng,
                          area=views.local_area if local else views.global_area, aspect=recipe.crop_aspect)
    image = image_ops.resize(image_ops.cut(stored, window), (views.local_px,) * 2 if local else self.image_px,
                             antialias=recipe.antialias, interpolation=recipe.interpolation)
    if recipe.flip and rng.random() < .5:
      image = np.ascontiguousarray(image_ops.flip(image))
    image = colors.jitter(image, views.jitter, rng)
    if rng.random() < views.grayscale:
      image = photometric.grayscale(image)
    if rng.random() < views.blur[kind]:
      image = colors.blur(image, rng)
    if rng.random() < views.solarize[kind]:
      image = photometric.solarize(image, photometric.SOLARIZE_FROM)
    return image
