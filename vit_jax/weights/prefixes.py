"""Names of tensors in files of transformers, whose prefixes depend on the kind of model."""
from __future__ import annotations

import re

import numpy as np

from vit_jax.config import schema
from vit_jax.core.types import HostArray
from vit_jax.models.vit.positions import sincos2d_mae
from vit_jax.weights import folders, names_families
from vit_jax.weights.loading import Weights

TABLES = {'clip_vision_model': names_families.HUGGINGFACE_TOWER,
          'siglip_vision_model': names_families.HUGGINGFACE_TOWER,
          'dinov3_vit': names_families.HUGGINGFACE_DINOV3, 'aimv2_vision_model': names_families.HUGGINGFACE_AIMV2}
"""Tables of transformers by kind of network, besides those for the older ones."""


def add(tensors: dict[str, HostArray], weights: Weights) -> dict[str, HostArray]:
  """Returns the tensors under the names of transformers: the backbone of a model with a head has a prefix."""
  kind = folders.transformers_type(weights)
  found = dict(tensors)
  if kind in TABLES and weights.num_classes:
    return {name if name.startswith('visual_projection.') else f'vision_model.{name}': x for name, x in found.items()}
  if kind == 'tipsv2_vision_model':
    for old, new in (('attention.attention.query', 'attention.q_proj'), ('attention.attention.key', 'attention.k_proj'),
                     ('attention.attention.value', 'attention.v_proj'), ('attention.output.dense', 'attention.o_proj')):
      found = {name.replace(f'.{old}.', f'.{new}.'): x for name, x in found.items()}
  if kind.startswith(('dinov', 'tipsv2')):
    width = tensors['embeddings.cls_token'].shape[-1]
    shape = (1, 1, width) if kind == 'dinov3_vit' else (1, width)
    return found | {'embeddings.mask_token': np.zeros(shape, np.float32)}
  if weights.decoder:
    found['decoder.decoder_pos_embed'] = decoder_positions(weights)
  if weights.num_classes or weights.decoder:
    found = {name if re.match(r'(\w*classifier|decoder)\.', name) else
             f'{"deit" if kind == "deit" else "vit"}.{name}': x for name, x in found.items()}
  if kind == 'deit':
    found = {re.sub('^classifier', 'cls_classifier', name): x for name, x in found.items()}
  return found


def decoder_positions(weights: Weights) -> HostArray:
  """Returns the fixed position table of MAE's decoder, with zeros for the class token."""
  assert weights.decoder and isinstance(weights.model, schema.ViT)
  h, w = (px // weights.model.patch for px in weights.preprocess.image_px)
  table = sincos2d_mae((h, w), weights.decoder.decoder_width)
  return np.concatenate([np.zeros((1, table.shape[1]), np.float32), table])[None]
