"""The names of all parameters, here and in each family of weight files.

`PATHS` lists our path names, which are a public format; those that objectives add are in the sharding rules of
`objectives/`. The table of a family has an `Entry` for each tensor; `tables.py` uses it in both directions. In a
pattern, `{i}` counts layers from 0 (our leaf is stacked over them), `{s}` and `{u}` count stages and units from 1,
`{s0}` and `{u0}` from 0, `{u2}` units from 01; `{t}` and `{t0}` count stages like `{s}` and `{s0}` without the first.
Running statistics have paths below `state`.
"""
from __future__ import annotations

from vit_jax.weights.layouts import CONV, POINT, POINT_CONV, SAME, VECTOR, Entry, Layout, Table, layer, norm, timm_unit

PATHS = {
    # Vision Transformer; leaves under `blocks` are stacked, depth first
    'backbone/stem/kernel': '[P, P, C, D]',
    'backbone/stem/bias': '[D]',
    'backbone/cls': '[1, 1, D]',
    'backbone/dist': '[1, 1, D]',
    'backbone/registers': '[1, R, D]',
    'backbone/positions': '[1, M, D]: class and distillation token first, none for registers',
    'backbone/positions/(row|column)': '[h, D / 2], [w, D / 2]',
    'backbone/blocks/positions(/(row|column))?': 'as above, of each layer',
    'backbone/blocks/((row|column)/)?norm[12]/(scale|bias)': '[L, D]',
    'backbone/blocks/((row|column)/)?attn/(query|key|value)/kernel': '[L, D, A, K]',
    'backbone/blocks/((row|column)/)?attn/(query|key|value)/bias': '[L, A, K]',
    'backbone/blocks/((row|column)/)?attn/(query|key)_norm/(scale|bias)': '[L, K]',
    'backbone/blocks/attn/relative': '[L, 2 N - 1, A, K]',
    'backbone/blocks/((row|column)/)?attn/out/kernel': '[L, A, K, D]',
    'backbone/blocks/((row|column)/)?attn/out/bias': '[L, D]',
    'backbone/blocks/((row|column)/)?mlp/(up|gate)/kernel': '[L, D, F]',
    'backbone/blocks/((row|column)/)?mlp/(up|gate)/bias': '[L, F]',
    'backbone/blocks/((row|column)/)?mlp/down/kernel': '[L, F, D]',
    'backbone/blocks/((row|column)/)?mlp/down/bias': '[L, D]',
    'backbone/blocks/((row|column)/)?scale[12]': '[L, D]',
    'backbone/blocks/((row|column)/)?(attn|mlp)/norm/(scale|bias)': '[L, D], [L, F]',
    'backbone/(norm|norm_before|stem_norm)/(scale|bias)': '[D]',
    'backbone/pool/probe': '[1, 1, D]',
    'backbone/pool/(attn/(query|key|value|out)|mlp/(up|down)|norm)/(kernel|scale|bias)': 'as in a block, without L',
    # the stem of LV-ViT
    'backbone/stem/conv[123]/kernel': '[side, side, I, W]',
    'backbone/stem/norm[123]/(scale|bias)': '[W]',
    # hybrids and BiT: stages and units from 1
    'backbone/(stem/)?root/kernel': '[7, 7, 3, W]',
    'backbone/stem/root_norm/(scale|bias)': '[W]',
    'backbone/(stem/)?stage[0-9]+/unit[0-9]+/(conv[123]|proj)/kernel': '[side, side, I, O]',
    'backbone/(stem/)?stage[0-9]+/unit[0-9]+/(norm[123]|proj_norm)/(scale|bias)': '[C]',
    # Mixer
    'backbone/blocks/(tokens|channels)/(up|down)/(kernel|bias)': '[L, in, out], [L, out]',
    # EfficientNet: stages and blocks from 1
    'backbone/(stem|top)/(conv/kernel|norm/(scale|bias))': '[side, side, I, O], [C]',
    'backbone/stage[0-9]+/block[0-9]+/(expand|depthwise|project)/(conv/kernel|norm/(scale|bias))':
        '[side, side, I, O], [C]',
    'backbone/stage[0-9]+/block[0-9]+/gate/(down|up)/(kernel|bias)': '[in, out], [out]',
    # running statistics of BatchNorm, in the stem of LV-ViT and in EfficientNet
    'state/stem/norm[123]/(mean|var)': '[W]',
    'state/(stem|top|stage[0-9]+/block[0-9]+/(expand|depthwise|project))/norm/(mean|var)': '[C]',
    # heads; the input of `head_dist` is the distillation token
    '(head|head_dist)/kernel': '[D, C]',
    '(head|head_dist)/bias': '[C]',
    '(head|head_dist)/pre_logits/(kernel|bias)': '[D, D], [D]',
    # the decoder of a masked autoencoder, of width E
    'mask_token': '[1, 1, E]',
    'decoder/(embed|predict)/(kernel|bias)': '[in, out], [out]',
    'decoder/norm/(scale|bias)': '[E]',
    'decoder/blocks/.*': 'as in the backbone',
}
"""Patterns of our path names, with shapes. Axis letters: `core/types.py`. For conditions see the networks' modules."""

