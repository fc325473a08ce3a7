"""What the model tests share: strict promotion around everything, and a tiny ViT."""
from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from vit_jax.config import schema


@pytest.fixture(autouse=True)
def strict_promotion() -> Iterator[None]:
  """Implicit changes of dtype or rank raise, in the models and in the tests of them."""
  with jax.numpy_dtype_promotion('strict'), jax.numpy_rank_promotion('raise'):
    yield


@pytest.fixture
def tiny() -> schema.ViT:
  """A ViT for 16 x 24 px: 2 x 3 patches of 8 px."""
  return schema.ViT(patch=8, width=32, depth=2, heads=4, mlp=schema.Mlp(48), execution=schema.Execution.SCAN)
