"""Big Transfer (BiT): `.npz` of its authors, and files of timm."""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.weights.families import timm
from vit_jax.weights.families.record import Family, Files, Published
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import NORMS, TF
from vit_jax.weights.tables import CONV, POINT, POINT_CONV, SAME, VECTOR, Entry, Table, layer, norm


def _unit(ours: str, theirs: str) -> list[Entry]:
  """Returns the entries of a unit, in which the norm before a convolution is stored with the convolution."""
  found = [Entry(f'{ours}/proj/kernel', f'{theirs}/a/proj/standardized_conv2d/kernel', SAME)]
  for i, letter in enumerate('abc', 1):
    found += [Entry(f'{ours}/conv{i}/kernel', f'{theirs}/{letter}/standardized_conv2d/kernel', SAME),
              Entry(f'{ours}/norm{i}/scale', f'{theirs}/{letter}/group_norm/gamma', VECTOR),
              Entry(f'{ours}/norm{i}/bias', f'{theirs}/{letter}/group_norm/beta', VECTOR)]
  return found


TABLE: Table = (
    Entry('backbone/root/kernel', 'resnet/root_block/standardized_conv2d/kernel', SAME),
    *_unit('backbone/stage{s}/unit{u}', 'resnet/block{s}/unit{u2}'),
    Entry('backbone/norm/scale', 'resnet/group_norm/gamma', VECTOR),
    Entry('backbone/norm/bias', 'resnet/group_norm/beta', VECTOR),
    Entry('head/kernel', 'resnet/head/conv2d/kernel', POINT), Entry('head/bias', 'resnet/head/conv2d/bias', SAME),
)
TIMM: Table = (
    Entry('backbone/root/kernel', 'stem.conv.weight', CONV),
    *(entry for entry in timm.unit('backbone/stage{s}/unit{u}', 'stages.{s0}.blocks.{u0}')
      if 'proj_norm' not in entry.ours),
    *norm('backbone/norm', 'norm'), *layer('head', 'head.fc', layout=POINT_CONV),
)

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
