"""OpenCV, which is imported when one of its functions is first used."""
from __future__ import annotations

from typing import TYPE_CHECKING

from vit_jax.core import lazy

if TYPE_CHECKING:
  import cv2 as cv2
else:
  cv2 = lazy.Module('cv2')


def quieten() -> None:
  """Sets OpenCV to one thread per image, as there are many images, and to no warnings, as bad images are logged here.

  libjpeg's own warnings (`Corrupt JPEG data`) do not go through OpenCV's log and remain.
  """
  cv2.setNumThreads(0)
  cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
