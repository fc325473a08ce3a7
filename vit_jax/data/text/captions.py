"""Texts of training images as tokens: captions that a source stores, or templates with the names of classes.

`objectives/contrastive.py` calls `open_texts`, and `loader.py` calls `Texts.add` for each example. If an image has
several texts, one of them is drawn in each epoch. The draw depends only on (seed, example, epoch), so that batches do
not depend on workers, processes or a restart. An image without a usable text counts as an image that cannot be decoded.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from vit_jax.data.text import stored, tokenizer


def shapes(length: int) -> Shapes:
  """Returns the arrays that a text of `length` tokens adds to an example."""
  return {'text': ((length,), np.int32), 'text_mask': ((length,), np.bool_)}


def draw(seed: int, num_texts: int, index: int, epoch: int) -> int:
  """Returns which of the texts of the example `index` of a source is used in an epoch, a number below `num_texts`."""
  return streams.choice(Stream.CAPTIONS, seed, index, epoch, num=num_texts)


@dataclasses.dataclass(frozen=True)
class Texts:
  """The texts of the examples of a source. Its pickle is small.

  source: the source of the images.
  length: the number of tokens of a text, N.
  seed: the seed of the draw among several texts of an image.
  digest: identifies the texts and the tokenizer; it is appended to the digest of the source.
  read_texts: maps the index and the class of an example to all its texts. Raises BadImage if no text is usable.
  encode: maps texts to their tokens.
  rule: how texts are simplified before they are encoded. None: `read_texts` returns lists of ids in place of texts.
  """
  source: Source
  length: int
  seed: int
  digest: str
  read_texts: Callable[[int, int], Sequence[Any]]
  encode: Callable[[Sequence[Any]], tokenizer.EncodedTexts]
  rule: TextRule | None

  @property
  def shapes(self) -> Shapes:
    """The arrays that a text adds to an example."""
    return shapes(self.length)

  def add(self, example: Example, index: int, position: int) -> Example:
    """Returns a decoded example together with `text [N] i32` and `text_mask [N] bool`.

    Args:
      example: the arrays that the transform returns.
      index: the row of the example in the source.
      position: the place of the example in the order of training; `position // len(source)` is the epoch of the draw.
    """
    texts = self.read_texts(index, int(example['label']))
    text = texts[draw(self.seed, len(texts), index, position // len(self.source))]
    ids, mask = self.encode([prompting.simplify(text, self.rule) if self.rule else text])
    return {**example, 'text': ids[0], 'text_mask': mask[0]}

  def sample(self) -> str:
    """Returns the simplified first text of the source, to show to the user; '' if it cannot be read or has only ids."""
    if not self.rule:
      return ''
    try:
      return prompting.simplify(self.read_texts(0, first_label(self.source, 0))[0], self.rule)
    except (BadImage, OSError):  # the loader reports such an error when it reads the example
      return ''


def open_texts(source: Source, text: schema.Text, *, prompts: str, names: str, seed: int) -> Texts:
  """Returns the texts of a source: filled templates, captions, or the ids of captions in a prepared dataset.

  Raises UserError if the source has no captions or classes, or the tokenizer is missing or not that of stored ids.

  Args:
    source: the source of the images.
    text: the tokens, the tokenizer and the length of the text tower.
    prompts: templates to fill with the names of the classes, see `prompts.find_templates`; '' = captions of the source.
    names: the names of the classes, see `prompts.class_names`.
    seed: the seed of the draw among several texts of an image.
  """
  origin = origins(source)[0]
  if not prompts and (encoding := getattr(origin, 'encoding', None)):
    stored.check(encoding, text, title(origin))
    identity = ' '.join(map(str, encoding.to_json().values()))
    encode = functools.partial(tokenizer.add_special_tokens, family=encoding.tokens.value, length=text.length,
                               special=(encoding.start, encoding.end, encoding.pad))
    return Texts(source, text.length, seed, f' texts=encoded {text.length} {identity}',
                 functools.partial(_read_ids, source), encode, None)
  if text.tokens is not Tokens.BYTES and not text.tokenizer:
    raise UserError('objective.text.tokenizer: expected the file of a tokenizer, got none. Set it, or '
                    'objective.text.tokens=bytes, which needs none.')
  opened = tokenizer.open_tokenizer(text.tokens.value, text.tokenizer, length=text.length, source='objective.text')
  opened.check(text.vocabulary, 'objective.text.vocabulary')
  read_texts: Callable[[int, int], Sequence[str]]
  if prompts:
    if source.class_names == UNLABELED:
      raise UserError(f"objective.prompts: expected '' with {title(source)}, whose images have no classes, got "
                      f'{prompts!r}. Leave it out to train on captions.')
    class_names = prompting.class_names(source.class_names, names, setting='objective.names')
    templates = prompting.find_templates(prompts, setting='objective.prompts')
    read_texts = functools.partial(_fill_templates, class_names, templates)
    identity = f'{templates} {class_names}'
  else:
    without_captions = [title(each) for each in origins(source) if not has_captions(each)]
    if without_captions:
      raise UserError(f'objective.prompts: expected a template for the names of classes, got {""!r}, which takes '
                      f'captions, and {without_captions[0]} has none. Set it, or give captions: by '
                      'data.caption_column of a source with columns, in captions_train.jsonl of a folder.')
    read_texts = functools.partial(_read_captions, source)
    column = getattr(origin, 'caption_column', '')
    identity = f'captions {column}' if column else 'captions'
  rule = prompting.rule_of(text.tokens.value, text.text_rule)
  digest = f' texts={opened.digest} {rule.value} {identity}'
  return Texts(source, text.length, seed, digest, read_texts, opened, rule)


def _read_captions(source: Source, index: int, label: int) -> Sequence[str]:
  """Returns the captions that a source stores with an image."""
  del label
  if not (captions := source.captions(index)):
    raise BadImage('the example: expected a caption, got an empty text')
  return captions


def _read_ids(source: Source, index: int, label: int) -> Sequence[Sequence[int]]:
  """Returns the ids of tokens of each caption of an image, which a prepared dataset stores."""
  del label
  origin, row = find_origin(source, index)
  ids: list[list[int]] = origin.token_ids(row)  # type: ignore[attr-defined]
  return ids


def _fill_templates(class_names: Sequence[str], templates: Sequence[str], index: int, label: int) -> Sequence[str]:
  """Returns the templates filled with the first name of the class `label`; further names are synonyms after commas."""
  del index
  if label < 0:
    raise BadImage('the example: expected a class, whose name is its text, got none')
  return prompting.build([class_names[label]], templates, TextRule.NONE)[0]
