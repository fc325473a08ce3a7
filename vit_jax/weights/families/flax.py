"""Files of vision_transformer and big_vision: what they have in common, and the records of both.

ViTs, hybrids, AugReg, SAM and GSAM are `.npz` of vision_transformer; ViTs and the image towers of SigLIP `.npz` of
big_vision, with all prefixes, with and without scanned blocks.
"""
from __future__ import annotations

from vit_jax.config.schema import Gelu, Interpolation, PositionResize
from vit_jax.core.errors import UserError
from vit_jax.weights import tables
from vit_jax.weights.families import record
from vit_jax.weights.families.record import Changed, Family, Files, Prepared, Published, Tensors
from vit_jax.weights.grids import NONE
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import NORMS, TF
from vit_jax.weights.tables import table

HINTS = Hints(gelu=Gelu.TANH, norm_eps=1e-6)
"""Defaults of Flax."""
_DROPS = {
    r'opt/(?!target/).*|opt_state/.*|chrono/.*|step|state/.*': 'of training: optimizer state and counters',
    r'params/(txt/.*|t|b|bias_init|temperature)': 'of the text tower'}


def prepare(tensors: Tensors) -> Prepared:
  """Returns the tensors without the prefixes and the state of training."""
  network, dropped = record.dropping(tensors, _DROPS)
  return Prepared(record.renamed(network, (r'^opt/target/', ''), (r'^params/(img/)?', '')), dropped)


def _numbered(tensors: Tensors, *, attention: int, norm2: int, mlp: int) -> Changed:
  """Returns the tensors with the numbers that attention, second norm and MLP of a block have in one program.

  Files have numbers over all parts of a block (`LayerNorm_0`, `MultiHeadDotProductAttention_1`, `LayerNorm_2`,
  `MlpBlock_3`), or by class, as Linen counts (`LayerNorm_0`, `MultiHeadDotProductAttention_0`, `LayerNorm_1`,
  `MlpBlock_0`). Scanned blocks are also unstacked, and an attention pool without a prefix gets it.
  """
  pool = (r'^(probe$|MlpBlock_0/|MultiHeadDotProductAttention_0/|LayerNorm_0/)', r'MAPHead_0/\1')
  block = r'^(Transformer/encoderblock_\d+)'
  return Changed(record.renamed(
      unstacked(record.renamed(tensors, pool), 'Transformer/encoderblock'),
      (rf'{block}/MultiHeadDotProductAttention_[01]', rf'\1/MultiHeadDotProductAttention_{attention}'),
      (rf'{block}/LayerNorm_[12]', rf'\1/LayerNorm_{norm2}'), (rf'{block}/MlpBlock_[03]', rf'\1/MlpBlock_{mlp}')))


def unstacked(tensors: Tensors, block: str) -> Tensors:
  """Returns the tensors of scanned blocks, whose names begin with `block/` and whose axis 0 is depth, one per block.

  For example, `encoderblock/norm [2, D]` becomes `encoderblock_0/norm [D]` and `encoderblock_1/norm [D]`.
  """
  by_block: Tensors = {}
  for name, tensor in tensors.items():
    before, is_stacked, after = name.partition(f'{block}/')
    if not is_stacked:
      by_block[name] = tensor
      continue
    if not tensor.ndim or tensor.shape[0] > tables.MOST_LAYERS:
      raise UserError(f'{name} has the shape {list(tensor.shape)}, expected up to {tables.MOST_LAYERS:,} layers first')
    for i, layer in enumerate(tensor):
      by_block[f'{before}{block}_{i}/{after}'] = layer
  return by_block


VISION_TRANSFORMER_NAMES = table("""
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
"""The parts of a block are numbered over all parts, as in the files; see `_numbered`."""
_POSITIONS = 'Transformer/posembed_input/pos_embedding'
"""Their name in vision_transformer; big_vision has another one."""

_I1K, _I21K, _BOTH = 'ImageNet-1k', 'ImageNet-21k', 'ImageNet-21k+1k'
_VIT = 'arXiv 2010.11929'
VISION_TRANSFORMER = Family(
    'vision_transformer', 'ViT, hybrids, AugReg, SAM, GSAM', '`.npz`, both numberings of blocks',
    files=(Files('flax', record.named('embedding/kernel', _POSITIONS), VISION_TRANSFORMER_NAMES, HINTS,
                 change=lambda tensors: _numbered(tensors, attention=1, norm2=2, mlp=3),
                 formats=('vision_transformer',)),),
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

BIG_VISION_NAMES = table("""
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
BIG_VISION = Family(
    'big_vision', 'big_vision: ViT, SigLIP', '`.npz`: all prefixes, scanned blocks, attention pooling, bf16',
    files=(Files('flax', record.named('embedding/kernel', without=[_POSITIONS]), BIG_VISION_NAMES, HINTS,
                 change=lambda tensors: _numbered(tensors, attention=0, norm2=1, mlp=0),
                 formats=('big_vision',), first_rows=(NONE,)),),
    images={**NORMS['half'], **TF, 'interpolation': Interpolation.AREA, 'truncate': True, 'resize': .875},
    position_resize=PositionResize.ALIGNED,
    addresses={f'vit_s16_i1k_{epochs}ep': f'gs://big_vision/vit_s16_i1k_{epochs}ep.npz' for epochs in (90, 150, 300)},
    published=(Published(r'vit_s16_i1k_\d+ep', 'S/16', 224, 'ImageNet-1k', 1_000, 'arXiv 2205.01580'),))
