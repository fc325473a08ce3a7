"""Settings of image preprocessing and augmentation."""
import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import field

from vit_jax.config.schema import checks
from vit_jax.config.schema import ranges as r
from vit_jax.config.schema.checks import NoEffect, Run, Settings, ascending, multiple, no_effect, problem
from vit_jax.config.schema.ranges import Range, ranged
from vit_jax.config.schema.vit import ViT

__all__ = (
    'Crop', 'CropInterpolation', 'CropSampler', 'Erase', 'Exif', 'Geometry', 'Interpolation', 'Jitter', 'OpTable',
    'RandAugment', 'Recipe', 'Views', 'num_groups')

MAX_TIMM = 10.  # timm cuts off larger magnitudes


class Exif(enum.Enum):
  """Whether images are turned as their EXIF says. A run records what it did: `auto` is decided when data is opened."""
  AUTO = 'auto'  # of a person's own files: folders, their shards, and files that are named
  TRUE = True
  FALSE = False  # as in published pipelines: tf.image.decode_jpeg and torchvision's loader of folders


class Crop(enum.Enum):
  """How a stored image becomes one of `image_px` for training."""
  INCEPTION = 'inception'  # random area and aspect ratio
  WINDOW = 'window'        # random place, shape of the image: as resizing to a little more and cropping at random
  RESIZE = 'resize'        # as for evaluation


class CropSampler(enum.Enum):
  """The distribution of random crops: the sampler of the program that a recipe is from."""
  TORCHVISION = 'torchvision'  # RandomResizedCrop: area uniform, aspect ratio log-uniform; DeiT, MAE, DINO, timm
  CLIPPED = 'clipped'          # likewise, but drawn once and its sides cut to the image's; MAE's linear probe, BYOL
  TENSORFLOW = 'tensorflow'    # sample_distorted_bounding_box: height and aspect ratio uniform; ViT, big_vision


class Interpolation(enum.Enum):
  """How pixels are resampled where a image is resized."""
  BILINEAR = 'bilinear'
  BICUBIC = 'bicubic'  # sharper; timm, DeiT, MAE, DINO
  AREA = 'area'        # mean over the covered area; big_vision's evaluation


class CropInterpolation(enum.Enum):
  """How random crops are resized in training, where that is not as in evaluation."""
  SAME = 'same'          # as `interpolation`
  BILINEAR = 'bilinear'
  BICUBIC = 'bicubic'


class Geometry(enum.Enum):
  """Whose program decides the resized size and the offset of the center crop in evaluation.

  The three differ where `eval_resize_px` is set; without it, all resize to `image_px` directly.
  """
  TORCHVISION = 'torchvision'  # short side to size, long side truncated, offset rounded half to even: timm, DeiT, MAE
  BIG_VISION = 'big_vision'    # short side to size, long side rounded half to even, offset rounded down
  HUGGINGFACE = 'huggingface'  # both sides to size (the aspect ratio is not preserved), offset rounded down


class OpTable(enum.Enum):
  """The operations of RandAugment, and what a magnitude means for each."""
  AUGREG = 'augreg'  # 16 operations, the pixels of big_vision's program; AugReg, Mixer. Magnitude 0 is not the identity
  TIMM = 'timm'      # 15 operations, each stronger with the magnitude (`inc1`), at most 10; DeiT, MAE, LV-ViT


@dataclasses.dataclass
class RandAugment(Settings):
  """RandAugment (arXiv 1909.13719). timm's rand-m9-mstd0.5-inc1: layers=2 magnitude=9 magnitude_std=.5
  probability=.5 table=timm."""
  layers: int = ranged(0, Range(0, 100))           # operations an image, one after the other; 0 = off
  magnitude: float = ranged(10., r.NOT_NEGATIVE)   # in tenths of each operation's range
  magnitude_std: float = ranged(0., r.NOT_NEGATIVE)  # of a normal added to it for each operation
  probability: float = ranged(1., r.SHARE)         # that a chosen operation is applied
  table: OpTable = OpTable.AUGREG
  without_effect = (NoEffect('layers', (0,)), NoEffect('table', (OpTable.AUGREG,), ('magnitude_std',)))

  def problems(self, config: Run, name: str) -> Iterator[str]:
    if self.table is OpTable.TIMM and self.magnitude > MAX_TIMM:
      yield problem(f'{name}.magnitude', f'at most {MAX_TIMM:g} with {name}.table=timm', self.magnitude)


