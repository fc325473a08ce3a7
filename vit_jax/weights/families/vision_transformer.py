"""ViTs, hybrids, AugReg, SAM and GSAM: `.npz` of the program vision_transformer."""
from __future__ import annotations

from vit_jax.config.schema import PositionResize
from vit_jax.weights.families import flax
from vit_jax.weights.families.record import Changed, Family, Files, Published, Tensors
from vit_jax.weights.preprocess import NORMS, TF
from vit_jax.weights.tables import SAME, VECTOR, Entry, Table, flax_norm
from vit_jax.weights.tables import flax as layer

_BLOCK = r'^(Transformer/encoderblock_\d+)/'


def _unit(ours: str, theirs: str) -> list[Entry]:
  """Returns the entries of a bottleneck unit of the stem."""
  found = [Entry(f'{ours}/{a}/kernel', f'{theirs}/{b}/kernel', SAME)
           for a, b in (('conv1', 'conv1'), ('conv2', 'conv2'), ('conv3', 'conv3'), ('proj', 'conv_proj'))]
  for a, b in (('norm1', 'gn1'), ('norm2', 'gn2'), ('norm3', 'gn3'), ('proj_norm', 'gn_proj')):
    found += flax_norm(f'{ours}/{a}', f'{theirs}/{b}', VECTOR)
  return found


TABLE: Table = (
    *layer('backbone/stem', 'embedding'), Entry('backbone/stem/root/kernel', 'conv_root/kernel', SAME),
    *flax_norm('backbone/stem/root_norm', 'gn_root', VECTOR),
    *_unit('backbone/stem/stage{s}/unit{u}', 'block{s}/unit{u}'),
    Entry('backbone/cls', 'cls', SAME),
    Entry('backbone/positions', 'Transformer/posembed_input/pos_embedding', SAME),
    *flax.block('backbone/blocks', 'Transformer/encoderblock_{i}', norm1='LayerNorm_0',
                attention='MultiHeadDotProductAttention_1', norm2='LayerNorm_2', mlp='MlpBlock_3'),
    *flax_norm('backbone/norm', 'Transformer/encoder_norm'), *flax.HEAD,
)
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
