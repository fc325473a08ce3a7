"""The shapes of a network, which `loading.load` finds by tracing it, are kept from test to test."""
from __future__ import annotations

import pytest

from tests.weights import made
from vit_jax.weights import loading


@pytest.fixture(autouse=True)
def kept_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(loading, 'expected', made.expected)
