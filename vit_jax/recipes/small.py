"""Small networks for 32 px, of about the same cost: what a study on a few processor cores compares.

A forward pass of each is 21 to 22 MFLOP of products at `factor` 2 (a test holds them to 5 %).
"""
from __future__ import annotations

from collections.abc import Callable

from vit_jax.config import schema as s

PX = 32


def vit(factor: int = 2) -> s.ViT:
  """A ViT on patches of 4 px, of width `32 factor`."""
  return s.ViT(patch=4, width=32 * factor, depth=4, heads=2 * factor, mlp=64 * factor, pool=s.Pool.MEAN)


def hybrid(factor: int = 2) -> s.ViT:
  """A ViT on the map of one unit of a ResNet, a fourth of the picture's side."""
  return s.ViT(patch=4, width=32 * factor, depth=3, heads=2 * factor, mlp=64 * factor, pool=s.Pool.MEAN,
               stem=s.ResNetStem((1,), width=32))


def resnet() -> s.ResNet:
  """A BiT of three stages. Its norms want multiples of 32 channels, so it comes in one width."""
  return s.ResNet(layers=(2, 3, 2), width=32)


NETWORKS: dict[str, Callable[[], s.Model]] = {'ViT': vit, 'hybrid': hybrid, 'BiT': resnet}
"""The three by the names of their families."""