FAMILIES = ('vision_transformer', 'big_vision', 'timm', 'huggingface', 'bit')
"""Families that can be read and written; `mae`, `dino` and `dinov2` can be read, with the names of timm."""


def _flax(ours: str, theirs: str) -> list[Entry]:
  """Returns the entries for kernel and bias of a Flax layer."""
  return [Entry(f'{ours}/{leaf}', f'{theirs}/{leaf}', SAME) for leaf in ('kernel', 'bias')]


def _flax_norm(ours: str, theirs: str, layout: Layout = SAME) -> list[Entry]:
  return [Entry(f'{ours}/{leaf}', f'{theirs}/{leaf}', layout) for leaf in ('scale', 'bias')]


def _timm_block(ours: str, theirs: str) -> list[Entry]:
  """Returns the entries of a transformer block with query, key and value in one matrix, in this order."""
  qkv = [entry for i, name in enumerate(('query', 'key', 'value'))
         for entry in layer(f'{ours}/attn/{name}', f'{theirs}.attn.qkv', part=(i, 3))]
  return [*qkv, *layer(f'{ours}/attn/out', f'{theirs}.attn.proj'),
          *norm(f'{ours}/norm1', f'{theirs}.norm1'), *norm(f'{ours}/norm2', f'{theirs}.norm2'),
          *layer(f'{ours}/mlp/up', f'{theirs}.mlp.fc1'), *layer(f'{ours}/mlp/down', f'{theirs}.mlp.fc2')]


_BLOCKS = 'backbone/blocks'
_STEM = 'patch_embed.backbone'

TIMM: Table = (
    *layer('backbone/stem', 'patch_embed.proj', layout=CONV),
    Entry('backbone/stem/root/kernel', f'{_STEM}.stem.conv.weight', CONV),
    *norm('backbone/stem/root_norm', f'{_STEM}.stem.norm'),
    *timm_unit('backbone/stem/stage{s}/unit{u}', _STEM + '.stages.{s0}.blocks.{u0}'),
    Entry('backbone/cls', 'cls_token', SAME), Entry('backbone/dist', 'dist_token', SAME),
    Entry('backbone/registers', 'reg_token', SAME), Entry('backbone/positions', 'pos_embed', SAME),
    *_timm_block(_BLOCKS, 'blocks.{i}'),
    *norm(f'{_BLOCKS}/attn/query_norm', 'blocks.{i}.attn.q_norm'),
    *norm(f'{_BLOCKS}/attn/key_norm', 'blocks.{i}.attn.k_norm'),
    Entry(f'{_BLOCKS}/scale1', 'blocks.{i}.ls1.gamma', SAME), Entry(f'{_BLOCKS}/scale2', 'blocks.{i}.ls2.gamma', SAME),
    *norm('backbone/norm', 'norm'),
    Entry('backbone/pool/probe', 'attn_pool.latent', SAME),
    *layer('backbone/pool/attn/query', 'attn_pool.q'),
    *layer('backbone/pool/attn/key', 'attn_pool.kv', part=(0, 2)),
    *layer('backbone/pool/attn/value', 'attn_pool.kv', part=(1, 2)),
    *layer('backbone/pool/attn/out', 'attn_pool.proj'), *norm('backbone/pool/norm', 'attn_pool.norm'),
    *layer('backbone/pool/mlp/up', 'attn_pool.mlp.fc1'), *layer('backbone/pool/mlp/down', 'attn_pool.mlp.fc2'),
    *layer('head', 'head'), *layer('head_dist', 'head_dist'),
    *layer('decoder/embed', 'decoder_embed'), *_timm_block('decoder/blocks', 'decoder_blocks.{i}'),
    *norm('decoder/norm', 'decoder_norm'), *layer('decoder/predict', 'decoder_pred'),
    Entry('mask_token', 'mask_token', SAME),
)
"""Also used by DeiT, MAE, DINO and DINOv2."""

