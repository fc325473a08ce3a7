"""Detects the text tower in a file, and renames its tensors as the tables of `names_text.py` expect them."""
from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from vit_jax.config.schema import Gelu
from vit_jax.core.errors import UserError
from vit_jax.data.text.tokenizer import CLIP, SIGLIP, TIPS
from vit_jax.weights import names_text, tables
from vit_jax.weights.families.record import Tensors, distinct, dropping, renamed
from vit_jax.weights.report import Line
from vit_jax.weights.tables import Table

_DROPS = {r'(text_model\.)?embeddings\.position_ids|text_model\.embeddings\.position_ids': 'numbers from 0',
          r'attn_mask|input_resolution|context_length|vocab_size': 'a setting, and not a weight'}
_SCALARS = ('logit_scale', 'logit_bias', 'temperature')
_OF_TEXT = {
    'huggingface': r'(text_model|text_projection)\..*|logit_scale|logit_bias|temperature',
    'big_vision': r'(params/)?(txt/.*|t|b|bias_init|temperature)',
    'openai': r'text\..*|token_embedding\..*|positional_embedding|transformer\.resblocks\..*|ln_final\..*|'
              r'text_projection(\..*)?|logit_scale|logit_bias|temperature|attn_mask|input_resolution|context_length|'
              r'vocab_size',
    'scenic': r'.*'}
"""What belongs to the text tower, by kind of file; the other tensors are those of the image tower."""


class Found(NamedTuple):
  """The text tower of a file.

  kind: a key of `_OF_TEXT`, for messages.
  family: one of `data.text.tokenizer.FAMILIES`.
  table, tensors: of names, and the tensors under these.
  scale, bias: of the logits; None = not in the file.
  is_sigmoid: whether each logit is a decision of its own (SigLIP), and not one of a softmax.
  gelu: of the program, None = that of the image tower of the same file; TIPS has none.
  norm_eps: of the program.
  dropped: tensors without a use.
  """
  kind: str
  family: str
  table: Table
  tensors: Tensors
  scale: float | None
  bias: float | None
  is_sigmoid: bool
  gelu: Gelu | None
  norm_eps: float
  dropped: tuple[Line, ...]


def has_text(tensors: Tensors) -> bool:
  """Whether the file has a text tower that can be read."""
  return bool(_kind(tensors))


def recognize(tensors: Tensors) -> Found:
  """Returns the text tower among the tensors of a file.

  Raises:
    UserError: there is none.
  """
  kind = _kind(tensors)
  if not kind:
    raise UserError('expected weights with a text tower, got weights of images alone. Use the complete file of a CLIP, '
                    'SigLIP or TIPS model.')
  own = {name: x for name, x in tensors.items() if re.fullmatch(_OF_TEXT[kind], name)}
  own, dropped = dropping(own, _DROPS)
  match kind:
    case 'huggingface':
      return _of_huggingface(own, dropped)
    case 'big_vision':
      return _of_big_vision(own, dropped)
    case 'openai':
      return _of_openai(own, dropped)
    case _:
      scale, bias = _numbers(own)
      return Found(kind, TIPS, names_text.SCENIC, _without(own), scale, bias, False, None, 1e-6, dropped)


def _kind(tensors: Tensors) -> str:
  """Returns the kind of file, detected from the name of the table of tokens; '' without one."""
  tokens = {'huggingface': r'text_model\.embeddings\.token_embedding\.weight',
            'big_vision': r'(params/)?txt/Embed_0/embedding', 'openai': r'(text\.)?token_embedding\.weight',
            'scenic': r'token_emb/emb_var'}
  return next((kind for kind, pattern in tokens.items() if any(re.fullmatch(pattern, name) for name in tensors)), '')


def _of_huggingface(own: Tensors, dropped: tuple[Line, ...]) -> Found:
  scale, bias = _numbers(own)
  family = SIGLIP if 'text_model.head.weight' in own else CLIP if 'text_projection.weight' in own else TIPS
  gelu = {CLIP: Gelu.QUICK, SIGLIP: Gelu.TANH, TIPS: None}[family]
  return Found('huggingface', family, names_text.HUGGINGFACE, _without(own), scale, bias, bias is not None, gelu,
               1e-6 if family == SIGLIP else 1e-5, dropped)


def _of_big_vision(own: Tensors, dropped: tuple[Line, ...]) -> Found:
  """The text tower of big_vision's SigLIP; without a bias of the logits it is trained with a softmax (LiT)."""
  own = renamed(own, (r'^params/', ''))
  scale, bias = _exp(own.pop('t', None)), _number(own.pop('b', None))
  own = _unstacked(renamed(own, (r'^txt/', '')))
  if (twice := own.pop('Encoder_0/pos_embedding', None)) is not None and 'pos_embedding' in own:
    own['pos_embedding'] = own['pos_embedding'] + twice  # big_vision adds both for its oldest files
    dropped += (Line('Encoder_0/pos_embedding', 'folded', 'added to the other positions'),)
  return Found('big_vision', SIGLIP, names_text.BIG_VISION, own, scale, bias, bias is not None, Gelu.TANH, 1e-6,
               dropped)


def _of_openai(own: Tensors, dropped: tuple[Line, ...]) -> Found:
  own = distinct(own, lambda name: name.removeprefix('text.'))
  own, more = dropping(own, _DROPS)
  scale, bias = _numbers(own)
  if 'positional_embedding' not in own:
    return Found('openai', TIPS, names_text.OPENAI, _without(own), scale, bias, False, None, 1e-5, dropped + more)
  is_sigmoid = bias is not None
  return Found('openai', SIGLIP if is_sigmoid else CLIP, names_text.OPENAI, _without(own), scale, bias, is_sigmoid,
               Gelu.TANH if is_sigmoid else None, 1e-6 if is_sigmoid else 1e-5, dropped + more)


def _unstacked(tensors: Tensors) -> Tensors:
  """Returns the tensors of scanned blocks as one tensor per block."""
  found: Tensors = {}
  for name, x in tensors.items():
    before, is_stacked, after = name.partition('Encoder_0/encoderblock/')
    if not is_stacked:
      found[name] = x
    elif not x.ndim or x.shape[0] > tables.MOST_LAYERS:
      raise UserError(f'{name} has the shape {list(x.shape)}, expected up to {tables.MOST_LAYERS:,} layers first')
    else:
      found |= {f'{before}Encoder_0/encoderblock_{i}/{after}': one for i, one in enumerate(x)}
  return found


def _numbers(tensors: Tensors) -> tuple[float | None, float | None]:
  """Returns scale and bias of the logits of PyTorch's files; TIPS has a temperature instead of a scale."""
  scale = _exp(tensors.get('logit_scale'))
  temperature = _number(tensors.get('temperature'))
  if temperature is not None and not temperature > 0:
    raise UserError(f'temperature: expected a positive number, got {temperature}')
  return scale if temperature is None else 1. / temperature, _number(tensors.get('logit_bias'))


def _exp(x: np.ndarray | None) -> float | None:
  number = _number(x)
  return None if number is None else float(np.exp(number))


def _number(x: np.ndarray | None) -> float | None:
  if x is None:
    return None
  if x.size != 1 or not np.isfinite(x).all():
    raise UserError(f'scale or bias of the logits: expected one finite number, got an array {list(x.shape)}')
  return float(x.reshape(()))


def _without(tensors: Tensors) -> Tensors:
  return {name: x for name, x in tensors.items() if name not in _SCALARS}
