"""Detects the networks in files of transformers, and renames their tensors as the tables of names expect them."""
from __future__ import annotations

import math

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Gelu
from vit_jax.core.errors import UserError
from vit_jax.weights import names, names_families
from vit_jax.weights.hints import Hints
from vit_jax.weights.renaming import Recognized, Tensors, dropping, renamed, without_fixed

HF = Hints(gelu=Gelu.EXACT, norm_eps=1e-12)    # ViTConfig's defaults
_HF_PREFIX = (r'^(vit|deit|dinov2|dinov2_with_registers|vit_mae|ijepa)\.|^((clip|siglip|aimv2|tipsv2)\.)?vision_model\.'
              r'|^model\.(?=layer\.)')
_HF_DROPS = {
    r'pooler\.dense\..*': 'a pooler that classification does not use',
    r'embeddings\.mask_token': 'of pre-training with hidden patches',
    r'decoder\.0\..*': 'of pre-training with hidden patches',
    r'(text_model|text_projection)\..*|logit_scale|logit_bias|temperature|text_projection': 'of the text tower',
    r'(embeddings|text_model\.embeddings)\.position_ids': 'numbers from 0',
}
_HF_BLOCK = r'^((?:encoder\.layer|decoder\.decoder_layers)\.\d+)\.'


def recognize(tensors: Tensors) -> Recognized | None:
  """Returns the family of a file with the names of transformers; None for other files."""
  kept = renamed(tensors, (_HF_PREFIX, ''), (r'^cls_classifier', 'classifier'), (r'^layers\.', 'encoder.layer.'),
                  (r'^decoder\.decoder_encoder\.layer\.', 'decoder.decoder_layers.'))  # saved by transformers 5.23
  if found := _of_towers(kept):
    return found
  if 'embeddings.patch_embeddings.projection.weight' not in kept:
    return None
  kept = renamed(
      kept, *((_HF_BLOCK + rf'attention\.{new}_proj', rf'\1.attention.attention.{old}')
              for new, old in (('q', 'query'), ('k', 'key'), ('v', 'value'))),
      (_HF_BLOCK + r'attention\.o_proj', r'\1.attention.output.dense'))
  is_dino = any('.layer_scale1.' in name for name in kept)
  kept, dropped = dropping(kept, _HF_DROPS)
  if not is_dino:
    kept = renamed(kept, (_HF_BLOCK + r'mlp\.fc1', r'\1.intermediate.dense'),
                    (_HF_BLOCK + r'mlp\.fc2', r'\1.output.dense'))
    kept, more = without_fixed(kept, 'decoder.decoder_pos_embed')
    return Recognized('huggingface', names.HUGGINGFACE, kept, dropped + more, HF)
  width = kept['embeddings.patch_embeddings.projection.weight'].shape[:1]
  if 'classifier.weight' in kept and width and kept['classifier.weight'].shape[-1:] == (2 * width[0],):
    kept, more = dropping(kept, {r'classifier\..*': 'this head reads class token and mean patch side by side; no head '
                                                     'here does'})
    dropped += more
  kept = _gates_joined(kept)
  is_gated = any('.mlp.weights_in.' in name for name in kept)
  table = names.HUGGINGFACE_DINO_SWIGLU if is_gated else names.HUGGINGFACE_DINO
  return Recognized('huggingface', table, kept, dropped, HF._replace(norm_eps=1e-6))


def _of_towers(tensors: Tensors) -> Recognized | None:
  """Files of transformers with CLIP, SigLIP, DINOv3 or AIMv2."""
  kept, dropped = dropping(tensors, _HF_DROPS)
  if 'embeddings.patch_embedding.weight' in kept:
    is_clip = 'pre_layrnorm.weight' in kept
    own = Hints(gelu=Gelu.QUICK, norm_eps=1e-5) if is_clip else Hints(gelu=Gelu.TANH, norm_eps=1e-6)
    if kept['embeddings.patch_embedding.weight'].ndim == 2:
      kept = _as_convolution(kept)
      own = own._replace(position_resize=schema.PositionResize.BILINEAR_ANTIALIAS)
    return Recognized('huggingface', names_families.HUGGINGFACE_TOWER, kept, dropped, own)
  if 'embeddings.patch_embeddings.weight' in kept:
    own = Hints(gelu=Gelu.EXACT, norm_eps=1e-5, settings={
        'rotary_base': 100., 'rotary_places': schema.RotaryPlaces.UNIT})
    return Recognized('huggingface', names_families.HUGGINGFACE_DINOV3, kept, dropped, own)
  if 'embeddings.patch_embed.weight' in kept:
    kept, more = dropping(kept, {r'head\..*': 'a pool without a projection of its query, which no network here has'})
    fixed = {} if 'embeddings.position_embedding.weight' in kept else {'positions': schema.Positions.SINCOS2D_MAE}
    own = Hints(norm_eps=1e-5, settings=fixed, pool=schema.Pool.MEAN)
    return Recognized('huggingface', names_families.HUGGINGFACE_AIMV2, kept, dropped + more, own)
  return None


def _as_convolution(tensors: Tensors) -> Tensors:
  """Returns the tensors of SigLIP 2 for images of any size (NaFlex) with its patch embedding as a convolution.

  Its rows are the pixels of a patch, row by row, with the channels last.
  """
  name = 'embeddings.patch_embedding.weight'
  width, inputs = tensors[name].shape
  side = math.isqrt(inputs // 3)
  if 3 * side * side != inputs:
    raise UserError(f'{name} has the shape {[width, inputs]}, expected the pixels of square patches of three channels')
  return {**tensors, name: tensors[name].reshape(width, side, side, 3).transpose(0, 3, 1, 2)}


def _gates_joined(tensors: Tensors) -> Tensors:
  """Returns the tensors with gate and value of each SwiGLU MLP joined, as transformers saves them."""
  found = {}
  for name, tensor in tensors.items():
    if '.mlp.gate_proj.' in name and (up := tensors.get(name.replace('gate_proj', 'up_proj'))) is not None:
      if up.shape != tensor.shape or not up.ndim:
        raise UserError(f'{name} has the shape {list(tensor.shape)}, its up_proj {list(up.shape)}')
      found[name.replace('gate_proj', 'weights_in')] = np.concatenate([tensor, up])
    elif '.mlp.up_proj.' not in name:
      found[name.replace('.mlp.down_proj.', '.mlp.weights_out.')] = tensor
  return found
