"""The cost of a text tower, by arithmetic."""
from __future__ import annotations

from vit_jax.models.text.tower import TextTower


def parameters(tower: TextTower) -> dict[str, int]:
  """Returns the number of parameters by part."""
  width, hidden = tower.width, tower.mlp
  block = 4 * width * (width + 1) + (2 * width + 1) * hidden + width + 4 * width
  return {'tokens': tower.vocabulary * width, 'positions': 0 if tower.is_sinusoidal else tower.length * width,
          'blocks': tower.depth * block, 'norm': 2 * width,
          'projection': (width + tower.projection_bias) * tower.out_width}


def forward_flops(tower: TextTower) -> int:
  """Returns the FLOPs of the forward pass of one text, two per multiply-add, of matrix products only."""
  width, tokens = tower.width, tower.length
  block = tokens * (4 * width ** 2 + 2 * width * tower.mlp) + 2 * tokens ** 2 * width
  return 2 * (tower.depth * block + width * tower.out_width)
