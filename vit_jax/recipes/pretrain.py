"""Length and batches of continued pre-training on one's own images. Chosen here; no paper has such a rule."""
from __future__ import annotations

import math
from typing import NamedTuple

from vit_jax.core.errors import UserError

BATCHES = (8, 64)
"""The smallest and the largest batch of `scale`."""
EPOCHS, STEPS = 20, (300, 50_000)
"""The length of `scale`, and its bounds in steps."""


class Scale(NamedTuple):
  """Length and batch size of a run; `every`: between evaluations."""
  batch_size: int
  steps: int
  every: str = '10 %'


def scale(num_images: int) -> Scale:
  """Returns batch size and length for a training set; 0 images: before they are counted.

  The batch size is the largest power of two that is at most an eighth of the training set, within `BATCHES`; the length
  is 20 epochs, within `STEPS`.

  Raises:
    UserError: there are fewer images than the smallest batch.
  """
  if not num_images:
    return Scale(BATCHES[1], STEPS[0])
  if num_images < BATCHES[0]:
    raise UserError(f'examples: expected at least {BATCHES[0]} training images, got {num_images}. Add images.')
  batch_size = min(max(BATCHES[0], 2 ** int(math.log2(num_images / 8))), BATCHES[1])
  return Scale(batch_size, min(max(STEPS[0], round(EPOCHS * num_images / batch_size)), STEPS[1]))
