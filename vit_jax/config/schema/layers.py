"""Settings that networks of several kinds share, and the checks that they share."""
import enum
from collections.abc import Iterator
from typing import Any

from vit_jax.config.schema import checks

__all__ = ('AttentionKernel', 'DType', 'Execution', 'Gelu', 'Init', 'Kernels', 'MlpKernel', 'Quantize', 'Remat')


Network = Any
"""The `ViT` that a part belongs to. Its module imports those of the parts, so they cannot name its type."""


class Part(checks.Settings):
  """Base of the parts of a ViT."""

  def network_problems(self, model: Network, name: str, own: str) -> Iterator[str]:
    """Yields a message for each setting of this part that does not fit the network.

    Args:
      model: the network.
      name: its dotted path, such as `model`.
      own: that of this part, such as `model.positions`.
    """
    del model, name, own
    yield from ()


class Gelu(enum.Enum):
  """Form of the GELU."""
  TANH = 'tanh'    # the JAX originals
  EXACT = 'exact'  # erf; timm, DeiT, MAE, Hugging Face
  QUICK = 'quick'  # x sigmoid(1.702 x); OpenAI's CLIP


class Init(enum.Enum):
  """The program whose initialization is used, also for heads and the MAE decoder (`models/initialization.py`).

  The JAX programs have Xavier initialization and class tokens of zero; those in PyTorch have N(0, 0.02).
  """
  VISION_TRANSFORMER = 'vision_transformer'  # google-research/vision_transformer
  BIG_VISION = 'big_vision'  # likewise, but positions of patches alone, N(0, 1 / sqrt(width))
  MAE = 'mae'          # facebookresearch/mae: Xavier initialization, of query, key and value as one matrix
  DINO = 'dino'        # facebookresearch/dino, and iBOT
  DINOV2 = 'dinov2'    # facebookresearch/dinov2: class token and registers N(0, 1e-6)
  DEIT = 'deit'        # facebookresearch/deit models.py, and timm 0.3.2
  DEIT3 = 'deit3'      # facebookresearch/deit models_v2.py: positions of patches alone
  LVVIT = 'lvvit'      # zihangJiang/TokenLabeling
  TIMM = 'timm'        # timm 1.0, weight_init=''
  TIMM_JAX = 'timm_jax'  # timm 1.0, weight_init='jax'
  MIMETIC = 'mimetic'  # vision_transformer, with attention near multiples of the identity (arXiv 2305.09828)


class DType(enum.Enum):
  """Compute dtype; parameters, LayerNorm statistics, softmax and loss stay f32."""
  F32 = 'float32'
  BF16 = 'bfloat16'


class Execution(enum.Enum):
  """How the stacked blocks are run; the parameters are the same."""
  SCAN = 'scan'          # compiles fastest
  UNROLLED = 'unrolled'  # runs fastest
  AUTO = 'auto'          # chosen from the hardware (parallel/layout.py); a network built without that is unrolled


class Remat(enum.Enum):
  """What the forward pass of a block saves for the backward pass; the rest is computed again."""
  NONE = 'none'    # save everything
  NAMES = 'names'  # save matmul results: query, key, value, attention output, residual, MLP pre-activation
  QKV = 'qkv'      # save query, key, value and MLP pre-activation
  MLP = 'mlp'      # save the MLP pre-activation only
  FULL = 'full'    # save nothing but the block's input
  AUTO = 'auto'    # chosen from the hardware (parallel/layout.py); a network built without that saves everything

  @property
  def saves_everything(self) -> bool:
    """Whether nothing is computed again."""
    return self in (Remat.NONE, Remat.AUTO)


class Kernels(enum.Enum):
  """Which form of attention, dense layers, norms, GELU and depthwise convolutions a network computes with."""
  FAST = 'fast'    # gradients written by hand: faster, with less memory; first-order reverse mode only
  PLAIN = 'plain'  # differentiated by JAX: jax.jvp, jax.linearize and Hessian-vector products work


class Quantize(enum.Enum):
  """Dtype of the products of blocks: query, key, value and output of attention, and those of the MLP.

  The gradient of kernels, norms, softmax and its products, stem, pooling, head and adapters stay in the compute dtype.
  """
  NONE = 'none'  # the compute dtype
  INT8 = 'int8'  # forward products and the gradient of their inputs (arXiv 2304.13013, SwitchBack)
  FP8 = 'fp8'    # the same in float8_e4m3fn


class AttentionKernel(enum.Enum):
  """What computes attention in training, evaluation and benchmarks, on the devices it is for; elsewhere XLA does."""
  XLA = 'xla'        # the form of `models/kernels/attend.py`: everywhere, and of any width and dtype
  CUDNN = 'cudnn'    # cuDNN's: NVIDIA GPUs from Ampere on, bf16, heads 8 to 128 wide in steps of 8 (to 256 from Hopper)
  FUSED = 'fused'    # `models/kernels/fused_attention.py`: TPUs from v4 on, heads of 64 to 128; else XLA's
  AUTO = 'auto'      # fused on TPUs from v4 on, cudnn on GPUs that have it for the network, else xla
                     # (parallel/layout.py); a network built without that uses xla

  @property
  def platform(self) -> str:
    """What jax calls the devices that it is for; '' = all."""
    return {AttentionKernel.XLA: '', AttentionKernel.AUTO: '', AttentionKernel.CUDNN: 'gpu'}.get(self, 'tpu')


class MlpKernel(enum.Enum):
  """What computes the MLP of blocks in training, evaluation and benchmarks."""
  XLA = 'xla'      # everywhere
  FUSED = 'fused'  # `models/kernels/fused_mlp.py`: TPU v5e and v6e; XLA's where it does not apply
  AUTO = 'auto'    # fused on TPU v6e, else xla (parallel/layout.py); a network built without that uses xla


BLOCK_REMATS = (Remat.NONE, Remat.NAMES, Remat.QKV, Remat.MLP, Remat.FULL)
EXECUTIONS = (Execution.SCAN, Execution.UNROLLED)
NORM_GROUPS = 32
"""Groups of GroupNorm: arXiv 1803.08494, section 4.1; BiT, vision_transformer."""


def untiled(image_px: tuple[int, int], patch: int, name: str = 'model') -> Iterator[str]:
  """Yields a problem if patches do not tile an image.

  `patch` in px is a setting of `name`; `image_px` is (height, width).
  """
  if any(side % patch for side in image_px):
    nearest = tuple(max(1, round(side / patch)) * patch for side in image_px)
    yield checks.problem('image_px', f'multiples of {name}.patch={patch} px, such as {nearest}', tuple(image_px))


def residual_units(width: int, *, eps: float, name: str) -> Iterator[str]:
  """Yields problems of units with GroupNorm and standardized kernels.

  `eps` is all that is added to a kernel's deviation.
  """
  yield from checks.multiple(f'{name}.width', width, NORM_GROUPS, f'the {NORM_GROUPS} groups of its norms')
  if eps <= 0:
    yield checks.problem(f'{name}.var_eps', 'a small positive number, here or in std_eps, by which a kernel of equal '
                         'weights can be divided', 0.)
