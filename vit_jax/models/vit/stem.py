"""From an image to patch tokens: patches of the image itself (ViT paper, eq. 1), or of a network's feature map.

Parameters, under `stem/` of a ViT: `kernel [p, p, C, D]` and, with `stem_bias`, `bias [D]` of the patches, with p the
patch on a map of C channels (the image: P and 3), and those of the network before it:

  that of a hybrid (`ResNetStem`): see `resnet.py`
  that of LV-ViT (`ConvStem`), C its channels:
    conv1/kernel [7, 7, 3, C], {conv2,conv3}/kernel [3, 3, C, C], {norm1,norm2,norm3}/{scale,bias} [C]
    and as running statistics {norm1,norm2,norm3}/{mean,var} [C]
"""
from __future__ import annotations

import dataclasses
from typing import assert_never

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn import relu
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.schema import Remat
from vit_jax.core.numerics import constrain_batch, split_key
from vit_jax.core.types import Array, Key, Params, PyTree
from vit_jax.models import resnet
from vit_jax.models.convolution import STATE, BatchNorm, Conv, Running
from vit_jax.models.initialization import VISION_TRANSFORMER, Initializer, Laws
from vit_jax.models.kernels.forms import Forms
from vit_jax.models.layers import Dense, applied, initial

PATCHES = ('kernel', 'bias')
CONV_NORM_EPS = 1e-5  # LV-ViT


class Convolutions(nn.Module, kw_only=True):
  """`relu(norm(conv(x)))` three times: 7 x 7 at stride 2, then twice 3 x 3 (LV-ViT, arXiv 2104.10858, section 4.1)."""
  width: int
  dtype: DTypeLike
  running: Running
  law: Initializer
  forms: Forms

  @nn.compact
  def __call__(self, image: Array) -> Array:
    """`[B, H, W, 3]` to `[B, H / 2, W / 2, C]` in the compute dtype."""
    x = image
    for i, (side, stride) in enumerate([(7, 2), (3, 1), (3, 1)], 1):
      x = Conv(features=self.width, side=side, dtype=self.dtype, stride=stride, is_same=False,
               kernel_init=self.law, forms=self.forms, name=f'conv{i}')(x)
      x = relu(BatchNorm(self.running, name=f'norm{i}')(x)).astype(self.dtype)
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stem:
  """The stem of a ViT. Where the blocks are computed again in the backward pass, so are the units of a ResNet."""
  settings: schema.PatchStem | schema.ResNetStem | schema.ConvStem
  patch: int
  width: int
  dtype: DTypeLike
  remat: Remat
  forms: Forms
  has_bias: bool = True
  laws: Laws = VISION_TRANSFORMER

  def init(self, key: Key) -> tuple[Params, PyTree]:
    """Parameters, and running statistics or `{}`; the size of the image does not matter."""
    image, network = jnp.zeros((1, self.patch, self.patch, 3)), self._network(train=False)
    if network is None:
      return initial(self._patches, key, image[None]), {}
    keys = split_key(key, 'patches', 'network')
    variables = network.init(keys['network'], image)
    image, state = network.apply(variables, image, mutable=[STATE])
    of_patches = initial(self._patches, keys['patches'], image[None])
    return {**variables['params'], **of_patches}, state.get(STATE, {})

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool) -> tuple[Array, PyTree]:
    """`[B, H, W, 3]` to patch tokens `[B, N, D]` in the compute dtype, and the new running statistics.

    A matrix product over patches; equal to a VALID convolution with kernel and stride p. The barrier keeps a TPU's
    compiler from changing the layout of the patches for each product.
    """
    network, num_images = self._network(train=train), image.shape[0]
    if network is not None:
      before = {name: leaf for name, leaf in params.items() if name not in PATCHES}
      image, changed = network.apply({'params': before, STATE: state}, image, mutable=[STATE])
      image, state = constrain_batch(image), changed.get(STATE, {})
    p = self.patch // self.settings.stride
    h, w, channels = image.shape[1] // p, image.shape[2] // p, image.shape[3]
    patches = image.astype(self.dtype).reshape(num_images, h, p, w, p, channels).transpose(0, 1, 3, 2, 4, 5)
    rows = jax.lax.optimization_barrier(patches.reshape(num_images, h * w, p * p * channels))
    own = {'kernel': params['kernel'].reshape(rows.shape[-1], self.width),
           **({'bias': params['bias']} if self.has_bias else {})}
    tokens_BND = applied(self._patches, own, rows)
    return constrain_batch(tokens_BND), state

  @property
  def _patches(self) -> Dense:
    return Dense(features=(self.width,), axes=('patch', 'patch', 'in', 'embed'), dtype=self.dtype,
                 law=self.laws.patches, has_bias=self.has_bias, num_batch_dims=2, forms=self.forms)

  def _network(self, *, train: bool) -> nn.Module | None:
    match self.settings:
      case schema.PatchStem():
        return None
      case schema.ResNetStem():
        remat = Remat.NONE if self.remat.saves_everything else Remat.FULL
        return resnet.stem(self.settings, dtype=self.dtype, remat=remat, forms=self.forms)
      case schema.ConvStem() as stem:
        running = Running(stem.norm_momentum, CONV_NORM_EPS, train)
        return Convolutions(width=stem.width, dtype=self.dtype, running=running, law=self.laws.stem, forms=self.forms)
      case _:
        assert_never(self.settings)
