"""The table of the loss over all pairs, and that the memory of its ring does not grow with the number of chips."""
from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest

from benchmarks import pair_losses, rival, rival_pairs
from benchmarks.pair_losses import Request
from vit_jax.config.schema import PairForm, PairLoss
from vit_jax.plan import compile, compiled, overlap, plan, quick, schedule

RING = Request('v5e:2x2', 128, 128, PairLoss.SIGMOID, PairForm.RING)


ANSWER = compile.Answer(
    temp_bytes=2**21, peak_bytes=3 * 2**29, waits=[overlap.Wait('all-gather', 2, 4_000_000, 1_000_000)],
    operations=[compiled.Operation('forward', 'fused_attention', 1, 0, 1_500_000)],
    costs=compiled.NOTHING._replace(
        cycles=3_000_000, collectives=[compiled.Collective('all-gather', 2, 2**20, 3 * 2**19)]),
    schedule=schedule.Schedule(1_500_000, 0, 0, 0, 0, []))
CELLS = ('2.00 MiB', '1.50 GiB', '3.00', '1.00', '4.00', '1.00', '1.5 MiB')  # 1.5 GHz; kernels by schedule


def test_a_row_has_memory_times_and_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(pair_losses, 'ask', lambda request: ANSWER)
  assert pair_losses.row(RING) == ('v5e:2x2', 'ring', 'sigmoid', *CELLS)
  lost = ANSWER._replace(overflow=compiled.Overflow(*[0.] * len(compiled.Overflow._fields)))  # type: ignore[arg-type]
  monkeypatch.setattr(pair_losses, 'ask', lambda request: lost)
  row = pair_losses.row(RING._replace(checkout='folder', dtype='float32'))
  assert row == ('v5e:2x2', 'big_vision, float32', 'sigmoid', 'does not fit', *[''] * 6)


def test_losses_and_steps_of_both_programs_make_one_table(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  asked = []

  def ask(request: Any) -> compile.Answer:
    asked.append(request)
    return ANSWER

  for module, name in ((pair_losses, 'ask'), (rival_pairs, 'ask_quick'), (quick, 'ask')):
    monkeypatch.setattr(module, name, ask)
  monkeypatch.setattr(rival, 'check', lambda checkout: None)
  monkeypatch.setattr(plan, 'lay_out', lambda subject: subject)
  pair_losses.run(['v5e:4x4', '--pairs=128', f'--big_vision={tmp_path}', '--parts=losses,steps', '--loss=softmax'])
  alone, ours, theirs = asked[:4], asked[4], asked[5:]
  assert [(one.loss, one.form, one.dtype, one.checkout) for one in alone] == [
      (PairLoss.SOFTMAX, PairForm.MATRIX, 'bfloat16', ''), (PairLoss.SOFTMAX, PairForm.RING, 'bfloat16', ''),
      *[(PairLoss.SOFTMAX, PairForm.MATRIX, dtype, str(tmp_path)) for dtype in ('float32', 'bfloat16')]]
  assert (ours.config.batch_size, ours.config.objective.loss, ours.topology) == (2048, PairLoss.SOFTMAX, 'v5e:4x4')
  assert theirs == [rival_pairs.Request(str(tmp_path), 'v5e:4x4', 2048, PairLoss.SOFTMAX, scan=scan)
                    for scan in (False, True)]
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].split() == ['v5e:4x4', 'matrix', 'softmax', *' '.join(CELLS).split()]
  assert [line.split('|')[2].strip() for line in lines[-7:]] == [
      'matrix', 'ring', 'big_vision, float32', 'big_vision, bfloat16', 'step', 'step of big_vision',
      'step of big_vision, scanned']


@pytest.mark.slow(reason='a minute: three programs for TPUs')
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='the TPU compiler (libtpu) is not installed')
def test_the_memory_of_the_ring_does_not_grow_with_the_number_of_chips() -> None:
  peaks = [pair_losses.ask(RING._replace(topology=chips)).peak_bytes for chips in ('v5e:2x2', 'v5e:4x4', 'v5e:8x8')]
  assert peaks[1] == pytest.approx(peaks[0], rel=.02) and peaks[2] < 1.02 * peaks[0], peaks
  matrix = [pair_losses.ask(RING._replace(topology=chips, pairs=1024, form=PairForm.MATRIX)).peak_bytes
            for chips in ('v5e:2x2', 'v5e:8x8')]
  assert matrix[1] > 2 * matrix[0], matrix
