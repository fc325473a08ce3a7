"""The order of the training data as a pure function of (seed, position).

For each batch `loader.py` calls a `Visit`, such as `Shuffled`, with the positions of the batch. The result is the index
of the example in the source at each position. `ExampleRngs.at` returns the random generator that augments the example
at a position. `windows.py` has the order for sources with row groups.

Positions count examples from the start of the run, over all epochs and processes. Each epoch visits each example once,
in a new permutation. The permutation is a small block cipher (a Feistel network, applied until the result is inside the
dataset). So the index at any position is computed without the positions before and without a table: a run can resume at
any step, a host can compute its rows alone, and 300 million examples need no memory. The only sources of randomness are
`core/streams.py` and NumPy's Philox generator, whose stream is documented and stable.
"""
from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from vit_jax.core import streams
from vit_jax.core.streams import Stream
from vit_jax.core.types import HostArray

ROUNDS = 8  # 4 rounds suffice for a pseudo-random permutation (Luby and Rackoff 1988); very small datasets need more


def draw_length_index(seed: int, step: int, num_lengths: int) -> int:
  """Draws the index of the number of tokens per image in `recipe.native_lengths`, for the batch of a step.

  All indexes below `num_lengths` are equally likely, and all hosts draw the same index for a step.
  """
  return streams.choice(Stream.LENGTHS, seed, step, num=num_lengths)


class Visit(Protocol):
  """Maps positions of the run `[B] i64` to indexes in the source `[B] i64`. A pure function that can be pickled."""

  def __call__(self, positions: HostArray) -> HostArray:
    ...


@dataclasses.dataclass(frozen=True)
class Shuffled:
  """The order of a single source: each epoch is another permutation of its examples."""
  num_examples: int
  seed: int

  def __call__(self, positions: HostArray) -> HostArray:
    epochs, offsets = np.divmod(np.asarray(positions, np.int64), self.num_examples)
    indexes = np.empty_like(offsets)
    for epoch in np.unique(epochs):
      in_epoch = epochs == epoch
      keys = streams.words(Stream.ORDER, self.seed, int(epoch), num=ROUNDS)
      indexes[in_epoch] = permute(offsets[in_epoch], size=self.num_examples, keys=keys)
    return indexes


@dataclasses.dataclass(frozen=True)
class Repeated:
  """Visits each example `times` times in a global batch, with another augmentation each time (arXiv 1901.09335).

  Copies are far from each other, so that neighboring rows, which mixup pairs, differ. With `batch_size` 8 and `times` 2
  the first two batches have these examples, numbered in the order of `visit`:

      0 1 2 3 0 1 2 3
      4 5 6 7 4 5 6 7

  If `times` does not divide the batch size, the last examples of a batch have one copy less. With `times` 3 the first
  batch is 0 1 2 0 1 2 0 1.

  A batch may consist of several `groups` of consecutive rows. In DeiT, each device has one group. If there are at least
  `times` groups, the copies of an example go to different groups, as in DeiT's `RASampler`. With 4 groups (between the
  bars) and `times` 2 the first two batches are

      0 2 | 0 2 | 1 3 | 1 3
      4 6 | 4 6 | 5 7 | 5 7

  An epoch has as many rows as without copies, so an epoch visits 1 / `times` of the examples.
  Differs from DeiT: one permutation of all images lasts `times` epochs, so that all images are visited equally often.
  In DeiT, where `times` is 3, each epoch has another permutation, and uses only the first third of the permutation.
  """
  visit: Visit
  times: int
  batch_size: int
  groups: int = 1

  def __call__(self, positions: HostArray) -> HostArray:
    steps, rows = np.divmod(np.asarray(positions, np.int64), self.batch_size)
    if self.groups >= self.times:
      group, slot = np.divmod(rows, self.batch_size // self.groups)
      return self.visit((steps * self.batch_size + slot * self.groups + group) // self.times)
    num_different = -(-self.batch_size // self.times)  # distinct examples in a batch
    return self.visit(steps * num_different + rows % num_different)


def permute(offsets: HostArray, *, size: int, keys: HostArray) -> HostArray:
  """Returns `offsets [B]` after a permutation of `range(size)`, `[B] i64`. `keys [R] u64` select the permutation.

  The cipher permutes the smallest `range(4**n)` that contains `size - 1`. Results of `size` or more are mapped again.
  """
  half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
  values = _encipher(offsets.astype(np.uint64), half_bits=half_bits, keys=keys)
  while (outside := values >= size).any():
    values[outside] = _encipher(values[outside], half_bits=half_bits, keys=keys)
  return values.astype(np.int64)


class ExampleRngs:
  """Returns the random generators for the host augmentation of examples. Each thread needs its own object.

  The key of a generator has two words: a random word that follows from the seed, and the position of the example.

  `at` returns the same generator object each time, after setting its state. A new generator would cost about 50 us,
  because NumPy asks the system for a seed that is not used. Setting the state costs 3 us; the drawn numbers are equal.
  """

  def __init__(self, seed: int) -> None:
    [word] = streams.words(Stream.AUGMENTATION, seed, num=1)
    self._bits = np.random.Philox(key=np.array([word, 0], np.uint64))
    self._state, self._generator = self._bits.state, np.random.Generator(self._bits)
    self._key = self._state['state']['key']

  def at(self, position: int) -> np.random.Generator:
    """Returns the generator for the example at a position of the run; the generator is valid until the next call."""
    self._key[1] = position
    self._bits.state = self._state
    return self._generator


def _encipher(values: HostArray, *, half_bits: int, keys: HostArray) -> HostArray:
  """Applies one Feistel round per key to numbers of `2 * half_bits` bits. The result is a permutation for any keys."""
  bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
  left, right = values >> bits, values & mask
  for key in keys:
    left, right = right, left ^ (_mix(right ^ key) & mask)
  return (left << bits) | right


def _mix(values: HostArray) -> HostArray:
  """Applies the finalizer of SplitMix64 (Steele et al. 2014): every output bit depends on every input bit."""
  values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return values ^ (values >> np.uint64(31))
