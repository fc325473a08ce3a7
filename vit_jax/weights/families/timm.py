"""What ViTs in files of timm have in common: names, prefixes, and the config of a folder.

Files of the authors of many families have the names of timm too, or are renamed to these first (`Family.to_timm`).
Files are read with `READ` or `READ_PACKED`, which have all names of timm's two classes of ViTs; `names_of` returns the
names under which one of the classes expects a certain network.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Interpolation, LastNorm, QkvBias, SwiGlu, checks
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes
from vit_jax.weights.families import record
from vit_jax.weights.families.record import Changed, Family, Files, Prepared, Tensors, Warn
from vit_jax.weights.grids import ALL, NONE, TOKENS
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Weights, hidden_settings, layer_scale, position_resize
from vit_jax.weights.preprocess import NORMS, PILLOW, Preprocess, side_px
from vit_jax.weights.tables import Table, table, without

STEM = {'stem.std_eps': 0., 'stem.var_eps': 1e-8, 'stem.norm_eps': 1e-5}
"""Epsilons of standardized kernels and of GroupNorm in timm, where those of the authors' programs differ."""
HINTS = Hints(gelu=Gelu.EXACT, norm_eps=1e-6, settings=STEM)  # timm, DeiT, MAE, DINO
IMAGES: dict[str, Any] = {**NORMS['half'], **PILLOW, 'resize': .9}

_QKV = r'backbone/blocks/attn/(query|key|value)/'
TABLE = table("""
    backbone/stem | patch_embed.proj | conv
    backbone/stem/root/kernel | patch_embed.backbone.stem.conv.weight | filter
    backbone/stem/root_norm | patch_embed.backbone.stem.norm | norm
    backbone/stem/stage{s}/unit{u}/{conv1,conv2,conv3}/kernel |
        patch_embed.backbone.stages.{s0}.blocks.{u0}.{conv1,conv2,conv3}.weight | filter
    backbone/stem/stage{s}/unit{u}/proj/kernel |
        patch_embed.backbone.stages.{s0}.blocks.{u0}.downsample.conv.weight | filter
    backbone/stem/stage{s}/unit{u}/{norm1,norm2,norm3} |
        patch_embed.backbone.stages.{s0}.blocks.{u0}.{norm1,norm2,norm3} | norm
    backbone/stem/stage{s}/unit{u}/proj_norm | patch_embed.backbone.stages.{s0}.blocks.{u0}.downsample.norm | norm
    backbone/{cls,dist,registers,positions} | {cls_token,dist_token,reg_token,pos_embed} | same
    {backbone/,decoder/}blocks/attn/{query,key,value} | {,decoder_}blocks.{i}.attn.{qkv[0/3],qkv[1/3],qkv[2/3]} | dense
    {backbone/,decoder/}blocks/attn/out | {,decoder_}blocks.{i}.attn.proj | dense
    {backbone/,decoder/}blocks/{norm1,norm2} | {,decoder_}blocks.{i}.{norm1,norm2} | norm
    {backbone/,decoder/}blocks/mlp/{up,down} | {,decoder_}blocks.{i}.mlp.{fc1,fc2} | dense
    backbone/blocks/attn/{query,key}_norm | blocks.{i}.attn.{q,k}_norm | norm
    backbone/blocks/{scale1,scale2} | blocks.{i}.{ls1,ls2}.gamma | same
    backbone/norm | norm | norm
    backbone/pool/probe | attn_pool.latent | same
    backbone/pool/attn/{query,key,value,out} | attn_pool.{q,kv[0/2],kv[1/2],proj} | dense
    backbone/pool/norm | attn_pool.norm | norm
    backbone/pool/mlp/{up,down} | attn_pool.mlp.{fc1,fc2} | dense
    {head,head_dist} | {head,head_dist} | dense
    decoder/{embed,predict} | decoder_{embed,pred} | dense
    decoder/norm | decoder_norm | norm
    mask_token | mask_token | same
""")
PACKED: Table = (*without(TABLE, 'backbone/blocks/mlp/up/.*'), *table("""
    backbone/blocks/mlp/{gate,up} | blocks.{i}.mlp.{fc1[0/2],fc1[1/2]} | dense
"""))
"""For MLPs with a gate: gate and value are in one matrix, the gate first."""
_EXTRA = table("""
    backbone/{norm_before,stem_norm} | {norm_pre,patch_embed.norm} | norm
    backbone/blocks/attn/frequencies | blocks.{i}.rope.freqs | same
    backbone/blocks/{attn,mlp}/norm | blocks.{i}.{attn,mlp}.norm | norm
""")
_SCALES = table('backbone/blocks/{scale1,scale2} | blocks.{i}.{gamma_1,gamma_2} | same')
_SPLIT_QKV = table('backbone/blocks/attn/{query,key,value} | blocks.{i}.attn.{q,k,v}_proj | dense')
_QV_BIASES = table('backbone/blocks/attn/{query,value}/bias | blocks.{i}.attn.{q,v}_bias | same')
_SPLIT_GATE = table('backbone/blocks/mlp/{gate,up} | blocks.{i}.mlp.{fc1_g,fc1_x} | dense')
"""What timm's class Eva has in place of the names of `TABLE`."""