_GATED = (*layer(f'{_BLOCKS}/mlp/gate', 'blocks.{i}.mlp.fc1', part=(0, 2)),
          *layer(f'{_BLOCKS}/mlp/up', 'blocks.{i}.mlp.fc1', part=(1, 2)))
TIMM_SWIGLU: Table = (*(e for e in TIMM if not e.ours.startswith(f'{_BLOCKS}/mlp/up')), *_GATED)
"""For MLPs with a gate: gate and value are in one matrix, the gate first."""

TIMM_MIXER: Table = (
    *layer('backbone/stem', 'stem.proj', layout=CONV),
    *norm(f'{_BLOCKS}/norm1', 'blocks.{i}.norm1'), *norm(f'{_BLOCKS}/norm2', 'blocks.{i}.norm2'),
    *layer(f'{_BLOCKS}/tokens/up', 'blocks.{i}.mlp_tokens.fc1'),
    *layer(f'{_BLOCKS}/tokens/down', 'blocks.{i}.mlp_tokens.fc2'),
    *layer(f'{_BLOCKS}/channels/up', 'blocks.{i}.mlp_channels.fc1'),
    *layer(f'{_BLOCKS}/channels/down', 'blocks.{i}.mlp_channels.fc2'),
    *norm('backbone/norm', 'norm'), *layer('head', 'head'),
)


def _flax_attention(ours: str, theirs: str) -> list[Entry]:
  return [entry for name in ('query', 'key', 'value', 'out') for entry in _flax(f'{ours}/{name}', f'{theirs}/{name}')]


def _flax_block(theirs: str, *, norm1: str, attention: str, norm2: str, mlp: str) -> list[Entry]:
  return [*_flax_norm(f'{_BLOCKS}/norm1', f'{theirs}/{norm1}'), *_flax_norm(f'{_BLOCKS}/norm2', f'{theirs}/{norm2}'),
          *_flax_attention(f'{_BLOCKS}/attn', f'{theirs}/{attention}'),
          *_flax(f'{_BLOCKS}/mlp/up', f'{theirs}/{mlp}/Dense_0'),
          *_flax(f'{_BLOCKS}/mlp/down', f'{theirs}/{mlp}/Dense_1')]


def _flax_unit(ours: str, theirs: str) -> list[Entry]:
  found = [Entry(f'{ours}/{a}/kernel', f'{theirs}/{b}/kernel', SAME)
           for a, b in (('conv1', 'conv1'), ('conv2', 'conv2'), ('conv3', 'conv3'), ('proj', 'conv_proj'))]
  for a, b in (('norm1', 'gn1'), ('norm2', 'gn2'), ('norm3', 'gn3'), ('proj_norm', 'gn_proj')):
    found += _flax_norm(f'{ours}/{a}', f'{theirs}/{b}', VECTOR)
  return found


_HEAD = (*_flax('head', 'head'), *_flax('head/pre_logits', 'pre_logits'))
_BLOCK = 'Transformer/encoderblock_{i}'

VISION_TRANSFORMER: Table = (
    *_flax('backbone/stem', 'embedding'),
    Entry('backbone/stem/root/kernel', 'conv_root/kernel', SAME),
    *_flax_norm('backbone/stem/root_norm', 'gn_root', VECTOR),
    *_flax_unit('backbone/stem/stage{s}/unit{u}', 'block{s}/unit{u}'),
    Entry('backbone/cls', 'cls', SAME),
    Entry('backbone/positions', 'Transformer/posembed_input/pos_embedding', SAME),
    *_flax_block(_BLOCK, norm1='LayerNorm_0', attention='MultiHeadDotProductAttention_1', norm2='LayerNorm_2',
                 mlp='MlpBlock_3'),
    *_flax_norm('backbone/norm', 'Transformer/encoder_norm'), *_HEAD,
)
"""As in the files: numbered over all parts of a block. Linen's numbering is converted to this when a file is read."""

