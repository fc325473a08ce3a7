"""Pages show the numbers of the records: tables, claims, comparisons of seeds, speedruns, and their tolerances."""
from __future__ import annotations

import dataclasses
import pathlib
import shlex

import pytest

from benchmarks import record_ledger, record_limits, record_pages, record_seeds
from vit_jax.data.content import Content
from vit_jax.record import machine
from vit_jax.replay import records
from vit_jax.replay.records import Record

RECORDS = {path.stem: records.read_file(path) for path in records.paths()}


@pytest.mark.parametrize('page', record_pages.PAGES)
def test_a_page_has_the_numbers_of_the_records(page: str) -> None:
  text = (machine.ROOT / page).read_text()
  assert record_pages.filled(text) == text, 'python -m benchmarks.record_pages'


def test_every_record_is_shown() -> None:
  assert record_pages.ids_on_pages() == RECORDS.keys()


def test_the_readme_shows_the_line_of_digits() -> None:
  share = RECORDS['digits'].values['test/top1@ema']
  assert f'test/top1 of the ema weights: {share:.2%} of 360 images' in (machine.ROOT / 'README.md').read_text()


def test_a_table_names_a_pattern_without_a_record() -> None:
  with pytest.raises(records.UserError, match="got 'digts'"):
    record_pages.table('digts')


def test_a_number_that_was_typed_into_a_page_is_replaced() -> None:
  record = RECORDS['bench_step_s16']
  page = ('<!-- records: bench_step_s16 -->\n| old |\n<!-- end of the records -->\nIt is '
          '<!-- claim: bench_step_s16 = {times timm:.2f}× -->3.14×<!-- end --> as fast.')
  text = record_pages.filled(page)
  assert '3.14' not in text and '-->0.98×<!-- end --> as fast.' in text and record_pages.filled(text) == text
  made = 'one of 2 cores of an Intel Xeon, 2026-11-22'
  assert f'| {record.sentence} | {made} | measured, not replayed: `bench_step_s16` |' in text
  assert shlex.split(record.command[0])[0] == 'taskset'


def test_a_speedrun_shows_what_each_record_cost_and_its_gain() -> None:
  def record(name: str, seconds: float, model: str = 'A', kind: str = 'cpu') -> Record:
    return Record(name, 'Muon: {test/top1:.2%} | of all.', 'train', (), {'test/top1': .7512}, made={
        'processor_s': seconds, 'exaflops': 3e-5, 'seconds': 20., 'devices': 4,
        'machine': {'cpu_model': model, 'device_kind': kind}})

  one, two, other, empty, three = record_ledger.cells([
      record('a', 3000.), record('b', 1500.), record('c', 100., 'B', 'NVIDIA H100'), Record('d', 'A.', 'train', (), {}),
      record('e', 1000.)])
  # 3e13 FLOPs at 5 % of 197e12, 918e12 and 989e12 FLOP/s
  assert one == ('Muon: 75.12 % \\| of all.', '3,000', '–', '3e-05', '–', '3.0, 0.7, 0.6')
  assert two[1:3] == ('1,500', '2.00×') and other[1:5] == ('100', '–', '3e-05', '80')
  assert empty == ('A.', '–', '–', '–', '–', '–, –, –') and three[2] == '1.50×'  # over the last one of its processor


