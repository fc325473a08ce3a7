"""The laws by which parameters start, one record for each authors' program.

A module looks up the law of a parameter where it creates it; nothing else depends on the name of the program. A law
that depends on the size of a layer sees the kernel as the matrix `[inputs, outputs]`. In every program norms start at 1
and 0; LayerScale starts at `model.block.layer_scale`. Networks that are not Vision Transformers have one program each,
and their laws stand in their own modules.

PyTorch's `trunc_normal_(std=0.02)` cuts at -2 and 2, which is 100 standard deviations away: it is a normal law.

Differs from the programs in PyTorch: the `trunc_normal_` of DINO and timm makes one float32 value in 2^24 equal to -2,
100 standard deviations away, so about five of the parameters of a ViT-B; here no value is cut.
"""
from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import jax
from jax.nn import initializers

from vit_jax.config import schema
from vit_jax.config.schema import Init
from vit_jax.core.types import Array, Key

Initializer = Callable[..., Array]
"""`(key, shape) -> f32 array`."""

zeros = initializers.zeros
normal = initializers.normal
lecun_normal = initializers.lecun_normal()  # variance 1 / inputs, cut at 2 standard deviations before scaling
xavier_uniform = initializers.xavier_uniform()  # variance 2 / (inputs + outputs)
fan_out_normal = initializers.variance_scaling(2., 'fan_out', 'normal')  # He et al., arXiv 1502.01852, section 2.2


def uniform(bound: float) -> Initializer:
  """Returns the law that is uniform in ±`bound`."""
  return lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def torch_kernel(key: Key, shape: tuple[int, ...]) -> Array:
  """Draws by PyTorch's default of Linear and Conv2d: uniform in ±1 / sqrt(inputs). The last axis is the outputs."""
  return uniform(prod(shape[:-1]) ** -.5)(key, shape)


def fused_xavier(num_parts: int) -> Initializer:
  """Returns Xavier's uniform law of a matrix `[inputs, num_parts * outputs]`, for one of its parts."""
  return lambda key, shape: uniform((6. / (shape[0] + num_parts * shape[1])) ** .5)(key, shape)


def width_normal(key: Key, shape: tuple[int, ...]) -> Array:
  """Draws normal values with variance 1 / D, where D is the last axis."""
  return normal(shape[-1] ** -.5)(key, shape)


def width_truncated(key: Key, shape: tuple[int, ...]) -> Array:
  """Draws normal values with variance 1 / D, cut at 2 standard deviations, which leaves 77 % of the variance."""
  return initializers.truncated_normal(shape[-1] ** -.5)(key, shape)


class Linear(NamedTuple):
  """The laws of a dense layer: of the kernel, and of the bias by the number of inputs."""
  kernel: Initializer
  bias: Callable[[int], Initializer] = lambda num_inputs: zeros


class OfAttention(NamedTuple):
  """The laws of the four matrices of attention."""
  query: Linear
  key: Linear
  value: Linear
  out: Linear


class Laws(NamedTuple):
  """The laws of one program, by the parameters that start by them."""
  patches: Linear            # the patch embedding
  stem: Initializer          # kernels of the convolutions before it (LV-ViT)
  cls: Initializer           # the class token
  dist: Initializer          # the distillation token
  registers: Initializer
  mask: Initializer          # the mask token
  positions: Initializer     # learned and relative positions
  has_first_positions: bool  # whether class and distillation token have positions too; else theirs start at 0
  attention: OfAttention     # attention of blocks and of MAE's decoder
  mlp: Linear                # MLPs of blocks, of MAE's decoder and of attention pooling
  gate: Linear               # the matrix of a SwiGLU that the SiLU is applied to
  pool: OfAttention          # the attention of attention pooling
  map_probe: Initializer     # the query of attention pooling
  decoder: Linear            # the first and last matrix of MAE's decoder
  projector: Linear          # the MLP of DINO's head
  pre_logits: Linear         # the hidden layer of a head
  head: Linear               # classification heads; `head.bias_init` is added to the bias
  probe: Linear              # the head of a linear probe


LECUN, XAVIER, ZEROS, NORMAL = Linear(lecun_normal), Linear(xavier_uniform), Linear(zeros), Linear(normal(.02))
TORCH = Linear(torch_kernel, lambda num_inputs: uniform(num_inputs ** -.5))  # the bias has the law of the kernel
XAVIER_MLP = Linear(xavier_uniform, lambda num_inputs: normal(1e-6))
FUSED = OfAttention(*(Linear(fused_xavier(3)),) * 3, XAVIER)  # query, key and value are one matrix [D, 3 D]

VISION_TRANSFORMER = Laws(  # google-research/vision_transformer@c6de1e5, vit_jax/models_vit.py
    patches=LECUN,  # line 269: Flax's default
    stem=fan_out_normal,  # has no such stem: He et al.
    cls=zeros,  # line 281
    dist=normal(.02),  # has none: DeiT's
    registers=normal(1e-6),  # has none: DINOv2's
    mask=normal(.02),  # has none: MAE's
    positions=normal(.02),  # line 192
    has_first_positions=True,  # the same table
    attention=OfAttention(*(XAVIER,) * 4),  # line 141
    mlp=XAVIER_MLP,  # lines 75 and 77
    gate=XAVIER_MLP,  # has none: as the other matrices
    pool=OfAttention(*(XAVIER,) * 4),  # has none: big_vision's
    map_probe=xavier_uniform,  # likewise
    decoder=XAVIER,  # has none: MAE's
    projector=NORMAL,  # has none: DINO's
    pre_logits=LECUN,  # line 297: Flax's default
    head=ZEROS,  # line 306
    probe=ZEROS)

