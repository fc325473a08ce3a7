"""Random colours on the host: jitter and 3-Augment, as recipes say."""
from __future__ import annotations

import numpy as np

from vit_jax.config.schema import Jitter
from vit_jax.core.types import HostArray
from vit_jax.data.image import photometric

SIGMA_PX = (.1, 2.)  # of blurs; DINO (arXiv 2104.14294, after BYOL) and DeiT III (arXiv 2204.07118)


def is_on(settings: Jitter) -> bool:
  """Whether a jitter can change anything."""
  ranges = (settings.brightness, settings.contrast, settings.saturation, settings.hue)
  return settings.probability > 0 and any(ranges)


def jitter(image: HostArray, settings: Jitter, rng: np.random.Generator) -> HostArray:
  """Brightness, contrast, saturation and hue of `image [H, W, 3] u8`, in random order, as torchvision's."""
  if not is_on(settings) or (settings.probability < 1 and rng.random() >= settings.probability):
    return image
  for number in rng.permutation(4).tolist():
    name = ('brightness', 'contrast', 'saturation', 'hue')[number]
    spread = getattr(settings, name)
    if name == 'hue' and spread:
      image = photometric.hue(image, rng.uniform(-spread, spread))
    elif spread:
      factor = rng.uniform(max(0., 1. - spread), 1. + spread)
      image = getattr(photometric, name)(image, factor)
  return image


def three_augment(image: HostArray, rng: np.random.Generator) -> HostArray:
  """One of grayscale, solarize and Gaussian blur, with equal probability (DeiT III, section 3)."""
  match int(rng.integers(3)):
    case 0:
      return photometric.grayscale(image)
    case 1:
      return photometric.solarize(image, photometric.SOLARIZE_FROM)
    case _:
      return blur(image, rng)


def blur(image: HostArray, rng: np.random.Generator) -> HostArray:
  """Gaussian blur with a sigma uniform in .1 to 2 px."""
  return photometric.blur(image, rng.uniform(*SIGMA_PX))
