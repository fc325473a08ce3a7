"""The records of the repository: they are complete, their commands still give their settings, and pages show them."""
from __future__ import annotations

import pathlib
import shlex

import pytest

from vit_jax import commands, main
from vit_jax.config import check
from vit_jax.record import origin
from vit_jax.replay import comparison, inputs, ledger, pages, records, seed_tables, settings
from vit_jax.replay.records import Record

RECORDS = {path.stem: records.read_file(path) for path in records.paths()}
MOST_BYTES = 20_000


@pytest.mark.parametrize('page', pages.PAGES)
def test_a_page_has_the_numbers_of_the_records(page: str) -> None:
  text = (origin.ROOT / page).read_text()
  assert pages.filled(text) == text, 'python -m vit_jax.replay.pages'


def test_every_record_is_shown() -> None:
  assert pages.shown() == RECORDS.keys()


def test_the_readme_shows_the_line_of_digits() -> None:
  share = RECORDS['digits'].values['test/top1@ema']
  assert f'test/top1 of the ema weights: {share:.2%} of 360 images' in (origin.ROOT / 'README.md').read_text()


@pytest.mark.parametrize('name', RECORDS)
def test_a_record_is_complete_or_says_that_it_is_not(name: str) -> None:
  record = RECORDS[name]
  assert len((records.FOLDER / f'{name}.json').read_bytes()) < MOST_BYTES
  assert record.values and record.sentence.endswith('.') and '{' not in record.sentence
  assert len(record.made['date']) == 10 and record.made['machine']['cpu_model']
  if record.kind == 'measurement':
    assert not record.replayed and not record.params_digest
  elif record.replayed.startswith('never'):
    assert record.tolerance.same and record.tolerance.reason and not record.params_digest and not record.data
  else:
    assert record.made['commit'].isalnum(), 'made by a checkout without changes'
    assert record.data and record.config_digest and (record.params_digest or record.checkpoints)
    assert all(len(digest) == 64 for digest in (*record.checkpoints.values(), record.config_digest))
    assert not record.tolerance.elsewhere or record.tolerance.reason
  assert set(record.about) == set(inputs.names(record.words())) or record.kind == 'measurement'


@pytest.mark.parametrize('name', [name for name, one in RECORDS.items() if one.kind != 'measurement'])
def test_the_commands_of_a_record_are_valid_and_give_its_settings(name: str) -> None:
  record = RECORDS[name]
  read = [commands.read_line(main.parse, words) for words in record.words()]
  assert [problem for _, found in read for config in found for problem in check.problems(config)] == []
  configs = read[-1][1]
  if len(configs) == 1 and record.settings:
    assert settings.differences(record.settings, configs[0], {}, without=record.found) == []


def test_a_conversion_keeps_the_digest_of_the_parameters() -> None:
  one, other = RECORDS['vit_ti_imagenet'], RECORDS['vit_ti_converted']
  assert one.params_digest == other.params_digest and one.values == other.values


def test_a_table_names_a_pattern_without_a_record() -> None:
  with pytest.raises(records.UserError, match="got 'digts'"):
    pages.table('digts')


def test_a_number_that_was_typed_into_a_page_is_replaced() -> None:
  record = RECORDS['bench_step_s16']
  page = ('<!-- records: bench_step_s16 -->\n| old |\n<!-- end of the records -->\nIt is '
          '<!-- claim: bench_step_s16 = {times timm:.2f}× -->3.14×<!-- end --> as fast.')
  text = pages.filled(page)
  assert '3.14' not in text and '-->0.98×<!-- end --> as fast.' in text and pages.filled(text) == text
  made = 'one of 2 cores of an Intel Xeon, 2026-11-22'
  assert f'| {record.sentence} | {made} | measured, not replayed: `bench_step_s16` |' in text
  assert shlex.split(record.command[0])[0] == 'taskset'


def test_a_speedrun_shows_what_each_record_cost_and_its_gain() -> None:
  def record(name: str, seconds: float, model: str = 'A', kind: str = 'cpu') -> Record:
    return Record(name, 'Muon: {test/top1:.2%} | of all.', 'train', (), {'test/top1': .7512}, made={
        'processor_s': seconds, 'exaflops': 3e-5, 'seconds': 20., 'devices': 4,
        'machine': {'cpu_model': model, 'device_kind': kind}})

  one, two, other, empty, three = ledger.cells([
      record('a', 3000.), record('b', 1500.), record('c', 100., 'B', 'NVIDIA H100'), Record('d', 'A.', 'train', (), {}),
      record('e', 1000.)])
  # 3e13 FLOPs at 5 % of 197e12, 918e12 and 989e12 FLOP/s
  assert one == ('Muon: 75.12 % \\| of all.', '3,000', '–', '3e-05', '–', '3.0, 0.7, 0.6')
  assert two[1:3] == ('1,500', '2.00×') and other[1:5] == ('100', '–', '3e-05', '80')
  assert empty == ('A.', '–', '–', '–', '–', '–, –, –') and three[2] == '1.50×'  # over the last one of its processor


