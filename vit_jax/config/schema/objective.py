"""Settings of objectives: what a run learns from a batch."""
import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar

from vit_jax.config.schema import checks
from vit_jax.config.schema import objective_base as base
from vit_jax.config.schema import ranges as r
from vit_jax.config.schema.checks import NoEffect, problem
from vit_jax.config.schema.contrastive import Contrastive
from vit_jax.config.schema.dino import Collapse, Dino, Dinov2, Dinov2Distill, Dinov3
from vit_jax.config.schema.model import Head, Model
from vit_jax.config.schema.objective_base import FeatureTeacher, ObjectiveSettings, num_kept, num_patches
from vit_jax.config.schema.optim import Curve, Ramp
from vit_jax.config.schema.positions import PositionsAt, Relative
from vit_jax.config.schema.ranges import Range, ranged
from vit_jax.config.schema.recipe import group_problems
from vit_jax.config.schema.vit import LastNorm, Map, Mean, PatchStem, ViT

__all__ = (
    'COLOR_CELLS', 'Byol', 'ClassTarget', 'Distill', 'DistillType', 'FeatureDistance', 'FeatureDistill', 'IJepa',
    'JepaLoss', 'LeJepa', 'Loss', 'Mae', 'MaskedPatch', 'Objective', 'PatchTarget', 'SoftMean', 'Supervised', 'Teacher',
    'TokenLabel')


class Loss(enum.Enum):
  """Classification loss, in nats."""
  SOFTMAX = 'softmax'
  SIGMOID = 'sigmoid'  # one binary cross-entropy a class, summed over classes
  BCE = 'bce'          # likewise, with the mean over classes (DeiT III)


@dataclasses.dataclass
class Supervised(ObjectiveSettings):
  """Classification with labels."""
  implementation: ClassVar[str] = 'vit_jax.objectives.supervised:Spec'
  takes_native: ClassVar[bool] = True
  loss: Loss = Loss.SOFTMAX
  label_smoothing: float = ranged(0., r.BELOW_1)  # targets become (1 - x) * target + x / classes, for every loss
  # Of sigmoid and bce: targets above it become 1, others 0; -1 = off.
  threshold: float = ranged(-1., Range(0, 1, below=True, also=(-1,)))
  # Weight of an example in the mean loss, by its class; () = all 1.
  class_weights: tuple[float, ...] = ranged((), r.NOT_NEGATIVE)

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    weights, num_classes = self.class_weights, config.data.num_classes
    if self.threshold >= 0 and self.loss is Loss.SOFTMAX:
      yield problem(f'{name}.loss', f'sigmoid or bce with {name}.threshold={self.threshold}, which can make several '
                    'classes true', self.loss)
    if weights and not any(weights):
      yield problem(f'{name}.class_weights', 'at least one number above 0', weights)
    if config.head.bias_init and self.loss is Loss.SOFTMAX:
      yield problem('head.bias_init', f'0 with {name}.loss=softmax, where it has no effect', config.head.bias_init,
                    'Remove it, or set the loss to sigmoid or bce.')
    if weights and num_classes and len(weights) != num_classes:
      yield f'{name}.class_weights: expected a number for each of data.num_classes={num_classes}, got {len(weights)}.'


def _subset_problems(m: Model, kind: str) -> Iterator[str]:
  """Yields problems of a model that cannot encode a subset of the patches."""
  if not isinstance(m, ViT):
    return
  unsupported = checks.true_ones({
      'positions=relative': isinstance(m.positions, Relative), f'block={checks.kind(m.block)}': m.block.needs_grid,
      'positions.at=layers': m.positions.at is PositionsAt.LAYERS, 'pool=map': isinstance(m.pool, Map),
      'pool.class_token=true': isinstance(m.pool, Mean) and m.pool.class_token,
      'last_norm=pooled': m.last_norm is LastNorm.POOLED, 'pool.distillation=true': m.pool.distillation,
      f'stem={type(m.stem).__name__}': not isinstance(m.stem, PatchStem)})
  for setting in unsupported:
    yield f'model: expected one that encodes a subset of the patches, for objective {kind}, got model.{setting}.'


