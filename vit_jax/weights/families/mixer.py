"""MLP-Mixer: `.npz` of vision_transformer and big_vision, and files of timm."""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.weights.families import flax, timm
from vit_jax.weights.families.record import Family, Files, Published
from vit_jax.weights.tables import CONV, Table, flax_norm, layer, norm
from vit_jax.weights.tables import flax as flax_layer

_BLOCKS, _FLAX_BLOCK = 'backbone/blocks', 'MixerBlock_{i}'

FLAX: Table = (
    *flax_layer('backbone/stem', 'stem'),
    *flax_norm(f'{_BLOCKS}/norm1', f'{_FLAX_BLOCK}/LayerNorm_0'),
    *flax_norm(f'{_BLOCKS}/norm2', f'{_FLAX_BLOCK}/LayerNorm_1'),
    *flax_layer(f'{_BLOCKS}/tokens/up', f'{_FLAX_BLOCK}/token_mixing/Dense_0'),
    *flax_layer(f'{_BLOCKS}/tokens/down', f'{_FLAX_BLOCK}/token_mixing/Dense_1'),
    *flax_layer(f'{_BLOCKS}/channels/up', f'{_FLAX_BLOCK}/channel_mixing/Dense_0'),
    *flax_layer(f'{_BLOCKS}/channels/down', f'{_FLAX_BLOCK}/channel_mixing/Dense_1'),
    *flax_norm('backbone/norm', 'pre_head_layer_norm'), *flax_layer('head', 'head'),
)
TIMM: Table = (
    *layer('backbone/stem', 'stem.proj', layout=CONV),
    *norm(f'{_BLOCKS}/norm1', 'blocks.{i}.norm1'), *norm(f'{_BLOCKS}/norm2', 'blocks.{i}.norm2'),
    *layer(f'{_BLOCKS}/tokens/up', 'blocks.{i}.mlp_tokens.fc1'),
    *layer(f'{_BLOCKS}/tokens/down', 'blocks.{i}.mlp_tokens.fc2'),
    *layer(f'{_BLOCKS}/channels/up', 'blocks.{i}.mlp_channels.fc1'),
    *layer(f'{_BLOCKS}/channels/down', 'blocks.{i}.mlp_channels.fc2'),
    *norm('backbone/norm', 'norm'), *layer('head', 'head'),
)

FAMILY = Family(
    'mixer', 'MLP-Mixer', '`.npz` of vision_transformer and big_vision; timm',
    files=(
        Files('flax', lambda t: any(name.startswith('MixerBlock_') for name in t), FLAX, flax.HINTS,
              label='vision_transformer', formats=('vision_transformer', 'big_vision'), network=schema.Mixer),
        Files('timm', lambda t: 'stem.proj.weight' in t and any('.mlp_tokens.' in name for name in t), TIMM,
              timm.HINTS, label='timm', formats=('timm',), network=schema.Mixer)),
    addresses={
        **{f'{model}-i21k': f'gs://mixer_models/imagenet21k/{model}.npz' for model in ('Mixer-B_16', 'Mixer-L_16')},
        **{f'{model}-i1k': f'gs://mixer_models/imagenet1k/{model}.npz' for model in ('Mixer-B_16', 'Mixer-L_16')}},
    published=(Published(r'(Mixer-\w)_(\d+)-i21k', '{0}/{1}', 224, 'ImageNet-21k', 21_843, 'arXiv 2105.01601'),
               Published(r'(Mixer-\w)_(\d+)-i1k', '{0}/{1}', 224, 'ImageNet-1k', 1_000, 'arXiv 2105.01601')))
