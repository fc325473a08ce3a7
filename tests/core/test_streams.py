"""Random streams of the host: other streams, seeds and numbers give other draws; known bits do not change."""
from __future__ import annotations

from vit_jax.core import streams
from vit_jax.core.streams import Stream


def test_every_stream_seed_and_number_has_draws_of_its_own() -> None:
  found = {streams.words(stream, seed, number, num=2).tobytes()
           for stream in Stream for seed in (0, 1) for number in (0, 1, 2**32)}
  assert len(found) == len(Stream) * 2 * 3


def test_the_numbers_of_streams_and_their_bits_are_those_of_runs_that_resume() -> None:
  assert {stream.name: stream.value for stream in Stream} == {
      'ORDER': 1, 'AUGMENTATION': 2, 'MIXTURE': 3, 'CAPTIONS': 6, 'LENGTHS': 7,
      'ROW_GROUPS': 8, 'WINDOWS': 9}
  assert streams.words(Stream.ORDER, 3, 5, num=1).tolist() == [2032438044021696293]
  assert streams.seeds(Stream.MIXTURE, 3, num=2) == [4253259675, 2911685539]


def test_each_choice_is_about_equally_likely() -> None:
  counts = [0] * 3
  for step in range(300):
    counts[streams.choice(Stream.LENGTHS, 1, step, num=3)] += 1
  assert min(counts) > 70 and streams.choice(Stream.LENGTHS, 1, 0, num=1) == 0
