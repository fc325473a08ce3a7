"""The trackers of a run by its config.

The packages of Weights & Biases and MLflow are replaced by small fakes with the calls that are used; the last tests run
with the real ones where these are installed.
"""
from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import pathlib
import sys
import types
from typing import Any

import numpy as np
import pytest

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError
from vit_jax.jobs import trackers
from vit_jax.record.trackers import Histogram

HISTOGRAM = Histogram(np.ones(2), np.arange(3.), 1., 1.)
IMAGES = np.zeros((2, 4, 4, 3), np.uint8)


class Wandb(types.ModuleType):
  """Keeps the calls of `wandb.init` and of its run."""

  def __init__(self) -> None:
    super().__init__('wandb')
    self.__spec__ = importlib.machinery.ModuleSpec('wandb', None)
    self.inits: list[dict[str, Any]] = []
    self.logged: list[dict[str, Any]] = []
    self.metrics: list[tuple[str, str | None]] = []
    self.codes: list[int] = []

  def init(self, **given: Any) -> Wandb:
    self.inits.append(given)
    return self

  def define_metric(self, name: str, step_metric: str | None = None) -> None:
    self.metrics.append((name, step_metric))

  def log(self, row: dict[str, Any]) -> None:
    self.logged.append(row)

  def finish(self, exit_code: int) -> None:
    self.codes.append(exit_code)

  Image = staticmethod(lambda image: ('image', image.shape))
  Histogram = staticmethod(lambda np_histogram: ('histogram', *np_histogram))


class Client:
  """Keeps the calls of `MlflowClient`."""
  runs: dict[str, dict[str, Any]] = {}

  def get_experiment_by_name(self, name: str) -> None:
    return None

  def create_experiment(self, name: str) -> str:
    return f'id of {name}'

  def create_run(self, experiment: str, run_name: str) -> Any:
    run_id = f'r{len(self.runs)}'
    self.runs[run_id] = {'experiment': experiment, 'name': run_name, 'params': {}, 'metrics': [], 'status': 'RUNNING'}
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

  def update_run(self, run_id: str, status: str) -> None:
    self.runs[run_id]['status'] = status

  def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
    assert len(params) <= 100  # of one request
    self.runs[run_id]['params'] |= {one.key: one.value for one in params}
    self.runs[run_id]['metrics'] += [(one.key, one.value, one.step) for one in metrics]

  def log_image(self, run_id: str, image: Any, key: str, step: int) -> None:
    self.runs[run_id]['metrics'].append((key, image.shape, step))

  def set_terminated(self, run_id: str, status: str) -> None:
    self.runs[run_id]['status'] = status


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Wandb:
  wandb = Wandb()
  named = {'wandb': wandb, 'mlflow': types.ModuleType('mlflow'), 'mlflow.tracking': types.ModuleType('tracking'),
           'mlflow.entities': types.ModuleType('entities')}
  named['mlflow'].__spec__ = importlib.machinery.ModuleSpec('mlflow', None)
  named['mlflow.tracking'].MlflowClient = Client  # type: ignore[attr-defined]
  named['mlflow.entities'].Param = lambda key, value: types.SimpleNamespace(key=key, value=value)  # type: ignore[attr-defined]
  named['mlflow.entities'].Metric = lambda key, value, time_ms, step: types.SimpleNamespace(  # type: ignore[attr-defined]
      key=key, value=value, step=step)
  named['mlflow'].tracking, named['mlflow'].entities = named['mlflow.tracking'], named['mlflow.entities']  # type: ignore[attr-defined]
  for name, module in named.items():
    monkeypatch.setitem(sys.modules, name, module)
  monkeypatch.setattr(Client, 'runs', {})
  return wandb


def use(config: schema.Config, workdir: pathlib.Path, *, resumed_from: int | None, status: Any = 'done') -> None:
  """A start of a run: two rows, images and histograms."""
  found = trackers.opener(config, workdir, resumed_from)(str(workdir))
  for one in found:
    one.do(lambda tracker: tracker.write(5, {'train/loss': 2., 'test/top1@ema': .5}))
    one.do(lambda tracker: tracker.images(5, {'train/images': IMAGES}))
    one.do(lambda tracker: tracker.histograms(6, {'params/head': HISTOGRAM}))
    one.close(status)


CONFIG = schema.Config(name='mine', trackers=schema.Trackers(tensorboard=False, wandb='team/proj', mlflow='exp'))


