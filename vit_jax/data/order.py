"""The order of the training data as a pure function of (seed, position).

For each batch `loader.py` calls a `Visit`, such as `Shuffled`, with the positions of the batch. The result is the index
of the example in the source at each position. `ExampleRngs.at` returns the random generator that augments the example
at a position. `windows.py` has the order for sources with row groups.

Position p counts examples from the start of the run, over all epochs and processes. Each epoch visits a new permutation
of the source, each example once. The permutation is a small block cipher (a Feistel network, applied until the result
is inside the dataset). Any position is computed without the ones before it and without a table. So a run can resume at
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

ROUNDS = 8  # 4 suffice for a pseudo-random permutation (Luby and Rackoff 1988); very small datasets need more


def draw_length_index(seed: int, step: int, num_lengths: int) -> int:
  """Returns the index in `recipe.native_lengths` of the number of tokens per image, for the batch of a step.

  All indexes below `num_lengths` are equally likely, and a step has the same index on all hosts.
  """
  return streams.choice(Stream.LENGTHS, seed, step, num=num_lengths)


class Visit(Protocol):
  """Maps global `positions [B] i64` to source indexes `[B] i64`. A pure function that can be pickled."""

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
  the first batches have these examples, counted in the order of `visit`:

      0 1 2 3 0 1 2 3
      4 5 6 7 4 5 6 7

  If `times` does not divide the batch size, the last examples of a batch have one copy less. With `times` 3 the first
  batch is 0 1 2 0 1 2 0 1.

  A batch may consist of several `groups` of consecutive rows, one for each device of DeiT. If there are at least
  `times` groups, the copies of an example go to different groups, as in DeiT's `RASampler`. With 4 groups (between the
  bars) and `times` 2 the first batches are

      0 2 | 0 2 | 1 3 | 1 3
      4 6 | 4 6 | 5 7 | 5 7

  An epoch has as many rows as without copies, so it visits 1 / `times` of the examples.
  Differs from DeiT: one permutation of all images lasts `times` epochs, so that each is visited equally often. In DeiT,
  where `times` is 3, each epoch has its own permutation, and uses only the first third of it.
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
    different = -(-self.batch_size // self.times)  # examples in a batch
    return self.visit(steps * different + rows % different)


def permute(offsets: HostArray, *, size: int, keys: HostArray) -> HostArray:
  """Applies to `offsets [B]` the permutation of `range(size)` that `keys [R] u64` select, and returns `[B] i64`.

  The cipher permutes the smallest `range(4**n)` that contains `size - 1`. Results that are too large are mapped again.
  """
  half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
  values = _encipher(offsets.astype(np.uint64), half_bits=half_bits, keys=keys)
  while (outside := values >= size).any():
    values[outside] = _encipher(values[outside], half_bits=half_bits, keys=keys)
  return values.astype(np.int64)


class ExampleRngs:
  """Returns the random generators for the host augmentation of examples. Each thread needs its own object.

  The key of a generator has two words: a random word that follows from the seed, and the position of the example.

  All generators are one object, whose state `at` sets anew. A new generator would cost about 50 us, because NumPy asks
  the system for a seed that is then not used. Setting the state costs 3 us, and the same numbers are drawn.
  """

  def __init__(self, seed: int) -> None:
    [word] = streams.words(Stream.AUGMENTATION, seed, num=1)
    self._bits = np.random.Philox(key=np.array([word, 0], np.uint64))
    self._state, self._generator = self._bits.state, np.random.Generator(self._bits)
    self._key = self._state['state']['key']

  def at(self, position: int) -> np.random.Generator:
    """Returns the generator for the example at a global position; it is valid until the next call."""
    self._key[1] = position
    self._bits.state = self._state
    return self._generator


def _encipher(values: HostArray, *, half_bits: int, keys: HostArray) -> HostArray:
  """Applies one Feistel round per key to numbers of `2 * half_bits` bits. It is a permutation for any keys."""
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
