"""The names of the parameters of text towers, here and in each kind of file; the entries are those of `layouts.py`.

Our paths: `text/tokens [V, D]`, `text/positions [1, N, D]`, `text/blocks/…` as in a backbone, `text/norm/{scale,bias}`,
`text/projection/{kernel [D, E],bias [E]}`. Scale and bias of the logits are numbers of their own, see `text.py`.
"""
from __future__ import annotations

from vit_jax.weights.tables import DENSE, SAME, Entry, Layout, Table, layer, norm

_BLOCKS = 'text/blocks'
_ROWS = Layout(lambda x: x[None], lambda x: x[0])
"""A table `[N, D]`; here `[1, N, D]`."""


def _flax(ours: str, theirs: str) -> list[Entry]:
  return [Entry(f'{ours}/{leaf}', f'{theirs}/{leaf}', SAME) for leaf in ('kernel', 'bias')]


def _flax_norm(ours: str, theirs: str) -> list[Entry]:
  return [Entry(f'{ours}/{leaf}', f'{theirs}/{leaf}', SAME) for leaf in ('scale', 'bias')]


def _flax_block(theirs: str) -> list[Entry]:
  """Returns the entries of a block of big_vision or scenic."""
  return [*_flax_norm(f'{_BLOCKS}/norm1', f'{theirs}/LayerNorm_0'),
          *_flax_norm(f'{_BLOCKS}/norm2', f'{theirs}/LayerNorm_1'),
          *(entry for name in ('query', 'key', 'value', 'out')
            for entry in _flax(f'{_BLOCKS}/attn/{name}', f'{theirs}/MultiHeadDotProductAttention_0/{name}')),
          *_flax(f'{_BLOCKS}/mlp/up', f'{theirs}/MlpBlock_0/Dense_0'),
          *_flax(f'{_BLOCKS}/mlp/down', f'{theirs}/MlpBlock_0/Dense_1')]


def _joined(name: str, part: int, theirs: str) -> list[Entry]:
  """Returns the entries of one of query, key and value in PyTorch's own attention layer."""
  weight, bias = layer(f'{_BLOCKS}/attn/{name}', '', part=(part, 3))
  return [weight._replace(theirs=f'{theirs}.in_proj_weight'), bias._replace(theirs=f'{theirs}.in_proj_bias')]


_HF = 'text_model.encoder.layers.{i}'
HUGGINGFACE: Table = (
    Entry('text/tokens', 'text_model.embeddings.token_embedding.weight', SAME),
    Entry('text/positions', 'text_model.embeddings.position_embedding.weight', _ROWS),
    *(entry for name, letter in (('query', 'q'), ('key', 'k'), ('value', 'v'), ('out', 'out'))
      for entry in layer(f'{_BLOCKS}/attn/{name}', f'{_HF}.self_attn.{letter}_proj')),
    *norm(f'{_BLOCKS}/norm1', f'{_HF}.layer_norm1'), *norm(f'{_BLOCKS}/norm2', f'{_HF}.layer_norm2'),
    *layer(f'{_BLOCKS}/mlp/up', f'{_HF}.mlp.fc1'), *layer(f'{_BLOCKS}/mlp/down', f'{_HF}.mlp.fc2'),
    *norm('text/norm', 'text_model.final_layer_norm'), *layer('text/projection', 'text_model.head'),
    Entry('text/projection/kernel', 'text_projection.weight', DENSE),
)
"""transformers: CLIP, SigLIP and TIPSv2."""

_OPENAI = 'transformer.resblocks.{i}'
OPENAI: Table = (
    Entry('text/tokens', 'token_embedding.weight', SAME), Entry('text/positions', 'positional_embedding', _ROWS),
    *_joined('query', 0, f'{_OPENAI}.attn'), *_joined('key', 1, f'{_OPENAI}.attn'),
    *_joined('value', 2, f'{_OPENAI}.attn'), *layer(f'{_BLOCKS}/attn/out', f'{_OPENAI}.attn.out_proj'),
    *norm(f'{_BLOCKS}/norm1', f'{_OPENAI}.ln_1'), *norm(f'{_BLOCKS}/norm2', f'{_OPENAI}.ln_2'),
    *layer(f'{_BLOCKS}/mlp/up', f'{_OPENAI}.mlp.c_fc'), *layer(f'{_BLOCKS}/mlp/down', f'{_OPENAI}.mlp.c_proj'),
    *norm('text/norm', 'ln_final'), Entry('text/projection/kernel', 'text_projection', SAME),
    *layer('text/projection', 'text_projection'),
)
"""OpenAI, open_clip (without the prefix `text.`) and the PyTorch files of TIPS."""

BIG_VISION: Table = (
    Entry('text/tokens', 'Embed_0/embedding', SAME), Entry('text/positions', 'pos_embedding', SAME),
    *_flax_block('Encoder_0/encoderblock_{i}'), *_flax_norm('text/norm', 'Encoder_0/encoder_norm'),
    *_flax('text/projection', 'head'),
)
"""Without the prefix `params/txt/`."""

SCENIC: Table = (
    Entry('text/tokens', 'token_emb/emb_var', SAME), *_flax_block('transformer/encoderblock_{i}'),
    *_flax_norm('text/norm', 'text_encoder_norm'),
)
"""The JAX files of TIPS."""