READ: Table = (*TABLE, *_EXTRA, *_SCALES, *_SPLIT_QKV, *_QV_BIASES, *_SPLIT_GATE)
READ_PACKED: Table = (*PACKED, *_EXTRA, *_SCALES, *_SPLIT_QKV, *_QV_BIASES)


def names_of(model: schema.Model) -> Table:
  """Returns the names under which timm expects this ViT; those with rotary positions are of its class Eva."""
  assert isinstance(model, schema.ViT)
  is_eva, has_inner_norm = model.positions.is_rotary, model.mlp.inner_norm
  is_dinov3 = isinstance(getattr(model.positions, 'coordinates', None), schema.UnitInterval)
  if not isinstance(model.mlp, SwiGlu):
    entries = TABLE
  elif isinstance(model.norm, schema.LayerNorm) and not has_inner_norm and not is_dinov3:
    entries = PACKED
  else:
    entries = (*without(TABLE, 'backbone/blocks/mlp/up/.*'), *_SPLIT_GATE)
  if is_eva:
    entries = (*without(entries, 'backbone/blocks/scale[12]'), *_SCALES)
  if is_eva and has_inner_norm:
    entries = (*without(entries, _QKV + '.*'), *_SPLIT_QKV)
  elif is_eva and model.attention.qkv_bias is QkvBias.QUERY_VALUE:
    entries = (*without(entries, _QKV + 'bias'), *_QV_BIASES)
  return (*entries, *_EXTRA)


# Reading

def prepare(tensors: Tensors, families: Iterable[Family]) -> Prepared:
  """Returns the tensors under timm's names; their `label` is `timm` if they had these before, else ''."""
  families = tuple(families)
  for prefix in ('_orig_mod.', 'module.', 'model.', 'backbone.', 'encoder.', 'teacher.backbone.'):
    if not {'cls_token', 'patch_embed.proj.weight'} & tensors.keys():
      tensors = record.renamed(tensors, (f'^{re.escape(prefix)}', ''))
  in_group = r'^blocks\.\d+\.(\d+)\.(?=norm|attn|ls|mlp)'  # blocks.0.11.attn.qkv.weight, of DINOv2's training
  tensors = record.renamed(tensors, (in_group, r'blocks.\1.'))
  tensors, counters = record.dropping(tensors, {r'.*\.num_batches_tracked': 'a counter'})
  drops = {pattern: reason for family in families for pattern, reason in family.timm_drops.items()}
  tensors, dropped = record.dropping(tensors, drops)
  lines = counters + dropped
  names_before = tensors.keys()
  for family in families:
    tensors, more_lines = family.to_timm(tensors)
    lines += more_lines
  return Prepared(tensors, lines, label='timm' if names_before <= {*tensors, 'head.bias'} else '')


