"""What a run needs to know of an objective beside the objective itself. Each kind defines it in its own file."""
from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Generic, TypeVar

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core.contracts import Backbone, Objective, TokenBackbone, Watch
from vit_jax.core.errors import UserError
from vit_jax.data.device.token_targets import Targets
from vit_jax.data.image.transform import Shapes
from vit_jax.data.source import Source
from vit_jax.models.vit import vit

if TYPE_CHECKING:  # few objectives have label maps or texts
  from vit_jax.data.answers import Answers
  from vit_jax.data.text.captions import Texts

S = TypeVar('S')


@dataclasses.dataclass(frozen=True)
class Spec(abc.ABC, Generic[S]):
  """The objective of a config. `build` is required; the rest is for the kinds that need it.

  config: of the run.   settings: its `objective`.
  """
  config: schema.Config
  settings: S

  @abc.abstractmethod
  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Objective:
    """Builds the objective on a backbone."""

  def models(self) -> dict[str, schema.Model]:
    """Returns the settings of all networks of the run, by their place in the config."""
    return {'model': self.config.model}

  def open_maps(self, source: Source) -> Answers | None:
    """Opens the label maps that the loader adds to its batches.

    Raises UserError if they are missing or do not fit.
    """
    del source
    return None

  def targets(self) -> Targets | None:
    """Returns how label maps become targets on the device; None if there are no label maps."""
    return None

  def open_texts(self, source: Source) -> Texts | None:
    """Opens the texts that the loader adds to its batches.

    Raises UserError if they are missing.
    """
    del source
    return None

  def batch_shapes(self) -> Shapes:
    """Returns the shapes of the label maps or of the text of an example."""
    return {}

  def watches(self, lengths: Lengths) -> list[Watch]:
    """Returns the metrics of the train step that raise an alarm when they are low."""
    del lengths
    return []

  @property
  def vit(self) -> schema.ViT:
    """Settings of the backbone, for an objective on patch tokens."""
    assert isinstance(self.config.model, schema.ViT), self.config.model
    return self.config.model

  @property
  def num_patches(self) -> int:
    """Patch tokens of an image."""
    return vit.num_tokens(self.vit, self.config.image_px)[0]


def alarm(collapse: schema.Collapse, metric: str, lengths: Lengths, advice: str) -> list[Watch]:
  """Returns the alarm for a metric that falls to 0 when a network collapses; [] with a threshold of 0."""
  return [Watch(metric, collapse.threshold, setting='objective.collapse.threshold',
                lasting=lengths.steps(collapse.patience), after=lengths.steps(collapse.after),
                stops=collapse.action is schema.OnCollapse.STOP, advice=advice)] if collapse.threshold else []


def tokens(backbone: Backbone) -> tuple[TokenBackbone, schema.ViT]:
  """Returns a backbone as one on patch tokens, and its settings. Raises UserError if it has none."""
  if not isinstance(backbone, vit.ViT):
    raise UserError(f'model: expected a ViT, as this objective needs patch tokens, got {type(backbone).__name__}. '
                    'Set --config.model to a ViT such as S/16, or use another objective.')
  return backbone, backbone.settings
