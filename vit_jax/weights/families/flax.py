"""What files of vision_transformer and big_vision have in common: names of layers, prefixes and scanned blocks."""
from __future__ import annotations

from vit_jax.config.schema import Gelu
from vit_jax.core.errors import UserError
from vit_jax.weights import tables
from vit_jax.weights.families.record import Changed, Recognized, Tensors, dropping, renamed
from vit_jax.weights.hints import Hints

HINTS = Hints(gelu=Gelu.TANH, norm_eps=1e-6)
"""Defaults of Flax."""
_DROPS = {
    r'opt/(?!target/).*|opt_state/.*|chrono/.*|step|state/.*': 'of training: optimizer state and counters',
    r'params/(txt/.*|t|b|bias_init|temperature)': 'of the text tower',
}


def prepare(tensors: Tensors) -> Recognized:
  """Returns the tensors without the prefixes and the state of training."""
  kept, dropped = dropping(tensors, _DROPS)
  return Recognized('', (), renamed(kept, (r'^opt/target/', ''), (r'^params/(img/)?', '')), dropped, Hints())


def with_blocks(tensors: Tensors, *rules: tuple[str, str]) -> Changed:
  """Returns the tensors with unstacked blocks and the pool under its prefix, and then renamed by `rules`."""
  pool = (r'^(probe$|MlpBlock_0/|MultiHeadDotProductAttention_0/|LayerNorm_0/)', r'MAPHead_0/\1')
  return renamed(unstacked(renamed(tensors, pool), 'Transformer/encoderblock'), *rules), ()


def unstacked(tensors: Tensors, block: str) -> Tensors:
  """Returns the tensors of scanned blocks, whose names begin with `block/` and whose axis 0 is depth, one per block."""
  found: Tensors = {}
  for name, tensor in tensors.items():
    before, is_stacked, after = name.partition(f'{block}/')
    if not is_stacked:
      found[name] = tensor
      continue
    if not tensor.ndim or tensor.shape[0] > tables.MOST_LAYERS:
      raise UserError(f'{name} has the shape {list(tensor.shape)}, expected up to {tables.MOST_LAYERS:,} layers first')
    for i, layer in enumerate(tensor):
      found[f'{before}{block}_{i}/{after}'] = layer
  return found