def first_rows_of(tensors: Tensors) -> tuple[str, ...]:
  """Returns which rows of positions are before those of the patches: timm's setting `no_embed_class`.

  With it (DeiT III, FlexiViT) only patches have positions, without it all tokens; the authors of DINOv2 give their
  registers none.
  """
  if 'reg_token' in tensors:
    return NONE, ALL
  return (TOKENS,) if 'register_tokens' in tensors else (TOKENS, NONE)


def vit(matches: Callable[[Tensors], bool], hints: Hints | Callable[[Tensors], Hints] = HINTS, *, label: str = '',
        formats: tuple[str, ...] = (), rename: Callable[[Tensors], Changed] | None = None,
        warn: Warn = lambda model, clues: [],
        first_rows: tuple[str, ...] | Callable[[Tensors], tuple[str, ...]] = first_rows_of) -> Files:
  """Returns the record of files with ViTs of a family, which have the names of timm or are renamed to them.

  Args:
    matches, hints, label, formats, warn, first_rows: as in `Files`.
    rename: gives tensors with names of their own those of timm; `matches` and `hints` then see the names of the file.
  """
  def change(tensors: Tensors) -> Changed:
    tensors, lines = rename(tensors) if rename else Changed(tensors)
    tensors, more_lines = _change(tensors)
    return Changed(tensors, lines + more_lines)

  def with_norm_after_pool(tensors: Tensors) -> Hints:
    of_family = hints if isinstance(hints, Hints) else hints(tensors)
    return of_family._replace(norm_after_pool=_is_norm_after(tensors))

  return Files(program='file' if rename else 'timm', matches=matches,
               table=lambda tensors: READ_PACKED if is_packed(tensors) else READ, hints=with_norm_after_pool,
               change=change, warn=warn, label=label, formats=formats, written=names_of, first_rows=first_rows)


def is_packed(tensors: Tensors) -> bool:
  """Whether the first matrix of an MLP has twice as many outputs as the second one has inputs."""
  up, down = (tensors.get(f'blocks.0.mlp.{name}.weight') for name in ('fc1', 'fc2'))
  return up is not None and down is not None and up.ndim == down.ndim == 2 and up.shape[0] == 2 * down.shape[1]


def _is_norm_after(tensors: Tensors) -> bool:
  """Whether the last norm is of the pooled mean."""
  return 'fc_norm.weight' in tensors and 'norm.weight' not in tensors


def _change(tensors: Tensors) -> Changed:
  """Returns the tensors of a ViT without parts of training, and with the names of one class where two have others."""
  drops = {r'head\.(mlp|last_layer)\..*': 'the projection head of self-supervision'}
  if 'decoder_embed.weight' not in tensors:
    drops['mask_token'] = 'of pre-training with hidden patches'
  tensors, dropped = record.dropping(tensors, drops)
  if _is_norm_after(tensors):
    tensors = record.renamed(tensors, (r'^fc_norm\.', 'norm.'))
  tensors = record.renamed(tensors, (r'^register_tokens', 'reg_token'),
                    (r'^patch_embed\.backbone\.(conv|norm)\.', r'patch_embed.backbone.stem.\1.'))
  tensors, fixed = record.without_fixed(tensors, 'decoder_pos_embed')
  return Changed(tensors, dropped + fixed)


# Writing

def with_register_rows(leaves: Tensors, weights: Weights) -> Tensors:
  """Returns the leaves with a zero position for each register; timm has these if the class token has a position."""
  m, positions = weights.model, leaves.get('backbone/positions')
  if positions is None or not isinstance(m, schema.ViT) or not m.registers:
    return leaves
  zeros = np.zeros((1, m.registers, positions.shape[2]), np.float32)
  tokens, patches = np.split(positions, [m.num_first], axis=1)
  return {**leaves, 'backbone/positions': np.concatenate([tokens, zeros, patches], axis=1)}


