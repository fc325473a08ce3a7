"""The random streams of the host: every random draw that follows from the seed of a run uses one of these streams.

A draw is a pure function of the stream, the seed, and further numbers, such as the epoch. The order of the data depends
on the values of `Stream`: never use a value for another stream. Earlier versions used the values 4 and 5.
NumPy's SeedSequence is documented and stable, so draws do not depend on the version of a library. SeedSequence ignores
zeros at the end of its list of numbers, so each stream is always used with the same count of numbers.
"""
from __future__ import annotations

import enum

import numpy as np

from vit_jax.core.types import HostArray


@enum.unique
class Stream(enum.IntEnum):
  """The streams by the values that they give; in brackets, the further numbers on which a draw depends."""
  ORDER = 1         # the order of the examples of an epoch [epoch]
  AUGMENTATION = 2  # the first word of the keys of the examples' generators []; the second word is the position
  MIXTURE = 3       # the source of each position in a round [round]; the seeds of the sources []
  CAPTIONS = 6      # which of several texts an example gets [example, epoch]
  LENGTHS = 7       # the number of tokens of the images of a batch [step]
  ROW_GROUPS = 8    # the order of the row groups of an epoch [epoch]
  WINDOWS = 9       # the order of the rows of a window of row groups [epoch, lane, window]


def words(stream: Stream, seed: int, *numbers: int, num: int) -> HostArray:
  """Returns `num` random words, `[num] u64`."""
  return _sequence(stream, seed, *numbers).generate_state(num, np.uint64)


def seeds(stream: Stream, seed: int, *numbers: int, num: int) -> list[int]:
  """Returns `num` random numbers of 32 bits, which serve as seeds."""
  state: list[int] = _sequence(stream, seed, *numbers).generate_state(num).tolist()
  return state


def choice(stream: Stream, seed: int, *numbers: int, num: int) -> int:
  """Returns a number from 0 to `num - 1`, all equally likely."""
  return 0 if num == 1 else seeds(stream, seed, *numbers, num=1)[0] % num


def _sequence(stream: Stream, seed: int, *numbers: int) -> np.random.SeedSequence:
  return np.random.SeedSequence([stream.value, seed, *numbers])
