"""Self-supervised ViTs: DINO, DINOv2 with and without registers, DINOv3, MoCo v3, I-JEPA and MAE."""
from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Interpolation, Mean, PositionResize, QkvBias, UnitInterval
from vit_jax.core.errors import UserError
from vit_jax.weights.families import record, timm, transformers
from vit_jax.weights.families.record import Changed, Family, Files, Kind, License, Published, Tensors
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Line, Weights, layer_scale
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import Table, table

_DOWNLOADS = 'https://dl.fbaipublicfiles.com'
DINO = Family(
    'dino', 'DINO', '`.pth` of the authors',
    files=(timm.vit(lambda t: 'patch_embed.proj.weight' in t and any(name.startswith('head.last_layer') for name in t),
                    label='dino'),),
    images={**NORMS['imagenet'], **PILLOW, 'resize': .875}, position_resize=PositionResize.BICUBIC_OFFSET,
    addresses={f'{name}_pretrain': f'{_DOWNLOADS}/dino/{name}_pretrain/{name}_pretrain.pth'
               for name in ('dino_deitsmall16', 'dino_deitsmall8', 'dino_vitbase16', 'dino_vitbase8')},
    published=(Published(r'dino_(?:deit|vit)([a-z]+?)(\d+)_pretrain', '{0}/{1}', 224, 'ImageNet-1k', 0,
                         'arXiv 2104.14294'),))

# DINOv2

def _is_dinov2(tensors: Tensors) -> bool:
  if 'patch_embed.proj.weight' not in tensors:
    return False
  return 'register_tokens' in tensors or {'mask_token', 'blocks.0.ls1.gamma'} <= tensors.keys()


def _dinov2_change(tensors: Tensors) -> Changed:
  """Returns the tensors of transformers without a head that no network here has, and with the gate as it saves it."""
  dropped: tuple[Line, ...] = ()
  width = tensors['embeddings.patch_embeddings.projection.weight'].shape[:1]
  if 'classifier.weight' in tensors and width and tensors['classifier.weight'].shape[-1:] == (2 * width[0],):
    tensors, dropped = record.dropping(tensors, {
        r'classifier\..*': 'this head reads class token and mean patch side by side; no head here does'})
  return Changed(_with_joined_gates(transformers.with_older_names(tensors)), dropped)


def _with_joined_gates(tensors: Tensors) -> Tensors:
  """Returns the tensors with gate and value of each SwiGLU MLP joined."""
  joined = {}
  for name, tensor in tensors.items():
    up = tensors.get(name.replace('gate_proj', 'up_proj'))
    if '.mlp.gate_proj.' in name and up is not None:
      if up.shape != tensor.shape or not up.ndim:
        raise UserError(f'{name} has the shape {list(tensor.shape)}, its up_proj {list(up.shape)}')
      joined[name.replace('gate_proj', 'weights_in')] = np.concatenate([tensor, up])
    elif '.mlp.up_proj.' not in name:
      joined[name.replace('.mlp.down_proj.', '.mlp.weights_out.')] = tensor
  return joined


def dinov2_table(model: schema.ViT) -> Table:
  """Returns the names of transformers for this network."""
  return transformers.DINO_SWIGLU if isinstance(model.mlp, schema.SwiGlu) else transformers.DINO


def with_mask_token(tensors: Tensors, _: Weights) -> Tensors:
  """Returns the tensors with the mask token that the classes of transformers expect, as zeros."""
  width = tensors['embeddings.cls_token'].shape[-1]
  return tensors | {'embeddings.mask_token': np.zeros((1, width), np.float32)}


