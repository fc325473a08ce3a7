"""Text towers in the files of programs: how they are detected, and the names of their parameters.

Our paths: `text/tokens [V, D]`, `text/positions [1, N, D]`, `text/blocks/…` as in a backbone, `text/norm/{scale,bias}`,
`text/projection/{kernel [D, E],bias [E]}`. Scale and bias of the logits are numbers apart, see `weights/text.py`.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.config.schema import Gelu
from vit_jax.core.errors import UserError
from vit_jax.data.text.tokenizer import CLIP, SIGLIP, TIPS
from vit_jax.weights.families import flax
from vit_jax.weights.families.record import Tensors, distinct, dropping, renamed
from vit_jax.weights.network import Line
from vit_jax.weights.tables import Table, table


class Found(NamedTuple):
  """The text tower of a file.

  family: one of `data.text.tokenizer.FAMILIES`.
  table, tensors: of names, and the tensors under these.
  scale, bias: of the logits; None = not in the file.
  is_sigmoid: whether each logit is a decision of its own (SigLIP), and not one of a softmax.
  gelu: of the program, None = that of the image tower of the same file; TIPS has none.
  norm_eps: of the program.
  dropped: tensors without a use.
  """
  family: str
  table: Table
  tensors: Tensors
  scale: float | None
  bias: float | None
  is_sigmoid: bool
  gelu: Gelu | None
  norm_eps: float
  dropped: tuple[Line, ...]


class Program(NamedTuple):
  """How text towers look in the files of a program.

  tokens: pattern of the name of the table of tokens, by which the program is detected.
  own: pattern of the names of the text tower; the other tensors are those of the image tower.
  read: returns the tower, of its own tensors.
  """
  tokens: str
  own: str
  read: Callable[[Tensors], Found]


_DROPS = {r'(text_model\.)?embeddings\.position_ids|text_model\.embeddings\.position_ids': 'numbers from 0',
          r'attn_mask|input_resolution|context_length|vocab_size': 'a setting, and not a weight'}


def has_text(tensors: Tensors) -> bool:
  """Whether the file has a text tower that can be read."""
  return _program(tensors) is not None


def recognize(tensors: Tensors) -> Found:
  """Returns the text tower among the tensors of a file.

  Raises:
    UserError: there is none.
  """
  if (program := _program(tensors)) is None:
    raise UserError('expected weights with a text tower, got weights of images alone. Use the complete file of a CLIP, '
                    'SigLIP or TIPS model.')
  own, dropped = dropping({name: x for name, x in tensors.items() if re.fullmatch(program.own, name)}, _DROPS)
  found = program.read(own)
  return found._replace(dropped=dropped + found.dropped)


def _program(tensors: Tensors) -> Program | None:
  return next((one for one in PROGRAMS if any(re.fullmatch(one.tokens, name) for name in tensors)), None)


# transformers: CLIP, SigLIP and TIPSv2

TRANSFORMERS = table("""
    text/tokens | text_model.embeddings.token_embedding.weight | same
    text/positions | text_model.embeddings.position_embedding.weight | rows
    text/blocks/attn/{query,key,value,out} | text_model.encoder.layers.{i}.self_attn.{q,k,v,out}_proj | dense
    text/blocks/{norm1,norm2} | text_model.encoder.layers.{i}.{layer_norm1,layer_norm2} | norm
    text/blocks/mlp/{up,down} | text_model.encoder.layers.{i}.mlp.{fc1,fc2} | dense
    text/norm | text_model.final_layer_norm | norm
    text/projection | text_model.head | dense
    text/projection/kernel | text_projection.weight | matrix
""")


def _of_transformers(own: Tensors) -> Found:
  scale, bias, rest = _numbers(own)
  family = SIGLIP if 'text_model.head.weight' in own else CLIP if 'text_projection.weight' in own else TIPS
  gelu = {CLIP: Gelu.QUICK, SIGLIP: Gelu.TANH, TIPS: None}[family]
  return Found(family, TRANSFORMERS, rest, scale, bias, bias is not None, gelu, 1e-6 if family == SIGLIP else 1e-5, ())


# big_vision: SigLIP, and LiT, which is trained with a softmax and has no bias of the logits

BIG_VISION = table("""
    text/{tokens,positions} | {Embed_0/embedding,pos_embedding} | same
    text/blocks/{norm1,norm2} | Encoder_0/encoderblock_{i}/{LayerNorm_0,LayerNorm_1} | flax norm
    text/blocks/attn/{query,key,value,out} |
        Encoder_0/encoderblock_{i}/MultiHeadDotProductAttention_0/{query,key,value,out} | flax
    text/blocks/mlp/{up,down} | Encoder_0/encoderblock_{i}/MlpBlock_0/{Dense_0,Dense_1} | flax
    text/norm | Encoder_0/encoder_norm | flax norm
    text/projection | head | flax
