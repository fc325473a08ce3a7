"""ViTs, hybrids, AugReg, SAM and GSAM: `.npz` of the program vision_transformer."""
from __future__ import annotations

from vit_jax.config.schema import PositionResize
from vit_jax.weights.families import flax
from vit_jax.weights.families.record import Changed, Family, Files, Published, Tensors
from vit_jax.weights.preprocess import NORMS, TF
from vit_jax.weights.tables import table

_BLOCK = r'^(Transformer/encoderblock_\d+)/'


TABLE = table("""
    backbone/stem | embedding | flax
    backbone/stem/root/kernel | conv_root/kernel | same
    backbone/stem/root_norm | gn_root | flax group norm
    backbone/stem/stage{s}/unit{u}/{conv1,conv2,conv3,proj}/kernel |
        block{s}/unit{u}/{conv1,conv2,conv3,conv_proj}/kernel | same
    backbone/stem/stage{s}/unit{u}/{norm1,norm2,norm3,proj_norm} |
        block{s}/unit{u}/{gn1,gn2,gn3,gn_proj} | flax group norm
    backbone/{cls,positions} | {cls,Transformer/posembed_input/pos_embedding} | same
    backbone/blocks/{norm1,norm2} | Transformer/encoderblock_{i}/{LayerNorm_0,LayerNorm_2} | flax norm
    backbone/blocks/attn/{query,key,value,out} |
        Transformer/encoderblock_{i}/MultiHeadDotProductAttention_1/{query,key,value,out} | flax
    backbone/blocks/mlp/{up,down} | Transformer/encoderblock_{i}/MlpBlock_3/{Dense_0,Dense_1} | flax
    backbone/norm | Transformer/encoder_norm | flax norm
    {head,head/pre_logits} | {head,pre_logits} | flax
""")
"""As in the files: numbered over all parts of a block. Linen's numbering is converted to this when a file is read."""


def _change(tensors: Tensors) -> Changed:
  return flax.with_blocks(
      tensors, (_BLOCK + 'MultiHeadDotProductAttention_0', r'\1/MultiHeadDotProductAttention_1'),
      (_BLOCK + 'LayerNorm_1', r'\1/LayerNorm_2'), (_BLOCK + 'MlpBlock_0', r'\1/MlpBlock_3'))


_I1K, _I21K, _BOTH = 'ImageNet-1k', 'ImageNet-21k', 'ImageNet-21k+1k'
_VIT = 'arXiv 2010.11929'
FAMILY = Family(
    'vision_transformer', 'ViT, hybrids, AugReg, SAM, GSAM', '`.npz`, both numberings of blocks',
    files=(Files('flax', lambda t: 'embedding/kernel' in t and 'Transformer/posembed_input/pos_embedding' in t, TABLE,
                 flax.HINTS, change=_change, formats=('vision_transformer',)),),
    images={**NORMS['half'], **TF, 'resize': 0}, position_resize=PositionResize.ALIGNED,
    addresses={
        **{f'{model}-i21k': f'gs://vit_models/imagenet21k/{model}.npz' for model in (
            'ViT-B_8', 'ViT-B_16', 'ViT-B_32', 'ViT-L_16', 'ViT-L_32', 'ViT-H_14', 'R26+ViT-B_32', 'R50+ViT-B_16',
            'R50+ViT-L_32')},
        **{f'{model}-i1k': f'gs://vit_models/imagenet21k+imagenet2012/{model}.npz' for model in (
            'ViT-B_8', 'ViT-B_16', 'ViT-B_16-224', 'ViT-B_32', 'ViT-L_16', 'ViT-L_16-224', 'ViT-L_32', 'R50+ViT-B_16')},
        **{f'{model}-sam': f'gs://vit_models/sam/{model}.npz' for model in (
            'ViT-B_16', 'ViT-B_32', 'ViT-L_16', 'ViT-L_32', 'ViT-S_16')},
        **{f'{model}-gsam': f'gs://vit_models/gsam/{model}.npz' for model in (
            'ViT-B_16', 'ViT-B_32', 'ViT-S_16', 'ViT-S_32')}},
    published=(
        Published(r'(R\d+\+|)ViT-(\w)_(\d+)-i21k', '{0}{1}/{2}', 224, _I21K, 21_843, _VIT, is_hidden=True),
        Published(r'ViT-(\w)_(\d+)-224-i1k', '{0}/{1}', 224, _BOTH, 1_000, _VIT),
        Published(r'ViT-(\w)_(8)-i1k', '{0}/{1}', 0, _BOTH, 1_000, _VIT),
        Published(r'(R\d+\+|)ViT-(\w)_(\d+)-i1k', '{0}{1}/{2}', 384, _BOTH, 1_000, _VIT),
        Published(r'ViT-(\w)_(\d+)-sam', '{0}/{1}', 224, _I1K, 1_000, 'arXiv 2106.01548'),
        Published(r'ViT-(\w)_(\d+)-gsam', '{0}/{1}', 224, _I1K, 1_000, 'arXiv 2203.08065')))
