"""Small images, and the bytes of their files."""
from __future__ import annotations

import cv2
import numpy as np


def random_image(seed: int, *, height: int = 12, width: int = 15) -> np.ndarray:
  """Returns a smooth random image, which JPEG changes only slightly."""
  rng = np.random.default_rng(seed)
  return cv2.resize(rng.integers(0, 256, (3, 4, 3), np.uint8), (width, height))


def encode(image: np.ndarray, extension: str = '.png') -> bytes:
  """Returns the bytes of a file of an RGB image."""
  return cv2.imencode(extension, image[..., ::-1])[1].tobytes()
