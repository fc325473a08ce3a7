"""Texts of training images as tokens: captions that a source stores, or templates with the names of classes.

Of several texts of an image one is drawn in each epoch, by (seed, example, epoch) alone, so that batches do not depend
on workers, processes or a restart. An image without a usable text counts as one that cannot be decoded.
"""
from __future__ import annotations

import abc
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import TextRule, Tokens
from vit_jax.core.errors import UserError
from vit_jax.data.image.headers import BadImage
from vit_jax.data.image.transform import Example, Shapes
from vit_jax.data.source import UNLABELED, Source, find_origin, title
from vit_jax.data.text import encoded
from vit_jax.data.text import prompts as prompting
from vit_jax.data.text import tokenizer as tokenizers
from vit_jax.data.text.encoded import Encoding
from vit_jax.data.text.tokenizer import Tokenizer, frame

_DRAW = 6  # separates the random stream of a seed; `pipeline/order.py` and `sources/mixture.py` have the others


def shapes(length: int) -> Shapes:
  """Returns the arrays that the text of an example adds to a batch."""
  return {'text': ((length,), np.int32), 'text_mask': ((length,), np.bool_)}


def draw(seed: int, num: int, index: int, epoch: int) -> int:
  """Returns which of `num` texts of an example is taken in an epoch."""
  return 0 if num == 1 else int(np.random.SeedSequence([_DRAW, seed, index, epoch]).generate_state(1)[0]) % num


class AnyTexts(Protocol):
  """The texts of the examples of a source, as the loader takes them."""

  @property
  def digest(self) -> str:
    """Appended to the digest of the source."""
    ...

  @property
  def shapes(self) -> Shapes:
    """The arrays that a text adds to an example."""
    ...

  def add(self, example: Example, index: int, position: int) -> Example:
    """Returns a decoded example with its text. Raises BadImage if it has no usable text."""
    ...

  def sample(self) -> str:
    """Returns a text as the tower reads it, for a person; '' if there is none that can be shown."""
    ...


@dataclasses.dataclass(frozen=True)
class Texts(abc.ABC):
  """The texts of the examples of a source; pickles to few bytes.

  source: of the images.
  tokenizer, rule: of the texts.
  seed: of the draw among several texts of an image.
  """
  source: Source
  tokenizer: Tokenizer
  rule: TextRule
  seed: int

  @abc.abstractmethod
  def of(self, index: int, label: int) -> Sequence[str]:
    """Returns all texts of an example, not simplified. Raises BadImage if it has none that can be used."""

  @property
  @abc.abstractmethod
  def identity(self) -> str:
    """What the texts depend on beside source, tokenizer and rule."""

  @property
  def digest(self) -> str:
    """Appended to the digest of the source."""
    return f' texts={self.tokenizer.digest} {self.rule.value} {self.identity}'

  @property
  def shapes(self) -> Shapes:
    return shapes(self.tokenizer.length)

  def add(self, example: Example, index: int, position: int) -> Example:
    """Returns a decoded example with its text for this position in the order of training.

    Raises:
      BadImage: it has no usable text.
    """
    texts = self.of(index, int(example['label']))
    chosen = draw(self.seed, len(texts), index, position // len(self.source))
    ids, mask = self.tokenizer([prompting.simplify(texts[chosen], self.rule)])
    return {**example, 'text': ids[0], 'text_mask': mask[0]}

  def sample(self) -> str:
    """Returns a text of the first example; '' if it has none."""
    try:
      return prompting.simplify(self.of(0, self.source.label(0))[0], self.rule)
    except (BadImage, OSError):  # the loader counts and reports it
      return ''


@dataclasses.dataclass(frozen=True)
class Captions(Texts):
  """The captions that a source stores with its images."""

  @property
  def identity(self) -> str:
    column = getattr(find_origin(self.source, 0)[0], 'caption_column', '')
    return f'captions {column}' if column else 'captions'

  def of(self, index: int, label: int) -> Sequence[str]:
    stored, place = find_origin(self.source, index)
    if not has_captions(stored):
      raise UserError(f'objective.prompts: expected a template for the names of classes, got {""!r}, which takes '
                      f'captions, and {title(stored)} has none. Set it, or give captions: by data.caption_column of a '
                      'source with columns, in captions_train.jsonl of a folder.')
    found: Sequence[str] = stored.captions(place)  # type: ignore[attr-defined]
    if not found:
      raise BadImage('the example: expected a caption, got an empty text')
    return found


@dataclasses.dataclass(frozen=True)
class EncodedCaptions:
  """The captions of a prepared dataset, as ids that are stored there; as `Texts`. Pickles to few bytes."""
  source: Source
  encoding: Encoding
  length: int
  seed: int

  @property
  def digest(self) -> str:
    own = ' '.join(map(str, self.encoding.to_json().values()))
    return f' texts=encoded {self.length} {own}'

  @property
  def shapes(self) -> Shapes:
    return shapes(self.length)

  def add(self, example: Example, index: int, position: int) -> Example:
    """Returns a decoded example with one of its captions for this position, as `Texts.add`."""
    stored, place = find_origin(self.source, index)
    rows, e = stored.token_ids(place), self.encoding  # type: ignore[attr-defined]
    row = rows[draw(self.seed, len(rows), index, position // len(self.source))]
    ids, mask = frame([row], family=e.tokens.value, length=self.length, special=(e.start, e.end, e.pad))
    return {**example, 'text': ids[0], 'text_mask': mask[0]}

  def sample(self) -> str:
    """Returns '', since only the ids of tokens are stored."""
    return ''


@dataclasses.dataclass(frozen=True)
class Prompts(Texts):
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


def has_captions(source: Source) -> bool:
  """Returns whether a stored source has captions."""
  return hasattr(source, 'captions') and bool(getattr(source, 'caption_column', True))


def open_texts(source: Source, text: schema.Text, *, prompts: str, names: str, seed: int) -> Texts | EncodedCaptions:
  """Returns the texts of a source, of its captions, or with `prompts` of the names of its classes.

  Raises:
    UserError: it has neither, there is no tokenizer, or captions were encoded by another one.
  """
  stored = find_origin(source, 0)[0] if len(source) else source
  if not prompts and (encoding := getattr(stored, 'encoding', None)):
    encoded.check(encoding, text, title(stored))
    return EncodedCaptions(source, encoding, text.length, seed)
  if text.tokens is not Tokens.BYTES and not text.tokenizer:
    raise UserError('objective.text.tokenizer: expected the file of a tokenizer, got none. Set it, or '
                    'objective.text.tokens=bytes, which needs none.')
  family = text.tokens.value
  path = None if text.tokens is Tokens.BYTES else tokenizers.find(
      pathlib.Path(), family, given=text.tokenizer, source='objective.text')
  made = Tokenizer(path, family=family, length=text.length)
  made.check(text.vocabulary, 'objective.text.vocabulary')
  common = (source, made, prompting.rule_of(family) if text.text_rule is TextRule.AUTO else text.text_rule, seed)
  if not prompts:
    found = Captions(*common)
    if not has_captions(find_origin(source, 0)[0]):
      found.of(0, -1)  # raises
    return found
  if source.class_names == UNLABELED:
    raise UserError(f"objective.prompts: expected '' with {title(source)}, whose images have no classes, got "
                    f'{prompts!r}. Leave it out to train on captions.')
  words = prompting.class_names(source.class_names, names, setting='objective.names')
  return Prompts(*common, words=words, templates=prompting.find_templates(prompts, setting='objective.prompts'))
