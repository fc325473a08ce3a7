"""Settings of networks and their heads."""
import dataclasses
import enum
from dataclasses import field

from vit_jax.config.schema.ranges import ANY, BELOW_1, COUNT, COUNT_OR_0, NOT_NEGATIVE, POSITIVE, PX, Range, ranged


class Pool(enum.Enum):
  """How tokens become one feature vector."""
  CLS = 'cls'    # the class token (ViT paper, eq. 4)
  MEAN = 'mean'  # mean over patch tokens (ViT paper, Appendix D.3), without class token
  PATCHES = 'patches'  # mean over patch tokens, beside a class token that is not read (MAE's fine-tuning, timm's avg)
  FIRST = 'first'  # the first patch token, without class token (big_vision's pool type 0)
  MAP = 'map'    # a learned query attends to the patch tokens (Scaling ViT, SigLIP), without class token

  @property
  def has_class_token(self) -> bool:
    """Whether there is a class token before the patch tokens."""
    return self in (Pool.CLS, Pool.PATCHES)


class Positions(enum.Enum):
  """Position embedding. All but the fixed ones are compared in the ViT paper's Appendix D.4."""
  LEARNED = 'learned'      # one vector a token (ViT paper, eq. 1)
  SINCOS2D = 'sincos2d'    # fixed 2-D sine-cosine, temperature 10,000 (Better plain ViT baselines)
  SINCOS2D_MAE = 'sincos2d_mae'  # likewise, with the frequencies of MAE and MoCo v3
  NONE = 'none'            # a bag of patches
  LEARNED2D = 'learned2d'  # half a vector a column, half a vector a row, concatenated
  RELATIVE = 'relative'    # learned keys for 1-D offsets add to the attention logits of every block


class PositionsAt(enum.Enum):
  """Where learned positions are added (ViT paper, Appendix D.4)."""
  STEM = 'stem'      # once, after the stem
  LAYERS = 'layers'  # before every block, each with its own
  SHARED = 'shared'  # before every block, the same


class Gelu(enum.Enum):
  """Form of the GELU."""
  TANH = 'tanh'    # the JAX originals
  EXACT = 'exact'  # erf; timm, DeiT, MAE, Hugging Face


class PositionResize(enum.Enum):
  """How learned positions are resized to another token grid. The programs that weights come from differ in it."""
  ALIGNED = 'aligned'            # bilinear, corners aligned, no antialiasing: vision_transformer, big_vision
  BICUBIC = 'bicubic'            # a = -3/4, borders aligned, no antialiasing: DeiT, MAE, transformers
  BICUBIC_OFFSET = 'bicubic_offset'        # likewise, with scale (n + 0.1) / M for M -> n tokens: DINO, DINOv2
  BICUBIC_ANTIALIAS = 'bicubic_antialias'  # a = -1/2, borders aligned, antialiased: timm, DINOv2 with registers


class DType(enum.Enum):
  """Compute dtype; parameters, LayerNorm statistics, softmax and loss stay f32."""
  F32 = 'float32'
  BF16 = 'bfloat16'


class Execution(enum.Enum):
  """How the stacked blocks are run; the parameters are the same."""
  SCAN = 'scan'          # compiles fastest
  UNROLLED = 'unrolled'  # runs fastest
  AUTO = 'auto'          # chosen from the hardware (config/layout.py); a network built without that is unrolled


class Remat(enum.Enum):
  """What the forward pass of a block saves for the backward pass; the rest is computed again."""
  NONE = 'none'    # save everything
  NAMES = 'names'  # save matmul results: query, key, value, attention output, residual, MLP pre-activation
  QKV = 'qkv'      # save query, key, value and MLP pre-activation
  MLP = 'mlp'      # save the MLP pre-activation only
  FULL = 'full'    # save nothing but the block's input
  AUTO = 'auto'    # chosen from the hardware (config/layout.py); a network built without that saves everything

  @property
  def saves_everything(self) -> bool:
    """Whether nothing is computed again."""
    return self in (Remat.NONE, Remat.AUTO)


class AttentionKernel(enum.Enum):
  """What computes attention in training, evaluation and benchmarks, on the devices it is for; elsewhere XLA does."""
  XLA = 'xla'        # the form of `models/kernels/attend.py`: everywhere, and of any width and dtype
  CUDNN = 'cudnn'    # cuDNN's: NVIDIA GPUs from Ampere on, bf16, heads 8 to 128 wide in steps of 8 (to 256 from Hopper)
  SPLASH = 'splash'  # jax's own in Pallas: TPUs; bf16 from v4 on

  @property
  def platform(self) -> str:
    """What jax calls the devices that it is for; '' = all."""
    return {AttentionKernel.XLA: '', AttentionKernel.CUDNN: 'gpu', AttentionKernel.SPLASH: 'tpu'}[self]


@dataclasses.dataclass
class PatchStem:
  """Patches are cut from the image itself (ViT paper, eq. 1)."""


@dataclasses.dataclass
class ResNetStem:
  """Patches are cut from the feature map of a ResNet (ViT paper, section 3.1, hybrids), as vision_transformer has it.

  The root makes a map of a fourth of the image's side, each stage after the first halves it.
  """
  layers: tuple[int, ...] = ranged((3, 4, 9), Range(1, 1000))  # bottleneck units a stage; none = the root alone
  width: int = ranged(64, COUNT)                               # channels of the root
  std_eps: float = ranged(1e-5, NOT_NEGATIVE)                  # added to the standard deviation of a kernel (timm: 0)
  var_eps: float = ranged(0., NOT_NEGATIVE)                    # added to its variance, under the root (timm: 1e-8)


