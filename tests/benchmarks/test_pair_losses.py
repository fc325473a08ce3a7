"""The table of the loss over all pairs, and that the memory of its ring does not grow with the number of chips."""
from __future__ import annotations

import importlib.util

import pytest

from benchmarks import pair_losses
from benchmarks.pair_losses import Request
from vit_jax.config.schema import PairForm, PairLoss
from vit_jax.plan import compile, compiled, schedule

RING = Request('v5e:2x2', 128, 128, PairLoss.SIGMOID, PairForm.RING)


def test_a_row_has_memory_time_and_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
  costs = compiled.NOTHING._replace(collectives=[compiled.Collective('all-gather', 2, 2**20, 3 * 2**19)])
  answer = compile.Answer(temp_bytes=2**21, costs=costs, schedule=schedule.Schedule(1_500_000, 0, 0, 0, 0, []))
  monkeypatch.setattr(pair_losses, 'ask', lambda request: answer)
  assert pair_losses.row(RING) == '| v5e:2x2 | sigmoid | ring | 2.00 MiB | 1.00 ms | 1.5 MiB |'
  lost = answer._replace(overflow=compiled.Overflow(*[0.] * len(compiled.Overflow._fields)))  # type: ignore[arg-type]
  monkeypatch.setattr(pair_losses, 'ask', lambda request: lost)
  assert pair_losses.row(RING) == '| v5e:2x2 | sigmoid | ring | does not fit | | |'


@pytest.mark.slow(reason='a minute: three programs for TPUs')
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='the TPU compiler (libtpu) is not installed')
def test_the_memory_of_the_ring_does_not_grow_with_the_number_of_chips() -> None:
  peaks = [pair_losses.ask(RING._replace(topology=chips)).peak_bytes for chips in ('v5e:2x2', 'v5e:4x4', 'v5e:8x8')]
  assert peaks[1] == pytest.approx(peaks[0], rel=.02) and peaks[2] < 1.02 * peaks[0], peaks
  matrix = [pair_losses.ask(RING._replace(topology=chips, pairs=1024, form=PairForm.MATRIX)).peak_bytes
            for chips in ('v5e:2x2', 'v5e:8x8')]
  assert matrix[1] > 2 * matrix[0], matrix
