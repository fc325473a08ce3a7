"""The families that people start from now."""
from __future__ import annotations

import re

from vit_jax.recipes import catalog, families


def test_every_named_network_is_of_a_family_with_a_title() -> None:
  for name in families.PUBLISHED:
    found = [(title, source) for pattern, title, source in families.NETWORKS if re.match(pattern, name)]
    assert (catalog.model(name).family, catalog.model(name).source) == found[0], name
