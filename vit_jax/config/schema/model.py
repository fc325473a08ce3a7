"""Settings of networks and their heads."""
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar

from vit_jax.config.schema import checks
from vit_jax.config.schema.layers import (
    BLOCK_REMATS,
    EXECUTIONS,
    UNIT_REMATS,
    DType,
    Execution,
    Gelu,
    Kernels,
    Remat,
    residual_units,
    unit_remat,
    untiled,
)
from vit_jax.config.schema.ranges import ANY, BELOW_1, COUNT, COUNT_OR_0, NOT_NEGATIVE, POSITIVE, PX, Range, ranged
from vit_jax.config.schema.vit import ViT

__all__ = ('AxialResNet', 'EfficientNet', 'FeatureLayers', 'Head', 'Mixer', 'Model', 'ResNet')


@dataclasses.dataclass
class ResNet(checks.Settings):
  """BiT: ResNet-v2 with GroupNorm and weight standardization (arXiv 1912.11370). By name: `sizes.resnet('R50x1')`."""
  implementation: ClassVar[str] = 'vit_jax.models.rivals.resnet:ResNet'
  layers: tuple[int, ...] = ranged((3, 4, 6, 3), Range(1, 1000))  # bottleneck units a stage
  width: int = ranged(64, COUNT)                # channels of the root; stage i from 0 gives width * 4 * 2^i
  var_eps: float = ranged(1e-10, NOT_NEGATIVE)  # added to the variance of a kernel, under the root (timm: 1e-8)
  dtype: DType = DType.F32
  remat: Remat = Remat.AUTO                     # of each unit: none or full
  kernels: Kernels = Kernels.FAST
  remats: ClassVar[tuple[Remat, ...]] = UNIT_REMATS
  executions: ClassVar[tuple[Execution | None, ...]] = (None,)  # None: there is no such setting
  has_batch_norm: ClassVar[bool] = False

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    del config
    if not self.layers:
      yield checks.problem(f'{name}.layers', 'a number of units for each stage, such as 3,4,6,3', self.layers)
    yield from residual_units(self.width, eps=self.var_eps, name=name)
    yield from unit_remat(self.remat, name)


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
  execution: Execution = Execution.AUTO
  remat: Remat = Remat.AUTO
  kernels: Kernels = Kernels.FAST
  remats: ClassVar[tuple[Remat, ...]] = BLOCK_REMATS
  executions: ClassVar[tuple[Execution | None, ...]] = EXECUTIONS
  has_batch_norm: ClassVar[bool] = False

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from untiled(config.image_px, self.patch, name)


@dataclasses.dataclass
class EfficientNet(checks.Settings):
  """EfficientNet (arXiv 1905.11946) as its authors' weights have it. By name: `sizes.efficientnet('B0')`."""
  implementation: ClassVar[str] = 'vit_jax.models.rivals.efficientnet:EfficientNet'
  width_factor: float = ranged(1., Range(0, 100, above=True))  # of channels, which are rounded to multiples of 8
  depth_factor: float = ranged(1., Range(0, 100, above=True))  # of repeated blocks, rounded up
  dropout: float = ranged(0., BELOW_1)  # of the pooled features
  drop_path: float = ranged(0., BELOW_1)  # stochastic depth of the last block; grows linearly from 0
  norm_momentum: float = ranged(.99, BELOW_1)  # of BatchNorm's running statistics: what stays at each step
  norm_eps: float = ranged(1e-3, POSITIVE)  # epsilon of BatchNorm
  dtype: DType = DType.F32
  remat: Remat = Remat.AUTO  # of each block: none or full
  kernels: Kernels = Kernels.FAST
  remats: ClassVar[tuple[Remat, ...]] = UNIT_REMATS
  executions: ClassVar[tuple[Execution | None, ...]] = (None,)
  has_batch_norm: ClassVar[bool] = True  # whose statistics are those of the complete batch of a step

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    del config
    yield from unit_remat(self.remat, name)


@dataclasses.dataclass
class AxialResNet(checks.Settings):
  """AxialResNet (arXiv 2003.07853): axial attention in place of 3 x 3 convolutions. By name: `Axial-ResNet50-S`."""
  implementation: ClassVar[str] = 'vit_jax.models.rivals.axial_resnet:AxialResNet'
  layers: tuple[int, ...] = ranged((3, 4, 6, 3), Range(1, 1000))  # units a stage
  width: int = ranged(32, COUNT)  # channels of the root; stage i from 0 returns width * 4 * 2^i
  heads: int = ranged(8, COUNT)  # attention heads
  norm_momentum: float = ranged(.9, BELOW_1)  # of BatchNorm's running statistics: what stays at each step
  norm_eps: float = ranged(1e-5, POSITIVE)  # epsilon of BatchNorm
  dtype: DType = DType.F32
  remat: Remat = Remat.AUTO  # of each unit: none or full
  kernels: Kernels = Kernels.FAST
  remats: ClassVar[tuple[Remat, ...]] = UNIT_REMATS
  executions: ClassVar[tuple[Execution | None, ...]] = (None,)
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
    yield from unit_remat(self.remat, name)


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

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    if not self.bias:
      yield from checks.no_effect(self, name, ['bias_init'], f'with {name}.bias=False')
    if not self.probe:
      yield from checks.no_effect(self, name, ('features', 'batch_norm'), f'with {name}.probe=false',
                           f'Set {name}.probe=true.')
      return
    if not any(rule.frozen_until == '100 %' and re.fullmatch(rule.paths, 'backbone/norm/scale')
               for rule in config.optimizer.rules):
      yield (f'optimizer.rules: expected one that freezes the backbone with {name}.probe=true, got none. Add '
             "PathRule('backbone/.*', frozen_until='100 %').")
    if self.batch_norm and config.train.accumulate > 1:
      yield checks.problem('train.accumulate', f'1 with {name}.batch_norm=true, whose statistics are of the complete '
                           'batch', config.train.accumulate)
    if self.features.patches and not self.features.blocks:
      yield checks.problem(f'{name}.features.blocks', f'block numbers, such as -1, with {name}.features.patches=true',
                           ())
