"""The families that people start from now, and their networks by name.

`PUBLISHED` has the networks: a size, and the options that differ from a plain ViT. Sources: the papers named below, the
config files that their authors publish beside the weights, and timm 1.0.31. What is known about their weights is in
`weights/families/`.
"""
from __future__ import annotations

from typing import Any

from vit_jax.config.schema import Gelu, Norm, Pool, PositionResize, Positions, RotaryPlaces

NETWORKS = (
    (r'DINOv2-reg-', 'DINOv2 with registers', 'arXiv 2309.16588'), (r'DINOv2-', 'DINOv2', 'arXiv 2304.07193'),
    (r'DINOv3-', 'DINOv3', 'arXiv 2508.10104'),
    (r'CLIP-', 'CLIP', 'arXiv 2103.00020'), (r'OpenCLIP-', 'OpenCLIP', 'arXiv 2212.07143'),
    (r'EVA02-CLIP-', 'EVA-02-CLIP', 'arXiv 2303.15389'), (r'EVA02-', 'EVA-02', 'arXiv 2303.11331'),
    (r'PE-', 'Perception Encoder', 'arXiv 2504.13181'), (r'RoPE-', 'RoPE-ViT', 'arXiv 2403.13298'),
    (r'AIMv2-', 'AIMv2', 'arXiv 2411.14402'), (r'TIPSv2-', 'TIPSv2', 'arXiv 2604.12012'),
    (r'I-JEPA-', 'I-JEPA', 'arXiv 2301.08243'),
    (r'SigLIP2-', 'SigLIP 2', 'arXiv 2502.14786'), (r'SigLIP-', 'SigLIP', 'arXiv 2303.15343'))
"""Families of networks: the pattern with which their names in `sizes.names()` begin, the title and the source.

Older families are in `catalog.py`. What is known about the weights of a family is in `weights/families/`.
"""

_DINOV3: dict[str, Any] = {  # arXiv 2508.10104
    'gelu': Gelu.EXACT, 'norm_eps': 1e-5, 'layer_scale': 1e-5, 'registers': 4, 'key_bias': False,
    'positions': Positions.ROTARY2D, 'rotary_places': RotaryPlaces.UNIT}
_CLIP: dict[str, Any] = {  # arXiv 2103.00020, section 2.4
    'gelu': Gelu.EXACT, 'norm_eps': 1e-5, 'norm_before': True, 'stem_bias': False,
    'position_resize': PositionResize.BICUBIC}
_OPENAI: dict[str, Any] = {**_CLIP, 'gelu': Gelu.QUICK}
_SIGLIP: dict[str, Any] = {'pool': Pool.MAP}  # arXiv 2502.14786
_ROTARY: dict[str, Any] = {'positions': Positions.LEARNED_ROTARY2D, 'rotary_base': 10_000.}
_EVA02: dict[str, Any] = {  # arXiv 2303.11331
    **_ROTARY, 'rotary_grid': 16, 'swiglu': True, 'gelu': Gelu.EXACT, 'key_bias': False, 'pool': Pool.PATCHES,
    'norm_after_pool': True, 'position_resize': PositionResize.BICUBIC}
_EVA02_CLIP: dict[str, Any] = {
    **_EVA02, 'mlp_norm': True, 'attn_norm': True, 'pool': Pool.CLS, 'norm_after_pool': False}
_PE: dict[str, Any] = {  # arXiv 2504.13181
    **_ROTARY, 'rotary_grid': 24, 'rotary_offset': 1., 'gelu': Gelu.EXACT, 'norm_eps': 1e-5, 'norm_before': True,
    'stem_bias': False, 'pool': Pool.MAP_CLS, 'pool_heads': 8, 'position_resize': PositionResize.BILINEAR}
_PE_TOKENS: dict[str, Any] = {  # its versions for language and for dense tasks
    **_PE, 'rotary_grid': 32, 'pool': Pool.PATCHES, 'pool_heads': 0, 'final_norm': False}
_AIMV2: dict[str, Any] = {  # arXiv 2411.14402
    'norm': Norm.RMS, 'norm_eps': 1e-5, 'stem_norm': True, 'swiglu': True, 'qkv_bias': False, 'out_bias': False,
    'mlp_bias': False, 'pool': Pool.MEAN, 'position_resize': PositionResize.BICUBIC}
_TIPSV2: dict[str, Any] = {  # arXiv 2604.12012; its second class token is a register here
    'gelu': Gelu.EXACT, 'layer_scale': 1., 'registers': 1, 'position_resize': PositionResize.BILINEAR_ANTIALIAS}
_ROPE: dict[str, Any] = {  # arXiv 2403.13298
    'gelu': Gelu.EXACT, 'layer_scale': 1e-5, 'positions': Positions.ROTARY2D, 'rotary_base': 100.,
    'position_resize': PositionResize.BICUBIC_ANTIALIAS}
