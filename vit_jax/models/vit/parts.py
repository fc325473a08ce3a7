"""The modules that a Vision Transformer is made of, by its settings."""
from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.models import initialization
from vit_jax.models.initialization import Laws
from vit_jax.models.kernels.forms import Forms, select
from vit_jax.models.layers import LayerNorm, RMSNorm, norm
from vit_jax.models.vit.block import AxialBlock, Block
from vit_jax.models.vit.pool import AttentionPool, Pooling
from vit_jax.models.vit.positions import PositionEmbedding
from vit_jax.models.vit.stem import Stem


@dataclasses.dataclass(frozen=True)
class Parts:
  """The modules of a model for images of a token grid `(h, w)`."""
  settings: schema.ViT
  grid: tuple[int, int]

  @property
  def dtype(self) -> DTypeLike:
    return jnp.dtype(self.settings.dtype.value)

  @property
  def forms(self) -> Forms:
    return select(self.settings.kernels)

  @property
  def laws(self) -> Laws:
    return initialization.laws(self.settings)

  @property
  def num_extra(self) -> int:
    """Tokens before the patch tokens."""
    return self.settings.registers + self.embedding.num_first

  @property
  def embedding(self) -> PositionEmbedding:
    return PositionEmbedding(self.settings, self.grid)

  @property
  def stem(self) -> Stem:
    s = self.settings
    return Stem(settings=s.stem, patch=s.patch, width=s.width, dtype=self.dtype, remat=s.remat, forms=self.forms,
                has_bias=s.stem_bias, laws=self.laws)

  @property
  def norm(self) -> LayerNorm | RMSNorm:
    return norm(self.settings.norm, self.settings.norm_eps, self.forms)

  @property
  def pooling(self) -> Pooling:
    s = self.settings
    network = AttentionPool(heads=s.pool_heads or s.heads, mlp=s.pool_mlp or s.mlp, gelu=s.gelu,
                            norm_eps=s.norm_eps, norm_kind=s.norm, laws=self.laws, forms=self.forms)
    return Pooling(s.pool, self.num_extra, network)

  @property
  def block(self) -> Block | AxialBlock:
    s, (h, w) = self.settings, self.grid

    def one() -> Block:
      return Block(
          heads=s.heads, mlp=s.mlp, gelu=s.gelu, norm_eps=s.norm_eps, dtype=self.dtype, dropout=s.dropout,
          attention_dropout=s.attention_dropout, qk_norm=s.qk_norm, qkv_bias=s.qkv_bias, key_bias=s.key_bias,
          out_bias=s.out_bias, mlp_bias=s.mlp_bias, norm_kind=s.norm, attn_norm=s.attn_norm, mlp_norm=s.mlp_norm,
          positions=s.positions, mixed_base=s.rotary_base if s.rotary_mixed else 0., num_patches=h * w,
          swiglu=s.swiglu, layer_scale=s.layer_scale, mlp_scale=s.mlp_scale,
          branch_scale=s.branch_scale, parallel=s.parallel, attention=s.attention,
          mlp_kernel=s.mlp_kernel, laws=self.laws, forms=self.forms)

    return AxialBlock(one(), one()) if s.axial else one()