""")
"""Without the prefix `params/txt/`."""


def _of_big_vision(own: Tensors) -> Found:
  own = renamed(own, (r'^params/', ''))
  dropped: tuple[Line, ...] = ()
  scale, bias = _exp(own.pop('t', None)), _number(own.pop('b', None))
  own = flax.unstacked(renamed(own, (r'^txt/', '')), 'Encoder_0/encoderblock')
  if (twice := own.pop('Encoder_0/pos_embedding', None)) is not None and 'pos_embedding' in own:
    own['pos_embedding'] = own['pos_embedding'] + twice  # big_vision adds both for its oldest files
    dropped = (Line('Encoder_0/pos_embedding', 'folded', 'added to the other positions'),)
  return Found(SIGLIP, BIG_VISION, own, scale, bias, bias is not None, Gelu.TANH, 1e-6, dropped)


# OpenAI, open_clip (with the prefix `text.`) and the PyTorch files of TIPS, which have no positions

OPENAI = table("""
    text/tokens | token_embedding.weight | same
    text/positions | positional_embedding | rows
    text/blocks/attn/{query,key,value} |
        transformer.resblocks.{i}.attn.{in_proj[0/3],in_proj[1/3],in_proj[2/3]} | packed
    text/blocks/attn/out | transformer.resblocks.{i}.attn.out_proj | dense
    text/blocks/{norm1,norm2} | transformer.resblocks.{i}.{ln_1,ln_2} | norm
    text/blocks/mlp/{up,down} | transformer.resblocks.{i}.mlp.{c_fc,c_proj} | dense
    text/norm | ln_final | norm
    text/projection/kernel | text_projection | same
    text/projection | text_projection | dense
""")


def _of_openai(own: Tensors) -> Found:
  own, dropped = dropping(distinct(own, lambda name: name.removeprefix('text.')), _DROPS)
  scale, bias, rest = _numbers(own)
  if 'positional_embedding' not in own:
    return Found(TIPS, OPENAI, rest, scale, bias, False, None, 1e-5, dropped)
  is_sigmoid = bias is not None
  return Found(SIGLIP if is_sigmoid else CLIP, OPENAI, rest, scale, bias, is_sigmoid,
               Gelu.TANH if is_sigmoid else None, 1e-6 if is_sigmoid else 1e-5, dropped)


# scenic: the JAX files of TIPS

SCENIC = table("""
    text/tokens | token_emb/emb_var | same
    text/blocks/{norm1,norm2} | transformer/encoderblock_{i}/{LayerNorm_0,LayerNorm_1} | flax norm
    text/blocks/attn/{query,key,value,out} |
        transformer/encoderblock_{i}/MultiHeadDotProductAttention_0/{query,key,value,out} | flax
    text/blocks/mlp/{up,down} | transformer/encoderblock_{i}/MlpBlock_0/{Dense_0,Dense_1} | flax
    text/norm | text_encoder_norm | flax norm
""")


def _of_scenic(own: Tensors) -> Found:
  scale, bias, rest = _numbers(own)
  return Found(TIPS, SCENIC, rest, scale, bias, False, None, 1e-6, ())


PROGRAMS = (
    Program(r'text_model\.embeddings\.token_embedding\.weight',
            r'(text_model|text_projection)\..*|logit_scale|logit_bias|temperature', _of_transformers),
    Program(r'(params/)?txt/Embed_0/embedding', r'(params/)?(txt/.*|t|b|bias_init|temperature)', _of_big_vision),
    Program(r'(text\.)?token_embedding\.weight',
            r'text\..*|token_embedding\..*|positional_embedding|transformer\.resblocks\..*|ln_final\..*|'
            r'text_projection(\..*)?|logit_scale|logit_bias|temperature|attn_mask|input_resolution|context_length|'
            r'vocab_size', _of_openai),
    Program(r'token_emb/emb_var', r'.*', _of_scenic))


def _numbers(tensors: Tensors) -> tuple[float | None, float | None, Tensors]:
  """Returns scale and bias of the logits of PyTorch's files, and the other tensors.

  TIPS has a temperature instead of a scale.
  """
  scale, bias = _exp(tensors.get('logit_scale')), _number(tensors.get('logit_bias'))
  temperature = _number(tensors.get('temperature'))
  if temperature is not None and not temperature > 0:
    raise UserError(f'temperature: expected a positive number, got {temperature}')
  rest = {name: x for name, x in tensors.items() if name not in ('logit_scale', 'logit_bias', 'temperature')}
  return scale if temperature is None else 1. / temperature, bias, rest


def _exp(x: np.ndarray | None) -> float | None:
  number = _number(x)
  return None if number is None else float(np.exp(number))


def _number(x: np.ndarray | None) -> float | None:
  if x is None:
    return None
  if x.size != 1 or not np.isfinite(x).all():
    raise UserError(f'scale or bias of the logits: expected one finite number, got an array {list(x.shape)}')
  return float(x.reshape(()))
