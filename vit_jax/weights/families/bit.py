"""Big Transfer (BiT): `.npz` of its authors, and files of timm."""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.weights.families import timm
from vit_jax.weights.families.record import Family, Files, Published
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import NORMS, TF
from vit_jax.weights.tables import table

TABLE = table("""
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
TIMM = table("""
    backbone/root/kernel | stem.conv.weight | filter
    backbone/stage{s}/unit{u}/{conv1,conv2,conv3,proj}/kernel |
        stages.{s0}.blocks.{u0}.{conv1,conv2,conv3,downsample.conv}.weight | filter
    backbone/stage{s}/unit{u}/{norm1,norm2,norm3} | stages.{s0}.blocks.{u0}.{norm1,norm2,norm3} | norm
    backbone/norm | norm | norm
    head | head.fc | point conv
""")

_SIZES, _BIT = ('50x1', '50x3', '101x1', '101x3', '152x2', '152x4'), 'arXiv 1912.11370'
FAMILY = Family(
    'bit', 'BiT', '`.npz` of the authors; timm',
    files=(
        Files('file', lambda t: 'resnet/root_block/standardized_conv2d/kernel' in t, TABLE, network=schema.ResNet,
              formats=('bit',)),
        Files('timm', lambda t: 'stem.conv.weight' in t and 'stages.0.blocks.0.conv1.weight' in t, TIMM,
              Hints(settings=timm.STEM), label='timm', formats=('timm',), network=schema.ResNet)),
    images={**NORMS['half'], **TF, 'resize': 0},
    unsupported={r'stages\..*running_mean': 'it is a ResNet with BatchNorm; that of BiT has GroupNorm'},
    addresses={f'BiT-{data}-R{size}{tuned}': f'gs://bit_models/BiT-{data}-R{size}{tuned}.npz' for data in 'SM'
               for size in _SIZES for tuned in ('', '-ILSVRC2012') if data == 'M' or not tuned},
    published=(Published(r'BiT-S-(R\d+x\d)', 'BiT-{0}', 224, 'ImageNet-1k', 1_000, _BIT),
               Published(r'BiT-M-(R\d+x\d)', 'BiT-{0}', 224, 'ImageNet-21k', 21_843, _BIT),
               Published(r'BiT-M-(R\d+x\d)-ILSVRC2012', 'BiT-{0}', 480, 'ImageNet-21k+1k', 1_000, _BIT)))
