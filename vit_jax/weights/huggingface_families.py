"""The config files of transformers for CLIP, SigLIP, DINOv3, AIMv2, I-JEPA and TIPSv2."""
from __future__ import annotations

from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Norm, Pool, PositionResize, Positions, RotaryPlaces

ACTIVATION = {Gelu.EXACT: 'gelu', Gelu.TANH: 'gelu_pytorch_tanh', Gelu.QUICK: 'quick_gelu'}
KINDS = {'clip_vision_model': 'CLIPVisionModel', 'siglip_vision_model': 'SiglipVisionModel',
         'dinov3_vit': 'DINOv3ViTModel', 'aimv2_vision_model': 'Aimv2VisionModel', 'ijepa': 'IJepaModel',
         'tipsv2_vision_model': 'Tipsv2VisionModel'}
"""The `model_type` of a network, and the class that loads it."""


def kind(m: schema.ViT, *, has_head: bool, is_projection: bool) -> str:
  """Returns the `model_type` among `KINDS` that computes what this network does; '' if none does.

  Args:
    m: settings of the network.
    has_head: whether it has a head.
    is_projection: whether this head has no bias.
  """
  plain = schema.ViT(patch=m.patch, width=m.width, depth=m.depth, heads=m.heads, mlp=m.mlp)
  changed = {name for name in ('norm', 'norm_before', 'stem_norm', 'final_norm', 'attn_norm', 'mlp_norm', 'stem_bias',
                               'key_bias', 'out_bias', 'mlp_bias', 'qkv_bias', 'qk_norm', 'swiglu', 'registers', 'pool',
                               'positions', 'distilled', 'parallel', 'axial', 'branch_scale', 'norm_after_pool',
                               'pool_heads', 'pool_mlp', 'stem') if getattr(m, name) != getattr(plain, name)}
  changed |= {'layer_scale'} if m.layer_scale else set()
  if changed == {'norm_before', 'stem_bias'} and (is_projection or not has_head):
    return 'clip_vision_model'
  if has_head:
    return ''
  if changed == {'pool'}:
    return {Pool.MAP: 'siglip_vision_model', Pool.MEAN: 'ijepa'}.get(m.pool, '')
  if m.rotary_places is RotaryPlaces.UNIT and {'positions', 'layer_scale', 'registers'} <= changed <= {
      'positions', 'layer_scale', 'registers', 'key_bias', 'qkv_bias', 'swiglu', 'mlp_bias', 'out_bias'}:
    return 'dinov3_vit'
  is_aim = m.norm is Norm.RMS and m.pool is Pool.MEAN and m.positions in (Positions.LEARNED, Positions.SINCOS2D_MAE)
  if is_aim and {'norm', 'stem_norm', 'swiglu', 'pool'} <= changed <= {
      'norm', 'stem_norm', 'swiglu', 'pool', 'positions', 'qkv_bias', 'out_bias', 'mlp_bias'} and (
          m.qkv_bias == m.out_bias):
    return 'aimv2_vision_model'
  is_tips = m.position_resize is PositionResize.BILINEAR_ANTIALIAS and m.registers == 1
  return 'tipsv2_vision_model' if is_tips and changed <= {'layer_scale', 'registers', 'swiglu'} else ''


def config(m: schema.ViT, kind: str, *, image_size: int | list[int], projection: int) -> dict[str, Any]:
  """Returns the content of `config.json`; `projection` is the width of the head, 0 without one."""
  name = KINDS[kind] + ('WithProjection' if projection else '')
  found: dict[str, Any] = {
      'architectures': [name], 'model_type': kind, 'hidden_size': m.width, 'num_hidden_layers': m.depth,
      'num_attention_heads': m.heads, 'hidden_act': 'silu' if m.swiglu else ACTIVATION[m.gelu], 'patch_size': m.patch,
      'num_channels': 3, 'image_size': image_size, 'dtype': 'float32', 'position_resize': m.position_resize.value}
  found |= {'rms_norm_eps': m.norm_eps} if kind == 'aimv2_vision_model' else {'layer_norm_eps': m.norm_eps}
  found |= {'projection_dim': projection} if projection else {}
  match kind:
    case 'dinov3_vit':
      found |= {'intermediate_size': m.mlp, 'use_gated_mlp': m.swiglu, 'num_register_tokens': m.registers,
                'layerscale_value': m.layer_scale, 'rope_theta': m.rotary_base, 'query_bias': m.qkv_bias,
                'key_bias': m.qkv_bias and m.key_bias, 'value_bias': m.qkv_bias, 'proj_bias': m.out_bias,
                'mlp_bias': m.mlp_bias}
    case 'aimv2_vision_model':
      found |= {'intermediate_size': m.mlp, 'qkv_bias': m.qkv_bias, 'mlp_bias': m.mlp_bias, 'use_head': False,
                'is_native': m.positions is Positions.SINCOS2D_MAE}
    case 'tipsv2_vision_model':
      found |= {'mlp_ratio': 4 if m.swiglu else m.mlp / m.width, 'use_swiglu_ffn': m.swiglu,
                'num_register_tokens': m.registers, 'layerscale_value': m.layer_scale}
    case _:
      found['intermediate_size'] = m.mlp
  return found
