"""Config files for written weights: `config.json` and `preprocessor_config.json` of transformers, `config.json` of
timm, with which these programs load the folder; and our own `FILE.json` beside a single file.
"""
from __future__ import annotations

from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Geometry, Interpolation, Pool, Positions
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes
from vit_jax.weights import huggingface_families
from vit_jax.weights.loading import Weights
from vit_jax.weights.preprocess import Preprocess

ACTIVATION = {Gelu.EXACT: 'gelu', Gelu.TANH: 'gelu_pytorch_tanh', Gelu.QUICK: 'quick_gelu'}
TIMM_ACTIVATION = {Gelu.EXACT: 'gelu', Gelu.TANH: 'gelu_tanh', Gelu.QUICK: 'quick_gelu'}
PILLOW = {Interpolation.BILINEAR: 2, Interpolation.BICUBIC: 3, Interpolation.AREA: 4}  # BOX: the mean over an area
TIMM_HYBRIDS = {((), 192): 'vit_tiny_r_s16_p8_224', ((2, 2, 2, 2), 384): 'vit_small_r26_s32_224',
                ((2, 2, 2, 2), 768): 'vit_base_r26_s32_224', ((3, 4, 9), 768): 'vit_base_r50_s16_224',
                ((3, 4, 6, 3), 1024): 'vit_large_r50_s32_224'}
"""By stages of the stem and width."""
TIMM_BITS = ('50x1', '50x3', '101x1', '101x3', '152x2', '152x4')
TIMM_ENDS = {schema.ResNet: ('stem.conv', 'head.fc'), schema.EfficientNet: ('conv_stem', 'classifier'),
             schema.Mixer: ('stem.proj', 'head'), schema.ViT: ('patch_embed.proj', 'head')}
"""Names of the first and last layer in timm."""


def transformers_type(weights: Weights) -> str:
  """Returns the `model_type` of transformers for this network.

  Raises:
    UserError: transformers has no such network; the message gives the reason.
  """
  m, problems = weights.model, []
  if not isinstance(m, schema.ViT):
    raise UserError(f'--family: expected one that has a {type(m).__name__}, got huggingface. Set --family=timm, or '
                    'write an .npz.')
  if found := huggingface_families.kind(m, has_head=bool(weights.num_classes), is_projection=not weights.head.bias):
    return found
  if m.pool is not Pool.CLS:
    problems.append(f'pool={m.pool.value}: its ViTs read the class token')
  if m.positions is not schema.Positions.LEARNED:
    problems.append(f'positions={m.positions.value}: its ViTs have a table')
  if isinstance(m.stem, schema.ResNetStem):
    problems.append('a ResNet stem: its hybrids are other networks')
  if weights.head.pre_logits:
    problems.append(f'head.pre_logits={weights.head.pre_logits}: its heads are one layer')
  is_dino = bool(m.layer_scale)
  if not is_dino and (m.registers or m.swiglu):
    problems.append('registers or SwiGLU without LayerScale, which its DINOv2 always has')
  if is_dino and weights.num_classes:
    problems.append('a head on the class token alone: that of its DINOv2 reads the mean patch as well')
  if is_dino and m.distilled:
    problems.append('LayerScale or registers with a distillation token')
  if problems:
    raise UserError('--family: expected a network that transformers has, got ' + '; '.join(problems) + '.')
  if is_dino:
    return 'dinov2_with_registers' if m.registers else 'dinov2'
  return 'deit' if m.distilled else 'vit_mae' if weights.decoder else 'vit'


def transformers_config(weights: Weights) -> dict[str, Any]:
  """Returns the content of `config.json` for transformers."""
  kind, m, p = transformers_type(weights), weights.model, weights.preprocess
  assert isinstance(m, schema.ViT)
  if kind in huggingface_families.KINDS:
    return huggingface_families.config(m, kind, image_size=_side(p), projection=weights.num_classes)
  bare = {'vit': 'ViTModel', 'deit': 'DeiTModel', 'vit_mae': 'ViTMAEForPreTraining', 'dinov2': 'Dinov2Model',
          'dinov2_with_registers': 'Dinov2WithRegistersModel'}
  headed = {'vit': 'ViTForImageClassification', 'deit': 'DeiTForImageClassificationWithTeacher'}
  names = weights.class_names or tuple(f'LABEL_{i}' for i in range(weights.num_classes))
  found: dict[str, Any] = {
      'architectures': [headed[kind] if weights.num_classes else bare[kind]], 'model_type': kind,
      'hidden_size': m.width, 'num_hidden_layers': m.depth, 'num_attention_heads': m.heads,
      'hidden_act': ACTIVATION[m.gelu], 'layer_norm_eps': m.norm_eps, 'patch_size': m.patch, 'num_channels': 3,
      'image_size': _side(p), 'qkv_bias': m.qkv_bias, 'hidden_dropout_prob': 0., 'attention_probs_dropout_prob': 0.,
      'initializer_range': .02, 'dtype': 'float32', 'position_resize': m.position_resize.value}
  if kind.startswith('dinov2'):
    found |= {'mlp_ratio': 4 if m.swiglu else m.mlp // m.width, 'use_swiglu_ffn': m.swiglu,
              'layerscale_value': m.layer_scale}
    found |= {'num_register_tokens': m.registers} if m.registers else {}
  else:
    found['intermediate_size'] = m.mlp
  if weights.decoder:
    d = weights.decoder
    found |= {'decoder_hidden_size': d.decoder_width, 'decoder_num_hidden_layers': d.decoder_depth,
              'decoder_num_attention_heads': d.decoder_heads, 'decoder_intermediate_size': 4 * d.decoder_width,
              'mask_ratio': d.mask_ratio, 'norm_pix_loss': d.norm_pix_loss}
  if names:
    found |= {'id2label': {str(i): name for i, name in enumerate(names)},
              'label2id': {name: i for i, name in enumerate(names)}}
  return found


