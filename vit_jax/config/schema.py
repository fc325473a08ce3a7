"""The whole run as data: typed settings, each with unit and default.

A config file's `get_config()` returns a `Config`. It holds independent variables only; what follows from
them (steps from epochs, warm-up steps) is computed from the final config by `config/check.py`.
`'' ` means off for text. Durations are text with a unit: `'90 epochs'`, `'20_000 steps'`,
`'30e6 examples'`, `'10 %'` (of the run). Treat configs as read-only after overrides have been applied.

No `from __future__ import annotations` here and no `Literal`: `config_flags` needs real types.
"""
import dataclasses
import enum
from dataclasses import field

from vit_jax.core.errors import UserError


class Pool(enum.Enum):
  """How tokens become one feature vector."""
  CLS = 'cls'    # the class token (ViT paper, eq. 4)
  MEAN = 'mean'  # mean over patch tokens (ViT paper, Appendix D.3), without class token
  MAP = 'map'    # a learned query attends to the patch tokens (Scaling ViT, SigLIP), without class token


class Positions(enum.Enum):
  """Position embedding. All but `sincos2d` are compared in the ViT paper's Appendix D.4."""
  LEARNED = 'learned'      # one vector a token (ViT paper, eq. 1)
  SINCOS2D = 'sincos2d'    # fixed 2-D sine-cosine, temperature 10,000 (MoCo v3; Better plain ViT baselines)
  NONE = 'none'            # a bag of patches
  LEARNED2D = 'learned2d'  # half a vector a column, half a vector a row, concatenated
  RELATIVE = 'relative'    # learned keys for 1-D offsets add to the attention logits of every block


class PositionsAt(enum.Enum):
  """Where learned positions are added (ViT paper, Appendix D.4)."""
  STEM = 'stem'      # once, after the stem
  LAYERS = 'layers'  # before every block, each with its own
  SHARED = 'shared'  # before every block, the same


class Gelu(enum.Enum):
  """Form of the GELU."""
  TANH = 'tanh'    # the JAX originals
  EXACT = 'exact'  # erf; timm, DeiT, MAE, Hugging Face


class DType(enum.Enum):
  """Compute dtype; parameters, LayerNorm statistics, softmax and loss stay f32."""
  F32 = 'float32'
  BF16 = 'bfloat16'


class Execution(enum.Enum):
  """How the stacked blocks are run; the parameters are the same."""
  SCAN = 'scan'          # compiles fastest
  UNROLLED = 'unrolled'  # runs fastest


class Remat(enum.Enum):
  """What the forward pass of a block saves for the backward pass; the rest is computed again."""
  NONE = 'none'    # save everything
  NAMES = 'names'  # save matmul results: query, key, value, attention output, residual, MLP pre-activation
  MLP = 'mlp'      # save the MLP pre-activation only
  FULL = 'full'    # save nothing but the block's input


@dataclasses.dataclass
class ViT:
  """Vision Transformer (arXiv 2010.11929, eqs. 1-4). Sizes by name: `sizes.vit('B/16')`."""
  patch: int = 16                     # px
  width: int = 768
  depth: int = 12
  heads: int = 12
  mlp: int = 3072                     # hidden width of the MLP
  pool: Pool = Pool.CLS
  positions: Positions = Positions.LEARNED
  dropout: float = 0.                 # after positions, attention output, MLP activation and output
  drop_path: float = 0.               # stochastic depth of the last block; grows linearly from 0
  gelu: Gelu = Gelu.TANH
  norm_eps: float = 1e-6
  dtype: DType = DType.F32
  execution: Execution = Execution.UNROLLED
  remat: Remat = Remat.NONE
  positions_at: PositionsAt = PositionsAt.STEM
  registers: int = 0                  # learned tokens after the class token, no position (DINOv2-reg: 4)
  layer_scale: float = 0.             # initial factor of each branch; 0 = no factor (DINOv2 1e-5, DeiT-III 1e-4)
  qk_norm: bool = False               # LayerNorm of query and key in each head (ViT-22B)
  attention_dropout: float = 0.       # of attention weights; a setting of vision_transformer, 0 in its models
  swiglu: bool = False                # MLP with a gate; `mlp` is the width of the gate (DINOv2 g)
  parallel: bool = False              # attention and MLP side by side after one norm (ViT-22B)
  axial: bool = False                 # a block in rows, then one in columns (ViT paper, Appendix D.6: Axial-ViT)


