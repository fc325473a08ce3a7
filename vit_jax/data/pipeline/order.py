"""The order of the training data as a pure function of (seed, position).

Position p counts examples from the start of the run, over all epochs and processes. Each epoch visits a new permutation
of the source, each example once. The permutation is a small block cipher (a Feistel network, applied until the result
is inside the dataset), so that any position is computed without the ones before it and without a table: resuming and
sharding are arithmetic, and 300 million examples need no memory. NumPy's Philox generator and SeedSequence are the only
sources of randomness; both have documented, stable streams, so the order does not depend on the version of a library.
"""
from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from vit_jax.core.types import HostArray

ROUNDS = 8  # 4 suffice for a pseudo-random permutation (Luby and Rackoff 1988); very small datasets need more
_SHUFFLE, _AUGMENT = 1, 2  # separate the random streams of a seed; `mixture` has 3
_SHARDS, _HOST, _LENGTH = 4, 5, 7  # `text/captions.py` has 6


def draw_length(seed: int, step: int, num: int) -> int:
  """Returns which of `num` lengths of sequences the batch of a step has: uniform, the same on all hosts."""
  return int(np.random.SeedSequence([_LENGTH, seed, step]).generate_state(1)[0]) % num


class Visit(Protocol):
  """Maps global `positions [B] i64` to source indexes `[B] i64`; pure, and pickles."""

  def __call__(self, positions: HostArray) -> HostArray:
    ...


@dataclasses.dataclass(frozen=True)
class Shuffled:
  """The order of a single source."""
  num_examples: int
  seed: int

  def __call__(self, positions: HostArray) -> HostArray:
    return shuffled(positions, num_examples=self.num_examples, seed=self.seed)


@dataclasses.dataclass(frozen=True)
class Cycled:
  """The first `period` positions again and again."""
  visit: Visit
  period: int

  def __call__(self, positions: HostArray) -> HostArray:
    return self.visit(positions % self.period)


