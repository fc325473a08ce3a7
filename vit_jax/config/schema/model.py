"""Settings of networks, of their heads, and of low-rank adapters: LoRA, rsLoRA and DoRA."""
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar

from vit_jax.config.schema import checks, layers, optim
from vit_jax.config.schema.checks import NoEffect
from vit_jax.config.schema.layers import DType, Gelu, Kernels, Remat, residual_units, untiled
from vit_jax.config.schema.ranges import ANY, BELOW_1, COUNT, COUNT_OR_0, NOT_NEGATIVE, POSITIVE, PX, Range, ranged
from vit_jax.config.schema.vit import ViT

__all__ = ('AxialResNet', 'EfficientNet', 'FeatureLayers', 'Head', 'Lora', 'Mixer', 'Model', 'ResNet', 'adapted_layers')


class _Convolutions(checks.Settings):
  """What networks of convolutions share: a unit saves everything for the backward pass, or only its input."""
  remat: Remat
  remats: ClassVar[tuple[Remat, ...]] = (Remat.NONE, Remat.FULL)
  executions: ClassVar[tuple[layers.Execution | None, ...]] = (None,)  # None: there is no such setting
  has_batch_norm: ClassVar[bool] = False

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    if self.remat not in (*self.remats, Remat.AUTO):
      yield checks.problem(f'{name}.remat', 'none or full for a network of convolutions', self.remat)


@dataclasses.dataclass
class ResNet(_Convolutions):
  """BiT: ResNet-v2 with GroupNorm and weight standardization (arXiv 1912.11370). By name: `sizes.resnet('R50x1')`."""
  implementation: ClassVar[str] = 'vit_jax.models.rivals.resnet:ResNet'
  layers: tuple[int, ...] = ranged((3, 4, 6, 3), Range(1, 1000))  # bottleneck units a stage
  width: int = ranged(64, COUNT)                # channels of the root; stage i from 0 gives width * 4 * 2^i
  var_eps: float = ranged(1e-10, NOT_NEGATIVE)  # added to the variance of a kernel, under the root (timm: 1e-8)
  dtype: DType = DType.F32
  remat: Remat = Remat.AUTO                     # of each unit: none or full
  kernels: Kernels = Kernels.FAST

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    if not self.layers:
      yield checks.problem(f'{name}.layers', 'a number of units for each stage, such as 3,4,6,3', self.layers)
    yield from residual_units(self.width, eps=self.var_eps, name=name)
    yield from super().problems(config, name)


@dataclasses.dataclass
class Mixer(checks.Settings):
  """MLP-Mixer (arXiv 2105.01601). By name: `sizes.mixer('B/16')`."""
  implementation: ClassVar[str] = 'vit_jax.models.rivals.mixer:Mixer'
  patch: int = ranged(16, PX)              # px
  width: int = ranged(768, COUNT)  # channels of a token
  depth: int = ranged(12, Range(1, 10_000))  # number of blocks
  tokens_mlp: int = ranged(384, COUNT)     # hidden width of the MLP over tokens
  channels_mlp: int = ranged(3072, COUNT)  # hidden width of the MLP over channels
  dropout: float = ranged(0., BELOW_1)     # after MLP activation and output
  drop_path: float = ranged(0., BELOW_1)   # stochastic depth of the last block; grows linearly from 0
  gelu: Gelu = Gelu.TANH
  norm_eps: float = ranged(1e-6, POSITIVE)  # epsilon of LayerNorm
  dtype: DType = DType.F32
  execution: layers.Execution = layers.Execution.AUTO
  remat: Remat = Remat.AUTO
  kernels: Kernels = Kernels.FAST
  remats: ClassVar[tuple[Remat, ...]] = layers.BLOCK_REMATS
  executions: ClassVar[tuple[layers.Execution | None, ...]] = layers.EXECUTIONS
  has_batch_norm: ClassVar[bool] = False

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from untiled(config.image_px, self.patch, name)