@dataclasses.dataclass
class Mae(ObjectiveSettings):
  """Masked autoencoder (arXiv 2111.06377): reconstructs the patches that the encoder does not see."""
  implementation: ClassVar[str] = 'vit_jax.objectives.mae:Spec'
  has_head: ClassVar[bool] = False
  needs_tokens: ClassVar[bool] = True
  mask_ratio: float = ranged(.75, r.INSIDE)  # share of the patches of each image that the encoder does not see
  norm_pix_loss: bool = True  # normalizes the pixels of each target patch to mean 0 and standard deviation 1
  decoder_width: int = ranged(512, r.COUNT)  # channels of a token in the decoder
  decoder_depth: int = ranged(8, Range(1, 10_000))  # blocks of the decoder
  decoder_heads: int = ranged(16, r.COUNT)  # attention heads of the decoder

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    num = num_patches(config)
    if num and not 0 < num_kept(num, self.mask_ratio) < num:
      yield problem(f'{name}.mask_ratio', f'a share that leaves 1 to {num - 1} of {num} patches visible',
                    self.mask_ratio)
    yield from checks.multiple(f'{name}.decoder_width', self.decoder_width, self.decoder_heads,
                               f'{name}.decoder_heads={self.decoder_heads}')
    yield from checks.multiple(f'{name}.decoder_width', self.decoder_width, 4, '4, for 2-D sine-cosine positions')
    yield from _subset_problems(config.model, 'Mae')


COLOR_CELLS = 4
"""Cells on a side into which `PatchTarget.COLORS` divides a patch."""


class PatchTarget(enum.Enum):
  """What is predicted of a corrupted patch (ViT paper, Appendix B.1.2)."""
  COLOR = 'color'    # its mean color, 3 bits a channel: one of 512 classes
  COLORS = 'colors'  # likewise of each cell of 4 x 4: 16 of 512 classes
  PIXELS = 'pixels'  # all pixels as the network gets them, by their squared error


@dataclasses.dataclass
class MaskedPatch(ObjectiveSettings):
  """Masked patch prediction (ViT paper, Appendix B.1.2), after BERT."""
  implementation: ClassVar[str] = 'vit_jax.objectives.masked_patch:Spec'
  has_head: ClassVar[bool] = False
  needs_tokens: ClassVar[bool] = True
  has_statistics: ClassVar[bool] = False
  target: PatchTarget = PatchTarget.COLOR
  mask_ratio: float = ranged(.5, r.UP_TO_1)     # share of the patches of each image that are corrupted
  mask_token_prob: float = ranged(.8, r.SHARE)  # probability that a corrupted patch becomes the mask token
  random_patch_prob: float = ranged(.1, r.SHARE)  # that it becomes another patch of the image; else it is unchanged

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    num, patch = num_patches(config), getattr(config.model, 'patch', COLOR_CELLS)
    if num and num_kept(num, self.mask_ratio) == num:
      yield problem(f'{name}.mask_ratio', f'a share of at least 1 of {num} patches', self.mask_ratio)
    if self.mask_token_prob + self.random_patch_prob > 1 + 1e-9:
      yield problem(f'{name}.mask_token_prob', f'at most 1 together with {name}.random_patch_prob='
                    f'{self.random_patch_prob}', self.mask_token_prob)
    if self.target is PatchTarget.COLORS:
      yield from checks.multiple('model.patch', patch, COLOR_CELLS, f'{COLOR_CELLS} with {name}.target=colors')


@dataclasses.dataclass
class Byol(ObjectiveSettings):
  """Bootstrap your own latent (arXiv 2006.07733). Needs `data.recipe.views`, two of them."""
  implementation: ClassVar[str] = 'vit_jax.objectives.byol:Spec'
  has_head: ClassVar[bool] = False
  takes_views: ClassVar[bool] = True
  has_statistics: ClassVar[bool] = False  # they would mix the crops that are compared
  hidden_dim: int = ranged(4096, r.COUNT)                         # width of the MLPs (Appendix J.2)
  out_dim: int = ranged(256, r.COUNT)                             # width of projections and predictions
  momentum: Ramp = field(default_factory=lambda: Ramp(.996, 1.))  # tau, of the target network
  collapse: Collapse = field(default_factory=Collapse)            # its threshold is that of `spread`, from 0 to 1

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    yield from base.ramp_problems(f'{name}.momentum', self.momentum, r.SHARE)
    yield from checks.must_be_off(config, ('data.recipe.views.num_local',),
                                  'for objective Byol, which compares two global crops')


