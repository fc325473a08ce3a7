"""Families of published weights, each with a record.

Families that are alike are in one module. `flax.py`, `timm.py` and `transformers.py` also have what the families have
in common in files of these programs, and `text.py` has the text towers. A file is of the first family whose record says
so; `vit.VIT`, with what is left, is the last.
"""
from vit_jax.weights.families import (
    aimv2,
    clip,
    dinov2,
    dinov3,
    flax,
    mmpretrain,
    naflex,
    rivals,
    rotary,
    selfsup,
    siglip,
    tips,
    torchvision,
    vit,
)

FAMILIES = (
    flax.VISION_TRANSFORMER, rivals.MIXER, rivals.BIT, rivals.EFFICIENTNET, flax.BIG_VISION, vit.DEIT, clip.FAMILY,
    aimv2.FAMILY, rotary.PE, siglip.FAMILY, dinov3.FAMILY, rotary.ROPE_VIT, rotary.EVA02, selfsup.MAE, selfsup.DINO,
    tips.FAMILY, dinov2.FAMILY, selfsup.IJEPA, selfsup.MOCO, naflex.FAMILY, torchvision.FAMILY, mmpretrain.FAMILY,
    vit.VIT)
