"""The families that people start from now, and their networks by name.

`PUBLISHED` has the networks: a size, and the options that differ from a plain ViT. Sources: the papers named below, the
config files that their authors publish beside the weights, and timm 1.0.31. What is known about their weights is in
`weights/families/`.
"""
from __future__ import annotations

from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, LastNorm, PositionResize, QkvBias

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
    'gelu': Gelu.EXACT, 'norm.eps': 1e-5, 'block.layer_scale': 1e-5, 'registers': 4,
    'attention.qkv_bias': QkvBias.QUERY_VALUE, 'positions': schema.Rotary(coordinates=schema.UnitInterval())}
_CLIP: dict[str, Any] = {  # arXiv 2103.00020, section 2.4
    'gelu': Gelu.EXACT, 'norm.eps': 1e-5, 'norm_before': True, 'stem.bias': False,
    'positions.resize': PositionResize.BICUBIC}
_OPENAI: dict[str, Any] = {**_CLIP, 'gelu': Gelu.QUICK}
_SIGLIP: dict[str, Any] = {'pool': schema.Map()}  # arXiv 2502.14786


def _rotary(resize: PositionResize, grid: int, offset: float = 0.) -> schema.LearnedRotary:
  return schema.LearnedRotary(10_000., coordinates=schema.ByIndex(grid, offset), resize=resize)


def _eva02(hidden: int, *, has_norm: bool = False) -> dict[str, Any]:  # arXiv 2303.11331
  return {'positions': _rotary(PositionResize.BICUBIC, 16), 'mlp': schema.SwiGlu(hidden, inner_norm=has_norm),
          'gelu': Gelu.EXACT, 'attention.qkv_bias': QkvBias.QUERY_VALUE, 'pool': schema.Mean(class_token=True),
          'last_norm': LastNorm.POOLED}


def _eva02_clip(hidden: int) -> dict[str, Any]:
  return {**_eva02(hidden, has_norm=True), 'attention.inner_norm': True, 'pool': schema.ClassToken(),
          'last_norm': LastNorm.TOKENS}


def _pe(grid: int = 24, offset: float = 1.) -> dict[str, Any]:  # arXiv 2504.13181
  return {'positions': _rotary(PositionResize.BILINEAR, grid, offset), 'gelu': Gelu.EXACT, 'norm.eps': 1e-5,
          'norm_before': True, 'stem.bias': False, 'pool': schema.Map(class_token=True, heads=8)}


_PE_TOKENS: dict[str, Any] = {  # its versions for language and for dense tasks
    **_pe(32), 'pool': schema.Mean(class_token=True), 'last_norm': LastNorm.NONE}
_AIMV2: dict[str, Any] = {  # arXiv 2411.14402
    'norm': schema.RmsNorm(1e-5), 'stem.norm': True, 'attention.qkv_bias': QkvBias.NONE, 'attention.out_bias': False,
    'pool': schema.Mean(), 'positions.resize': PositionResize.BICUBIC}
_TIPSV2: dict[str, Any] = {  # arXiv 2604.12012; its second class token is a register here
    'gelu': Gelu.EXACT, 'block.layer_scale': 1., 'registers': 1, 'positions.resize': PositionResize.BILINEAR_ANTIALIAS}
_ROPE: dict[str, Any] = {'gelu': Gelu.EXACT, 'block.layer_scale': 1e-5}  # arXiv 2403.13298


def _rope(*, is_mixed: bool, has_table: bool) -> dict[str, Any]:
  base = 10. if is_mixed else 100.
  return {**_ROPE, 'positions': schema.LearnedRotary(base, is_mixed, resize=PositionResize.BICUBIC_ANTIALIAS)
          if has_table else schema.Rotary(base, is_mixed)}


_IJEPA: dict[str, Any] = {  # arXiv 2301.08243
    'gelu': Gelu.EXACT, 'pool': schema.Mean(), 'positions.resize': PositionResize.BICUBIC}


def _sized(width: int, depth: int, heads: int) -> dict[str, int]:
  return {'width': width, 'depth': depth, 'heads': heads}


