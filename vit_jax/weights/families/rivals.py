"""Other networks than ViTs: MLP-Mixer, Big Transfer (BiT) and EfficientNet."""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.weights.families import flax, record, timm
from vit_jax.weights.families.record import Clues, Family, Files, Published
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import NORMS, PILLOW, TF
from vit_jax.weights.tables import table

MIXER_FLAX = table("""
    backbone/stem | stem | flax
    backbone/blocks/{norm1,norm2} | MixerBlock_{i}/{LayerNorm_0,LayerNorm_1} | flax norm
    backbone/blocks/{tokens,channels}/{up,down} | MixerBlock_{i}/{token,channel}_mixing/{Dense_0,Dense_1} | flax
    backbone/norm | pre_head_layer_norm | flax norm
    head | head | flax
""")
MIXER_TIMM = table("""
    backbone/stem | stem.proj | conv
    backbone/blocks/{norm1,norm2} | blocks.{i}.{norm1,norm2} | norm
    backbone/blocks/{tokens,channels}/{up,down} | blocks.{i}.mlp_{tokens,channels}.{fc1,fc2} | dense
    backbone/norm | norm | norm
    head | head | dense
""")
MIXER = Family(
    'mixer', 'MLP-Mixer', '`.npz` of vision_transformer and big_vision; timm',
    files=(
        Files('flax', lambda t: any(name.startswith('MixerBlock_') for name in t), MIXER_FLAX, flax.HINTS,
              label='vision_transformer', formats=('vision_transformer', 'big_vision'), network=schema.Mixer),
        Files('timm', lambda t: 'stem.proj.weight' in t and any('.mlp_tokens.' in name for name in t), MIXER_TIMM,
              timm.HINTS, label='timm', formats=('timm',), network=schema.Mixer)),
    addresses={
        **{f'{model}-i21k': f'gs://mixer_models/imagenet21k/{model}.npz' for model in ('Mixer-B_16', 'Mixer-L_16')},
        **{f'{model}-i1k': f'gs://mixer_models/imagenet1k/{model}.npz' for model in ('Mixer-B_16', 'Mixer-L_16')}},
    published=(Published(r'(Mixer-\w)_(\d+)-i21k', '{0}/{1}', 224, 'ImageNet-21k', 21_843, 'arXiv 2105.01601'),
               Published(r'(Mixer-\w)_(\d+)-i1k', '{0}/{1}', 224, 'ImageNet-1k', 1_000, 'arXiv 2105.01601')))

BIT_NAMES = table("""
    backbone/root/kernel | resnet/root_block/standardized_conv2d/kernel | same
    backbone/stage{s}/unit{u}/{proj,conv1,conv2,conv3}/kernel |
        resnet/block{s}/unit{u2}/{a/proj,a,b,c}/standardized_conv2d/kernel | same
    backbone/stage{s}/unit{u}/{norm1,norm2,norm3}/{scale,bias} |
        resnet/block{s}/unit{u2}/{a,b,c}/group_norm/{gamma,beta} | vector
    backbone/norm/{scale,bias} | resnet/group_norm/{gamma,beta} | vector
    head/kernel | resnet/head/conv2d/kernel | point
    head/bias | resnet/head/conv2d/bias | same
""")
"""The norm before a convolution is stored with the convolution."""
BIT_TIMM = table("""
    backbone/root/kernel | stem.conv.weight | filter
    backbone/stage{s}/unit{u}/{conv1,conv2,conv3,proj}/kernel |
        stages.{s0}.blocks.{u0}.{conv1,conv2,conv3,downsample.conv}.weight | filter
    backbone/stage{s}/unit{u}/{norm1,norm2,norm3} | stages.{s0}.blocks.{u0}.{norm1,norm2,norm3} | norm
    backbone/norm | norm | norm
    head | head.fc | point conv
""")

