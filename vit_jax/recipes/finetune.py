"""Fine-tuning as the papers do it: what differs by data set, and by protocol.

Protocols: `vit` is Table 4 of the ViT paper (arXiv 2010.11929, Appendix B.1.1), `augreg` section 3.4 of AugReg
(2106.10270), `mae` Table 9 of MAE (2111.06377), which is BEiT's too, `hyperrule` BiT-HyperRule (1912.11370,
section 3.3). A phase is `final`, on all training examples and measured on the test split, or `tune`, which holds part
of the training examples out and is measured on these.
"""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

from vit_jax.config import schema as s
from vit_jax.core.errors import UserError

# Networks with public weights, by the names of `sizes.model`.
MODELS = ('B/16', 'Ti/16', 'S/32', 'S/16', 'S/8', 'B/32', 'B/8', 'L/32', 'L/16', 'H/14', 'R+Ti/16', 'R26+S/32',
          'R26+B/32', 'R50+B/16', 'R50+L/32', 'DINOv2-S/14', 'DINOv2-B/14', 'DINOv2-L/14', 'DINOv2-g/14',
          'DINOv2-reg-S/14', 'DINOv2-reg-B/14', 'DINOv2-reg-L/14', 'DINOv2-reg-g/14', 'DeiT-distilled-Ti/16',
          'DeiT-distilled-S/16', 'DeiT-distilled-B/16', 'DeiT-III-S/16', 'DeiT-III-B/16', 'DeiT-III-L/16',
          'DeiT-III-H/14', 'Mixer-B/16', 'Mixer-B/32', 'Mixer-L/16', 'BiT-R50x1', 'BiT-R50x3', 'BiT-R101x1',
          'BiT-R101x3', 'BiT-R152x2', 'BiT-R152x4')
PROTOCOLS = ('vit', 'augreg', 'mae', 'hyperrule')
PHASES = ('final', 'tune')
POLYAK_PX = 512  # from here on ImageNet runs are averaged (ViT paper, section 4.1: 512 px for L/16, 518 for H/14)


