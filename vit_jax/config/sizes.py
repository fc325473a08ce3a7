"""Model sizes by their published names.

Sources: ViT paper, Table 1 (B, L, H); DeiT and AugReg (Ti, S); Scaling ViT, Table 2 (g, G);
SoViT (So400m); big_vision (M). Only this table knows the numbers.
"""
from __future__ import annotations

import dataclasses
import re

from vit_jax.config import schema
from vit_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class _Size:
  width: int
  depth: int
  heads: int
  mlp: int


VIT = {
    'Ti': _Size(192, 12, 3, 768),
    'S': _Size(384, 12, 6, 1536),
    'M': _Size(512, 12, 8, 2048),
    'B': _Size(768, 12, 12, 3072),
    'L': _Size(1024, 24, 16, 4096),
    'So400m': _Size(1152, 27, 16, 4304),
    'H': _Size(1280, 32, 16, 5120),
    'g': _Size(1408, 40, 16, 6144),
    'G': _Size(1664, 48, 16, 8192),
}


def vit(name: str) -> schema.ViT:
  """Settings of a ViT by name: `B/16`, `ViT-B/16`; any patch side in pixels.

  Raises:
    UserError: lists the known sizes.
  """
  found = re.fullmatch(r'(?:ViT-)?([A-Za-z0-9]+)[/_](\d+)', name)
  if not found or found[1] not in VIT or int(found[2]) < 1:
    raise UserError(
        f'Unknown model size {name!r}: want SIZE/PATCH such as B/16, with SIZE one of {" ".join(VIT)} '
        'and PATCH in pixels.')
  size = VIT[found[1]]
  return schema.ViT(patch=int(found[2]), width=size.width, depth=size.depth, heads=size.heads, mlp=size.mlp)