@dataclasses.dataclass
class EfficientNet(_Convolutions):
  """EfficientNet (arXiv 1905.11946) as its authors' weights have it. By name: `sizes.efficientnet('B0')`."""
  implementation: ClassVar[str] = 'vit_jax.models.rivals.efficientnet:EfficientNet'
  width_factor: float = ranged(1., Range(0, 100, above=True))  # of channels, which are rounded to multiples of 8
  depth_factor: float = ranged(1., Range(0, 100, above=True))  # of repeated blocks, rounded up
  dropout: float = ranged(0., BELOW_1)  # of the pooled features
  drop_path: float = ranged(0., BELOW_1)  # stochastic depth of the last block; grows linearly from 0
  norm_eps: float = ranged(1e-3, POSITIVE)  # epsilon of BatchNorm
  dtype: DType = DType.F32
  remat: Remat = Remat.AUTO  # of each block: none or full
  kernels: Kernels = Kernels.FAST
  has_batch_norm: ClassVar[bool] = True  # whose statistics are those of the complete batch of a step


@dataclasses.dataclass
class AxialResNet(_Convolutions):
  """AxialResNet (arXiv 2003.07853): axial attention in place of 3 x 3 convolutions. By name: `Axial-ResNet50-S`."""
  implementation: ClassVar[str] = 'vit_jax.models.rivals.axial_resnet:AxialResNet'
  layers: tuple[int, ...] = ranged((3, 4, 6, 3), Range(1, 1000))  # units a stage
  width: int = ranged(32, COUNT)  # channels of the root; stage i from 0 returns width * 4 * 2^i
  heads: int = ranged(8, COUNT)  # attention heads
  norm_eps: float = ranged(1e-5, POSITIVE)  # epsilon of BatchNorm
  dtype: DType = DType.F32
  remat: Remat = Remat.AUTO  # of each unit: none or full
  kernels: Kernels = Kernels.FAST
  has_batch_norm: ClassVar[bool] = True  # whose statistics are those of the complete batch of a step

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    if not self.layers:
      yield f'{name}.layers: expected a number of units for each stage, got none. Set it to 3,4,6,3, for example.'
    stride = 4 * 2 ** max(len(self.layers) - 1, 0)
    if any(side % stride for side in config.image_px):
      yield f'image_px: expected multiples of {stride}, the stride of {name}, got {config.image_px}.'
    if 2 * self.width % (2 * self.heads):
      yield (f'{name}.width: expected a multiple of {name}.heads={self.heads}, got {self.width}. Queries and keys have '
             'half of the channels of a head each.')
    yield from super().problems(config, name)


Model = ViT | ResNet | Mixer | EfficientNet | AxialResNet


@dataclasses.dataclass
class FeatureLayers(checks.Settings):
  """Where in a network features are read; by default what its head sees."""
  # After these blocks, normalized and pooled as after the last, concatenated; from 1, or from the end: -4,-3,-2,-1
  blocks: tuple[int, ...] = ranged((), Range(-10_000, 10_000))
  patches: bool = False  # and the mean patch token of the last of them (DINO's ViT-B)


@dataclasses.dataclass
class Head(checks.Settings):
  """Classification head."""
  pre_logits: int = ranged(0, COUNT_OR_0)  # width of a tanh layer before the logits; 0 = linear head
  bias_init: float = ranged(0., ANY)       # e.g. -10 for sigmoid losses with many classes
  bias: bool = True                        # without: a projection to an embedding, as weights of CLIP have
  probe: bool = False                      # a linear probe: the backbone only evaluates, and no gradient reaches it
  features: FeatureLayers = field(default_factory=FeatureLayers)    # of a probe: what it sees
  batch_norm: bool = False                 # of a probe: of what it sees, without scale and bias (MAE)
  without_effect = (NoEffect('bias', (False,), ('bias_init',)),)

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    if not self.probe:
      yield from checks.no_effect(self, name, ('features', 'batch_norm'), f'with {name}.probe=false',
                                  f'Set {name}.probe=true.')
      return
    if not optim.is_frozen('backbone/norm/scale', config.optimizer.rules):
      yield (f'optimizer.rules: expected one that freezes the backbone with {name}.probe=true, got none. Add '
             "PathRule('backbone/.*', frozen_until='100 %').")
    if self.batch_norm and config.train.accumulate > 1:
      yield checks.problem('train.accumulate', f'1 with {name}.batch_norm=true, whose statistics are of the complete '
                           'batch', config.train.accumulate)
    if self.features.patches and not self.features.blocks:
      yield checks.problem(f'{name}.features.blocks', f'block numbers, such as -1, with {name}.features.patches=true',
                           ())


