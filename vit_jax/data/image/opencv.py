"""Provides `cv2` (OpenCV), which is imported at the first use of one of its functions."""
from __future__ import annotations

from typing import TYPE_CHECKING

from vit_jax.core import lazy

if TYPE_CHECKING:
  import cv2 as cv2
else:
  cv2 = lazy.Module('cv2')


def quieten() -> None:
  """Sets OpenCV to one thread per image and turns off OpenCV's log: callers process many images, and report bad ones.

  libjpeg's warnings (`Corrupt JPEG data`) do not pass through OpenCV's log and are still printed.
  """
  cv2.setNumThreads(0)
  cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
