"""Small pictures, and the bytes of their files."""
from __future__ import annotations

import cv2
import numpy as np


def picture(seed: int, *, height: int = 12, width: int = 15) -> np.ndarray:
  """A smooth random picture, which JPEG keeps nearly as it is."""
  rng = np.random.default_rng(seed)
  return cv2.resize(rng.integers(0, 256, (3, 4, 3), np.uint8), (width, height))


def encode(image: np.ndarray, extension: str = '.png') -> bytes:
  """An RGB picture as a file's bytes."""
  return cv2.imencode(extension, image[..., ::-1])[1].tobytes()
