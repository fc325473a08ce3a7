"""The networks that can be chosen by name, with their cost: `vit_jax.list_models()`.

The names are those of `sizes.names()`. Parameters and FLOPs are derived from the networks (`models/cost.py`),
with a linear head of 1,000 classes. `network_costs.json` has them for listed names, so that no network is traced to
show a list; `python -m tests.network_costs` writes it anew.
"""
from __future__ import annotations

import functools
import math
import pathlib
import re
import warnings
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.core import documents, globs
from vit_jax.models import cost
from vit_jax.recipes import sizes

PX = 224  # side of the images, but for EfficientNets
NUM_CLASSES = 1_000
COSTS = pathlib.Path(__file__).with_name('network_costs.json')
_SIZES = {  # sizes of plain ViTs that are not from the ViT paper
    'mu': 'big_vision', 'M': 'big_vision', 'g-opt': 'big_vision', 'G-opt': 'big_vision', 'Ti': 'arXiv 2012.12877',
    'S': 'arXiv 2012.12877', 'So400m': 'arXiv 2305.13035', 'g': 'arXiv 2106.04560', 'G': 'arXiv 2106.04560',
    'e': 'arXiv 2209.06794', '22B': 'arXiv 2302.05442'}
_WORDS = {'Ti': 'tiny', 'S': 'small', 'B': 'base', 'L': 'large', 'H': 'huge', 'g': 'giant', 'G': 'gigantic'}
"""Words for sizes in the names of timm."""
_FAMILIES = (  # pattern of the name, family, source; the first match counts
    (r'DINOv2-reg-', 'DINOv2 with registers', 'arXiv 2309.16588'), (r'DINOv2-', 'DINOv2', 'arXiv 2304.07193'),
    (r'DINOv3-', 'DINOv3', 'arXiv 2508.10104'),
    (r'CLIP-', 'CLIP', 'arXiv 2103.00020'), (r'OpenCLIP-', 'OpenCLIP', 'arXiv 2212.07143'),
    (r'EVA02-CLIP-', 'EVA-02-CLIP', 'arXiv 2303.15389'), (r'EVA02-', 'EVA-02', 'arXiv 2303.11331'),
    (r'PE-', 'Perception Encoder', 'arXiv 2504.13181'), (r'RoPE-', 'RoPE-ViT', 'arXiv 2403.13298'),
    (r'AIMv2-', 'AIMv2', 'arXiv 2411.14402'), (r'TIPSv2-', 'TIPSv2', 'arXiv 2604.12012'),
    (r'I-JEPA-', 'I-JEPA', 'arXiv 2301.08243'),
    (r'SigLIP2-', 'SigLIP 2', 'arXiv 2502.14786'), (r'SigLIP-', 'SigLIP', 'arXiv 2303.15343'),
    (r'DeiT-III-', 'DeiT III', 'arXiv 2204.07118'),
    (r'DeiT-distilled-', 'DeiT', 'arXiv 2012.12877'),
    (r'LV-ViT-', 'LV-ViT', 'arXiv 2104.10858'),
    (r'Axial-ResNet', 'Axial ResNet', 'arXiv 2003.07853'),
    (r'Axial-ViT-', 'Axial ViT', 'arXiv 2010.11929, Appendix D.6'),
    (r'BiT-R200', 'BiT', 'arXiv 2010.11929, Table 6'),
    (r'BiT-', 'BiT', 'arXiv 1912.11370'),
    (r'Mixer-', 'MLP-Mixer', 'arXiv 2105.01601'),
    (r'EfficientNet-L2', 'EfficientNet', 'arXiv 1911.04252'),
    (r'EfficientNet-', 'EfficientNet', 'arXiv 1905.11946'),
    (r'R(26)?\+', 'Hybrid', 'arXiv 2106.10270'),
    (r'R50\+', 'Hybrid', 'arXiv 2010.11929'))


