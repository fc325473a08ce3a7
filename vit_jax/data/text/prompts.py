"""Prompts of zero-shot classification: templates with names of classes, and the rules by which texts are simplified.

A caller finds templates by `find_templates` and names by `class_names`, then calls `build` for the prompts of each
class, or `simplify` for a text of its own. `given_names` and `check_names` check names from a person. This module does
not know the text tower.

The templates (`templates.json`) and the names of the classes of ImageNet-1k (`clip_imagenet_names.txt`) belong to the
protocol of CLIP (arXiv 2103.00020, section 3.1.4) in the form that big_vision evaluates SigLIP with. Both files name
their source.
"""
from __future__ import annotations

import collections
import difflib
import functools
import importlib.resources
import os
import re
import string
from collections.abc import Sequence

from vit_jax.config.schema import TextRule
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.data.labels import classes, imagenet
from vit_jax.data.text.tokenizer import SIGLIP

PLACE = '{}'
NAMES_FILE = 'clip_imagenet_names.txt'
CLIP_IMAGENET = 'clip_imagenet'
PLAIN = 'a photo of a {}.'  # CLIP, section 3.1.4
_NO_PUNCTUATION = str.maketrans('', '', string.punctuation)
_NAME = 1_000  # characters; a text tower reads at most 77 tokens
_WORDNET = re.compile(r'n\d{8}\b')
_FILE = re.compile(r'^(/|~|\.{1,2}/)|\.(txt|csv|tsv|jsonl?|lst|names|ya?ml)$', re.IGNORECASE)
"""A text that is a path, and not the name of a class."""
_NEAR = .75  # of `imagenet` and `clip_imagenet`, by difflib


@functools.cache
def template_sets() -> dict[str, tuple[str, ...]]:
  """Returns the lists of templates by name."""
  content = documents.parse(importlib.resources.files(__package__).joinpath('templates.json').read_bytes())
  return {name: tuple(found) for name, found in content.items() if name != 'source'}


def find_templates(prompts: str | Sequence[str], *, setting: str) -> tuple[str, ...]:
  """Returns the templates of a named list, or the given templates themselves.

  Raises:
    UserError: a template does not have exactly one place for the name; the message names `setting`.
  """
  if isinstance(prompts, str) and prompts in template_sets():
    return template_sets()[prompts]
  found = (prompts,) if isinstance(prompts, str) else tuple(prompts)
  if not found or any(one.count(PLACE) != 1 for one in found):
    wrong = next((one for one in found if one.count(PLACE) != 1), 'none')
    raise UserError(f'{setting}: expected one of {", ".join(template_sets())}, or a template with one {PLACE} for the '
                    f'name of the class, got {wrong!r}. An example is {PLAIN!r}.')
  return found


def clip_imagenet_names() -> tuple[str, ...]:
  """Returns the names of the classes of ImageNet-1k, in the order of its labels."""
  lines = importlib.resources.files(__package__).joinpath(NAMES_FILE).read_text().splitlines()
  return tuple(line for line in lines if not line.startswith('#'))


def class_names(own: Sequence[str], choice: str, *, setting: str) -> tuple[str, ...]:
  """Returns the names to fill in for the classes of a dataset.

  Args:
    own: the names of the dataset.
    choice: '' = these names, but those of CLIP where they are WordNet ids of ImageNet-1k, of all its classes or of
      some; `clip_imagenet` = those of CLIP; else a file with one name per line.
    setting: names the choice in messages.

  Raises:
    UserError: there is another number of names than classes, or the names are WordNet ids of other classes.
  """
  has_ids = [bool(_WORDNET.match(name)) for name in own]
  known = imagenet.by_count(1_000)
  assert known is not None
  clip = dict(zip(known.ids, clip_imagenet_names(), strict=True))
  ids = [name.split()[0] for name in own] if all(has_ids) else []
  if choice in ('', CLIP_IMAGENET) and ids and set(ids) <= set(clip):
    found = tuple(clip[one] for one in ids)
  elif choice == CLIP_IMAGENET:
    found = clip_imagenet_names()
  elif choice:
    found = classes.read(choice, setting=setting)
  else:
    found = tuple(own)
    if any(has_ids):
      raise UserError(f'{setting}: expected names in words, got WordNet ids such as {own[has_ids.index(True)]}. Set a '
                      'file with one name per line, in the order of the classes.')
  if len(found) != len(own):
    raise UserError(f'{setting}: expected {len(own):,} names, one for each class of the data, got {len(found):,}. Set '
                    'a file with one name per line, in the order of the classes.')
  return found


