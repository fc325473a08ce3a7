"""Settings of Vision Transformers: small dataclasses, one for each part, and how they check themselves.

A part that may be of several kinds is a union, such as `Block`. Each kind names its module in `implementation`, and its
fields are arguments of that module's constructor (`core/implementation.py`). A new kind is a settings class in its
union and a module; a person's own kind is both in a file of their own, with the base that ends the union.
"""
import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar

from vit_jax.config.schema import checks, layers
from vit_jax.config.schema.checks import NoEffect
from vit_jax.config.schema.layers import AttentionKernel, DType, Kernels, MlpKernel, Network, Part, Quantize
from vit_jax.config.schema.positions import Learned, Positions, PositionsAt, Relative
from vit_jax.config.schema.ranges import BELOW_1, COUNT, COUNT_OR_0, NOT_NEGATIVE, POSITIVE, PX, Range, ranged

__all__ = ('AnyMlp', 'Attention', 'Axial', 'Block', 'BlockSettings', 'ClassToken', 'ConvStem', 'First', 'LastNorm',
           'LayerNorm', 'Map', 'Mean', 'Mlp', 'MlpSettings', 'Norm', 'NormSettings', 'Parallel', 'PatchStem', 'Plain',
           'Pool', 'PoolSettings', 'QkvBias', 'ResNetStem', 'RmsNorm', 'Stem', 'StemSettings', 'SwiGlu', 'ViT')

MOST_CUDNN_WIDTH, OLD_CUDNN_WIDTH = 256, 128
"""Most channels of a head in cuDNN: on Hopper (compute capability 9.0) and later, and on Ampere and Ada."""


class QkvBias(enum.Enum):
  """Which of query, key and value have a bias."""
  ALL = 'all'
  QUERY_VALUE = 'query_value'  # DINOv3, EVA-02
  NONE = 'none'


@dataclasses.dataclass
class Attention(Part):
  """Multi-head attention (ViT paper, Appendix A)."""
  qkv_bias: QkvBias = QkvBias.ALL
  out_bias: bool = True     # the output matrix has a bias
  qk_norm: bool = False     # a norm of query and key in each head (ViT-22B)
  inner_norm: bool = False  # a norm before the output matrix (EVA-02's CLIP)
  # of attention weights; a setting of vision_transformer, 0 in its models
  dropout: float = ranged(0., BELOW_1)
  kernel: AttentionKernel = AttentionKernel.AUTO
  implementation: ClassVar[str] = 'vit_jax.models.vit.attention:Attention'

  def network_problems(self, model: Network, name: str, own: str) -> Iterator[str]:
    """Yields limits of kernels for one kind of device; `models/kernels/forms.py` has those of devices."""
    if not self.kernel.platform:
      return
    width, advice = model.width // model.heads, f'Set {own}.kernel=xla.'
    is_strict = self.kernel is not AttentionKernel.FUSED  # which leaves to XLA what it cannot do
    for setting in checks.true_ones({
        f'{name}.positions=relative': is_strict and isinstance(model.positions, Relative),
        f'{own}.dropout={self.dropout}': is_strict and self.dropout > 0,
        f'{name}.kernels=plain': model.kernels is Kernels.PLAIN}):
      yield checks.problem(f'{own}.kernel', f'xla with {setting}', self.kernel, advice)
    if self.kernel is not AttentionKernel.CUDNN:
      return
    if model.dtype is not DType.BF16:
      yield checks.problem(f'{own}.kernel', f'xla with {name}.dtype={model.dtype.value}', self.kernel,
                           f'Set {name}.dtype=bfloat16 to use cuDNN.')
    if width % 8 or width > MOST_CUDNN_WIDTH:
      yield checks.problem(f'{own}.kernel', f'xla unless heads have 8, 16, … {MOST_CUDNN_WIDTH} channels ({name}.width='
                           f'{model.width} and {name}.heads={model.heads} give {width})', self.kernel, advice)


