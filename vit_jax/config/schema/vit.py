"""Settings of Vision Transformers, and how they check themselves."""
import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar

from vit_jax.config.schema import checks, layers
from vit_jax.config.schema.layers import (
    AttentionKernel,
    DType,
    Execution,
    Gelu,
    Init,
    Kernels,
    MlpKernel,
    Norm,
    Remat,
)
from vit_jax.config.schema.ranges import ANY, BELOW_1, COUNT, COUNT_OR_0, NOT_NEGATIVE, POSITIVE, PX, Range, ranged

__all__ = ('ConvStem', 'PatchStem', 'Pool', 'PositionResize', 'Positions', 'PositionsAt', 'ResNetStem', 'RotaryPlaces',
           'ViT')

MOST_CUDNN_WIDTH = 256
"""Most channels of a head in cuDNN, on Hopper and later."""


class Pool(enum.Enum):
  """How tokens become one feature vector."""
  CLS = 'cls'    # the class token (ViT paper, eq. 4)
  MEAN = 'mean'  # mean over patch tokens (ViT paper, Appendix D.3), without class token
  PATCHES = 'patches'  # mean over patch tokens, beside a class token that is not read (MAE's fine-tuning, timm's avg)
  FIRST = 'first'  # the first patch token, without class token (big_vision's pool type 0)
  MAP = 'map'    # a learned query attends to the patch tokens (Scaling ViT, SigLIP), without class token
  MAP_CLS = 'map_cls'  # a learned query attends to all tokens, the class token among them (Perception Encoder)

  @property
  def has_class_token(self) -> bool:
    """Whether there is a class token before the patch tokens."""
    return self in (Pool.CLS, Pool.PATCHES, Pool.MAP_CLS)

  @property
  def is_attention(self) -> bool:
    """Whether a learned query attends to the tokens."""
    return self in (Pool.MAP, Pool.MAP_CLS)


class Positions(enum.Enum):
  """Position embedding. All but the fixed ones are compared in the ViT paper's Appendix D.4."""
  LEARNED = 'learned'      # one vector a token (ViT paper, eq. 1)
  SINCOS2D = 'sincos2d'    # fixed 2-D sine-cosine, temperature 10,000 (Better plain ViT baselines)
  SINCOS2D_MAE = 'sincos2d_mae'  # likewise, with the frequencies of MAE and MoCo v3
  NONE = 'none'            # a bag of patches
  LEARNED2D = 'learned2d'  # half a vector a column, half a vector a row, concatenated
  RELATIVE = 'relative'    # learned keys for 1-D offsets add to the attention logits of every block
  ROTARY2D = 'rotary2d'    # queries and keys of patches are rotated by row and column (RoPE-ViT, axial; DINOv3)
  LEARNED_ROTARY2D = 'learned_rotary2d'  # both `learned` and `rotary2d` (EVA-02, Perception Encoder)

  @property
  def is_learned(self) -> bool:
    """Whether there is a table of learned vectors."""
    return self.has_rows or self is Positions.LEARNED2D

  @property
  def has_rows(self) -> bool:
    """Whether this table has one vector a token."""
    return self in (Positions.LEARNED, Positions.LEARNED_ROTARY2D)

  @property
  def is_rotary(self) -> bool:
    """Whether queries and keys are rotated."""
    return self in (Positions.ROTARY2D, Positions.LEARNED_ROTARY2D)

  @property
  def is_resizable(self) -> bool:
    """Whether images of other sizes have positions."""
    return self is not Positions.RELATIVE

  @property
  def is_fixed(self) -> bool:
    """Whether vectors that are not learned are added to the tokens."""
    return self in (Positions.SINCOS2D, Positions.SINCOS2D_MAE)


class PositionsAt(enum.Enum):
  """Where learned positions are added (ViT paper, Appendix D.4)."""
  STEM = 'stem'      # once, after the stem
  LAYERS = 'layers'  # before every block, each with its own
  SHARED = 'shared'  # before every block, the same


class RotaryPlaces(enum.Enum):
  """What rows and columns count as in `rotary2d`."""
  INDEX = 'index'  # their number, in radians (RoPE-ViT, EVA-02, Perception Encoder)
  UNIT = 'unit'    # the center of the patch in an image from -1 to 1, times 2 pi (DINOv3)


