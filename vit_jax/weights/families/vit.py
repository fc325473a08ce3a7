"""Plain ViTs, in the files of several programs: DeiT, timm, transformers, NaFlexViT, torchvision and MMPretrain.

`VIT` describes all ViTs in files of timm that no other record describes: the tensors of DeiT, with and without a
distillation token, and of DeiT III are those of a ViT there.

Differs from torchvision: positions for other sizes of images are resized as in timm, and not with the corners aligned.
"""
from __future__ import annotations

import math

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Interpolation, PositionResize
from vit_jax.weights.families import record, timm, transformers
from vit_jax.weights.families.record import Changed, Clues, Family, Files, Kind, License, Published, Tensors
from vit_jax.weights.grids import NONE
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Weights
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import table

# DeiT

_DIGESTS = {
    'deit_tiny_patch16_224': 'a1311bcf', 'deit_small_patch16_224': 'cd65a155', 'deit_base_patch16_224': 'b5f2ef4d',
    'deit_base_patch16_384': '8de9b5d1', 'deit_tiny_distilled_patch16_224': 'b40b3cf7',
    'deit_small_distilled_patch16_224': '649709d9', 'deit_base_distilled_patch16_224': 'df68dfff',
    'deit_base_distilled_patch16_384': 'd0272ac0'}
_FILES = 'https://dl.fbaipublicfiles.com/deit'


def _finish_deit(tensors: Tensors, weights: Weights) -> Tensors:
  return record.renamed(transformers.under('deit')(tensors, weights), ('^classifier', 'cls_classifier'))


_I1K, _BOTH, _DEIT1, _DEIT3 = 'ImageNet-1k', 'ImageNet-21k+1k', 'arXiv 2012.12877', 'arXiv 2204.07118'
DEIT = Family(
    'deit', 'DeiT, DeiT III', '`.pth` of the authors, with and without a distillation token; transformers; timm',
    kinds=(Kind('deit', ('DeiTModel', 'DeiTForImageClassificationWithTeacher'),
                lambda m, weights, _: transformers.is_plain(m, weights, distilled=True), transformers.VIT,
                transformers.vit_config, _finish_deit),),
    addresses={**{name: f'{_FILES}/{name}-{digest}.pth' for name, digest in _DIGESTS.items()},
               **{f'deit_3_{size}': f'{_FILES}/deit_3_{size}.pth' for size in (
                   'small_224_1k', 'small_384_1k', 'base_224_1k', 'base_384_1k', 'large_224_1k', 'large_384_1k',
                   'huge_224_1k', 'small_224_21k', 'base_224_21k', 'large_224_21k')}},
    published=(
        Published(r'deit_([a-z]+)_patch(\d+)_224', '{0}/{1}', 224, _I1K, 1_000, _DEIT1),
        Published(r'deit_([a-z]+)_patch(\d+)_384', '{0}/{1}', 384, _I1K, 1_000, _DEIT1),
        Published(r'deit_([a-z]+)_distilled_patch(\d+)_224', 'DeiT-distilled-{0}/{1}', 224, _I1K, 1_000, _DEIT1),
        Published(r'deit_([a-z]+)_distilled_patch(\d+)_384', 'DeiT-distilled-{0}/{1}', 384, _I1K, 1_000, _DEIT1),
        Published(r'deit_3_(huge)_224_1k', 'DeiT-III-{0}/14', 224, _I1K, 1_000, _DEIT3),
        Published(r'deit_3_([a-z]+)_224_1k', 'DeiT-III-{0}/16', 224, _I1K, 1_000, _DEIT3),
        Published(r'deit_3_([a-z]+)_384_1k', 'DeiT-III-{0}/16', 384, _I1K, 1_000, _DEIT3),
        Published(r'deit_3_([a-z]+)_224_21k', 'DeiT-III-{0}/16', 224, _BOTH, 1_000, _DEIT3)))

# ViTs of timm and transformers

