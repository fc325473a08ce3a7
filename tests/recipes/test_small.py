"""The small networks that studies compare have about the same cost."""
from __future__ import annotations

import pytest

from vit_jax.config import model_options, schema
from vit_jax.models import cost
from vit_jax.recipes import small


@pytest.mark.parametrize('name', small.NETWORKS)
def test_the_three_families_cost_the_same_within_5_per_cent(name: str) -> None:
  model, px = small.NETWORKS[name](), (small.PX, small.PX)
  flops = sum(cost.forward_flops(model, px, head=schema.Head(), num_classes=10).values())
  assert flops == pytest.approx(21.4e6, rel=.05) and not [*model_options.faults(model, px)]
