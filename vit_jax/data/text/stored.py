"""Captions as sources store them: one or several texts for an image, and in prepared datasets also ids of tokens.

Sources call `texts` and `field` for the captions that they read. To write ids, `vit-jax prepare --tokens` calls
`open_encoder`, and then `Encoder.features` for each example. Training on ids needs no tokenizer: `captions.py` calls
`check`, and the source calls `ids`. `info.json` has the `Encoding` of all records. Each record has three lists:

  captions    the texts, in UTF-8
  tokens      the ids of all captions, one after the other, without special tokens, neither cut nor padded
  token_ends  for each caption, the index in `tokens` after its last id: [2, 5] for captions of 2 and 3 ids
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

MAX_BYTES = 2**20
"""The largest size of all captions of an image together."""
NAMES = ('caption', 'captions', 'text', 'texts')
"""Usual names of columns with captions."""
CAPTIONS, IDS, ENDS = 'captions', 'tokens', 'token_ends'
"""Names of the three lists of a record."""


def texts(values: Iterable[Any], where: str) -> tuple[str, ...]:
  """Returns the captions of an image that are not empty. `values` are texts, or bytes in UTF-8; None is skipped.

  Raises BadImage, which names `where`, if a caption is not UTF-8 or not a text, or all captions exceed `MAX_BYTES`.
  """
  captions, num_bytes = [], 0
  for value in values:
    if value is None:
      continue
    try:
      text = value.decode() if isinstance(value, bytes) else value
      num_bytes += len(text.encode())
    except (UnicodeError, AttributeError, TypeError):
      raise BadImage(f'the example: expected captions in UTF-8 in {where}, got others') from None
    captions.append(text.strip())
  if num_bytes > MAX_BYTES:
    raise BadImage(f'the example: expected captions of at most 1 MiB in {where}, got {num_bytes:,} bytes')
  return tuple(text for text in captions if text)


def field(value: Any, path: Sequence[str]) -> list[Any]:
  """Returns the list in a field of a JSON value; another value as a list of this value; [None] if there is no field.

  `path` has the names of nested fields: `('info', 'caption')` for `{"info": {"caption": "a dog"}}`.
  """
  for name in path:
    value = value.get(name) if isinstance(value, dict) else None
  return value if isinstance(value, list) else [value]


@dataclasses.dataclass(frozen=True)
class Encoding:
  """How captions were encoded.

  tokens: the family of the tokenizer.
  rule: how texts were simplified before; not AUTO.
  tokenizer: the digest of the tokenizer file (`tokenizer.file_digest`).
  start, end, pad: the ids of the special tokens of the family.
  """
  tokens: Tokens
  rule: TextRule
  tokenizer: str
  start: int
  end: int
  pad: int

  def to_json(self) -> dict[str, str | int]:
    return {**dataclasses.asdict(self), 'tokens': self.tokens.value, 'rule': self.rule.value}


def from_json(description: documents.Field) -> Encoding:
  """Returns the encoding in `info.json` that `to_json` wrote. Raises UserError if a field is wrong or missing."""
  start, end, pad = (description.field(name).whole(0, 2**31 - 1) for name in ('start', 'end', 'pad'))
  return Encoding(description.field('tokens').choice(Tokens), description.field('rule').choice(TextRule),
                  description.field('tokenizer').text(), start, end, pad)


@dataclasses.dataclass(frozen=True)
class Encoder:
  """Encodes captions for a prepared dataset. Its pickle is small, as it contains only the path of the tokenizer."""
  tokenizer: Tokenizer
  encoding: Encoding

  def features(self, captions: Sequence[str]) -> dict[str, list[bytes] | list[int]]:
    """Returns the three lists of a record by name. Raises BadImage if there are no captions."""
    if not captions:
      raise BadImage('the example: expected a caption, got none')
    ids_of_captions = [self.tokenizer.plain_ids(prompts.simplify(text, self.encoding.rule)) for text in captions]
    return {CAPTIONS: [text.encode() for text in captions], IDS: list(itertools.chain(*ids_of_captions)),
            ENDS: list(itertools.accumulate(map(len, ids_of_captions)))}


def open_encoder(tokens: Tokens, file: str, rule: TextRule) -> Encoder:
  """Opens the tokenizer in `file`, '' for bytes, to encode captions. Raises UserError if the file cannot be read."""
  opened = tokenizer.open_tokenizer(tokens.value, file, length=schema.Text().length, source='--tokens')
  start, end, pad = opened.special
  return Encoder(opened, Encoding(tokens, prompts.rule_of(tokens.value, rule), tokenizer.file_digest(opened.path),
                                  start, end, pad))


def check(encoding: Encoding, text: schema.Text, where: str) -> None:
  """Raises UserError if a run encodes texts differently from how the captions of the dataset at `where` were encoded.

  The family, the rule and the tokenizer file, if it is set, must be equal. The vocabulary must have all special ids.
  """
  rule = prompts.rule_of(text.tokens.value, text.text_rule)
  for name, expected, value in (('tokens', encoding.tokens, text.tokens), ('text_rule', encoding.rule, rule)):
    if value is not expected:
      raise UserError(f'objective.text.{name}: expected {expected.value}, with which the captions of {where} were '
                      f'encoded, got {value.value}. Set it, or prepare the dataset again.')
  if text.tokenizer:
    path = tokenizer.find(pathlib.Path(), text.tokens.value, requested=text.tokenizer, source='objective.text')
    if (digest := tokenizer.file_digest(path)) != encoding.tokenizer:
      raise UserError(f'objective.text.tokenizer: expected the file with the SHA-256 {encoding.tokenizer}…, with which '
                      f'the captions of {where} were encoded, got {path} with {digest}…. Set the same file, or prepare '
                      'the dataset again.')
  if (highest := max(encoding.start, encoding.end, encoding.pad)) >= text.vocabulary:
    raise UserError(f'objective.text.vocabulary: expected more than {highest:,}, the id of a special token in {where}, '
                    f'got {text.vocabulary:,}. Set it to the number of tokens of the tokenizer.')


def ids(record: Mapping[str, Sequence[int]], where: str) -> list[list[int]]:
  """Returns the ids of each caption of a record. Raises BadImage if the lists of ids and of ends do not match."""
  all_ids = list(record.get(IDS, ()))
  bounds = [0, *record.get(ENDS, ())]
  if len(bounds) < 2 or bounds[-1] != len(all_ids) or any(start > end for start, end in itertools.pairwise(bounds)):
    raise BadImage(f'the record: expected the ids of captions in {where}, got damaged ones')
  return [all_ids[start:end] for start, end in itertools.pairwise(bounds)]