_ROPE_MIXED: dict[str, Any] = {**_ROPE, 'rotary_mixed': True, 'rotary_base': 10.}
_WITH_TABLE: dict[str, Any] = {'positions': Positions.LEARNED_ROTARY2D}
_IJEPA: dict[str, Any] = {  # arXiv 2301.08243
    'gelu': Gelu.EXACT, 'pool': Pool.MEAN, 'position_resize': PositionResize.BICUBIC}


def _sized(width: int, depth: int, heads: int, mlp: int) -> dict[str, int]:
  return {'width': width, 'depth': depth, 'heads': heads, 'mlp': mlp}


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    'DINOv3-S/16': ('S/16', _DINOV3), 'DINOv3-S+/16': ('S/16', {**_DINOV3, 'swiglu': True}),
    'DINOv3-B/16': ('B/16', _DINOV3), 'DINOv3-L/16': ('L/16', _DINOV3),
    'DINOv3-H+/16': ('H/16', {**_DINOV3, 'heads': 20, 'swiglu': True}),
    'DINOv3-7B/16': ('H/16', {**_DINOV3, **_sized(4096, 40, 32, 8192), 'swiglu': True, 'qkv_bias': False,
                              'key_bias': True}),
    'CLIP-B/32': ('B/32', _OPENAI), 'CLIP-B/16': ('B/16', _OPENAI), 'CLIP-L/14': ('L/14', _OPENAI),
    **{f'OpenCLIP-{size}': (size, _CLIP) for size in ('B/32', 'B/16', 'L/14', 'H/14', 'g/14')},
    'OpenCLIP-bigG/14': ('G/14', _CLIP),
    **{f'SigLIP2-{size}': (size, _SIGLIP) for size in ('B/32', 'B/16', 'L/16', 'So400m/14', 'So400m/16')},
    'EVA02-Ti/14': ('Ti/14', {**_EVA02, 'mlp': 512}), 'EVA02-S/14': ('S/14', {**_EVA02, 'mlp': 1024}),
    'EVA02-B/14': ('B/14', {**_EVA02, 'mlp': 2048, 'mlp_norm': True}),
    'EVA02-L/14': ('L/14', {**_EVA02, 'mlp': 2730, 'mlp_norm': True}),
    'EVA02-CLIP-B/16': ('B/16', {**_EVA02_CLIP, 'mlp': 2048}),
    'EVA02-CLIP-L/14': ('L/14', {**_EVA02_CLIP, 'mlp': 2730}),
    'PE-Core-T/16': ('Ti/16', _PE), 'PE-Core-S/16': ('S/16', _PE),
    'PE-Core-B/16': ('B/16', {**_PE, 'rotary_grid': 14}), 'PE-Core-L/14': ('L/14', _PE),
    'PE-Core-G/14': ('H/14', {**_PE, **_sized(1536, 50, 16, 8960), 'rotary_grid': 32, 'rotary_offset': 0.,
                              'pool': Pool.MAP, 'pool_mlp': 6144}),
    'PE-Lang-L/14': ('L/14', {**_PE_TOKENS, 'depth': 23, 'layer_scale': .1}),
    'PE-Spatial-B/16': ('B/16', _PE_TOKENS), 'PE-Spatial-L/14': ('L/14', _PE_TOKENS),
    'AIMv2-L/14': ('L/14', {**_AIMV2, **_sized(1024, 24, 8, 2816)}),
    'AIMv2-H/14': ('H/14', {**_AIMV2, **_sized(1536, 24, 12, 4096)}),
    'AIMv2-1B/14': ('H/14', {**_AIMV2, **_sized(2048, 24, 16, 5632)}),
    'AIMv2-3B/14': ('H/14', {**_AIMV2, **_sized(3072, 24, 24, 8192)}),
    **{f'TIPSv2-{size}': (size, _TIPSV2) for size in ('B/14', 'L/14', 'So400m/14')},
    'TIPSv2-g/14': ('g-opt/14', {**_TIPSV2, **_sized(1536, 40, 24, 4096), 'swiglu': True}),
    **{f'RoPE-{kind}{size}': (size, options) for size in ('S/16', 'B/16', 'L/16') for kind, options in (
        ('ViT-', _ROPE), ('Mixed-', _ROPE_MIXED), ('APE-', {**_ROPE, **_WITH_TABLE}),
        ('Mixed-APE-', {**_ROPE_MIXED, **_WITH_TABLE}))},
    'I-JEPA-H/14': ('H/14', _IJEPA), 'I-JEPA-H/16': ('H/16', _IJEPA), 'I-JEPA-g/16': ('g/16', _IJEPA),
}
"""A name, then the size and patch that `sizes.vit` knows, and the options of the network."""