def transformers_processor(p: Preprocess) -> dict[str, Any]:
  """Returns the content of `preprocessor_config.json`.

  ViTImageProcessor resizes to a square, and DeiTImageProcessor also takes a center crop; BitImageProcessor resizes the
  short side and takes a center crop.
  """
  height, width = p.image_px
  found: dict[str, Any] = {
      'do_resize': True, 'resample': PILLOW[p.interpolation], 'do_rescale': True, 'rescale_factor': 1 / 255,
      'do_normalize': True, 'image_mean': list(p.mean), 'image_std': list(p.std)}
  if not p.resize_px:
    return found | {'image_processor_type': 'ViTImageProcessor', 'size': {'height': height, 'width': width}}
  if p.geometry is Geometry.HUGGINGFACE:
    return found | {'image_processor_type': 'DeiTImageProcessor', 'size': {'height': p.resize_px, 'width': p.resize_px},
                    'do_center_crop': True, 'crop_size': {'height': height, 'width': width}}
  return found | {'image_processor_type': 'BitImageProcessor', 'size': {'shortest_edge': p.resize_px},
                  'do_center_crop': True, 'crop_size': {'height': height, 'width': width}}


def _side(p: Preprocess) -> int | list[int]:
  return p.image_px[0] if p.image_px[0] == p.image_px[1] else list(p.image_px)


def timm_config(weights: Weights) -> dict[str, Any]:
  """Returns `config.json` for timm, which `timm.create_model('local-dir:FOLDER', pretrained=True)` reads.

  Raises:
    UserError: timm has no such network.
  """
  m, p = weights.model, weights.preprocess
  name, arguments = _timm_model(weights)
  crop = {'crop_pct': min(p.image_px) / p.resize_px, 'crop_mode': 'center'} if p.resize_px else {
      'crop_pct': 1., 'crop_mode': 'squash'}
  interpolation = 'bilinear' if p.interpolation is Interpolation.AREA else p.interpolation.value
  first, last = TIMM_ENDS[type(m)]
  is_conv = isinstance(m, schema.ResNet | schema.EfficientNet)
  if first == 'patch_embed.proj' and isinstance(getattr(m, 'stem', None), schema.ResNetStem):
    first = 'patch_embed.backbone.stem.conv'
  found: dict[str, Any] = {
      'architecture': name, 'num_classes': weights.num_classes,
      'global_pool': arguments.get('global_pool', 'token' if isinstance(m, schema.ViT) else 'avg'),
      'model_args': arguments,
      'pretrained_cfg': {'tag': 'vit_jax', 'custom_load': False, 'input_size': [3, *p.image_px],
                         'fixed_input_size': not is_conv, 'interpolation': interpolation, **crop, 'mean': list(p.mean),
                         'std': list(p.std), 'num_classes': weights.num_classes, 'pool_size': None,
                         'first_conv': first, 'classifier': last}}
  found |= {'position_resize': m.position_resize.value} if isinstance(m, schema.ViT) else {}
  found |= {'network': network} if (network := _network(m)) else {}
  return found | ({'label_names': list(weights.class_names)} if weights.class_names else {})


def _timm_model(weights: Weights) -> tuple[str, dict[str, Any]]:
  """Returns timm's name of the network, and the arguments of `create_model` for its other settings."""
  m, p = weights.model, weights.preprocess
  match m:
    case schema.ViT() if isinstance(m.stem, schema.ResNetStem):
      if found := TIMM_HYBRIDS.get((m.stem.layers, m.width)):
        return found, {'img_size': _side(p), 'act_layer': TIMM_ACTIVATION[m.gelu]}
      raise UserError(f'--to: expected a network that timm has, got a hybrid with the stem {m.stem.layers} and width '
                      f'{m.width}. Write a single .safetensors file.')
    case schema.ViT():
      return _timm_vit(m, p)
    case schema.Mixer():
      letters = {512: 's', 768: 'b', 1024: 'l'}
      if m.width in letters and p.image_px == (224, 224):
        return f'mixer_{letters[m.width]}{m.patch}_224', {'act_layer': TIMM_ACTIVATION[m.gelu]}
    case schema.ResNet():
      if found := next((name for name in TIMM_BITS if sizes.resnet(f'R{name}') == schema.ResNet(
          m.layers, m.width)), ''):
        return f'resnetv2_{found}_bit', {}
    case schema.EfficientNet():
      if found := next((name for name, (width, depth, *_) in sizes.EFFICIENTNET.items()
                        if (width, depth) == (m.width_factor, m.depth_factor)), ''):
        return f'tf_efficientnet_{found.lower()}', {}
  raise UserError(f'--to: expected a network that timm has a name for, got another {type(m).__name__}. Write a single '
                  '.safetensors file.')