class PositionResize(enum.Enum):
  """How learned positions are resized to another token grid. The programs that weights come from differ in it."""
  ALIGNED = 'aligned'            # bilinear, corners aligned, no antialiasing: vision_transformer, big_vision
  BICUBIC = 'bicubic'            # a = -3/4, borders aligned, no antialiasing: DeiT, MAE, transformers
  BICUBIC_OFFSET = 'bicubic_offset'        # likewise, with scale (n + 0.1) / M for M -> n tokens: DINO, DINOv2
  BICUBIC_ANTIALIAS = 'bicubic_antialias'  # a = -1/2, borders aligned, antialiased: timm, DINOv2 with registers
  BILINEAR = 'bilinear'          # borders aligned, no antialiasing: Perception Encoder
  BILINEAR_ANTIALIAS = 'bilinear_antialias'  # borders aligned, antialiased: TIPS, SigLIP 2 of any size


@dataclasses.dataclass
class PatchStem(checks.Settings):
  """Patches are cut from the image itself (ViT paper, eq. 1)."""
  stride: ClassVar[int] = 1  # px of the image for each pixel of the map that is cut into patches


@dataclasses.dataclass
class ResNetStem(checks.Settings):
  """Patches are cut from the feature map of a ResNet (ViT paper, section 3.1, hybrids), as vision_transformer has it.

  The root makes a map of a fourth of the image's side, each stage after the first halves it.
  """
  layers: tuple[int, ...] = ranged((3, 4, 9), Range(1, 1000))  # bottleneck units a stage; none = the root alone
  width: int = ranged(64, COUNT)                               # channels of the root
  std_eps: float = ranged(1e-5, NOT_NEGATIVE)                  # added to the standard deviation of a kernel (timm: 0)
  var_eps: float = ranged(0., NOT_NEGATIVE)                    # added to its variance, under the root (timm: 1e-8)
  norm_eps: float = ranged(1e-6, POSITIVE)                     # epsilon of GroupNorm (timm: 1e-5)

  @property
  def stride(self) -> int:
    """Pixels of the image for each pixel of the map."""
    return 4 * 2 ** max(0, len(self.layers) - 1)

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    del config
    yield from layers.residual_units(self.width, eps=self.var_eps + self.std_eps, name=name)


@dataclasses.dataclass
class ConvStem(checks.Settings):
  """Patches are cut from a map of half of the image's side: three convolutions with BatchNorm and ReLU (LV-ViT)."""
  width: int = ranged(64, COUNT)              # channels of the map
  norm_momentum: float = ranged(.9, BELOW_1)  # of BatchNorm's running statistics: what stays at each step
  stride: ClassVar[int] = 2


