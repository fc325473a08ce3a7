"""Tiny runs of eight kinds: parameters, averages, optimizer state and rows of metrics, also after a pause and a kill.

The runs are portable, in processes of their own. Their digests were the same on all x86 processors that were compared,
but for the run with captions: its stored digest is compared on the model of processor that made it.
"""
from __future__ import annotations

import json
import pathlib
import tarfile

import jax
import pytest
import runs

from tests.golden import sets, surface

VERSIONS = {'jax': jax.__version__, **surface.PIXELS}
NETWORK = ('model.depth=1', 'model.width=16', 'model.heads=2', 'model.mlp.hidden=16')
SETTINGS = ('length=12 steps', 'checkpoints.every=5 steps', 'train.log_every=1 steps', 'train.portable=true',
            'train.cpu_threads=2', 'data.workers=0', 'data.threads=2', 'image_px=16,16')
BEST = ('digits', 'batch_size=40', 'train.ema=0', 'evals.test.every=2 steps', 'checkpoints.every=2 steps',
        'data.recipe.mixup=.2', 'checkpoints.keep_best=test/nll', 'checkpoints.keep_latest=1', 'optimizer.lr=.3',
        'optimizer.schedule.warmup=100 %')
"""Such a learning rate makes the loss worse after the first steps, so that the best checkpoint is not the last."""
RUNS = {
    'classification': ('digits', 'batch_size=40', 'train.ema=0', 'evals.test.every=5 steps', 'data.recipe.mixup=.2'),
    'ema': ('from_folder', 'data.source=folder:{root}/folder', 'batch_size=8', 'model.patch=4', 'train.ema=.9',
            'evals.test.every=5 steps', 'checkpoints.keep_best='),
    'dino': ('dino_cifar10:source=folder:{root}/folder', 'batch_size=8', 'objective.out_dim=32',
             'objective.hidden_dim=16', 'objective.bottleneck_dim=8', 'data.recipe.views.local_px=8',
             'evals.knn.every=12 steps', 'evals.knn.batch_size=20', 'evals.knn.train_split=train',
             'evals.knn.split=test'),
    'captions': ('lit_cifar10:source=folder:{root}/captions', 'batch_size=8', 'objective.prompts=',
                 'objective.bias_init=-2', 'objective.text.width=16', 'objective.text.depth=1',
                 'objective.text.heads=2', 'objective.text.mlp=16', 'evals=caption_retrieval'),
    'mixture': ('from_folder', 'data.source=mix:0.7*folder:{root}/folder,0.3*parquet:{root}/parquet', 'batch_size=8',
                'model.patch=4', 'evals.test.every=5 steps', 'checkpoints.keep_best='),
    'best': (*BEST,),
    'stopped': (*BEST, 'train.early_stop.metric=test/nll', 'train.early_stop.patience=2'),
    'accumulate': ('digits', 'batch_size=40', 'train.accumulate=2', 'evals.test.every=5 steps'),
}


def versions(name: str) -> dict[str, str]:
  """Returns what the stored digest of a run depends on."""
  return {**VERSIONS, **({'processor': surface.processor()} if name == 'captions' else {})}


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  return sets.write(tmp_path_factory.mktemp('sets'))


def arguments(name: str, root: pathlib.Path) -> list[str]:
  config, *more = (one.format(root=root) for one in RUNS[name])
  return [f'--config={config}', *(f'--config.{one}' for one in (*NETWORK, *SETTINGS, *more))]


def train(name: str, root: pathlib.Path, workdir: pathlib.Path, *more: str) -> None:
  done = runs.command('--job=train', f'--workdir={workdir}', *arguments(name, root), *more)
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def summary(workdir: pathlib.Path) -> str:
  """Returns digest of the parameters, losses of each step, and final metrics, as one text."""
  final = runs.final(workdir)
  losses = {step: loss.hex() for step, loss in sorted(runs.losses(workdir).items())}
  metrics = {name: value for name, value in sorted(final['metrics'].items())}
  return surface.text_digest(json.dumps([final['params_digest'], losses, metrics, surface.state_digests(workdir)]))


@pytest.mark.slow(reason='15 s each: three processes')
@pytest.mark.parametrize('name', RUNS)
def test_a_run_and_one_that_was_paused_have_the_stored_bits(
    name: str, root: pathlib.Path, tmp_path: pathlib.Path) -> None:
  train(name, root, tmp_path / 'whole')
  train(name, root, tmp_path / 'paused', '--until=7 steps')
  train(name, root, tmp_path / 'paused')
  surface.stored(f'run/{name}', lambda: summary(tmp_path / 'whole'), versions(name))
  assert summary(tmp_path / 'whole') == summary(tmp_path / 'paused')


@pytest.mark.slow(reason='8 s each: two processes')
@pytest.mark.parametrize('name', ['ema', 'dino', 'mixture', 'best'])
def test_a_killed_run_has_the_stored_bits(name: str, root: pathlib.Path, tmp_path: pathlib.Path) -> None:
  process = runs.begin('--job=train', f'--workdir={tmp_path}', *arguments(name, root))
  runs.wait_for_checkpoint(process, tmp_path)
  runs.kill(process)
  train(name, root, tmp_path)
  surface.stored(f'run/{name}', lambda: summary(tmp_path), VERSIONS)


@pytest.mark.slow(reason='8 s: a process')
def test_checkpoints_by_the_clock_do_not_change_a_run(tmp_path: pathlib.Path) -> None:
  train('classification', tmp_path, tmp_path / 'clock', '--config.checkpoints.every=0.001 minutes')
  surface.stored('run/classification', lambda: summary(tmp_path / 'clock'), VERSIONS)


def extracted(name: str, tmp_path: pathlib.Path) -> pathlib.Path:
  """Returns the directory of a run that was paused after step 7, as the first format has it."""
  with tarfile.open(pathlib.Path(__file__).with_name(f'{name}_run.tar.xz')) as archive:
    archive.extractall(tmp_path, filter='data')
  return tmp_path / name


@pytest.mark.parametrize(('name', 'run'), [
    ('first', 'classification'),
    pytest.param('best', 'best', marks=pytest.mark.slow(reason='8 s: a process'))])
def test_a_run_directory_of_the_first_format_is_resumed_and_read(name: str, run: str, tmp_path: pathlib.Path) -> None:
  workdir = extracted(name, tmp_path)
  train(run, tmp_path, workdir)
  starts = [event['resumed_from'] for event in runs.events(workdir, 'start')]
  assert starts == [None, 7]
  surface.stored(f'run/{run}', lambda: summary(workdir), VERSIONS)
  if name == 'best':
    assert sorted(path.name for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit()) == ['12', '6']
