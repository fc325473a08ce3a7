"""ViTs of big_vision and the image towers of its SigLIP: `.npz` with all prefixes, with and without scanned blocks."""
from __future__ import annotations

from vit_jax.config.schema import Interpolation, PositionResize
from vit_jax.weights.families import flax
from vit_jax.weights.families.record import Changed, Family, Files, Published, Tensors
from vit_jax.weights.grids import NONE
from vit_jax.weights.preprocess import NORMS, TF
from vit_jax.weights.tables import SAME, Entry, Table, flax_attention, flax_norm
from vit_jax.weights.tables import flax as layer

_BLOCK = r'^(Transformer/encoderblock_\d+)/'

TABLE: Table = (
    *layer('backbone/stem', 'embedding'), Entry('backbone/cls', 'cls', SAME),
    Entry('backbone/positions', 'pos_embedding', SAME),
    *flax.block('backbone/blocks', 'Transformer/encoderblock_{i}', norm1='LayerNorm_0',
                attention='MultiHeadDotProductAttention_0', norm2='LayerNorm_1', mlp='MlpBlock_0'),
    *flax_norm('backbone/norm', 'Transformer/encoder_norm'), *flax.HEAD,
    Entry('backbone/pool/probe', 'MAPHead_0/probe', SAME),
    *flax_attention('backbone/pool/attn', 'MAPHead_0/MultiHeadDotProductAttention_0'),
    *flax_norm('backbone/pool/norm', 'MAPHead_0/LayerNorm_0'),
    *layer('backbone/pool/mlp/up', 'MAPHead_0/MlpBlock_0/Dense_0'),
    *layer('backbone/pool/mlp/down', 'MAPHead_0/MlpBlock_0/Dense_1'),
)


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
