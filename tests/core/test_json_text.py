"""JSON of others is read with messages that name the place, what was expected and what is there."""
from __future__ import annotations

import enum
import json
from collections.abc import Callable
from typing import Any

import pytest

from vit_jax.core import json_text
from vit_jax.core.errors import UserError
from vit_jax.core.json_text import Table

PYTHON = ('object has no', 'invalid literal', 'not subscriptable', 'codec', 'Expecting', 'Error(', 'NoneType')
"""Words of Python's own messages."""


class Kind(enum.Enum):
  A = 'a'
  B = 'b'


@pytest.mark.parametrize(('text', 'says'), [
    (b' ', 'an empty file'), (b'{"a": 1', 'no JSON at line 1, column 8, where it ends'),
    (b'{"a":\n x}', "no JSON at line 2, column 2, where 'x}' is there"), (b'\xff', 'text that is not UTF-8 at byte 0'),
    (b'[' * 100_000, 'JSON that is nested too deep'), (b'9' * 5_000, 'JSON with a number of too many digits')])
def test_text_that_is_not_json_is_named_by_its_place(text: bytes, says: str) -> None:
  with pytest.raises(ValueError, match=f'^{says}$') as caught:
    json_text.parse(text)
  assert not any(word in str(caught.value) for word in PYTHON)


READERS: dict[str, Callable[[Table], Any]] = {
    'number': lambda t: t.number('x', 0, 10), 'whole': lambda t: t.whole('x', 1, 10), 'text': lambda t: t.text('x'),
    'flag': lambda t: t.flag('x'), 'choice': lambda t: t.choice('x', Kind), 'texts': lambda t: t.texts('x', most=3),
    'numbers': lambda t: t.numbers('x', 2, 0, 10), 'pair': lambda t: t.numbers('x', 2, 1, 10, whole=True)}
RIGHT: dict[str, str] = {
    'number': '0|1|1.5|4.0|10', 'whole': '1|4.0|10', 'text': "''|'a'|'x\\n'", 'flag': 'True|False', 'choice': "'a'",
    'texts': "[]|['a', 'b']", 'numbers': '[1, 2]|[1, 2.5]', 'pair': '[1, 2]'}
"""What each reader accepts of `VALUES`."""
VALUES = (None, 0, -1, 1, 1.5, 4., 10, 11, 1e999, -1e999, 10**400, True, False, '', 'a', 'x\n', [], [1], [1, 2],
          [1, 2.5], [None, 1], ['a', 'b'], [['a']], [1, 1e999], [True, 1], {}, {'a': 1}, [1, 10**400], list('abcd'))


@pytest.mark.parametrize('name', READERS)
def test_every_reader_gives_its_type_or_says_what_it_expects(name: str) -> None:
  for value in VALUES:
    is_right = repr(value)[:99] in RIGHT[name].split('|')
    try:
      READERS[name](Table({'x': value}, 'a.json'))
      assert is_right, value
    except UserError as error:
      assert not is_right, value
      assert str(error).startswith('a.json, x: expected ') and ', got ' in str(error) and str(error).isprintable()
  with pytest.raises(UserError, match=r'^a.json, x: expected .*, got none\. Correct the file'):
    READERS[name](Table({}, 'a.json'))


def test_absent_values_have_their_default_and_other_values_none() -> None:
  table = Table(json.loads('{"a": null, "c": {"d": [1]}}'), 'a.json')
  assert table.number('a', default=None) is None and table.whole('b', default=7) == 7
  with pytest.raises(UserError, match=r'a.json, c, d: expected a number, got \[1\]'):
    table.table('c').number('d', default=0.)
  for wrong in ([], 'x', 3, None):
    with pytest.raises(UserError, match='a.json: expected a JSON object, got '):
      Table(wrong, 'a.json')