class MlpSettings(Part):
  """Base of the kinds of MLP."""
  hidden: int
  bias: bool
  inner_norm: bool
  kernel: MlpKernel = MlpKernel.XLA  # what computes it
  layers: ClassVar[tuple[str, ...]]  # paths of its dense layers in a block, such as `mlp/up`


@dataclasses.dataclass
class Mlp(MlpSettings):
  """`W2 gelu(W1 x + b1) + b2` (ViT paper, section 3.1)."""
  hidden: int = ranged(3072, COUNT)  # width between the matrices
  bias: bool = True         # the matrices have a bias
  inner_norm: bool = False  # a norm before the second matrix
  kernel: MlpKernel = MlpKernel.AUTO
  implementation: ClassVar[str] = 'vit_jax.models.vit.block:Mlp'
  layers: ClassVar[tuple[str, ...]] = ('mlp/up', 'mlp/down')

  def network_problems(self, model: Network, name: str, own: str) -> Iterator[str]:
    if self.kernel is MlpKernel.FUSED and model.kernels is Kernels.PLAIN:
      yield checks.problem(f'{own}.kernel', f'xla with {name}.kernels=plain', self.kernel, f'Set {own}.kernel=xla.')
    if self.kernel is MlpKernel.FUSED and model.quantize is not Quantize.NONE:
      yield checks.problem(f'{own}.kernel', f'auto or xla with {name}.quantize={model.quantize.value}, as the fused '
                           f'kernel multiplies in {name}.dtype', self.kernel, f'Set {own}.kernel=xla.')


@dataclasses.dataclass
class SwiGlu(MlpSettings):
  """`W2 (silu(V x + c) * (W1 x + b1)) + b2` (arXiv 2002.05202; DINOv2 g)."""
  hidden: int = ranged(2048, COUNT)  # width between the matrices
  bias: bool = True         # the matrices have a bias (AIMv2: none)
  inner_norm: bool = False  # a norm before the last matrix (EVA-02 B and L)
  implementation: ClassVar[str] = 'vit_jax.models.vit.block:SwiGlu'
  layers: ClassVar[tuple[str, ...]] = ('mlp/up', 'mlp/down', 'mlp/gate')


AnyMlp = Mlp | SwiGlu | MlpSettings


class BlockSettings(Part):
  """Base of the kinds of block."""
  branch_scale: float  # each branch is multiplied with it before it is added
  parts: ClassVar[tuple[str, ...]] = ('',)  # paths of the blocks that it consists of; '' = itself
  needs_grid: ClassVar[bool] = False  # whether it needs all patch tokens of an image, in raster order


@dataclasses.dataclass
class Plain(BlockSettings):
  """Attention, then the MLP, each after a norm and added back (ViT paper, eqs. 2 and 3)."""
  # initial factor of each branch; 0 = no factor (DINOv2 1e-5, DeiT-III 1e-4)
  layer_scale: float = ranged(0., NOT_NEGATIVE)
  mlp_scale: bool = True  # `layer_scale` is of the MLP too (Sapiens 2: of attention alone)
  branch_scale: float = ranged(1., POSITIVE)  # each branch is multiplied with it before it is added (LV-ViT 1/2, 1/3)
  implementation: ClassVar[str] = 'vit_jax.models.vit.block:Plain'
  without_effect = (NoEffect('layer_scale', (0.,), ('mlp_scale',)),)


@dataclasses.dataclass
class Parallel(BlockSettings):
  """Attention and MLP side by side after one norm (ViT-22B)."""
  branch_scale: float = ranged(1., POSITIVE)  # each branch is multiplied with it before it is added
  implementation: ClassVar[str] = 'vit_jax.models.vit.block:Parallel'


