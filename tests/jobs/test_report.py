"""The report job on folders that are no run, on damaged records, and on a config that is another run's."""
from __future__ import annotations

import json
import os
import pathlib

import pytest
import saved

from vit_jax import main
from vit_jax.config import json_files, provenance, schema
from vit_jax.record import checkpoint_files


@pytest.fixture
def workdir(tmp_path: pathlib.Path) -> pathlib.Path:
  """A run that was begun, with the description of a checkpoint."""
  config, meta = schema.Config(name='mine'), tmp_path / 'run' / 'checkpoints' / '3' / checkpoint_files.META
  meta.parent.mkdir(parents=True)
  meta.write_text(json.dumps(checkpoint_files.seal({'step': 3, provenance.SETTINGS: provenance.settings(config)})))
  (tmp_path / 'run' / 'config.json').write_text(json_files.to_json(config))
  (tmp_path / 'run' / 'final.json').write_text('{"step": 3}')
  return tmp_path / 'run'


def report(workdir: pathlib.Path) -> int:
  return main.run(['report', f'--workdir={workdir}'])


def test_the_page_is_all_that_is_written(workdir: pathlib.Path) -> None:
  saved.half_write(workdir / 'checkpoints')
  before = saved.snapshot(workdir)
  assert report(workdir) == 0
  after = saved.snapshot(workdir)
  assert set(after) - set(before) == {'report.html'} and {name: after[name] for name in before} == before


def test_a_folder_that_is_no_run_gets_no_page(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'notes.txt').write_text('x')
  assert report(tmp_path) == 2
  assert [p.name for p in tmp_path.iterdir()] == ['notes.txt']
  error = capsys.readouterr().err
  assert f'error: --workdir={tmp_path}: expected the directory of a run, got one without' in error


def test_a_page_of_another_program_is_not_replaced(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'metrics.jsonl').write_text('{"event": "start", "time_s": 1}\n')
  (tmp_path / 'report.html').write_text('mine')
  assert report(tmp_path) == 2 and (tmp_path / 'report.html').read_text() == 'mine'
  assert 'expected none or a page of vit-jax at' in capsys.readouterr().err
  (tmp_path / 'report.html').unlink()
  (tmp_path / 'config.json').write_text('{')  # damaged: the page names it, also when it is written again
  for _ in range(2):
    assert report(tmp_path) == 2 and (tmp_path / 'report.html').exists()
    assert 'The page was written without the damaged files' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['config.json', 'final.json', 'evaluate.json'])
@pytest.mark.parametrize(('content', 'said'), [
    (b'', 'an empty file'), (b'[]', 'a list of 0'), (b'{"a', 'no JSON at line 1'), (b'\xff\x00', 'text that is not'),
    (b'[' * 100_000, 'JSON that is nested too deep')])
def test_damaged_records_are_named_with_status_2_beside_a_page_of_the_rest(
    workdir: pathlib.Path, name: str, content: bytes, said: str, capsys: pytest.CaptureFixture[str]) -> None:
  (workdir / name).write_bytes(content)
  assert report(workdir) == 2
  assert f'{workdir / name}: expected a JSON object, got {said}' in capsys.readouterr().err
  assert name in (workdir / 'report.html').read_text()


@pytest.mark.parametrize('name', ['config.json', 'final.json', 'evaluate.json'])
def test_a_record_that_is_too_large_is_not_read(workdir: pathlib.Path, name: str,
                                                capsys: pytest.CaptureFixture[str]) -> None:
  (workdir / name).touch()
  os.truncate(workdir / name, 2**26 + 1)
  assert report(workdir) == 2
  assert f'{workdir / name}: expected a JSON object, got a file of 67,108,865 bytes' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['config.json', 'final.json', 'evaluate.json', 'metrics.jsonl',
                                  'predictions.npz'])
@pytest.mark.parametrize('kind', ['a pipe', 'a device'])
def test_what_is_no_regular_file_is_named_and_not_waited_for(
    workdir: pathlib.Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
  (workdir / 'metrics.jsonl').write_text('{"step": 3, "time_s": 1, "train/loss": 2}\n')
  (workdir / name).unlink(missing_ok=True)
  os.mkfifo(workdir / name) if kind == 'a pipe' else (workdir / name).symlink_to('/dev/zero')
  assert report(workdir) == 2 * name.endswith('.json')
  page, said = (workdir / 'report.html').read_text(), f'{kind} in place of a file'
  assert said in page or name.endswith('.json') and said in capsys.readouterr().err


def test_a_config_of_another_run_is_refused(workdir: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (workdir / 'config.json').write_text(json_files.to_json(schema.Config(image_px=(64, 64))))
  assert report(workdir) == 2
  error = capsys.readouterr().err
  assert 'image_px: 224,224 in the checkpoint, 64,64 in the config' in error and not (workdir / 'report.html').exists()
