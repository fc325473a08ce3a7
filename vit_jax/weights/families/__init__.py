"""Families of published weights, each with a record.

Families that are alike are in one module. `flax.py`, `timm.py` and `transformers.py` also have what the families have
in common in files of these programs, and `text.py` has the text towers. A file is of the first family whose record says
so; `vit.VIT`, with what is left, is the last.
"""
from vit_jax.weights.families import clip, flax, rivals, rotary, selfsup, tips, vit

FAMILIES = (
    flax.VISION_TRANSFORMER, rivals.MIXER, rivals.BIT, rivals.EFFICIENTNET, flax.BIG_VISION, vit.DEIT, clip.CLIP,
    clip.AIMV2, rotary.PE, clip.SIGLIP, selfsup.DINOV3, rotary.ROPE_VIT, rotary.EVA02, selfsup.MAE, selfsup.DINO,
    tips.TIPS, selfsup.DINOV2, selfsup.IJEPA, selfsup.MOCO, vit.NAFLEX, vit.TORCHVISION, vit.MMPRETRAIN, vit.VIT)
