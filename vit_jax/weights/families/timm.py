"""What ViTs in files of timm have in common: names, prefixes, and the config of a folder.

Files of the authors of many families have the names of timm too, or are renamed to these first (`Family.to_timm`).
Files are read with `READ` or `READ_PACKED`, which have all names of timm's two classes of ViTs; `names_of` returns the
names under which one of the classes expects a certain network.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Interpolation, LastNorm, QkvBias, SwiGlu, checks
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes
from vit_jax.weights.families.record import (
  Changed,
  Clues,
  Family,
  Files,
  Recognized,
  Tensors,
  decoder_positions,
  distinct,
  dropping,
  renamed,
  unambiguous,
  without_fixed,
)
from vit_jax.weights.grids import ALL, NONE, TOKENS
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Weights, hidden_settings, layer_scale, position_resize
from vit_jax.weights.preprocess import NORMS, PILLOW, Preprocess, side_px
from vit_jax.weights.tables import Table, table, without

STEM = {'stem.std_eps': 0., 'stem.var_eps': 1e-8, 'stem.norm_eps': 1e-5}
"""Epsilons of standardized kernels and of GroupNorm in timm, where those of the authors' programs differ."""
HINTS = Hints(gelu=Gelu.EXACT, norm_eps=1e-6, settings=STEM)  # timm, DeiT, MAE, DINO
IMAGES: dict[str, Any] = {**NORMS['half'], **PILLOW, 'resize': .9}

# Names

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
_APART = table('backbone/blocks/attn/{query,value}/bias | blocks.{i}.attn.{q,v}_bias | same')
_UNPACKED = table('backbone/blocks/mlp/{gate,up} | blocks.{i}.mlp.{fc1_g,fc1_x} | dense')

READ: Table = (*TABLE, *_EXTRA, *_SCALES, *_SPLIT_QKV, *_APART, *_UNPACKED)
READ_PACKED: Table = (*PACKED, *_EXTRA, *_SCALES, *_SPLIT_QKV, *_APART)


def names_of(model: schema.Model) -> Table:
  """Returns the names under which timm expects this ViT."""
  assert isinstance(model, schema.ViT)
  is_eva, has_inner_norm = model.positions.is_rotary, model.mlp.inner_norm
  is_gated = isinstance(model.mlp, SwiGlu)
  is_packed = is_gated and isinstance(model.norm, schema.LayerNorm) and not has_inner_norm and not isinstance(
      getattr(model.positions, 'coordinates', None), schema.UnitInterval)
  entries = PACKED if is_packed else TABLE
  if is_gated and not is_packed:
    entries = (*without(entries, 'backbone/blocks/mlp/up/.*'), *_UNPACKED)
  if is_eva:
    entries = (*without(entries, 'backbone/blocks/scale[12]'), *_SCALES)
  if is_eva and has_inner_norm:
    entries = (*without(entries, _QKV + '.*'), *_SPLIT_QKV)
  elif is_eva and model.attention.qkv_bias is QkvBias.QUERY_VALUE:
    entries = (*without(entries, _QKV + 'bias'), *_APART)
  return (*entries, *_EXTRA)


# Reading

def prepare(tensors: Tensors, families: Iterable[Family]) -> Recognized:
  """Returns the tensors under timm's names; its `family` is `timm` if they had these before, else ''."""
  kept = tensors
  for prefix in ('_orig_mod.', 'module.', 'model.', 'backbone.', 'encoder.', 'teacher.backbone.'):
    if any(name.startswith(prefix) for name in kept) and not {'cls_token', 'patch_embed.proj.weight'} & kept.keys():
      kept = distinct(kept, lambda name, prefix=prefix: name.removeprefix(prefix))  # type: ignore[misc]
  families = tuple(families)
  groups = r'^blocks\.\d+\.(\d+)\.(?=norm|attn|ls|mlp)'  # of blocks, in DINOv2's training
  kept = renamed(kept, (groups, r'blocks.\1.'))
  kept, counters = dropping(kept, {r'.*\.num_batches_tracked': 'a counter'})
  kept, lines = dropping(kept, {pattern: why for one in families for pattern, why in one.timm_drops.items()})
  lines, before = counters + lines, kept.keys()
  for family in families:
    kept, more = family.to_timm(kept)
    lines += more
  return Recognized('timm' if before <= {*kept, 'head.bias'} else '', kept, lines)


