"""Settings of tasks: what is learned from a batch."""
import dataclasses
import enum
from dataclasses import field

from vit_jax.config.schema.model import Head, Model, ViT
from vit_jax.config.schema.optim import Curve, Ramp
from vit_jax.config.schema.ranges import (
    ANY,
    BELOW_1,
    COUNT,
    INSIDE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    UP_TO_1,
    Range,
    duration,
    ranged,
)


class Loss(enum.Enum):
  """Classification loss, in nats."""
  SOFTMAX = 'softmax'
  SIGMOID = 'sigmoid'  # one binary cross-entropy a class, summed over classes
  BCE = 'bce'          # likewise, with the mean over classes (DeiT III)


@dataclasses.dataclass
class Supervised:
  """Classification with labels."""
  loss: Loss = Loss.SOFTMAX
  label_smoothing: float = ranged(0., BELOW_1)  # targets become (1 - x) * target + x / classes, for every loss
  # Of sigmoid and bce: targets above it become 1, others 0; -1 = off.
  threshold: float = ranged(-1., Range(0, 1, below=True, also=(-1,)))
  # Of an example, by its class; the mean is weighted; () = all alike.
  class_weights: tuple[float, ...] = ranged((), NOT_NEGATIVE)


@dataclasses.dataclass
class Mae:
  """Masked autoencoder (arXiv 2111.06377): reconstructs the patches that the encoder does not see."""
  mask_ratio: float = ranged(.75, INSIDE)  # share of the patches of each image that the encoder does not see
  norm_pix_loss: bool = True  # each target patch has mean 0 and deviation 1; else pixels as the network gets them
  decoder_width: int = ranged(512, COUNT)
  decoder_depth: int = ranged(8, Range(1, 10_000))
  decoder_heads: int = ranged(16, COUNT)


COLOR_CELLS = 4
"""Cells on a side into which `PatchTarget.COLORS` divides a patch."""


class PatchTarget(enum.Enum):
  """What is predicted of a corrupted patch (ViT paper, Appendix B.1.2)."""
  COLOR = 'color'    # its mean colour, 3 bits a channel: one of 512 classes
  COLORS = 'colors'  # likewise of each cell of 4 x 4: 16 of 512 classes
  PIXELS = 'pixels'  # all pixels as the network gets them, by their squared error


@dataclasses.dataclass
class MaskedPatch:
  """Masked patch prediction (ViT paper, Appendix B.1.2), after BERT."""
  target: PatchTarget = PatchTarget.COLOR
  mask_ratio: float = ranged(.5, UP_TO_1)      # share of the patches of each image that are corrupted
  mask_token_prob: float = ranged(.8, SHARE)    # probability that a corrupted patch becomes the mask token
  random_patch_prob: float = ranged(.1, SHARE)  # that it becomes another patch of the image; else it is unchanged


class Centering(enum.Enum):
  """What keeps DINO's teacher from giving one answer to everything."""
  MEAN = 'mean'          # takes off a running mean of its outputs (DINO)
  SINKHORN = 'sinkhorn'  # spreads its answers evenly over the batch, in three rounds (SwAV, DINOv2)
  NONE = 'none'          # nothing: collapses (DINO paper, section 5.3)


class OnCollapse(enum.Enum):
  """What the alarm does."""
  WARN = 'warn'  # says so, once, and in the record
  STOP = 'stop'  # ends the run with an error


@dataclasses.dataclass
class Collapse:
  """When a network is said to have collapsed: its answers tell too little of which image they are for, for too long.

  Measured is the mutual information of image and prototype, H(mean of answers) - mean of H(answer), in nats: it
  falls to 0 when all answers are the same, whether flat or peaked.
  """
  threshold: float = ranged(.05, NOT_NEGATIVE)  # nats, of the teacher over a batch
  patience: str = duration('2 %')               # the information is below the threshold for so long without a break
  after: str = duration('5 %')                  # not before: the outputs of a new network carry little information
  action: OnCollapse = OnCollapse.WARN


