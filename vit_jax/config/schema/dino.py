"""Settings of DINO and of what is built on it: DINOv2, its distillation, and DINOv3."""
import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar

from vit_jax.config.schema import checks
from vit_jax.config.schema import objective_base as base
from vit_jax.config.schema import ranges as r
from vit_jax.config.schema.checks import NoEffect, problem
from vit_jax.config.schema.objective_base import FeatureTeacher, ObjectiveSettings, num_patches
from vit_jax.config.schema.optim import Curve, Ramp
from vit_jax.config.schema.ranges import Range, duration, ranged

__all__ = ('Centering', 'Collapse', 'Dino', 'Dinov2', 'Dinov2Distill', 'Dinov3', 'Gram', 'OnCollapse')


class Centering(enum.Enum):
  """What prevents the collapse of DINO's teacher to the same output for all images."""
  MEAN = 'mean'          # subtracts an EMA of its outputs (DINO)
  SINKHORN = 'sinkhorn'  # spreads its outputs evenly over the batch, in three rounds (SwAV, DINOv2)
  NONE = 'none'          # nothing: collapses (DINO paper, section 5.3)


class OnCollapse(enum.Enum):
  """What the alarm does."""
  WARN = 'warn'  # logs a warning, once, and an event in the record
  STOP = 'stop'  # ends the run with an error


@dataclasses.dataclass
class Collapse(checks.Settings):
  """The alarm for a collapsed network: its outputs hold too little information about the image for too long.

  The information is H(mean output) - mean of H(output), in nats, between image and prototype: 0 if the outputs for all
  images are the same, whether uniform or peaked.
  """
  threshold: float = ranged(.05, r.NOT_NEGATIVE)  # nats, of the teacher over a batch
  patience: str = duration('2 %')               # below the threshold without interruption, before the alarm is raised
  after: str = duration('5 %')                  # from the start of the run, where outputs carry little information
  action: OnCollapse = OnCollapse.WARN


@dataclasses.dataclass
class Dino(ObjectiveSettings):
  """Self-distillation without labels (arXiv 2104.14294). Needs `data.recipe.views`."""
  implementation: ClassVar[str] = 'vit_jax.objectives.dino:Spec'
  has_head: ClassVar[bool] = False
  takes_views: ClassVar[bool] = True
  has_statistics: ClassVar[bool] = False  # they would mix the crops that are compared
  out_dim: int = ranged(65_536, r.COUNT)    # K, outputs of the projection head
  hidden_dim: int = ranged(2048, r.COUNT)   # width of its MLP
  bottleneck_dim: int = ranged(256, r.COUNT)  # width before the last layer
  norm_last_layer: bool = True  # the rows of the last layer have norm 1, which is safer; False: their norms are learned
  student_temperature: float = ranged(.1, r.POSITIVE)  # of the softmax of the student
  teacher_temperature: Ramp = field(default_factory=lambda: Ramp(.04, .07, until='30 epochs', curve=Curve.LINEAR))
  momentum: Ramp = field(default_factory=lambda: Ramp(.996, 1.))  # of the teacher
  centering: Centering = Centering.MEAN
  center_momentum: float = ranged(.9, r.BELOW_1)  # of the EMA of the center
  collapse: Collapse = field(default_factory=Collapse)
  without_effect = (NoEffect('centering', (Centering.SINKHORN, Centering.NONE), ('center_momentum',)),)

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    yield from base.ramp_problems(f'{name}.teacher_temperature', self.teacher_temperature, Range(1e-6))
    yield from base.ramp_problems(f'{name}.momentum', self.momentum, r.SHARE)
    if self.centering is Centering.SINKHORN and config.train.accumulate > 1:
      yield problem('train.accumulate', f'1 with {name}.centering=sinkhorn, which needs the complete batch',
                    config.train.accumulate, f'Set it to 1, or {name}.centering=mean.')
    yield from base.local_crop_problems(config)


