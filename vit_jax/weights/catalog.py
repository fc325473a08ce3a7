"""The published weights that are known by name, with what is known about them: `vit_jax.list_weights()`.

Names, addresses and their meaning are in the records of `families/`. What is said about a file follows from its name
alone: nothing is downloaded. Licenses are those of the repositories that publish the files, as far as known; not all
were looked up.
"""
from __future__ import annotations

import math
import warnings
from typing import NamedTuple

from vit_jax.core import globs
from vit_jax.recipes import catalog
from vit_jax.weights import published

PATTERNS = (
    ('{R_Ti,R26_S,R50_L,Ti,S,B,L}_…-i21k-300ep-lr_…-aug_…', 'all files of AugReg (arXiv 2106.10270), by their names'),
    ('timm/NAME, google/NAME, facebook/NAME, openai/NAME, laion/NAME, apple/NAME', 'models of the hub, as hf://OWNER/NAME'))
"""Names that are not listed one by one."""


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


def list_weights(pattern: str = '*', *, max_params: float = math.inf, family: str = '*', data: str = '*',
                 license: str = '*', px: int = 0) -> list[KnownWeights]:
  """Returns the published weights whose names or models match a pattern such as `*dino*`.

  `max_params` is the largest number of parameters, such as 30e6. `family`, `data` and `license` are patterns such as
  `dinov*`, `ImageNet-1k` and `apache*`, and `px` is the side of the images (0 = any).

  `PATTERNS` has further names. Without a match, the list is empty and a warning names the most similar ones.
  """
  found = [name for name in published.NAMES
           if globs.matches(name, pattern) or catalog.matches(published.rule(name)[1], pattern)]
  if not found:
    warnings.warn(f'list_weights: {globs.no_match(pattern, published.NAMES)} {others()}', stacklevel=2)
  entries = []
  for name in found:
    rule, model = published.rule(name)
    whole = catalog.model(model, px=rule.px, num_classes=rule.num_classes, is_hidden=rule.is_hidden)
    entries.append(KnownWeights(name, model, whole.family, whole.parameters, whole.flops, rule.px, rule.num_classes,
                                rule.data, rule.source, rule.license, published.NAMES[name]))
  return [one for one in entries if one.parameters <= max_params and globs.matches(one.family, family)
          and globs.matches(one.data, data) and globs.matches(one.license, license) and px in (0, one.px)]


def others() -> str:
  """Returns a sentence on names that work and are not listed."""
  return f'Other names that work: {"; ".join(f"{names} ({what})" for names, what in PATTERNS)}.'
