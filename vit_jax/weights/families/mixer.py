"""MLP-Mixer: `.npz` of vision_transformer and big_vision, and files of timm."""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.weights.families import flax, timm
from vit_jax.weights.families.record import Family, Files, Published
from vit_jax.weights.tables import table

FLAX = table("""
    backbone/stem | stem | flax
    backbone/blocks/{norm1,norm2} | MixerBlock_{i}/{LayerNorm_0,LayerNorm_1} | flax norm
    backbone/blocks/{tokens,channels}/{up,down} | MixerBlock_{i}/{token,channel}_mixing/{Dense_0,Dense_1} | flax
    backbone/norm | pre_head_layer_norm | flax norm
    head | head | flax
""")
TIMM = table("""
    backbone/stem | stem.proj | conv
    backbone/blocks/{norm1,norm2} | blocks.{i}.{norm1,norm2} | norm
    backbone/blocks/{tokens,channels}/{up,down} | blocks.{i}.mlp_{tokens,channels}.{fc1,fc2} | dense
    backbone/norm | norm | norm
    head | head | dense
""")

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
