"""What the fuzzers share: mutations depend on the generator alone, and the messages that count as usable."""
from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import pytest

from tests import fuzzing
from vit_jax.core.errors import UserError


def test_a_mutation_depends_on_its_generator_alone() -> None:
  value = {'a': [1, 2, {'b': 'text'}], 'c': {'d': .5}}
  text = json.dumps(value).encode()
  for seed in range(100):
    rngs = [np.random.default_rng(seed) for _ in range(2)]
    first, second = (fuzzing.mutate(rng, text, fuzzing.OF_TEXT) for rng in rngs)
    assert first == second
    first, second = (repr(fuzzing.mutate_json(rng, value)) for rng in rngs)
    assert first == second
  assert value == {'a': [1, 2, {'b': 'text'}], 'c': {'d': .5}}


def test_each_case_is_read_refused_or_an_error() -> None:
  def refuse() -> None:
    raise UserError('a: expected b, got c.')

  def loop() -> None:
    while True:
      pass

  assert fuzzing.outcome(lambda: 3)['read'] == 3
  assert fuzzing.outcome(refuse)['refused'] == 'a: expected b, got c.'
  assert 'ZeroDivisionError' in fuzzing.outcome(lambda: 1 / 0)['error']
  assert 'Hang' in fuzzing.outcome(loop, cpu_s=.05)['error']


@pytest.mark.parametrize('text', [
    "x.json: expected an object, got 'list' object has no attribute 'get'", 'x: expected a number, got ValueError',
    "x: expected a number, got invalid literal for int() with base 10: 'a'", 'x: damaged', 'x: expected y, got \x1b[2J',
    "x: expected text, got 'utf-8' codec can't decode byte 0xff"])
def test_messages_in_the_words_of_python_do_not_count(text: str) -> None:
  with pytest.raises(AssertionError):
    fuzzing.check_message(text)


def test_a_usable_message_counts() -> None:
  fuzzing.check_message('labels.csv, line 3: expected a path inside the folder, got "/etc/passwd". Remove it.')


@pytest.mark.skipif(sys.platform != 'linux', reason='limits memory as Linux does')
def test_a_program_that_takes_too_much_memory_or_fails_is_seen(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'large.py').write_text(
      'import sys\nfrom tests import fuzzing\n'
      'def case(number):\n'
      '  return fuzzing.outcome(lambda: len(bytes(number * 2**30)))\n'
      'fuzzing.main(case, sys.argv[1:])\n')
  (tmp_path / 'work').mkdir()
  (tmp_path / 'large.py').rename(tmp_path / 'work' / 'large.py')
  small, large, larger = fuzzing.run('large', 1, 4, home=tmp_path)
  assert small['read'] == 2**30 and 'MemoryError' in larger['error']
  assert 'MemoryError' in large['error']  # as much as is allowed, beside the program's own
  with pytest.raises(AssertionError, match='MemoryError'):
    fuzzing.check([small, larger], 2)