@dataclasses.dataclass
class Axial(Plain):
  """A block within rows, then one within columns (ViT paper, Appendix D.6: Axial-ViT)."""
  implementation: ClassVar[str] = 'vit_jax.models.vit.block:Axial'
  parts: ClassVar[tuple[str, ...]] = ('row', 'column')
  needs_grid: ClassVar[bool] = True

  def network_problems(self, model: Network, name: str, own: str) -> Iterator[str]:
    """Yields problems of tokens that are no patches: axial attention is within rows and columns."""
    if model.pool.class_token:
      yield checks.problem(f'{name}.pool', f'mean or map, without a class token, with {own}=axial',
                           model.pool if isinstance(model.pool, ClassToken) else 'one with a class token')
    if model.registers:
      yield checks.problem(f'{name}.registers', f'0 with {own}=axial', model.registers)
    if model.positions.is_rotary or isinstance(model.positions, Relative):
      yield checks.problem(f'{name}.positions', f'learned, learned2d, sincos or nopositions with {own}=axial',
                           model.positions)


Block = Plain | Parallel | Axial | BlockSettings


class NormSettings(Part):
  """Base of the kinds of norm, over the channels of each token."""
  eps: float


@dataclasses.dataclass
class LayerNorm(NormSettings):
  """LayerNorm: centered, divided by the deviation, with scale and bias (arXiv 1607.06450)."""
  eps: float = ranged(1e-6, POSITIVE)  # added to the variance, or to the mean square
  implementation: ClassVar[str] = 'vit_jax.models.layers:LayerNorm'


@dataclasses.dataclass
class RmsNorm(NormSettings):
  """RMSNorm: divided by the root of the mean square, with a scale (arXiv 1910.07467; AIMv2)."""
  eps: float = ranged(1e-6, POSITIVE)  # added to the variance, or to the mean square
  implementation: ClassVar[str] = 'vit_jax.models.layers:RMSNorm'


Norm = LayerNorm | RmsNorm | NormSettings


class LastNorm(enum.Enum):
  """What the norm after the last block normalizes."""
  TOKENS = 'tokens'  # each token, before pooling
  POOLED = 'pooled'  # the pooled mean, and no token (timm's fc_norm)
  NONE = 'none'      # there is none


class PoolSettings(Part):
  """Base of the ways in which tokens become one feature vector."""
  has_parameters: ClassVar[bool] = False  # whether pooling itself has some
  class_token: bool = False  # whether there is a class token before the patch tokens
  distillation: bool = False  # whether a distillation token follows it


@dataclasses.dataclass
class ClassToken(PoolSettings):
  """The class token (ViT paper, eq. 4)."""
  distillation: bool = False  # a distillation token after the class token, with its own position (DeiT)
  implementation: ClassVar[str] = 'vit_jax.models.vit.pool:ClassToken'
  class_token = True


@dataclasses.dataclass
class Mean(PoolSettings):
  """The mean over patch tokens (ViT paper, Appendix D.3)."""
  class_token: bool = False  # beside a class token that is not read (MAE's fine-tuning, timm's avg)
  implementation: ClassVar[str] = 'vit_jax.models.vit.pool:Mean'


@dataclasses.dataclass
class First(PoolSettings):
  """The first patch token, without class token (big_vision's pool type 0)."""
  implementation: ClassVar[str] = 'vit_jax.models.vit.pool:First'


@dataclasses.dataclass
class Map(PoolSettings):
  """A learned query attends to the patch tokens (Scaling ViT, SigLIP)."""
  class_token: bool = False  # it attends to all tokens, the class token among them (Perception Encoder)
  heads: int = ranged(0, COUNT_OR_0)   # 0 = those of the blocks (Perception Encoder: 8)
  hidden: int = ranged(0, COUNT_OR_0)  # hidden width of its MLP; 0 = that of the blocks
  implementation: ClassVar[str] = 'vit_jax.models.vit.pool:Map'
  has_parameters: ClassVar[bool] = True

  def network_problems(self, model: Network, name: str, own: str) -> Iterator[str]:
    if self.heads:
      yield from checks.multiple(f'{name}.width', model.width, self.heads, f'{own}.heads={self.heads}')


Pool = ClassToken | Mean | First | Map | PoolSettings


