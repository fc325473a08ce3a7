"""What the settings of objectives share: checks of the rest of the config that depend on them, and a frozen teacher."""
import dataclasses
from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar

from vit_jax.config.schema import checks
from vit_jax.config.schema import ranges as r
from vit_jax.config.schema.checks import problem
from vit_jax.config.schema.data import RGB
from vit_jax.config.schema.evals import TopK
from vit_jax.config.schema.model import Head, Mixer, Model
from vit_jax.config.schema.optim import Ramp
from vit_jax.config.schema.positions import Relative
from vit_jax.config.schema.ranges import Range, ranged
from vit_jax.config.schema.vit import ViT

__all__ = ('FeatureTeacher', 'ObjectiveSettings')


class ObjectiveSettings(checks.Settings):
  """What the settings of all objectives have in common. `problems` checks what the class variables declare."""
  has_head: ClassVar[bool] = True        # a classification head, which learns from labels
  needs_tokens: ClassVar[bool] = False   # the patch tokens of a ViT
  takes_views: ClassVar[bool] = False    # several crops of an image: `data.recipe.views`
  takes_native: ClassVar[bool] = False   # images at their own aspect: `data.recipe.native_lengths`
  takes_copies: ClassVar[bool] = False   # larger copies of the global crops: `data.recipe.views.gram_scale`
  takes_texts: ClassVar[bool] = False    # a text of each image; images are then not held in memory
  has_statistics: ClassVar[bool] = True  # running statistics of BatchNorm may be updated
  compares_examples: ClassVar[bool] = False  # `Coupling` of the contracts: microbatches take a second forward pass

  @property
  def least_rows(self) -> int:
    """Images of the smallest batch that the loss can be computed of; others are multiples of it."""
    return 2  # some objectives compare images

  @property
  def on_host(self) -> bool:
    """Whether images are prepared on the host, and not held in memory for the device."""
    return self.takes_texts

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    """Yields problems of settings elsewhere that this kind of objective cannot use."""
    kind, model = type(self).__name__, type(config.model).__name__
    if self.needs_tokens and not isinstance(config.model, ViT):
      yield f'model: expected a ViT for objective {kind}, which works on patch tokens, got {model}.'
    if self.takes_views and not config.data.recipe.views.on:
      yield problem('data.recipe.views.on', f'true for objective {kind}, which compares crops of an image', False)
    if not self.has_statistics and config.model.has_batch_norm:
      yield f'model: expected one without BatchNorm for objective {kind}, got {model}.'
    if self.has_head:
      return
    where = f'for objective {kind}, which has no head and uses no labels'
    for key, evaluation in config.evals.items():
      if isinstance(evaluation, TopK):
        yield f'evals.{key}: expected an evaluation of features {where}, got {type(evaluation).__name__}.'
    if config.head != Head():
      yield f'head: expected the default {where}, got other settings. Remove them.'
    yield from checks.must_be_off(config, ('data.recipe.mixup', 'data.recipe.cutmix', 'data.max_labels'), where)


def num_patches(config: checks.Run) -> int:
  """Returns the number of patches of an image; 0 if the model has none."""
  patch = getattr(config.model, 'patch', 0)
  return (config.image_px[0] // patch) * (config.image_px[1] // patch) if patch >= 1 else 0


def num_kept(num_patches: int, share: float) -> int:
  """Returns the number of patches that remain when this share is removed.

  `objectives/patches.py` rounds it in the same way.
  """
  return int(num_patches * (1. - share) + 1e-6)


def ramp_problems(name: str, ramp: Ramp, allowed: Range) -> Iterator[str]:
  """Yields problems of a ramp whose ends are out of range."""
  for end in ('start', 'end'):
    if not allowed.has(value := getattr(ramp, end)):
      yield problem(f'{name}.{end}', str(allowed), value)


def local_crop_problems(config: checks.Run) -> Iterator[str]:
  """Yields problems of a model that cannot process local crops, whose size is not that of the image."""
  views, model = config.data.recipe.views, config.model
  fixed = 'model Mixer' if isinstance(model, Mixer) else (
      'model.positions=relative' if isinstance(getattr(model, 'positions', None), Relative) else '')
  if views.on and views.num_local and fixed:
    yield problem('data.recipe.views.num_local', f'0 with {fixed}, which takes images of one size', views.num_local)


@dataclasses.dataclass
class FeatureTeacher(checks.Settings):
  """A trained network, which never changes. All but `weights`, `view` and `px` is set from the weights."""
  weights: str = ''           # a run directory or weight file; required
  view: str = ''              # of a run given there: student, ema or teacher; '' = ema where there is one
  px: int = ranged(0, r.PX_OR_0)  # the student's images are resized to this side; 0 = it sees them at their size
  model: Model = field(default_factory=ViT)  # network of the teacher
  mean: tuple[float, ...] = ranged((.5, .5, .5), r.ANY)    # of RGB in [0, 1]
  std: tuple[float, ...] = ranged((.5, .5, .5), r.POSITIVE)  # of RGB in [0, 1]

  def image_px(self, student_px: tuple[int, int]) -> tuple[int, int]:
    """Returns height and width of the images that the teacher sees."""
    return (self.px, self.px) if self.px else (student_px[0], student_px[1])


def teacher_problems(config: checks.Run, name: str, teacher: FeatureTeacher, *, patches: str) -> Iterator[str]:
  """Yields problems of the images that a teacher sees, of their size, and of networks whose patches are compared.

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
  patch = getattr(teacher.model, 'patch', 1)
  is_known = teacher.model != ViT()  # before the weights are read it has the default
  for side in teacher.image_px(config.image_px) if is_known else ():
    yield from checks.multiple(f'{name}.px', side, patch, f'{name}.model.patch={patch}')
