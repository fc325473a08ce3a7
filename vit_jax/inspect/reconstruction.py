"""What a masked autoencoder paints, beside what it was shown (He et al. 2022, arXiv 2111.06377, Figure 2).

Knows pixels alone: which network painted them, and how, is not its matter.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.core.types import HostArray
from vit_jax.inspect import figures

COLUMNS = ('input', 'masked', 'prediction', 'with what was shown')
GREY = 128  # of hidden patches


class Painted(NamedTuple):
  """Predictions for K pictures: `predicted [K, H, W, 3]` u8 everywhere, `hidden [K, H, W]` bool, where nothing was
  shown."""
  predicted: HostArray
  hidden: HostArray


def paint(predicted: HostArray, hidden: HostArray, *, mean: Sequence[float], std: Sequence[float]) -> Painted:
  """Predictions as pixels.

  Args:
    predicted: `[K, H, W, 3]` in the units that the network gets, `(x / 255 - mean) / std`.
    hidden: `[K, H, W, 3]`, 1 where nothing was shown, else 0.
    mean, std: of RGB in [0, 1].
  """
  pixels = np.asarray(predicted, np.float64) * np.asarray(std) + np.asarray(mean)
  return Painted(np.round(255 * np.clip(pixels, 0, 1)).astype(np.uint8), np.asarray(hidden)[..., 0] > .5)


def columns(image: HostArray, predicted: HostArray, hidden: HostArray) -> list[HostArray]:
  """Pictures for each of `COLUMNS`, all `[H, W, 3]` u8: input, what was shown of it, prediction, and both together."""
  hidden = hidden[..., None]
  return [image, np.where(hidden, np.uint8(GREY), image), predicted, np.where(hidden, predicted, image)]


def sheet(images: HostArray, painted: Painted, captions: Sequence[str]) -> bytes:
  """A PNG file with a row for each of the pictures `[K, H, W, 3]` u8."""
  rows = [columns(*each) for each in zip(images, painted.predicted, painted.hidden, strict=True)]
  return figures.contact_sheet(rows, captions=captions, heads=COLUMNS)