class StemSettings(Part):
  """Base of the kinds of stem."""
  bias: bool = True  # whether the patch embedding has a bias
  norm: bool = False  # whether the patch tokens are normalized
  stride: int = 1  # pixels of the image for each pixel of the map that is cut into patches
  has_batch_norm: ClassVar[bool] = False


@dataclasses.dataclass
class PatchStem(StemSettings):
  """Patches are cut from the image itself (ViT paper, eq. 1)."""
  bias: bool = True   # the patch embedding has a bias (CLIP: none)
  norm: bool = False  # a norm of the patch tokens before positions (AIMv2)
  implementation: ClassVar[str] = 'vit_jax.models.vit.stem:Patches'


@dataclasses.dataclass
class ResNetStem(StemSettings):
  """Patches are cut from the feature map of a ResNet (ViT paper, section 3.1, hybrids), as vision_transformer has it.

  The root makes a map of a fourth of the image's side, each stage after the first halves it.
  """
  layers: tuple[int, ...] = ranged((3, 4, 9), Range(1, 1000))  # bottleneck units a stage; none = the root alone
  width: int = ranged(64, COUNT)                               # channels of the root
  std_eps: float = ranged(1e-5, NOT_NEGATIVE)                  # added to the standard deviation of a kernel (timm: 0)
  var_eps: float = ranged(0., NOT_NEGATIVE)                    # added to its variance, under the root (timm: 1e-8)
  norm_eps: float = ranged(1e-6, POSITIVE)                     # epsilon of GroupNorm (timm: 1e-5)
  implementation: ClassVar[str] = 'vit_jax.models.vit.stem:ResNet'

  @property
  def stride(self) -> int:  # type: ignore[override]
    """Pixels of the image for each pixel of the map."""
    return 4 * 2 ** max(0, len(self.layers) - 1)

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    del config
    yield from layers.residual_units(self.width, eps=self.var_eps + self.std_eps, name=name)


@dataclasses.dataclass
class ConvStem(StemSettings):
  """Patches are cut from a map of half of the image's side: three convolutions with BatchNorm and ReLU (LV-ViT)."""
  width: int = ranged(64, COUNT)              # channels of the map
  stride = 2
  has_batch_norm: ClassVar[bool] = True
  implementation: ClassVar[str] = 'vit_jax.models.vit.stem:ConvolutionPatches'


Stem = PatchStem | ResNetStem | ConvStem | StemSettings


