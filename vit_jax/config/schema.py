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


class Pool(enum.Enum):
  """How tokens become one feature vector."""
  CLS = 'cls'    # the class token (ViT paper, eq. 4)
  MEAN = 'mean'  # mean over patch tokens (ViT paper, Appendix D.3), without class token


class Positions(enum.Enum):
  """Position embedding, added after the stem."""
  LEARNED = 'learned'    # ViT paper, eq. 1
  SINCOS2D = 'sincos2d'  # fixed 2-D sine-cosine, temperature 10,000 (MoCo v3; Better plain ViT baselines)


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


@dataclasses.dataclass
class Head:
  """Classification head."""
  pre_logits: int = 0                 # width of a tanh layer before the logits; 0 = linear head
  bias_init: float = 0.               # e.g. -10 for sigmoid losses with many classes


class Crop(enum.Enum):
  """How a stored image becomes one of `image_px` for training."""
  INCEPTION = 'inception'  # random area and aspect ratio
  RESIZE = 'resize'        # as for evaluation


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
  mixup: float = 0.                              # alpha of Beta(alpha, alpha); 0 = off
  eval_resize_px: int = 0                        # short side before the centre crop; 0 = squash to image_px
  antialias: bool = False                        # area filter when shrinking, instead of bilinear
  mean: tuple[float, float, float] = (.5, .5, .5)  # of RGB in [0, 1]
  std: tuple[float, float, float] = (.5, .5, .5)


class InMemory(enum.Enum):
  """Whether decoded images are held in memory and augmented on the device."""
  AUTO = 'auto'  # when the recipe's crop is `resize` and the images take less than 2 GiB
  YES = 'yes'
  NO = 'no'


@dataclasses.dataclass
class Data:
  """Where images come from, and how they are read."""
  source: str = 'digits'       # digits | synthetic | folder:PATH | tfds:NAME[/CONFIG][:VERSION]
  train_split: str = 'train'   # TFDS syntax: train[:98%]
  eval_split: str = 'test'
  data_dir: str = ''           # of TFDS; '' = its default
  num_examples: int = 0        # of the training split; 0 = ask the source
  num_classes: int = 0         # 0 = ask the source
  holdout: float = 0.1         # part held out of a source that has a single split
  holdout_seed: int = 0
  recipe: Recipe = field(default_factory=Recipe)
  in_memory: InMemory = InMemory.AUTO
  workers: int = 0             # loader processes; 0 = threads of this process
  threads: int = 0             # reading and decoding; 0 = one a core, at most 16
  max_bad_images: int = 100    # undecodable images (distinct, on one host) that stop the run


class Loss(enum.Enum):
  """Classification loss, in nats."""
  SOFTMAX = 'softmax'
  SIGMOID = 'sigmoid'  # one binary cross-entropy a class, summed over classes


@dataclasses.dataclass
class Supervised:
  """Classification with labels."""
  loss: Loss = Loss.SOFTMAX
  label_smoothing: float = 0.


class Decay(enum.Enum):
  """Shape of the learning rate after the warm-up, down to `end_lr`."""
  COSINE = 'cosine'
  LINEAR = 'linear'


@dataclasses.dataclass
class Schedule:
  """Learning rate over the run: linear warm-up from 0, then decay."""
  decay: Decay = Decay.COSINE
  warmup: str = '5 %'
  end_lr: float = 0.


@dataclasses.dataclass
class AdamW:
  """Adam with decoupled weight decay: each step takes off `lr * weight_decay * parameter`."""
  lr: float = 1e-3
  b1: float = .9
  b2: float = .999
  eps: float = 1e-8
  weight_decay: float = .1
  decayed: tuple[str, ...] = ('.*/kernel',)  # patterns of whole path names
  schedule: Schedule = field(default_factory=Schedule)
  clip_norm: float = 1.                      # of the whole gradient; 0 = off


@dataclasses.dataclass
class Sgd:
  """SGD with momentum; weight decay is added to the gradient (coupled)."""
  lr: float = .01
  momentum: float = .9
  weight_decay: float = 0.
  decayed: tuple[str, ...] = ('.*/kernel',)
  schedule: Schedule = field(default_factory=Schedule)
  clip_norm: float = 1.


class OnNonfinite(enum.Enum):
  """What a loss or gradient that is not finite leads to; the update is never applied."""
  STOP = 'stop'
  SKIP = 'skip'


@dataclasses.dataclass
class Train:
  """The run itself."""
  accumulate: int = 1          # microbatches a step; same result as the whole batch
  ema: float = 0.              # decay of a moving average of the parameters; 0 = off
  log_every: str = '50 steps'
  on_nonfinite: OnNonfinite = OnNonfinite.STOP
  progress: bool = True        # progress bar on a terminal, a line now and then elsewhere


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


@dataclasses.dataclass
class TopK:
  """Top-1, top-5, NLL over a split, every example once."""
  every: str = '1 epoch'
  split: str = ''              # '' = data.eval_split
  batch_size: int = 0          # 0 = the training batch size
  views: tuple[str, ...] = ()  # empty = all that the objective has


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
  optimizer: AdamW | Sgd = field(default_factory=AdamW)
  train: Train = field(default_factory=Train)
  evals: dict[str, TopK] = field(default_factory=dict)
  checkpoints: Checkpoints = field(default_factory=Checkpoints)
  mesh: Mesh = field(default_factory=Mesh)
