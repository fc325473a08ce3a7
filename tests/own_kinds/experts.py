"""An MLP of experts in a file of one's own: each expert takes the tokens of an image that suit it best.

Expert choice (arXiv 2202.09368), and V-MoE's loss that balances the experts (arXiv 2106.05974, eq. 8), times `balance`.
"""
from __future__ import annotations

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.types import Array
from vit_jax.models.layers import dropout, param
from vit_jax.models.vit.context import LOSSES, BlockInfo, Context

INIT = nn.initializers.variance_scaling(1., 'fan_in', 'truncated_normal', in_axis=-2, out_axis=-1)


@dataclasses.dataclass
class Experts(schema.MlpSettings):
  """`experts` MLPs, each of which takes `capacity / experts` of the tokens of an image."""
  implementation: ClassVar[str] = 'tests.own_kinds.experts:Module'
  layers: ClassVar[tuple[str, ...]] = ()
  hidden: int = schema.ranged(48, schema.Range(1, 100_000))
  bias: bool = False
  inner_norm: bool = False
  experts: int = schema.ranged(3, schema.Range(1, 1024))
  capacity: float = schema.ranged(1.5, schema.Range(above=True))
  balance: float = schema.ranged(0., schema.Range(0))


class Module(nn.Module, kw_only=True):
  hidden: int
  bias: bool
  inner_norm: bool
  experts: int
  capacity: float
  balance: float
  context: Context

  @nn.compact
  def __call__(self, x: Array, info: BlockInfo) -> Array:
    dtype, width, shape = self.context.dtype, x.shape[-1], x.shape
    router = param(self, 'router', INIT, (width, self.experts), ('embed', None), matrix=(1, 1))
    up = param(self, 'up', INIT, (self.experts, width, self.hidden), (None, 'embed', 'mlp'), matrix=(1, 1))
    down = param(self, 'down', INIT, (self.experts, self.hidden, width), (None, 'mlp', 'embed'), matrix=(1, 1))
    x_BMD = x.reshape(info.num_images, -1, width)
    scores_BME = jax.nn.softmax(jnp.einsum('bmd,de->bme', x_BMD.astype(jnp.float32), router), -1)
    is_token_BM = jnp.ones(x_BMD.shape[:2], bool) if info.is_token is None else info.is_token
    scores_BME = jnp.where(is_token_BM[..., None], scores_BME, 0.)
    num_B = is_token_BM.sum(1)
    if self.balance:
      importance_E = scores_BME.sum((0, 1))
      self.sow(LOSSES, 'balance', self.balance * jnp.square(importance_E.std() / importance_E.mean()))
    # Each expert takes its best tokens: so many for each image, by the number of tokens that are no padding.
    rank_BME = jnp.argsort(jnp.argsort(-scores_BME, axis=1), axis=1)
    most_B = jnp.maximum(1, (num_B * self.capacity / self.experts).astype(jnp.int32))
    gate_BME = jnp.where((rank_BME < most_B[:, None, None]) & is_token_BM[..., None], scores_BME, 0.).astype(dtype)
    hidden = jnp.einsum('bmd,edf->ebmf', x_BMD.astype(dtype), up.astype(dtype))
    hidden = dropout(self.context.forms.gelu(hidden, self.context.gelu), self.context.dropout, info.key)
    return jnp.einsum('ebmf,efd,bme->bmd', hidden, down.astype(dtype), gate_BME).reshape(shape)