@dataclasses.dataclass
class Head:
  """Classification head."""
  pre_logits: int = 0                 # width of a tanh layer before the logits; 0 = linear head
  bias_init: float = 0.               # e.g. -10 for sigmoid losses with many classes


class Crop(enum.Enum):
  """How a stored image becomes one of `image_px` for training."""
  INCEPTION = 'inception'  # random area and aspect ratio
  RESIZE = 'resize'        # as for evaluation


class Interpolation(enum.Enum):
  """How pixels are resampled where a picture is resized."""
  BILINEAR = 'bilinear'
  BICUBIC = 'bicubic'  # sharper; timm, DeiT, MAE, DINO
  AREA = 'area'        # mean over the covered area where both sides shrink, else bilinear


class OpTable(enum.Enum):
  """The operations of RandAugment, and what a magnitude means for each."""
  AUGREG = 'augreg'  # 16 operations; AugReg, Mixer, plain ViT baselines. Magnitude 0 is not the identity
  TIMM = 'timm'      # 15 operations, each stronger with the magnitude (`inc1`), at most 10; DeiT, MAE, LV-ViT


@dataclasses.dataclass
class RandAugment:
  """RandAugment (arXiv 1909.13719). timm's rand-m9-mstd0.5-inc1: layers=2 magnitude=9 magnitude_std=.5
  probability=.5 table=timm."""
  layers: int = 0                     # operations an image, one after the other; 0 = off
  magnitude: float = 10.              # in tenths of each operation's range
  magnitude_std: float = 0.           # of a normal added to it for each operation
  probability: float = 1.             # that a chosen operation is applied
  table: OpTable = OpTable.AUGREG


@dataclasses.dataclass
class Jitter:
  """Colour jitter: four operations in random order, each with a factor uniform in [1 - x, 1 + x]."""
  brightness: float = 0.
  contrast: float = 0.
  saturation: float = 0.
  hue: float = 0.                     # turns of the colour circle, uniform in [-x, x]
  probability: float = 1.             # that an image is jittered at all


@dataclasses.dataclass
class Erase:
  """Random erasing (arXiv 1708.04896) after normalisation, with normal noise in each pixel."""
  probability: float = 0.             # of an image; 0 = off
  area: tuple[float, float] = (.02, 1 / 3)  # of the image's area
  aspect: tuple[float, float] = (.3, 1 / .3)


@dataclasses.dataclass
class Views:
  """Several crops of each image instead of one, for self-supervision; DINO's (arXiv 2104.14294) by default."""
  on: bool = False
  num_local: int = 8                  # local crops, besides the two global ones of `image_px`
  local_px: int = 96                  # side of a local crop
  global_area: tuple[float, float] = (.4, 1.)
  local_area: tuple[float, float] = (.05, .4)
  blur: tuple[float, float, float] = (1., .1, .5)      # probability: first and second global, local; sigma .1-2 px
  solarize: tuple[float, float, float] = (0., .2, 0.)  # probability: first and second global, local
  grayscale: float = .2               # probability
  jitter: Jitter = field(default_factory=lambda: Jitter(.4, .4, .2, .1, probability=.8))


