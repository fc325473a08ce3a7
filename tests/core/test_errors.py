"""Passwords and tokens of addresses do not show."""
from __future__ import annotations

import json
import logging
import pathlib

import pytest

from vit_jax import main
from vit_jax.config import engine, schema
from vit_jax.core import errors, reports
from vit_jax.core.errors import UserError
from vit_jax.record import console, run_directory, writer

SECRET = 'hunter2'
ADDRESS = f'https://me:{SECRET}@host/net.npz?token={SECRET}'


@pytest.mark.parametrize(('text', 'plain'), [
    ('x https://u:p@h/a?t=1 y', 'x https://***@h/a?*** y'), ("'https://u@h/a'", "'https://***@h/a'"),
    ('https://h:80/a@b', 'https://h:80/a@b'), ('https://h/a#key', 'https://h/a#***'), ('https://h?t=1', 'https://h?***'),
    ('https://u:p@q@h/x', 'https://***@h/x'), ('https://u:p/q@h/x', 'https://***@h/x'), ('hf://a/b', 'hf://a/b'),
    ('https:/u:p@h/x', 'https:/***@h/x'), ('(gs://b/c), https://u:p@h', '(gs://b/c), https://***@h'),
    ('a@b?c', 'a@b?c'), ("http://u:pa'ss@h/x", 'http://***@h/x'), ('https://u:pa#ss@h/x', 'https://***@h/x'),
    ('https://u:pa?ss@h/x#y', 'https://***@h/x#***'), ("'https://h/a', 'me@b'", "'https://h/a', 'me@b'"),
    ('folder:/data/set#2/train', 'folder:/data/set#2/train'), ('folder:/me@work/a?b', 'folder:/me@work/a?b'),
    ('array_record:gs://b/c?t=1', 'array_record:gs://b/c?***')])
def test_addresses_lose_names_passwords_queries_and_fragments(text: str, plain: str) -> None:
  assert errors.redacted(text) == plain
  assert errors.redacted(plain) == plain


@pytest.mark.parametrize(('text', 'is_so'), [
    ('https://***@h/a', True), ('https://h/a?***', True), ('https://h/a', False), ('gs://b/c', False),
    ('a?***', False)])
def test_an_address_of_a_record_is_known_as_such(text: str, is_so: bool) -> None:
  assert errors.is_redacted(text) == is_so


def test_messages_reports_logs_and_records_do_not_have_them(tmp_path: pathlib.Path) -> None:
  assert SECRET not in str(UserError(f'{ADDRESS}: expected a file'))
  try:
    raise RuntimeError(f'could not open {ADDRESS}')
  except RuntimeError as error:
    shown = reports.explain(error, ['predict', f'--weights={ADDRESS}'], {'XDG_STATE_HOME': str(tmp_path)})
  report, = tmp_path.rglob('failure-*.txt')
  assert SECRET not in shown.message + report.read_text() and 'host/net.npz' in report.read_text()
  record = logging.LogRecord('a', logging.INFO, 'f', 1, 'loading %s', (ADDRESS,), None)
  assert SECRET not in console.Handler(0.).format(record)
  config = schema.Config(init_from=ADDRESS)
  assert SECRET not in engine.to_json(config)
  assert json.loads(engine.to_json(config))['init_from'] == 'https://***@host/net.npz?***'
  run_directory.write_json(tmp_path / 'init.json', {'source': ADDRESS})
  assert SECRET not in (tmp_path / 'init.json').read_text()
  with writer.Writer(tmp_path, process_index=0, resumed_from=None, progress_total=1, progress=False,
                     trackers=lambda _: []) as record_of_run:
    record_of_run.event('start', source=ADDRESS)
  assert SECRET not in (tmp_path / 'metrics.jsonl').read_text()


def test_settings_are_listed_without_them(capsys: pytest.CaptureFixture[str]) -> None:
  for form in ([], ['--json']):
    assert main.run(['settings', 'digits', f'--config.init_from={ADDRESS}', *form]) == 0
    assert SECRET not in capsys.readouterr().out
