"""Searches: rungs, which runs continue, what is decided once, the table, the best config.

A stand-in for the train job gives each run a result by its learning rate; the last test runs the real one.
"""
from __future__ import annotations

import csv
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest

from vit_jax import main
from vit_jax.config import engine, files, schema, searches
from vit_jax.core.errors import UserError
from vit_jax.study import halving, job
from vit_jax.study import runs as study_runs
from vit_jax.train import hooks

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAND_IN = """
import json, pathlib, sys
parent, job, config, workdir, *rest = sys.argv[1:]
config = json.load(open(config.removeprefix('--config=')))
workdir = pathlib.Path(workdir.removeprefix('--workdir='))
until = rest[0].removeprefix('--until=') if rest else ''
with open(workdir.parent / 'order', 'a') as file:
  file.write(f'{workdir.name} {until}\\n')
rate, fault = config['optimizer']['lr'], workdir.parent.parent / f'fault_{workdir.name}'
if fault.exists():
  print(f'error: {fault.read_text()}')
  sys.exit(75 if 'storage' in fault.read_text() else 2)
share = float(until.removesuffix(' %')) / 100 if until else 1
(workdir / 'checkpoints' / '1').mkdir(parents=True, exist_ok=True)
flops = workdir.parent.parent / 'flops'
exaflops = share * (float(flops.read_text()) / 1e18 if flops.exists() else 1.)
before = max((json.loads(path.read_text())['step'] for path in workdir.glob('paused*')), default=None)
with open(workdir / 'metrics.jsonl', 'a') as file:
  for event in ({'event': 'start', 'time_s': 0., 'devices': 2, 'resumed_from': before},
                {'event': 'goodput', 'time_s': 1., 'step': round(800 * share), 'seconds': {
                    'startup': 360., 'step': 3600. * (share - (before or 0) / 800)}}):
    file.write(json.dumps(event) + '\\n')
text = json.dumps({'step': round(800 * share), 'seconds': 2., 'num_params': 11, 'exaflops': exaflops, 'top1': .5,
                   'metrics': {'val/nll': abs(rate - .5) + 1 - share, 'val/top1': .1}})
(workdir / 'evaluate.json').write_text(text)
(workdir / (f'paused_{until.replace(" ", "")}.json' if until else 'final.json')).write_text(text)
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
  if 'real' not in request.node.name:
    (tmp_path / 'stand_in.py').write_text(STAND_IN)
    monkeypatch.setattr(study_runs, 'CHILD', (str(tmp_path / 'stand_in.py'),))
    monkeypatch.setattr(job, 'POLL_S', .02)


def study(method: schema.SearchMethod, **more: object) -> schema.Study:
  base = schema.Config(
      name='tiny', length='8 steps', image_px=(32, 32), evals={'val': schema.TopK()},
      model=schema.ViT(patch=8, width=32, depth=2, heads=2, mlp=schema.Mlp(48)),
      data=schema.Data(num_examples=1_000, num_classes=7))
  ranges = {'optimizer.lr': schema.Uniform(0., 1.), 'optimizer.weight_decay': schema.Choices((0., .1))}
  search = schema.Search(base, ranges, metric='val/nll', method=method)
  return searches.expanded(schema.Study('mine', search=search, **more))  # type: ignore[arg-type]


def rates(one: schema.Study) -> list[str]:
  """The names of the runs by their results, the best first."""
  return sorted(one.runs, key=lambda name: abs(one.runs[name].optimizer.lr - .5))  # type: ignore[arg-type]


def order(workdir: pathlib.Path) -> list[str]:
  return (workdir / 'runs' / 'order').read_text().splitlines()


def table(workdir: pathlib.Path) -> list[dict[str, str]]:
  with open(workdir / 'table.csv', newline='') as file:
    return list(csv.DictReader(file))


@pytest.mark.parametrize(('method', 'expected'), [
    (schema.Halving(16, 4), [('6.25 %', 16), ('25 %', 4), ('', 1)]),
    (schema.Halving(16, 4, 2), [('25 %', 16), ('', 4)]),
    (schema.Halving(10, 3), [('11.1111 %', 10), ('33.3333 %', 3), ('', 1)]),
    (schema.Halving(8, 2), [('12.5 %', 8), ('25 %', 4), ('50 %', 2), ('', 1)]),
    (schema.Halving(3, 4), [('', 3)]), (schema.Sobol(5), [('', 5)])])
def test_rungs_are_powers_of_the_factor(method: schema.SearchMethod, expected: list[tuple[str, int]]) -> None:
  assert [tuple(rung) for rung in halving.rungs(method)] == expected


def test_the_best_at_each_rung_continue_and_the_best_of_all_is_a_config(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  one = study(schema.Halving(8, 2))
  best = rates(one)
  assert job.run(one, tmp_path) == 0
  expected = [f'{name} 12.5 %' for name in one.runs]
  for part, number in (('25 %', 4), ('50 %', 2), ('', 1)):
    expected += [f'{name} {part}' for name in one.runs if name in best[:number]]
  assert order(tmp_path) == expected
  said = capsys.readouterr().out
  assert 'mine: 8 runs to 12.5 % in' in said and '4 runs to 25 %, chosen by the results, in' in said
  assert '1 of 8 runs are finished, 7 paused' in said and f'] {best[0]}: paused at 50 %, 50.00%, 2 s' in said
  point = one.runs[best[0]].optimizer
  assert (f'Best: {best[0]}, val/nll {abs(point.lr - .5):.4g} after 800 steps (100 %): '  # type: ignore[operator]
          f'--config.optimizer.lr={point.lr} '  # type: ignore[union-attr]
          f'--config.optimizer.weight_decay={point.weight_decay}') in said  # type: ignore[union-attr]
  assert files.load(str(tmp_path / 'best.json'), []) == one.runs[best[0]]
  rows = table(tmp_path)
  assert [row['run'] for row in rows[:2]] == best[:2] and {row['run'] for row in rows[:4]} == set(best[:4])
  assert [row['part %'] for row in rows] == ['100.0', '50.0', '25.0', '25.0', *['12.5'] * 4]
  assert float(rows[0]['at 12.5 %']) == pytest.approx(abs(point.lr - .5) + .875, rel=1e-4)  # type: ignore[operator]
  assert rows[0]['at 50 %'] and not rows[2]['at 50 %'] and rows[0]['step'] == '800'
  assert float(rows[0]['optimizer.lr']) == point.lr
  assert (tmp_path / 'figure.png').is_file() and main.run(['report', f'--workdir={tmp_path}']) == 0
  assert best[0] in capsys.readouterr().out.splitlines()[1]


def test_more_points_use_the_results_of_the_fewer_ones(tmp_path: pathlib.Path) -> None:
  assert job.run(study(schema.Sobol(4)), tmp_path) == 0
  assert job.run(study(schema.Sobol(8)), tmp_path) == 0
  assert order(tmp_path) == [f'point{number:03} ' for number in range(8)]
  assert [row['run'] for row in table(tmp_path)] == rates(study(schema.Sobol(8)))
  with pytest.raises(UserError, match='expected a directory of the same search.*\n  rungs: .*100 %.* -> .*25 %'):
    job.run(study(schema.Halving(16, 4)), tmp_path)


def test_more_points_of_halving_are_compared_at_the_same_rungs(tmp_path: pathlib.Path) -> None:
  assert job.run(study(schema.Halving(4, 2, 2)), tmp_path) == 0
  assert job.run(study(schema.Halving(8, 2, 2)), tmp_path) == 0
  many = study(schema.Halving(8, 2, 2))
  few, best = rates(study(schema.Halving(4, 2, 2)))[:2], rates(many)[:4]
  new = [f'{name} ' for name in many.runs if name in best and name not in few]
  assert order(tmp_path)[6:] == [f'point{number:03} 50 %' for number in range(4, 8)] + new


def test_a_decision_stands_when_the_search_is_started_again(tmp_path: pathlib.Path) -> None:
  one = study(schema.Halving(4, 2))
  best = rates(one)
  fault = tmp_path / f'fault_{best[0]}'
  fault.write_text('the data is not there')
  assert job.run(one, tmp_path) == 2
  assert order(tmp_path)[-1] == f'{best[1]} ' and best[0] not in order(tmp_path)[5]
  fault.unlink()
  assert job.run(one, tmp_path) == 0 and order(tmp_path)[7:] == [f'{best[0]} 25 %']
  assert [row['run'] for row in table(tmp_path)][0] == best[1]


def test_a_failure_that_may_pass_is_waited_for_before_a_decision(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  one = study(schema.Halving(4, 4))
  best = rates(one)
  (tmp_path / f'fault_{best[0]}').write_text('storage failed')
  assert job.run(one, tmp_path) == 75
  assert f'{best[0]}: expected results at 25 %, got none, for a reason that may pass' in capsys.readouterr().out
  (tmp_path / f'fault_{best[0]}').unlink()
  assert job.run(one, tmp_path) == 0 and order(tmp_path)[4:] == [f'{best[0]} 25 %', f'{best[0]} ']


def test_a_run_that_diverges_is_out_and_no_failure_of_the_search(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  one = study(schema.Halving(4, 2))
  best = rates(one)
  (tmp_path / f'fault_{best[0]}').write_text(f'Step 3 {hooks.NOT_FINITE} nan, gradient norm nan.')
  assert job.run(one, tmp_path) == 0 and order(tmp_path)[-1] == f'{best[1]} '
  assert f'1 failed: {best[0]}' in capsys.readouterr().out
  number = len(order(tmp_path))
  assert job.run(one, tmp_path) == 0 and len(order(tmp_path)) == number  # nor is it tried again


def test_without_any_result_there_is_nothing_to_continue(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  for number in range(4):
    (tmp_path / f'fault_point{number:03}').write_text('the data is not there')
  assert job.run(study(schema.Halving(4, 4)), tmp_path) == 2
  assert 'expected at least one run with a finite val/nll at 25 %, got none' in capsys.readouterr().out
  assert not (tmp_path / 'best.json').exists()


def test_a_metric_that_runs_do_not_have_is_named(tmp_path: pathlib.Path) -> None:
  one = study(schema.Sobol(2))
  one = dataclasses.replace(one, search=dataclasses.replace(one.search, metric='val/top9'))  # type: ignore[type-var]
  with pytest.raises(UserError, match="search.metric: expected one of val/nll, val/top1, got 'val/top9'"):
    job.run(one, tmp_path)


def in_tasks(one: schema.Study, workdir: pathlib.Path, count: int, patch: pytest.MonkeyPatch) -> dict[int, int]:
  """Runs a study as the tasks of a cluster, side by side; the exit statuses by index."""
  statuses: dict[int, int] = {}
  patch.setattr(job.signal, 'signal', lambda *_: None)  # handlers are set by the main thread alone
  patch.setattr(os, 'getpid', threading.get_native_id)  # names of temporary files
  tasks = [threading.Thread(target=lambda i=i: statuses.update(
      {i: job.Coordinator(one, workdir, 1, dict(os.environ), (i, count)).run()})) for i in range(count)]
  for task in tasks:
    task.start()
  for task in tasks:
    task.join(240)
  return statuses


@pytest.mark.slow(reason='3 s: three coordinators; tests/study/test_job.py has tasks that wait for a stage')
def test_tasks_of_a_cluster_wait_for_each_other_at_each_rung(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  one = study(schema.Halving(8, 2))
  assert in_tasks(one, tmp_path, 3, monkeypatch) == {0: 0, 1: 0, 2: 0}
  best, found = rates(one), order(tmp_path)
  assert sorted(found[:8]) == [f'{name} 12.5 %' for name in one.runs]
  assert sorted(found[8:12]) == sorted(f'{name} 25 %' for name in best[:4])
  assert sorted(found[12:14]) == sorted(f'{name} 50 %' for name in best[:2]) and found[14:] == [f'{best[0]} ']
  assert [row['run'] for row in table(tmp_path)][:2] == best[:2]


def test_the_method_is_on_the_command_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  words = ['study', '--config=digits_search', f'--workdir={tmp_path}', '--search=halving:9,factor=3']
  assert main.run([*words, '--dry_run', '--topology=cpu:8']) == 0
  assert 'point008' in (said := capsys.readouterr().out) and 'point009' not in said
  assert re.search(r'^point008: optimizer.lr=\S+, .*batch_size=(64|128)', said, re.M)
  total, = re.findall(r'In total ([0-9.e-]+) exaFLOPs', said)
  halved, = re.findall(
      r'halving trains 9 to 11.1111 %, 3 to 33.3333 %, 1 to 100 %: about ([0-9.e-]+) exaFLOPs and', said)
  assert float(halved) / float(total) == pytest.approx((9 / 9 + 3 * 2 / 9 + 2 / 3) / 9, rel=.02)
  assert main.run(['study', '--config=digits', f'--workdir={tmp_path}', '--search=sobol:4']) == 2
  assert '--search: expected a study with ranges of settings, got one without' in capsys.readouterr().err
  assert main.run([*words[:-1], '--search=random:4']) == 2
  assert '--search: expected sobol:POINTS or halving:POINTS,factor=F,rungs=R, got' in capsys.readouterr().err


REAL = """
from vit_jax.config import schema as s

