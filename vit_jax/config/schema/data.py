"""Settings of data: sources, and what becomes of a picture on its way into a batch."""
import dataclasses
import enum
from dataclasses import field

from vit_jax.config.schema.ranges import (
    ANY,
    BELOW_1,
    COUNT,
    COUNT_OR_0,
    INSIDE,
    NOT_NEGATIVE,
    POSITIVE,
    PX,
    PX_OR_0,
    SEED,
    SHARE,
    THREADS,
    UP_TO_1,
    Range,
    ranged,
)


class Crop(enum.Enum):
  """How a stored image becomes one of `image_px` for training."""
  INCEPTION = 'inception'  # random area and aspect ratio
  WINDOW = 'window'        # random place, shape of the picture: as resizing to a little more and cropping at random
  RESIZE = 'resize'        # as for evaluation


class CropSampler(enum.Enum):
  """The distribution of random crops: the sampler of the program that a recipe is from."""
  TORCHVISION = 'torchvision'  # RandomResizedCrop: area uniform, aspect ratio log-uniform; DeiT, MAE, DINO, timm
  CLIPPED = 'clipped'          # likewise, but drawn once and its sides cut to the image's; MAE's linear probe, BYOL
  TENSORFLOW = 'tensorflow'    # sample_distorted_bounding_box: height and aspect ratio uniform; ViT, big_vision


class Interpolation(enum.Enum):
  """How pixels are resampled where a picture is resized."""
  BILINEAR = 'bilinear'
  BICUBIC = 'bicubic'  # sharper; timm, DeiT, MAE, DINO
  AREA = 'area'        # mean over the covered area where both sides shrink, else bilinear


class CropInterpolation(enum.Enum):
  """How random crops are resized in training, where that is not as in evaluation."""
  SAME = 'same'          # as `interpolation`
  BILINEAR = 'bilinear'
  BICUBIC = 'bicubic'


class Geometry(enum.Enum):
  """Whose program decides the resized size and the offset of the centre crop in evaluation.

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
class RandAugment:
  """RandAugment (arXiv 1909.13719). timm's rand-m9-mstd0.5-inc1: layers=2 magnitude=9 magnitude_std=.5
  probability=.5 table=timm."""
  layers: int = ranged(0, Range(0, 100))           # operations an image, one after the other; 0 = off
  magnitude: float = ranged(10., NOT_NEGATIVE)     # in tenths of each operation's range
  magnitude_std: float = ranged(0., NOT_NEGATIVE)  # of a normal added to it for each operation
  probability: float = ranged(1., SHARE)           # that a chosen operation is applied
  table: OpTable = OpTable.AUGREG


@dataclasses.dataclass
class Jitter:
  """Colour jitter: four operations in random order, each with a factor uniform in [1 - x, 1 + x]."""
  brightness: float = ranged(0., NOT_NEGATIVE)
  contrast: float = ranged(0., NOT_NEGATIVE)
  saturation: float = ranged(0., NOT_NEGATIVE)
  hue: float = ranged(0., Range(0, .5))   # turns of the colour circle, uniform in [-x, x]
  probability: float = ranged(1., SHARE)  # that an image is jittered at all


@dataclasses.dataclass
class Erase:
  """Random erasing (arXiv 1708.04896) after normalisation, with normal noise in each pixel."""
  probability: float = ranged(0., SHARE)                     # of an image; 0 = off
  area: tuple[float, float] = ranged((.02, 1 / 3), UP_TO_1)  # of the image's area
  aspect: tuple[float, float] = ranged((.3, 1 / .3), POSITIVE)


@dataclasses.dataclass
class Views:
  """Several crops of each image instead of one, for self-supervision; DINO's (arXiv 2104.14294) by default."""
  on: bool = False
  num_local: int = ranged(8, Range(0, 1000))  # local crops, besides the two global ones of `image_px`
  local_px: int = ranged(96, PX)                                      # side of a local crop
  global_area: tuple[float, float] = ranged((.4, 1.), UP_TO_1)
  local_area: tuple[float, float] = ranged((.05, .4), UP_TO_1)
  # Probability: first and second global, local; sigma .1-2 px.
  blur: tuple[float, float, float] = ranged((1., .1, .5), SHARE)
  solarize: tuple[float, float, float] = ranged((0., .2, 0.), SHARE)  # probability: first and second global, local
  grayscale: float = ranged(.2, SHARE)                                # probability
  jitter: Jitter = field(default_factory=lambda: Jitter(.4, .4, .2, .1, probability=.8))


