"""Published names of weights and their addresses, as given by their authors and by timm.

AugReg's files have their own names, `{model}-{data}-{epochs}ep-lr_…-wd_…-do_…-sd_…[--{dataset}-steps_…]`.
"""
from __future__ import annotations

import difflib
import re

from vit_jax.recipes import families

_FB = 'https://dl.fbaipublicfiles.com'
_AUGREG = re.compile(r'(R_Ti|R26_S|R50_L|Ti|S|B|L)_\d+-i(1|21)k-\d+ep-lr_[\w.]+-aug_\w+-wd_[\d.]+-do_[\d.]+-sd_[\d.]+'
                     r'(--\w+-steps_\d+k-lr_[\d.]+-res_\d+)?')
_DEIT = {
    'deit_tiny_patch16_224': 'a1311bcf', 'deit_small_patch16_224': 'cd65a155', 'deit_base_patch16_224': 'b5f2ef4d',
    'deit_base_patch16_384': '8de9b5d1', 'deit_tiny_distilled_patch16_224': 'b40b3cf7',
    'deit_small_distilled_patch16_224': '649709d9', 'deit_base_distilled_patch16_224': 'df68dfff',
    'deit_base_distilled_patch16_384': 'd0272ac0',
}

NAMES: dict[str, str] = {
    **{f'{model}-i21k': f'gs://vit_models/imagenet21k/{model}.npz' for model in (
        'ViT-B_8', 'ViT-B_16', 'ViT-B_32', 'ViT-L_16', 'ViT-L_32', 'ViT-H_14', 'R26+ViT-B_32', 'R50+ViT-B_16',
        'R50+ViT-L_32')},
    **{f'{model}-i1k': f'gs://vit_models/imagenet21k+imagenet2012/{model}.npz' for model in (
        'ViT-B_8', 'ViT-B_16', 'ViT-B_16-224', 'ViT-B_32', 'ViT-L_16', 'ViT-L_16-224', 'ViT-L_32', 'R50+ViT-B_16')},
    **{f'{model}-sam': f'gs://vit_models/sam/{model}.npz' for model in (
        'ViT-B_16', 'ViT-B_32', 'ViT-L_16', 'ViT-L_32', 'ViT-S_16')},
    **{f'{model}-gsam': f'gs://vit_models/gsam/{model}.npz' for model in (
        'ViT-B_16', 'ViT-B_32', 'ViT-S_16', 'ViT-S_32')},
    **{f'{model}-i21k': f'gs://mixer_models/imagenet21k/{model}.npz' for model in ('Mixer-B_16', 'Mixer-L_16')},
    **{f'{model}-i1k': f'gs://mixer_models/imagenet1k/{model}.npz' for model in ('Mixer-B_16', 'Mixer-L_16')},
    **{f'BiT-{data}-R{size}{tuned}': f'gs://bit_models/BiT-{data}-R{size}{tuned}.npz' for data in 'SM'
       for size in ('50x1', '50x3', '101x1', '101x3', '152x2', '152x4') for tuned in ('', '-ILSVRC2012')
       if data == 'M' or not tuned},
    **{f'vit_s16_i1k_{epochs}ep': f'gs://big_vision/vit_s16_i1k_{epochs}ep.npz' for epochs in (90, 150, 300)},
    **{name: f'{_FB}/deit/{name}-{digest}.pth' for name, digest in _DEIT.items()},
    **{f'deit_3_{size}': f'{_FB}/deit/deit_3_{size}.pth' for size in (
        'small_224_1k', 'small_384_1k', 'base_224_1k', 'base_384_1k', 'large_224_1k', 'large_384_1k', 'huge_224_1k',
        'small_224_21k', 'base_224_21k', 'large_224_21k')},
    **{f'mae_pretrain_vit_{size}': f'{_FB}/mae/pretrain/mae_pretrain_vit_{size}.pth' for size in (
        'base', 'large', 'huge')},
    **{f'mae_finetuned_vit_{size}': f'{_FB}/mae/finetune/mae_finetuned_vit_{size}.pth' for size in (
        'base', 'large', 'huge')},
    **{f'mae_visualize_vit_{size}': f'{_FB}/mae/visualize/mae_visualize_vit_{size}.pth' for size in ('base', 'large')},
    **{f'{name}_pretrain': f'{_FB}/dino/{name}_pretrain/{name}_pretrain.pth' for name in (
        'dino_deitsmall16', 'dino_deitsmall8', 'dino_vitbase16', 'dino_vitbase8')},
    **{f'dinov2_{size}{kind}': f'{_FB}/dinov2/dinov2_{size}/dinov2_{size}{kind}_pretrain.pth'
       for size in ('vits14', 'vitb14', 'vitl14', 'vitg14') for kind in ('', '_reg4')},
    **{f'tips_v2_{size}_vision': f'gs://tips_data/v2_0/checkpoints/scenic/tips_v2_{size}_vision.npz'
       for size in ('b14', 'l14', 'so14', 'g14')},
}
"""Known names and their addresses."""


HUB: tuple[tuple[str, str, bool], ...] = (
    *(license for family in families.FAMILIES for license in family.hub),
    (r'timm/vit_\w+[._]mae.*|facebook/vit-mae-.*', 'CC-BY-NC-4.0', False),
    (r'timm/(vit|deit3?|tf_efficientnet|resnetv2|mixer)_\w+\.(augreg|orig|sam|fb|goog)\w*', 'Apache-2.0', False))
"""Licenses of models of the hub, by `OWNER/NAME`, and whether their publisher gives them out on request only."""


def terms(where: str) -> str:
  """Returns a sentence on the license of weights at a name or address; '' if it is not known."""
  name = where.removeprefix('hf://').removeprefix('hf-hub:')
  found = next(((license, is_gated) for pattern, license, is_gated in HUB if re.fullmatch(pattern, name)), None)
  if found is None:
    return ''
  gated = ' Its publisher gives it out on request only.' if found[1] else ''
  return f'License of {name}: {found[0]}.{gated}'


def address(name: str) -> str:
  """Returns the address of a known name, for `addresses.local`; '' for other names."""
  plain = name.removesuffix('.npz')
  if plain in NAMES:
    return NAMES[plain]
  if _AUGREG.fullmatch(plain):
    return f'gs://vit_models/augreg/{plain}.npz'
  if re.fullmatch(r'(timm|google|facebook|openai|laion|apple)/[\w.+-]+', name):
    return f'hf://{name}'
  return ''


def nearest(name: str) -> list[str]:
  """Returns known names that are similar to this one."""
  return difflib.get_close_matches(name, NAMES, 3, .6)