@dataclasses.dataclass
class Recipe:
  """What happens to images. Geometry that needs the whole picture on the host, the rest in the step."""
  crop: Crop = Crop.INCEPTION
  crop_area: tuple[float, float] = (0.05, 1.)    # of the image's area
  crop_aspect: tuple[float, float] = (0.75, 4 / 3)
  flip: bool = True                              # left-right, probability 1/2
  shift_px: int = 0                              # pad with zeros by this, crop at random
  rotate_degrees: float = 0.                     # mild affine: uniform in [-x, x]
  scale: float = 0.                              # relative, uniform in [-x, x]
  shear: float = 0.                              # uniform in [-x, x]
  randaugment: RandAugment = field(default_factory=RandAugment)
  three_augment: bool = False                    # grayscale, solarize or blur, one of them (DeiT III); then `jitter`
  jitter: Jitter = field(default_factory=Jitter)
  erase: Erase = field(default_factory=Erase)
  mixup: float = 0.                              # alpha of Beta(alpha, alpha); 0 = off
  cutmix: float = 0.                             # alpha of Beta(alpha, alpha), the part that is kept; 0 = off
  mix_probability: float = 1.                    # that a batch is mixed at all
  cutmix_share: float = .5                       # of mixed batches, where both are on, those with cutmix
  repeats: int = 1                               # of each example in a batch (repeated augmentation); 1 = off
  views: Views = field(default_factory=Views)
  eval_resize_px: int = 0                        # short side before the centre crop; 0 = squash to image_px
  interpolation: Interpolation = Interpolation.BILINEAR
  antialias: bool = False                        # the filter covers every stored pixel when shrinking (Pillow's)
  mean: tuple[float, float, float] = (.5, .5, .5)  # of RGB in [0, 1]
  std: tuple[float, float, float] = (.5, .5, .5)


class MixClasses(enum.Enum):
  """How the classes of a mixture of sources are numbered."""
  SAME = 'same'    # all sources have the same class names
  APART = 'apart'  # the classes of each source follow those of the sources before it


class InMemory(enum.Enum):
  """Whether decoded images are held in memory and augmented on the device."""
  AUTO = 'auto'  # when the recipe's crop is `resize`, nothing needs the host, and images take less than 2 GiB
  YES = 'yes'
  NO = 'no'


@dataclasses.dataclass
class Data:
  """Where images come from, and how they are read."""
  # digits | synthetic | folder:PATH | tfds:NAME[/CONFIG][:VERSION] | array_record:DIR | mix:0.7*SOURCE,0.3*SOURCE
  source: str = 'digits'
  train_split: str = 'train'   # TFDS syntax: train[:98%]
  eval_split: str = 'test'
  data_dir: str = ''           # of TFDS; '' = its default
  num_examples: int = 0        # of the training split; 0 = ask the source
  num_classes: int = 0         # 0 = ask the source
  holdout: float = 0.1         # part held out of a source that has a single split
  holdout_seed: int = 0
  mix_classes: MixClasses = MixClasses.SAME
  recipe: Recipe = field(default_factory=Recipe)
  in_memory: InMemory = InMemory.AUTO
  workers: int = 0             # loader processes; 0 = threads of this process
  threads: int = 0             # reading and decoding; 0 = one a core, at most 16
  max_bad_images: int = 100    # undecodable images (distinct, on one host) that stop the run


class Loss(enum.Enum):
  """Classification loss, in nats."""
  SOFTMAX = 'softmax'
  SIGMOID = 'sigmoid'  # one binary cross-entropy a class, summed over classes
  BCE = 'bce'          # likewise, with the mean over classes (DeiT III)


@dataclasses.dataclass
class Supervised:
  """Classification with labels."""
  loss: Loss = Loss.SOFTMAX
  label_smoothing: float = 0.            # targets become (1 - x) * target + x / classes, for every loss
  threshold: float = -1.                 # of sigmoid and bce: targets above it become 1, others 0; -1 = off
  class_weights: tuple[float, ...] = ()  # of an example, by its class; the mean is weighted; () = all alike