def test_weights_and_biases_gets_metrics_settings_and_resumes_its_run(fakes: Wandb, tmp_path: pathlib.Path) -> None:
  use(CONFIG, tmp_path, resumed_from=None)
  use(CONFIG, tmp_path, resumed_from=4, status='failed')
  first, second = fakes.inits
  assert (first['entity'], first['project'], first['name'], first['resume']) == ('team', 'proj', 'mine', 'allow')
  assert first['id'] == second['id'] == json.loads((tmp_path / trackers.FILE).read_text())['wandb']
  assert first['config']['optimizer.lr'] == '0.001' and fakes.metrics[:2] == [('step', None), ('*', 'step')]
  assert fakes.logged[0] == {'train/loss': 2., 'test/top1@ema': .5, 'step': 5}
  assert fakes.logged[1] == {'train/images': [('image', (4, 4, 3))] * 2, 'step': 5}
  assert fakes.logged[2] == {'params/head': ('histogram', [1., 1.], [0., 1., 2.]), 'step': 6}
  assert fakes.codes == [0, 1]
  use(CONFIG, tmp_path, resumed_from=None)
  assert fakes.inits[2]['id'] != first['id']  # a new run in the same directory


def test_mlflow_gets_metrics_settings_and_resumes_its_run(fakes: Wandb, tmp_path: pathlib.Path) -> None:
  use(CONFIG, tmp_path, resumed_from=None, status='stopped')
  run = Client.runs['r0']
  assert (run['experiment'], run['name'], run['status']) == ('id of exp', 'mine', 'KILLED')
  assert run['params']['optimizer.lr'] == '0.001' and len(run['params']) > 100
  assert run['metrics'] == [('train/loss', 2., 5), ('test/top1_ema', .5, 5), ('train/images/0', (4, 4, 3), 5),
                            ('train/images/1', (4, 4, 3), 5)]
  use(CONFIG, tmp_path, resumed_from=4)
  assert len(Client.runs) == 1 and run['status'] == 'FINISHED' and len(run['metrics']) == 8


def test_tensorboard_alone_is_the_default(tmp_path: pathlib.Path) -> None:
  use(schema.Config(), tmp_path, resumed_from=None)
  assert [path.name.startswith('events.') for path in tmp_path.iterdir()] == [True]


def test_a_missing_package_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match=r"trackers.wandb: expected the Python package wandb, got none. Run: "
                                      r"pip install 'wandb>="):
    trackers.check(schema.Config(trackers=schema.Trackers(wandb='x')))
  trackers.check(schema.Config())


@pytest.mark.parametrize(('settings', 'said'), [
    (schema.Trackers(wandb='a/b/c'), "trackers.wandb: expected PROJECT, ENTITY/PROJECT or ''"),
    (schema.Trackers(wandb='/b'), "trackers.wandb: expected PROJECT, ENTITY/PROJECT or ''"),
    (schema.Trackers(tensorboard=False, images=3), 'trackers.images: expected its default 0'),
    (schema.Trackers(tensorboard=False, histograms='1 epoch'), 'trackers.histograms: expected its default'),
    (schema.Trackers(images=65), 'trackers.images: expected 0 to 64')])
def test_settings_without_a_meaning_are_errors(settings: schema.Trackers, said: str) -> None:
  assert any(text.startswith(said) for text in check.problems(schema.Config(trackers=settings), of='trackers'))


def has(package: str) -> bool:
  return importlib.util.find_spec(package) is not None


@pytest.mark.skipif(not has('wandb'), reason='needs wandb, an extra that the tests do without')
@pytest.mark.slow(reason='starts the service of wandb: 10 s')
def test_the_real_package_of_weights_and_biases_takes_it_offline(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.chdir(tmp_path)
  use(schema.Config(trackers=schema.Trackers(tensorboard=False, wandb='x')), tmp_path, resumed_from=None)
  assert not caplog.messages and list(tmp_path.glob('wandb/offline-run-*/*.wandb'))


@pytest.mark.skipif(not has('mlflow'), reason='needs mlflow, an extra that the tests do without')
@pytest.mark.slow(reason='makes a database: 10 s')
def test_the_real_package_of_mlflow_takes_it_in_a_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setenv('MLFLOW_TRACKING_URI', f'sqlite:///{tmp_path}/mlflow.db')
  monkeypatch.chdir(tmp_path)
  config = schema.Config(name='mine', trackers=schema.Trackers(tensorboard=False, mlflow='x'))
  use(config, tmp_path, resumed_from=None)
  use(config, tmp_path, resumed_from=4)
  from mlflow import MlflowClient
  client = MlflowClient()
  (run,) = client.search_runs([client.get_experiment_by_name('x').experiment_id])
  assert not caplog.messages and run.info.status == 'FINISHED' and run.data.params['optimizer.lr'] == '0.001'
  assert [(one.value, one.step) for one in client.get_metric_history(run.info.run_id, 'train/loss')] == [(2., 5)] * 2