def finish(tensors: Tensors, weights: Weights) -> Tensors:
  """Returns the tensors of a network, named as in its table, as timm's classes expect them."""
  m, tensors = weights.model, dict(tensors)
  if not isinstance(m, schema.ViT):
    return tensors
  if getattr(m.positions, 'mixed', False):  # the frequencies of all blocks are one tensor, [2, L, A, K / 2]
    tensors['rope.freqs'] = np.stack([tensors.pop(f'blocks.{i}.rope.freqs') for i in range(m.depth)], axis=1)
  if weights.decoder:
    tensors['decoder_pos_embed'] = record.decoder_positions(weights)
  if weights.num_classes and not weights.head.bias:
    tensors['head.bias'] = np.zeros(weights.num_classes, np.float32)
  if isinstance(m.stem, schema.ResNetStem) and not m.stem.layers:  # it has another name without stages
    tensors = record.renamed(tensors, (r'^patch_embed\.backbone\.stem\.', 'patch_embed.backbone.'))
  if m.last_norm is LastNorm.POOLED:
    tensors = record.renamed(tensors, (r'^norm\.', 'fc_norm.'))
  return tensors


# The config of a folder

ACTIVATION = {Gelu.EXACT: 'gelu', Gelu.TANH: 'gelu_tanh', Gelu.QUICK: 'quick_gelu'}
HYBRIDS = {((), 192): 'vit_tiny_r_s16_p8_224', ((2, 2, 2, 2), 384): 'vit_small_r26_s32_224',
           ((2, 2, 2, 2), 768): 'vit_base_r26_s32_224', ((3, 4, 9), 768): 'vit_base_r50_s16_224',
           ((3, 4, 6, 3), 1024): 'vit_large_r50_s32_224'}
"""Names of hybrids by the units of each stage of the stem, and the width of the network."""
BITS = ('50x1', '50x3', '101x1', '101x3', '152x2', '152x4')  # depths and width factors of BiT in timm
ENDS = {schema.ResNet: ('stem.conv', 'head.fc'), schema.EfficientNet: ('conv_stem', 'classifier'),
        schema.Mixer: ('stem.proj', 'head'), schema.ViT: ('patch_embed.proj', 'head')}
"""Names of the first and last layer."""


def config(weights: Weights) -> dict[str, Any]:
  """Returns `config.json` for timm, which `timm.create_model('local-dir:FOLDER', pretrained=True)` reads.

  Raises:
    UserError: timm has no such network.
  """
  model, p = weights.model, weights.preprocess
  name, arguments = _architecture(model, p)
  crop: dict[str, Any] = {'crop_pct': 1., 'crop_mode': 'squash'}
  if p.resize_px:
    crop = {'crop_pct': min(p.image_px) / p.resize_px, 'crop_mode': 'center'}
  interpolation = 'bilinear' if p.interpolation is Interpolation.AREA else p.interpolation.value
  first_layer, last_layer = ENDS[type(model)]
  if isinstance(model, schema.ViT) and isinstance(model.stem, schema.ResNetStem):
    first_layer = 'patch_embed.backbone.stem.conv' if model.stem.layers else 'patch_embed.backbone.conv'
  takes_any_size = isinstance(model, schema.ResNet | schema.EfficientNet)
  content: dict[str, Any] = {
      'architecture': name, 'num_classes': weights.num_classes,
      'global_pool': arguments.get('global_pool', 'token' if isinstance(model, schema.ViT) else 'avg'),
      'model_args': arguments,
      'pretrained_cfg': {'tag': 'vit_jax', 'custom_load': False, 'input_size': [3, *p.image_px],
                         'fixed_input_size': not takes_any_size, 'interpolation': interpolation, **crop,
                         'mean': list(p.mean), 'std': list(p.std), 'num_classes': weights.num_classes,
                         'pool_size': None, 'first_conv': first_layer, 'classifier': last_layer}}
  optional = {'position_resize': position_resize(model), 'network': hidden_settings(model),
              'label_names': list(weights.class_names)}
  return content | {key: value for key, value in optional.items() if value}