def _aimv2(width: int, depth: int, heads: int, hidden: int) -> dict[str, Any]:
  return {**_AIMV2, **_sized(width, depth, heads), 'mlp': schema.SwiGlu(hidden, bias=False)}


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    'DINOv3-S/16': ('S/16', _DINOV3), 'DINOv3-S+/16': ('S/16', {**_DINOV3, 'mlp': schema.SwiGlu(1536)}),
    'DINOv3-B/16': ('B/16', _DINOV3), 'DINOv3-L/16': ('L/16', _DINOV3),
    'DINOv3-H+/16': ('H/16', {**_DINOV3, 'heads': 20, 'mlp': schema.SwiGlu(5120)}),
    'DINOv3-7B/16': ('H/16', {**_DINOV3, **_sized(4096, 40, 32), 'mlp': schema.SwiGlu(8192),
                              'attention.qkv_bias': QkvBias.NONE}),
    'CLIP-B/32': ('B/32', _OPENAI), 'CLIP-B/16': ('B/16', _OPENAI), 'CLIP-L/14': ('L/14', _OPENAI),
    **{f'OpenCLIP-{size}': (size, _CLIP) for size in ('B/32', 'B/16', 'L/14', 'H/14', 'g/14')},
    'OpenCLIP-bigG/14': ('G/14', _CLIP),
    **{f'SigLIP2-{size}': (size, _SIGLIP) for size in ('B/32', 'B/16', 'L/16', 'So400m/14', 'So400m/16')},
    'EVA02-Ti/14': ('Ti/14', _eva02(512)), 'EVA02-S/14': ('S/14', _eva02(1024)),
    'EVA02-B/14': ('B/14', _eva02(2048, has_norm=True)), 'EVA02-L/14': ('L/14', _eva02(2730, has_norm=True)),
    'EVA02-CLIP-B/16': ('B/16', _eva02_clip(2048)), 'EVA02-CLIP-L/14': ('L/14', _eva02_clip(2730)),
    'PE-Core-T/16': ('Ti/16', _pe()), 'PE-Core-S/16': ('S/16', _pe()),
    'PE-Core-B/16': ('B/16', _pe(14)), 'PE-Core-L/14': ('L/14', _pe()),
    'PE-Core-G/14': ('H/14', {**_pe(32, 0.), **_sized(1536, 50, 16), 'mlp.hidden': 8960,
                              'pool': schema.Map(heads=8, hidden=6144)}),
    'PE-Lang-L/14': ('L/14', {**_PE_TOKENS, 'depth': 23, 'block.layer_scale': .1}),
    'PE-Spatial-B/16': ('B/16', _PE_TOKENS), 'PE-Spatial-L/14': ('L/14', _PE_TOKENS),
    'AIMv2-L/14': ('L/14', _aimv2(1024, 24, 8, 2816)), 'AIMv2-H/14': ('H/14', _aimv2(1536, 24, 12, 4096)),
    'AIMv2-1B/14': ('H/14', _aimv2(2048, 24, 16, 5632)), 'AIMv2-3B/14': ('H/14', _aimv2(3072, 24, 24, 8192)),
    **{f'TIPSv2-{size}': (size, _TIPSV2) for size in ('B/14', 'L/14', 'So400m/14')},
    'TIPSv2-g/14': ('g-opt/14', {**_TIPSV2, **_sized(1536, 40, 24), 'mlp': schema.SwiGlu(4096)}),
    **{f'RoPE-{kind}{size}': (size, options) for size in ('S/16', 'B/16', 'L/16') for kind, options in (
        ('ViT-', _rope(is_mixed=False, has_table=False)), ('Mixed-', _rope(is_mixed=True, has_table=False)),
        ('APE-', _rope(is_mixed=False, has_table=True)), ('Mixed-APE-', _rope(is_mixed=True, has_table=True)))},
    'I-JEPA-H/14': ('H/14', _IJEPA), 'I-JEPA-H/16': ('H/16', _IJEPA), 'I-JEPA-g/16': ('g/16', _IJEPA),
}
"""A name, then the size and patch that `sizes.vit` knows, and the options of the network by their dotted names."""