@dataclasses.dataclass
class LeJepa(ObjectiveSettings):
  """Prediction of views with normally distributed embeddings (arXiv 2511.08544). Needs `data.recipe.views`."""
  implementation: ClassVar[str] = 'vit_jax.objectives.lejepa:Spec'
  compares_examples: ClassVar[bool] = True
  has_head: ClassVar[bool] = False
  takes_views: ClassVar[bool] = True
  has_statistics: ClassVar[bool] = False  # they would mix the crops that are compared
  hidden_dim: int = ranged(2048, r.COUNT)  # width of the two hidden layers of the projector
  out_dim: int = ranged(64, r.COUNT)       # width of embeddings
  weight: float = ranged(.05, r.INSIDE)    # lambda, of SIGReg; the invariance has 1 - lambda
  directions: int = ranged(1024, r.COUNT)  # random unit vectors of a step, on which embeddings are projected
  t_max: float = ranged(5., r.POSITIVE)    # characteristic functions are compared on [-t_max, t_max]
  t_points: int = ranged(9, Range(2, 10_000))  # equidistant points of [0, t_max]; those below 0 add nothing
  collapse: Collapse = field(default_factory=Collapse)  # its threshold is that of `deviation`, which SIGReg draws to 1

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    yield from base.local_crop_problems(config)


class JepaLoss(enum.Enum):
  """The distance of predicted features from their targets, a mean over channels."""
  L2 = 'l2'                # the squared error (I-JEPA paper, section 3)
  SMOOTH_L1 = 'smooth_l1'  # half of it below an error of 1, then linear (ports of the program)


@dataclasses.dataclass
class IJepa(ObjectiveSettings):
  """Prediction of the features of blocks of an image (arXiv 2301.08243). The recipe should only crop."""
  implementation: ClassVar[str] = 'vit_jax.objectives.ijepa:Spec'
  has_head: ClassVar[bool] = False
  needs_tokens: ClassVar[bool] = True
  has_statistics: ClassVar[bool] = False
  predictor_width: int = ranged(384, r.COUNT)             # channels of a token in the predictor
  predictor_depth: int = ranged(12, Range(1, 10_000))     # blocks of the predictor
  predictor_heads: int = ranged(16, r.COUNT)              # attention heads of the predictor
  num_targets: int = ranged(4, Range(1, 1000))            # target blocks of an image, which may overlap
  target_area: tuple[float, float] = ranged((.15, .2), r.UP_TO_1)  # range of the area of a target block, of the image
  target_aspect: tuple[float, float] = ranged((.75, 1.5), r.POSITIVE)  # range of its height divided by its width
  context_area: tuple[float, float] = ranged((.85, 1.), r.UP_TO_1)  # range of the area of the context, a square block
  # The encoder gets at most this share of the patches: if more are in the context and in no target, some at random.
  context_ratio: float = ranged(.5, r.UP_TO_1)
  min_context: int = ranged(10, r.COUNT)                  # patches of a context; blocks with fewer are drawn again
  loss: JepaLoss = JepaLoss.L2
  momentum: Ramp = field(default_factory=lambda: Ramp(.996, 1., curve=Curve.LINEAR))  # of the target encoder
  collapse: Collapse = field(default_factory=Collapse)    # its threshold is that of `deviation`, at most 1

  def slots(self, num_patches: int) -> int:
    """Returns how many patches the encoder gets."""
    return int(num_patches * self.context_ratio + 1e-6)

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    yield from base.ramp_problems(f'{name}.momentum', self.momentum, r.SHARE)
    for setting in ('target_area', 'target_aspect', 'context_area'):
      yield from checks.ascending(f'{name}.{setting}', getattr(self, setting))
    num = num_patches(config)
    if num and self.slots(num) < self.min_context:
      yield problem(f'{name}.context_ratio', f'a share of at least {name}.min_context={self.min_context} of {num} '
                    'patches', self.context_ratio)
    yield from checks.multiple(f'{name}.predictor_width', self.predictor_width, self.predictor_heads,
                               f'{name}.predictor_heads={self.predictor_heads}')
    yield from checks.multiple(f'{name}.predictor_width', self.predictor_width, 4, '4, for 2-D sine-cosine positions')
    yield from _subset_problems(config.model, 'IJepa')


class ClassTarget(enum.Enum):
  """The target of the class token in token labeling."""
  MAP = 'map'      # the label map over the whole crop (the authors' code)
  LABEL = 'label'  # the class of the image (arXiv 2104.10858, eq. 3)