@dataclasses.dataclass
class Jitter(Settings):
  """Color jitter: four operations in random order, each with a factor uniform in [1 - x, 1 + x]."""
  brightness: float = ranged(0., r.NOT_NEGATIVE)  # largest relative change
  contrast: float = ranged(0., r.NOT_NEGATIVE)  # largest relative change
  saturation: float = ranged(0., r.NOT_NEGATIVE)  # largest relative change
  hue: float = ranged(0., Range(0, .5))   # turns of the color circle, uniform in [-x, x]
  probability: float = ranged(1., r.SHARE)  # that an image is jittered at all

  @property
  def is_on(self) -> bool:
    """Whether any color changes."""
    return any((self.brightness, self.contrast, self.saturation, self.hue))


@dataclasses.dataclass
class Erase(Settings):
  """Random erasing (arXiv 1708.04896) after normalization, with normal noise in each pixel."""
  probability: float = ranged(0., r.SHARE)                   # of an image; 0 = off
  area: tuple[float, float] = ranged((.02, 1 / 3), r.UP_TO_1)  # of the image's area
  aspect: tuple[float, float] = ranged((.3, 1 / .3), r.POSITIVE)  # range of the ratio of its sides
  without_effect = (NoEffect('probability', (0.,), ('area', 'aspect')),)

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from ascending(f'{name}.area', self.area)
    yield from ascending(f'{name}.aspect', self.aspect)


@dataclasses.dataclass
class Views(Settings):
  """Several crops of each image instead of one, for self-supervision.

  Switched off by default. The other defaults are DINO's (arXiv 2104.14294); recipes state all of them.
  """
  on: bool = False  # several crops of each image
  num_local: int = ranged(8, Range(0, 1000))  # local crops, besides the two global ones of `image_px`
  local_px: int = ranged(96, r.PX)                                    # side of a local crop
  global_area: tuple[float, float] = ranged((.4, 1.), r.UP_TO_1)  # range of the area of a global crop, of the image
  local_area: tuple[float, float] = ranged((.05, .4), r.UP_TO_1)  # range of the area of a local crop, of the image
  # Probability: first and second global, local; sigma .1-2 px.
  blur: tuple[float, float, float] = ranged((1., .1, .5), r.SHARE)
  solarize: tuple[float, float, float] = ranged((0., .2, 0.), r.SHARE)  # probability: first and second global, local
  grayscale: float = ranged(.2, r.SHARE)                              # probability
  jitter: Jitter = field(default_factory=lambda: Jitter(.4, .4, .2, .1, probability=.8))
  # Size of copies of the global crops for the Gram teacher of Dinov3, divided by theirs; 1 = it sees the crops.
  gram_scale: float = ranged(1., Range(1, 8))
  gram_colors: bool = True  # whether these copies have the changed colors, the blur and the solarization of the crops
  without_effect = (NoEffect('on', (False,)), NoEffect('gram_scale', (1.,), ('gram_colors',)))

  def gram_px(self, image_px: tuple[int, int]) -> tuple[int, int]:
    """Returns height and width of the copies for a Gram teacher."""
    return round(image_px[0] * self.gram_scale), round(image_px[1] * self.gram_scale)

  def problems(self, config: Run, name: str) -> Iterator[str]:
    objective, patch = config.objective, getattr(config.model, 'patch', 1)
    if self.gram_scale > 1:
      if not objective.takes_copies:
        yield problem(f'{name}.gram_scale', f'1 for objective {type(objective).__name__}, which has no Gram teacher',
                      self.gram_scale)
      for side in self.gram_px(config.image_px):
        yield from multiple(f'{name}.gram_scale times image_px={config.image_px}', side, patch, f'model.patch={patch}')
    if not objective.takes_views:
      yield problem(f'{name}.on', f'False for objective {type(objective).__name__}, which takes one image', True)
    if self.num_local:
      yield from multiple(f'{name}.local_px', self.local_px, patch, f'model.patch={patch}')
    yield from ascending(f'{name}.global_area', self.global_area)
    yield from ascending(f'{name}.local_area', self.local_area)