class Decay(enum.Enum):
  """Shape of the learning rate after the warm-up."""
  COSINE = 'cosine'      # down to `end_lr` at the end of the run
  LINEAR = 'linear'      # likewise
  RSQRT = 'rsqrt'        # 1 / sqrt(1 + steps since the warm-up / timescale) (Scaling ViT)
  STEPS = 'steps'        # times `drop` at each of `drops` (BiT-HyperRule)
  CONSTANT = 'constant'  # with a cooldown: warm-up, stable, decay (WSD)


@dataclasses.dataclass
class Schedule:
  """Learning rate over the run: linear warm-up from 0, then decay, then perhaps a linear cooldown to `end_lr`."""
  decay: Decay = Decay.COSINE
  warmup: str = '5 %'
  end_lr: float = 0.               # of cosine, linear, and of a cooldown
  cooldown: str = ''               # last part of the run, after rsqrt, steps or constant; '' = none
  timescale: str = '10_000 steps'  # of rsqrt
  drops: tuple[str, ...] = ()      # of steps: moments, from the start of the run
  drop: float = .1                 # of steps: factor at each


class Curve(enum.Enum):
  """How a number gets from one value to another."""
  COSINE = 'cosine'
  LINEAR = 'linear'


@dataclasses.dataclass
class Ramp:
  """A factor over the run: `start` up to the moment `begin`, `end` after the moment `until`, a curve between."""
  start: float = 1.
  end: float = 1.
  begin: str = '0 steps'
  until: str = '100 %'
  curve: Curve = Curve.COSINE


@dataclasses.dataclass
class PathRule:
  """What is different for the parameters whose whole path name matches. The first rule that matches decides."""
  paths: str
  lr: float | Ramp = 1.            # times the learning rate
  weight_decay: float | Ramp = 1.  # times the weight decay
  frozen_until: str = ''           # from the start to here no update, no decay, and moments stay; '100 %' = for good


class LayerGroups(enum.Enum):
  """Which layer a parameter counts to for `layer_decay`."""
  MAE = 'mae'    # stem, class token, positions: 0; block i from 0: i + 1; the rest: depth + 1
  TIMM = 'timm'  # likewise, but the last norm counts to the last block


class DecayBy(enum.Enum):
  """What decoupled weight decay is multiplied with at each step."""
  LR = 'lr'              # the learning rate, with the factors of layers and rules (optax, PyTorch)
  SCHEDULE = 'schedule'  # the schedule over its peak alone: weight_decay is the product (big_vision)


@dataclasses.dataclass
class Optimizer:
  """What every optimiser has. Not one itself."""
  lr: float = 1e-3                           # at the peak of the schedule
  lr_per: int = 0                            # examples a step that `lr` is for; it is scaled to the batch; 0 = as it is
  weight_decay: float = 0.
  weight_decay_ramp: Ramp = field(default_factory=Ramp)  # factor of it over the run
  decayed: tuple[str, ...] = ('.*/kernel',)  # patterns of whole path names
  schedule: Schedule = field(default_factory=Schedule)
  clip_norm: float = 1.                      # of the whole gradient; 0 = off
  clip_tensor: float = 0.                    # norm of each tensor's gradient, each layer's for itself; 0 = off
  clip_adaptive: float = 0.                  # gradient over parameter norm, each output unit; not the head; 0 = off
  layer_decay: float = 1.                    # factor of the learning rate from a layer to the one below; 1 = off
  layer_groups: LayerGroups = LayerGroups.MAE
  rules: tuple[PathRule, ...] = ()


@dataclasses.dataclass
class AdamW(Optimizer):
  """Adam with decoupled weight decay: each step takes off `lr * weight_decay * parameter`."""
  weight_decay: float = .1
  b1: float = .9
  b2: float = .999
  eps: float = 1e-8
  moment: DType = DType.F32                  # first moment as it is kept; computed in f32
  decay_by: DecayBy = DecayBy.LR


