"""Networks by their published names.

Sources: ViT paper, Table 1 (B, L, H); DeiT and AugReg (Ti, S); Scaling ViT, Table 2 (g, G); SoViT (So400m); big_vision
(mu, M, g-opt, G-opt); PaLI (e); ViT-22B, Table 1 (22B); BiT (arXiv 1912.11370, section 3.2; R200x3 in the ViT paper,
Table 6); MLP-Mixer (arXiv 2105.01601, Table 1); EfficientNet's authors' code (B0 to B8, L2), Noisy Student (arXiv
1911.04252, Table 7). The size of a ViT is four numbers; a published model is a size with options.
"""
from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, LastNorm, PositionResize, PositionsAt, QkvBias, SwiGlu
from vit_jax.core import globs
from vit_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class _Size:
  width: int
  depth: int
  heads: int
  mlp: int


VIT = {
    'mu': _Size(32, 1, 2, 128),
    'Ti': _Size(192, 12, 3, 768),
    'S': _Size(384, 12, 6, 1536),
    'M': _Size(512, 12, 8, 2048),
    'B': _Size(768, 12, 12, 3072),
    'L': _Size(1024, 24, 16, 4096),
    'So400m': _Size(1152, 27, 16, 4304),
    'H': _Size(1280, 32, 16, 5120),
    'g': _Size(1408, 40, 16, 6144),
    'g-opt': _Size(1536, 40, 16, 6144),
    'G': _Size(1664, 48, 16, 8192),
    'G-opt': _Size(1536, 48, 16, 8192),
    'e': _Size(1792, 56, 16, 15360),
    '22B': _Size(6144, 48, 48, 24576),
}

PATCHES = {  # sides in px that papers and public weights have; any other side can be set
    'mu': (16,), 'Ti': (16,), 'S': (32, 16, 8), 'M': (16,), 'B': (32, 16, 8), 'L': (32, 16), 'So400m': (14,),
    'H': (14,), 'g': (14,), 'g-opt': (16,), 'G': (14,), 'G-opt': (16,), 'e': (14,), '22B': (14,)}

RESNET = {'R50': (3, 4, 6, 3), 'R101': (3, 4, 23, 3), 'R152': (3, 8, 36, 3), 'R200': (3, 24, 36, 3)}
"""Bottleneck units of each stage; a width factor multiplies all channels."""
BITS = ('R50x1', 'R50x2', 'R50x3', 'R101x1', 'R101x3', 'R152x1', 'R152x2', 'R152x4', 'R200x3')
"""Those of the BiT and ViT papers; any other factor can be set."""
MIXER = {  # width, depth, hidden widths of the MLPs over tokens and channels
    'S': (512, 8, 256, 2048), 'B': (768, 12, 384, 3072), 'L': (1024, 24, 512, 4096), 'H': (1280, 32, 640, 5120)}
MIXER_PATCHES = {'S': (32, 16), 'B': (32, 16), 'L': (32, 16), 'H': (14,)}
EFFICIENTNET = {  # factors of width and depth, image side in px, dropout
    'B0': (1., 1., 224, .2), 'B1': (1., 1.1, 240, .2), 'B2': (1.1, 1.2, 260, .3), 'B3': (1.2, 1.4, 300, .3),
    'B4': (1.4, 1.8, 380, .4), 'B5': (1.6, 2.2, 456, .4), 'B6': (1.8, 2.6, 528, .5), 'B7': (2., 3.1, 600, .5),
    'B8': (2.2, 3.6, 672, .5), 'L2': (4.3, 5.3, 800, .5)}
AXIAL_RESNET = {  # units of each stage, channels of the root (program of Axial-DeepLab, arXiv 2003.07853)
    'Axial-ResNet26-S': ((1, 2, 4, 1), 32), 'Axial-ResNet50-S': ((3, 4, 6, 3), 32),
    'Axial-ResNet50-M': ((3, 4, 6, 3), 48), 'Axial-ResNet50-L': ((3, 4, 6, 3), 64)}
