"""Texts and features of images as vectors of one space, with the weights and the tokenizer of a model."""
from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.config import schema
from vit_jax.core import axes, trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray, Params, PyTree
from vit_jax.data.text.tokenizer import Tokenizer
from vit_jax.models import heads
from vit_jax.models.text_tower import TextTower
from vit_jax.objectives import contrastive
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel import sharding
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

  def __init__(self, weights: TextWeights, image: Weights | None, *, tokenizer_file: str = '',
               mesh: Mesh | None = None) -> None:
    """Reads the tokenizer `tokenizer_file` ('' = beside the weights), and places the parameters on `mesh`.

    `image` has the projection of images, if its network has one; None = parameters are those of a run, see `at`.

    Raises:
      UserError: there is no tokenizer, or it is that of another model.
    """
    self.source, self.rule = weights.source, weights.rule
    self.scale, self.bias, self.is_sigmoid = weights.scale, weights.bias, weights.is_sigmoid
    self._tokenizer = Tokenizer(texts.find_tokenizer(weights, tokenizer_file), family=weights.family,
                                length=weights.tower.length)
    self._vocabulary, self._tower = weights.tower.vocabulary, weights.tower
    self._params = weights.params and _placed(weights.params, weights.tower, mesh)
    self._whole = None if mesh is None else meshes.replicated(mesh)
    has_head = image is not None and image.num_classes
    head = heads.build(image.head, image.model) if image and has_head else contrastive.head()
    self._project = jax.jit(functools.partial(_projected, head))  # copies share what is compiled
    self._head_params: Params | None = image.params['head'] if image and has_head else None

  @property
  def digest(self) -> str:
    """Identity of the vectors of texts: the tokenizer, how texts are simplified, and the parameters of the tower."""
    return f'{self._tokenizer.digest} {self.rule.value} {trees.digest(self._params)}'

  def at(self, selected: PyTree) -> TextEncoder:
    """Returns the encoder with the selected parameters of a view of a run; itself if they have no text tower."""
    if 'text' not in selected:
      return self
    found = copy.copy(self)
    found._params, found._head_params = selected['text'], selected.get('head')
    return found

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
      parts = [x[start:start + size] for x in (ids, mask)]
      rows = [np.concatenate([part, np.repeat(part[:1], size - len(part), 0)]) for part in parts]  # of one size
      placed = rows if self._whole is None else jax.device_put(rows, self._whole)
      found.append(np.asarray(_embed(self._tower, self._params, *placed)))
    return np.concatenate(found)[:len(prompts)]

  def project(self, pooled: Array) -> Array:
    """Returns vectors of images of unit length, `[…, E]` f32, of pooled features `[…, D]`; traceable."""
    return self._project(self._head_params, pooled)


def of_run(config: schema.Config, *, mesh: Mesh | None = None) -> TextEncoder:
  """Returns the encoder of the text tower that a run trains, whose parameters `at` gives it.

  Raises:
    UserError: its tokenizer cannot be read.
  """
  return TextEncoder(texts.of_config(config, {}, 'the run'), None, mesh=mesh)


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


def _projected(head: heads.Head, params: Params | None, pooled: Array) -> Array:
  if params is not None:
    pooled = head.apply(params, pooled.reshape(-1, pooled.shape[-1])).reshape(*pooled.shape[:-1], -1)
  return heads.normalize(pooled, axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def _embed(tower: TextTower, params: PyTree, ids_TN: Array, mask_TN: Array) -> Array:
  return heads.normalize(tower.apply(params, ids_TN, mask_TN), axis=-1).astype(jnp.float32)