_SIZES, _PAPER = ('50x1', '50x3', '101x1', '101x3', '152x2', '152x4'), 'arXiv 1912.11370'
BIT = Family(
    'bit', 'BiT', '`.npz` of the authors; timm',
    files=(
        Files('file', record.named('resnet/root_block/standardized_conv2d/kernel'), BIT_NAMES, network=schema.ResNet,
              formats=('bit',)),
        Files('timm', record.named('stem.conv.weight', 'stages.0.blocks.0.conv1.weight'), BIT_TIMM,
              Hints(settings=timm.STEM), label='timm', formats=('timm',), network=schema.ResNet)),
    images={**NORMS['half'], **TF, 'resize': 0},
    unsupported={r'stages\..*running_mean': 'it is a ResNet with BatchNorm; that of BiT has GroupNorm'},
    addresses={f'BiT-{data}-R{size}{tuned}': f'gs://bit_models/BiT-{data}-R{size}{tuned}.npz' for data in 'SM'
               for size in _SIZES for tuned in ('', '-ILSVRC2012') if data == 'M' or not tuned},
    published=(Published(r'BiT-S-(R\d+x\d)', 'BiT-{0}', 224, 'ImageNet-1k', 1_000, _PAPER),
               Published(r'BiT-M-(R\d+x\d)', 'BiT-{0}', 224, 'ImageNet-21k', 21_843, _PAPER),
               Published(r'BiT-M-(R\d+x\d)-ILSVRC2012', 'BiT-{0}', 480, 'ImageNet-21k+1k', 1_000, _PAPER)))

EFFICIENTNET_NAMES = table("""
    backbone/{stem,top}/conv/kernel | {conv_stem,conv_head}.weight | filter
    backbone/{stem,top}/norm | {bn1,bn2} | norm
    state/{stem,top}/norm | {bn1,bn2} | statistics
    head | classifier | dense
    backbone/stage1/block{u}/{depthwise,project}/conv/kernel | blocks.0.{u0}.{conv_dw,conv_pw}.weight | filter
    backbone/stage1/block{u}/{depthwise,project}/norm | blocks.0.{u0}.{bn1,bn2} | norm
    state/stage1/block{u}/{depthwise,project}/norm | blocks.0.{u0}.{bn1,bn2} | statistics
    backbone/stage1/block{u}/gate/{down,up} | blocks.0.{u0}.se.{conv_reduce,conv_expand} | point conv
    backbone/stage{t}/block{u}/{expand,depthwise,project}/conv/kernel |
        blocks.{t0}.{u0}.{conv_pw,conv_dw,conv_pwl}.weight | filter
    backbone/stage{t}/block{u}/{expand,depthwise,project}/norm | blocks.{t0}.{u0}.{bn1,bn2,bn3} | norm
    state/stage{t}/block{u}/{expand,depthwise,project}/norm | blocks.{t0}.{u0}.{bn1,bn2,bn3} | statistics
    backbone/stage{t}/block{u}/gate/{down,up} | blocks.{t0}.{u0}.se.{conv_reduce,conv_expand} | point conv
""")
"""Blocks of the first stage have no expansion, so their convolutions have other names."""


def _warn(_: schema.Model, clues: Clues) -> list[str]:
  """Returns a warning if nothing says that it is a network of the authors. Raises UserError if it is another."""
  if other := [name for name in clues.names if name.startswith('efficientnet_')]:
    raise UserError(f'expected a network of the authors, tf_efficientnet_…, got {other[0]}, which pads as PyTorch does '
                    'and has another epsilon. Use the tf_ variant.')
  is_known = clues.has_config or any(name.startswith('tf_efficientnet_') for name in clues.names)
  return [] if is_known else ['it is assumed to be a tf_efficientnet_…; the efficientnet_… of timm have the same '
                              'tensors, and other results']


EFFICIENTNET = Family(
    'efficientnet', 'EfficientNet', 'timm, with running statistics',
    files=(Files('timm', record.named('conv_stem.weight'), EFFICIENTNET_NAMES, warn=_warn, label='efficientnet',
                 formats=('timm',), network=schema.EfficientNet),),
    images={**NORMS['imagenet'], **PILLOW, 'resize': .875})