@dataclasses.dataclass
class ConvStem:
  """Patches are cut from a map of half of the image's side: three convolutions with BatchNorm and ReLU (LV-ViT)."""
  width: int = ranged(64, COUNT)              # channels of the map
  norm_momentum: float = ranged(.9, BELOW_1)  # of BatchNorm's running statistics: what stays at each step


@dataclasses.dataclass
class ViT:
  """Vision Transformer (arXiv 2010.11929, eqs. 1-4). Sizes by name: `sizes.vit('B/16')`."""
  patch: int = ranged(16, PX)              # px of the image a token, also where a stem makes the map smaller first
  width: int = ranged(768, COUNT)
  depth: int = ranged(12, Range(1, 10_000))
  heads: int = ranged(12, COUNT)
  mlp: int = ranged(3072, COUNT)           # hidden width of the MLP
  pool: Pool = Pool.CLS
  positions: Positions = Positions.LEARNED
  dropout: float = ranged(0., BELOW_1)     # after positions, attention output, MLP activation and output
  drop_path: float = ranged(0., BELOW_1)   # stochastic depth of the last block; grows linearly from 0
  gelu: Gelu = Gelu.TANH
  norm_eps: float = ranged(1e-6, POSITIVE)
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
  stem: PatchStem | ResNetStem | ConvStem = field(default_factory=PatchStem)
  qkv_bias: bool = True                       # query, key and value have a bias
  branch_scale: float = ranged(1., POSITIVE)  # each branch is multiplied with it before it is added (LV-ViT 1/2, 1/3)
  norm_after_pool: bool = False       # the last norm is of the pooled mean (timm's fc_norm), not of each token
  attention: AttentionKernel = AttentionKernel.XLA
  position_resize: PositionResize = PositionResize.ALIGNED  # of learned positions, for images of other sizes


@dataclasses.dataclass
class ResNet:
  """BiT: ResNet-v2 with GroupNorm and weight standardisation (arXiv 1912.11370). By name: `sizes.resnet('R50x1')`."""
  layers: tuple[int, ...] = ranged((3, 4, 6, 3), Range(1, 1000))  # bottleneck units a stage
  width: int = ranged(64, COUNT)                # channels of the root; stage i from 0 gives width * 4 * 2^i
  var_eps: float = ranged(1e-10, NOT_NEGATIVE)  # added to the variance of a kernel, under the root (timm: 1e-8)
  dtype: DType = DType.F32
  remat: Remat = Remat.AUTO                     # of each unit: none or full


@dataclasses.dataclass
class Mixer:
  """MLP-Mixer (arXiv 2105.01601). By name: `sizes.mixer('B/16')`."""
  patch: int = ranged(16, PX)              # px
  width: int = ranged(768, COUNT)
  depth: int = ranged(12, Range(1, 10_000))
  tokens_mlp: int = ranged(384, COUNT)     # hidden width of the MLP over tokens
  channels_mlp: int = ranged(3072, COUNT)  # hidden width of the MLP over channels
  dropout: float = ranged(0., BELOW_1)     # after MLP activation and output
  drop_path: float = ranged(0., BELOW_1)   # stochastic depth of the last block; grows linearly from 0
  gelu: Gelu = Gelu.TANH
  norm_eps: float = ranged(1e-6, POSITIVE)
  dtype: DType = DType.F32
  execution: Execution = Execution.AUTO
  remat: Remat = Remat.AUTO


@dataclasses.dataclass
class EfficientNet:
  """EfficientNet (arXiv 1905.11946) as its authors' weights have it. By name: `sizes.efficientnet('B0')`."""
  width_factor: float = ranged(1., Range(0, 100, above=True))  # of channels, which are rounded to multiples of 8
  depth_factor: float = ranged(1., Range(0, 100, above=True))  # of repeated blocks, rounded up
  dropout: float = ranged(.2, BELOW_1)  # of the pooled features
  drop_path: float = ranged(.2, BELOW_1)  # stochastic depth of the last block; grows linearly from 0
  norm_momentum: float = ranged(.99, BELOW_1)  # of BatchNorm's running statistics: what stays at each step
  norm_eps: float = ranged(1e-3, POSITIVE)
  dtype: DType = DType.F32
  remat: Remat = Remat.AUTO  # of each block: none or full


Model = ViT | ResNet | Mixer | EfficientNet


@dataclasses.dataclass
class FeatureLayers:
  """Where in a network features are read; by default what its head sees."""
  # After these blocks, normalised and pooled as after the last, in a row; from 1, or from the end: -4,-3,-2,-1 (DINO).
  blocks: tuple[int, ...] = ranged((), Range(-10_000, 10_000))
  patches: bool = False  # and the mean patch token of the last of them (DINO's ViT-B)


@dataclasses.dataclass
class Head:
  """Classification head."""
  pre_logits: int = ranged(0, COUNT_OR_0)  # width of a tanh layer before the logits; 0 = linear head
  bias_init: float = ranged(0., ANY)       # e.g. -10 for sigmoid losses with many classes
  probe: bool = False                      # a linear probe: the backbone only evaluates, and no gradient reaches it
  features: FeatureLayers = field(default_factory=FeatureLayers)    # of a probe: what it sees
  batch_norm: bool = False                 # of a probe: of what it sees, without scale and bias (MAE)
