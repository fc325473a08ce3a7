"""Datasets to fine-tune on, and the grids of learning rates and lengths that the papers try on each.

The configs `finetune.py`, `mae_finetune.py` and `bit_hyperrule.py` hold the settings of the runs. Grids are published
tables: `vit` is Table 4 of the ViT paper (arXiv 2010.11929, Appendix B.1.1), `augreg` section 3.4 of AugReg
(2106.10270). A phase is `final`, which trains on all training examples and evaluates on the test split, or `tune`,
which holds out part of the training examples and evaluates on these.
"""
from __future__ import annotations

import dataclasses
import math

from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes.studies import Point

# Networks with public weights, and those of the ViT paper's Table 6, by the names of `sizes.model`.
MODELS = ('B/16', 'Ti/16', 'S/32', 'S/16', 'S/8', 'B/32', 'B/8', 'L/32', 'L/16', 'H/14', 'R+Ti/16', 'R26+S/32',
          'R26+B/32', 'R50+B/16', 'R50+L/32', 'DINOv2-S/14', 'DINOv2-B/14', 'DINOv2-L/14', 'DINOv2-g/14',
          'DINOv2-reg-S/14', 'DINOv2-reg-B/14', 'DINOv2-reg-L/14', 'DINOv2-reg-g/14', 'DeiT-distilled-Ti/16',
          'DeiT-distilled-S/16', 'DeiT-distilled-B/16', 'DeiT-III-S/16', 'DeiT-III-B/16', 'DeiT-III-L/16',
          'DeiT-III-H/14', 'Mixer-B/16', 'Mixer-B/32', 'Mixer-L/16', 'BiT-R50x1', 'BiT-R50x3', 'BiT-R101x1',
          'BiT-R101x3', 'BiT-R152x2', 'BiT-R152x4', 'R50+B/32', 'R50+L/16', 'BiT-R50x2', 'BiT-R152x1', 'BiT-R200x3')
PROTOCOLS = ('vit', 'augreg', 'mae', 'hyperrule')
SCALED = ('vit', 'augreg')
"""Protocols whose length and batch size may follow from the number of images."""
PHASES = ('final', 'tune')
WARMUP = {500: 100, 2_500: 200, 10_000: 500, 20_000: 500}
"""Steps of warm-up for each length: AugReg, section 3.4, as the ViT paper gives none."""


@dataclasses.dataclass(frozen=True)
class Scale:
  """Length and batch size of a run, and the durations that follow from them."""
  batch_size: int  # images a step
  steps: int       # of the run
  warmup: str      # the part of the run in which the learning rate rises
  lr: float        # the highest learning rate
  every: str = '10 %'          # between evaluations
  log_every: str = '50 steps'  # between values of the training loss


BATCH, OWN_BATCH = 512, 32
"""Images a step in the papers, and for one's own images if their number is not known."""
BATCHES = (8, 128)
"""The smallest and the largest batch of `scale`."""
EPOCHS, STEPS = 10, (150, 20_000)
"""The length of `scale`, and its bounds in steps; 20,000 steps are the ViT paper's for ImageNet."""


def published(steps: int, warmup: int, lr: float, dataset: str) -> Scale:
  """Returns the length and the learning rate of a paper; for `own`, with smaller batches and a relative warm-up."""
  if dataset == 'own':
    return Scale(OWN_BATCH, steps, f'{100 * warmup / steps:g} %', lr)
  return Scale(BATCH, steps, f'{warmup} steps', lr)


def scale(num_images: int) -> Scale:
  """Returns the length and batch size for a training set of any size.

  They are those of `fitted`; the warm-up is a tenth of the run. Evaluations are an epoch apart, but at least a 20th and
  at most a fifth of the run.

  Raises:
    UserError: there are too few images.
  """
  if num_images < 2:
    raise UserError(f'examples: expected at least 2 training images, got {num_images}. Add images.')
  batch_size, steps = fitted(num_images, batches=BATCHES, epochs=EPOCHS, steps=STEPS)
  an_epoch = num_images / batch_size
  every = min(max(round(an_epoch), round(steps / 20)), round(steps / 5))
  return Scale(batch_size, steps, '10 %', .01, f'{every} steps', f'{min(50, every)} steps')