BIG_VISION: Table = (
    *_flax('backbone/stem', 'embedding'),
    Entry('backbone/cls', 'cls', SAME), Entry('backbone/positions', 'pos_embedding', SAME),
    *_flax_block(_BLOCK, norm1='LayerNorm_0', attention='MultiHeadDotProductAttention_0', norm2='LayerNorm_1',
                 mlp='MlpBlock_0'),
    *_flax_norm('backbone/norm', 'Transformer/encoder_norm'), *_HEAD,
    Entry('backbone/pool/probe', 'MAPHead_0/probe', SAME),
    *_flax_attention('backbone/pool/attn', 'MAPHead_0/MultiHeadDotProductAttention_0'),
    *_flax_norm('backbone/pool/norm', 'MAPHead_0/LayerNorm_0'),
    *_flax('backbone/pool/mlp/up', 'MAPHead_0/MlpBlock_0/Dense_0'),
    *_flax('backbone/pool/mlp/down', 'MAPHead_0/MlpBlock_0/Dense_1'),
)

_MIXER_BLOCK = 'MixerBlock_{i}'
FLAX_MIXER: Table = (
    *_flax('backbone/stem', 'stem'),
    *_flax_norm(f'{_BLOCKS}/norm1', f'{_MIXER_BLOCK}/LayerNorm_0'),
    *_flax_norm(f'{_BLOCKS}/norm2', f'{_MIXER_BLOCK}/LayerNorm_1'),
    *_flax(f'{_BLOCKS}/tokens/up', f'{_MIXER_BLOCK}/token_mixing/Dense_0'),
    *_flax(f'{_BLOCKS}/tokens/down', f'{_MIXER_BLOCK}/token_mixing/Dense_1'),
    *_flax(f'{_BLOCKS}/channels/up', f'{_MIXER_BLOCK}/channel_mixing/Dense_0'),
    *_flax(f'{_BLOCKS}/channels/down', f'{_MIXER_BLOCK}/channel_mixing/Dense_1'),
    *_flax_norm('backbone/norm', 'pre_head_layer_norm'), *_flax('head', 'head'),
)
"""Used by vision_transformer and by big_vision."""


def _hf_block(ours: str, theirs: str, *, norm1: str, norm2: str, up: str, down: str) -> list[Entry]:
  """Returns the entries of a block of transformers, under the names that all versions of its files have."""
  attention = [entry for name in ('query', 'key', 'value')
               for entry in layer(f'{ours}/attn/{name}', f'{theirs}.attention.attention.{name}')]
  return [*attention, *layer(f'{ours}/attn/out', f'{theirs}.attention.output.dense'),
          *norm(f'{ours}/norm1', f'{theirs}.{norm1}'), *norm(f'{ours}/norm2', f'{theirs}.{norm2}'),
          *layer(f'{ours}/mlp/up', f'{theirs}.{up}'), *layer(f'{ours}/mlp/down', f'{theirs}.{down}')]


_OLD = {'norm1': 'layernorm_before', 'norm2': 'layernorm_after', 'up': 'intermediate.dense', 'down': 'output.dense'}
_DINO = {'norm1': 'norm1', 'norm2': 'norm2', 'up': 'mlp.fc1', 'down': 'mlp.fc2'}
_HF_EMBEDDINGS: Table = (
    *layer('backbone/stem', 'embeddings.patch_embeddings.projection', layout=CONV),
    Entry('backbone/cls', 'embeddings.cls_token', SAME), Entry('backbone/dist', 'embeddings.distillation_token', SAME),
    Entry('backbone/registers', 'embeddings.register_tokens', SAME),
    Entry('backbone/positions', 'embeddings.position_embeddings', SAME),
    *norm('backbone/norm', 'layernorm'),
)
_HF_HEADS: Table = (
    *layer('head', 'classifier'), *layer('head_dist', 'distillation_classifier'),
    *layer('decoder/embed', 'decoder.decoder_embed'),
    *_hf_block('decoder/blocks', 'decoder.decoder_layers.{i}', **_OLD),
    *norm('decoder/norm', 'decoder.decoder_norm'), *layer('decoder/predict', 'decoder.decoder_pred'),
    Entry('mask_token', 'decoder.mask_token', SAME),
)
HUGGINGFACE: Table = (*_HF_EMBEDDINGS, *_hf_block(_BLOCKS, 'encoder.layer.{i}', **_OLD), *_HF_HEADS)
"""ViT, DeiT and ViTMAE, without the prefix (`vit.`, `deit.`) that the backbone has inside of a model with a head."""