class Model(NamedTuple):
  """A network by its name."""
  name: str        # for `--config.model=NAME`, and for the arguments of configs
  family: str      # such as `DINOv2`
  parameters: int  # number of them, with a linear head of 1,000 classes
  flops: int       # of a forward pass of one image of `px`, two per multiply-add
  px: int          # side of the image that `flops` counts
  source: str      # the paper, or the program, that has its sizes


class Network(NamedTuple):
  """A network with its head and image size, of which the cost is known; its text is the key in `network_costs.json`."""
  name: str
  px: int
  num_classes: int
  is_hidden: bool  # the head has the hidden layer of the ViT paper's pre-training

  def __str__(self) -> str:
    return f'{self.name}, {self.px} px, {self.num_classes} classes{", hidden layer" * self.is_hidden}'

  def derive(self) -> tuple[int, int]:
    """Returns the numbers of parameters and FLOPs, derived from the program of the network."""
    settings = sizes.model(self.name)
    head = schema.Head(pre_logits=sizes.pretraining_head(settings) if self.is_hidden else 0)
    forward = cost.forward(settings, (self.px, self.px), head=head, num_classes=self.num_classes)
    return sum(forward.parameters.values()), sum(forward.flops.values())


def list_models(pattern: str = '*', *, max_params: float = math.inf, family: str = '*') -> list[Model]:
  """Returns the networks whose names match a pattern such as `*b16*`; case and separators may be left out.

  `max_params` is the largest number of parameters, such as 30e6, and `family` a pattern of families, such as `deit*`.

  Plain ViTs are found by their names in timm too, such as `vit_tiny*`. ViTs and Mixers with any other patch side, and
  BiTs with any other factor, can be named but are not listed. Without a match, the list is empty and a warning names
  the most similar ones.
  """
  models = [model(name) for name in sizes.names() if matches(name, pattern)]
  if not models:
    warnings.warn(f'list_models: {globs.no_match(pattern, sizes.names())}', stacklevel=2)
  return [one for one in models if one.parameters <= max_params and globs.matches(one.family, family)]


def matches(name: str, pattern: str) -> bool:
  """Returns whether the name of a network, or the name that timm gives a plain ViT, matches a pattern."""
  size, _, patch = name.partition('/')
  return globs.matches(name, pattern) or (
      size in _WORDS and globs.matches(f'vit_{_WORDS[size]}_patch{patch}_{PX}', pattern))


@functools.cache
def model(name: str, *, px: int = 0, num_classes: int = NUM_CLASSES, is_hidden: bool = False) -> Model:
  """Returns the entry of any name that `sizes.model` knows.

  Args:
    name: of the network.
    px: side of the images; 0 = the usual one.
    num_classes: outputs of the head; 0 = without one.
    is_hidden: the head has the hidden layer of the ViT paper's pre-training.

  Raises:
    UserError: the name is unknown.
  """
  network = Network(name, px or usual_px(name), num_classes, is_hidden)
  parameters, flops = _known_costs().get(str(network)) or network.derive()
  family, source = _origin(name)
  return Model(name, family, parameters, flops, network.px, source)


def usual_px(name: str) -> int:
  """Returns the side of the images that a network is usually trained on, a multiple of its patches.

  Raises:
    UserError: the name is unknown.
  """
  settings = sizes.model(name)
  if isinstance(settings, schema.EfficientNet):
    return sizes.efficientnet_px(name.partition('-')[2])
  return PX - PX % getattr(settings, 'patch', 1)


@functools.cache
def _known_costs() -> dict[str, tuple[int, int]]:
  return {name: tuple(pair) for name, pair in documents.load(COSTS).items()}


def _origin(name: str) -> tuple[str, str]:
  """Returns the family and the source of a network."""
  for pattern, family, source in _FAMILIES:
    if re.match(pattern, name):
      return family, source
  return 'ViT', _SIZES.get(re.split('[/_]', name.removeprefix('ViT-'))[0], 'arXiv 2010.11929')
