"""DeiT with and without a distillation token, and DeiT III; in files of timm their tensors are those of a ViT."""
from __future__ import annotations

from vit_jax.weights.families import transformers
from vit_jax.weights.families.record import Family, Kind, Published, Tensors, renamed
from vit_jax.weights.network import Weights

_DIGESTS = {
    'deit_tiny_patch16_224': 'a1311bcf', 'deit_small_patch16_224': 'cd65a155', 'deit_base_patch16_224': 'b5f2ef4d',
    'deit_base_patch16_384': '8de9b5d1', 'deit_tiny_distilled_patch16_224': 'b40b3cf7',
    'deit_small_distilled_patch16_224': '649709d9', 'deit_base_distilled_patch16_224': 'df68dfff',
    'deit_base_distilled_patch16_384': 'd0272ac0',
}
_FILES = 'https://dl.fbaipublicfiles.com/deit'


def _finish(tensors: Tensors, weights: Weights) -> Tensors:
  return renamed(transformers.under('deit')(tensors, weights), ('^classifier', 'cls_classifier'))


_I1K, _BOTH, _DEIT, _DEIT3 = 'ImageNet-1k', 'ImageNet-21k+1k', 'arXiv 2012.12877', 'arXiv 2204.07118'
FAMILY = Family(
    'deit', 'DeiT, DeiT III', '`.pth` of the authors, with and without a distillation token; transformers; timm',
    kinds=(Kind('deit', ('DeiTModel', 'DeiTForImageClassificationWithTeacher'),
                lambda m, weights, _: transformers.is_plain(m, weights, distilled=True), lambda _: transformers.VIT,
                transformers.vit_config, _finish),),
    addresses={**{name: f'{_FILES}/{name}-{digest}.pth' for name, digest in _DIGESTS.items()},
               **{f'deit_3_{size}': f'{_FILES}/deit_3_{size}.pth' for size in (
                   'small_224_1k', 'small_384_1k', 'base_224_1k', 'base_384_1k', 'large_224_1k', 'large_384_1k',
                   'huge_224_1k', 'small_224_21k', 'base_224_21k', 'large_224_21k')}},
    published=(
        Published(r'deit_([a-z]+)_patch(\d+)_224', '{0}/{1}', 224, _I1K, 1_000, _DEIT),
        Published(r'deit_([a-z]+)_patch(\d+)_384', '{0}/{1}', 384, _I1K, 1_000, _DEIT),
        Published(r'deit_([a-z]+)_distilled_patch(\d+)_224', 'DeiT-distilled-{0}/{1}', 224, _I1K, 1_000, _DEIT),
        Published(r'deit_([a-z]+)_distilled_patch(\d+)_384', 'DeiT-distilled-{0}/{1}', 384, _I1K, 1_000, _DEIT),
        Published(r'deit_3_(huge)_224_1k', 'DeiT-III-{0}/14', 224, _I1K, 1_000, _DEIT3),
        Published(r'deit_3_([a-z]+)_224_1k', 'DeiT-III-{0}/16', 224, _I1K, 1_000, _DEIT3),
        Published(r'deit_3_([a-z]+)_384_1k', 'DeiT-III-{0}/16', 384, _I1K, 1_000, _DEIT3),
        Published(r'deit_3_([a-z]+)_224_21k', 'DeiT-III-{0}/16', 224, _BOTH, 1_000, _DEIT3)))
