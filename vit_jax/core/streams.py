"""The random streams of the host: every draw that follows from the seed of a run names its stream here.

A draw is a pure function of its stream, the seed, and further numbers, such as that of an epoch. The order of the data
depends on the values of `Stream`: a value is never used for another stream, and 4 and 5 are those of earlier versions.
NumPy's SeedSequence is documented and stable, so that draws do not depend on the version of a library. It ignores zeros
at the end of its list of numbers, so that each stream is always used with the same count of numbers.
"""
from __future__ import annotations

import enum

import numpy as np

from vit_jax.core.types import HostArray


@enum.unique
class Stream(enum.IntEnum):
  """What is drawn; behind the colon, the further numbers that a draw depends on."""
  ORDER = 1         # of the examples of an epoch: epoch
  AUGMENTATION = 2  # first word of the keys of the generators of examples: nothing; the second is the position
  MIXTURE = 3       # which source has each place of a round: round; and, without it, the seeds of the sources
  CAPTIONS = 6      # which of several texts an example has: example, epoch
  LENGTHS = 7       # number of tokens of the images of a batch: step
  ROW_GROUPS = 8    # order of the row groups of an epoch: epoch
  WINDOWS = 9       # order of the rows of a window of row groups: epoch, lane, window


def words(stream: Stream, seed: int, *numbers: int, num: int) -> HostArray:
  """Returns `num` random words, `[num] u64`."""
  return _sequence(stream, seed, *numbers).generate_state(num, np.uint64)


def seeds(stream: Stream, seed: int, *numbers: int, num: int) -> list[int]:
  """Returns `num` random numbers of 32 bits, which serve as seeds."""
  drawn: list[int] = _sequence(stream, seed, *numbers).generate_state(num).tolist()
  return drawn


def choice(stream: Stream, seed: int, *numbers: int, num: int) -> int:
  """Returns a number below `num`, all equally likely."""
  return 0 if num == 1 else seeds(stream, seed, *numbers, num=1)[0] % num


def _sequence(stream: Stream, seed: int, *numbers: int) -> np.random.SeedSequence:
  return np.random.SeedSequence([stream.value, seed, *numbers])