def given_names(names: Sequence[str], *, setting: str) -> tuple[str, ...]:
  """Returns the names of a command line: themselves, or if there is one, those of the list or file that it names.

  The list `clip_imagenet` has two names twice, of which one each is returned.

  Raises:
    UserError: there is no such file, a file or list is one of several names, or a name is that of templates; the
      message names `setting`.
  """
  expected = f'{setting}: expected names with commas, a file with one name per line, or {CLIP_IMAGENET}, got'
  if len(names) != 1:
    if lists := [one for one in names if one == CLIP_IMAGENET or _FILE.search(one)]:
      raise UserError(f'{expected} {lists[0]!r} as one of {len(names):,} names. Give the file or list alone.')
    return tuple(names)
  (name,) = names
  if name == CLIP_IMAGENET:
    return tuple(dict.fromkeys(clip_imagenet_names()))
  if os.path.isfile(os.path.expanduser(name)):
    return classes.read(name, setting=setting)
  if _FILE.search(name):
    raise UserError(f'{expected} {name!r}, and there is no such file. Correct the path.')
  if name in template_sets():
    raise UserError(f'{expected} {name!r}, a list of templates. Set --prompts={name}, and name the classes.')
  if difflib.get_close_matches(name.lower(), [CLIP_IMAGENET], cutoff=_NEAR):
    raise UserError(f'{expected} {name!r}. Did you mean {CLIP_IMAGENET}?')
  return (name,)


def check_names(names: Sequence[str]) -> None:
  """Checks names of classes that a person gives in place of those of a dataset.

  Raises:
    UserError: there is none or too many, one is empty, too long or not text, or there are two of one name, which would
      share its probability.
  """
  if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
    got = repr(names)[:60] if isinstance(names, str) or not names else 'other values'
    raise UserError(f'names: expected a list of names of classes in words, got {got}. Pass a list of texts.')
  if len(names) > classes.MOST_CLASSES:
    raise UserError(f'names: expected at most {classes.MOST_CLASSES:,} names, got {len(names):,}. Pass fewer names.')
  for place, name in enumerate(names, 1):
    if not name.strip() or len(name) > _NAME or not documents.is_clean(name):
      raise UserError(f'names: expected 1 to {_NAME:,} characters without control characters for each name, got '
                      f'{documents.describe(name)} as number {place:,} of {len(names):,}. Correct the name.')
  counts = collections.Counter(name.strip() for name in names)
  if twice := [name for name, count in counts.items() if count > 1]:
    raise UserError(f'names: expected each name once, got {documents.listed(twice, 5)} twice. Remove the others.')


def simplify(text: str, rule: TextRule, *, keep: str = '') -> str:
  """Returns a text as a family of models saw texts in its training.

  Args:
    text: any text.
    rule: CANONICAL = underscores become spaces, punctuation is removed, letters become lower case, and white space is
      one space; LOWER = underscores become spaces, and letters lower case; NONE = unchanged.
    keep: punctuation that stays where it occurs in exactly this form.
  """
  match rule:
    case TextRule.NONE:
      return text
    case TextRule.LOWER:
      return text.replace('_', ' ').lower()
  parts = text.replace('_', ' ').split(keep) if keep else [text.replace('_', ' ')]
  bare = keep.join(part.translate(_NO_PUNCTUATION) for part in parts)
  return re.sub(r'\s+', ' ', bare.lower()).strip()


def rule_of(family: str, choice: TextRule = TextRule.AUTO) -> TextRule:
  """Returns how texts are simplified: as in the training of a family of tokenizers, unless there is a choice."""
  if choice is not TextRule.AUTO:
    return choice
  return TextRule.CANONICAL if family == SIGLIP else TextRule.LOWER


def build(names: Sequence[str], templates: Sequence[str], rule: TextRule, *, synonyms: bool = False,
          is_whole: bool = False) -> list[list[str]]:
  """Returns the prompts of each class.

  Args:
    names: one entry for each class; commas separate synonyms.
    templates: each with one place for a name.
    rule: by which names and templates are simplified.
    synonyms: whether all names of a class are used, and not only the first.
    is_whole: whether an entry is one name, and its commas a part of it.
  """
  simple = [simplify(one, rule, keep=PLACE) for one in templates]
  found = []
  for entry in names:
    every = [simplify(entry, rule)] if is_whole else [
        name.strip() for name in simplify(entry, rule, keep=',').split(',')]
    every = [name for name in every if name] or ['']
    found.append([one.replace(PLACE, name) for name in (every if synonyms else every[:1]) for one in simple])
  return found
