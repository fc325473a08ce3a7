"""Runs on tar and TFRecord files that are killed, and resume on another number of hosts: every batch is the same."""
from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import recorded_batches
import runs

from tests.data import packed
from tests.data.images import encode
from vit_jax.data.formats import builtin
from vit_jax.data.source import read_one

pytestmark = pytest.mark.slow(reason='5 min on two busy cores: five runs, most of several processes')
STEPS, DEVICES = 40, 8
RUN = ('train', '--config=digits', f'--config.length={STEPS} steps', '--config.checkpoints.every=10 steps',
       '--config.train.log_every=1 steps', '--config.evals.test.every=40 steps', '--config.evals.test.batch_size=80',
       '--config.data.in_memory=no')
NAMES = tuple(map(str, range(10)))
KINDS = {'wds': ('--config.data.label_column=json/label',),
         'tfrecord': ('--config.data.label_column=image/class/text',)}


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """The digits as tar and as TFRecord files."""
  folder = tmp_path_factory.mktemp('digits')
  for split, shards in (('train', 5), ('test', 2)):
    source = builtin.open_digits(split)
    found = [packed.Example(f'{i:06d}', encode(read_one(source, i).image.repeat(3, axis=2)), read_one(source, i).label)
             for i in range(len(source))]
    packed.write_tars(folder / 'wds', split, found, shards, NAMES)
    packed.write_tfrecords(folder / 'tfrecord', split, found, shards, NAMES)
  return folder


def train(folder: pathlib.Path, kind: str, data: pathlib.Path, processes: int) -> subprocess.Popen[str]:
  """The digits on eight devices of so many processes, whose batches are recorded."""
  (folder / 'batches').mkdir(parents=True, exist_ok=True)
  environment = {k: v for k, v in os.environ.items() if k not in ('XLA_FLAGS', 'JAX_PLATFORMS')} | {
      'PYTHONPATH': f'{runs.ROOT}{os.pathsep}{runs.ROOT / "tests"}', 'BATCHES': str(folder / 'batches'),
      'XLA_FLAGS': '--xla_backend_optimization_level=0', 'NO_CHECK': '1', 'GRACE_S': '5',
      'XDG_CACHE_HOME': str(folder / 'cache')}
  return subprocess.Popen(
      ['bash', str(runs.ROOT / 'launch' / 'local_processes.sh'), str(processes), str(DEVICES // processes), '--',
       sys.executable, str(runs.ROOT / 'tests' / 'recorded_batches.py'), *RUN,
       f'--config.data.source={kind}:{data / kind}', *KINDS[kind], f'--workdir={folder / "run"}'],
      env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def kill(process: subprocess.Popen[str], workdir: pathlib.Path) -> None:
  """Kills all processes of a run with SIGKILL, after a checkpoint and some steps more."""
  runs.wait_for_step(process, workdir, 13)
  listed = subprocess.run(['ps', '-ewwo', 'pid,args'], capture_output=True, text=True, check=True).stdout
  own = [int(line.split()[0]) for line in listed.splitlines() if f'--workdir={workdir}' in line
         and line.split(None, 1)[1].startswith(sys.executable)]
  assert len(own) == 2
  for number in own:
    os.kill(number, signal.SIGKILL)
  process.communicate(timeout=200)


@pytest.fixture(scope='module')
def whole(data: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A run on tar files by two processes, undisturbed."""
  folder = tmp_path_factory.mktemp('whole')
  runs.finish(train(folder, 'wds', data, 2), timeout_s=500)
  return folder


@pytest.mark.parametrize(('kind', 'processes'), [('wds', 4), ('tfrecord', 1)])
def test_a_killed_run_resumes_on_another_number_of_hosts_with_the_same_batches(
    kind: str, processes: int, data: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
  kill(train(tmp_path, kind, data, 2), tmp_path / 'run')
  before = runs.losses(tmp_path / 'run')
  runs.finish(train(tmp_path, kind, data, processes), timeout_s=500)
  assert max(before) >= 13
  resumed = runs.events(tmp_path / 'run', 'start')[-1]['resumed_from']
  assert resumed in (10, 20, 30)
  got, want = recorded_batches.read(tmp_path / 'batches'), recorded_batches.read(whole / 'batches')
  numbers = range(STEPS)
  assert [got[number] for number in numbers] == [want[number] for number in numbers]
  expected = runs.losses(whole / 'run')
  assert before == {step: expected[step] for step in before}  # bit for bit, by as many processes
  losses = runs.losses(tmp_path / 'run')
  assert losses.keys() == expected.keys()
  for step in range(resumed + 1, STEPS + 1):  # rounding of sums over the hosts
    assert losses[step] == pytest.approx(expected[step], abs=1e-4), step
