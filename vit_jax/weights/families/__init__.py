"""Families of published weights: each module of `FAMILIES` has the record of one.

`flax.py`, `timm.py` and `transformers.py` have what the families have in common in files of these programs, and
`text.py` has the text towers. A file is of the first family whose record says so; `vit`, with what is left, is the
last.
"""
from vit_jax.weights.families import (
    aimv2,
    big_vision,
    bit,
    clip,
    deit,
    dino,
    dinov2,
    dinov3,
    efficientnet,
    eva02,
    ijepa,
    mae,
    mixer,
    mmpretrain,
    moco,
    naflex,
    pe,
    rope_vit,
    siglip,
    tips,
    torchvision,
    vision_transformer,
    vit,
)

FAMILIES = tuple(module.FAMILY for module in (
    vision_transformer, mixer, bit, efficientnet, big_vision, deit, clip, aimv2, pe, siglip, dinov3, rope_vit, eva02,
    mae, dino, tips, dinov2, ijepa, moco, naflex, torchvision, mmpretrain, vit))
