"""TIPS and TIPSv2: `.npz` of the authors' JAX program, which is built on scenic, and files of transformers.

The file has the parameters of the program's class VisionEncoder, by their paths. Its layer scale is folded into the
matrices, and it has two class tokens as one tensor: the first one is the class token here, the second one a register,
as in the PyTorch files of the same networks. Positions are those of the patches alone.
"""
from __future__ import annotations

from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import Interpolation, PositionResize
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.weights.families import dinov2, flax, timm
from vit_jax.weights.families.record import Changed, Family, Files, Kind, License, Published, Tensors, renamed
from vit_jax.weights.grids import NONE
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Line, Weights, layer_scale
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import Table, table

_TOKENS = 'encoder/ToTokenSequence_0'
_CLS, _REGISTERS, _POSITIONS = f'{_TOKENS}/cls', f'{_TOKENS}/registers', f'{_TOKENS}/posembed_input'
_KERNEL = f'{_TOKENS}/embedding/kernel'
_COMMON = table("""
    backbone/stem | encoder/ToTokenSequence_0/embedding | flax
    backbone/{cls,registers,positions} | encoder/ToTokenSequence_0/{cls,registers,posembed_input} | same
    backbone/blocks/{norm1,norm2} | encoder/transformer/encoderblock_{i}/{LayerNorm_0,LayerNorm_1} | flax norm
    backbone/blocks/attn/{query,key,value,out} |
        encoder/transformer/encoderblock_{i}/MultiHeadDotProductAttention_0/{query,key,value,out} | flax
    backbone/norm | encoder/encoder_norm | flax norm
""")
MLP: Table = (*_COMMON, *table("""
    backbone/blocks/mlp/{up,down} | encoder/transformer/encoderblock_{i}/MlpBlock_0/{Dense_0,Dense_1} | flax
"""))
SWIGLU: Table = (*_COMMON, *table("""
    backbone/blocks/mlp/{gate,up,down} |
        encoder/transformer/encoderblock_{i}/FFNSwiGluFused_0/{Dense_0,Dense_1,Dense_2} | flax
"""))
"""The names of TIPS-g: the swish is that of the first layer."""


def _change(tensors: Tensors) -> Changed:
  """Returns the tensors with the second class token as a register, and with the positions as rows.

  Raises:
    UserError: class tokens or positions are missing, or do not have the shape that these files have.
  """
  cls = _checked(tensors, _CLS, (1, 2, 0))
  table = _checked(tensors, _POSITIONS, (1, 0, 0, 0))
  found = {**tensors, _CLS: cls[:, :1], _REGISTERS: cls[:, 1:], _POSITIONS: table.reshape(1, -1, table.shape[-1])}
  return found, (Line(_CLS, 'folded', 'the second class token is a register here'),)


def _hints(tensors: Tensors) -> Hints:
  """Returns Flax's defaults, and the image size; the PyTorch program of the authors has the exact GELU."""
  table, kernel = _checked(tensors, _POSITIONS, (1, 0, 0, 0)), _checked(tensors, _KERNEL, (0, 0, 3, 0))
  return flax.HINTS._replace(image_px=(table.shape[1] * kernel.shape[0], table.shape[2] * kernel.shape[0]))


def _checked(tensors: Tensors, name: str, shape: tuple[int, ...]) -> HostArray:
  """Returns a tensor. Raises UserError if it is missing or has another shape; 0 stands for any length."""
  found = tensors[name].shape if name in tensors else None
  if found is None or len(found) != len(shape) or any(n not in (0, own) for own, n in zip(found, shape, strict=True)):
    wanted = ', '.join(str(n or 'any') for n in shape)
    raise UserError(f'{name}: expected an array [{wanted}], got {"none" if found is None else list(found)}. Use a file '
                    'as the authors of TIPS published it.')
  return tensors[name]


def _holds(m: schema.ViT, weights: Weights, changed: frozenset[str]) -> bool:
  return not weights.num_classes and m.registers == 1 and changed <= {'block.layer_scale', 'registers', 'mlp'} and (
      getattr(m.positions, 'resize', None) is PositionResize.BILINEAR_ANTIALIAS)


def _config(m: schema.ViT, _: Weights) -> dict[str, Any]:
  is_gated = isinstance(m.mlp, schema.SwiGlu)
  return {'layer_norm_eps': m.norm.eps, 'mlp_ratio': dinov2.mlp_ratio(m) if is_gated else m.mlp.hidden / m.width,
          'use_swiglu_ffn': is_gated, 'num_register_tokens': m.registers, 'layerscale_value': layer_scale(m)}


def _finish(tensors: Tensors, weights: Weights) -> Tensors:
  return dinov2.with_mask_token(renamed(
      tensors, *((rf'\.attention\.attention\.{name}\.', f'.attention.{name[0]}_proj.')
                 for name in ('query', 'key', 'value')),
      (r'\.attention\.output\.dense\.', '.attention.o_proj.')), weights)


_DEFAULTS = {'num_attention_heads': 0, 'image_size': 448, 'layer_norm_eps': 1e-6,
             'position_resize': 'bilinear_antialias'}
FAMILY = Family(
    'tips', 'TIPS, TIPSv2', '`.npz` and `.pth` of the authors; transformers; timm',
    files=(Files('file', lambda t: any(name.startswith(f'{_TOKENS}/') for name in t),
                 lambda t: SWIGLU if any('/FFNSwiGluFused_0/' in name for name in t) else MLP, _hints, change=_change,
                 first=(NONE,)),
           timm.vit(lambda t: 'patch_embed.proj.weight' in t and 'register_tokens' in t and (
               t['register_tokens'].shape[1:2] == (1,)), label='tips')),
    kinds=(Kind('tipsv2_vision_model', ('Tipsv2VisionModel', ''), _holds, dinov2.table, _config, _finish),),
    images={**NORMS['zero_one'], **PILLOW, 'interpolation': Interpolation.BILINEAR, 'resize': 0},
    position_resize=PositionResize.BILINEAR_ANTIALIAS,
    config_defaults={'tipsv2': _DEFAULTS, 'tipsv2_vision_model': _DEFAULTS},
    licenses=(License(r'(google/tipsv2-|timm/vit_\w+_tipsv2).*', 'CC-BY-4.0'),),
    addresses={f'tips_v2_{size}_vision': f'gs://tips_data/v2_0/checkpoints/scenic/tips_v2_{size}_vision.npz'
               for size in ('b14', 'l14', 'so14', 'g14')},
    published=(Published(r'tips_v2_([a-z]+)14_vision', 'TIPSv2-{0}/14', 448, 'image and text', 0, 'arXiv 2604.12012',
                         'CC-BY-4.0'),))
