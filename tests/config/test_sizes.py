"""Tests of model sizes by name."""
from __future__ import annotations

import pytest

from vit_jax.config import schema, sizes
from vit_jax.core.types import UserError


def test_a_name_gives_the_published_sizes() -> None:
  model = sizes.vit('B/16')
  assert (model.width, model.depth, model.heads, model.mlp, model.patch) == (768, 12, 12, 3072, 16)
  assert sizes.vit('ViT-B/16') == sizes.vit('B_16') == model


def test_any_patch_side_is_taken() -> None:
  assert sizes.vit('So400m/14').patch == 14


def test_a_name_decides_sizes_and_nothing_else() -> None:
  model, plain = sizes.vit('H/14'), schema.ViT()
  assert (model.pool, model.positions, model.dropout, model.gelu) == (
      plain.pool, plain.positions, plain.dropout, plain.gelu)


@pytest.mark.parametrize('name', sorted(sizes.VIT))
def test_heads_divide_the_width_and_sincos_positions_fit(name: str) -> None:
  size = sizes.VIT[name]
  assert size.width % size.heads == 0 and size.width % 4 == 0


@pytest.mark.parametrize('name', ['X/16', 'B', 'B/0', 'b16', ''])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
  with pytest.raises(UserError) as error:
    sizes.vit(name)
  assert repr(name) in str(error.value) and 'Ti S M B L So400m H g G' in str(error.value)
