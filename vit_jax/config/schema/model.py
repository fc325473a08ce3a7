"""Settings of networks and their heads."""
import dataclasses
import enum


class Pool(enum.Enum):
  """How tokens become one feature vector."""
  CLS = 'cls'    # the class token (ViT paper, eq. 4)
  MEAN = 'mean'  # mean over patch tokens (ViT paper, Appendix D.3), without class token
  MAP = 'map'    # a learned query attends to the patch tokens (Scaling ViT, SigLIP), without class token


class Positions(enum.Enum):
  """Position embedding. All but `sincos2d` are compared in the ViT paper's Appendix D.4."""
  LEARNED = 'learned'      # one vector a token (ViT paper, eq. 1)
  SINCOS2D = 'sincos2d'    # fixed 2-D sine-cosine, temperature 10,000 (MoCo v3; Better plain ViT baselines)
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


class DType(enum.Enum):
  """Compute dtype; parameters, LayerNorm statistics, softmax and loss stay f32."""
  F32 = 'float32'
  BF16 = 'bfloat16'


class Execution(enum.Enum):
  """How the stacked blocks are run; the parameters are the same."""
  SCAN = 'scan'          # compiles fastest
  UNROLLED = 'unrolled'  # runs fastest


class Remat(enum.Enum):
  """What the forward pass of a block saves for the backward pass; the rest is computed again."""
  NONE = 'none'    # save everything
  NAMES = 'names'  # save matmul results: query, key, value, attention output, residual, MLP pre-activation
  MLP = 'mlp'      # save the MLP pre-activation only
  FULL = 'full'    # save nothing but the block's input


@dataclasses.dataclass
class ViT:
  """Vision Transformer (arXiv 2010.11929, eqs. 1-4). Sizes by name: `sizes.vit('B/16')`."""
  patch: int = 16                     # px
  width: int = 768
  depth: int = 12
  heads: int = 12
  mlp: int = 3072                     # hidden width of the MLP
  pool: Pool = Pool.CLS
  positions: Positions = Positions.LEARNED
  dropout: float = 0.                 # after positions, attention output, MLP activation and output
  drop_path: float = 0.               # stochastic depth of the last block; grows linearly from 0
  gelu: Gelu = Gelu.TANH
  norm_eps: float = 1e-6
  dtype: DType = DType.F32
  execution: Execution = Execution.UNROLLED
  remat: Remat = Remat.NONE
  positions_at: PositionsAt = PositionsAt.STEM
  registers: int = 0                  # learned tokens after the class token, no position (DINOv2-reg: 4)
  layer_scale: float = 0.             # initial factor of each branch; 0 = no factor (DINOv2 1e-5, DeiT-III 1e-4)
  qk_norm: bool = False               # LayerNorm of query and key in each head (ViT-22B)
  attention_dropout: float = 0.       # of attention weights; a setting of vision_transformer, 0 in its models
  swiglu: bool = False                # MLP with a gate; `mlp` is the width of the gate (DINOv2 g)
  parallel: bool = False              # attention and MLP side by side after one norm (ViT-22B)
  axial: bool = False                 # a block in rows, then one in columns (ViT paper, Appendix D.6: Axial-ViT)


@dataclasses.dataclass
class Head:
  """Classification head."""
  pre_logits: int = 0                 # width of a tanh layer before the logits; 0 = linear head
  bias_init: float = 0.               # e.g. -10 for sigmoid losses with many classes
