"""Prompts of zero-shot classification: templates with names of classes, and the rules by which texts are simplified.

A caller gets templates from `find_templates` and names from `class_names`, then the prompts of each class from `build`.
`simplify` is also called for other texts, such as captions. If a user names classes in place of those of a dataset, a
command line passes them to `resolve_names`, and `inspect/zeroshot.py` checks them with `check_names`.

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

PLACE = '{}'  # stands in a template for the name of a class
NAMES_FILE = 'clip_imagenet_names.txt'
CLIP_IMAGENET = 'clip_imagenet'  # the value of a setting that selects the names in `NAMES_FILE`
PLAIN = 'a photo of a {}.'  # CLIP, section 3.1.4
_NO_PUNCTUATION = str.maketrans('', '', string.punctuation)
_MAX_NAME_CHARACTERS = 1_000  # more than the tokens of any text tower
_WORDNET_ID = re.compile(r'n\d{8}\b')  # such as `n01440764`
_PATH = re.compile(r'^(/|~|\.{1,2}/)|\.(txt|csv|tsv|jsonl?|lst|names|ya?ml)$', re.IGNORECASE)
"""Matches texts that are paths and not names of classes, such as `~/birds`, `./birds` and `birds.txt`."""
_MIN_SIMILARITY = .75  # of a misspelled `clip_imagenet`; difflib returns 0.76 for `imagenet`


@functools.cache
def template_sets() -> dict[str, tuple[str, ...]]:
  """Returns the lists of templates by name."""
  content = documents.parse(importlib.resources.files(__package__).joinpath('templates.json').read_bytes())
  return {name: tuple(templates) for name, templates in content.items() if name != 'source'}


def find_templates(prompts: str | Sequence[str], *, setting: str) -> tuple[str, ...]:
  """Returns the templates of the list with the name `prompts`, or `prompts` itself as a tuple of templates.

  Raises UserError, which names `setting`, if there are no templates, or one does not have exactly one `{}`.
  """
  if isinstance(prompts, str) and prompts in template_sets():
    return template_sets()[prompts]
  templates = (prompts,) if isinstance(prompts, str) else tuple(prompts)
  invalid = [template for template in templates if template.count(PLACE) != 1] if templates else ['none']
  if invalid:
    raise UserError(f'{setting}: expected one of {", ".join(template_sets())}, or a template with one {PLACE} for the '
                    f'name of the class, got {invalid[0]!r}. An example is {PLAIN!r}.')
  return templates


def clip_imagenet_names() -> tuple[str, ...]:
  """Returns CLIP's names of the classes of ImageNet-1k, in the order of the labels."""
  lines = importlib.resources.files(__package__).joinpath(NAMES_FILE).read_text().splitlines()
  return tuple(line for line in lines if not line.startswith('#'))


def class_names(dataset_names: Sequence[str], choice: str, *, setting: str) -> tuple[str, ...]:
  """Returns the name of each class of a dataset that is filled into templates.

  Raises UserError if there is another number of names than classes, or the names are WordNet ids of other classes.

  Args:
    dataset_names: the names of the classes in the dataset.
    choice: one of the following.
      '': the names in the dataset; if they are WordNet ids of classes of ImageNet-1k, CLIP's names of these classes.
      `clip_imagenet`: CLIP's names of the classes of ImageNet-1k.
      Another text: the path of a file with one name per line.
    setting: the setting or flag with the choice, for messages.
  """
  with_ids = [name for name in dataset_names if _WORDNET_ID.match(name)]
  imagenet_1k = imagenet.by_count(1_000)
  assert imagenet_1k is not None
  name_by_id = dict(zip(imagenet_1k.ids, clip_imagenet_names(), strict=True))
  ids = [name.split()[0] for name in with_ids]
  are_imagenet = bool(ids) and len(ids) == len(dataset_names) and set(ids) <= set(name_by_id)
  if choice in ('', CLIP_IMAGENET) and are_imagenet:
    names = tuple(name_by_id[wordnet_id] for wordnet_id in ids)
  elif choice == CLIP_IMAGENET:
    names = clip_imagenet_names()
  elif choice:
    names = classes.read(choice, setting=setting)
  elif with_ids:
    raise UserError(f'{setting}: expected names in words, got WordNet ids such as {with_ids[0]}. Set a file with one '
                    'name per line, in the order of the classes.')
  else:
    names = tuple(dataset_names)
  if len(names) != len(dataset_names):
    raise UserError(f'{setting}: expected {len(dataset_names):,} names, one for each class of the data, got '
                    f'{len(names):,}. Set a file with one name per line, in the order of the classes.')
  return names