def _warn_of_gelu(model: schema.Model, clues: Clues) -> list[str]:
  """Returns a warning if it may be a SigLIP, and nothing determines the form of its GELU."""
  may_be_siglip = (isinstance(model, schema.ViT) and model.pool == schema.Map() and isinstance(model.mlp, schema.Mlp)
                   and isinstance(model.positions, schema.Learned))
  if clues.has_gelu or not may_be_siglip:
    return []
  return ['its GELU is a guess: exact. Some of the published SigLIPs have another: set --model=gelu=tanh for these']


VIT = Family(
    'vit', 'ViT', 'timm, hybrids too; transformers, both layouts of names',
    files=(
        Files('transformers', lambda t: transformers.is_older(t, has_scales=False), transformers.VIT,
              transformers.HINTS, change=transformers.change_vit),
        timm.vit(record.named('patch_embed.proj.weight'), label='timm', formats=('timm',), warn=_warn_of_gelu)),
    kinds=(Kind('vit', ('ViTModel', 'ViTForImageClassification'),
                lambda m, weights, _: transformers.is_plain(m, weights), transformers.VIT, transformers.vit_config,
                transformers.under('vit')),),
    unsupported={
        r'fc_norm\.': 'it normalizes tokens and their mean; networks here do one of these',
        r'.*\.relative_position\w*|rel_pos\w*': 'it is a BEiT, which has relative positions of its own',
        r'.*rope.*': 'it has rotary positions of a kind that no network here has'},
    licenses=(License(r'timm/(vit|deit3?|tf_efficientnet|resnetv2|mixer)_\w+\.(augreg|orig|sam|fb|goog)\w*',
                      'Apache-2.0'),))

# NaFlexViT: ViTs of timm for images at their own aspect, whose patches are embedded by a matrix

_PATCHES, _POSITIONS = 'embeds.proj.weight', 'embeds.pos_embed'