DROP_PATH = .2  # stochastic depth of every EfficientNet, in its authors' code


def swiglu_hidden(width: int) -> int:
  """Returns the hidden width of a SwiGLU MLP with about the parameters of a plain one of `4 width`.

  DINOv2's rule: two thirds of `4 width`, rounded down, then up to a multiple of 8.
  """
  return (4 * width * 2 // 3 + 7) // 8 * 8


Options = dict[str, Any]
"""Settings of a ViT by their dotted names, such as `{'pool': Map(), 'mlp.hidden': 720}`."""


def _sized(width: int, depth: int, heads: int) -> Options:
  return {'width': width, 'depth': depth, 'heads': heads}


def _resized(resize: PositionResize) -> Options:
  return {'positions.resize': resize}


def _named_by_size(prefix: str, options: Options, *names: str) -> dict[str, tuple[str, Options]]:
  """Returns entries of `_PUBLISHED` for networks of a family that are named as their sizes: `DINOv2-B/14`."""
  return {f'{prefix}-{name}': (name, options) for name in names}


_MAP: Options = {'pool': schema.Map()}
_AXIAL: Options = {'block': schema.Axial(), 'pool': schema.Mean()}  # ViT paper, D.6, which does not say how it pools
_R50: Options = {'stem': schema.ResNetStem((3, 4, 6, 3))}
_R50_SHORT: Options = {'stem': schema.ResNetStem((3, 4, 9))}  # the last stage's units in the one before it
_R26: Options = {'stem': schema.ResNetStem((2, 2, 2, 2))}
_LV: Options = {  # arXiv 2104.10858, Tables 1 and 2, and its code
    'gelu': Gelu.EXACT, 'norm.eps': 1e-5, 'attention.qkv_bias': QkvBias.NONE, 'stem': schema.ConvStem(),
    **_resized(PositionResize.BICUBIC)}
_DEIT: Options = {  # arXiv 2012.12877
    'gelu': Gelu.EXACT, 'pool.distillation': True, **_resized(PositionResize.BICUBIC)}
_DEIT3: Options = {  # arXiv 2204.07118; here positions have a class row
    'block.layer_scale': 1e-4, 'gelu': Gelu.EXACT, **_resized(PositionResize.BICUBIC)}
_DINOV2: Options = {  # arXiv 2304.07193, and its code
    'block.layer_scale': 1e-5, 'gelu': Gelu.EXACT, **_resized(PositionResize.BICUBIC_OFFSET)}
_DINOV2_G: Options = {**_DINOV2, 'heads': 24, 'mlp': SwiGlu(swiglu_hidden(1536))}
_REG: Options = {'registers': 4, **_resized(PositionResize.BICUBIC_ANTIALIAS)}  # arXiv 2309.16588
_DINOV3: Options = {  # arXiv 2508.10104
    'gelu': Gelu.EXACT, 'norm.eps': 1e-5, 'block.layer_scale': 1e-5, 'registers': 4,
    'attention.qkv_bias': QkvBias.QUERY_VALUE, 'positions': schema.Rotary(coordinates=schema.UnitInterval())}
_IJEPA: Options = {  # arXiv 2301.08243
    'gelu': Gelu.EXACT, 'pool': schema.Mean(), **_resized(PositionResize.BICUBIC)}
_CLIP: Options = {  # arXiv 2103.00020, section 2.4
    'gelu': Gelu.EXACT, 'norm.eps': 1e-5, 'norm_before': True, 'stem.bias': False, **_resized(PositionResize.BICUBIC)}
_OPENAI: Options = {**_CLIP, 'gelu': Gelu.QUICK}
_TIPSV2: Options = {  # arXiv 2604.12012; its second class token is a register here
    'gelu': Gelu.EXACT, 'block.layer_scale': 1., 'registers': 1, **_resized(PositionResize.BILINEAR_ANTIALIAS)}


def _rotary(resize: PositionResize, grid: int, offset: float = 0.) -> schema.LearnedRotary:
  return schema.LearnedRotary(10_000., coordinates=schema.ByIndex(grid, offset), resize=resize)


def _eva02(hidden: int, *, has_norm: bool = False) -> Options:  # arXiv 2303.11331
  return {'positions': _rotary(PositionResize.BICUBIC, 16), 'mlp': SwiGlu(hidden, inner_norm=has_norm),
          'gelu': Gelu.EXACT, 'attention.qkv_bias': QkvBias.QUERY_VALUE, 'pool': schema.Mean(class_token=True),
          'last_norm': LastNorm.POOLED}


def _eva02_clip(hidden: int) -> Options:  # arXiv 2303.15389
  return {**_eva02(hidden, has_norm=True), 'attention.inner_norm': True, 'pool': schema.ClassToken(),
          'last_norm': LastNorm.TOKENS}


def _pe(grid: int = 24, offset: float = 1.) -> Options:  # arXiv 2504.13181
  return {'positions': _rotary(PositionResize.BILINEAR, grid, offset), 'gelu': Gelu.EXACT, 'norm.eps': 1e-5,
          'norm_before': True, 'stem.bias': False, 'pool': schema.Map(class_token=True, heads=8)}


_PE_TOKENS: Options = {  # the versions of PE for language and for dense tasks
    **_pe(32), 'pool': schema.Mean(class_token=True), 'last_norm': LastNorm.NONE}


def _aimv2(width: int, heads: int, hidden: int) -> Options:  # arXiv 2411.14402
  return {**_sized(width, 24, heads), 'mlp': SwiGlu(hidden, bias=False), 'norm': schema.RmsNorm(1e-5),
          'stem.norm': True, 'attention.qkv_bias': QkvBias.NONE, 'attention.out_bias': False, 'pool': schema.Mean(),
          **_resized(PositionResize.BICUBIC)}


def _rope(*, is_mixed: bool, has_table: bool) -> Options:  # arXiv 2403.13298
  base = 10. if is_mixed else 100.
  positions = schema.Rotary(base, is_mixed)
  if has_table:
    positions = schema.LearnedRotary(base, is_mixed, resize=PositionResize.BICUBIC_ANTIALIAS)
  return {'gelu': Gelu.EXACT, 'block.layer_scale': 1e-5, 'positions': positions}


_HYBRIDS: dict[str, tuple[str, Options]] = {
    'R+Ti/16': ('Ti/32', {'stem': schema.ResNetStem(())}), 'R26+S/32': ('S/32', _R26), 'R26+B/32': ('B/32', _R26),
    'R50+B/16': ('B/16', _R50_SHORT), 'R50+B/32': ('B/32', _R50), 'R50+L/16': ('L/16', _R50_SHORT),
    'R50+L/32': ('L/32', _R50)}
"""Hybrids, named as their files are. R+Ti/16 is the root with patches of 8 on its map, so one token for 32 px."""

_PUBLISHED: dict[str, tuple[str, Options]] = {
    **_HYBRIDS, **{f'ViT-{name}': entry for name, entry in _HYBRIDS.items()},
    'LV-ViT-T/16': ('mu/16', {**_LV, **_sized(240, 12, 4), 'mlp.hidden': 720}),
    'LV-ViT-S/16': ('mu/16', {**_LV, **_sized(384, 16, 6), 'mlp.hidden': 1152, 'block.branch_scale': 1 / 2}),
    'LV-ViT-M/16': ('mu/16', {**_LV, **_sized(512, 20, 8), 'mlp.hidden': 1536, 'block.branch_scale': 1 / 2}),
    'LV-ViT-L/16': ('mu/16', {**_LV, **_sized(768, 24, 12), 'mlp.hidden': 2304, 'block.branch_scale': 1 / 3,
                              'stem': schema.ConvStem(width=128)}),
    **_named_by_size('DeiT-distilled', _DEIT, 'Ti/16', 'S/16', 'B/16'),
    **_named_by_size('ViT', _MAP, 'g/14', 'G/14', 'e/14'),
    **_named_by_size('SigLIP', _MAP, 'B/16', 'L/16', 'So400m/14'),
    **_named_by_size('SigLIP2', _MAP, 'g-opt/16'),
    # arXiv 2302.05442. It also leaves out bias and centering of LayerNorm.
    'ViT-22B/14': ('22B/14', {
        **_MAP, 'block': schema.Parallel(), 'attention.qk_norm': True, 'attention.qkv_bias': QkvBias.NONE}),
    **_named_by_size('DINOv2', _DINOV2, 'S/14', 'B/14', 'L/14'),
    'DINOv2-g/14': ('g-opt/14', _DINOV2_G),
    **_named_by_size('DINOv2-reg', {**_DINOV2, **_REG}, 'S/14', 'B/14', 'L/14'),
    'DINOv2-reg-g/14': ('g-opt/14', {**_DINOV2_G, **_REG}),
    **_named_by_size('DeiT-III', _DEIT3, 'S/16', 'B/16', 'L/16', 'H/14'),
    **_named_by_size('Axial-ViT', _AXIAL, 'B/16', 'B/32'),
    'DINOv3-S/16': ('S/16', _DINOV3), 'DINOv3-S+/16': ('S/16', {**_DINOV3, 'mlp': SwiGlu(1536)}),
    **_named_by_size('DINOv3', _DINOV3, 'B/16', 'L/16'),
    'DINOv3-H+/16': ('H/16', {**_DINOV3, 'heads': 20, 'mlp': SwiGlu(5120)}),
    'DINOv3-7B/16': ('H/16', {**_DINOV3, **_sized(4096, 40, 32), 'mlp': SwiGlu(8192),
                              'attention.qkv_bias': QkvBias.NONE}),
    **_named_by_size('CLIP', _OPENAI, 'B/32', 'B/16', 'L/14'),
    **_named_by_size('OpenCLIP', _CLIP, 'B/32', 'B/16', 'L/14', 'H/14', 'g/14'),
    'OpenCLIP-bigG/14': ('G/14', _CLIP),
    **_named_by_size('SigLIP2', _MAP, 'B/32', 'B/16', 'L/16', 'So400m/14', 'So400m/16'),
    'EVA02-Ti/14': ('Ti/14', _eva02(512)), 'EVA02-S/14': ('S/14', _eva02(1024)),
    'EVA02-B/14': ('B/14', _eva02(2048, has_norm=True)), 'EVA02-L/14': ('L/14', _eva02(2730, has_norm=True)),
    'EVA02-CLIP-B/16': ('B/16', _eva02_clip(2048)), 'EVA02-CLIP-L/14': ('L/14', _eva02_clip(2730)),
    'PE-Core-T/16': ('Ti/16', _pe()), 'PE-Core-S/16': ('S/16', _pe()),
    'PE-Core-B/16': ('B/16', _pe(14)), 'PE-Core-L/14': ('L/14', _pe()),
    'PE-Core-G/14': ('H/14', {**_pe(32, 0.), **_sized(1536, 50, 16), 'mlp.hidden': 8960,
                              'pool': schema.Map(heads=8, hidden=6144)}),
    'PE-Lang-L/14': ('L/14', {**_PE_TOKENS, 'depth': 23, 'block.layer_scale': .1}),
    'PE-Spatial-B/16': ('B/16', _PE_TOKENS), 'PE-Spatial-L/14': ('L/14', _PE_TOKENS),
    'AIMv2-L/14': ('L/14', _aimv2(1024, 8, 2816)), 'AIMv2-H/14': ('H/14', _aimv2(1536, 12, 4096)),
    'AIMv2-1B/14': ('H/14', _aimv2(2048, 16, 5632)), 'AIMv2-3B/14': ('H/14', _aimv2(3072, 24, 8192)),
    **_named_by_size('TIPSv2', _TIPSV2, 'B/14', 'L/14', 'So400m/14'),
    'TIPSv2-g/14': ('g-opt/14', {**_TIPSV2, **_sized(1536, 40, 24), 'mlp': SwiGlu(4096)}),
    **{f'RoPE-{kind}-{size}': (size, _rope(is_mixed='Mixed' in kind, has_table='APE' in kind))
       for size in ('S/16', 'B/16', 'L/16') for kind in ('ViT', 'Mixed', 'APE', 'Mixed-APE')},
    **_named_by_size('I-JEPA', _IJEPA, 'H/14', 'H/16', 'g/16'),
}
"""The published ViTs: the size and patch that `vit` knows, and the options that differ from a plain ViT, by name.

Sources: the papers named above, the config files that their authors publish beside the weights, and timm 1.0.31. What
is known about their weights is in `weights/families/`.
"""
PUBLISHED = tuple(_PUBLISHED)
"""Names that `published` knows."""

POSITION_ABLATION: dict[str, schema.Positions] = {
    'none': schema.NoPositions(),
    **{f'{name}-{at.value}': kind(at) for name, kind in (('1d', schema.Learned), ('2d', schema.Learned2d))
       for at in PositionsAt},
    'relative': schema.Relative(),
}
"""The cells of the ViT paper's Table 8 (Appendix D.4), which compares them on B/16."""


def vit(name: str) -> schema.ViT:
  """Returns the settings of a ViT by its name: `B/16`, `ViT-B/16`, with any patch side in pixels.

  Raises:
    UserError: lists the known sizes.
  """
  match = re.fullmatch(r'(?:ViT-)?(?P<size>[A-Za-z0-9-]+)[/_](?P<patch>\d+)', name)
  if not match or match['size'] not in VIT or int(match['patch']) < 1:
    raise UserError(f'model: expected SIZE/PATCH such as B/16, with SIZE one of {" ".join(VIT)} and PATCH in pixels, '
                    f'got {name!r}. Choose one of these sizes.')
  size = VIT[match['size']]
  return schema.ViT(patch=int(match['patch']), width=size.width, depth=size.depth, heads=size.heads,
                    mlp=schema.Mlp(size.mlp))


def resnet(name: str) -> schema.ResNet:
  """Returns the settings of a BiT by its name: `R50x1`, `R152x4`, with any width factor.

  Raises:
    UserError: lists the known depths.
  """
  match = re.fullmatch(r'(?P<depth>R\d+)x(?P<factor>\d+)', name)
  if not match or match['depth'] not in RESNET or int(match['factor']) < 1:
    raise UserError(f'model: expected BiT-DEPTHxFACTOR such as BiT-R50x1, with DEPTH one of {" ".join(RESNET)} and '
                    f'FACTOR that of the channels, got {name!r}. Choose one of these depths.')
  return schema.ResNet(layers=RESNET[match['depth']], width=64 * int(match['factor']))


def mixer(name: str) -> schema.Mixer:
  """Returns the settings of a Mixer by its name: `B/16`, with any patch side in pixels.

  Raises:
    UserError: lists the known sizes.
  """
  match = re.fullmatch(r'(?P<size>[A-Z])[/_](?P<patch>\d+)', name)
  if not match or match['size'] not in MIXER or int(match['patch']) < 1:
    raise UserError(f'model: expected Mixer-SIZE/PATCH such as Mixer-B/16, with SIZE one of {" ".join(MIXER)} and '
                    f'PATCH in pixels, got {name!r}. Choose one of these sizes.')
  width, depth, tokens_mlp, channels_mlp = MIXER[match['size']]
  return schema.Mixer(patch=int(match['patch']), width=width, depth=depth, tokens_mlp=tokens_mlp,
                      channels_mlp=channels_mlp)


def efficientnet(name: str) -> schema.EfficientNet:
  """Returns the settings of an EfficientNet by its name: `B0` to `B8`, `L2`.

  Raises:
    UserError: lists the known sizes.
  """
  width, depth, _, dropout = _efficientnet(name)
  return schema.EfficientNet(width_factor=width, depth_factor=depth, dropout=dropout, drop_path=DROP_PATH)


def efficientnet_px(name: str) -> int:
  """Returns the side of the images that an EfficientNet was designed for; errors as of `efficientnet`."""
  return _efficientnet(name)[2]


def _efficientnet(name: str) -> tuple[float, float, int, float]:
  if name not in EFFICIENTNET:
    raise UserError(f'model: expected EfficientNet-SIZE, with SIZE one of {" ".join(EFFICIENTNET)}, got {name!r}. '
                    'Choose one of these sizes.')
  return EFFICIENTNET[name]


def published(name: str) -> schema.ViT:
  """Returns the settings of a published model by its full name: a size with options, such as `DINOv2-reg-B/14`.

  Raises:
    UserError: suggests the nearest names, or lists all.
  """
  if name not in _PUBLISHED:
    near = globs.similar_names(name, PUBLISHED, most=3) or PUBLISHED
    raise UserError(f'model: expected a published model, got {name!r}. Did you mean {" or ".join(near)}?')
  size, options = _PUBLISHED[name]
  return copy.deepcopy(schema.replaced(vit(size), options))


def model(name: str) -> schema.Model:
  """Returns the settings of any model by its name.

  Examples are `B/16`, `R50+B/16`, `DINOv2-B/14`, `BiT-R50x1`, `Mixer-B/16` and `EfficientNet-B0`.

  Raises:
    UserError: lists the known sizes, or those of the kind that the name begins with.
  """
  kind, _, size = name.partition('-')
  match kind.lower():
    case 'bit':
      return resnet(size)
    case 'mixer':
      return mixer(size)
    case 'efficientnet':
      return efficientnet(size)
    case 'axial' if name in AXIAL_RESNET:
      layers, width = AXIAL_RESNET[name]
      return schema.AxialResNet(layers=layers, width=width)
    case _:
      return published(name) if name in _PUBLISHED else vit(name)


def names() -> tuple[str, ...]:
  """Returns the names that `model` knows, with the patch sides and width factors of papers and public weights."""
  mixers = [f'Mixer-{size}/{patch}' for size, patches in MIXER_PATCHES.items() for patch in patches]
  return (*(f'{size}/{patch}' for size, patches in PATCHES.items() for patch in patches),
          *(name for name in PUBLISHED if name.removeprefix('ViT-') not in _HYBRIDS or name in _HYBRIDS),
          *(f'BiT-{name}' for name in BITS), *mixers, *(f'EfficientNet-{name}' for name in EFFICIENTNET), *AXIAL_RESNET)


def pretraining_head(model: schema.Model) -> int:
  """Returns the width of the hidden tanh layer in the ViT paper's head of pre-training; 0 = linear head.

  It is the width of the model with a class token (section 3.1). The head is linear after mean pooling (Appendix D.3),
  after attention pooling (Scaling ViT), and for networks without tokens.
  """
  return model.width if isinstance(model, schema.ViT) and isinstance(model.pool, schema.ClassToken) else 0


SMALL_PX = 32
SMALL = ('ViT', 'hybrid', 'BiT')
"""Small networks for images of 32 px. A forward pass of each has 21 to 22 MFLOP of products, within 5 %."""


def small(name: str, factor: int = 2) -> schema.Model:
  """Returns the settings of one of `SMALL`, for studies on a few processor cores.

  Args:
    name: of the family.
    factor: scales the width of a ViT or hybrid. BiT has one width, as its norms need multiples of 32 channels.
  """
  vit_4 = schema.ViT(patch=4, width=32 * factor, depth=4, heads=2 * factor, mlp=schema.Mlp(64 * factor),
                     pool=schema.Mean())
  match name:
    case 'ViT':
      return vit_4
    case 'hybrid':
      return dataclasses.replace(vit_4, depth=3, stem=schema.ResNetStem((1,), width=32))  # a map of 8 x 8
    case 'BiT':
      return schema.ResNet(layers=(2, 3, 2), width=32)
    case _:
      raise UserError(f'model: expected one of {", ".join(SMALL)}, got {name!r}. Choose one of these.')
