"""The layout of every parameter on devices is that which the file of layouts records."""
from __future__ import annotations

import json

import layouts
import pytest

from vit_jax.recipes import sizes

GOLDEN = json.loads(layouts.FILE.read_text())


@pytest.mark.parametrize('case', layouts.CASES)
def test_every_parameter_lies_where_it_did(case: str) -> None:
  assert layouts.layout(case) == GOLDEN[case]


@pytest.mark.slow(reason='1 min: traces 142 networks')
def test_the_parameters_of_all_published_networks_lie_where_they_did() -> None:
  assert layouts.digest(sizes.names()) == GOLDEN['sizes']