def _naflex_hints(tensors: Tensors) -> Hints:
  """Returns the hints; the two networks that pool by attention differ in their registers, see timm/naflexvit.py."""
  hints, is_siglip = timm.HINTS, record.named('attn_pool.latent', without=['embeds.reg_token'])
  if is_siglip(tensors):
    hints = hints._replace(gelu=Gelu.TANH, position_resize=PositionResize.BILINEAR_ANTIALIAS)
  positions, patches = tensors.get(_POSITIONS), tensors[_PATCHES]
  if positions is None or positions.ndim != 4:
    return hints
  side = math.isqrt(patches.shape[-1] // 3) if patches.ndim == 2 else patches.shape[-1]
  return hints._replace(image_px=(positions.shape[1] * side, positions.shape[2] * side))


def _rename_naflex(tensors: Tensors) -> Changed:
  """Returns the tensors under the names of timm's other ViTs, with the patch embedding as a convolution.

  Positions are `[1, h, w, D]` in the file.
  """
  tensors, positions = dict(record.with_patch_kernel(tensors, _PATCHES)), tensors.get(_POSITIONS)
  if positions is not None and positions.ndim == 4:
    tensors[_POSITIONS] = positions.reshape(1, -1, positions.shape[-1])
  return Changed(record.renamed(tensors, (r'^embeds\.proj\.', 'patch_embed.proj.'),
                         (r'^embeds\.(pos_embed|cls_token|reg_token)$', r'\1')))


def _warn_of_resize(model: schema.Model, clues: Clues) -> list[str]:
  """Returns a warning if no name says which of two networks with the same tensors this is."""
  pools_mean = isinstance(model, schema.ViT) and isinstance(model.pool, schema.Mean)
  if not pools_mean or any('naflexvit' in name for name in clues.names):
    return []
  square = PositionResize.BICUBIC_ANTIALIAS_SQUARE.value
  return ['how it resizes positions for images that are not square is a guess: for networks that timm names par set '
          f'--model=position_resize={square}']


NAFLEX = Family(
    'naflex', 'NaFlexViT', 'timm: `naflexvit_*` with learned positions, not the factorized ones of `parfac`',
    files=(timm.vit(record.named(_PATCHES), _naflex_hints, rename=_rename_naflex, warn=_warn_of_resize,
                    first_rows=(NONE,)),),
    images={**NORMS['half'], **PILLOW, 'resize': 1.},
    unsupported={
        r'embeds\.pos_embed_[xy]': 'it has factorized positions, the sum of one for the row and one for the column'})

# torchvision: `vit_b_16` and others

TORCHVISION_NAMES = table("""
    backbone/stem | conv_proj | conv
    backbone/{cls,positions} | {class_token,encoder.pos_embedding} | same
    backbone/blocks/{norm1,norm2} | encoder.layers.encoder_layer_{i}.{ln_1,ln_2} | norm
    backbone/blocks/attn/{query,key,value} |
        encoder.layers.encoder_layer_{i}.self_attention.{in_proj[0/3],in_proj[1/3],in_proj[2/3]} | packed
    backbone/blocks/attn/out | encoder.layers.encoder_layer_{i}.self_attention.out_proj | dense
    backbone/blocks/mlp/{up,down} | encoder.layers.encoder_layer_{i}.mlp.{0,3} | dense
    backbone/norm | encoder.ln | norm
    {head,head/pre_logits} | heads.{head,pre_logits} | dense
""")


def _since_torchvision_0_13(tensors: Tensors) -> Changed:
  """Returns the tensors with the names that MLPs have since torchvision 0.13."""
  return Changed(record.renamed(tensors, (r'\.mlp\.linear_1\.', '.mlp.0.'), (r'\.mlp\.linear_2\.', '.mlp.3.')))


TORCHVISION = Family(
    'torchvision', 'torchvision ViT', '`vit_b_16` and others, as `state_dict`',
    files=(Files('file', record.named('conv_proj.weight', 'class_token', 'encoder.pos_embedding'), TORCHVISION_NAMES,
                 Hints(gelu=Gelu.EXACT, norm_eps=1e-6), change=_since_torchvision_0_13),),
    images={**NORMS['imagenet'], **PILLOW, 'interpolation': Interpolation.BILINEAR, 'resize': .875})

# MMPretrain (MMClassification before), with and without a distillation token, as its checkpoints have them

MMPRETRAIN_NAMES = table("""
    backbone/stem | backbone.patch_embed.projection | conv
    backbone/{cls,dist,positions} | backbone.{cls_token,dist_token,pos_embed} | same
    backbone/blocks/{norm1,norm2} | backbone.layers.{i}.{ln1,ln2} | norm
    backbone/blocks/attn/{query,key,value} | backbone.layers.{i}.attn.{qkv[0/3],qkv[1/3],qkv[2/3]} | dense
    backbone/blocks/attn/out | backbone.layers.{i}.attn.proj | dense
    backbone/blocks/mlp/{up,down} | backbone.layers.{i}.ffn.layers.{0.0,1} | dense
    backbone/blocks/{scale1,scale2} | backbone.layers.{i}.{attn.gamma1,ffn.gamma2}.weight | same
    backbone/norm | backbone.ln1 | norm
    {head,head_dist,head/pre_logits} | head.layers.{head,head_dist,pre_logits} | dense
""")

MMPRETRAIN = Family(
    'mmpretrain', 'MMPretrain ViT', '`.pth` of VisionTransformer and DistilledVisionTransformer, with their own heads',
    files=(Files('file', record.named('backbone.patch_embed.projection.weight',
                                      'backbone.layers.0.ffn.layers.0.0.weight'),
                 MMPRETRAIN_NAMES, Hints(gelu=Gelu.EXACT, norm_eps=1e-6)),),
    images={**NORMS['imagenet'], **PILLOW, 'resize': .875}, position_resize=PositionResize.BICUBIC,
    unsupported={
        r'backbone\.pre_norm\..*': 'it is a CLIP of MMPretrain, whose GELU and epsilon its file does not show',
        r'backbone\.ln2\..*': 'it normalizes the mean of the patch tokens (out_type=avg_featmap of MMPretrain)',
        r'head\.fc\..*': 'its LinearClsHead reads what out_type of MMPretrain says, which its file does not show'})