@dataclasses.dataclass
class Dinov2(Dino):
  """DINO with masked patches and spread features (DINOv2, arXiv 2304.07193). Needs `data.recipe.views`."""
  implementation: ClassVar[str] = 'vit_jax.objectives.dinov2:Spec'
  needs_tokens: ClassVar[bool] = True
  momentum: Ramp = field(default_factory=lambda: Ramp(.992, 1.))  # of the teacher
  dino_weight: float = ranged(1., r.NOT_NEGATIVE) # of the loss between crops
  local_weight: float = ranged(1., r.NOT_NEGATIVE)  # of the pairs with a local crop in the loss between crops
  ibot_weight: float = ranged(1., r.NOT_NEGATIVE) # of the loss on masked patches
  koleo_weight: float = ranged(.1, r.NOT_NEGATIVE)  # of the loss that spreads the features of images
  koleo_crops: int = ranged(2, Range(1, 2))       # global crops whose features it spreads, from the first on
  patch_out_dim: int = ranged(0, r.COUNT_OR_0)    # outputs of a separate head of patches; 0 = they share DINO's head
  patch_bottleneck_dim: int = ranged(256, r.COUNT)  # width before the last layer of a separate head
  mask_share: float = ranged(.5, r.UP_TO_1)       # share of the global crops of which patches are masked
  mask_ratio: tuple[float, float] = ranged((.1, .5), r.UP_TO_1)  # range of the share of patches that such a crop loses
  # Consecutive images of the batch that share the shares above, and among which KoLeo looks for the nearest one.
  group: int = ranged(64, Range(2, 1_000_000))
  without_effect = (NoEffect('patch_out_dim', (0,), ('patch_bottleneck_dim',)),)

  @property
  def least_rows(self) -> int:
    return self.group

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    yield from checks.multiple('batch_size', config.batch_size, self.group, f'{name}.group={self.group}')
    yield from checks.ascending(f'{name}.mask_ratio', self.mask_ratio)
    if (num := num_patches(config)) and int(num * self.mask_ratio[1]) < 1:
      yield problem(f'{name}.mask_ratio', f'an end of at least one of {num} patches', self.mask_ratio)
    if int(2 * self.group * self.mask_share) < 1:
      yield problem(f'{name}.mask_share', f'at least one of 2 x {name}.group={self.group} crops', self.mask_share)
    if config.train.accumulate > 1 and self.centering is not Centering.SINKHORN:
      yield problem('train.accumulate', '1 for objective Dinov2, whose groups and masks need the complete batch',
                    config.train.accumulate)


@dataclasses.dataclass
class Dinov2Distill(Dinov2):
  """Distillation with the losses of DINOv2 from a frozen network with its heads (arXiv 2304.07193, section 5).

  The sizes of the heads are those of the teacher, and are set from its weights, like the network.
  """
  implementation: ClassVar[str] = 'vit_jax.objectives.dinov2_distill:Spec'
  teacher: FeatureTeacher = field(default_factory=FeatureTeacher)
  momentum: Ramp = field(default_factory=lambda: Ramp(.994, 1.))  # of the average of the student, the view `teacher`
  # The next two choose the patches that are compared, as those that DINOv2 masks; the student sees them.
  mask_share: float = ranged(.5, r.UP_TO_1)       # share of the global crops of which patches are compared
  mask_ratio: tuple[float, float] = ranged((.1, .5), r.UP_TO_1)  # share of patches of such a crop; 1, 1 = all

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    yield from base.teacher_problems(config, f'{name}.teacher', self.teacher, patches='for objective Dinov2Distill')


@dataclasses.dataclass
class Gram(checks.Settings):
  """Gram anchoring: patch tokens keep the similarities that they had in an earlier network, the Gram teacher.

  That network has the `weights`, or it is the teacher of this run at `step`, which is not read with `weights`.
  """
  weight: float = ranged(2., r.POSITIVE)  # of the mean squared difference of Gram matrices
  start: str = duration('0 steps')      # of the term
  weights: str = ''                     # a run directory or weight file; '' = of this run
  # Of a run given there: student, ema or teacher; '' = the first of teacher, ema and student that it has.
  view: str = ''
  step: str = duration('0 steps')       # of this run; at 0 steps it has the weights of `init_from`
  refresh: str = duration('', off=True, zero=False)  # so often after `start` it becomes the teacher of then; '' = never
  refreshes: int = ranged(3, r.COUNT)   # times that this happens at most
  without_effect = (NoEffect('weights', ('',), ('view',), advice='Set objective.gram.weights, or leave it out.'),
                    NoEffect('refresh', ('',), ('refreshes',)))


@dataclasses.dataclass
class Dinov3(Dinov2):
  """DINOv2 with Gram anchoring (DINOv3, arXiv 2508.10104). Needs `data.recipe.views`."""
  implementation: ClassVar[str] = 'vit_jax.objectives.dinov3:Spec'
  takes_copies: ClassVar[bool] = True
  momentum: Ramp = field(default_factory=lambda: Ramp(.999, .999))  # of the teacher
  centering: Centering = Centering.SINKHORN
  koleo_crops: int = ranged(1, Range(1, 2))  # global crops whose features KoLeo spreads, from the first on
  gram: Gram = field(default_factory=Gram)
