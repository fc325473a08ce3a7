"""Plain ViTs and all others in files of timm that no other record describes, ViTs of transformers, and DeiT.

In files of timm the tensors of DeiT, with and without a distillation token, and of DeiT III are those of a ViT.
"""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.weights.families import timm, transformers
from vit_jax.weights.families.record import Clues, Family, Files, Kind, License, Published, Tensors, renamed
from vit_jax.weights.network import Weights

_DIGESTS = {
    'deit_tiny_patch16_224': 'a1311bcf', 'deit_small_patch16_224': 'cd65a155', 'deit_base_patch16_224': 'b5f2ef4d',
    'deit_base_patch16_384': '8de9b5d1', 'deit_tiny_distilled_patch16_224': 'b40b3cf7',
    'deit_small_distilled_patch16_224': '649709d9', 'deit_base_distilled_patch16_224': 'df68dfff',
    'deit_base_distilled_patch16_384': 'd0272ac0',
}
_FILES = 'https://dl.fbaipublicfiles.com/deit'


def _finish_deit(tensors: Tensors, weights: Weights) -> Tensors:
  return renamed(transformers.under('deit')(tensors, weights), ('^classifier', 'cls_classifier'))


_I1K, _BOTH, _DEIT1, _DEIT3 = 'ImageNet-1k', 'ImageNet-21k+1k', 'arXiv 2012.12877', 'arXiv 2204.07118'
DEIT = Family(
    'deit', 'DeiT, DeiT III', '`.pth` of the authors, with and without a distillation token; transformers; timm',
    kinds=(Kind('deit', ('DeiTModel', 'DeiTForImageClassificationWithTeacher'),
                lambda m, weights, _: transformers.is_plain(m, weights, distilled=True), lambda _: transformers.VIT,
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


def _warn(model: schema.Model, clues: Clues) -> list[str]:
  if clues.has_gelu or not isinstance(model, schema.ViT) or model.pool != schema.Map() or not (
      isinstance(model.mlp, schema.Mlp) and isinstance(model.positions, schema.Learned)):
    return []
  return ['its GELU is a guess: exact. Some of the published SigLIPs have another: set --model=gelu=tanh for these']


VIT = Family(
    'vit', 'ViT', 'timm, hybrids too; transformers, both layouts of names',
    files=(
        Files('transformers', lambda t: transformers.is_older(t, has_scales=False), transformers.VIT,
              transformers.HINTS, change=transformers.change_vit),
        timm.vit(lambda t: 'patch_embed.proj.weight' in t, label='timm', formats=('timm',), warn=_warn)),
    kinds=(Kind('vit', ('ViTModel', 'ViTForImageClassification'),
                lambda m, weights, _: transformers.is_plain(m, weights), lambda _: transformers.VIT,
                transformers.vit_config, transformers.under('vit')),),
    unsupported={
        r'fc_norm\.': 'it normalizes tokens and their mean; networks here do one of these',
        r'.*\.relative_position\w*|rel_pos\w*': 'it is a BEiT, which has relative positions of its own',
        r'.*rope.*': 'it has rotary positions of a kind that no network here has'},
    licenses=(License(r'timm/(vit|deit3?|tf_efficientnet|resnetv2|mixer)_\w+\.(augreg|orig|sam|fb|goog)\w*',
                      'Apache-2.0'),))
