"""Memory in use."""
from __future__ import annotations

import jax
import pytest

from vit_jax.record import memory


class Device:
  def __init__(self, stats: dict[str, int] | None) -> None:
    self._stats = stats

  def memory_stats(self) -> dict[str, int] | None:
    return self._stats


def test_an_accelerator_counts_its_own_memory_and_else_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(jax, 'local_devices', lambda: [Device({'bytes_in_use': 3 * 2**29})])
  assert memory.used_gib() == 1.5
  monkeypatch.setattr(jax, 'local_devices', lambda: [Device(None)])
  assert .05 < (memory.used_gib() or 0.) < 64.  # this process has jax in it
  monkeypatch.setattr(memory, '_STATM', memory.pathlib.Path('/nowhere'))
  assert memory.used_gib() is None
