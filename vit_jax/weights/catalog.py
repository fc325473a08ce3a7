"""The published weights that are known by name, with what is known about them: `vit_jax.list_weights()`.

Names and addresses are those of `known_weights.py`. What is said about a file follows from its name alone: nothing is
downloaded. Licenses are those of the repositories that publish the files, as far as known; not all were looked up.
"""
from __future__ import annotations

import re
import warnings
from typing import NamedTuple

from vit_jax.core import globs
from vit_jax.recipes import catalog
from vit_jax.weights import known_weights

_LETTERS = {'tiny': 'Ti', 'small': 'S', 'base': 'B', 'large': 'L', 'huge': 'H', 's': 'S', 'b': 'B', 'l': 'L', 'g': 'g',
            'so': 'So400m'}
_I1K, _I21K, _BOTH = 'ImageNet-1k', 'ImageNet-21k', 'ImageNet-21k+1k'
_APACHE = 'Apache-2.0'
PATTERNS = (
    ('{R_Ti,R26_S,R50_L,Ti,S,B,L}_…-i21k-300ep-lr_…-aug_…', 'all files of AugReg (arXiv 2106.10270), by their names'),
    ('timm/NAME, google/NAME, facebook/NAME, openai/NAME, laion/NAME, apple/NAME', 'models of the hub, as hf://OWNER/NAME'))
"""Names that are not listed one by one."""


class _Rule(NamedTuple):
  """What the names that match a pattern mean.

  model: template of the network's name, filled with the groups of the pattern.
  px: 0 = not known.
  is_hidden: the head has the hidden layer of the ViT paper's pre-training.
  """
  pattern: str
  model: str
  px: int
  data: str
  num_classes: int
  source: str
  license: str = _APACHE
  is_hidden: bool = False


_RULES = (
    _Rule(r'(Mixer-\w)_(\d+)-i21k', '{0}/{1}', 224, _I21K, 21_843, 'arXiv 2105.01601'),
    _Rule(r'(Mixer-\w)_(\d+)-i1k', '{0}/{1}', 224, _I1K, 1_000, 'arXiv 2105.01601'),
    _Rule(r'(R\d+\+|)ViT-(\w)_(\d+)-i21k', '{0}{1}/{2}', 224, _I21K, 21_843, 'arXiv 2010.11929', is_hidden=True),
    _Rule(r'ViT-(\w)_(\d+)-224-i1k', '{0}/{1}', 224, _BOTH, 1_000, 'arXiv 2010.11929'),
    _Rule(r'ViT-(\w)_(8)-i1k', '{0}/{1}', 0, _BOTH, 1_000, 'arXiv 2010.11929'),
    _Rule(r'(R\d+\+|)ViT-(\w)_(\d+)-i1k', '{0}{1}/{2}', 384, _BOTH, 1_000, 'arXiv 2010.11929'),
    _Rule(r'ViT-(\w)_(\d+)-sam', '{0}/{1}', 224, _I1K, 1_000, 'arXiv 2106.01548'),
    _Rule(r'ViT-(\w)_(\d+)-gsam', '{0}/{1}', 224, _I1K, 1_000, 'arXiv 2203.08065'),
    _Rule(r'BiT-S-(R\d+x\d)', 'BiT-{0}', 224, _I1K, 1_000, 'arXiv 1912.11370'),
    _Rule(r'BiT-M-(R\d+x\d)', 'BiT-{0}', 224, _I21K, 21_843, 'arXiv 1912.11370'),
    _Rule(r'BiT-M-(R\d+x\d)-ILSVRC2012', 'BiT-{0}', 480, _BOTH, 1_000, 'arXiv 1912.11370'),
    _Rule(r'vit_s16_i1k_\d+ep', 'S/16', 224, _I1K, 1_000, 'arXiv 2205.01580'),
    _Rule(r'deit_([a-z]+)_patch(\d+)_224', '{0}/{1}', 224, _I1K, 1_000, 'arXiv 2012.12877'),
    _Rule(r'deit_([a-z]+)_patch(\d+)_384', '{0}/{1}', 384, _I1K, 1_000, 'arXiv 2012.12877'),
    _Rule(r'deit_([a-z]+)_distilled_patch(\d+)_224', 'DeiT-distilled-{0}/{1}', 224, _I1K, 1_000, 'arXiv 2012.12877'),
    _Rule(r'deit_([a-z]+)_distilled_patch(\d+)_384', 'DeiT-distilled-{0}/{1}', 384, _I1K, 1_000, 'arXiv 2012.12877'),
    _Rule(r'deit_3_(huge)_224_1k', 'DeiT-III-{0}/14', 224, _I1K, 1_000, 'arXiv 2204.07118'),
    _Rule(r'deit_3_([a-z]+)_224_1k', 'DeiT-III-{0}/16', 224, _I1K, 1_000, 'arXiv 2204.07118'),
    _Rule(r'deit_3_([a-z]+)_384_1k', 'DeiT-III-{0}/16', 384, _I1K, 1_000, 'arXiv 2204.07118'),
    _Rule(r'deit_3_([a-z]+)_224_21k', 'DeiT-III-{0}/16', 224, _BOTH, 1_000, 'arXiv 2204.07118'),
    _Rule(r'mae_finetuned_vit_(huge)', '{0}/14', 224, _I1K, 1_000, 'arXiv 2111.06377', 'CC-BY-NC-4.0'),
    _Rule(r'mae_finetuned_vit_([a-z]+)', '{0}/16', 224, _I1K, 1_000, 'arXiv 2111.06377', 'CC-BY-NC-4.0'),
    _Rule(r'mae_\w+_vit_(huge)', '{0}/14', 224, _I1K, 0, 'arXiv 2111.06377', 'CC-BY-NC-4.0'),
    _Rule(r'mae_\w+_vit_([a-z]+)', '{0}/16', 224, _I1K, 0, 'arXiv 2111.06377', 'CC-BY-NC-4.0'),
    _Rule(r'dino_(?:deit|vit)([a-z]+?)(\d+)_pretrain', '{0}/{1}', 224, _I1K, 0, 'arXiv 2104.14294'),
    _Rule(r'dinov2_vit([a-z])14', 'DINOv2-{0}/14', 518, 'LVD-142M', 0, 'arXiv 2304.07193'),
    _Rule(r'dinov2_vit([a-z])14_reg4', 'DINOv2-reg-{0}/14', 518, 'LVD-142M', 0, 'arXiv 2309.16588'),
    _Rule(r'tips_v2_([a-z]+)14_vision', 'TIPSv2-{0}/14', 448, 'image and text', 0, 'arXiv 2604.12012', 'CC-BY-4.0'))