class Budget(NamedTuple):
  """Length and warm-up in steps of 512 images."""
  steps: int
  warmup: int


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A set to fine-tune on.

  train: all `num_examples` for training; `tuned` and `held_out` are its parts for choosing; `test` is for the end.
  rates: grid of learning rates, ViT paper, Table 4.
  budgets: the paper's length first; AugReg tries all.
  side_px: of a typical picture, for BiT-HyperRule.
  """
  source: str
  num_examples: int
  num_classes: int
  num_tuned: int
  tuned: str
  held_out: str
  test: str
  rates: tuple[float, ...]
  augreg_rates: tuple[float, ...]
  budgets: tuple[Budget, ...]
  side_px: int
  train: str = 'train'


_SMALL, _LONG, _LONGEST = Budget(500, 100), Budget(10_000, 500), Budget(20_000, 500)
_MIDDLE = Budget(2_500, 200)  # AugReg, section 3.4
_RATES, _AUGREG = (.001, .003, .01, .03), (.001, .003, .01)
DATASETS = {
    'cifar10': Dataset('tfds:cifar10', 50_000, 10, 49_000, 'train[:98%]', 'train[98%:]', 'test', _RATES, _AUGREG,
                       (_LONG, _MIDDLE), 32),
    'cifar100': Dataset('tfds:cifar100', 50_000, 100, 49_000, 'train[:98%]', 'train[98%:]', 'test', _RATES, _AUGREG,
                        (_LONG, _MIDDLE), 32),
    'imagenet2012': Dataset('tfds:imagenet2012', 1_281_167, 1_000, 1_268_355, 'train[:99%]', 'train[99%:]',
                            'validation', (.003, .01, .03, .06), (.01, .03), (_LONGEST,), 400),
    'pets': Dataset('tfds:oxford_iiit_pet', 3_680, 37, 3_312, 'train[:90%]', 'train[90%:]', 'test', _RATES, _AUGREG,
                    (_SMALL, _MIDDLE), 400),
    'flowers': Dataset('tfds:oxford_flowers102', 1_020, 102, 918, 'train[:90%]', 'train[90%:]', 'test', _RATES, _AUGREG,
                       (_SMALL, _MIDDLE), 500),
    # TFDS has a single split; 60/20/20 as in VTAB (arXiv 1910.04867).
    'resisc45': Dataset('tfds:resisc45', 25_200, 45, 18_900, 'train[:60%]', 'train[60%:80%]', 'train[80%:]', _RATES,
                        _AUGREG, (_MIDDLE, _LONG), 256, train='train[:80%]'),
    # AugReg's Kitti-distance (section 3.4) is VTAB's task on the whole set. Table 4 of the ViT paper has no rates for
    # it; those of its other small sets are taken.
    'kitti': Dataset('vtab:kitti/distance', 6_770, 4, 6_347, 'train', 'val', 'test', _RATES, _AUGREG,
                     (_SMALL, _MIDDLE), 682, train='trainval'),
    # A person's own, of any kind and size; the source counts examples and classes.
    'own': Dataset('folder:PATH', 0, 0, 0, 'train[:90%]', 'train[90%:]', 'test', _RATES, _AUGREG,
                   (_SMALL, _MIDDLE), 400),
}


class Rule(NamedTuple):
  """BiT-HyperRule (section 3.3) for fewer than `below` examples, in steps; the rate is divided by 10 at each drop."""
  below: float
  steps: int
  drops: tuple[int, ...]
  warmup: int


_RULES = (Rule(20_000, 500, (200, 300, 400), 100), Rule(500_000, 10_000, (3_000, 6_000, 9_000), 500),
          Rule(float('inf'), 20_000, (6_000, 12_000, 18_000), 500))


class Point(NamedTuple):
  """A choice of the grid: learning rate and budget."""
  rate: float
  budget: Budget

  @property
  def name(self) -> str:
    return f'lr{self.rate:g}_steps{self.budget.steps}'


def number(name: str, text: str) -> int:
  """A whole number from an argument; '' is 0.

  Raises:
    UserError: it is none.
  """
  if text and not text.isdecimal():
    raise UserError(f'{name}={text} is no whole number')
  return int(text or 0)


def grid(dataset: str, protocol: str) -> list[Point]:
  """What a protocol tries on a data set before the final runs; nothing where it has a rule instead."""
  data = DATASETS[dataset]
  match protocol:
    case 'vit':
      return [Point(rate, data.budgets[0]) for rate in data.rates]
    case 'augreg':
      return [Point(rate, budget) for budget in data.budgets for rate in data.augreg_rates]
    case _:
      return []


def build(network: s.Model, name: str, dataset: str, *, protocol: str, phase: str, px: int, point: Point | None = None,
          num_examples: int = 0, side_px: int = 0) -> s.Config:
  """A fine-tuning run.

  Args:
    network: its settings; changed where the protocol says so.
    name: of the network, such as `L/16`: some settings go by its size.
    dataset: one of `DATASETS`.
    protocol: one of `PROTOCOLS`.
    phase: one of `PHASES`.
    px: side of the pictures; 0 = the protocol's. Rounded down to whole patches.
    point: rate and budget; None = the protocol's, the third rate of a grid's first four.
    num_examples: of training, for BiT-HyperRule on `own` data.
    side_px: of its pictures, likewise.

  Raises:
    UserError: BiT-HyperRule is to be had on data of unknown size.
  """
  data = DATASETS[dataset]
  config = _begin(network, name, dataset, protocol=protocol, phase=phase)
  match protocol:
    case 'mae':
      config = _mae(config, name)
    case 'hyperrule':
      config = _hyperrule(config, data, num_examples=num_examples or data.num_examples, side_px=side_px or data.side_px)
    case _:
      config = _table_4(config, point or Point(data.rates[2], data.budgets[0]))
  if dataset == 'own':  # photographs of a person's own, whose orientation published pipelines do not read
    recipe = dataclasses.replace(config.data.recipe, exif_orientation=True)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, recipe=recipe))
  side = px or config.image_px[0]
  patch = getattr(network, 'patch', 1)
  config = dataclasses.replace(config, image_px=(side - side % patch,) * 2)
  if protocol == 'vit' and dataset == 'imagenet2012' and side >= POLYAK_PX:
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, ema=.9999))
  return config


def _begin(network: s.Model, name: str, dataset: str, *, protocol: str, phase: str) -> s.Config:
  """What all protocols have in common: data, evaluation, batch size."""
  data, is_final = DATASETS[dataset], phase == 'final'
  train, test = (data.train, data.test) if is_final else (data.tuned, data.held_out)
  config = s.Config(
      name=f'finetune {name} {dataset} {protocol}', batch_size=512, model=network,
      data=s.Data(source=data.source, train_split=train, eval_split=test,
                  num_examples=data.num_examples if is_final else data.num_tuned, num_classes=data.num_classes),
      evals={'test' if is_final else 'val': s.TopK(every='10 %')}, checkpoints=s.Checkpoints(every='10 %'))
  if dataset != 'own' or protocol == 'hyperrule':  # the paper's way to resize images: without their aspect ratio
    config = dataclasses.replace(config, init_settings=s.InitSettings.NETWORK)
  return config


def _table_4(config: s.Config, point: Point) -> s.Config:
  """ViT paper, Table 4, and AugReg: both fine-tune by google-research/vision_transformer, with TensorFlow's crops."""
  rate, budget = point
  recipe = s.Recipe(crop_sampler=s.CropSampler.TENSORFLOW, crop_aspect=(.75, 1.33))
  return dataclasses.replace(
      config, length=f'{budget.steps} steps', image_px=(384, 384),
      data=dataclasses.replace(config.data, recipe=recipe), optimizer=s.Sgd(
          lr=rate, mu_dtype=s.DType.BF16, clip_norm=1., schedule=s.Schedule(warmup=f'{budget.warmup} steps')))