def mlp_ratio(m: schema.ViT) -> int:
  """Returns the setting from which transformers computes the size of an MLP; raises UserError if there is none."""
  is_gated = isinstance(m.mlp, schema.SwiGlu)
  ratio = round((1.5 if is_gated else 1.) * m.mlp.hidden / m.width)
  hidden = (ratio * m.width * 2 // 3 + 7) // 8 * 8 if is_gated else ratio * m.width  # as its Dinov2SwiGLUFFN
  if hidden != m.mlp.hidden:
    raise UserError(f'--family: expected an MLP whose size a whole mlp_ratio states, got {m.mlp.hidden} for '
                    f'the width {m.width}. Set --family=timm or --family=run.')
  return ratio


def _dinov2_config(m: schema.ViT, weights: Weights) -> dict[str, Any]:
  registers = {'num_register_tokens': m.registers} if m.registers else {}
  return {**transformers.older_config(m, weights), 'mlp_ratio': mlp_ratio(m),
          'use_swiglu_ffn': isinstance(m.mlp, schema.SwiGlu), 'layerscale_value': layer_scale(m), **registers}


def _dinov2_kind(model_type: str, loaded_by: str, *, has_registers: bool) -> Kind:
  required = {'block.layer_scale', 'registers'} if has_registers else {'block.layer_scale'}

  def holds(m: schema.ViT, weights: Weights, differing: frozenset[str]) -> bool:
    return {'block.layer_scale', 'registers'} & differing == required and not transformers.obstacles(m, weights)

  return Kind(model_type, (loaded_by, loaded_by), holds, dinov2_table, _dinov2_config, with_mask_token)


DINOV2 = Family(
    'dinov2', 'DINOv2', '`.pth` of the authors, with and without registers, and of their training; transformers; timm',
    files=(Files('transformers', lambda t: transformers.is_older(t, has_scales=True),
                 lambda t: transformers.DINO_SWIGLU if any('.mlp.weights_in.' in name for name in t) else
                 transformers.DINO, transformers.HINTS._replace(norm_eps=1e-6), change=_dinov2_change),
           timm.vit(_is_dinov2, label='dinov2')),
    kinds=(_dinov2_kind('dinov2_with_registers', 'Dinov2WithRegistersModel', has_registers=True),
           _dinov2_kind('dinov2', 'Dinov2Model', has_registers=False)),
    timm_drops={r'(dino|ibot)_head\..*': 'the projection head of self-supervision'},
    images={**NORMS['imagenet'], **PILLOW, 'resize': 1.}, position_resize=PositionResize.BICUBIC_OFFSET,
    licenses=(License(r'facebook/dinov2.*|timm/vit_\w+_dinov2.*', 'Apache-2.0'),),
    addresses={f'dinov2_{size}{kind}': f'{_DOWNLOADS}/dinov2/dinov2_{size}/dinov2_{size}{kind}_pretrain.pth'
               for size in ('vits14', 'vitb14', 'vitl14', 'vitg14') for kind in ('', '_reg4')},
    published=(Published(r'dinov2_vit([a-z])14', 'DINOv2-{0}/14', 518, 'LVD-142M', 0, 'arXiv 2304.07193'),
               Published(r'dinov2_vit([a-z])14_reg4', 'DINOv2-reg-{0}/14', 518, 'LVD-142M', 0, 'arXiv 2309.16588')))

# DINOv3

DINOV3_NAMES = table("""
    backbone/{cls,registers} | embeddings.{cls_token,register_tokens} | same
    backbone/stem | embeddings.patch_embeddings | conv
    backbone/blocks/attn/{query,key,value,out} | layer.{i}.attention.{q,k,v,o}_proj | dense
    backbone/blocks/{norm1,norm2} | layer.{i}.{norm1,norm2} | norm
    backbone/blocks/mlp/{gate,up,down} | layer.{i}.mlp.{gate,up,down}_proj | dense
    backbone/blocks/{scale1,scale2} | layer.{i}.{layer_scale1,layer_scale2}.lambda1 | same
    backbone/norm | norm | norm
""")
"""The names of transformers."""
_DINOV3_HINTS = Hints(gelu=Gelu.EXACT, norm_eps=1e-5, settings={
    'positions.base': 100., 'positions.coordinates': UnitInterval()})


def _dinov3_to_timm(tensors: Tensors) -> Changed:
  """Renames registers and gates of the authors; drops the bias of the keys, which the authors hide by a mask."""
  tensors = record.renamed(tensors, (r'^storage_tokens$', 'reg_token'))
  changed: Tensors = {}
  lines = []
  for name, x in tensors.items():
    mask = f'{name}_mask'
    if name.endswith('.attn.qkv.bias') and mask in tensors and x.ndim and len(x) % 3 == 0:
      query, _, value = np.split(x, 3)
      changed |= {name.replace('qkv.bias', 'q_bias'): query, name.replace('qkv.bias', 'v_bias'): value}
      lines.append(Line(mask, 'dropped', 'it hides the bias of the keys, which the network does not have'))
    elif not name.endswith('.attn.qkv.bias_mask'):
      changed[name] = x
  return Changed(changed, tuple(lines))


def _dinov3_config(m: schema.ViT, _: Weights) -> dict[str, Any]:
  bias = m.attention.qkv_bias
  return {'layer_norm_eps': m.norm.eps, 'intermediate_size': m.mlp.hidden,
          'use_gated_mlp': isinstance(m.mlp, schema.SwiGlu), 'num_register_tokens': m.registers,
          'layerscale_value': layer_scale(m), 'rope_theta': getattr(m.positions, 'base', 0.),
          'query_bias': bias is not QkvBias.NONE, 'key_bias': bias is QkvBias.ALL,
          'value_bias': bias is not QkvBias.NONE, 'proj_bias': m.attention.out_bias, 'mlp_bias': m.mlp.bias}


def _is_dinov3_vit(m: schema.ViT, weights: Weights, differing: frozenset[str]) -> bool:
  """Whether the DINOv3 of transformers computes this ViT, which has no head."""
  required = {'positions', 'block.layer_scale', 'registers'}
  allowed = required | {'attention.qkv_bias', 'mlp', 'mlp.bias', 'attention.out_bias'}
  has_interval = isinstance(getattr(m.positions, 'coordinates', None), UnitInterval)
  return not weights.num_classes and has_interval and required <= differing <= allowed


def _finish_dinov3(tensors: Tensors, _: Weights) -> Tensors:
  width = tensors['embeddings.cls_token'].shape[-1]
  return tensors | {'embeddings.mask_token': np.zeros((1, 1, width), np.float32)}


DINOV3 = Family(
    'dinov3', 'DINOv3', 'files of the authors; transformers; timm',
    files=(Files('transformers', record.named('embeddings.patch_embeddings.weight'), DINOV3_NAMES, _DINOV3_HINTS),
           timm.vit(record.named('patch_embed.proj.weight', 'cls_token', 'reg_token', without=['pos_embed']),
                    _DINOV3_HINTS)),
    kinds=(Kind('dinov3_vit', ('DINOv3ViTModel', 'DINOv3ViTModel'), _is_dinov3_vit, DINOV3_NAMES, _dinov3_config,
                _finish_dinov3),),
    config_defaults={'dinov3_vit': {'layer_norm_eps': 1e-5, 'rope_theta': 100.}},
    images={**NORMS['imagenet'], **PILLOW, 'resize': 1.}, to_timm=_dinov3_to_timm,
    timm_drops={r'rope\.(?!freqs$).*|.*\.rope\.(?!freqs$).*|rope_embed\..*':
                'of rotary positions, which the network computes',
                r'local_cls_norm\..*|projectors\..*': 'of pre-training with local crops'},
    licenses=(License(r'facebook/dinov3-.*', 'DINOv3 License', True),
              License(r'timm/vit_\w+_dinov3.*', 'DINOv3 License')))

# MoCo v3, I-JEPA and MAE

_ENCODER = 'module.base_encoder.'
_MOCO_HEADS = {384: 12}
"""By width, where the size with this width has another number (arXiv 2104.02057, section 5)."""


def _rename_moco(tensors: Tensors) -> Changed:
  """Returns the encoder that the authors evaluate, under the names of timm."""
  encoder, dropped = record.dropping(tensors, {
      r'module\.momentum_encoder\..*': 'the average of the encoder, which the authors do not evaluate',
      r'module\.(base_encoder\.head|predictor)\..*': 'of pre-training: projection and prediction'})
  return Changed(record.renamed(encoder, (r'^module\.base_encoder\.', '')), dropped)


def _moco_hints(tensors: Tensors) -> Hints:
  return timm.HINTS._replace(heads=_MOCO_HEADS.get(tensors[f'{_ENCODER}cls_token'].shape[-1], 0))


MOCO = Family(
    'moco', 'MoCo v3', '`.pth.tar` of the authors',
    files=(timm.vit(lambda t: f'{_ENCODER}cls_token' in t, _moco_hints, rename=_rename_moco),),
    images={**NORMS['imagenet'], **PILLOW, 'interpolation': Interpolation.BILINEAR, 'resize': .875})


def _is_ijepa(m: schema.ViT, weights: Weights, differing: frozenset[str]) -> bool:
  """Whether the I-JEPA of transformers computes this ViT, a backbone alone."""
  return not weights.num_classes and not weights.decoder and differing == {'pool'} and m.pool == Mean()


IJEPA = Family(
    'ijepa', 'I-JEPA', 'checkpoints of the authors; transformers; timm',
    kinds=(Kind('ijepa', ('IJepaModel', ''), _is_ijepa, transformers.VIT, transformers.tower_config),),
    licenses=(License(r'facebook/ijepa_.*|timm/vit_\w+_ijepa.*', 'CC-BY-NC-4.0'),))


def _mae_config(m: schema.ViT, weights: Weights) -> dict[str, Any]:
  decoder = weights.decoder
  assert decoder
  return {**transformers.vit_config(m, weights),
          'decoder_hidden_size': decoder.decoder_width, 'decoder_num_hidden_layers': decoder.decoder_depth,
          'decoder_num_attention_heads': decoder.decoder_heads, 'decoder_intermediate_size': 4 * decoder.decoder_width,
          'mask_ratio': decoder.mask_ratio, 'norm_pix_loss': decoder.norm_pix_loss}


def _mae_finish(tensors: Tensors, weights: Weights) -> Tensors:
  return transformers.under('vit')({**tensors, 'decoder.decoder_pos_embed': record.decoder_positions(weights)}, weights)


_LICENSE, _PAPER = 'CC-BY-NC-4.0', 'arXiv 2111.06377'
MAE = Family(
    'mae', 'MAE', '`.pth` of the authors, with and without the decoder, and fine-tuned; transformers',
    files=(timm.vit(lambda t: 'patch_embed.proj.weight' in t and (
        'decoder_embed.weight' in t or {'fc_norm.weight', 'cls_token'} <= t.keys()), label='mae'),),
    kinds=(Kind('vit_mae', ('ViTMAEForPreTraining', 'ViTMAEForPreTraining'),
                lambda m, weights, _: transformers.is_plain(m, weights, decoder=True), transformers.VIT, _mae_config,
                _mae_finish),),
    images={**NORMS['imagenet'], **PILLOW, 'resize': .875}, position_resize=PositionResize.BICUBIC,
    licenses=(License(r'timm/vit_\w+[._]mae.*|facebook/vit-mae-.*', _LICENSE),),
    addresses={
        **{f'mae_pretrain_vit_{size}': f'{_DOWNLOADS}/mae/pretrain/mae_pretrain_vit_{size}.pth' for size in (
            'base', 'large', 'huge')},
        **{f'mae_finetuned_vit_{size}': f'{_DOWNLOADS}/mae/finetune/mae_finetuned_vit_{size}.pth' for size in (
            'base', 'large', 'huge')},
        **{f'mae_visualize_vit_{size}': f'{_DOWNLOADS}/mae/visualize/mae_visualize_vit_{size}.pth' for size in (
            'base', 'large')}},
    published=(Published(r'mae_finetuned_vit_(huge)', '{0}/14', 224, 'ImageNet-1k', 1_000, _PAPER, _LICENSE),
               Published(r'mae_finetuned_vit_([a-z]+)', '{0}/16', 224, 'ImageNet-1k', 1_000, _PAPER, _LICENSE),
               Published(r'mae_\w+_vit_(huge)', '{0}/14', 224, 'ImageNet-1k', 0, _PAPER, _LICENSE),
               Published(r'mae_\w+_vit_([a-z]+)', '{0}/16', 224, 'ImageNet-1k', 0, _PAPER, _LICENSE)))