def vit(found: Callable[[Tensors], bool], hints: Hints | Callable[[Tensors], Hints] = HINTS, *, label: str = '',
        formats: tuple[str, ...] = (), rename: Callable[[Tensors], Changed] | None = None,
        warn: Callable[[schema.Model, Clues], list[str]] = unambiguous,
        first: tuple[str, ...] | Callable[[Tensors], tuple[str, ...]] | None = None) -> Files:
  """Returns how ViTs of a family look under the names of timm.

  Args:
    found, hints, label, formats, warn: as in `Files`.
    first: as in `Files`; None = `first_rows`.
    rename: gives tensors with names of their own those of timm; `found` and `hints` then see the names of the file.
  """
  def change(tensors: Tensors) -> Changed:
    tensors, lines = rename(tensors) if rename else (tensors, ())
    tensors, more = _change(tensors)
    return tensors, lines + more

  def all_hints(tensors: Tensors) -> Hints:
    own = hints if isinstance(hints, Hints) else hints(tensors)
    return own._replace(norm_after_pool=_is_norm_after(tensors))

  return Files('file' if rename else 'timm', found, lambda tensors: READ_PACKED if is_packed(tensors) else READ,
               all_hints, change=change, warn=warn, label=label, formats=formats, written=names_of,
               first=first or first_rows)


def first_rows(tensors: Tensors) -> tuple[str, ...]:
  """Returns which rows of positions are before those of the patches: timm's setting `no_embed_class`.

  With it (DeiT III, FlexiViT) only patches have positions, without it all tokens; the authors of DINOv2 give their
  registers none.
  """
  return (NONE, ALL) if 'reg_token' in tensors else (TOKENS,) if 'register_tokens' in tensors else (TOKENS, NONE)


def is_packed(tensors: Tensors) -> bool:
  """Whether the first matrix of an MLP has twice as many outputs as the second one has inputs."""
  up, down = (tensors.get(f'blocks.0.mlp.{name}.weight') for name in ('fc1', 'fc2'))
  return up is not None and down is not None and up.ndim == down.ndim == 2 and up.shape[0] == 2 * down.shape[1]


def _is_norm_after(tensors: Tensors) -> bool:
  """Whether the last norm is of the pooled mean."""
  return 'fc_norm.weight' in tensors and 'norm.weight' not in tensors


def _change(tensors: Tensors) -> Changed:
  """Returns the tensors of a ViT without parts of training, and with the names of one class where two have others."""
  kept, dropped = dropping(tensors, {r'head\.(mlp|last_layer)\..*': 'the projection head of self-supervision'} | (
      {} if 'decoder_embed.weight' in tensors else {'mask_token': 'of pre-training with hidden patches'}))
  kept = renamed(kept, (r'^register_tokens', 'reg_token'),
                 (r'^patch_embed\.backbone\.(conv|norm)\.', r'patch_embed.backbone.stem.\1.'),
                 *([(r'^fc_norm\.', 'norm.')] if _is_norm_after(kept) else []))
  kept, more = without_fixed(kept, 'decoder_pos_embed')
  return kept, dropped + more


# Writing

def with_register_rows(leaves: Tensors, weights: Weights) -> Tensors:
  """Returns the leaves with a zero position for each register; timm has these if the class token has a position."""
  m, table = weights.model, leaves.get('backbone/positions')
  if table is None or not isinstance(m, schema.ViT) or not m.registers:
    return leaves
  first = m.num_first
  rows = np.zeros((1, m.registers, table.shape[2]), np.float32)
  return {**leaves, 'backbone/positions': np.concatenate([table[:, :first], rows, table[:, first:]], axis=1)}


def finish(tensors: Tensors, weights: Weights) -> Tensors:
  """Returns the tensors of a network as timm's classes expect them."""
  m = weights.model
  if not isinstance(m, schema.ViT):
    return tensors
  if getattr(m.positions, 'mixed', False):  # the frequencies of all blocks are one tensor, [2, L, A, K / 2]
    own = {name: x for name, x in tensors.items() if name.endswith('.rope.freqs')}
    whole = np.stack([own[f'blocks.{i}.rope.freqs'] for i in range(len(own))], axis=1)
    return {**{name: x for name, x in tensors.items() if name not in own}, 'rope.freqs': whole}
  if isinstance(m.stem, schema.ResNetStem) and not m.stem.layers:  # it has another name without stages
    return renamed(tensors, (r'^patch_embed\.backbone\.stem\.', 'patch_embed.backbone.'))
  if m.last_norm is LastNorm.POOLED:
    return renamed(tensors, (r'^norm\.', 'fc_norm.'))
  if weights.decoder:
    return tensors | {'decoder_pos_embed': decoder_positions(weights)}
  if weights.num_classes and not weights.head.bias:
    return tensors | {'head.bias': np.zeros(weights.num_classes, np.float32)}
  return tensors


# The config of a folder

ACTIVATION = {Gelu.EXACT: 'gelu', Gelu.TANH: 'gelu_tanh', Gelu.QUICK: 'quick_gelu'}
HYBRIDS = {((), 192): 'vit_tiny_r_s16_p8_224', ((2, 2, 2, 2), 384): 'vit_small_r26_s32_224',
           ((2, 2, 2, 2), 768): 'vit_base_r26_s32_224', ((3, 4, 9), 768): 'vit_base_r50_s16_224',
           ((3, 4, 6, 3), 1024): 'vit_large_r50_s32_224'}
