"""DINO: backbones, and checkpoints with the head of self-supervision."""
from __future__ import annotations

from vit_jax.config.schema import PositionResize
from vit_jax.weights.families import timm
from vit_jax.weights.families.record import Family, Published
from vit_jax.weights.preprocess import NORMS, PILLOW

FAMILY = Family(
    'dino', 'DINO', '`.pth` of the authors',
    files=(timm.vit(lambda t: 'patch_embed.proj.weight' in t and any(name.startswith('head.last_layer') for name in t),
                    label='dino'),),
    images={**NORMS['imagenet'], **PILLOW, 'resize': .875}, position_resize=PositionResize.BICUBIC_OFFSET,
    addresses={f'{name}_pretrain': f'https://dl.fbaipublicfiles.com/dino/{name}_pretrain/{name}_pretrain.pth'
               for name in ('dino_deitsmall16', 'dino_deitsmall8', 'dino_vitbase16', 'dino_vitbase8')},
    published=(Published(r'dino_(?:deit|vit)([a-z]+?)(\d+)_pretrain', '{0}/{1}', 224, 'ImageNet-1k', 0,
                         'arXiv 2104.14294'),))