@dataclasses.dataclass
class Adam(Optimizer):
  """Adam with coupled decay: `weight_decay * parameter` is added to the gradient, before the moments."""
  b1: float = .9
  b2: float = .999
  eps: float = 1e-8
  moment: DType = DType.F32


@dataclasses.dataclass
class Adafactor(Optimizer):
  """Adafactor as Scaling ViT has it (section 3.4): a first moment, no relative step, capped second decay."""
  b1: float = .9
  moment: DType = DType.BF16
  b2_power: float = .8                       # decay of the second moment at update t from 1: 1 - t ** -power
  b2_cap: float = .999
  eps: float = 1e-30                         # added to the squared gradient
  factored_side: int = 32                    # smallest side of a matrix whose second moment is factored
  decay_by: DecayBy = DecayBy.LR


@dataclasses.dataclass
class Lamb(Optimizer):
  """LAMB: Adam's update with decay, scaled to the norm of the parameter (arXiv 1904.00962)."""
  weight_decay: float = .02
  b1: float = .9
  b2: float = .999
  eps: float = 1e-6
  moment: DType = DType.F32
  trusted: tuple[str, ...] = ('.*',)         # patterns of what is scaled; the rest moves as by AdamW


@dataclasses.dataclass
class Lars(Optimizer):
  """LARS: the gradient with decay, scaled to the norm of the parameter, then momentum (arXiv 1708.03888)."""
  lr: float = .1
  momentum: float = .9
  trust: float = .001
  moment: DType = DType.F32
  trusted: tuple[str, ...] = ('.*/kernel',)  # patterns of what is scaled; the rest moves as by SGD
  clip_norm: float = 0.


@dataclasses.dataclass
class Lion(Optimizer):
  """Lion: the sign of a moment, with decoupled decay (arXiv 2302.06675, Algorithm 2)."""
  lr: float = 1e-4
  weight_decay: float = 1.
  b1: float = .9
  b2: float = .99
  moment: DType = DType.F32
  decay_by: DecayBy = DecayBy.LR


@dataclasses.dataclass
class Sgd(Optimizer):
  """SGD with momentum; weight decay is added to the gradient (coupled)."""
  lr: float = .01
  momentum: float = .9
  moment: DType = DType.F32


class OnNonfinite(enum.Enum):
  """What a loss or gradient that is not finite leads to; the update is never applied."""
  STOP = 'stop'
  SKIP = 'skip'


class EmaWarmup(enum.Enum):
  """How the decay d of a moving average begins; s is the number of updates before."""
  RATIO = 'ratio'  # min(d, (1 + s) / (10 + s)) (TensorFlow)
  POWER = 'power'  # min(d, 1 - (1 + s) ** -2/3) (timm)
  NONE = 'none'    # d throughout: the start of the run weighs d ** s


@dataclasses.dataclass
class Sam:
  """Sharpness-aware minimisation (arXiv 2010.01412), or GSAM (arXiv 2203.08065) with `alpha`. Twice the cost a step."""
  rho: float = 0.      # length of the perturbation at the peak of the learning rate; 0 = off
  rho_end: float = -1  # at the end of the learning rate, linear in the rate between; -1 = as rho
  alpha: float = 0.    # of GSAM's surrogate gap; 0 = plain SAM


@dataclasses.dataclass
class EarlyStop:
  """Ends the run, as if it were done, when an evaluation has stopped getting better."""
  metric: str = ''         # such as test/top1@ema; '' = off
  patience: int = 5        # evaluations without a new best one that end the run
  least_gain: float = 0.   # what a new best has to be better by