"""By stages of the stem and width."""
BITS = ('50x1', '50x3', '101x1', '101x3', '152x2', '152x4')
ENDS = {schema.ResNet: ('stem.conv', 'head.fc'), schema.EfficientNet: ('conv_stem', 'classifier'),
        schema.Mixer: ('stem.proj', 'head'), schema.ViT: ('patch_embed.proj', 'head')}
"""Names of the first and last layer."""


def config(weights: Weights) -> dict[str, Any]:
  """Returns `config.json` for timm, which `timm.create_model('local-dir:FOLDER', pretrained=True)` reads.

  Raises:
    UserError: timm has no such network.
  """
  m, p = weights.model, weights.preprocess
  name, arguments = _architecture(weights)
  crop = {'crop_pct': min(p.image_px) / p.resize_px, 'crop_mode': 'center'} if p.resize_px else {
      'crop_pct': 1., 'crop_mode': 'squash'}
  interpolation = 'bilinear' if p.interpolation is Interpolation.AREA else p.interpolation.value
  first, last = ENDS[type(m)]
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
  found |= {'position_resize': resize} if (resize := position_resize(m)) else {}
  found |= {'network': network} if (network := hidden_settings(m)) else {}
  return found | ({'label_names': list(weights.class_names)} if weights.class_names else {})


def _architecture(weights: Weights) -> tuple[str, dict[str, Any]]:
  """Returns timm's name of the network, and the arguments of `create_model` for its other settings."""
  m, p = weights.model, weights.preprocess
  match m:
    case schema.ViT() if isinstance(m.stem, schema.ResNetStem):
      if found := HYBRIDS.get((m.stem.layers, m.width)):
        return found, {'img_size': side_px(p), 'act_layer': ACTIVATION[m.gelu]}
      raise UserError(f'--to: expected a network that timm has, got a hybrid with the stem {m.stem.layers} and width '
                      f'{m.width}. Write a single .safetensors file.')
    case schema.ViT():
      return _vit(m, p)
    case schema.Mixer():
      letters = {512: 's', 768: 'b', 1024: 'l'}
      if m.width in letters and p.image_px == (224, 224):
        return f'mixer_{letters[m.width]}{m.patch}_224', {'act_layer': ACTIVATION[m.gelu]}
    case schema.ResNet():
      if found := next((name for name in BITS if sizes.resnet(f'R{name}') == schema.ResNet(
          m.layers, m.width)), ''):
        return f'resnetv2_{found}_bit', {}
    case schema.EfficientNet():
      if found := next((name for name, (width, depth, *_) in sizes.EFFICIENTNET.items()
                        if (width, depth) == (m.width_factor, m.depth_factor)), ''):
        return f'tf_efficientnet_{found.lower()}', {}
  raise UserError(f'--to: expected a network that timm has a name for, got another {type(m).__name__}. Write a single '
                  '.safetensors file.')


def _vit(m: schema.ViT, p: Preprocess) -> tuple[str, dict[str, Any]]:
  others = {  # what the arguments of timm's class VisionTransformer in a file cannot describe
      f'positions {checks.kind(m.positions)}': m.positions.is_rotary,
      'RMSNorm': isinstance(m.norm, schema.RmsNorm),
      'a norm before the blocks': m.norm_before, 'a norm after the stem': m.stem.norm,
      'no last norm': m.last_norm is LastNorm.NONE, 'inner norms': m.attention.inner_norm or m.mlp.inner_norm,
      'no bias of the keys alone': m.attention.qkv_bias is QkvBias.QUERY_VALUE,
      'no bias of the output matrices': not (m.attention.out_bias and m.mlp.bias),
      'a pool over the class token': m.pool.has_parameters and m.pool.class_token,
      'a SwiGLU MLP': isinstance(m.mlp, SwiGlu)}
  if beyond := [name for name, is_so in others.items() if is_so]:
    raise UserError(f'--to: expected a network that a timm config.json can describe, got one with '
                    f'{", ".join(beyond)}. Write a single .safetensors file, whose tensors timm reads by name.')
  if isinstance(m.pool, schema.First):
    raise UserError('pool=first: expected a pooling that timm has, got the first patch token. Write a single '
                    '.safetensors or .npz file.')
  found: dict[str, Any] = {
      'img_size': side_px(p), 'patch_size': m.patch, 'embed_dim': m.width, 'depth': m.depth, 'num_heads': m.heads,
      'mlp_ratio': m.mlp.hidden / m.width, 'act_layer': ACTIVATION[m.gelu]}
  found |= {'init_values': scale} if (scale := layer_scale(m)) else {}
  found |= {'reg_tokens': m.registers} if m.registers else {}
  found |= {'qk_norm': True} if m.attention.qk_norm else {}
  found |= {'qkv_bias': False} if m.attention.qkv_bias is QkvBias.NONE else {}
  if not isinstance(m.pool, schema.ClassToken):
    found |= {'class_token': m.pool.class_token, 'global_pool': 'map' if m.pool.has_parameters else 'avg',
              'fc_norm': m.last_norm is LastNorm.POOLED}
  return ('deit_base_distilled_patch16_224' if m.pool.distillation else 'vit_base_patch16_224'), found