def fitted(num_images: int, *, batches: tuple[int, int], epochs: int, steps: tuple[int, int]) -> tuple[int, int]:
  """Returns the batch size and the number of steps for a training set.

  The batch size is the largest power of two that is at most an eighth of the set, within `batches`, and at most the
  complete set. The length is `epochs`, within `steps`.
  """
  batch_size = min(max(batches[0], 2 ** int(math.log2(max(1, num_images / 8)))), batches[1], num_images)
  return batch_size, min(max(steps[0], round(epochs * num_images / batch_size)), steps[1])


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A dataset to fine-tune on. `tuned` and `held_out` are the parts of `train` with which settings are chosen."""
  source: str
  num_examples: int  # of `train`
  num_classes: int
  num_tuned: int  # examples of `tuned`
  tuned: str
  held_out: str
  test: str  # for the end
  rates: tuple[float, ...]  # learning rates of the ViT paper, Table 4
  augreg_rates: tuple[float, ...]
  lengths: tuple[int, ...]  # in steps of 512 images. The ViT paper takes the first one, AugReg tries all
  side_px: int  # of a typical image, for BiT-HyperRule
  train: str = 'train'


_RATES, _AUGREG = (.001, .003, .01, .03), (.001, .003, .01)
DATASETS = {
    'cifar10': Dataset('tfds:cifar10', 50_000, 10, 49_000, 'train[:98%]', 'train[98%:]', 'test', _RATES, _AUGREG,
                       (10_000, 2_500), 32),
    'cifar100': Dataset('tfds:cifar100', 50_000, 100, 49_000, 'train[:98%]', 'train[98%:]', 'test', _RATES, _AUGREG,
                        (10_000, 2_500), 32),
    'imagenet2012': Dataset('tfds:imagenet2012', 1_281_167, 1_000, 1_268_355, 'train[:99%]', 'train[99%:]',
                            'validation', (.003, .01, .03, .06), (.01, .03), (20_000,), 400),
    'pets': Dataset('tfds:oxford_iiit_pet', 3_680, 37, 3_312, 'train[:90%]', 'train[90%:]', 'test', _RATES, _AUGREG,
                    (500, 2_500), 400),
    'flowers': Dataset('tfds:oxford_flowers102', 1_020, 102, 918, 'train[:90%]', 'train[90%:]', 'test', _RATES, _AUGREG,
                       (500, 2_500), 500),
    # TFDS has a single split; 60/20/20 as in VTAB (arXiv 1910.04867).
    'resisc45': Dataset('tfds:resisc45', 25_200, 45, 18_900, 'train[:60%]', 'train[60%:80%]', 'train[80%:]', _RATES,
                        _AUGREG, (2_500, 10_000), 256, train='train[:80%]'),
    # AugReg's Kitti-distance (section 3.4) is VTAB's task on the complete dataset. Table 4 of the ViT paper has no
    # rates for it; those of its other small datasets are used.
    'kitti': Dataset('vtab:kitti/distance', 6_770, 4, 6_347, 'train', 'val', 'test', _RATES, _AUGREG, (500, 2_500), 682,
                     train='trainval'),
    # A user's own dataset, of any kind and size; examples and classes are counted by the source.
    'own': Dataset('folder:PATH', 0, 0, 0, 'train[:90%]', 'train[90%:]', 'test', _RATES, _AUGREG, (500, 2_500), 400),
}


def data(dataset: str, phase: str, recipe: s.Recipe) -> s.Data:
  """Returns the splits of a dataset in a phase.

  The EXIF orientation of a user's own photographs is left open; published pipelines ignore it.
  """
  one = DATASETS[dataset]
  recipe = dataclasses.replace(recipe, exif_orientation=s.Exif.AUTO if dataset == 'own' else s.Exif.FALSE)
  if phase == 'final':
    return s.Data(source=one.source, train_split=one.train, eval_split=one.test, num_examples=one.num_examples,
                  num_classes=one.num_classes, recipe=recipe)
  return s.Data(source=one.source, train_split=one.tuned, eval_split=one.held_out, num_examples=one.num_tuned,
                num_classes=one.num_classes, recipe=recipe)


def side(px: int, network: s.Model) -> int:
  """Returns the side of the images, rounded down to whole patches."""
  return px - px % getattr(network, 'patch', 1)


def grid(dataset: str, protocol: str) -> list[Point]:
  """Returns what a protocol tries on a dataset before the final runs.

  It is empty where the protocol has a rule instead.
  """
  one = DATASETS[dataset]
  match protocol:
    case 'vit':
      return [Point(rate, one.lengths[0], WARMUP[one.lengths[0]]) for rate in one.rates]
    case 'augreg':
      return [Point(rate, steps, WARMUP[steps]) for steps in one.lengths for rate in one.augreg_rates]
    case _:
      return []
