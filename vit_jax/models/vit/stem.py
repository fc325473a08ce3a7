"""From an image to patch tokens: patches of the image itself (ViT paper, eq. 1), or of a network's feature map.

Contract of a kind of stem: `(…fields of its settings…, model=…, context=…)` with the methods `init` and `apply` of
`Patches`; a subclass of `Patches` overrides `network`, and `stride` if its map is smaller than the image.

Parameters, under `stem/` of a ViT: `kernel [p, p, C, D]` and, with `bias`, `bias [D]` of the patches, with p the
patch on a map of C channels (the image: P and 3), and those of the network before it:

  that of a hybrid (`ResNetStem`): see `resnet.py`
  that of LV-ViT (`ConvStem`), C its channels:
    conv1/kernel [7, 7, 3, C], {conv2,conv3}/kernel [3, 3, C, C], {norm1,norm2,norm3}/{scale,bias} [C]
    and as running statistics {norm1,norm2,norm3}/{mean,var} [C]
"""
from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn import relu

from vit_jax.config import schema
from vit_jax.config.schema import Remat
from vit_jax.core.numerics import constrain_batch, split_key
from vit_jax.core.types import Array, Key, Params, PyTree
from vit_jax.models.convolution import STATE, BatchNorm, Conv, Running
from vit_jax.models.layers import Dense, applied, initial
from vit_jax.models.vit.context import Context

PATCHES = ('kernel', 'bias')  # parameters of the patches; others are those of the network before them
CONV_NORM_EPS, CONV_NORM_MOMENTUM = 1e-5, .9  # LV-ViT; the momentum is what stays of running statistics


class Convolutions(nn.Module, kw_only=True):
  """`relu(norm(conv(x)))` three times: 7 x 7 at stride 2, then twice 3 x 3 (LV-ViT, arXiv 2104.10858, section 4.1)."""
  width: int
  context: Context
  train: bool

  @nn.compact
  def __call__(self, image: Array) -> Array:
    """`[B, H, W, 3]` to `[B, H / 2, W / 2, C]` in the compute dtype."""
    x, context, running = image, self.context, Running(CONV_NORM_MOMENTUM, CONV_NORM_EPS, self.train)
    for i, (side, stride) in enumerate([(7, 2), (3, 1), (3, 1)], 1):
      x = Conv(features=self.width, side=side, dtype=context.dtype, stride=stride, is_same=False,
               kernel_init=context.laws.stem, forms=context.forms, name=f'conv{i}')(x)
      x = relu(BatchNorm(running, name=f'norm{i}')(x)).astype(context.dtype)
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patches:
  """The stem of a ViT with patches of the image itself, and the base of other kinds of stems.

  model: settings of the network.
  context: settings that the whole network shares.
  bias: whether the patch embedding has a bias.
  norm: whether `ViT.stem` normalizes the tokens.
  """
  model: schema.ViT | schema.Mixer
  context: Context
  bias: bool = True
  norm: bool = False

  def init(self, key: Key, channels: int) -> tuple[Params, PyTree]:
    """Returns parameters for images of so many channels, whatever their size, and running statistics or `{}`."""
    image = jnp.zeros((1, self.model.patch, self.model.patch, channels))
    network = self.network(train=False)
    if network is None:
      return initial(self._patches, key, image[None]), {}
    keys = split_key(key, 'patches', 'network')
    variables = network.init(keys['network'], image)
    image, state = network.apply(variables, image, mutable=[STATE])
    patches = initial(self._patches, keys['patches'], image[None])
    return {**variables['params'], **patches}, state.get(STATE, {})

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool) -> tuple[Array, PyTree]:
    """Maps `[B, H, W, 3]` to patch tokens `[B, N, D]` in the compute dtype, and the new running statistics.

    A matrix product over patches; equal to a VALID convolution with kernel and stride p. The barrier keeps a TPU's
    compiler from changing the layout of the patches for each product.
    """
    network, num_images = self.network(train=train), image.shape[0]
    if network is not None:
      of_network = {name: leaf for name, leaf in params.items() if name not in PATCHES}
      image, changed = network.apply({'params': of_network, STATE: state}, image, mutable=[STATE])
      image, state = constrain_batch(image), changed.get(STATE, {})
    p = self.model.patch // self.stride
    h, w, channels = image.shape[1] // p, image.shape[2] // p, image.shape[3]
    patches = image.astype(self.context.dtype).reshape(num_images, h, p, w, p, channels).transpose(0, 1, 3, 2, 4, 5)
    rows = jax.lax.optimization_barrier(patches.reshape(num_images, h * w, p * p * channels))
    return self.embedded(params, rows), state

  def embedded(self, params: Params, patches: Array) -> Array:
    """Maps patches `[B, N, p * p * C]` in the compute dtype to tokens `[B, N, D]`."""
    own = {'kernel': params['kernel'].reshape(patches.shape[-1], self.model.width)}
    if self.bias:
      own['bias'] = params['bias']
    return constrain_batch(applied(self._patches, own, patches))

  @property
  def stride(self) -> int:
    """Pixels of the image for each pixel of the map that is cut into patches."""
    return self.model.stem.stride if isinstance(self.model, schema.ViT) else 1

  def network(self, *, train: bool) -> nn.Module | None:
    """Returns the network before the patches, from `[B, H, W, 3]` to a map; None if there is none."""
    del train
    return None

  @property
  def _patches(self) -> Dense:
    return Dense(features=(self.model.width,), axes=('patch', 'patch', 'in', 'embed'), dtype=self.context.dtype,
                 law=self.context.laws.patches, has_bias=self.bias, num_batch_dims=2, forms=self.context.forms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNet(Patches):
  """Patches of the map of a ResNet, whose units are computed again in the backward pass where blocks are."""
  layers: tuple[int, ...]
  width: int
  std_eps: float
  var_eps: float
  norm_eps: float

  def network(self, *, train: bool) -> nn.Module:
    del train
    assert isinstance(self.model, schema.ViT) and isinstance(self.model.stem, schema.ResNetStem)
    from vit_jax.models.rivals import resnet  # only here: most networks have no stem of convolutions
    remat = Remat.NONE if self.model.remat.saves_everything else Remat.FULL
    return resnet.stem(self.model.stem, dtype=self.context.dtype, remat=remat, forms=self.context.forms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionPatches(Patches):
  """Patches of the map of three convolutions."""
  width: int

  def network(self, *, train: bool) -> nn.Module:
    return Convolutions(width=self.width, context=self.context, train=train)