@dataclasses.dataclass
class Train:
  """The run itself."""
  accumulate: int = 1          # microbatches a step; same result as the whole batch
  ema: float = 0.              # decay of a moving average of the parameters (ViT paper: Polyak, .9999); 0 = off
  ema_warmup: EmaWarmup = EmaWarmup.RATIO
  sam: Sam = field(default_factory=Sam)
  early_stop: EarlyStop = field(default_factory=EarlyStop)
  log_every: str = '50 steps'
  on_nonfinite: OnNonfinite = OnNonfinite.STOP
  progress: bool = True        # progress bar on a terminal, a line now and then elsewhere
  profile: str = ''            # steps to trace, first..last from 1, such as 100..105; in WORKDIR/profile; '' = none
  dump_hlo: bool = False       # compile the train step once more, for its text: WORKDIR/hlo/train_step.txt


@dataclasses.dataclass
class Checkpoints:
  """When checkpoints are made and which stay. The last one is always made, and always stays."""
  every: str = '10 %'
  keep_latest: int = 2
  keep_every: str = ''         # keep these for good; a multiple of `every`
  keep_best: str = ''          # name of a metric, such as test/top1; keeps its best one


@dataclasses.dataclass
class Mesh:
  """Devices as a grid. -1, at most once, takes the rest."""
  data: int = -1               # splits the batch
  fsdp: int = 1                # splits the batch, parameters and optimiser state
  tensor: int = 1              # splits heads, MLP and classes
  slices: int = 1              # TPU slices, or nodes, that `data` goes over first; fsdp and tensor stay inside one


@dataclasses.dataclass
class TopK:
  """Top-1, top-5, NLL over a split, every example once."""
  every: str = '1 epoch'
  split: str = ''              # '' = data.eval_split
  batch_size: int = 0          # 0 = the training batch size
  views: tuple[str, ...] = ()  # empty = all that the objective has
  metrics: tuple[str, ...] = ()  # measured beside top1, top5 and nll: ece, class_mean


@dataclasses.dataclass
class Config:
  """A run."""
  name: str = 'unnamed'
  seed: int = 0
  length: str = '10 epochs'
  batch_size: int = 128        # examples a step, over all devices
  image_px: tuple[int, int] = (224, 224)  # height, width
  data: Data = field(default_factory=Data)
  model: ViT = field(default_factory=ViT)
  head: Head = field(default_factory=Head)
  objective: Supervised = field(default_factory=Supervised)
  optimizer: AdamW | Adam | Adafactor | Lamb | Lars | Lion | Sgd = field(default_factory=AdamW)
  train: Train = field(default_factory=Train)
  evals: dict[str, TopK] = field(default_factory=dict)
  checkpoints: Checkpoints = field(default_factory=Checkpoints)
  mesh: Mesh = field(default_factory=Mesh)


def parse_arg(text: str, **kinds: tuple[str, ...]) -> dict[str, str]:
  """The arguments of a config, `file.py:arg,arg,key=value`: the only parser of them.

  Args:
    text: everything after the first colon.
    kinds: the known values of each kind, its default first. A bare word goes to the kind that knows it; `()` and
      `('',)` take any value, as `key=value` only, and default to ''.

  Raises:
    UserError: lists every word that is unknown or given twice, and what is known.
  """
  found: dict[str, str] = {}
  faults = []
  for word in filter(None, (part.strip() for part in text.split(','))):
    key, equals, value = word.partition('=')
    if not equals:
      key, value = next((kind for kind, known in kinds.items() if word in known), ''), word
    if key not in kinds or (any(kinds[key]) and value not in kinds[key]):
      faults.append(f'  {word!r} is not known')
    elif key in found:
      faults.append(f'  {key} is given twice: {found[key]} and {value}')
    else:
      found[key] = value
  if faults:
    known = [f'  {kind}=' + (f'{" | ".join(filter(None, values))}' if any(values) else '...')
             for kind, values in kinds.items()]
    raise UserError('\n'.join([f'config arguments {text!r}:', *faults, 'Known:', *known]))
  return {kind: found.get(kind, values[0] if values else '') for kind, values in kinds.items()}
