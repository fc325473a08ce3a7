"""`Spec`: what a run needs to know of an objective beside the objective itself, such as its data and other networks.

Each kind of objective defines its spec in its own file. A run makes the spec of its config (`kinds.of`), opens label
maps or texts, builds the objective on a backbone, and then loads the weights that `begins_with` lists.
"""
from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core.contracts import Backbone, Objective, TokenBackbone, Watch
from vit_jax.core.errors import UserError
from vit_jax.core.types import Params
from vit_jax.data.device.token_targets import Targets
from vit_jax.data.image.transform import Shapes
from vit_jax.data.source import Source
from vit_jax.models.vit import vit

if TYPE_CHECKING:  # few objectives have label maps or texts
  from vit_jax.data.answers import Answers
  from vit_jax.data.text.captions import Texts

S = TypeVar('S')


class Begin(NamedTuple):
  """Pretrained weights for a second network of a run, such as a teacher, whose parameters are a part of the state.

  weights: address of the weights; '' = none.
  part: key of `extra` that has the network: `backbone`, perhaps `head` and others by name, and `state`. It is
    `parallel.sharding.TRAINED` for a network that never changes and has other shapes than the trained one.
  model: settings of the network.
  image_px: size of the images that the network sees.
  view: the view of a run directory to load, such as `ema`; '' = `first` if the run has that view.
  first: the preferred view, if `view` is ''.
  required: which weights must be given, for a message; '' = the network can also be initialized without weights.
  normalization: mean and standard deviation of its images in the config, which a warning compares with those of the
    weights; () = they follow from the weights.
  is_text: whether it is a text tower. Its parameters are then in `params[part]`, and `model` and `image_px` are those
    of the image tower.
  """
  weights: str
  part: str
  model: schema.Model
  image_px: tuple[int, int]
  view: str = ''
  first: str = ''
  required: str = ''
  normalization: tuple[tuple[float, ...], ...] = ()
  is_text: bool = False


class Loaded(Protocol):
  """What an objective reads from loaded weights: see `weights.network.Weights`."""
  @property
  def model(self) -> schema.Model: ...
  @property
  def preprocess(self) -> Any: ...
  @property
  def params(self) -> Params: ...
  @property
  def source(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Spec(abc.ABC, Generic[S]):
  """The objective of a config. `build` is required; the rest is for the kinds that need it.

  config: of the run.   settings: its `objective`.
  """
  config: schema.Config
  settings: S
  from_weights: ClassVar[tuple[str, ...]] = ()
  """Names of the objective's settings that `settings_from` returns."""
  collapse_advice: ClassVar[str] = ''
  """What to do after a collapse: a sentence without its full stop."""

  @abc.abstractmethod
  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Objective:
    """Builds the objective on a backbone."""

  def models(self) -> dict[str, schema.Model]:
    """Returns the settings of all networks of the run, by their place in the config."""
    return {'model': self.config.model}

  def begins_with(self) -> dict[str, Begin]:
    """Returns the other networks that begin with weights, by the setting of the objective that describes them.

    A network `teacher` is described by `objective.teacher`, whose setting `weights` names the weights.
    """
    return {}

  def settings_from(self, name: str, weights: Loaded) -> dict[str, Any]:
    """Returns settings of the objective that follow from the weights of the network `name`, by dotted name.

    They are `from_weights`, such as `teacher.model`. Raises UserError if the network cannot have these weights.
    """
    del name, weights
    return {}

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
    """Returns the alarms for metrics of the train step that are low; none with `objective.collapse.threshold` 0."""
    settings: Any = self.settings
    metrics = self.collapse_metrics()
    if not metrics or not settings.collapse.threshold:
      return []
    collapse: schema.Collapse = settings.collapse
    return [Watch(metric, collapse.threshold, setting='objective.collapse.threshold',
                  lasting=lengths.steps(collapse.patience), after=lengths.steps(collapse.after),
                  stops=collapse.action is schema.OnCollapse.STOP, advice=self.collapse_advice) for metric in metrics]

  def collapse_metrics(self) -> tuple[str, ...]:
    """Returns the names of the metrics that fall to 0 when a network collapses, if settings have `collapse`."""
    return ()

  @property
  def vit(self) -> schema.ViT:
    """Settings of the backbone, for an objective on patch tokens."""
    assert isinstance(self.config.model, schema.ViT), self.config.model
    return self.config.model


def tokens(backbone: Backbone) -> tuple[TokenBackbone, schema.ViT]:
  """Returns a backbone as one on patch tokens, and its settings. Raises UserError if it has none."""
  if not isinstance(backbone, vit.ViT):
    raise UserError(f'model: expected a ViT, as this objective needs patch tokens, got {type(backbone).__name__}. '
                    'Set --config.model to a ViT such as S/16, or use another objective.')
  return backbone, backbone.settings