def get_config():
  base = s.Config(length='32 steps', batch_size=40, image_px=(16, 16),
    data=s.Data(source='digits', recipe=s.Recipe(crop=s.Crop.RESIZE, flip=True)),
    optimizer=s.AdamW(schedule=s.Schedule(s.Decay.COSINE, warmup='10 %')),
    model=s.ViT(patch=4, width=16, depth=1, heads=2, dropout=.1, mlp=s.Mlp(16)), train=s.Train(ema=.9),
    evals={'val': s.TopK(every='12 steps', batch_size=80)}, checkpoints=s.Checkpoints(every='5 steps'))
  return s.Study('real', search=s.Search(base, {'optimizer.lr': s.LogUniform(1e-4, 1e-1)}, metric='val/nll',
                                         method=s.Halving(4, factor=2)))
"""


@pytest.mark.slow(reason='nine starts of real runs, of which one is killed: two minutes')
def test_a_real_search_survives_a_kill_and_its_finalist_is_the_run_without_it_bit_for_bit(
    tmp_path: pathlib.Path) -> None:
  (tmp_path / 'real.py').write_text(REAL)
  command = [sys.executable, '-m', 'vit_jax.main', 'study', f'--config={tmp_path / "real.py"}',
             f'--workdir={tmp_path / "w"}']
  environ = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {'PYTHONPATH': str(ROOT)}
  first = subprocess.Popen(command, env=environ, start_new_session=True)
  while not (tmp_path / 'w' / 'runs' / 'point002' / 'checkpoints').is_dir():
    assert first.poll() is None
  os.killpg(first.pid, 9)
  first.wait()
  again = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
  assert again.returncode == 0, again.stdout + again.stderr
  assert '1 of 4 runs are finished, 3 paused' in again.stdout
  best = engine.read_file(tmp_path / 'w' / 'best.json')
  (folder,) = [path for path in (tmp_path / 'w' / 'runs').iterdir() if (path / 'final.json').is_file()]
  assert engine.read_file(folder / 'config.json').optimizer.lr == best.optimizer.lr
  assert {path.name for path in folder.glob('paused_*')} == {'paused_25%.json', 'paused_50%.json'}
  alone = subprocess.run([sys.executable, '-m', 'vit_jax.main', 'train', f'--config={tmp_path / "w" / "best.json"}',
                          f'--workdir={tmp_path / "alone"}'], env=environ, capture_output=True, text=True, check=False)
  assert alone.returncode == 0, alone.stdout + alone.stderr
  found, expected = (json.loads((path / 'final.json').read_text()) for path in (folder, tmp_path / 'alone'))
  assert found['params_digest'] == expected['params_digest'] and found['metrics'] == expected['metrics']
