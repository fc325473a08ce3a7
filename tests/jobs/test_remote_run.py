"""The whole program on a run directory in object storage: train, stop, go on, evaluate, average, report."""
from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import buckets
import pytest
import runs

from vit_jax import main
from vit_jax.record import reader
from vit_jax.train import checkpoint_reader

TINY = ['--config=digits', *runs.TINY, '--config.evals.test.every=5 steps', '--config.checkpoints.every=5 steps',
        '--config.train.log_every=1 steps']
WORKDIR = 'gs://mine/runs/a'


@pytest.mark.slow(reason='13 s: four jobs; checkpoints and records in object storage have tests of their own')
@pytest.mark.usefixtures('one_device', 'no_charts')
def test_a_run_on_object_storage_leaves_goes_on_and_reports_as_one_on_a_disk(
    bucket: buckets.Server, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(tmp_path)
  assert main.run([*TINY, f'--workdir={WORKDIR}', '--config.length=6 steps']) == 0
  found = {*bucket.names(WORKDIR)}
  assert {'config.json', 'metrics.jsonl', 'final.json', 'evaluate.json', 'predictions.npz', 'report.html'} <= found
  assert 'checkpoints/6/commit_success.txt' in found
  assert main.run([*TINY, f'--workdir={WORKDIR}', '--config.length=8 steps']) == 0
  final, record = json.loads(bucket.read(f'{WORKDIR}/final.json')), reader.read(WORKDIR)
  assert final['step'] == 8
  assert [int(row['step']) for row in record.rows if 'train/loss' in row] == list(range(1, 9))
  assert [e['resumed_from'] for e in record.events if e['event'] == 'start'] == [None, 6]
  assert sum(name.startswith('events.out') for name in bucket.names(WORKDIR)) == 2
  del bucket.objects['mine/runs/a/report.html']
  assert main.run(['report', f'--workdir={WORKDIR}']) == 0
  page = bucket.read(f'{WORKDIR}/report.html').decode()
  assert '<svg' in page and 'predictions.npz:' not in page
  assert f'Report: {WORKDIR}/report.html' in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_place_that_is_empty_or_not_for_a_job_is_said(
    bucket: buckets.Server, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['evaluate', '--config=digits', f'--workdir={WORKDIR}']) == 2
  assert f'expected the directory of a run, got {WORKDIR}, which has no folder checkpoints' in capsys.readouterr().err
  assert main.run(['report', f'--workdir={WORKDIR}']) == 2
  assert f'--workdir: expected directories of runs, got {WORKDIR}, which does not exist' in capsys.readouterr().err
  assert main.run(['train', '--config=digits', '--workdir=s3://mine/a']) == 2
  assert 's3://mine/a: expected a folder or gs://BUCKET/PATH' in capsys.readouterr().err


def test_checkpoints_that_another_process_has_written_since_are_seen(bucket: buckets.Server) -> None:
  """Listings are kept by what reads them; the objects below come from elsewhere."""
  reader = checkpoint_reader.Reader(f'{WORKDIR}/checkpoints')
  assert reader.steps() == []
  for step in (4, 6):
    bucket.objects[f'mine/runs/a/checkpoints/{step}/commit_success.txt'] = (1, b'x')
    assert reader.steps()[-1] == step
  bucket.objects['mine/runs/a/checkpoints/8/meta/metadata'] = (1, b'x')  # not yet whole
  assert reader.steps() == [4, 6]


def start(bucket: buckets.Server, *words: str) -> subprocess.Popen[str]:
  """The program in a process of its own, on one device."""
  environment = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | bucket.environment()
  environment |= {'XLA_FLAGS': '--xla_backend_optimization_level=0', 'PYTHONPATH': str(runs.ROOT)}
  return subprocess.Popen([sys.executable, str(runs.ROOT / 'tests' / 'buckets.py'), *words], env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for(bucket: buckets.Server, process: subprocess.Popen[str], name: str) -> None:
  for _ in range(4800):
    if name in bucket.names(WORKDIR):
      return
    assert process.poll() is None, process.communicate()[0][-3000:]
    time.sleep(.05)
  raise AssertionError(f'no {name} in four minutes')


@pytest.mark.slow(reason='about 40 s: three starts')
def test_a_run_that_is_killed_goes_on_bit_for_bit_in_object_storage(
    bucket: buckets.Server, tmp_path: pathlib.Path) -> None:
  train = [*TINY, '--config.length=50 steps', '--config.checkpoints.every=10 steps',
           '--config.evals.test.every=25 steps']
  process = start(bucket, *train, f'--workdir={WORKDIR}')
  wait_for(bucket, process, 'checkpoints/10/commit_success.txt')
  runs.kill(process)
  runs.finish(start(bucket, *train, f'--workdir={WORKDIR}'), timeout_s=600.)
  runs.finish(start(bucket, *train, f'--workdir={tmp_path}'), timeout_s=600.)
  far, near = reader.read(WORKDIR), reader.read(tmp_path)
  assert {r['step']: r['train/loss'] for r in far.rows if 'train/loss' in r} == {
      r['step']: r['train/loss'] for r in near.rows if 'train/loss' in r}
  assert json.loads(bucket.read(f'{WORKDIR}/final.json'))['params_digest'] == runs.final(tmp_path)['params_digest']
  assert [e['resumed_from'] for e in far.events if e['event'] == 'start'][0] is None and far.rows[-1]['step'] == 50


@pytest.mark.slow(reason='about 40 s: a start and three jobs')
@pytest.mark.usefixtures('one_device', 'no_page')
def test_a_damaged_checkpoint_is_set_aside_and_others_are_averaged_in_object_storage(
    bucket: buckets.Server) -> None:
  train = [*TINY, f'--workdir={WORKDIR}']
  assert main.run([*train, '--config.length=8 steps', '--config.train.profile=2..3']) == 0
  found = bucket.names(WORKDIR)
  assert sum(name.endswith('.xplane.pb') and name.startswith('profile/plugins') for name in found) == 1
  assert main.run(['average', f'--workdir={WORKDIR}', '--last=2', '--to=gs://mine/runs/mean']) == 0
  assert main.run(['evaluate', '--workdir=gs://mine/runs/mean']) == 0
  assert 'evaluate.json' in bucket.names('gs://mine/runs/mean')
  for name, (_, content) in list(bucket.objects.items()):
    if '/8/params/' in name and '/d/' in name:  # some hold what later ones replace
      middle = len(content) // 2
      bucket.objects[name] = (99, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:])
  out = runs.finish(start(bucket, *train, '--config.length=9 steps'), timeout_s=600.)  # this process keeps what it read
  assert 'checkpoint 8 is damaged and set aside' in out
  found = bucket.names(WORKDIR)
  assert 'damaged/8/commit_success.txt' in found and 'checkpoints/9/commit_success.txt' in found
  assert not [n for n in found if n.startswith('checkpoints/8/')]