@dataclasses.dataclass
class ViT(checks.Settings):
  """Vision Transformer (arXiv 2010.11929, eqs. 1-4). Sizes by name: `sizes.vit('B/16')`."""
  patch: int = ranged(16, PX)      # px of the image a token, also where a stem makes the map smaller first
  width: int = ranged(768, COUNT)  # D, channels of a token
  depth: int = ranged(12, Range(1, 10_000))  # L, number of blocks
  heads: int = ranged(12, COUNT)   # A, attention heads
  mlp: AnyMlp = field(default_factory=Mlp)  # of each block
  attention: Attention = field(default_factory=Attention)  # of each block
  block: Block = field(default_factory=Plain)  # how attention and MLP are joined
  positions: Positions = field(default_factory=Learned)  # how tokens know where they are
  pool: Pool = field(default_factory=ClassToken)  # how tokens become one feature vector
  stem: Stem = field(default_factory=PatchStem)  # how the image becomes patches
  norm: Norm = field(default_factory=LayerNorm)  # of all norms
  norm_before: bool = False  # a norm of all tokens before the first block (CLIP)
  last_norm: LastNorm = LastNorm.TOKENS
  registers: int = ranged(0, COUNT_OR_0)  # learned tokens after the class token, no position (DINOv2-reg: 4)
  gelu: layers.Gelu = layers.Gelu.TANH  # of blocks and of what is made for them: attention pooling, MAE's decoder
  dropout: float = ranged(0., BELOW_1)    # after positions, attention output, MLP activation and output
  drop_path: float = ranged(0., BELOW_1)  # stochastic depth of the last block; grows linearly from 0
  drop_path_even: bool = False            # `drop_path` in every block alike (CaiT, DeiT III)
  # Share of the patches of each image that training leaves out at random (PatchDropout 2208.07220, FLIP 2212.00794).
  patch_dropout: float = ranged(0., BELOW_1)
  dtype: DType = DType.F32
  kernels: Kernels = Kernels.FAST
  quantize: Quantize = Quantize.NONE      # dtype of the products of blocks
  execution: layers.Execution = layers.Execution.AUTO
  unroll: int = ranged(1, COUNT)          # blocks an iteration of the scan
  remat: layers.Remat = layers.Remat.AUTO
  full_remat: int = ranged(0, COUNT_OR_0)  # so many first blocks save nothing but their input, whatever `remat` says
  init: layers.Init = layers.Init.VISION_TRANSFORMER  # initial values of parameters, heads included: of this program
  implementation: ClassVar[str] = 'vit_jax.models.vit.vit:build'
  remats: ClassVar[tuple[layers.Remat, ...]] = layers.BLOCK_REMATS
  executions: ClassVar[tuple[layers.Execution | None, ...]] = layers.EXECUTIONS
  without_effect = (NoEffect('execution', (layers.Execution.UNROLLED,), ('unroll',)),
                    NoEffect('drop_path', (0.,), ('drop_path_even',)))

  @property
  def has_batch_norm(self) -> bool:
    """Whether it has running statistics, of the complete batch of a step."""
    return self.stem.has_batch_norm

  @property
  def num_first(self) -> int:
    """Tokens before the registers: class and distillation token."""
    return self.pool.class_token + self.pool.distillation

  @property
  def num_extra(self) -> int:
    """Tokens before the patch tokens: class and distillation token, and registers."""
    return self.num_first + self.registers

  @property
  def has_simple_mlp(self) -> bool:
    """Whether blocks compute `W2 gelu(W1 x + b1) + b2`, in training too."""
    return isinstance(self.mlp, Mlp) and self.mlp.bias and not (self.mlp.inner_norm or self.dropout)

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from layers.untiled(config.image_px, self.patch, name)
    yield from checks.multiple(f'{name}.width', self.width, self.heads, f'{name}.heads={self.heads}')
    yield from checks.multiple(f'{name}.patch', self.patch, self.stem.stride,
                               f'{self.stem.stride} px, the stride of {name}.stem={type(self.stem).__name__}')
    yield from checks.at_most(f'{name}.full_remat', self.full_remat, self.depth, f'{name}.depth')
    if self.last_norm is LastNorm.POOLED and not isinstance(self.pool, Mean):
      yield checks.problem(f'{name}.last_norm', f'tokens or none with {name}.pool={checks.kind(self.pool)}',
                           self.last_norm, f'Set {name}.pool=mean, which it normalizes.')
    if self.quantize is not Quantize.NONE and self.kernels is Kernels.PLAIN:
      yield checks.problem(f'{name}.kernels', f'fast with {name}.quantize={self.quantize.value}, whose gradients are '
                           'written by hand', self.kernels, f'Set {name}.kernels=fast or {name}.quantize=none.')
    needs_all_patches = checks.true_ones({
        f'{name}.block={checks.kind(self.block)}': self.block.needs_grid,
        f'{name}.positions=relative': isinstance(self.positions, Relative),
        f'{name}.positions.at=layers': self.positions.at is PositionsAt.LAYERS,
        f'objective {type(config.objective).__name__}': config.objective.needs_tokens})
    for reason in needs_all_patches if self.patch_dropout else ():
      yield checks.problem(f'{name}.patch_dropout', f'0 with {reason}, which needs all patches', self.patch_dropout)
    for setting in dataclasses.fields(self):
      part = getattr(self, setting.name)
      if isinstance(part, Part):
        yield from part.network_problems(self, name, f'{name}.{setting.name}')