@dataclasses.dataclass
class Recipe:
  """What happens to images. Geometry that needs the whole picture on the host, the rest in the step."""
  # Images are turned as their EXIF says. Off in the published pipelines: tf.image.decode_jpeg and torchvision's loader
  # of folders ignore it.
  exif_orientation: bool = False
  max_image_pixels: int = ranged(178_956_970, Range(1, 2**40))  # a larger stored image counts as bad; Pillow's limit
  crop: Crop = Crop.INCEPTION
  crop_area: tuple[float, float] = ranged((0.05, 1.), UP_TO_1)  # of the image's area
  # Of inception; TensorFlow's programs: (0.75, 1.33).
  crop_aspect: tuple[float, float] = ranged((0.75, 4 / 3), POSITIVE)
  crop_sampler: CropSampler = CropSampler.TORCHVISION  # of inception and of views
  flip: bool = True  # left-right, probability 1/2
  shift_px: int = ranged(0, PX_OR_0)  # pad with zeros by this, crop at random
  rotate_degrees: float = ranged(0., Range(0, 180, unit='degrees'))  # mild affine: uniform in [-x, x]
  scale: float = ranged(0., BELOW_1)  # relative, uniform in [-x, x]
  shear: float = ranged(0., NOT_NEGATIVE)  # uniform in [-x, x]
  randaugment: RandAugment = field(default_factory=RandAugment)
  three_augment: bool = False  # grayscale, solarize or blur, one of them (DeiT III); then `jitter`
  jitter: Jitter = field(default_factory=Jitter)
  erase: Erase = field(default_factory=Erase)
  mixup: float = ranged(0., NOT_NEGATIVE)  # alpha of Beta(alpha, alpha); 0 = off
  cutmix: float = ranged(0., NOT_NEGATIVE)  # alpha of Beta(alpha, alpha), the part that is kept; 0 = off
  mix_probability: float = ranged(1., SHARE)  # that a batch is mixed at all
  cutmix_share: float = ranged(.5, SHARE)  # of mixed batches, where both are on, those with cutmix
  repeats: int = ranged(1, COUNT)  # of each example in a batch (repeated augmentation); 1 = off
  views: Views = field(default_factory=Views)
  eval_resize_px: int = ranged(0, PX_OR_0)  # short side before the centre crop; 0 = squash to image_px
  eval_geometry: Geometry = Geometry.BIG_VISION  # of resizing and cropping, where eval_resize_px is set
  eval_area: bool = False  # evaluation shrinks by `area`, whatever the next says (big_vision)
  interpolation: Interpolation = Interpolation.BILINEAR
  crop_interpolation: CropInterpolation = CropInterpolation.SAME  # of random crops in training; not of views
  antialias: bool = False  # the filter covers every stored pixel when shrinking (Pillow's)
  mean: tuple[float, float, float] = ranged((.5, .5, .5), ANY)  # of RGB in [0, 1]
  std: tuple[float, float, float] = ranged((.5, .5, .5), POSITIVE)


class MixClasses(enum.Enum):
  """How the classes of a mixture of sources are numbered."""
  SAME = 'same'          # all sources have the same class names
  SEPARATE = 'separate'  # the classes of each source follow those of the sources before it


class InMemory(enum.Enum):
  """Whether decoded images are held in memory and augmented on the device."""
  AUTO = 'auto'  # when the recipe's crop is `resize`, nothing needs the host, and images take less than 2 GiB
  YES = 'yes'
  NO = 'no'


class Decode(enum.Enum):
  """How much of a stored JPEG is decoded where a recipe crops it at random."""
  FULL = 'full'
  CROP = 'crop'  # what the crop shows, by nvImageCodec (pip install 'vit_jax[crop]'; no GPU needed)


@dataclasses.dataclass
class Pseudo:
  """Pictures without labels, which a teacher labels before training begins (Noisy Student, arXiv 1911.04252)."""
  source: str = ''                        # like data.source; labels that it has are not used; '' = none
  split: str = 'train'
  teacher: str = ''                       # its weights: like init_from
  labels: str = ''                        # directory of its answers: written where missing, used where there
  top: int = ranged(10, COUNT)            # classes of an answer that count, with their probabilities; 1 = hard labels
  threshold: float = ranged(.3, BELOW_1)  # probability of the most likely class that a picture needs to be taken
  # Pictures taken of each class, the surest ones, with copies where few; 0 = all.
  per_class: int = ranged(0, COUNT_OR_0)
  share: float = ranged(.5, INSIDE)       # of these pictures in training


@dataclasses.dataclass
class Data:
  """Where images come from, and how they are read."""
  # digits | synthetic | folder:PATH | tfds:NAME[/CONFIG][:VERSION] | vtab:TASK | array_record:DIR |
  # mix:0.7*SOURCE,0.3*SOURCE
  source: str = 'digits'
  train_split: str = 'train'                       # TFDS syntax: train[:98%]
  eval_split: str = 'test'
  data_dir: str = ''                               # of TFDS; '' = its default
  num_examples: int = ranged(0, Range(0, 10**12))  # of the training split; 0 = ask the source
  any_num_examples: bool = False  # train also if the source has more than 1 % more or fewer than num_examples
  num_classes: int = ranged(0, COUNT_OR_0)         # 0 = ask the source
  max_labels: int = ranged(0, Range(0, 1_000))     # of one image that may have several (multi-hot); 0 = each has one
  label_column: str = ''  # feature of a TFDS set with the class or classes; '' = `label`, or the only one
  classes: str = ''  # file of the classes in the order of the network's outputs, a line each: n01440764 tench
  holdout: float = ranged(0.1, BELOW_1)            # part held out of a source that has a single split
  holdout_seed: int = ranged(0, SEED)
  mix_classes: MixClasses = MixClasses.SAME
  pseudo: Pseudo = field(default_factory=Pseudo)
  recipe: Recipe = field(default_factory=Recipe)
  in_memory: InMemory = InMemory.AUTO
  decode: Decode = Decode.FULL                    # of a JPEG that is cropped at random; the same pixels either way
  workers: int = ranged(0, THREADS)                # loader processes; 0 = threads of this process
  threads: int = ranged(0, THREADS)                # reading and decoding; 0 = one a core, at most 16
  max_bad_images: int = ranged(100, COUNT_OR_0)    # undecodable images (distinct, on one host) that stop the run
  verify_shards: bool = True                       # compare SHA-256 of the shards of array_record:DIR, of each once
