"""Classification of images by names of classes in words, with a text tower: zero-shot (arXiv 2103.00020)."""
from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array, HostArray
from vit_jax.data.text import prompts as prompting

if TYPE_CHECKING:
  from vit_jax.weights.text_encoder import TextEncoder


class Guess(NamedTuple):
  """Holds a predicted class of an image.

  label: its number, from 0.    name: of the class.    probability: from 0 to 1.
  share: of all given names together, from 0 to 1; None = the probability is this share, or they share nothing.
  """
  label: int
  name: str
  probability: float
  share: float | None = None

  def plain(self) -> dict[str, int | str | float]:
    """Returns the values that there are, by name."""
    return {name: value for name, value in self._asdict().items() if value is not None}


def rank(logits: HostArray, names: Sequence[str], *, top: int, is_sigmoid: bool = False) -> list[Guess]:
  """Returns the `top` largest of `logits [C]` with names and probabilities, largest first, ties in class order.

  A probability is the softmax over all classes, or the sigmoid of the logit alone, which has the softmax as `share`.
  """
  powers = np.exp(logits - logits.max())
  shares = powers / powers.sum()
  probabilities = 1. / (1. + np.exp(-logits.astype(np.float64))) if is_sigmoid else shares
  order = np.argsort(-logits, kind='stable')[:top]  # probabilities are rounded to 0 or 1, and so to ties
  return [Guess(int(i), names[i], float(probabilities[i]), float(shares[i]) if is_sigmoid else None) for i in order]


class ZeroShot:
  """Classifies images by names, whose texts are embedded once.

  class_names: as given.    probability: what the probabilities are, a sentence.

  Args:
    pooled: maps images, and whether they are prepared, to pooled features `[B, D]`.
    encoder: of texts and features.
    names: of the classes.
    prompts: of the names, see `Model.zero_shot`.
  """

  def __init__(self, pooled: Callable[[Any, bool], HostArray], encoder: TextEncoder, names: Sequence[str],
               prompts: str | Sequence[str]) -> None:
    from vit_jax.evaluate.zeroshot import class_vectors  # only here: most programs predict the classes of a head
    prompting.check_names(names)
    self.class_names = tuple(names)
    templates = prompting.find_templates(prompts, setting='prompts')
    self._pooled, self._encoder = pooled, encoder
    self._texts = prompting.build(names, templates, encoder.rule, is_whole=True)
    self._vectors_CE = class_vectors(encoder, self._texts)
    self._project = jax.jit(encoder.project)
    self.probability = ('Each probability is the sigmoid of one name alone; they need not add up to 1. The share is '
                        'the softmax over the given names.'
                        if encoder.is_sigmoid else 'Probabilities are a softmax over the given names.')

  @functools.cached_property
  def digest(self) -> str:
    """The SHA-256 of the text tower and of all texts."""
    return hashlib.sha256(json.dumps([self._encoder.digest, self._texts]).encode()).hexdigest()

  def classify(self, images: Any, *, top: int = 5) -> list[list[Guess]]:
    """Returns the `top` most similar names of each image, best first."""
    return [self.rank(row, top=top) for row in self.logits(images)]

  def logits(self, images: Any, *, prepared: bool = False) -> HostArray:
    """Returns `scale * similarity + bias` of each image and name, `[B, C]` f32; `prepared` is that of `Model`."""
    vectors_BE = np.asarray(self._project(jnp.asarray(self._pooled(images, prepared))))
    return vectors_BE @ self._vectors_CE.T * np.float32(self._encoder.scale) + np.float32(self._encoder.bias)

  def probabilities(self, pooled: Array) -> Array:
    """Returns the probabilities of the names `[B, C]` for pooled features `[B, D]`; traceable."""
    logits_BC = jnp.dot(self._encoder.project(pooled), self._vectors_CE.T, precision=jax.lax.Precision.HIGHEST)
    logits_BC = logits_BC * self._encoder.scale + self._encoder.bias
    return jax.nn.sigmoid(logits_BC) if self._encoder.is_sigmoid else jax.nn.softmax(logits_BC)

  def rank(self, logits: HostArray, *, top: int) -> list[Guess]:
    """Returns the `top` largest of `logits [C]` with names and probabilities, largest first."""
    return rank(logits, self.class_names, top=top, is_sigmoid=self._encoder.is_sigmoid)