def test_records_of_a_speedrun_are_shown_as_they_improved_whatever_their_names(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(records, 'FOLDER', tmp_path)
  monkeypatch.setattr(record_pages, '_read', records.read)  # without its cache
  for name, seconds, date in (('run_patch', 800., '2026-11-27'), ('run_b', 500., '2026-11-28'),
                              ('run_a', 600., '2026-11-28')):
    records.write(Record(name, f'{name}.', 'train', ('vit-jax train',), {'a': 1.}, made={
        'date': date, 'processor_s': seconds, 'machine': {'cpu_model': 'A'}}), tmp_path / f'{name}.json')
  rows = [line.split(' | ')[:3] for line in record_pages.speedrun('run_*').splitlines()[2:]]
  assert rows == [['| run_patch.', '800', '–'], ['| run_a.', '600', '1.33×'], ['| run_b.', '500', '1.20×']]


def test_the_table_of_a_speedrun_has_the_columns_of_its_head_and_shows_its_records() -> None:
  page = '<!-- speedrun: digits* -->\n| old |\n<!-- end of the speedrun -->'
  _, head, line, *rows, _ = record_pages.filled(page).splitlines()
  assert len({row.replace('\\|', '').count('|') for row in (head, line, *rows)}) == 1
  own = next(row for row in rows if row.endswith(': `digits` |'))
  assert len(rows) == 3 and '| 68 |' in own and own.startswith(f'| {RECORDS["digits"].sentence} |')


def test_a_row_says_how_a_record_is_replayed() -> None:
  def shown(**fields: object) -> str:
    return record_pages.cells(Record('x', 'A.', 'train', (), {}, **fields))[2]  # type: ignore[arg-type]
  assert shown(replayed='2026-11-23') == 'EQUAL, 2026-11-23: `x`' and shown() == 'never replayed: `x`'
  assert shown(replayed='2026-11-23 c0ffee1') == 'EQUAL, 2026-11-23, `c0ffee1`: `x`'
  assert shown(replayed='2026-11-23 c0ffee1 close') == 'CLOSE, 2026-11-23, `c0ffee1`: `x`'
  assert shown(replayed='never, since 2026-11-21') == 'never, since 2026-11-21: `x`'


@pytest.mark.parametrize('name', [name for name, one in RECORDS.items() if one.kind != 'measurement'])
def test_a_close_value_is_far_from_chance_and_from_the_next_row(name: str) -> None:
  assert RECORDS[name].tolerance.values == record_pages.limits_of(name), 'python -m benchmarks.record_pages'
  assert RECORDS[name].tolerance.elsewhere <= .01


def test_the_most_that_a_close_value_may_differ_follows_from_the_table() -> None:
  content = Content(10, '', '', '', ' '.join(['ab'] * 10))

  def row(name: str, values: dict[str, float]) -> Record:
    claim = ' '.join(f'{{{value}:.1%}}' for value in values)
    return Record(name, claim, 'train', (), values, data={'folder:x test': content})

  one = row('one', {'a top1': .19, 'a nll': 1.})
  other = row('other', {'b top1@ema': .43, 'b top5': .2})
  seeds = row('seeds', {'x_seed0 top1': .7, 'x_seed1 top1': .71, 'y top1': .76})
  assert record_limits.limits(one, [[one, other]]) == {'a top1': .03}, 'a third of the distance to chance, 0.1'
  assert record_limits.limits(other, [[one, other]]) == {'b top1@ema': .08, 'b top5': .1}
  assert record_limits.limits(seeds, [[one], [seeds]]) == {'x_seed0 top1': .02, 'x_seed1 top1': .016, 'y top1': .016}
  third, fourth = (dataclasses.replace(row(name, {'a top1': value}), settings={'lr': .1, 'seed': seed})
                   for name, value, seed in (('third', .7, 1), ('fourth', .71, 2)))
  assert record_limits.limits(third, [[third, fourth]]) == {'a top1': .2}, 'another seed is no other method'


def study(name: str, values: dict[str, float], length: str = '640 examples') -> Record:
  return Record(f'selfsup_{name}', 'A.', 'train', (f'vit-jax study --config=study_selfsup:source=x,objectives={name}',),
                values, settings={'length': length}, made={'training_processor_s': 90., 'date': '2026-11-27'})


def test_a_comparison_has_median_and_range_over_seeds_and_the_best_first() -> None:
  dino = study('dino', {'dino_seed0 knn/top1_k20@teacher': .30, 'dino_seed1 knn/top1_k20@teacher': .34,
                        'dino_seed2 knn/top1_k20@teacher': .31, 'dino_seed0 knn/top5_k20@teacher': .9,
                        'median knn/top1_k20@teacher': .31})
  other = study('random', {'random_seed0 knn/top1_k20': .25}, '1 steps')
  text = record_seeds.table([other, dino], {'knn/top1_k20': 'k-NN'}, dino, {
      one.id: ('here', f'not yet: `{one.id}`') for one in (dino, other)})
  assert text.splitlines()[2:] == [
      '| `dino` | 640 | 30 | 31.0 % (30.0 to 34.0) |  | 3 | `study_selfsup:objectives=dino` | here | not yet: '
      '`selfsup_dino` |',
      '| `random` | none | 90 | 25.0 % | -6.0 | 1 | `study_selfsup:objectives=random` | here | not yet: '
      '`selfsup_random` |']


def test_a_record_without_seeds_is_not_compared() -> None:
  record = study('dino', {'knn/top1_k20': .3})
  with pytest.raises(records.UserError, match='selfsup_dino: expected runs NAME_seedN of one name with knn/top1_k20'):
    record_seeds.read(record, ['knn/top1_k20'])