def test_records_of_a_speedrun_are_shown_as_they_improved_whatever_their_names(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(records, 'FOLDER', tmp_path)
  monkeypatch.setattr(pages, '_read', records.read)  # without its cache
  for name, seconds, date in (('run_patch', 800., '2026-11-27'), ('run_b', 500., '2026-11-28'),
                              ('run_a', 600., '2026-11-28')):
    records.write(Record(name, f'{name}.', 'train', ('vit-jax train',), {'a': 1.}, made={
        'date': date, 'processor_s': seconds, 'machine': {'cpu_model': 'A'}}), tmp_path / f'{name}.json')
  rows = [line.split(' | ')[:3] for line in pages.speedrun('run_*').splitlines()[2:]]
  assert rows == [['| run_patch.', '800', '–'], ['| run_a.', '600', '1.33×'], ['| run_b.', '500', '1.20×']]


def test_the_table_of_a_speedrun_has_the_columns_of_its_head_and_shows_its_records() -> None:
  page = '<!-- speedrun: digits* -->\n| old |\n<!-- end of the speedrun -->'
  _, head, line, *rows, _ = pages.filled(page).splitlines()
  assert len({row.replace('\\|', '').count('|') for row in (head, line, *rows)}) == 1
  own = next(row for row in rows if row.endswith(': `digits` |'))
  assert len(rows) == 3 and '| 68 |' in own and own.startswith(f'| {RECORDS["digits"].sentence} |')


def test_a_row_says_how_a_record_is_replayed() -> None:
  def shown(**fields: object) -> str:
    return pages.cells(Record('x', 'A.', 'train', (), {}, **fields))[2]  # type: ignore[arg-type]
  assert shown(replayed='2026-11-23') == 'EQUAL, 2026-11-23: `x`' and shown() == 'not yet: `x`'
  assert shown(replayed='never, since 2026-11-21') == 'never, since 2026-11-21: `x`'
  assert shown(replayed='2026-11-23', tolerance=records.Tolerance(.01)) == 'within 0.01, 2026-11-23: `x`'


def test_a_missing_field_is_named() -> None:
  whole = {'claim': 'x', 'kind': 'train', 'command': ['vit-jax train'], 'values': {'a': 1.}}
  assert records.from_plain('one', whole).claim == 'x'
  for name in whole:
    with pytest.raises(ValueError, match=f'^no field `{name}`$'):
      records.from_plain('one', {key: value for key, value in whole.items() if key != name})


def study(name: str, values: dict[str, float], length: str = '640 examples') -> Record:
  return Record(f'selfsup_{name}', 'A.', 'train', (f'vit-jax study --config=study_selfsup:source=x,objectives={name}',),
                values, settings={'length': length}, made={'training_processor_s': 90., 'date': '2026-11-27'})


def test_a_comparison_has_median_and_range_over_seeds_and_the_best_first() -> None:
  dino = study('dino', {'dino_seed0 knn/top1_k20@teacher': .30, 'dino_seed1 knn/top1_k20@teacher': .34,
                        'dino_seed2 knn/top1_k20@teacher': .31, 'dino_seed0 knn/top5_k20@teacher': .9,
                        'median knn/top1_k20@teacher': .31})
  other = study('random', {'random_seed0 knn/top1_k20': .25}, '1 steps')
  text = seed_tables.table([other, dino], {'knn/top1_k20': 'k-NN'}, dino, {
      one.id: ('here', f'not yet: `{one.id}`') for one in (dino, other)})
  assert text.splitlines()[2:] == [
      '| `dino` | 640 | 30 | 31.0 % (30.0 to 34.0) |  | 3 | `study_selfsup:objectives=dino` | here | not yet: '
      '`selfsup_dino` |',
      '| `random` | none | 90 | 25.0 % | -6.0 | 1 | `study_selfsup:objectives=random` | here | not yet: '
      '`selfsup_random` |']


def test_a_record_without_seeds_is_not_compared() -> None:
  record = study('dino', {'knn/top1_k20': .3})
  with pytest.raises(records.UserError, match='selfsup_dino: expected runs NAME_seedN of one name with knn/top1_k20'):
    seed_tables.read(record, ['knn/top1_k20'])


def test_the_text_before_a_replay_names_the_device_of_the_record() -> None:
  def of(device: str) -> str:
    made = {'date': '2026-11-28', 'machine': {'device_kind': device, 'cpu_model': 'Xeon'}}
    return comparison.header(records.Record('a', 'A.', 'train', (), {}, made=made))

  assert of('NVIDIA H100') == 'A.\nRecorded: 2026-11-28, NVIDIA H100, Xeon'
  assert of('cpu') == 'A.\nRecorded: 2026-11-28, Xeon'