@dataclasses.dataclass(frozen=True)
class Repeated:
  """Each example `times` times in a global batch, with another augmentation each time (arXiv 1901.09335).

  Row r of a batch of B is example r mod D of D = ceil(B / times) new ones: copies are far from each other, so that
  neighboring rows, which mixup pairs, differ. If `times` does not divide B, the last examples have one copy less.
  An epoch still has S rows, of S / times different examples.

  With `groups` of consecutive rows, at least `times`, rows are as DeiT's `RASampler` deals them to as many devices: row
  j of group q is copy t mod times of example floor(t / times), where t = B step + groups j + q. The copies of an
  example are in consecutive groups, and neighboring rows of a group differ.

  Differs from DeiT: one permutation of all images lasts `times` epochs, so that each is seen equally often. There each
  epoch has a permutation of its own, of which it takes the first third.
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
    different = -(-self.batch_size // self.times)
    return self.visit(steps * different + rows % different)


@dataclasses.dataclass(frozen=True, eq=False)
class HostShards:
  """The order of a source of which each host reads only its own shards, in every epoch another permutation of them.

  Of H hosts, host h has the shards h, h + H, h + 2H, ...; with `anew` those at these places of a permutation of the
  shards that each epoch has of its own. An epoch takes ceil(S / H) examples of each host: a host that has fewer repeats
  some, one that has more leaves some out, others in each epoch. The order is a function of (seed, position, H).

  sizes: examples of each shard, `[N] i64`.
  hosts: for each equal, contiguous part of a batch, the number of the host that loads it; each host has as many parts.
  batch_size: rows of a batch.
  """
  sizes: HostArray
  hosts: tuple[int, ...]
  batch_size: int
  seed: int
  anew: bool = False

  @property
  def num_hosts(self) -> int:
    return max(self.hosts) + 1

  def __call__(self, positions: HostArray) -> HostArray:
    steps, rows = np.divmod(np.asarray(positions, np.int64), self.batch_size)
    hosts, each = np.array(self.hosts), self.batch_size // self.num_hosts
    before = np.array([np.sum(hosts[:part] == host) for part, host in enumerate(self.hosts)])  # parts of the same host
    parts, places = np.divmod(rows, self.batch_size // len(hosts))
    own = steps * each + before[parts] * (self.batch_size // len(hosts)) + places
    epochs, nth = np.divmod(own, -(-int(self.sizes.sum()) // self.num_hosts))
    indexes = np.empty_like(own)
    for host, epoch in np.unique(np.stack([hosts[parts], epochs]), axis=1).T.tolist():
      here = (hosts[parts] == host) & (epochs == epoch)
      indexes[here] = self._of_host(nth[here], host, epoch)
    return indexes

  def shards(self, host: int, epoch: int) -> HostArray:
    """Returns the shards `[n] i64` that a host reads in an epoch."""
    order = np.arange(len(self.sizes))
    if self.anew:
      keys = np.random.SeedSequence([_SHARDS, self.seed, epoch]).generate_state(ROUNDS, np.uint64)
      order = permute(order, size=len(order), keys=keys)
    return order[host::self.num_hosts]

  def shard(self, index: int) -> range:
    """Returns the examples of the shard of an example."""
    ends = np.cumsum(self.sizes)
    number = int(np.searchsorted(ends, index, side='right'))
    return range(int(ends[number] - self.sizes[number]), int(ends[number]))

  def _of_host(self, nth: HostArray, host: int, epoch: int) -> HostArray:
    shards = self.shards(host, epoch)
    starts, ends = np.cumsum(self.sizes) - self.sizes, np.cumsum(self.sizes[shards])
    keys = np.random.SeedSequence([_HOST, self.seed, host, epoch]).generate_state(ROUNDS, np.uint64)
    places = permute(nth % ends[-1], size=int(ends[-1]), keys=keys)
    chosen = np.searchsorted(ends, places, side='right')
    return starts[shards[chosen]] + places - (ends[chosen] - self.sizes[shards[chosen]])


def shuffled(positions: HostArray, *, num_examples: int, seed: int) -> HostArray:
  """Returns the source indexes `[B] i64` of the examples at global `positions [B] i64`."""
  epochs, places = np.divmod(np.asarray(positions, np.int64), num_examples)
  indexes = np.empty_like(places)
  for epoch in np.unique(epochs):
    here = epochs == epoch
    keys = np.random.SeedSequence([_SHUFFLE, seed, int(epoch)]).generate_state(ROUNDS, np.uint64)
    indexes[here] = permute(places[here], size=num_examples, keys=keys)
  return indexes


def permute(places: HostArray, *, size: int, keys: HostArray) -> HostArray:
  """Maps `places [B]` by the permutation of `range(size)` that `keys [R] u64` select; `[B] i64`."""
  half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
  values = _encipher(places.astype(np.uint64), half_bits=half_bits, keys=keys)
  while (outside := values >= size).any():
    values[outside] = _encipher(values[outside], half_bits=half_bits, keys=keys)
  return values.astype(np.int64)


class ExampleRngs:
  """The random generators for the host augmentation of examples, one at a time. Not safe for threads.

  A new generator costs about 50 us, since NumPy asks the system for a seed that is then not used; one whose state is
  set costs 3 us and draws the same numbers.
  """

  def __init__(self, seed: int) -> None:
    words = np.random.SeedSequence([_AUGMENT, seed]).generate_state(1, np.uint64)
    self._bits = np.random.Philox(key=np.array([words[0], 0], np.uint64))
    self._state, self._generator = self._bits.state, np.random.Generator(self._bits)
    self._key = self._state['state']['key']

  def at(self, position: int) -> np.random.Generator:
    """Returns the generator for the example at a global position; it is valid until the next call."""
    self._key[1] = position
    self._bits.state = self._state
    return self._generator


def _encipher(values: HostArray, *, half_bits: int, keys: HostArray) -> HostArray:
  bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
  left, right = values >> bits, values & mask
  for key in keys:
    left, right = right, left ^ (_mix(right ^ key) & mask)
  return (left << bits) | right


def _mix(values: HostArray) -> HostArray:
  """Returns the finalizer of SplitMix64 (Steele et al. 2014): every output bit depends on every input bit."""
  values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return values ^ (values >> np.uint64(31))
