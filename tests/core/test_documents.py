"""JSON of others is read within limits, with messages that name the place, what was expected and what is there."""
from __future__ import annotations

import enum
import errno
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from vit_jax.core import documents, failures
from vit_jax.core.documents import Field
from vit_jax.core.errors import UserError

PYTHON = ('object has no', 'invalid literal', 'not subscriptable', 'codec', 'Expecting', 'Error(', 'NoneType')
"""Words of Python's own messages."""


class Kind(enum.Enum):
  A = 'a'
  B = 'b'


@pytest.mark.parametrize(('text', 'says'), [
    (b' ', 'an empty file'), (b'{"a": 1', 'no JSON at line 1, column 8, where it ends'),
    (b'{"a":\n x}', "no JSON at line 2, column 2, where 'x}' is there"), (b'\xff', 'text that is not UTF-8 at byte 0'),
    (b'[' * 100_000, 'JSON that is nested too deep'), (b'[' * 101 + b']' * 101, 'JSON that is nested too deep'),
    (b'{"a":' * 101 + b'1' + b'}' * 101, 'JSON that is nested too deep'),
    (b'-' + b'9' * 301, 'JSON with a number of too many digits'),
    (b'1' + b'0' * 250 + b'e99', 'JSON with the number 1000'),
    (b'9' * 5_000, 'JSON with a number of too many digits'), (b'[1' + b'0' * 400 + b']', 'JSON with a number of too'),
    (b'-1e400', 'JSON with the number -1e400, which is too large'), (b'[NaN]', 'JSON with NaN, which is not a number'),
    (b'-Infinity', 'JSON with -Infinity, which is not a number'), (b'{"a": 1, "b": 2, "a": 3}', "the field 'a' twice")])
def test_text_that_is_not_json_or_exceeds_a_limit_is_named(text: bytes, says: str) -> None:
  with pytest.raises(ValueError, match=f'^{says}') as caught:
    documents.parse(text)
  assert not any(word in str(caught.value) for word in PYTHON)


def test_values_within_the_limits_are_read_as_they_are() -> None:
  text = f'[{"[" * 99}{"]" * 99}, {10**299}, {-10**299}, {"9" * 199}e99, 1e300, -0.5e-999, "{"9" * 400}", '
  text += '"[[[", "e999"]'
  assert documents.parse(text) == json.loads(text) == documents.parse(b'\xef\xbb\xbf' + text.encode())
  assert repr(documents.parse('[NaN, -Infinity, 1e999]', nan=True)) == '[nan, -inf, inf]'


def test_a_file_that_is_too_large_is_not_read(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'a.json'
  with open(path, 'wb') as file:
    file.truncate(2**36)
  said = 'a file of 68,719,476,736 bytes; at most 67,108,864 are read'
  with pytest.raises(ValueError, match=said):
    documents.load(path)
  with pytest.raises(UserError, match=f'a.json: expected a JSON object, got {said}. Restore the file'):
    documents.read(path)
  with pytest.raises(UserError, match='expected notes, got "No such file or directory". Look.'):
    documents.read(tmp_path / 'none', expected='notes', advice='Look.')


def test_reading_is_repeated_while_the_storage_fails(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / 'a.json').write_text('{"a": 1}')
  errors = [OSError(errno.EIO, 'Input/output error'), OSError(errno.ESTALE, 'Stale file handle')]
  read_bytes = documents.read_bytes

  def failing(path: documents.AnyPath, max_bytes: int) -> bytes:
    if errors:
      raise errors.pop()
    return read_bytes(path, max_bytes)

  monkeypatch.setattr(documents, 'read_bytes', failing)
  monkeypatch.setattr(failures.time, 'sleep', lambda seconds: None)
  assert documents.read(tmp_path / 'a.json').object() == {'a': 1} and not errors


READERS: dict[str, Callable[[Field], Any]] = {
    'number': lambda f: f.number(0, 10), 'whole': lambda f: f.whole(1, 10), 'text': Field.text, 'flag': Field.flag,
    'choice': lambda f: f.choice(Kind), 'texts': lambda f: f.texts(3), 'numbers': lambda f: f.numbers(2, 0, 10),
    'pair': lambda f: f.numbers(2, 1, 10, whole=True), 'object': Field.object, 'list': Field.list}
RIGHT: dict[str, str] = {
    'number': '0|1|1.5|4.0|10', 'whole': '1|4.0|10', 'text': "''|'a'", 'flag': 'True|False', 'choice': "'a'",
    'texts': "[]|['a', 'b']", 'numbers': '[1, 2]|[1, 2.5]', 'pair': '[1, 2]', 'object': "{}|{'a': 1}"}
"""What each reader accepts of `VALUES`."""
VALUES = (None, 0, -1, 1, 1.5, 4., 10, 11, 1e999, -1e999, 10**400, True, False, '', 'a', 'x\n', '\ud800', [], [1],
          [1, 2], [1, 2.5], [None, 1], ['a', 'b'], [['a']], [1, 1e999], [True, 1], {}, {'a': 1}, [1, 10**400],
          list('abcd'))


@pytest.mark.parametrize('name', READERS)
def test_every_reader_gives_its_type_or_says_what_it_expects(name: str) -> None:
  for value in VALUES:
    is_right = isinstance(value, list) if name == 'list' else repr(value)[:99] in RIGHT[name].split('|')
    try:
      READERS[name](Field({'x': value}, 'a.json').field('x'))
      assert is_right, value
    except UserError as error:
      assert not is_right, value
      assert str(error).startswith('a.json, x: expected ') and ', got ' in str(error) and str(error).isprintable()
  with pytest.raises(UserError, match=r'^a.json: expected the field x, got none\. Restore the file'):
    READERS[name](Field({}, 'a.json').field('x'))


def test_absent_values_have_their_default_and_other_values_none() -> None:
  table = Field(json.loads('{"a": null, "c": {"d": [1], "e": [{}]}}'), 'a.json')
  assert table.field('a', default=None).number() is None and table.field('b', default=7).whole() == 7
  assert 'a' not in table and 'c' in table and table.optional('b') is None and table.object_or_empty('a').object() == {}
  with pytest.raises(UserError, match=r'a.json, c.d: expected a finite number, got \[1\]'):
    table.object_or_empty('c').field('d', default=0.).number()
  with pytest.raises(UserError, match=r'a.json, c.e\[0\]: expected a list, got an object with 0 fields'):
    next(table.object_or_empty('c').field('e').elements()).list()
  for wrong in ([], 'x', 3, None):
    with pytest.raises(UserError, match='a.json: expected a JSON object, got '):
      Field(wrong, 'a.json').field('a')
