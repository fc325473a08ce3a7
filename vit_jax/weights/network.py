"""Loaded weights: a network with all that is needed to use it, and the report of how every tensor was used."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema import checks
from vit_jax.config.schema.data import RGB
from vit_jax.core.errors import UserError
from vit_jax.core.types import Params, PyTree
from vit_jax.weights.hints import pool_word

if TYPE_CHECKING:  # a run without loaded weights describes its network by this module
  from vit_jax.weights.preprocess import Preprocess


class Line(NamedTuple):
  """One tensor, or several with the same result.

  name: path in our parameters, or the name in the file if the tensor has no such path.
  what: taken | resized | folded | new | dropped.
  rule: the reason; '' if the tensor was taken unchanged.
  """
  name: str
  what: str
  rule: str = ''


_MOST = 8
"""How many tensors with the same rule are listed one by one."""


class Report(NamedTuple):
  """The lines of a load or an adaptation, in order."""
  lines: tuple[Line, ...] = ()
  notes: tuple[str, ...] = ()
  warnings: tuple[str, ...] = ()

  def of(self, what: str) -> list[Line]:
    """Returns the lines with this result."""
    return [line for line in self.lines if line.what == what]

  def text(self) -> str:
    """Returns readable text: counts, and what was not taken unchanged; of many tensors with one rule, the first."""
    counts = [f'{len(self.of(what))} {what}' for what in ('taken', 'resized', 'folded', 'new', 'dropped')
              if self.of(what)]
    groups: dict[tuple[str, str], list[str]] = {}
    for line in self.lines:
      if line.what != 'taken':
        groups.setdefault((line.what, line.rule), []).append(line.name)
    changed = [f'  {what:<8}{name}' + (f': {rule}' if rule else '')
               for (what, rule), names in groups.items()
               for name in (names if len(names) <= _MOST else [f'{names[0]} and {len(names) - 1:,} more'])]
    return '\n'.join([*self.notes, f'Tensors: {", ".join(counts) or "none"} (those of all blocks as one)', *changed,
                      *(f'Warning: {one}' for one in self.warnings)])

  def plain(self) -> dict[str, Any]:
    """Returns the report of every tensor for a JSON file."""
    return {'notes': list(self.notes), 'warnings': list(self.warnings),
            'tensors': [line._asdict() for line in self.lines]}


class Weights(NamedTuple):
  """A network with all that is needed to use it.

  model: all settings, with the form of the GELU, the epsilon and the pooling of the weights.
  head: settings of the head.
  num_classes: outputs of the head; 0 = no head (`params` then has no `head`).
  params: f32 numpy arrays under `backbone`, and where they exist `head`, `head_dist`, `decoder`, `mask_token`.
  state: running statistics of a network with BatchNorm, else `{}`.
  decoder: settings of a masked autoencoder's decoder, if there is one.
  preprocess: how its images are prepared.
  class_names: of the head's outputs, in their order; () = unknown.
  family: format of the source: one of `recognize.LABELS`, or `run`.
  source: path, address or name.
  report: how every tensor was used.
  given: as `source`, with the password or token that an address has; not for messages and records.
  step: of the checkpoint of a run; -1 = these are no weights of a run.
  is_sigmoid: whether the probability of a class is the sigmoid of its logit alone, as the loss of the run was; without
    a record it is the softmax.
  """
  model: schema.Model
  head: schema.Head
  num_classes: int
  params: Params
  state: PyTree
  decoder: schema.Mae | None
  preprocess: Preprocess
  class_names: tuple[str, ...]
  family: str
  source: str
  report: Report
  given: str = ''
  step: int = -1
  is_sigmoid: bool = False

  @property
  def channels(self) -> int:
    """The number of channels of its images."""
    return len(self.preprocess.mean)

  def check_rgb(self, use: str) -> None:
    """Raises UserError if its images have other channels than RGB, which `use` does not support."""
    if self.channels != RGB:
      raise UserError(f'{self.source}: expected weights for RGB images, got weights for {self.channels} channels, '
                      f'which {use} does not support. Use vit-jax train, evaluate, embed --data or export.')


def describe(model: schema.Model) -> str:
  """Returns a short description of a network."""
  match model:
    case schema.ViT():
      found = (f'ViT of width {model.width}, depth {model.depth}, {model.heads} heads, MLP {model.mlp.hidden}, patch '
               f'{model.patch}, pool {pool_word(model.pool)}'
               + f', GELU {model.gelu.value}' * isinstance(model.mlp, schema.Mlp) + f', epsilon {model.norm.eps:g}')
      options = {
          f'{checks.kind(model.block)} blocks': model.block.implementation != schema.Plain.implementation,
          f'{model.registers} registers': model.registers, 'distillation token': model.pool.distillation,
          'LayerScale': layer_scale(model), 'SwiGLU': isinstance(model.mlp, schema.SwiGlu),
          'norm of query and key': model.attention.qk_norm, 'RMSNorm': isinstance(model.norm, schema.RmsNorm),
          'norm before the blocks': model.norm_before,
          f'positions {checks.kind(model.positions)}': not isinstance(model.positions, schema.Learned),
          f'positions resized {position_resize(model)}': model.positions.has_rows}
      stem = [f'ResNet stem {model.stem.layers}'] if isinstance(model.stem, schema.ResNetStem) else []
      return ', '.join([found, *(name for name, is_so in options.items() if is_so), *stem])
    case schema.Mixer():
      return (f'Mixer of width {model.width}, depth {model.depth}, patch {model.patch}, GELU {model.gelu.value}, '
              f'epsilon {model.norm_eps:g}')
    case schema.ResNet():
      return f'ResNet of stages {model.layers}, width {model.width}'
    case schema.EfficientNet():
      return f'EfficientNet, width x {model.width_factor}, depth x {model.depth_factor}'
    case schema.AxialResNet():
      return f'AxialResNet of stages {model.layers}, width {model.width}'


def layer_scale(m: schema.ViT) -> float:
  """Returns the initial factor of the branches of a block; 0 if there is none."""
  return getattr(m.block, 'layer_scale', 0.)


def position_resize(m: schema.Model) -> str:
  """Returns how learned positions are resized, the value of a `PositionResize`; '' for other networks."""
  found = setting(m, 'positions.resize')
  return found.value if found else ''


def hidden_settings(m: schema.Model) -> dict[str, Any]:
  """Returns those settings of this network that tensors do not show, by the names of `sidecars.SETTINGS`."""
  if isinstance(m, schema.ResNet):
    return {'stem.var_eps': m.var_eps}
  if not isinstance(m, schema.ViT):
    return {}
  found: dict[str, Any] = {'pool.heads': heads} if (heads := setting(m, 'pool.heads')) else {}
  if isinstance(m.stem, schema.ResNetStem):
    found |= {f'stem.{name}': getattr(m.stem, name) for name in ('std_eps', 'var_eps', 'norm_eps')}
  if isinstance(m.positions, schema.SinCos):
    found['positions.frequencies'] = m.positions.frequencies.value
  if isinstance(m.positions, schema.Rotary):
    index = m.positions.coordinates
    found |= {'positions.base': m.positions.base} | (
        {'positions.grid': index.grid, 'positions.offset': index.offset} if isinstance(index, schema.ByIndex) else
        {'positions.coordinates': checks.kind(index)})
  return found


def setting(settings: object, name: str) -> Any:
  """Returns a setting by its dotted name, such as `norm.eps` of a network; None if there is no such setting."""
  found: Any = settings
  for part in name.split('.'):
    found = getattr(found, part, None)
  return found
