"""The records of the repository: they are complete, and their commands still give their settings."""
from __future__ import annotations

import pytest

from vit_jax import commands, main
from vit_jax.config import check
from vit_jax.core.documents import Field
from vit_jax.core.errors import UserError
from vit_jax.replay import inputs, planned, records, settings

RECORDS = {path.stem: records.read_file(path) for path in records.paths()}
MOST_BYTES = 20_000


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
  assert set(record.about) == set(inputs.find_names(record.words())) or record.kind == 'measurement'


@pytest.mark.parametrize('name', [name for name, one in RECORDS.items() if one.kind != 'measurement'])
def test_the_commands_of_a_record_are_valid_and_give_its_settings(name: str) -> None:
  record = RECORDS[name]
  read = [commands.read_line(main.parse, words) for words in record.words()]
  assert [problem for _, found in read for config in found for problem in check.problems(config)] == []
  configs = read[-1][1]
  if len(configs) == 1 and record.settings:
    assert settings.of_config(configs[0], {}).differences(record.settings, ignored=record.found) == []


def test_a_conversion_keeps_the_digest_of_the_parameters() -> None:
  one, other = RECORDS['vit_ti_imagenet'], RECORDS['vit_ti_converted']
  assert one.params_digest == other.params_digest and one.values == other.values


def test_a_missing_field_is_named() -> None:
  whole = {'claim': 'x', 'kind': 'train', 'command': ['vit-jax train'], 'values': {'a': 1.}}
  assert records.from_plain('one', Field(whole, 'a.json')).claim == 'x'
  for name in whole:
    with pytest.raises(UserError, match=f'^a.json: expected the field {name}, got '):
      records.from_plain('one', Field({key: value for key, value in whole.items() if key != name}, 'a.json'))


def test_a_record_without_a_value_is_refused() -> None:
  with pytest.raises(UserError, match='^a.json, values: expected at least one value, got '):
    records.from_plain('one', Field({'claim': 'x', 'kind': 'train', 'command': ['vit-jax train'], 'values': {}},
                                    'a.json'))


def test_the_text_before_a_replay_names_the_device_of_the_record() -> None:
  def of(device: str) -> str:
    made = {'date': '2026-11-28', 'machine': {'device_kind': device, 'cpu_model': 'Xeon'}}
    return planned.header(records.Record('a', 'A.', 'train', (), {}, made=made))

  assert of('NVIDIA H100') == 'A.\nRecorded: 2026-11-28, NVIDIA H100, Xeon'
  assert of('cpu') == 'A.\nRecorded: 2026-11-28, Xeon'