EVERY = 'query,key,value,out,mlp/.*,tokens/.*,channels/.*'
"""All dense layers in the blocks of all networks."""
RANKS = Range(0, 16_384)  # no published ViT is as wide
ATTENTION = ('attn/query', 'attn/key', 'attn/value', 'attn/out')


@dataclasses.dataclass
class Lora(checks.Settings):
  """Low-rank adapters (arXiv 2106.09685): the backbone is frozen, and `W + scale A B` takes the place of W."""
  rank: int = ranged(0, RANKS)              # r, the inner size of A B; 0 = off, all parameters are trained
  alpha: float = ranged(0., NOT_NEGATIVE)   # scale is alpha / rank; 0 = alpha is the rank, so the scale is 1
  dropout: float = ranged(0., BELOW_1)      # of the input of A, while training
  # Layers of the blocks, by the end of their path or a pattern of it; several with commas: query,value,mlp/.*
  targets: str = EVERY
  dora: bool = False    # DoRA (arXiv 2402.09353): the norm of each output's weights is a parameter of its own
  rslora: bool = False  # rsLoRA (arXiv 2312.03732): scale is alpha / sqrt(rank)
  without_effect = (NoEffect('rank', (0,)),)

  @property
  def scale(self) -> float:
    """The factor of A B; only if `rank` is not 0."""
    return (self.alpha or self.rank) / (self.rank ** .5 if self.rslora else self.rank)

  def is_target(self, layer: str) -> bool:
    """Returns whether the layer with this path in a block, such as `attn/query`, has an adapter."""
    return any(re.fullmatch(f'(.*/)?({end})', layer) for end in self.ends)

  @property
  def ends(self) -> tuple[str, ...]:
    """`targets` one by one."""
    return tuple(self.targets.split(','))

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    if wrong := list(checks.patterns(f'{name}.targets', self.ends)):
      yield from wrong
      return
    layers = adapted_layers(config.model)
    if not layers:
      yield checks.problem(f'{name}.rank', f'0 for {type(config.model).__name__}, which has no blocks of dense layers',
                    self.rank)
      return
    for target in self.ends:
      if target not in EVERY.split(',') and not any(re.fullmatch(f'(.*/)?({target})', layer) for layer in layers):
        yield checks.problem(f'{name}.targets', f'the ends of {", ".join(layers)}, or patterns', target)
    if not any(self.is_target(layer) for layer in layers):
      yield checks.problem(f'{name}.targets', f'one of {", ".join(layers)} at least', self.targets)
    if config.head.probe:
      yield checks.problem('head.probe', f'false with {name}.rank={self.rank}, as no gradient reaches the backbone of '
                           'a probe', True)
    if optim.is_frozen('backbone/blocks/attn/query/lora_a', config.optimizer.rules):
      yield (f'optimizer.rules: expected none that freezes the adapters with {name}.rank={self.rank}, got one. Remove '
             'it: the other parameters of the backbone are frozen without a rule.')


def adapted_layers(model: Model) -> tuple[str, ...]:
  """Returns the paths of the dense layers of a block that adapters can be added to; () without such blocks."""
  match model:
    case ViT():
      return tuple(f'{part}/{name}'.lstrip('/') for part in model.block.parts
                   for name in (*ATTENTION, *model.mlp.layers))
    case Mixer():
      return tuple(f'{part}/{name}' for part in ('tokens', 'channels') for name in ('up', 'down'))
    case _:
      return ()