def _architecture(m: schema.Model, p: Preprocess) -> tuple[str, dict[str, Any]]:
  """Returns timm's name of the network, and the arguments of `create_model` for its other settings."""
  match m:
    case schema.ViT():
      return _vit_name(m), _vit_arguments(m, p)
    case schema.Mixer():
      for size in 'SBL':
        is_of_size = (m.width, m.depth, m.tokens_mlp, m.channels_mlp) == sizes.MIXER[size]
        if is_of_size and m.patch in sizes.MIXER_PATCHES[size] and p.image_px == (224, 224):
          return f'mixer_{size.lower()}{m.patch}_224', {'act_layer': ACTIVATION[m.gelu]}
    case schema.ResNet():
      for size in BITS:
        if sizes.resnet(f'R{size}') == schema.ResNet(m.layers, m.width):
          return f'resnetv2_{size}_bit', {}
    case schema.EfficientNet():
      for size, (width, depth, *_) in sizes.EFFICIENTNET.items():
        if (width, depth) == (m.width_factor, m.depth_factor):
          return f'tf_efficientnet_{size.lower()}', {}
  raise UserError(f'--to: expected a network that timm has a name for, got another {type(m).__name__}. Write a single '
                  '.safetensors file.')


def _vit_name(m: schema.ViT) -> str:
  """Returns the name of a network of timm with the class and the stem of this one. Raises UserError for other stems."""
  if not isinstance(m.stem, schema.ResNetStem):
    return 'deit_base_distilled_patch16_224' if m.pool.distillation else 'vit_base_patch16_224'
  name = HYBRIDS.get((m.stem.layers, m.width))
  if name is None or m.stem.width != schema.ResNetStem().width:
    raise UserError(f'--to: expected a network that timm has, got a hybrid with the stem {m.stem.layers} of '
                    f'{m.stem.width} channels and width {m.width}. Write a single .safetensors file.')
  return name


def _vit_arguments(m: schema.ViT, p: Preprocess) -> dict[str, Any]:
  """Returns the arguments of `create_model`, which override the settings of the network that `_vit_name` names."""
  others = {  # what the arguments of timm's class VisionTransformer in a file cannot describe
      f'positions {checks.kind(m.positions)}': m.positions.is_rotary,
      'RMSNorm': isinstance(m.norm, schema.RmsNorm),
      'a norm before the blocks': m.norm_before, 'a norm after the stem': m.stem.norm,
      'no last norm': m.last_norm is LastNorm.NONE, 'inner norms': m.attention.inner_norm or m.mlp.inner_norm,
      'no bias of the keys alone': m.attention.qkv_bias is QkvBias.QUERY_VALUE,
      'no bias of the output matrices': not (m.attention.out_bias and m.mlp.bias),
      'a pool over the class token': m.pool.has_parameters and m.pool.class_token,
      'a SwiGLU MLP': isinstance(m.mlp, SwiGlu),
      'a distillation token after a ResNet stem': m.pool.distillation and isinstance(m.stem, schema.ResNetStem)}
  if unsupported := [name for name, is_so in others.items() if is_so]:
    raise UserError(f'--to: expected a network that a timm config.json can describe, got one with '
                    f'{", ".join(unsupported)}. Write a single .safetensors file, whose tensors timm reads by name.')
  if isinstance(m.pool, schema.First):
    raise UserError('pool=first: expected a pooling that timm has, got the first patch token. Write a single '
                    '.safetensors or .npz file.')
  arguments: dict[str, Any] = {
      'img_size': side_px(p), 'patch_size': m.patch // m.stem.stride, 'embed_dim': m.width, 'depth': m.depth,
      'num_heads': m.heads, 'mlp_ratio': m.mlp.hidden / m.width, 'act_layer': ACTIVATION[m.gelu]}
  optional = {'init_values': layer_scale(m), 'reg_tokens': m.registers, 'qk_norm': m.attention.qk_norm}
  arguments |= {name: value for name, value in optional.items() if value}
  if m.attention.qkv_bias is QkvBias.NONE:
    arguments['qkv_bias'] = False
  if not isinstance(m.pool, schema.ClassToken):
    arguments |= {'class_token': m.pool.class_token, 'global_pool': 'map' if m.pool.has_parameters else 'avg',
                  'fc_norm': m.last_norm is LastNorm.POOLED}
  return arguments