@dataclasses.dataclass
class Recipe(Settings):
  """What happens to images. Geometry that needs the whole image on the host, the rest in the step."""
  exif_orientation: Exif = Exif.AUTO  # images are turned as their EXIF says
  max_image_pixels: int = ranged(178_956_970, Range(1, 2**40))  # a larger stored image counts as bad; Pillow's limit
  crop: Crop = Crop.INCEPTION
  crop_area: tuple[float, float] = ranged((0.05, 1.), r.UP_TO_1)  # of the image's area
  # Of inception; TensorFlow's programs: (0.75, 1.33).
  crop_aspect: tuple[float, float] = ranged((0.75, 4 / 3), r.POSITIVE)
  crop_sampler: CropSampler = CropSampler.TORCHVISION  # of inception and of views
  crop_tries: int = ranged(100, r.COUNT)  # of tensorflow, before it takes the whole image (max_attempts)
  # Of tensorflow: least part of the image that a crop shows; smaller ones count as tries (min_object_covered).
  crop_covered: float = ranged(0., r.SHARE)
  flip: bool = True  # left-right, probability 1/2
  shift_px: int = ranged(0, r.PX_OR_0)  # pad with zeros by this, crop at random
  rotate_degrees: float = ranged(0., Range(0, 180, unit='degrees'))  # mild affine: uniform in [-x, x]
  scale: float = ranged(0., r.BELOW_1)  # relative, uniform in [-x, x]
  shear: float = ranged(0., r.NOT_NEGATIVE)  # uniform in [-x, x]
  randaugment: RandAugment = field(default_factory=RandAugment)
  three_augment: bool = False  # grayscale, solarize or blur, one of them (DeiT III); then `jitter`
  jitter: Jitter = field(default_factory=Jitter)
  erase: Erase = field(default_factory=Erase)
  mixup: float = ranged(0., r.NOT_NEGATIVE)  # alpha of Beta(alpha, alpha); 0 = off
  cutmix: float = ranged(0., r.NOT_NEGATIVE)  # alpha of Beta(alpha, alpha), the part that is kept; 0 = off
  mix_probability: float = ranged(1., r.SHARE)  # that a batch is mixed at all
  cutmix_share: float = ranged(.5, r.SHARE)  # of mixed batches, where both are on, those with cutmix
  # Consecutive examples of a batch that share lambda, box and choice, as those of one device in DeiT; 0 = all of it.
  mix_group: int = ranged(0, r.COUNT_OR_0)
  repeats: int = ranged(1, r.COUNT)  # of each example in a batch (repeated augmentation); 1 = off
  views: Views = field(default_factory=Views)
  eval_resize_px: int = ranged(0, r.PX_OR_0)  # short side before the center crop; 0 = squash to image_px
  eval_geometry: Geometry = Geometry.BIG_VISION  # of resizing and cropping, where eval_resize_px is set
  # Side of the patches of images that evaluation resizes to their own aspect, which is that of the network; an image
  # gets at most as many patches as image_px has. 0 = all images have image_px.
  eval_native_patch: int = ranged(0, r.PX_OR_0)
  # Training at the own aspect too: the largest numbers of patches of an image, of which each step draws one; a number
  # that is there twice is drawn twice as often. () = images of image_px. Needs eval_native_patch.
  native_lengths: tuple[int, ...] = ranged((), r.COUNT)
  eval_area: bool = False  # evaluation resizes by `area`, whatever the next says (big_vision)
  interpolation: Interpolation = Interpolation.BILINEAR
  crop_interpolation: CropInterpolation = CropInterpolation.SAME  # of random crops in training; not of views
  antialias: bool = False  # the filter covers every stored pixel when shrinking (Pillow's)
  truncate: bool = False  # resized values are truncated to integers, as big_vision casts them; else they are rounded
  # Of RGB in [0, 1]. With data.channels other than 3, of each channel in its units; left alone, as prepare measured.
  mean: tuple[float, ...] = ranged((.5, .5, .5), r.ANY)
  std: tuple[float, ...] = ranged((.5, .5, .5), r.POSITIVE)  # like mean
  without_effect = (
      NoEffect('crop', (Crop.RESIZE,), ('crop_area', 'crop_interpolation')),
      NoEffect('crop', (Crop.WINDOW, Crop.RESIZE), ('crop_aspect', 'crop_sampler'),
               advice='Set crop=inception for it.'),
      NoEffect('crop_sampler', (CropSampler.TORCHVISION, CropSampler.CLIPPED), ('crop_tries', 'crop_covered')),
      NoEffect('interpolation', (Interpolation.AREA,), ('antialias', 'eval_area')))

  def __post_init__(self) -> None:
    if isinstance(self.exif_orientation, bool):  # as configs in Python may say it
      self.exif_orientation = Exif(self.exif_orientation)

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from ascending(f'{name}.crop_area', self.crop_area)
    yield from ascending(f'{name}.crop_aspect', self.crop_aspect)
    if self.crop is not Crop.RESIZE and self.views.on:
      yield from no_effect(self, name, ('crop_interpolation',), f'with {name}.views.on=True')
    elif self.crop is not Crop.RESIZE and self.crop_interpolation.value == self.interpolation.value:
      yield from no_effect(self, name, ('crop_interpolation',), f'with {name}.interpolation={self.interpolation.value}')
    yield from self._resize_problems(config, name)
    yield from self._mixing_problems(config, name)
    if not self.jitter.is_on:
      yield from no_effect(self.jitter, f'{name}.jitter', ('probability',),
                           'where brightness, contrast, saturation and hue are 0')
    if self.randaugment.layers and self.three_augment:
      yield problem(f'{name}.three_augment', f'False with {name}.randaugment.layers={self.randaugment.layers}', True,
                    'Three-Augment replaces RandAugment: set one of the two.')
    if self.repeats > 1 and config.batch_size < 2 * self.repeats:
      yield problem('batch_size', f'at least {2 * self.repeats}, two different examples, with {name}.repeats='
                    f'{self.repeats}', config.batch_size)
    if self.views.on and (others := self._augmentations()):
      yield problem(f'{name}.views.on', 'False with augmentation of single images', True,
                    f'Views have their own colors and crops. Switch off {", ".join(others)}.')

  @property
  def channels(self) -> int:
    """The number of channels of the images that this recipe is for, once mean and std are known."""
    return len(self.mean)

  @property
  def upright(self) -> bool:
    """Whether the EXIF orientation is applied. What is open is decided before (`data/orientation.py`)."""
    return self.exif_orientation is Exif.TRUE

  @property
  def is_unmeasured(self) -> bool:
    """Whether mean and std are the defaults, which are for RGB."""
    usual = (.5, .5, .5)
    return tuple(self.mean) == tuple(self.std) == usual

  def on_host(self) -> list[str]:
    """Returns the augmentations that are applied on the host, by name."""
    return checks.true_ones({'randaugment.layers': self.randaugment.layers > 0, 'three_augment': self.three_augment,
                             'jitter': self.jitter.is_on, 'views.on': self.views.on})

  def _augmentations(self) -> list[str]:
    """Returns the augmentations that views are made without."""
    numbers = ('mixup', 'cutmix', 'shift_px', 'scale', 'rotate_degrees', 'shear')
    return checks.true_ones({
        f'crop={self.crop.value}': self.crop is not Crop.INCEPTION, 'randaugment': self.randaugment.layers > 0,
        'three_augment': self.three_augment, 'jitter': self.jitter.is_on, 'erase': self.erase.probability > 0,
        **{name: getattr(self, name) > 0 for name in numbers}})

  def _resize_problems(self, config: Run, name: str) -> Iterator[str]:
    if self.eval_native_patch or self.native_lengths:
      yield from self._native_problems(config, name)
    if self.eval_resize_px and self.eval_resize_px < max(config.image_px):
      yield problem(f'{name}.eval_resize_px', f'0, or at least image_px={config.image_px}', self.eval_resize_px)
    if self.interpolation is not Interpolation.AREA and self.antialias and not self.eval_area:
      yield from no_effect(self, name, ('truncate',), f"with {name}.antialias=True, as Pillow's filters round")
    if self.eval_area and self.crop is Crop.RESIZE and self.interpolation is not Interpolation.AREA:
      yield problem(f'{name}.eval_area', f'False with {name}.crop=resize, where training resizes as evaluation does',
                    True, f'Set {name}.interpolation=area for both.')

  def _native_problems(self, config: Run, name: str) -> Iterator[str]:
    patch = config.model.patch if isinstance(config.model, ViT) else 0
    if not patch or self.eval_native_patch != patch:
      expected, advice = f'the patch of a ViT, here {patch or "none"}', ''
      if self.native_lengths:
        expected, advice = f'{expected}, with {name}.native_lengths', f'Set it, or {name}.native_lengths=().'
      else:
        expected = f'0, or {expected}'
      yield problem(f'{name}.eval_native_patch', expected, self.eval_native_patch, advice)
    if self.eval_resize_px:
      yield problem(f'{name}.eval_resize_px', f'0 with {name}.eval_native_patch, which shows complete images',
                    self.eval_resize_px)
    if self.channels != 3:
      yield problem(f'{name}.eval_native_patch', f'0 with {self.channels} channels', self.eval_native_patch)
    if self.native_lengths:
      yield from self._native_training_problems(config, name)

  def _native_training_problems(self, config: Run, name: str) -> Iterator[str]:
    """Yields problems of training on images of several sizes, which are patches when they reach the device."""
    if not config.objective.takes_native:
      yield problem(f'{name}.native_lengths', f'() for objective {type(config.objective).__name__}, which takes images '
                    'of one size', self.native_lengths)
    yield from checks.must_be_off(config, (f'{name}.mixup', f'{name}.cutmix', f'{name}.erase.probability'),
                                  f'with {name}.native_lengths, whose images have several sizes')
    yield from checks.must_be_off(config, ('data.pseudo.source', 'trackers.images'), f'with {name}.native_lengths')

  def _mixing_problems(self, config: Run, name: str) -> Iterator[str]:
    for mixing in ('mixup', 'cutmix'):
      if getattr(self, mixing) and config.batch_size % 2:
        yield problem('batch_size', f'an even number with {name}.{mixing}, which mixes pairs', config.batch_size)
    if not self.mixup and not self.cutmix:
      yield from no_effect(self, name, ('mix_probability', 'mix_group'), 'where mixup and cutmix are 0')
    if not self.mixup or not self.cutmix:
      yield from no_effect(self, name, ('cutmix_share',), 'unless mixup and cutmix are both on')
    yield from group_problems(f'{name}.mix_group', self.mix_group, config.batch_size, 'batch_size')


def num_groups(num: int, group: int) -> int:
  """Returns the groups of `group` consecutive ones among `num` examples; 1 if a group has all of them, or for 0."""
  return num // group if 0 < group < num else 1


def group_problems(name: str, group: int, num: int, of: str) -> Iterator[str]:
  """Yields problems of groups of mixing that do not divide `num` examples, or are not made of pairs."""
  if group % 2 or (0 < group < num and num % group):
    yield problem(name, f'0, or an even number that divides {of}={num}', group,
                  'Set it to 0 to draw once for all of them.')
