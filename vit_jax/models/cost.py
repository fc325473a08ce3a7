"""The cost of a network, derived from its own program: parameters, FLOPs, and the width of its features.

XLA counts the body of a scan once, so utilization is computed from these figures. FLOPs are those of matrix products
and convolutions only, two per multiply-add; elementwise work is left out, as in the papers.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.config.schema import AttentionKernel, Execution, Kernels, MlpKernel, Quantize, Remat
from vit_jax.core import traced_costs, trees
from vit_jax.core.types import PyTree
from vit_jax.models import backbones, heads

TRAIN_FACTOR = 3  # one product in the forward pass, and two in the backward pass


class Cost(NamedTuple):
  """Numbers of parameters by part, FLOPs of the forward pass of one image by module, and the width of the features."""
  parameters: dict[str, int]
  flops: dict[str, int]
  width: int


def forward(model: schema.Model, image_px: tuple[int, int], *, head: schema.Head, num_classes: int,
            num_channels: int = 3) -> Cost:
  """Returns the cost of a network with its classification head; `num_classes=0` leaves the head out."""
  arguments = (plain(model), image_px, head if num_classes else None, num_classes, num_channels)
  return _forward(ByText(arguments, repr(arguments)))


class ByText:
  """A value as the key of a cache, equal to others with the same text; settings themselves cannot be hashed."""

  def __init__(self, value: Any, text: str) -> None:
    self.value, self._text = value, text

  def __eq__(self, other: object) -> bool:
    return isinstance(other, ByText) and self._text == other._text

  def __hash__(self) -> int:
    return hash(self._text)


@functools.lru_cache(1000)
def _forward(key: ByText) -> Cost:
  """Returns the cost for `key.value`, the arguments of `forward`."""
  model, image_px, head_settings, num_classes, num_channels = key.value
  backbone, rng = backbones.build(model, image_px), jax.random.key(0)
  image = jax.ShapeDtypeStruct((1, *image_px, num_channels), jnp.float32)
  params, state = jax.eval_shape(backbone.init, rng, image)
  pooled = jax.eval_shape(lambda p, s, x: backbone.apply(p, s, x, train=False, key=None)[0].pooled,
                          params, state, image)
  width = pooled.shape[-1]
  head = heads.Head(head_settings, Kernels.PLAIN) if head_settings else None
  if head:
    params['head'] = jax.eval_shape(lambda key: head.init(key, width, num_classes), rng)

  def run(params: Any, state: Any, image: jax.Array) -> jax.Array:
    pooled = backbone.apply(params, state, image, train=False, key=None)[0].pooled
    with jax.named_scope('head'):
      return head.apply(params['head'], pooled) if head else pooled

  return Cost({part: trees.num_elements(leaves) for part, leaves in params.items()},
              traced_costs.flops(run, params, state, image), width)


def train_flops(model: schema.Model, image_px: tuple[int, int], *, head: schema.Head, num_classes: int) -> int:
  """Returns the FLOPs of forward and backward pass of one image of a plain classifier.

  What is computed again under remat is not counted.
  """
  return TRAIN_FACTOR * sum(forward(model, image_px, head=head, num_classes=num_classes).flops.values())


def plain(settings: Any) -> Any:
  """Returns settings in the form whose FLOPs are counted: plain kernels, scanned blocks, nothing computed again.

  Fast forms compute the same function by other products, such as sums over rows as products with ones. All networks in
  the settings are changed, also those of teachers.
  """
  if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
    return settings
  forms: dict[str, Any] = {'kernels': Kernels.PLAIN, 'quantize': Quantize.NONE, 'execution': Execution.SCAN,
                           'remat': Remat.NONE, 'full_remat': 0}
  kernels = {AttentionKernel: AttentionKernel.XLA, MlpKernel: MlpKernel.XLA}
  values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
  changes = {name: kernels.get(type(value)) or plain(value) for name, value in values.items()}
  if 'remat' in values:  # settings of a network
    changes |= {name: form for name, form in forms.items() if name in values}
  return dataclasses.replace(settings, **changes)


def table(params: PyTree, flops: Mapping[str, int]) -> str:
  """Returns lines with path, shape and size of each parameter, and FLOPs of one image in the forward pass by module."""
  leaves: dict[str, Any] = trees.flatten(params)
  rows = [('parameter', 'shape', 'parameters')]
  rows += [(name, ' x '.join(map(str, leaf.shape)), f'{leaf.size:,}') for name, leaf in leaves.items()]
  rows += [('all parameters', '', f'{trees.num_elements(params):,}'), ('', '', '')]
  rows += [('forward pass, one image', '', 'MFLOPs')]
  rows += [(module, '', f'{count / 1e6:,.3f}') for module, count in flops.items() if count]
  rows += [('all modules', '', f'{sum(flops.values()) / 1e6:,.3f}')]
  first, second, third = (max(map(len, column)) for column in zip(*rows, strict=True))
  return '\n'.join(f'{a:<{first}}  {b:<{second}}  {c:>{third}}'.rstrip() for a, b, c in rows)
