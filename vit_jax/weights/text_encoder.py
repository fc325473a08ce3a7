"""Texts and features of images as vectors of one space, with the weights and the tokenizer of a model."""
from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.core import axes
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray, Params, PyTree
from vit_jax.data.text import prompts as prompting
from vit_jax.data.text import tokenizer
from vit_jax.data.text.tokenizer import Tokenizer
from vit_jax.models import heads
from vit_jax.models.text.tower import TextTower
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel import sharding
from vit_jax.weights import addresses
from vit_jax.weights import text as texts
from vit_jax.weights.network import Weights
from vit_jax.weights.text import TextWeights

BATCH = 256  # texts at a time


class TextEncoder:
  """The text side of a model, and the projection of its image side.

  source: of the weights.    rule: how texts are simplified for this family.
  scale, bias: logits are `scale * similarity + bias`.
  is_sigmoid: whether a probability is the sigmoid of its logit, and not a softmax over texts.
  """

  def __init__(self, weights: TextWeights, image: Weights, *, tokenizer_file: str = '',
               mesh: Mesh | None = None) -> None:
    """Reads the tokenizer `tokenizer_file` ('' = beside the weights), and places the parameters on `mesh`.

    Raises:
      UserError: there is no tokenizer, or it is that of another model.
    """
    self.source, self.rule = weights.source, prompting.rule_of(weights.family)
    self.scale, self.bias, self.is_sigmoid = weights.scale, weights.bias, weights.is_sigmoid
    if not tokenizer_file:
      addresses.fetch_tokenizer(weights.source, tokenizer.FILES[weights.family])
    path = tokenizer.find(weights.folder, weights.family, given=tokenizer_file, source=weights.source)
    self._tokenizer = Tokenizer(path, family=weights.family, length=weights.tower.length)
    self._vocabulary, self._tower = weights.tower.vocabulary, weights.tower
    self._params = _placed(weights.params, weights.tower, mesh)
    self._whole = None if mesh is None else meshes.replicated(mesh)
    self._image = image

  def embed(self, prompts: Sequence[str]) -> HostArray:
    """Returns vectors of unit length, `[T, E]` f32.

    Raises:
      UserError: the tokenizer has ids that the network does not have.
    """
    ids, mask = self._tokenizer(prompts)
    if ids.max(initial=0) >= self._vocabulary:
      raise UserError(f'{self._tokenizer.path}: expected the tokenizer of a vocabulary of {self._vocabulary:,}, got '
                      f'the id {ids.max():,}. Use the file that was published with {self.source}.')
    size = min(BATCH, 1 << max(len(prompts) - 1, 0).bit_length())
    found = []
    for start in range(0, len(prompts), size):
      rows = [_padded(x[start:start + size], size) for x in (ids, mask)]
      placed = rows if self._whole is None else jax.device_put(rows, self._whole)
      found.append(np.asarray(_embed(self._tower, self._params, *placed)))
    return np.concatenate(found)[:len(prompts)]

  def project(self, pooled: Array) -> Array:
    """Returns vectors of images of unit length, `[…, E]` f32, of pooled features `[…, D]`; traceable."""
    if self._image.num_classes:
      head = heads.build(self._image.head, self._image.model)
      flat = pooled.reshape(-1, pooled.shape[-1])
      pooled = head.apply(self._image.params['head'], flat).reshape(*pooled.shape[:-1], -1)
    return heads.normalize(pooled, axis=-1)


def load(where: str, image: Weights, *, tokenizer_file: str = '', mesh: Mesh | None = None) -> TextEncoder:
  """Returns the encoder of the text tower at `where`, whose image tower is `image`.

  Raises:
    UserError: there is no text tower or no tokenizer, or they cannot be read.
  """
  return TextEncoder(texts.load(where, image=image), image, tokenizer_file=tokenizer_file, mesh=mesh)


def _placed(params: Params, tower: TextTower, mesh: Mesh | None) -> PyTree:
  if mesh is None:
    return jax.device_put(params)
  _, labels = axes.trace(tower.init, jax.random.key(0))
  specs = sharding.param_specs(params, labels, mesh, differentiated=False)
  return jax.device_put(params, sharding.shardings(specs, mesh))


def _padded(x: HostArray, size: int) -> HostArray:
  return np.concatenate([x, np.repeat(x[:1], size - len(x), 0)])


@functools.partial(jax.jit, static_argnums=0)
def _embed(tower: TextTower, params: PyTree, ids_TN: Array, mask_TN: Array) -> Array:
  return heads.normalize(tower.apply(params, ids_TN, mask_TN), axis=-1).astype(jnp.float32)
