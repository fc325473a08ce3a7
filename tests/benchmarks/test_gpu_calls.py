"""benchmarks.gpu_calls: kernels of a profile beside their estimates, and a call of several parts."""
from __future__ import annotations

import gzip
import json
import pathlib

import pytest

from benchmarks import gpu_calls


def test_the_times_of_a_profile_are_summed_by_instruction(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'plugins' / 'profile' / 'now' / 'vm.trace.json.gz'
  path.parent.mkdir(parents=True)
  events = [{'name': 'a', 'dur': 2., 'args': {'hlo_op': 'fusion.1'}}, {'name': 'b', 'dur': 9.},
            {'name': 'a', 'dur': 3.5, 'args': {'hlo_op': 'fusion.1'}}, {'name': 'c', 'dur': 1., 'args': {}}]
  path.write_bytes(gzip.compress(json.dumps({'traceEvents': events}).encode()))
  assert gpu_calls.kernel_ns(tmp_path) == {'fusion.1': 5500.}


def test_a_part_that_fails_is_named_and_the_others_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
  def two(call: gpu_calls.Call) -> None:
    call.part('bad', '-c', 'raise SystemExit(3)')
    assert call.part('good', '-c', 'import os; print(os.environ["XLA_FLAGS"])', flags='--some').endswith('--some\n')
  monkeypatch.setattr(gpu_calls, 'CALLS', (two,))
  assert gpu_calls.main(['--call=1', f'--to={tmp_path}', '--rehearse']) == 1
  lines = [line.split() for line in (tmp_path / '1' / 'summary.txt').read_text().splitlines()]
  assert [(line[0], line[-1]) for line in lines] == [('failed', 'bad'), ('ok', 'good')]
  assert 'failed 3' in capsys.readouterr().out


@pytest.mark.slow(reason='15 s: compiles a step and profiles it')
@pytest.mark.usefixtures('one_device')
def test_a_profile_is_laid_beside_the_estimate_of_each_kernel(tmp_path: pathlib.Path) -> None:
  text = gpu_calls.profiled('Ti/16:2:depth=2', 2, tmp_path, 'h200')
  last = [cell.strip() for cell in text.splitlines()[-1].split('|')]
  rest = [cell.strip() for cell in text.splitlines()[-2].split('|')]
  assert last[1] == 'all' and float(last[4]) > 0 and float(rest[4]) < .1 * float(last[4])