class KnownWeights(NamedTuple):
  """Published weights that are known by name.

  name: for `--weights=NAME`, `--config.init_from=NAME` and `vit_jax.load`.
  model: name of the network.
  family: of the network.
  parameters: of the network with its head.
  flops: of a forward pass of one image of `px` (of the usual side if that is not known), two per multiply-add.
  px: side of the images that they were last trained on; 0 = not known from the name.
  num_classes: outputs; 0 = no head.
  data: that they were trained on; `ImageNet-21k+1k` is pre-training and fine-tuning.
  source: the paper.
  license: of the authors' repository.
  address: of the file.
  """
  name: str
  model: str
  family: str
  parameters: int
  flops: int
  px: int
  num_classes: int
  data: str
  source: str
  license: str
  address: str


def list_weights(pattern: str = '*') -> list[KnownWeights]:
  """Returns the published weights whose names or models match a pattern such as `*dino*`.

  `PATTERNS` has further names. Without a match, the list is empty and a warning names the most similar ones.
  """
  found = [name for name in known_weights.NAMES
           if globs.matches(name, pattern) or catalog.matches(_rule(name)[1], pattern)]
  if not found:
    warnings.warn(f'list_weights: {globs.no_match(pattern, known_weights.NAMES)} {others()}', stacklevel=2)
  return [_entry(name) for name in found]


def others() -> str:
  """Returns a sentence on names that work and are not listed."""
  return f'Other names that work: {"; ".join(f"{names} ({what})" for names, what in PATTERNS)}.'


def terms(where: str) -> str:
  """Returns a sentence on the license of the weights at a name or address; '' if it is not known."""
  if where in known_weights.NAMES:
    return f'License of {where}: {_rule(where)[0].license}.'
  return known_weights.terms(where)


def _entry(name: str) -> KnownWeights:
  rule, model = _rule(name)
  whole = catalog.model(model, px=rule.px, num_classes=rule.num_classes, is_hidden=rule.is_hidden)
  return KnownWeights(name, model, whole.family, whole.parameters, whole.flops, rule.px, rule.num_classes, rule.data,
                      rule.source, rule.license, known_weights.NAMES[name])


def _rule(name: str) -> tuple[_Rule, str]:
  """The rule of a known name, and the name of its network."""
  rule, groups = next((rule, match.groups()) for rule in _RULES if (match := re.fullmatch(rule.pattern, name)))
  return rule, rule.model.format(*(_LETTERS.get(group, group) for group in groups))
