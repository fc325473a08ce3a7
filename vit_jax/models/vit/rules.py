"""Where each parameter of a Vision Transformer lies on the mesh: rules of paths, those of all models and of options.

Megatron's split of attention and MLP over `tensor`, the other side of each matrix over `fsdp`. Where a TPU cannot
scatter the gradient of such a shard, or the shard would be too narrow for it, `fsdp` splits the heads of attention and
the hidden width of the MLP instead (`parallel/rules.py`).
"""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.config.schema import PositionsAt, QkvBias
from vit_jax.models import resnet
from vit_jax.parallel.rules import Rule

ALL: tuple[Rule, ...] = (
    ('backbone/stem/kernel', (None, None, None, 'fsdp')),                              # [P, P, 3, D]
    ('backbone/blocks/(.*/)?attn/(query|key|value)/kernel', (None, 'fsdp', 'tensor', None),   # [L, D, A, K]
     (None, None, ('tensor', 'fsdp'), None)),
    ('backbone/blocks/(.*/)?attn/out/kernel', (None, 'tensor', None, 'fsdp'),                 # [L, A, K, D]
     (None, ('tensor', 'fsdp'), None, None)),
    ('backbone/blocks/(.*/)?mlp/(up|gate)/kernel', (None, 'fsdp', 'tensor')),                 # [L, D, F]
    ('backbone/blocks/(.*/)?mlp/down/kernel', (None, 'tensor', 'fsdp'), (None, ('tensor', 'fsdp'), None)),  # [L, F, D]
    ('backbone/(cls|dist|positions|stem/bias|norm/.*|blocks/(.*/)?norm[12]/.*|blocks/.*/(out|down)/bias)', ()),
)
QKV_BIAS: Rule = ('backbone/blocks/(.*/)?attn/(query|key|value)/bias', (None, 'tensor', None))  # [L, A, K]
CONV_STEM: tuple[Rule, ...] = (
    ('backbone/stem/conv[1-3]/kernel', (None, None, None, 'fsdp')),  # [side, side, I, O]
    ('backbone/stem/norm[1-3]/(scale|bias)', ()),
)
MLP_BIAS: Rule = ('backbone/blocks/(.*/)?mlp/(up|gate)/bias', (None, 'tensor'))               # [L, F]
MLP_NORM: Rule = ('backbone/blocks/(.*/)?mlp/norm/(scale|bias)', (None, 'tensor'))            # [L, F]
OTHER_NORMS: Rule = ('backbone/((norm_before|stem_norm)|blocks/(.*/)?attn/norm)/(scale|bias)', ())
REGISTERS: Rule = ('backbone/registers', ())
POSITIONS_2D: Rule = ('backbone/positions/(row|column)', ())
POSITIONS_IN_BLOCKS: Rule = ('backbone/blocks/positions(/(row|column))?', ())
RELATIVE: Rule = ('backbone/blocks/attn/relative', (None, None, 'tensor', None))  # [L, 2N - 1, A, K]
FREQUENCIES: Rule = ('backbone/blocks/attn/frequencies', (None, None, 'tensor', None))  # [L, 2, A, K / 2]
QK_NORM: Rule = ('backbone/blocks/(.*/)?attn/(query|key)_norm/(scale|bias)', ())
LAYER_SCALE: Rule = ('backbone/blocks/(.*/)?scale[12]', ())
POOL: tuple[Rule, ...] = (
    ('backbone/pool/attn/(query|key|value)/kernel', ('fsdp', 'tensor', None)),  # [D, A, K]
    ('backbone/pool/attn/(query|key|value)/bias', ('tensor', None)),            # [A, K]
    ('backbone/pool/attn/out/kernel', ('tensor', None, 'fsdp')),                # [A, K, D]
    ('backbone/pool/mlp/up/kernel', ('fsdp', 'tensor')),                        # [D, F]
    ('backbone/pool/mlp/up/bias', ('tensor',)),                                 # [F]
    ('backbone/pool/mlp/down/kernel', ('tensor', 'fsdp')),                      # [F, D]
    ('backbone/pool/(probe|norm/.*|.*/(out|down)/bias)', ()),
)


def rules(model: schema.ViT) -> list[Rule]:
  """The rules of a ViT: those of all, and those of its options."""
  is_learned2d, in_blocks = isinstance(model.positions, schema.Learned2d), model.positions.at is PositionsAt.LAYERS
  optional = {
      QKV_BIAS: model.attention.qkv_bias is not QkvBias.NONE, MLP_BIAS: model.mlp.bias, MLP_NORM: model.mlp.inner_norm,
      OTHER_NORMS: model.norm_before or model.stem.norm or model.attention.inner_norm,
      **dict.fromkeys(CONV_STEM, isinstance(model.stem, schema.ConvStem)),
      REGISTERS: model.registers > 0, QK_NORM: model.attention.qk_norm,
      LAYER_SCALE: getattr(model.block, 'layer_scale', 0) > 0,
      POSITIONS_2D: is_learned2d and not in_blocks, POSITIONS_IN_BLOCKS: in_blocks,
      FREQUENCIES: getattr(model.positions, 'mixed', False), RELATIVE: isinstance(model.positions, schema.Relative),
      **dict.fromkeys(POOL, model.pool.has_parameters),
      **dict.fromkeys(resnet.STEM_RULES, isinstance(model.stem, schema.ResNetStem))}
  return [*ALL, *(rule for rule, is_used in optional.items() if is_used)]