@dataclasses.dataclass
class ViT(checks.Settings):
  """Vision Transformer (arXiv 2010.11929, eqs. 1-4). Sizes by name: `sizes.vit('B/16')`."""
  implementation: ClassVar[str] = 'vit_jax.models.vit.vit:build'
  patch: int = ranged(16, PX)              # px of the image a token, also where a stem makes the map smaller first
  width: int = ranged(768, COUNT)  # D, channels of a token
  depth: int = ranged(12, Range(1, 10_000))  # L, number of blocks
  heads: int = ranged(12, COUNT)  # A, attention heads
  mlp: int = ranged(3072, COUNT)           # hidden width of the MLP
  pool: Pool = Pool.CLS
  positions: Positions = Positions.LEARNED
  dropout: float = ranged(0., BELOW_1)     # after positions, attention output, MLP activation and output
  drop_path: float = ranged(0., BELOW_1)   # stochastic depth of the last block; grows linearly from 0
  gelu: Gelu = Gelu.TANH
  norm_eps: float = ranged(1e-6, POSITIVE)  # epsilon of the norms
  dtype: DType = DType.F32
  execution: Execution = Execution.AUTO
  unroll: int = ranged(1, COUNT)           # blocks an iteration of the scan
  remat: Remat = Remat.AUTO
  full_remat: int = ranged(0, COUNT_OR_0)  # so many first blocks save nothing but their input, whatever `remat` says
  drop_path_even: bool = False             # `drop_path` in every block alike (CaiT, DeiT III)
  positions_at: PositionsAt = PositionsAt.STEM
  registers: int = ranged(0, COUNT_OR_0)   # learned tokens after the class token, no position (DINOv2-reg: 4)
  # initial factor of each branch; 0 = no factor (DINOv2 1e-5, DeiT-III 1e-4)
  layer_scale: float = ranged(0., NOT_NEGATIVE)
  qk_norm: bool = False  # LayerNorm of query and key in each head (ViT-22B)
  # of attention weights; a setting of vision_transformer, 0 in its models
  attention_dropout: float = ranged(0., BELOW_1)
  swiglu: bool = False                        # MLP with a gate; `mlp` is the width of the gate (DINOv2 g)
  parallel: bool = False                      # attention and MLP side by side after one norm (ViT-22B)
  axial: bool = False  # a block in rows, then one in columns (ViT paper, Appendix D.6: Axial-ViT)
  distilled: bool = False                     # a distillation token after the class token, with its own position (DeiT)
  stem: PatchStem | ResNetStem | ConvStem = field(default_factory=PatchStem)  # how the image becomes patches
  qkv_bias: bool = True                       # query, key and value have a bias
  branch_scale: float = ranged(1., POSITIVE)  # each branch is multiplied with it before it is added (LV-ViT 1/2, 1/3)
  norm_after_pool: bool = False       # the last norm is of the pooled mean (timm's fc_norm), not of each token
  attention: AttentionKernel = AttentionKernel.XLA
  position_resize: PositionResize = PositionResize.ALIGNED  # of learned positions, for images of other sizes
  kernels: Kernels = Kernels.FAST
  rotary_base: float = ranged(100., Range(1, above=True))  # of rotary2d: the ratio of its frequencies (RoPE-ViT: 100)
  rotary_places: RotaryPlaces = RotaryPlaces.INDEX
  rotary_grid: int = ranged(0, COUNT_OR_0)  # of index: a side of any grid counts as so many patches; 0 = as it is
  rotary_offset: float = ranged(0., ANY)    # of index: the number of the first row and column
  rotary_mixed: bool = False   # frequencies of row and column are learned, in each head (RoPE-ViT, mixed)
  norm: Norm = Norm.LAYER      # of all norms
  norm_before: bool = False    # a norm of all tokens before the first block (CLIP)
  stem_norm: bool = False      # a norm of the patch tokens before positions (AIMv2)
  final_norm: bool = True      # a norm after the last block, or after pooling
  attn_norm: bool = False      # a norm before the output matrix of attention (EVA-02's CLIP)
  mlp_norm: bool = False       # a norm before the output matrix of the MLP (EVA-02 B and L)
  stem_bias: bool = True       # the patch embedding has a bias (CLIP: none)
  key_bias: bool = True        # where query and value have a bias, keys have one too (DINOv3, EVA-02: none)
  out_bias: bool = True        # the output matrix of attention has a bias
  mlp_bias: bool = True        # the matrices of the MLP have a bias (AIMv2: none)
  mlp_scale: bool = True       # `layer_scale` is of the MLP too (Sapiens 2: of attention alone)
  pool_heads: int = ranged(0, COUNT_OR_0)  # of a pool with attention; 0 = those of the blocks (Perception Encoder: 8)
  pool_mlp: int = ranged(0, COUNT_OR_0)    # hidden width of a pool with attention; 0 = that of the blocks
  mlp_kernel: MlpKernel = MlpKernel.XLA
  init: Init = Init.VISION_TRANSFORMER  # initial values of parameters, heads included: as in this program
  remats: ClassVar[tuple[Remat, ...]] = layers.BLOCK_REMATS
  executions: ClassVar[tuple[Execution | None, ...]] = layers.EXECUTIONS

  @property
  def has_batch_norm(self) -> bool:
    """Whether it has running statistics, of the complete batch of a step."""
    return isinstance(self.stem, ConvStem)

  @property
  def has_simple_mlp(self) -> bool:
    """Whether blocks compute `W2 gelu(W1 x + b1) + b2`, in training too."""
    return self.mlp_bias and not (self.swiglu or self.mlp_norm or self.dropout)

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from layers.untiled(config.image_px, self.patch, name)
    yield from checks.multiple(f'{name}.width', self.width, self.heads, f'{name}.heads={self.heads}')
    yield from checks.multiple(f'{name}.patch', self.patch, self.stem.stride,
                               f'{self.stem.stride} px, the stride of {name}.stem={type(self.stem).__name__}')
    if self.unroll > 1 and self.execution is Execution.UNROLLED:
      yield from checks.no_effect(self, name, ['unroll'], f'with {name}.execution={self.execution.value}')
    yield from checks.at_most(f'{name}.full_remat', self.full_remat, self.depth, f'{name}.depth')
    if not self.drop_path:
      yield from checks.no_effect(self, name, ['drop_path_even'], f'with {name}.drop_path=0')
    yield from self._position_problems(name)
    if self.parallel and self.layer_scale:
      yield checks.problem(f'{name}.layer_scale', f'0 with {name}.parallel=True, which has one sum of both branches',
                           self.layer_scale)
    if self.norm_after_pool and self.pool not in (Pool.MEAN, Pool.PATCHES):
      yield checks.problem(f'{name}.norm_after_pool', f'False with {name}.pool={self.pool.value}', True,
                           f'Set {name}.pool=mean or patches, whose mean it normalizes.')
    if self.distilled and self.pool is not Pool.CLS:
      yield checks.problem(f'{name}.distilled', f'False with {name}.pool={self.pool.value}', True,
                           f'Set {name}.pool=cls: the distillation token follows the class token.')
    yield from self._switch_problems(name)
    yield from self._axial_problems(name) if self.axial else ()
    yield from self._kernel_problems(name) if self.attention.platform else ()

  def _position_problems(self, name: str) -> Iterator[str]:
    with_kind = f'with {name}.positions={self.positions.value}'
    if self.positions.is_fixed and (self.width % 4 or self.width < 8):
      yield checks.problem(f'{name}.width', f'a multiple of 4, at least 8, {with_kind}', self.width)
    if self.positions.is_rotary:
      head = f'4 channels for each of {name}.heads={self.heads} {with_kind}'
      yield from checks.multiple(f'{name}.width', self.width, 4 * self.heads, head)
    else:
      rotary = ['rotary_base', 'rotary_places', 'rotary_grid', 'rotary_offset', 'rotary_mixed']
      yield from checks.no_effect(self, name, rotary, with_kind)
    if self.rotary_places is RotaryPlaces.UNIT:
      yield from checks.no_effect(self, name, ['rotary_grid', 'rotary_offset'], f'with {name}.rotary_places=unit')
    if self.positions is Positions.LEARNED2D:
      yield from checks.multiple(f'{name}.width', self.width, 2, f'2 {with_kind}')
    if self.positions_at is not PositionsAt.STEM and (self.positions.is_rotary or not self.positions.is_learned):
      yield checks.problem(f'{name}.positions_at', f'stem {with_kind}', self.positions_at,
                           f'Set {name}.positions=learned or learned2d to add them before each block.')

  def _switch_problems(self, name: str) -> Iterator[str]:
    if not self.qkv_bias:
      yield from checks.no_effect(self, name, ['key_bias'], f'with {name}.qkv_bias=False')
    if not self.layer_scale:
      yield from checks.no_effect(self, name, ['mlp_scale'], f'with {name}.layer_scale=0')
    if not self.final_norm and self.norm_after_pool:
      yield checks.problem(f'{name}.final_norm', f'True with {name}.norm_after_pool=True, which moves it', False)
    if not self.pool.is_attention:
      yield from checks.no_effect(self, name, ['pool_heads', 'pool_mlp'], f'with {name}.pool={self.pool.value}')
    elif self.pool_heads:
      yield from checks.multiple(f'{name}.width', self.width, self.pool_heads, f'{name}.pool_heads={self.pool_heads}')

    if self.mlp_kernel is MlpKernel.FUSED and self.kernels is Kernels.PLAIN:
      yield checks.problem(f'{name}.mlp_kernel', f'xla with {name}.kernels=plain', self.mlp_kernel,
                           f'Set {name}.mlp_kernel=xla.')

  def _axial_problems(self, name: str) -> Iterator[str]:
    """Axial attention is within rows and columns, which only patch tokens have."""
    if self.pool.has_class_token:
      yield checks.problem(f'{name}.pool', f'mean or map, which have no class token, with {name}.axial=True', self.pool)
    if self.registers:
      yield checks.problem(f'{name}.registers', f'0 with {name}.axial=True', self.registers)
    if self.positions is Positions.RELATIVE or self.positions.is_rotary:
      yield checks.problem(f'{name}.positions', f'learned, learned2d, sincos2d or none with {name}.axial=True',
                           self.positions)
    if self.parallel:
      yield checks.problem(f'{name}.parallel', f'False with {name}.axial=True, as no such model is defined', True)

  def _kernel_problems(self, name: str) -> Iterator[str]:
    """Limits of attention kernels for one kind of device; see `models/kernels/attend_kernels.py` for the devices'."""
    own, width, advice = f'{name}.attention', self.width // self.heads, f'Set {name}.attention=xla.'
    is_strict = self.attention is not AttentionKernel.FUSED  # which leaves to XLA what it cannot do
    uses = {f'{name}.positions=relative': self.positions is Positions.RELATIVE and is_strict,
            f'{name}.attention_dropout={self.attention_dropout}': self.attention_dropout > 0 and is_strict,
            f'{name}.kernels=plain': self.kernels is Kernels.PLAIN}
    for setting in (setting for setting, is_on in uses.items() if is_on):
      yield checks.problem(own, f'xla with {setting}', self.attention, advice)
    if self.attention is not AttentionKernel.CUDNN:
      return
    if self.dtype is not DType.BF16:
      yield checks.problem(own, f'xla with {name}.dtype={self.dtype.value}', self.attention,
                           f'Set {name}.dtype=bfloat16 to use cuDNN.')
    if width % 8 or width > MOST_CUDNN_WIDTH:
      yield checks.problem(own, f'xla unless heads have 8, 16, … {MOST_CUDNN_WIDTH} channels ({name}.width='
                           f'{self.width} and {name}.heads={self.heads} give {width})', self.attention, advice)
