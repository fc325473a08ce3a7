"""Model sizes by their published names: the one indirection of the recipes.

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
from vit_jax.config.schema import Gelu, PositionResize, PositionsAt, QkvBias, SwiGlu
from vit_jax.core import globs
from vit_jax.core.errors import UserError
from vit_jax.recipes import families


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


def _at(resize: PositionResize) -> dict[str, Any]:
  """Positions that are resized in this way."""
  return {'positions.resize': resize}


_DINOV2: dict[str, Any] = {  # arXiv 2304.07193, and its code
    'block.layer_scale': 1e-5, 'gelu': Gelu.EXACT, **_at(PositionResize.BICUBIC_OFFSET)}
_DINOV2_G: dict[str, Any] = {**_DINOV2, 'heads': 24, 'mlp': SwiGlu(swiglu_hidden(1536))}
_REG: dict[str, Any] = {'registers': 4, **_at(PositionResize.BICUBIC_ANTIALIAS)}  # arXiv 2309.16588
_DEIT3: dict[str, Any] = {  # arXiv 2204.07118; here positions have a class row
    'block.layer_scale': 1e-4, 'gelu': Gelu.EXACT, **_at(PositionResize.BICUBIC)}
_MAP: dict[str, Any] = {'pool': schema.Map()}
# ViT paper, Appendix D.6, which does not say how it pools
_AXIAL: dict[str, Any] = {'block': schema.Axial(), 'pool': schema.Mean()}

_R50: dict[str, Any] = {'stem': schema.ResNetStem((3, 4, 6, 3))}
_R26: dict[str, Any] = {'stem': schema.ResNetStem((2, 2, 2, 2))}
_R50_SHORT: dict[str, Any] = {'stem': schema.ResNetStem((3, 4, 9))}  # the last stage's units in the one before it
_LV: dict[str, Any] = {  # arXiv 2104.10858, Tables 1 and 2, and its code
    'gelu': Gelu.EXACT, 'norm.eps': 1e-5, 'attention.qkv_bias': QkvBias.NONE, 'stem': schema.ConvStem(),
    **_at(PositionResize.BICUBIC)}
_DEIT: dict[str, Any] = {  # arXiv 2012.12877
    'gelu': Gelu.EXACT, 'pool.distillation': True, **_at(PositionResize.BICUBIC)}

# Hybrids are named as their files are. R+Ti/16 is the root with patches of 8 on its map, so one token for 32 px.
_HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    'R+Ti/16': ('Ti/32', {'stem': schema.ResNetStem(())}), 'R26+S/32': ('S/32', _R26), 'R26+B/32': ('B/32', _R26),
    'R50+B/16': ('B/16', _R50_SHORT), 'R50+B/32': ('B/32', _R50), 'R50+L/16': ('L/16', _R50_SHORT),
    'R50+L/32': ('L/32', _R50)}

_PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    **_HYBRIDS, **{f'ViT-{name}': found for name, found in _HYBRIDS.items()},
    'LV-ViT-T/16': ('mu/16', {**_LV, 'width': 240, 'depth': 12, 'heads': 4, 'mlp.hidden': 720}),
    'LV-ViT-S/16': ('mu/16', {**_LV, 'width': 384, 'depth': 16, 'heads': 6, 'mlp.hidden': 1152,
                              'block.branch_scale': 1 / 2}),
    'LV-ViT-M/16': ('mu/16', {**_LV, 'width': 512, 'depth': 20, 'heads': 8, 'mlp.hidden': 1536,
                              'block.branch_scale': 1 / 2}),
    'LV-ViT-L/16': ('mu/16', {**_LV, 'width': 768, 'depth': 24, 'heads': 12, 'mlp.hidden': 2304,
                              'block.branch_scale': 1 / 3,
                              'stem': schema.ConvStem(width=128)}),
    'DeiT-distilled-Ti/16': ('Ti/16', _DEIT), 'DeiT-distilled-S/16': ('S/16', _DEIT),
    'DeiT-distilled-B/16': ('B/16', _DEIT),
    'ViT-g/14': ('g/14', _MAP), 'ViT-G/14': ('G/14', _MAP), 'ViT-e/14': ('e/14', _MAP),
    'SigLIP-B/16': ('B/16', _MAP), 'SigLIP-L/16': ('L/16', _MAP), 'SigLIP-So400m/14': ('So400m/14', _MAP),
    'SigLIP2-g-opt/16': ('g-opt/16', _MAP),
    # arXiv 2302.05442. It also leaves out bias and centering of LayerNorm.
    'ViT-22B/14': ('22B/14', {
        **_MAP, 'block': schema.Parallel(), 'attention.qk_norm': True, 'attention.qkv_bias': QkvBias.NONE}),
    'DINOv2-S/14': ('S/14', _DINOV2), 'DINOv2-B/14': ('B/14', _DINOV2), 'DINOv2-L/14': ('L/14', _DINOV2),
    'DINOv2-g/14': ('g-opt/14', _DINOV2_G),
    'DINOv2-reg-S/14': ('S/14', {**_DINOV2, **_REG}), 'DINOv2-reg-B/14': ('B/14', {**_DINOV2, **_REG}),
    'DINOv2-reg-L/14': ('L/14', {**_DINOV2, **_REG}), 'DINOv2-reg-g/14': ('g-opt/14', {**_DINOV2_G, **_REG}),
    'DeiT-III-S/16': ('S/16', _DEIT3), 'DeiT-III-B/16': ('B/16', _DEIT3), 'DeiT-III-L/16': ('L/16', _DEIT3),
    'DeiT-III-H/14': ('H/14', _DEIT3),
    'Axial-ViT-B/16': ('B/16', _AXIAL), 'Axial-ViT-B/32': ('B/32', _AXIAL),
    **families.PUBLISHED,
}
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
  found = re.fullmatch(r'(?:ViT-)?([A-Za-z0-9-]+)[/_](\d+)', name)
  if not found or found[1] not in VIT or int(found[2]) < 1:
    raise UserError(f'model: expected SIZE/PATCH such as B/16, with SIZE one of {" ".join(VIT)} and PATCH in pixels, '
                    f'got {name!r}. Choose one of these sizes.')
  size = VIT[found[1]]
  return schema.ViT(patch=int(found[2]), width=size.width, depth=size.depth, heads=size.heads,
                    mlp=schema.Mlp(size.mlp))


def resnet(name: str) -> schema.ResNet:
  """Returns the settings of a BiT by its name: `R50x1`, `R152x4`, with any width factor.

  Raises:
    UserError: lists the known depths.
  """
  found = re.fullmatch(r'(R\d+)x(\d+)', name)
  if not found or found[1] not in RESNET or int(found[2]) < 1:
    raise UserError(f'model: expected BiT-DEPTHxFACTOR such as BiT-R50x1, with DEPTH one of {" ".join(RESNET)} and '
                    f'FACTOR that of the channels, got {name!r}. Choose one of these depths.')
  return schema.ResNet(layers=RESNET[found[1]], width=64 * int(found[2]))


def mixer(name: str) -> schema.Mixer:
  """Returns the settings of a Mixer by its name: `B/16`, with any patch side in pixels.

  Raises:
    UserError: lists the known sizes.
  """
  found = re.fullmatch(r'([A-Z])[/_](\d+)', name)
  if not found or found[1] not in MIXER or int(found[2]) < 1:
    raise UserError(f'model: expected Mixer-SIZE/PATCH such as Mixer-B/16, with SIZE one of {" ".join(MIXER)} and '
                    f'PATCH in pixels, got {name!r}. Choose one of these sizes.')
  width, depth, tokens_mlp, channels_mlp = MIXER[found[1]]
  return schema.Mixer(patch=int(found[2]), width=width, depth=depth, tokens_mlp=tokens_mlp, channels_mlp=channels_mlp)


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