@dataclasses.dataclass
class Dino:
  """Self-distillation without labels (arXiv 2104.14294). Needs `data.recipe.views`."""
  out_dim: int = ranged(65_536, COUNT)      # K, outputs of the projection head
  hidden_dim: int = ranged(2048, COUNT)     # width of its MLP
  bottleneck_dim: int = ranged(256, COUNT)  # width before the last layer
  norm_last_layer: bool = True  # the rows of the last layer have norm 1, which is safer; False: their norms are learned
  student_temperature: float = ranged(.1, POSITIVE)
  teacher_temperature: Ramp = field(default_factory=lambda: Ramp(.04, .07, until='30 epochs', curve=Curve.LINEAR))
  momentum: Ramp = field(default_factory=lambda: Ramp(.996, 1.))  # of the teacher
  centering: Centering = Centering.MEAN
  center_momentum: float = ranged(.9, BELOW_1)
  collapse: Collapse = field(default_factory=Collapse)


class ClassTarget(enum.Enum):
  """What the class token learns in token labelling."""
  MAP = 'map'      # the label map over the whole crop (the authors' code)
  LABEL = 'label'  # the class of the image (arXiv 2104.10858, eq. 3)


@dataclasses.dataclass
class TokenLabel:
  """Token labelling (arXiv 2104.10858): every patch token has a target of its own, beside the class of the image."""
  maps: str = ''                                       # directory of label maps, written by --job=prepare --weights=
  dense_weight: float = ranged(.5, POSITIVE)           # beta, of the mean loss over tokens; that of the class is 1
  mix_token: bool = True                                  # MixToken: a box of tokens comes from another image
  label_smoothing: float = ranged(.1, BELOW_1)         # of the targets of class and tokens
  class_target: ClassTarget = ClassTarget.MAP
  top: int = ranged(5, COUNT)                          # classes a position in the maps
  map_grid: tuple[int, int] = ranged((18, 18), COUNT)  # positions of the maps


class DistillType(enum.Enum):
  """What the student takes from the teacher."""
  SOFT = 'soft'  # its probabilities at `temperature`
  HARD = 'hard'  # its most likely class


class SoftMean(enum.Enum):
  """What the teacher's term of soft teaching is divided by."""
  PAPER = 'paper'  # the number of examples (DeiT, eq. 2)
  CODE = 'code'    # the number of logits, examples times classes (DeiT's program, losses.py)


@dataclasses.dataclass
class Teacher:
  """A trained classifier. It sees the very images that the student sees, mixed or not, normalised its own way."""
  weights: str = ''                                             # a weight file; wanted where training begins
  model: Model = field(default_factory=ViT)
  head: Head = field(default_factory=Head)
  mean: tuple[float, float, float] = ranged((.5, .5, .5), ANY)  # of RGB in [0, 1]
  std: tuple[float, float, float] = ranged((.5, .5, .5), POSITIVE)


@dataclasses.dataclass
class Distill:
  """Learning from a teacher (DeiT, arXiv 2012.12877, section 4; with `weight` 1 arXiv 2106.05237)."""
  teacher: Teacher = field(default_factory=Teacher)
  distill_type: DistillType = DistillType.HARD
  weight: float = ranged(.5, SHARE)             # of the teacher's part of the loss; 1 - weight is that of the labels
  temperature: float = ranged(1., POSITIVE)     # of soft teaching
  soft_mean: SoftMean = SoftMean.PAPER          # of soft teaching
  label_smoothing: float = ranged(0., BELOW_1)  # of the labels' part


Objective = Supervised | Mae | MaskedPatch | Dino | TokenLabel | Distill


class EmaWarmup(enum.Enum):
  """How the decay d of a moving average begins; s is the number of updates before."""
  RATIO = 'ratio'  # min(d, (1 + s) / (10 + s)) (TensorFlow)
  POWER = 'power'  # min(d, 1 - (1 + s) ** -2/3) (timm)
  NONE = 'none'    # d throughout: the start of the run weighs d ** s


@dataclasses.dataclass
class Sam:
  """Sharpness-aware minimisation (arXiv 2010.01412), or GSAM (arXiv 2203.08065) with `alpha`. Twice the cost a step."""
  rho: float = ranged(0., NOT_NEGATIVE)    # length of the perturbation at the peak of the learning rate; 0 = off
  # At the end of the learning rate, linear in the rate between; -1 = as rho.
  rho_end: float = ranged(-1, Range(also=(-1,)))
  alpha: float = ranged(0., NOT_NEGATIVE)  # of GSAM's surrogate gap; 0 = plain SAM
