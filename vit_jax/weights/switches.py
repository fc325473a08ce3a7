"""The switches of a ViT that follow from which parameters a file has, and those that its program is known for."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import Norm, Pool, Positions
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.weights.hints import Hints

Leaves = Mapping[str, HostArray]
OWN_GRID = -1  # as `rotary_grid`: that of the table of positions
BLOCKS = 'backbone/blocks'


def positions(leaves: Leaves, settings: Mapping[str, Any]) -> Positions:
  """Returns the kind of positions: by the table in the file, and by whether its program rotates queries and keys."""
  is_rotary = 'rotary_base' in settings or f'{BLOCKS}/attn/frequencies' in leaves
  if 'backbone/positions' in leaves:
    return Positions.LEARNED_ROTARY2D if is_rotary else Positions.LEARNED
  return Positions.ROTARY2D if is_rotary else settings.get('positions', Positions.SINCOS2D)


def pool(word: str, leaves: Leaves) -> Pool | None:
  """Returns the pooling that a network of timm with this `global_pool` has; None where its tensors determine it.

  Raises:
    UserError: networks here do not pool in this way.
  """
  if word not in ('', 'token', 'avg', 'map'):
    raise UserError(f'global_pool: expected token, avg or map in the config of timm, got {word!r}, which is not '
                    'available here. Change it if the weights were trained otherwise.')
  if not word or 'backbone/pool/probe' in leaves:
    return None
  has_cls = 'backbone/cls' in leaves
  return {'token': Pool.CLS if has_cls else None, 'avg': Pool.PATCHES if has_cls else Pool.MEAN, 'map': None}[word]


def pool_note(model: schema.Model, leaves: Leaves, hints: Hints) -> str:
  """Returns a sentence where a name or a config decided that patch tokens are pooled, beside a class token."""
  is_ours = isinstance(model, schema.ViT) and model.pool is Pool.PATCHES and not model.norm_after_pool
  if not is_ours or not hints.pool:
    return ''
  return ('Pooling: the mean of the patch tokens, as in timm for this network. For the class token, set '
          '--model=pool=cls.')


def of_parameters(leaves: Leaves) -> dict[str, Any]:
  """Returns the settings that follow from which parameters exist."""
  found: dict[str, Any] = {name: path in leaves for name, path in (
      ('norm_before', 'backbone/norm_before/scale'), ('stem_norm', 'backbone/stem_norm/scale'),
      ('attn_norm', f'{BLOCKS}/attn/norm/scale'), ('rotary_mixed', f'{BLOCKS}/attn/frequencies'),
      ('mlp_norm', f'{BLOCKS}/mlp/norm/scale'),
      ('key_bias', f'{BLOCKS}/attn/key/bias'), ('out_bias', f'{BLOCKS}/attn/out/bias'),
      ('mlp_bias', f'{BLOCKS}/mlp/down/bias'))}
  found['key_bias'] |= f'{BLOCKS}/attn/query/bias' not in leaves  # no bias at all is `qkv_bias`
  for name, path in (('stem_bias', 'backbone/stem/bias'), ('final_norm', 'backbone/norm/scale')):
    found[name] = path in leaves or not found['norm_before']  # where another family lacks it, the file is incomplete
  hidden = leaves['backbone/pool/mlp/up/kernel'].shape[-1] if 'backbone/pool/mlp/up/kernel' in leaves else 0
  found['pool_mlp'] = 0 if hidden == leaves[f'{BLOCKS}/mlp/up/kernel'].shape[-1] else hidden
  return found | {'norm': Norm.LAYER if f'{BLOCKS}/norm1/bias' in leaves else Norm.RMS}


def of_settings(model: schema.ViT, settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns those of `settings` that this network has."""
  return {name: value for name, value in settings.items() if name != 'positions' and not name.startswith('stem_') and (
      model.positions.is_rotary or not name.startswith('rotary')) and (
          model.pool.is_attention or name != 'pool_heads')}


def of_stem(settings: Mapping[str, Any]) -> dict[str, float]:
  """Returns the epsilons of convolutions and their norms, by their names in `schema.ResNetStem`."""
  return {name.removeprefix('stem_'): value for name, value in settings.items() if name.startswith('stem_')}
