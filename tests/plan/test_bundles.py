"""Cycles from the compiler's dump: loops, loops in loops, and loops whose length is not stated."""
from __future__ import annotations

import json
import pathlib
import re

import pytest

from vit_jax.plan import bundles

DUMP = json.loads(pathlib.Path(__file__).with_name('golden_schedule.json').read_text())['dump']


def lines_of(name: str) -> list[str]:
  return next(lines for file, lines in DUMP.items() if f'-{name}-' in file)


def test_an_operation_without_loops_takes_its_bundles() -> None:
  lines = lines_of('tanh.3')
  assert bundles.count(lines) == bundles.Count(sum('{' in line for line in lines)) == bundles.Count(276)


def test_loops_in_loops_count_as_often_as_they_run() -> None:
  """The kernel: bundles 0x1 to 0x17 run 10 times, of which 0xd to 0x11 run 8 times each time."""
  assert bundles.count(lines_of('added.1')) == bundles.Count(7 + 10 * (18 + 8 * 5))


def test_the_stages_that_a_pipeline_is_ahead_are_not_counted() -> None:
  staged = [re.sub('stage = 0', 'stage = 2', line) for line in lines_of('added.1')]
  assert bundles.count(staged) == bundles.Count(7 + 8 * (18 + 8 * 5))


def test_loops_of_unknown_length_run_once_and_are_reported() -> None:
  found = bundles.count(lines_of('psum.7'))
  heads = sum(' LB' in line for line in lines_of('psum.7'))
  assert heads == 8 and found.unknown_loops == 4
  stated = [line for line in lines_of('psum.7') if 'loop exit test' in line]
  assert [int(re.findall(r', (\d+) /', line)[0]) for line in stated] == [4, 64, 3, 3]
  assert found.cycles == 547 + 3 * 6 + 63 * 11 + 2 * 222 + 2 * 100


def test_a_folder_is_read_by_the_names_of_its_operations(tmp_path: pathlib.Path) -> None:
  for name, lines in DUMP.items():
    (tmp_path / name).write_text('\n'.join(lines))
    (tmp_path / name.replace('final', 'schedule-analysis_final')).write_text('0x0 : { }')
  found = bundles.read(tmp_path)
  assert set(found) == {'tanh.3', 'copy.6', 'added.1', 'fusion', 'slice_dynamic-update-slice_fusion', 'psum.7'}
  assert found['added.1'] == bundles.count(lines_of('added.1')) and bundles.read(tmp_path / 'missing') == {}


@pytest.mark.parametrize('part', ['--xla_jf_dump_to=/a/b ', 'dump_llo_text=true'])
def test_the_flags_name_the_folder(part: str) -> None:
  assert part in bundles.flags('/a/b')
