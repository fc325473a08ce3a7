"""Warnings about weights: what their tensors do not determine, and values that cannot be used."""
from __future__ import annotations

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.weights import infer, sidecars
from vit_jax.weights.hints import Hints
from vit_jax.weights.infer import Leaves


def ambiguities(model: schema.Model, leaves: Leaves, family: str, sidecar: sidecars.Sidecar, names: tuple[str, ...],
                *, has_gelu: bool) -> list[str]:
  """Returns warnings about networks whose tensors could also be those of another network.

  `has_gelu`: whether `--model`, a sidecar or a published name determines the form of the GELU.

  Raises:
    UserError: the file is of the other network.
  """
  if isinstance(model, schema.EfficientNet):
    named = [name for one in (sidecar.architecture, *names) if (name := one.rpartition('/')[2].lower())]
    if other := [name for name in named if name.startswith('efficientnet_')]:
      raise UserError(f'expected a network of the authors, tf_efficientnet_…, got {other[0]}, which pads as PyTorch '
                      'does and has another epsilon. Use the tf_ variant.')
    is_known = sidecar != sidecars.Sidecar() or any(name.startswith('tf_efficientnet_') for name in named)
    return [] if is_known else ['it is assumed to be a tf_efficientnet_…; the efficientnet_… of timm have the same '
                                'tensors, and other results']
  if not isinstance(model, schema.ViT):
    return []
  if not has_gelu and family in ('timm', 'clip') and not model.swiglu:
    if model.norm_before and model.positions is schema.Positions.LEARNED:
      return ['its GELU is a guess: exact, as in open_clip. Weights of OpenAI and those trained as theirs have '
              'another: set --model=gelu=quick for these']
    if model.pool is schema.Pool.MAP and model.positions is schema.Positions.LEARNED:
      return ['its GELU is a guess: exact. Some of the published SigLIPs have another: set --model=gelu=tanh for these']
  if 'backbone/positions' in leaves or model.positions is not schema.Positions.SINCOS2D:
    return []
  if family != 'big_vision':
    raise UserError('expected position embeddings, got none: they are rotary or absent, which is not supported')
  return ['it has no position embeddings; they are assumed to be fixed (sincos2d), as in big_vision']


def guessed_pool(model: schema.Model, leaves: Leaves, hints: Hints) -> list[str]:
  """Returns a warning if neither the tensors, `--model` nor a sidecar determine how tokens are pooled."""
  if not isinstance(model, schema.ViT) or infer.has_pool(leaves) or hints.pool or (
      model.norm_after_pool):
    return []
  return ['its pooling is a guess: the mean of the patch tokens. The same tensors may belong to a network that takes '
          'the first one (big_vision, pool type 0) or pools nothing (vision_transformer, unpooled). Set '
          '--model=pool=mean or --model=pool=first.']


def values(leaves: Leaves) -> list[str]:
  """Returns warnings about values that cannot be used."""
  found = []
  if 'head/kernel' in leaves and infer.is_zero(leaves['head/kernel']):
    found.append('the head is all zeros, as in the ImageNet-21k files of the ViT paper: its predictions mean nothing')
  bad = not_finite(leaves)
  return found + ([f'not finite: {bad}'] if bad else [])


def not_finite(leaves: Leaves) -> str:
  """Returns how many parameters have values that are infinite or NaN, and the first of them; '' for none."""
  bad = [name for name, leaf in leaves.items() if leaf.dtype.kind == 'f' and not np.isfinite(leaf).all()]
  more = f' and {len(bad) - 3} more' if len(bad) > 3 else ''
  return f'infinite or NaN values in {", ".join(bad[:3])}{more}' if bad else ''
