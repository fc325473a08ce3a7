"""ViTs of big_vision and the image towers of its SigLIP: `.npz` with all prefixes, with and without scanned blocks."""
from __future__ import annotations

from vit_jax.config.schema import Interpolation, PositionResize
from vit_jax.weights.families import flax
from vit_jax.weights.families.record import Changed, Family, Files, Published, Tensors
from vit_jax.weights.grids import NONE
from vit_jax.weights.preprocess import NORMS, TF
from vit_jax.weights.tables import table

_BLOCK = r'^(Transformer/encoderblock_\d+)/'

TABLE = table("""
    backbone/stem | embedding | flax
    backbone/{cls,positions} | {cls,pos_embedding} | same
    backbone/blocks/{norm1,norm2} | Transformer/encoderblock_{i}/{LayerNorm_0,LayerNorm_1} | flax norm
    backbone/blocks/attn/{query,key,value,out} |
        Transformer/encoderblock_{i}/MultiHeadDotProductAttention_0/{query,key,value,out} | flax
    backbone/blocks/mlp/{up,down} | Transformer/encoderblock_{i}/MlpBlock_0/{Dense_0,Dense_1} | flax
    backbone/norm | Transformer/encoder_norm | flax norm
    {head,head/pre_logits} | {head,pre_logits} | flax
    backbone/pool/probe | MAPHead_0/probe | same
    backbone/pool/attn/{query,key,value,out} | MAPHead_0/MultiHeadDotProductAttention_0/{query,key,value,out} | flax
    backbone/pool/norm | MAPHead_0/LayerNorm_0 | flax norm
    backbone/pool/mlp/{up,down} | MAPHead_0/MlpBlock_0/{Dense_0,Dense_1} | flax
""")


def _change(tensors: Tensors) -> Changed:
  return flax.with_blocks(
      tensors, (_BLOCK + 'MultiHeadDotProductAttention_1', r'\1/MultiHeadDotProductAttention_0'),
      (_BLOCK + 'LayerNorm_2', r'\1/LayerNorm_1'), (_BLOCK + 'MlpBlock_3', r'\1/MlpBlock_0'))


FAMILY = Family(
    'big_vision', 'big_vision: ViT, SigLIP', '`.npz`: all prefixes, scanned blocks, attention pooling, bf16',
    files=(Files('flax', lambda t: 'embedding/kernel' in t and 'Transformer/posembed_input/pos_embedding' not in t,
                 TABLE, flax.HINTS, change=_change, formats=('big_vision',), first=(NONE,)),),
    images={**NORMS['half'], **TF, 'interpolation': Interpolation.AREA, 'truncate': True, 'resize': .875},
    position_resize=PositionResize.ALIGNED,
    addresses={f'vit_s16_i1k_{epochs}ep': f'gs://big_vision/vit_s16_i1k_{epochs}ep.npz' for epochs in (90, 150, 300)},
    published=(Published(r'vit_s16_i1k_\d+ep', 'S/16', 224, 'ImageNet-1k', 1_000, 'arXiv 2205.01580'),))
