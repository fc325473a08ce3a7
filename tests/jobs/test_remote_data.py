"""Runs whose images are in object storage: the results are those of files, after kills and with few open files."""
from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys

import buckets
import numpy as np
import pytest
import runs

from tests.data import prepared_sets
from vit_jax import main

SETTINGS = ('--config.length=60 steps', '--config.checkpoints.every=10 steps', '--config.data.in_memory=no',
            '--config.train.log_every=1 steps', '--config.data.workers=0')


def start(workdir: pathlib.Path, source: str, *extra: str) -> subprocess.Popen[str]:
  """A run with at most 64 open files."""
  words = [sys.executable, '-m', 'vit_jax.main', '--config=digits', f'--workdir={workdir}', *runs.TINY, *SETTINGS,
           f'--config.data.source=array_record:{source}', *extra]
  return subprocess.Popen(['bash', '-c', 'ulimit -n 64; exec "$@"', 'bash', *words], env=runs.environment(),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


@pytest.mark.slow(reason='40 s: four processes')
def test_a_killed_run_on_object_storage_resumes_to_the_end_of_a_run_on_files(
    bucket: buckets.Server, tmp_path: pathlib.Path) -> None:
  folder = prepared_sets.write(tmp_path / 'set', num_shards=12)
  address = prepared_sets.upload(folder, bucket, 'gs://bucket/sets/digits')
  runs.finish(start(tmp_path / 'local', str(folder)))
  workdir = tmp_path / 'remote'
  process = start(workdir, address)
  runs.wait_for_checkpoint(process, workdir, number=2)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  config = json.loads((workdir / 'config.json').read_text())
  config['data'] |= {'cache_gib': 1, 'cache_dir': 'kept'}  # as earlier versions write it
  (workdir / 'config.json').write_text(json.dumps(config))
  runs.finish(start(workdir, address))
  assert runs.final(workdir)['params_digest'] == runs.final(tmp_path / 'local')['params_digest']


def test_the_description_of_data_in_object_storage_is_checked_before_a_run(
    bucket: buckets.Server, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  address = prepared_sets.upload(prepared_sets.write(tmp_path / 'set'), bucket, 'gs://bucket/checked')
  command = ['check', '--config=digits', f'--workdir={tmp_path / "run"}']
  assert main.run([*command, f'--config.data.source=array_record:{address}']) == 0
  assert main.run([*command, '--config.data.source=array_record:gs://bucket/none']) == 2
  assert 'gs://bucket/none: expected a prepared dataset, got no info.json' in ''.join(capsys.readouterr())


@pytest.mark.slow(reason='20 s: a run, two evaluations and two sets of features')
def test_jobs_that_read_images_give_the_same_from_object_storage(
    bucket: buckets.Server, tmp_path: pathlib.Path, one_device: None, no_page: None) -> None:
  folder = prepared_sets.write(tmp_path / 'set')
  address = prepared_sets.upload(folder, bucket, 'gs://bucket/jobs/digits')
  assert main.run(['train', '--config=digits', f'--workdir={tmp_path / "run"}', *runs.TINY, '--config.length=20 steps',
                   f'--config.data.source=array_record:{address}']) == 0
  found = []
  for name, where in (('local', folder), ('remote', address)):
    assert main.run(['evaluate', f'--workdir={tmp_path / "run"}', f'--config.data.source=array_record:{where}',
                     f'--to={tmp_path / name}']) == 0
    assert main.run(['embed', f'--weights={tmp_path / "run"}', f'--data=array_record:{where}', '--split=test',
                     f'--to={tmp_path / name}.npz']) == 0
    evaluation = json.loads((tmp_path / name / 'evaluate.json').read_text())
    with np.load(tmp_path / f'{name}.npz', allow_pickle=False) as saved:
      found.append((evaluation['metrics'], saved['features'].tobytes()))
  assert found[0] == found[1]
