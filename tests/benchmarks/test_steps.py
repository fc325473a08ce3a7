"""The benchmark of train steps that are compiled side by side."""
from __future__ import annotations

import json
import pathlib

import pytest
import single

from benchmarks import bench_parts, steps, timing
from benchmarks.timing import Spent

TINY = 'mu/16:2:depth=1:width=16:heads=2:mlp.hidden=16'


@pytest.mark.parametrize(('text', 'said'), [
    ('L/16', "expected NETWORK:BATCH or NETWORK:BATCH:SETTING=VALUE, got 'L/16'"),
    ('L/16:0', "got 'L/16:0'"), ('L/16:8:scan', "got 'L/16:8:scan'"), ('X/16:8', 'expected SIZE/PATCH'),
    ('L/16:8:depht=2', 'depth')])
def test_a_row_that_cannot_be_read_is_an_error(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert steps.main([f'--rows={text}']) == 2
  assert said in capsys.readouterr().err


def test_the_table_has_the_rates_and_how_much_faster_ours_is() -> None:
  wanted = steps.Wanted('L/16', 8, ('execution=scan',))
  rows = [steps.Row(wanted, lambda: lambda count: Spent(1., 1.), 4e12, 30., 2**31, '')]
  spent = {'L/16 execution=scan': [Spent(.02, .1), Spent(.04, .1), Spent(.03, .1)],
           'L/16 of other': [Spent(.04, .1), Spent(.04, .1), Spent(.03, .1)]}
  text = steps.render(rows, spent, {'L/16 of other': 'L/16 execution=scan'}, peak_flops=1e15, matmul_flops=4e14)
  ours, other = ([cell.strip() for cell in line.split('|')[1:-1]] for line in text.splitlines()[-2:])
  # 4 TFLOP in 30 ms are 133.3 TFLOP/s; the ratios of the turns are 2, 1 and 1.
  assert ours == ['L/16 execution=scan', '8', '30.0 (20.0 – 40.0)', '267', '133.3', '13.3%', '33.3%', '–', '30 s',
                  '2.0 GiB']
  assert other == ['L/16 of other', '8', '40.0 (30.0 – 40.0)', '200', '100.0', '10.0%', '25.0%', '1.00×', '–', '–']


@pytest.mark.slow(reason='8 s: compiles two steps')
def test_steps_are_timed_while_nothing_else_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(timing, 'MIN_S', .001)
  monkeypatch.setitem(bench_parts.MATMUL_SIDE, 'cpu', 64)
  events = []

  def around(measure: steps.Measure) -> dict[str, list[Spent]]:
    events.append(sorted(found := measure()))
    return found

  with single.one_device():
    assert steps.main([f'--rows={TINY},{TINY}:execution=scan', '--turns=2', f'--to={tmp_path}'], around=around) == 0
  names = [TINY.replace(':2:', ' ').replace(':', ' '), f"{TINY.replace(':2:', ' ').replace(':', ' ')} execution=scan"]
  assert events == [sorted([*names, bench_parts.MATMUL])]
  found = json.loads((tmp_path / 'steps.json').read_text())
  assert list(found['steps']) == names and all(len(times) == 2 for times in found['steps'].values())
  assert found['rows'][0]['flops'] == found['rows'][1]['flops'] > 0
  assert (tmp_path / 'steps.md').read_text() == capsys.readouterr().out