@dataclasses.dataclass
class TokenLabel(ObjectiveSettings):
  """Token labeling (arXiv 2104.10858): every patch token has its own target, in addition to the class of the image."""
  implementation: ClassVar[str] = 'vit_jax.objectives.token_label:Spec'
  needs_tokens: ClassVar[bool] = True
  maps: str = ''                                       # directory of label maps, written by vit-jax prepare --weights=
  dense_weight: float = ranged(1., r.POSITIVE)         # beta, of the mean loss over tokens; that of the class is 1
  mix_token: bool = False                              # MixToken: a box of tokens comes from another image
  mix_group: int = ranged(0, r.COUNT_OR_0)             # consecutive images of a microbatch with one box; 0 = all
  label_smoothing: float = ranged(0., r.BELOW_1)       # of the targets of class and tokens
  class_target: ClassTarget = ClassTarget.MAP
  top: int = ranged(5, r.COUNT)                        # classes a position in the maps
  map_grid: tuple[int, int] = ranged((18, 18), r.COUNT)  # positions of the maps
  without_effect = (NoEffect('mix_token', (False,), ('mix_group',)),)

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    rows = config.batch_size // config.train.microbatches
    yield from checks.must_be_off(
        config, [f'data.recipe.{setting}' for setting in ('mixup', 'cutmix', 'rotate_degrees', 'scale', 'shear')],
        'for objective TokenLabel, as label maps follow only crops, flips and shifts',
        f'To mix images, set {name}.mix_token.')
    if self.mix_token:
      yield from checks.multiple('batch_size / train.accumulate', rows, 2,
                                 f'2 with {name}.mix_token=true, which mixes pairs')
      yield from group_problems(f'{name}.mix_group', self.mix_group, rows, 'batch_size / train.accumulate')


class DistillType(enum.Enum):
  """What the student learns from the teacher."""
  SOFT = 'soft'  # its probabilities at `temperature`
  HARD = 'hard'  # its most likely class


class SoftMean(enum.Enum):
  """The divisor of the teacher's term in soft teaching."""
  PAPER = 'paper'  # the number of examples (DeiT, eq. 2)
  CODE = 'code'    # the number of logits, examples times classes (DeiT's program, losses.py)


@dataclasses.dataclass
class Teacher(checks.Settings):
  """A trained classifier. It sees the same images as the student, also mixed ones, with its own normalization."""
  weights: str = ''                                             # a weight file; required when training starts
  model: Model = field(default_factory=ViT)  # network of the teacher
  head: Head = field(default_factory=Head)
  mean: tuple[float, float, float] = ranged((.5, .5, .5), r.ANY)  # of RGB in [0, 1]
  std: tuple[float, float, float] = ranged((.5, .5, .5), r.POSITIVE)  # of RGB in [0, 1]


@dataclasses.dataclass
class Distill(ObjectiveSettings):
  """Distillation from a teacher (DeiT, arXiv 2012.12877, section 4; with `weight` 1 arXiv 2106.05237)."""
  implementation: ClassVar[str] = 'vit_jax.objectives.distill:Spec'
  teacher: Teacher = field(default_factory=Teacher)
  distill_type: DistillType = DistillType.HARD
  weight: float = ranged(.5, r.SHARE)           # of the teacher's part of the loss; 1 - weight is that of the labels
  temperature: float = ranged(1., r.POSITIVE)   # of soft teaching
  soft_mean: SoftMean = SoftMean.PAPER          # of soft teaching
  label_smoothing: float = ranged(0., r.BELOW_1)  # of the labels' part
  without_effect = (
      NoEffect('distill_type', (DistillType.HARD,), ('temperature', 'soft_mean'),
               advice='Remove it, or set objective.distill_type=soft.'),
      NoEffect('weight', (1.,), ('label_smoothing',), ', which leaves the labels out'))


class FeatureDistance(enum.Enum):
  """The distance of a predicted feature vector from that of the teacher."""
  COSINE = 'cosine'  # 1 - the cosine of their angle
  MSE = 'mse'        # the mean over channels of the squared difference


@dataclasses.dataclass
class FeatureDistill(ObjectiveSettings):
  """Features of a frozen teacher as targets, pooled ones and those of patches, through a linear map."""
  implementation: ClassVar[str] = 'vit_jax.objectives.feature_distill:Spec'
  has_head: ClassVar[bool] = False
  teacher: FeatureTeacher = field(default_factory=FeatureTeacher)
  distance: FeatureDistance = FeatureDistance.COSINE
  pooled_weight: float = ranged(1., r.NOT_NEGATIVE)  # of the pooled features
  patch_weight: float = ranged(1., r.NOT_NEGATIVE) # of the mean over patch tokens

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    if not self.pooled_weight and not self.patch_weight:
      yield problem(f'{name}.pooled_weight', f'more than 0 with {name}.patch_weight=0', 0)
    patches = f'with {name}.patch_weight={self.patch_weight}' if self.patch_weight else ''
    yield from base.teacher_problems(config, f'{name}.teacher', self.teacher, patches=patches)


Objective = (Supervised | Mae | MaskedPatch | Dino | Dinov2 | Dinov2Distill | Dinov3 | Byol | LeJepa | IJepa
             | TokenLabel | Distill | FeatureDistill | Contrastive | ObjectiveSettings)
"""The built-in objectives; the last one stands for a person's own, which inherit from it (`core/implementation.py`)."""