def resolve_names(names: Sequence[str], *, setting: str) -> tuple[str, ...]:
  """Returns the names of classes that the `names` of a command line stand for.

  Several names are returned as they are. A single name may be `clip_imagenet`, or the path of a file with one name per
  line. Two names occur twice in the list `clip_imagenet`; each of them is returned once.

  Raises UserError, which names `setting`, if there is no such file; a file or `clip_imagenet` is one of several names;
  or a name is the name of a list of templates.
  """
  expected = f'{setting}: expected names with commas, a file with one name per line, or {CLIP_IMAGENET}, got'
  if len(names) != 1:
    if lists := [name for name in names if name == CLIP_IMAGENET or _PATH.search(name)]:
      raise UserError(f'{expected} {lists[0]!r} as one of {len(names):,} names. Give the file or list alone.')
    return tuple(names)
  name = names[0]
  if name == CLIP_IMAGENET:
    return tuple(dict.fromkeys(clip_imagenet_names()))
  if os.path.isfile(os.path.expanduser(name)):
    return classes.read(name, setting=setting)
  if _PATH.search(name):
    raise UserError(f'{expected} {name!r}, and there is no such file. Correct the path.')
  if name in template_sets():
    raise UserError(f'{expected} {name!r}, a list of templates. Set --prompts={name}, and name the classes.')
  if difflib.get_close_matches(name.lower(), [CLIP_IMAGENET], cutoff=_MIN_SIMILARITY):
    raise UserError(f'{expected} {name!r}. Did you mean {CLIP_IMAGENET}?')
  return (name,)


def check_names(names: Sequence[str]) -> None:
  """Checks names of classes that a user passes in place of the names of a dataset.

  Raises UserError if there are no names or too many, a name is empty, too long or not text, or a name occurs twice:
  each of the two classes would get only a part of the probability of the name.
  """
  if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
    got = repr(names)[:60] if isinstance(names, str) or not names else 'other values'
    raise UserError(f'names: expected a list of names of classes in words, got {got}. Pass a list of texts.')
  if len(names) > classes.MAX_CLASSES:
    raise UserError(f'names: expected at most {classes.MAX_CLASSES:,} names, got {len(names):,}. Pass fewer names.')
  for number, name in enumerate(names, 1):
    if not name.strip() or len(name) > _MAX_NAME_CHARACTERS or not documents.is_clean(name):
      raise UserError(f'names: expected 1 to {_MAX_NAME_CHARACTERS:,} characters without control characters for each '
                      f'name, got {documents.describe(name)} as number {number:,} of {len(names):,}. Correct the name.')
  counts = collections.Counter(name.strip() for name in names)
  repeated = [name for name, count in counts.items() if count > 1]
  if repeated:
    raise UserError(f'names: expected each name once, got {documents.listed(repeated, 5)} twice. Remove the others.')


def simplify(text: str, rule: TextRule, *, keep: str = '') -> str:
  """Returns a text in the form that the models of a family were trained with.

  Args:
    text: any text.
    rule: one of the following, not AUTO.
      NONE: the text is unchanged.
      LOWER: underscores become spaces, and letters become lower case.
      CANONICAL: as LOWER; also, punctuation is removed, and white space becomes one space.
    keep: with CANONICAL, a sequence of punctuation that is not removed, such as `{}`.
  """
  if rule is TextRule.NONE:
    return text
  text = text.replace('_', ' ')
  if rule is TextRule.LOWER:
    return text.lower()
  parts = text.split(keep) if keep else [text]
  text = keep.join(part.translate(_NO_PUNCTUATION) for part in parts)
  return re.sub(r'\s+', ' ', text.lower()).strip()


def rule_of(family: str, choice: TextRule = TextRule.AUTO) -> TextRule:
  """Returns `choice`; for AUTO, the rule with which models of this family of tokenizers were trained."""
  if choice is not TextRule.AUTO:
    return choice
  return TextRule.CANONICAL if family == SIGLIP else TextRule.LOWER


def build(names: Sequence[str], templates: Sequence[str], rule: TextRule, *, synonyms: bool = False,
          is_whole: bool = False) -> list[list[str]]:
  """Returns the prompts of each class.

  Args:
    names: one entry for each class, such as `crane, hoist`; commas separate synonyms.
    templates: texts with one `{}` for a name.
    rule: how names and templates are simplified.
    synonyms: whether there are prompts for all synonyms of a class, and not only for the first synonym.
    is_whole: whether each entry is a single name, which may contain commas.
  """
  templates = [simplify(template, rule, keep=PLACE) for template in templates]
  prompts_by_class = []
  for entry in names:
    if is_whole:
      synonyms_of_class = [simplify(entry, rule)]
    else:
      synonyms_of_class = [name.strip() for name in simplify(entry, rule, keep=',').split(',')]
    synonyms_of_class = [name for name in synonyms_of_class if name] or ['']
    used_names = synonyms_of_class if synonyms else synonyms_of_class[:1]
    prompts_by_class.append([template.replace(PLACE, name) for name in used_names for template in templates])
  return prompts_by_class
