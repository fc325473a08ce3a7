"""Texts of training images as tokens: captions that a source stores, or templates with the names of classes.

Of several texts of an image one is drawn in each epoch, by (seed, example, epoch) alone, so that batches do not depend
on workers, processes or a restart. An image without a usable text counts as one that cannot be decoded.
"""
from __future__ import annotations

import abc
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import TextRule, Tokens
from vit_jax.core import streams
from vit_jax.core.errors import UserError
from vit_jax.core.streams import Stream
from vit_jax.data.image.headers import BadImage
from vit_jax.data.image.transform import Example, Shapes
from vit_jax.data.source import UNLABELED, Source, find_origin, first_label, has_captions, origins, title
from vit_jax.data.text import prompts as prompting
from vit_jax.data.text import stored
from vit_jax.data.text import tokenizer as tokenizers
from vit_jax.data.text.stored import Encoding
from vit_jax.data.text.tokenizer import Tokenizer


def shapes(length: int) -> Shapes:
  """Returns the arrays that the text of an example adds to a batch."""
  return {'text': ((length,), np.int32), 'text_mask': ((length,), np.bool_)}


def draw(seed: int, num: int, index: int, epoch: int) -> int:
  """Returns which of `num` texts of an example is taken in an epoch."""
  return streams.choice(Stream.CAPTIONS, seed, index, epoch, num=num)


@dataclasses.dataclass(frozen=True)
class Texts(abc.ABC):
  """The texts of the examples of a source, of which each is added to its image; pickles to few bytes.

  source: of the images.
  length: of the ids of a text.
  seed: of the draw among several texts of an image.
  """
  source: Source
  length: int
  seed: int

  @property
  @abc.abstractmethod
  def digest(self) -> str:
    """Appended to the digest of the source."""

  @property
  def shapes(self) -> Shapes:
    """The arrays that a text adds to an example."""
    return shapes(self.length)

  def add(self, example: Example, index: int, position: int) -> Example:
    """Returns a decoded example with its text for this position in the order of training.

    Raises:
      BadImage: it has no usable text.
    """
    found = self.of(index, int(example['label']))
    chosen = found[draw(self.seed, len(found), index, position // len(self.source))]
    ids, mask = self.encode(chosen)
    return {**example, 'text': ids[0], 'text_mask': mask[0]}

  @abc.abstractmethod
  def of(self, index: int, label: int) -> Sequence[Any]:
    """Returns all texts of an example, as `encode` takes them. Raises BadImage if it has none that can be used."""

  @abc.abstractmethod
  def encode(self, text: Any) -> tokenizers.Tokens:
    """Returns the ids of one text, `[1, N]`."""

  @abc.abstractmethod
  def sample(self) -> str:
    """Returns a text as the tower reads it, for a person; '' if there is none that can be shown."""


@dataclasses.dataclass(frozen=True)
class Written(Texts):
  """Texts that a run encodes itself.

  tokenizer, rule: of the texts.
  """
  tokenizer: Tokenizer
  rule: TextRule

  @property
  @abc.abstractmethod
  def identity(self) -> str:
    """What the texts depend on beside source, tokenizer and rule."""

  @property
  def digest(self) -> str:
    return f' texts={self.tokenizer.digest} {self.rule.value} {self.identity}'

  def encode(self, text: str) -> tokenizers.Tokens:
    return self.tokenizer([prompting.simplify(text, self.rule)])

  def sample(self) -> str:
    try:
      return prompting.simplify(self.of(0, first_label(self.source, 0))[0], self.rule)
    except (BadImage, OSError):  # the loader counts and reports it
      return ''


@dataclasses.dataclass(frozen=True)
class Captions(Written):
  """The captions that a source stores with its images."""

  @property
  def identity(self) -> str:
    column = getattr(origins(self.source)[0], 'caption_column', '')
    return f'captions {column}' if column else 'captions'

  def of(self, index: int, label: int) -> Sequence[str]:
    if not (found := self.source.captions(index)):
      raise BadImage('the example: expected a caption, got an empty text')
    return found


@dataclasses.dataclass(frozen=True)
class EncodedCaptions(Texts):
  """The captions of a prepared dataset, as ids that are stored there."""
  encoding: Encoding

  @property
  def digest(self) -> str:
    own = ' '.join(map(str, self.encoding.to_json().values()))
    return f' texts=encoded {self.length} {own}'

  def of(self, index: int, label: int) -> Sequence[Sequence[int]]:
    origin, place = find_origin(self.source, index)
    found: list[list[int]] = origin.token_ids(place)  # type: ignore[attr-defined]
    return found

  def encode(self, text: Sequence[int]) -> tokenizers.Tokens:
    e = self.encoding
    return tokenizers.frame([text], family=e.tokens.value, length=self.length, special=(e.start, e.end, e.pad))

  def sample(self) -> str:
    return ''  # only the ids of tokens are stored


@dataclasses.dataclass(frozen=True)
class Prompts(Written):
  """Templates with the names of the classes; the first of several synonyms."""
  words: tuple[str, ...] = ()
  templates: tuple[str, ...] = ()

  @property
  def identity(self) -> str:
    return f'{self.templates} {self.words}'

  def of(self, index: int, label: int) -> Sequence[str]:
    if label < 0:
      raise BadImage('the example: expected a class, whose name is its text, got none')
    return prompting.build([self.words[label]], self.templates, TextRule.NONE)[0]


def open_texts(source: Source, text: schema.Text, *, prompts: str, names: str, seed: int) -> Texts:
  """Returns the texts of a source, of its captions, or with `prompts` of the names of its classes.

  Raises:
    UserError: it has neither, there is no tokenizer, or captions were encoded by another one.
  """
  origin = origins(source)[0]
  if not prompts and (encoding := getattr(origin, 'encoding', None)):
    stored.check(encoding, text, title(origin))
    return EncodedCaptions(source, text.length, seed, encoding)
  if text.tokens is not Tokens.BYTES and not text.tokenizer:
    raise UserError('objective.text.tokenizer: expected the file of a tokenizer, got none. Set it, or '
                    'objective.text.tokens=bytes, which needs none.')
  family = text.tokens.value
  path = None if text.tokens is Tokens.BYTES else tokenizers.find(
      pathlib.Path(), family, given=text.tokenizer, source='objective.text')
  made = Tokenizer(path, family=family, length=text.length)
  made.check(text.vocabulary, 'objective.text.vocabulary')
  rule = prompting.rule_of(family) if text.text_rule is TextRule.AUTO else text.text_rule
  common = (source, text.length, seed, made, rule)
  if not prompts:
    for one in origins(source):
      if not has_captions(one):
        raise UserError(f'objective.prompts: expected a template for the names of classes, got {""!r}, which takes '
                        f'captions, and {title(one)} has none. Set it, or give captions: by data.caption_column of a '
                        'source with columns, in captions_train.jsonl of a folder.')
    return Captions(*common)
  if source.class_names == UNLABELED:
    raise UserError(f"objective.prompts: expected '' with {title(source)}, whose images have no classes, got "
                    f'{prompts!r}. Leave it out to train on captions.')
  words = prompting.class_names(source.class_names, names, setting='objective.names')
  return Prompts(*common, words=words, templates=prompting.find_templates(prompts, setting='objective.prompts'))