HUGGINGFACE_DINO: Table = (
    *_HF_EMBEDDINGS, *_hf_block(_BLOCKS, 'encoder.layer.{i}', **_DINO), *_HF_HEADS,
    Entry(f'{_BLOCKS}/scale1', 'encoder.layer.{i}.layer_scale1.lambda1', SAME),
    Entry(f'{_BLOCKS}/scale2', 'encoder.layer.{i}.layer_scale2.lambda1', SAME),
)
_HF_GATED = (*layer(f'{_BLOCKS}/mlp/gate', 'encoder.layer.{i}.mlp.weights_in', part=(0, 2)),
             *layer(f'{_BLOCKS}/mlp/up', 'encoder.layer.{i}.mlp.weights_in', part=(1, 2)),
             *layer(f'{_BLOCKS}/mlp/down', 'encoder.layer.{i}.mlp.weights_out'))
HUGGINGFACE_DINO_SWIGLU: Table = (*(e for e in HUGGINGFACE_DINO if '/mlp/' not in e.ours), *_HF_GATED)


def _bit_unit(ours: str, theirs: str) -> list[Entry]:
  """Returns the entries of a unit of BiT, in which the norm before a convolution is stored with the convolution."""
  found = [Entry(f'{ours}/proj/kernel', f'{theirs}/a/proj/standardized_conv2d/kernel', SAME)]
  for i, letter in enumerate('abc', 1):
    found += [Entry(f'{ours}/conv{i}/kernel', f'{theirs}/{letter}/standardized_conv2d/kernel', SAME),
              Entry(f'{ours}/norm{i}/scale', f'{theirs}/{letter}/group_norm/gamma', VECTOR),
              Entry(f'{ours}/norm{i}/bias', f'{theirs}/{letter}/group_norm/beta', VECTOR)]
  return found


BIT: Table = (
    Entry('backbone/root/kernel', 'resnet/root_block/standardized_conv2d/kernel', SAME),
    *_bit_unit('backbone/stage{s}/unit{u}', 'resnet/block{s}/unit{u2}'),
    Entry('backbone/norm/scale', 'resnet/group_norm/gamma', VECTOR),
    Entry('backbone/norm/bias', 'resnet/group_norm/beta', VECTOR),
    Entry('head/kernel', 'resnet/head/conv2d/kernel', POINT), Entry('head/bias', 'resnet/head/conv2d/bias', SAME),
)
TIMM_BIT: Table = (
    Entry('backbone/root/kernel', 'stem.conv.weight', CONV),
    *(entry for entry in timm_unit('backbone/stage{s}/unit{u}', 'stages.{s0}.blocks.{u0}')
      if 'proj_norm' not in entry.ours),
    *norm('backbone/norm', 'norm'), *layer('head', 'head.fc', layout=POINT_CONV),
)


def _conv_norm(ours: str, conv: str, batch_norm: str) -> list[Entry]:
  """Returns the entries of a convolution and its BatchNorm, whose running statistics belong to the state."""
  return [Entry(f'backbone/{ours}/conv/kernel', f'{conv}.weight', CONV), *norm(f'backbone/{ours}/norm', batch_norm),
          Entry(f'state/{ours}/norm/mean', f'{batch_norm}.running_mean', SAME),
          Entry(f'state/{ours}/norm/var', f'{batch_norm}.running_var', SAME)]


def _gate(ours: str, theirs: str) -> list[Entry]:
  return [*layer(f'backbone/{ours}/gate/down', f'{theirs}.se.conv_reduce', layout=POINT_CONV),
          *layer(f'backbone/{ours}/gate/up', f'{theirs}.se.conv_expand', layout=POINT_CONV)]


_FIRST, _LATER = 'blocks.0.{u0}', 'blocks.{t0}.{u0}'
TIMM_EFFICIENTNET: Table = (
    *_conv_norm('stem', 'conv_stem', 'bn1'), *_conv_norm('top', 'conv_head', 'bn2'), *layer('head', 'classifier'),
    *_conv_norm('stage1/block{u}/depthwise', f'{_FIRST}.conv_dw', f'{_FIRST}.bn1'),
    *_gate('stage1/block{u}', _FIRST), *_conv_norm('stage1/block{u}/project', f'{_FIRST}.conv_pw', f'{_FIRST}.bn2'),
    *_conv_norm('stage{t}/block{u}/expand', f'{_LATER}.conv_pw', f'{_LATER}.bn1'),
    *_conv_norm('stage{t}/block{u}/depthwise', f'{_LATER}.conv_dw', f'{_LATER}.bn2'),
    *_gate('stage{t}/block{u}', _LATER),
    *_conv_norm('stage{t}/block{u}/project', f'{_LATER}.conv_pwl', f'{_LATER}.bn3'),
)
"""Blocks of the first stage have no expansion, so their convolutions have other names."""
