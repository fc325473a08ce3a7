"""Where each parameter of a text tower lies on the mesh: Megatron's split of attention and MLP, as in `models/vit`."""
from __future__ import annotations

from vit_jax.models.text.tower import TextTower
from vit_jax.parallel.rules import Rule

ALL: tuple[Rule, ...] = (
    ('tokens', ('fsdp', 'tensor')),                                              # [V, D]
    ('blocks/attn/(query|key|value)/kernel', (None, 'fsdp', 'tensor', None)),    # [L, D, A, K]
    ('blocks/attn/(query|key|value)/bias', (None, 'tensor', None)),              # [L, A, K]
    ('blocks/attn/out/kernel', (None, 'tensor', None, 'fsdp')),                  # [L, A, K, D]
    ('blocks/mlp/up/kernel', (None, 'fsdp', 'tensor')),                          # [L, D, F]
    ('blocks/mlp/up/bias', (None, 'tensor')),                                    # [L, F]
    ('blocks/mlp/down/kernel', (None, 'tensor', 'fsdp')),                        # [L, F, D]
    ('norm/.*|blocks/norm[12]/.*|blocks/.*/(out|down)/bias', ()),
)
POSITIONS: Rule = ('positions', ())
PROJECTION: Rule = ('projection/kernel', ('fsdp', 'tensor'))  # [D, E]
PROJECTION_BIAS: Rule = ('projection/bias', ())


def rules(tower: TextTower) -> list[Rule]:
  """Returns the rules of a tower: those of all, and those of its options."""
  optional = {POSITIONS: not tower.is_sinusoidal, PROJECTION: tower.out_width > 0,
              PROJECTION_BIAS: tower.out_width > 0 and tower.projection_bias}
  return [*ALL, *(rule for rule, is_used in optional.items() if is_used)]
