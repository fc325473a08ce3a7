"""Settings of feature distillation: a small network learns the features of a large one."""
import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar

from vit_jax.config.schema import checks
from vit_jax.config.schema.checks import problem
from vit_jax.config.schema.data import RGB
from vit_jax.config.schema.model import Model
from vit_jax.config.schema.objective_base import ObjectiveSettings
from vit_jax.config.schema.ranges import ANY, NOT_NEGATIVE, POSITIVE, PX_OR_0, ranged
from vit_jax.config.schema.vit import ViT

__all__ = ('FeatureDistance', 'FeatureDistill', 'FeatureTeacher')


class FeatureDistance(enum.Enum):
  """The distance of a predicted feature vector from that of the teacher."""
  COSINE = 'cosine'  # 1 - the cosine of their angle
  MSE = 'mse'        # the mean over channels of the squared difference


@dataclasses.dataclass
class FeatureTeacher(checks.Settings):
  """A trained network, which never changes. All but `weights`, `view` and `px` is set from the weights."""
  weights: str = ''           # a run directory or weight file; required
  view: str = ''              # of a run given there: student, ema or teacher; '' = ema where there is one
  px: int = ranged(0, PX_OR_0)  # the student's images are resized to this side; 0 = it sees them at their size
  model: Model = field(default_factory=ViT)  # network of the teacher
  mean: tuple[float, ...] = ranged((.5, .5, .5), ANY)      # of RGB in [0, 1]
  std: tuple[float, ...] = ranged((.5, .5, .5), POSITIVE)  # of RGB in [0, 1]

  def image_px(self, student_px: tuple[int, int]) -> tuple[int, int]:
    """Returns height and width of the images that the teacher sees."""
    return (self.px, self.px) if self.px else (student_px[0], student_px[1])


def teacher_problems(config: checks.Run, name: str, teacher: FeatureTeacher, *, patches: str) -> Iterator[str]:
  """Yields problems of the images that a teacher sees, and of networks whose patches are compared.

  `patches` says where they are, such as `with objective.patch_weight=1.0`; '' = nowhere.
  """
  for setting in ('mean', 'std'):
    if len(value := getattr(teacher, setting)) != RGB:
      yield problem(f'{name}.{setting}', f'{RGB} numbers', value)
  if config.data.channels != RGB:
    yield problem('data.channels', f'{RGB} for objective {type(config.objective).__name__}', config.data.channels)
  for setting, model in (('model', config.model), (f'{name}.model', teacher.model)) if patches else ():
    if not isinstance(model, ViT):
      yield f'{setting}: expected a ViT {patches}, got {type(model).__name__}.'


def size_problems(config: checks.Run, name: str, teacher: FeatureTeacher) -> Iterator[str]:
  """Yields problems of a size of images that the patches of the teacher do not divide."""
  patch = getattr(teacher.model, 'patch', 1)
  is_known = teacher.model != ViT()  # before the weights are read it has the default
  for side in teacher.image_px(config.image_px) if is_known else ():
    yield from checks.multiple(f'{name}.px', side, patch, f'{name}.model.patch={patch}')


@dataclasses.dataclass
class FeatureDistill(ObjectiveSettings):
  """Features of a frozen teacher as targets, pooled ones and those of patches, through a linear map."""
  implementation: ClassVar[str] = 'vit_jax.objectives.feature_distill:Spec'
  has_head: ClassVar[bool] = False
  teacher: FeatureTeacher = field(default_factory=FeatureTeacher)
  distance: FeatureDistance = FeatureDistance.COSINE
  pooled_weight: float = ranged(1., NOT_NEGATIVE)  # of the pooled features
  patch_weight: float = ranged(1., NOT_NEGATIVE)   # of the mean over patch tokens

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    """Yields problems of weights that leave nothing to learn, and of networks without patches."""
    yield from super().problems(config, name)
    if not self.pooled_weight and not self.patch_weight:
      yield problem(f'{name}.pooled_weight', f'more than 0 with {name}.patch_weight=0', 0)
    yield from teacher_problems(config, f'{name}.teacher', self.teacher,
                                patches=f'with {name}.patch_weight={self.patch_weight}' if self.patch_weight else '')
    yield from size_problems(config, f'{name}.teacher', self.teacher)
