"""Records of other people: what their commands may do, and what is shown before anything is read or run."""
from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from vit_jax import main
from vit_jax.core import implementation
from vit_jax.replay import job, planned, records

EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  """The current folder, with Python files of the person who made the record."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
  monkeypatch.setattr(implementation, '_trusted_folders', [])
  monkeypatch.setattr(implementation, '_command_line_modules', set())
  for name in ('evil.py', 'digits', 'evilmod.py'):
    (tmp_path / name).write_text(EVIL)
  return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
  """The commands that a replay starts; each fails."""
  found: list[list[str]] = []

  def execute(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    found.append(words[3:])
    return subprocess.CompletedProcess(words, 9)
  monkeypatch.setattr(job.subprocess, 'run', execute)
  return found


def write(folder: pathlib.Path, *command: str, **fields: Any) -> str:
  path = folder / 'record.json'
  path.write_text(json.dumps({'claim': 'It is {test/top1:.1%}.', 'kind': 'train', 'command': command,
                              'values': {'test/top1': .5}} | fields))
  return str(path)


@pytest.mark.parametrize(('line', 'said'), [
    ('push --weights={work}/run --to=hf://me/mine', "expected jobs that compute a result (train, finetune, pretrain, "
     "evaluate, study), got 'push'"),
    ('convert --weights=a.npz --to={work}/b.npz', "got 'convert'"),
    ('--job=embed --weights=a.npz --to={work}/b.npz digits', "got 'embed'"),
    ('train --job=push --weights=a --to={work}', "got 'train and push'"),
    ('--job=push ---job=train --weights=a --to={work}/x', "got 'push and train'"),
    ('-q push --weights=a --to={work}/x', "got 'push'"),
    ('train --config=digits --workdir=mine', '--workdir: expected a path below {work}, the directory of the replay, '
     'got mine'),
    ('train --config=digits --workdir={work}/../mine', 'got {work}/../mine'),
    ('train --config=digits -workdir mine', 'got mine'),
    ('evaluate --weights=a.npz --to=gs://mine/x --csv={work}/a.csv', '--to: expected a path below {work}'),
    ('evaluate --weights=a.npz --csv=thesis.csv', '--csv: expected a path below {work}'),
    ('train --config=digits --config.trackers.wandb=mine', 'expected no tracker, which sends results elsewhere'),
    ('train --config=evil.py', '--config: expected a config of this package, got the file {here}/evil.py, which would '
     'be run. Read it, and add --allow_code if you trust it'),
    ('train --config evil.py:arguments', 'got the file {here}/evil.py'),
    ('study --config=./digits', 'got the file {here}/digits'),
    ('train --config=digits --config.objective=evilmod:O', 'got the module evilmod, which would be run'),
    ('train --config=digits --config.data.source=mix:0.5*digits,0.5*evilmod:x', 'got the module evilmod'),
    ("train --config=digits '--config.data.source=mix:0.5* evilmod:x,0.5*digits'", 'got the module evilmod'),
    ('finetune --weights=a.npz --data=evilmod:x', '--data: expected code of this package, got the module evilmod'),
    ('train --config=from_folder:source=evilmod:x', 'got the module evilmod'),
    ('train --config=digits --allow_code', '--allow_code: expected nobody to set it but the person'),
    ('train --config=digits --nonsense --config=evil.py', 'got the file {here}/evil.py')])
def test_a_record_runs_no_other_job_writes_nowhere_else_and_runs_no_code(
    folder: pathlib.Path, started: list[list[str]], line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['replay', write(folder, f'vit-jax {line}')]) == 2
  shown = capsys.readouterr()
  assert said.replace('{here}', str(folder)) in shown.err and 'so nothing was run:' in shown.err
  assert 'Run them yourself if you trust them: vit-jax ' in shown.err
  assert not started and not (folder / 'ran').exists() and 'reading the data' not in shown.err


@pytest.mark.parametrize('source', ['evilmod:x', 'mix:1*evilmod:x', 'mix:0.5* evilmod:x,0.5*digits'])
def test_data_of_a_record_name_no_module_even_one_that_is_installed(
    folder: pathlib.Path, started: list[list[str]], source: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(implementation, '_trusted_folders', [str(folder)])
  content = {'examples': 3, 'images': 'a', 'labels': 'b', 'order': 'c', 'classes': 'd'}
  path = write(folder, 'vit-jax train --config=digits', data={f'{source} train': content})
  assert main.run(['replay', path]) == 2
  error = capsys.readouterr().err
  assert '--data: expected code of this package, got the module evilmod, which would be run.' in error
  assert not (folder / 'ran').exists() and 'reading the data' not in error and not started


def test_a_command_of_switches_alone_is_an_error(folder: pathlib.Path, started: list[list[str]],
                                                 capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['replay', write(folder, 'vit-jax -q')]) == 2 and not started
  assert '--config: expected ' in capsys.readouterr().err


def test_the_plan_names_all_commands_before_anything_is_read(
    folder: pathlib.Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
  content = {'examples': 3, 'images': 'a', 'labels': 'b', 'order': 'c', 'classes': 'd'}
  path = write(folder, 'vit-jax train --config=digits', "vit-jax evaluate '--weights={work}/result_1' "
               '--csv={work}/a.csv --config.data.source=folder:{pho.tos}',
               data={'digits train': content, 'folder:/etc test': content})
  assert main.run(['replay', path, f'--data=pho.tos={folder}/none']) == 2  # there are no such images
  shown = capsys.readouterr()
  assert 'pho.tos, got' in shown.err and not started
  first, second = shown.out.partition('Plan:\n')[2].split('  vit-jax ')[1:]
  assert first.startswith('train --config=digits --workdir={work}/result_1\n      config: ')
  assert 'digits.py, of this package\n' in first and 'writes: {work}/result_1' in first
  assert second.splitlines()[1:] == ['      reads: {work}/result_1', '      writes: {work}/a.csv',
                                     '      reads: folder:{pho.tos}', '      writes: {work}/result',
                                     '  compares before: digits train, folder:/etc test']


def test_a_person_who_trusts_a_record_allows_its_code(folder: pathlib.Path, started: list[list[str]]) -> None:
  (folder / 'evil.py').write_text(
      f'{EVIL}from vit_jax.config import schema\ndef get_config():\n  return schema.Config()\n')
  path = write(folder, 'vit-jax train --config=evil.py')
  assert main.run(['replay', path]) == 2 and not started
  assert main.run(['replay', path, '--allow_code']) == 9 and len(started) == 1
  assert started[0][:2] == ['train', '--config=evil.py'] and started[0][2].endswith('/result')


def test_a_run_is_recorded_with_its_config_only_if_that_may_be_run(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  run = folder / 'run'
  run.mkdir()
  (run / 'final.json').write_text(json.dumps({'step': 1, 'params_digest': 'a', 'metrics': {'test/top1': .5}}))
  (run / 'metrics.jsonl').write_text(json.dumps({
      'event': 'start', 'time_s': 0., 'resumed_from': None, 'command': ['vit-jax', 'train', '--config=evil.py']}))
  words = ['record', 'run', '--claim={test/top1:.1%}', '--to=record.json']
  assert main.run(words) == 2 and not (folder / 'ran').exists()
  assert f'got the file {folder}/evil.py, which would be run.' in capsys.readouterr().err
  assert main.run([*words, '--allow_code']) == 2 and (folder / 'ran').exists()


@pytest.mark.parametrize('claim', ['{test/top1:.2000000000f}', '{test/top1:2000000000}', '{test/top1:>99999999.1f}',
                                   '{test/top1:099f}', '{test/top1:.999999999%}'])
def test_the_format_of_a_claim_cannot_take_much_memory(folder: pathlib.Path, claim: str,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['replay', write(folder, 'vit-jax train --config=digits', claim=claim)]) == 2
  assert 'claim: expected ' in (error := capsys.readouterr().err) and f'got {claim!r}.' in error


def test_a_claim_cannot_clear_the_screen(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['replay', write(folder, 'vit-jax train --config=digits', claim='\x1b[2J{test/top1:.1%}.')]) == 2
  shown = capsys.readouterr()
  assert '\x1b' not in shown.out + shown.err and '\\x1b[2J' in shown.err


def test_all_records_of_the_repository_may_be_replayed() -> None:
  results = [record for record in map(records.read_file, records.paths()) if record.kind != 'measurement']
  assert {'digits', 'vit_ti_imagenet'} <= {record.id for record in results}
  for record in results:
    planned.check(record, is_shipped=True, allow_code=False)


def test_words_before_a_colon_in_a_text_are_no_modules() -> None:
  words = ['train', '--config.name=ViT B/16, fold: 2', '--config.evals.a.prompts=a photo of x, type: {}']
  assert planned.find_foreign_code(words) == []