BIG_VISION = VISION_TRANSFORMER._replace(  # google-research/big_vision@0127fb6, big_vision/models/vit.py
    positions=width_normal,  # line 49
    has_first_positions=False)  # line 219: the class token has no position

DINO = Laws(  # facebookresearch/dino@7c446df, vision_transformer.py
    patches=TORCH,  # line 126: PyTorch's default
    stem=torch_kernel,  # has none: PyTorch's default, as LV-ViT's
    cls=normal(.02),  # line 162
    dist=normal(.02),  # has none: DeiT's
    registers=normal(1e-6),  # has none: DINOv2's
    mask=normal(.02),  # has none: MAE's
    positions=normal(.02),  # line 161
    has_first_positions=True,  # the same table
    attention=OfAttention(*(NORMAL,) * 4),  # lines 165 to 169
    mlp=NORMAL,  # likewise
    gate=NORMAL,  # has none: as the other matrices
    pool=OfAttention(*(NORMAL,) * 4),  # has none: timm's
    map_probe=width_truncated,  # likewise
    decoder=NORMAL,  # has none: as the other matrices
    projector=NORMAL,  # lines 281 to 285
    pre_logits=NORMAL,  # has none: as the other matrices
    head=NORMAL,  # lines 165 to 169
    probe=Linear(normal(.01)))  # eval_linear.py, line 243

DEIT = DINO._replace(  # facebookresearch/deit@7e160fe, models.py, and timm 0.3.2, models/vision_transformer.py
    dist=normal(.02),  # models.py, line 28
    probe=NORMAL)  # has none: as other heads

DEIT3 = DEIT._replace(  # facebookresearch/deit@7e160fe, models_v2.py
    has_first_positions=False)  # line 198: the class token has no position

LVVIT = DEIT._replace(  # zihangJiang/TokenLabeling@9dbfd59, tlt/models/lvvit.py
    stem=torch_kernel)  # tlt/models/layers.py, PatchEmbed4_2: PyTorch's default

TIMM = DEIT._replace(  # timm 1.0.31, models/vision_transformer.py, weight_init=''
    cls=normal(1e-6),  # init_weights
    registers=normal(1e-6),  # likewise
    gate=Linear(normal(1e-6), lambda num_inputs: initializers.ones),  # layers/mlp.py, GluMlp and SwiGLU
    map_probe=width_truncated)  # layers/attention_pool.py

TIMM_JAX = VISION_TRANSFORMER._replace(  # timm 1.0.31, models/vision_transformer.py, weight_init='jax'
    cls=normal(1e-6),  # init_weights
    registers=normal(1e-6),  # likewise
    attention=FUSED,  # init_weights_vit_jax sees the matrix [D, 3 D]
    gate=Linear(normal(1e-6), lambda num_inputs: initializers.ones),  # layers/mlp.py
    pool=OfAttention(XAVIER, *(Linear(fused_xavier(2)),) * 2, XAVIER),  # layers/attention_pool.py has [D, 2 D]
    map_probe=width_truncated)  # likewise

DINOV2 = TIMM._replace(  # facebookresearch/dinov2@b8931f7, dinov2/models/vision_transformer.py
    cls=normal(1e-6),  # line 175
    registers=normal(1e-6),  # line 177
    mask=zeros,  # line 169
    gate=NORMAL,  # line 333: both halves of a SwiGLU's matrix
    probe=Linear(normal(.01)))  # dinov2/eval/linear.py

MAE = VISION_TRANSFORMER._replace(  # facebookresearch/mae@efb2a80, models_mae.py
    patches=Linear(xavier_uniform, TORCH.bias),  # line 76; PyTorch's default of the bias
    cls=normal(.02),  # line 79
    mask=normal(.02),  # line 80
    attention=FUSED,  # line 88
    mlp=XAVIER, gate=XAVIER,  # likewise, with biases of 0
    decoder=XAVIER,  # likewise
    head=Linear(normal(2e-5)),  # main_finetune.py, line 257
    probe=Linear(normal(.01)))  # main_linprobe.py, line 218

LAWS = {
    Init.VISION_TRANSFORMER: VISION_TRANSFORMER, Init.BIG_VISION: BIG_VISION, Init.MAE: MAE, Init.DINO: DINO,
    Init.DINOV2: DINOV2, Init.DEIT: DEIT, Init.DEIT3: DEIT3, Init.LVVIT: LVVIT, Init.TIMM: TIMM,
    Init.TIMM_JAX: TIMM_JAX, Init.MIMETIC: VISION_TRANSFORMER}


def laws(model: schema.Model) -> Laws:
  """Returns the laws of a network and of the heads on it; other networks than ViTs have heads of zeros."""
  return LAWS[model.init] if isinstance(model, schema.ViT) else VISION_TRANSFORMER
