"""Captions as sources store them: one or several texts for an image, and in prepared datasets also ids of tokens.

`texts` and `field` check what a source reads. `vit-jax prepare --tokens` writes ids: it calls `open_encoder`, and
`Encoder.features` for each example. With ids, training needs no tokenizer: `captions.py` calls `check`, and the source
calls `ids`. The ids of a caption are those of its pieces, all of them and without special tokens: a run cuts and pads
them to the length of its text tower. `info.json` states once how they were made.
"""
from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import TextRule, Tokens
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.data.image.headers import BadImage
from vit_jax.data.text import prompts, tokenizer
from vit_jax.data.text.tokenizer import Tokenizer

MOST_BYTES = 2**20
"""Size above which the captions of an image cannot be used."""
NAMES = ('caption', 'captions', 'text', 'texts')
"""Usual names of columns with captions."""
CAPTIONS, IDS, ENDS = 'captions', 'tokens', 'token_ends'
"""Features of a record: the texts, the ids of all of them, and the end of each."""


def texts(values: Iterable[Any], where: str) -> tuple[str, ...]:
  """Returns the captions of an image that are not empty.

  Args:
    values: bytes in UTF-8, or texts; those that are None are missing.
    where: place of the captions, for the message.

  Raises:
    BadImage: one is not UTF-8, not a text, or they are larger than 1 MiB.
  """
  found, num_bytes = [], 0
  for value in values:
    if value is None:
      continue
    try:
      text = value.decode() if isinstance(value, bytes) else value
      num_bytes += len(text.encode())
    except (UnicodeError, AttributeError, TypeError):
      raise BadImage(f'the example: expected captions in UTF-8 in {where}, got others') from None
    found.append(text.strip())
  if num_bytes > MOST_BYTES:
    raise BadImage(f'the example: expected captions of at most 1 MiB in {where}, got {num_bytes:,} bytes')
  return tuple(text for text in found if text)


def field(value: Any, path: Sequence[str]) -> list[Any]:
  """Returns the captions in a field of a JSON value, `a/b`: a text or a list of texts; none if it is missing."""
  for part in path:
    value = value.get(part) if isinstance(value, dict) else None
  return value if isinstance(value, list) else [value]


@dataclasses.dataclass(frozen=True)
class Encoding:
  """How captions were encoded.

  tokens: the family of the tokenizer.
  rule: how texts were simplified first; not AUTO.
  tokenizer: identity of its file (`tokenizer.file_digest`).
  start, end, pad: ids of the special tokens of the family.
  """
  tokens: Tokens
  rule: TextRule
  tokenizer: str
  start: int
  end: int
  pad: int

  def to_json(self) -> dict[str, str | int]:
    return {**dataclasses.asdict(self), 'tokens': self.tokens.value, 'rule': self.rule.value}


def from_json(found: documents.Field) -> Encoding:
  """Returns the encoding that a file describes. Raises UserError if a field is missing or wrong."""
  start, end, pad = (found.field(name).whole(0, 2**31 - 1) for name in ('start', 'end', 'pad'))
  return Encoding(found.field('tokens').choice(Tokens), found.field('rule').choice(TextRule),
                  found.field('tokenizer').text(), start, end, pad)


@dataclasses.dataclass(frozen=True)
class Encoder:
  """Encodes captions for a prepared dataset. Pickles to few bytes."""
  tokenizer: Tokenizer
  encoding: Encoding

  def features(self, captions: Sequence[str]) -> dict[str, list[bytes] | list[int]]:
    """Returns the features of a record. Raises BadImage if there are no captions."""
    if not captions:
      raise BadImage('the example: expected a caption, got none')
    ids = [self.tokenizer.pieces(prompts.simplify(text, self.encoding.rule)) for text in captions]
    return {CAPTIONS: [text.encode() for text in captions], IDS: list(itertools.chain(*ids)),
            ENDS: list(itertools.accumulate(map(len, ids)))}


def open_encoder(tokens: Tokens, file: str, rule: TextRule) -> Encoder:
  """Returns the encoder of captions with the tokenizer in `file`, which is '' for bytes.

  Raises:
    UserError: the tokenizer cannot be read.
  """
  made = tokenizer.open_given(tokens.value, file, length=schema.Text().length, source='--tokens')
  return Encoder(made, Encoding(tokens, prompts.rule_of(tokens.value, rule), tokenizer.file_digest(made.path),
                                *made.special))


def check(encoding: Encoding, text: schema.Text, where: str) -> None:
  """Checks that a run reads texts as the dataset at `where` stores them.

  Raises:
    UserError: the family, the rule or the tokenizer differs.
  """
  rule = prompts.rule_of(text.tokens.value, text.text_rule)
  for name, own, given in (('tokens', encoding.tokens, text.tokens), ('text_rule', encoding.rule, rule)):
    if own is not given:
      raise UserError(f'objective.text.{name}: expected {own.value}, with which the captions of {where} were encoded, '
                      f'got {given.value}. Set it, or prepare the dataset again.')
  if text.tokenizer:
    path = tokenizer.find(pathlib.Path(), text.tokens.value, given=text.tokenizer, source='objective.text')
    if (digest := tokenizer.file_digest(path)) != encoding.tokenizer:
      raise UserError(f'objective.text.tokenizer: expected the file with the SHA-256 {encoding.tokenizer}…, with which '
                      f'the captions of {where} were encoded, got {path} with {digest}…. Set the same file, or prepare '
                      'the dataset again.')
  if (highest := max(encoding.start, encoding.end, encoding.pad)) >= text.vocabulary:
    raise UserError(f'objective.text.vocabulary: expected more than {highest:,}, the id of a special token in {where}, '
                    f'got {text.vocabulary:,}. Set it to the number of tokens of the tokenizer.')


def ids(found: Mapping[str, Sequence[int]], where: str) -> list[list[int]]:
  """Returns the ids of each caption of a record. Raises BadImage if they do not fit together."""
  every, ends = list(found.get(IDS, ())), [0, *found.get(ENDS, ())]
  if len(ends) < 2 or ends[-1] != len(every) or any(a > b for a, b in itertools.pairwise(ends)):
    raise BadImage(f'the record: expected the ids of captions in {where}, got damaged ones')
  return [every[a:b] for a, b in itertools.pairwise(ends)]