def _beyond_timm(m: schema.ViT) -> list[str]:
  """Returns what this network has that the arguments of timm's class VisionTransformer in a file cannot describe."""
  found = {f'positions {m.positions.value}': m.positions.is_rotary, 'RMSNorm': m.norm is not schema.Norm.LAYER,
           'a norm before the blocks': m.norm_before, 'a norm after the stem': m.stem_norm,
           'no last norm': not m.final_norm, 'inner norms': m.attn_norm or m.mlp_norm,
           'no bias of the keys alone': not m.key_bias,
           'no bias of the output matrices': not (m.out_bias and m.mlp_bias),
           'a pool over the class token': m.pool is Pool.MAP_CLS}
  return [name for name, is_so in found.items() if is_so]


def _timm_vit(m: schema.ViT, p: Preprocess) -> tuple[str, dict[str, Any]]:
  if beyond := _beyond_timm(m):
    raise UserError(f'--to: expected a network that a timm config.json can describe, got one with '
                    f'{", ".join(beyond)}. Write a single .safetensors file, whose tensors timm reads by name.')
  arguments: dict[str, Any] = {
      'img_size': _side(p), 'patch_size': m.patch, 'embed_dim': m.width, 'depth': m.depth, 'num_heads': m.heads,
      'mlp_ratio': m.mlp * (2 if m.swiglu else 1) / m.width, 'act_layer': TIMM_ACTIVATION[m.gelu]}
  if m.layer_scale:
    arguments['init_values'] = m.layer_scale
  if m.registers:
    arguments['reg_tokens'] = m.registers
  arguments |= {'qk_norm': True} if m.qk_norm else {}
  arguments |= {} if m.qkv_bias else {'qkv_bias': False}
  if m.pool is Pool.FIRST:
    raise UserError('pool=first: expected a pooling that timm has, got the first patch token. Write a single '
                    '.safetensors or .npz file.')
  if m.pool is not Pool.CLS:
    arguments |= {'class_token': m.pool.has_class_token, 'global_pool': 'map' if m.pool is Pool.MAP else 'avg',
                  'fc_norm': m.norm_after_pool}
  if m.swiglu:
    raise UserError('--to: expected a network that a timm config.json can describe, got one with a SwiGLU MLP. Write a '
                    'single .safetensors file.')
  return ('deit_base_distilled_patch16_224' if m.distilled else 'vit_base_patch16_224'), arguments


def ours(weights: Weights, *, written_as: str) -> dict[str, Any]:
  """Returns the content of `FILE.json`: all settings that tensors do not determine, and the report of the tensors."""
  m, p = weights.model, weights.preprocess
  return {
      'written_by': 'vit_jax', 'family': written_as, 'source': weights.source,
      'gelu': m.gelu.value if isinstance(m, schema.ViT | schema.Mixer) else '',
      'norm_eps': getattr(m, 'norm_eps', 0.), 'heads': getattr(m, 'heads', 0),
      'position_resize': m.position_resize.value if isinstance(m, schema.ViT) else '',
      'network': _network(m),
      'pool': m.pool.value if isinstance(m, schema.ViT) else '',
      'decoder_heads': weights.decoder.decoder_heads if weights.decoder else 0, 'image_px': list(p.image_px),
      'preprocess': {**p._asdict(), 'interpolation': p.interpolation.value, 'geometry': p.geometry.value},
      'class_names': list(weights.class_names),
      'report': weights.report.plain()}


def _network(m: schema.Model) -> dict[str, Any]:
  """Returns the settings of `sidecars.SETTINGS` that this network has."""
  if isinstance(m, schema.ResNet):
    return {'stem_var_eps': m.var_eps}
  if not isinstance(m, schema.ViT):
    return {}
  found: dict[str, Any] = {'pool_heads': m.pool_heads} if m.pool_heads else {}
  if isinstance(m.stem, schema.ResNetStem):
    found |= {f'stem_{name}': getattr(m.stem, name) for name in ('std_eps', 'var_eps', 'norm_eps')}
  if m.positions is Positions.SINCOS2D_MAE:
    found['positions'] = m.positions.value
  if m.positions.is_rotary:
    found |= {'rotary_base': m.rotary_base, 'rotary_places': m.rotary_places.value, 'rotary_grid': m.rotary_grid,
              'rotary_offset': m.rotary_offset}
  return found
