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
from vit_jax.weights.families import flax, record, selfsup, timm
from vit_jax.weights.families.record import Changed, Family, Files, Kind, License, Published, Tensors
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
  """Returns the tensors with the second class token as a register, and with the positions as rows. Raises UserError if
  class tokens or positions are missing, or do not have the shape that these files have."""
  cls = _checked(tensors, _CLS, (1, 2, 0))
  table = _checked(tensors, _POSITIONS, (1, 0, 0, 0))
  changed = {**tensors, _CLS: cls[:, :1], _REGISTERS: cls[:, 1:], _POSITIONS: table.reshape(1, -1, table.shape[-1])}
  return Changed(changed, (Line(_CLS, 'folded', 'the second class token is a register here'),))


def _hints(tensors: Tensors) -> Hints:
  """Returns Flax's defaults, and the image size; the PyTorch program of the authors has the exact GELU."""
  table, kernel = _checked(tensors, _POSITIONS, (1, 0, 0, 0)), _checked(tensors, _KERNEL, (0, 0, 3, 0))
  return flax.HINTS._replace(image_px=(table.shape[1] * kernel.shape[0], table.shape[2] * kernel.shape[0]))


def _checked(tensors: Tensors, name: str, shape: tuple[int, ...]) -> HostArray:
  """Returns a tensor. Raises UserError if it is missing or has another shape; 0 stands for any length."""
  tensor = tensors.get(name)
  if tensor is not None and tensor.ndim == len(shape) and all(
      expected in (0, length) for length, expected in zip(tensor.shape, shape, strict=True)):
    return tensor
  wanted = ', '.join(str(length or 'any') for length in shape)
  raise UserError(f'{name}: expected an array [{wanted}], got {"none" if tensor is None else list(tensor.shape)}. Use '
                  'a file as the authors of TIPS published it.')


def _is_tipsv2_vision(m: schema.ViT, weights: Weights, differing: frozenset[str]) -> bool:
  """Whether the TIPSv2 of transformers computes this ViT, which has one register and no head."""
  resizes_alike = getattr(m.positions, 'resize', None) is PositionResize.BILINEAR_ANTIALIAS
  return (not weights.num_classes and m.registers == 1 and resizes_alike
          and differing <= {'block.layer_scale', 'registers', 'mlp'})


def _config(m: schema.ViT, _: Weights) -> dict[str, Any]:
  is_gated = isinstance(m.mlp, schema.SwiGlu)
  return {'layer_norm_eps': m.norm.eps, 'mlp_ratio': selfsup.mlp_ratio(m) if is_gated else m.mlp.hidden / m.width,
          'use_swiglu_ffn': is_gated, 'num_register_tokens': m.registers, 'layerscale_value': layer_scale(m)}


def _finish(tensors: Tensors, weights: Weights) -> Tensors:
  """Returns the tensors with the names that attention has in transformers 5, and with the mask token."""
  return selfsup.with_mask_token(record.renamed(
      tensors, *((rf'\.attention\.attention\.{name}\.', f'.attention.{name[0]}_proj.')
                 for name in ('query', 'key', 'value')),
      (r'\.attention\.output\.dense\.', '.attention.o_proj.')), weights)


def _has_one_register(tensors: Tensors) -> bool:
  """Whether these are a ViT under the names of the authors of DINOv2, with one register."""
  return {'patch_embed.proj.weight', 'register_tokens'} <= tensors.keys() and (
      tensors['register_tokens'].shape[1:2] == (1,))


_DEFAULTS = {'num_attention_heads': 0, 'image_size': 448, 'layer_norm_eps': 1e-6,
             'position_resize': 'bilinear_antialias'}
TIPS = Family(
    'tips', 'TIPS, TIPSv2', '`.npz` and `.pth` of the authors; transformers; timm',
    files=(Files('file', lambda t: any(name.startswith(f'{_TOKENS}/') for name in t),
                 lambda t: SWIGLU if any('/FFNSwiGluFused_0/' in name for name in t) else MLP, _hints, change=_change,
                 first_rows=(NONE,)),
           timm.vit(_has_one_register, label='tips')),
    kinds=(Kind('tipsv2_vision_model', ('Tipsv2VisionModel', ''), _is_tipsv2_vision, selfsup.dinov2_table, _config,
                _finish),),
    images={**NORMS['zero_one'], **PILLOW, 'interpolation': Interpolation.BILINEAR, 'resize': 0},
    position_resize=PositionResize.BILINEAR_ANTIALIAS,
    config_defaults={'tipsv2': _DEFAULTS, 'tipsv2_vision_model': _DEFAULTS},
    licenses=(License(r'(google/tipsv2-|timm/vit_\w+_tipsv2).*', 'CC-BY-4.0'),),
    addresses={f'tips_v2_{size}_vision': f'gs://tips_data/v2_0/checkpoints/scenic/tips_v2_{size}_vision.npz'
               for size in ('b14', 'l14', 'so14', 'g14')},
    published=(Published(r'tips_v2_([a-z]+)14_vision', 'TIPSv2-{0}/14', 448, 'image and text', 0, 'arXiv 2604.12012',
                         'CC-BY-4.0'),))