def _mae(config: s.Config, name: str) -> s.Config:
  """MAE, Table 9; by size: its code. The new head starts at zero here, at a normal of deviation 2e-5 there."""
  size = name.removeprefix('ViT-').partition('/')[0]
  by_size = {'L': ('50 epochs', 1e-3, .75, .2), 'H': ('50 epochs', 1e-3, .75, .3)}
  length, rate, layer_decay, drop_path = by_size.get(size, ('100 epochs', 5e-4, .65, .1))
  recipe = s.Recipe(
      crop_area=(.08, 1.), mixup=.8, cutmix=1., erase=s.Erase(.25),
      randaugment=s.RandAugment(layers=2, magnitude=9., magnitude_std=.5, probability=.5, table=s.OpTable.TIMM),
      interpolation=s.Interpolation.BICUBIC, antialias=True, eval_resize_px=256,
      eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406), std=(.229, .224, .225))
  network = config.model
  if isinstance(network, s.ViT):
    network = dataclasses.replace(network, pool=s.Pool.PATCHES, norm_after_pool=True, drop_path=drop_path,
                                  gelu=s.Gelu.EXACT, position_resize=s.PositionResize.BICUBIC)
  return dataclasses.replace(
      config, length=length, batch_size=1024, model=network, data=dataclasses.replace(config.data, recipe=recipe),
      objective=s.Supervised(label_smoothing=.1),
      optimizer=s.AdamW(lr=rate, base_batch_size=256, weight_decay=.05, layer_decay=layer_decay, clip_norm=0.,
                        schedule=s.Schedule(warmup='5 epochs', end_lr=1e-6)))


def _hyperrule(config: s.Config, data: Dataset, *, num_examples: int, side_px: int) -> s.Config:
  """BiT-HyperRule: resolution by the area of the pictures, length and mixup by the number of examples."""
  if not num_examples:
    raise UserError('BiT-HyperRule goes by the number of training examples and the side of the pictures, which '
                    f'{data.source} leaves open; want the arguments examples=N,side=PX')
  resize, crop = (160, 128) if side_px < 96 else (512, 480)
  rule = next(rule for rule in _RULES if num_examples < rule.below)
  recipe = s.Recipe(crop=s.Crop.WINDOW, crop_area=((crop / resize)**2,) * 2, mixup=.1 if num_examples >= 20_000 else 0.)
  return dataclasses.replace(
      config, length=f'{rule.steps} steps', image_px=(crop, crop), data=dataclasses.replace(config.data, recipe=recipe),
      optimizer=s.Sgd(lr=.003, clip_norm=0., schedule=s.Schedule(
          s.Decay.STEPS, warmup=f'{rule.warmup} steps', milestones=tuple(f'{step} steps' for step in rule.drops),
          gamma=.1)))

