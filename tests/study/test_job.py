"""Studies: order, resuming, failures, several processes, stopping, the table; with a stand-in for the train job.

The stand-in does what its config's name says; the last tests run the real one.
"""
from __future__ import annotations

import csv
import dataclasses
import errno
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import IO

import pytest

from vit_jax import main
from vit_jax.config import engine, files, schema
from vit_jax.core.errors import UserError
from vit_jax.recipes import studies
from vit_jax.record import run_directory
from vit_jax.study import child as study_child
from vit_jax.study import estimate, job
from vit_jax.study import runs as study_runs
from vit_jax.study import table as study_table

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAND_IN = """
import json, pathlib, signal, sys, time
parent, job, config, workdir = sys.argv[1:]
config = json.load(open(config.removeprefix('--config=')))
workdir = pathlib.Path(workdir.removeprefix('--workdir='))
what, rate = config['name'].split(), config['optimizer']['lr']
with open(workdir.parent / 'order', 'a') as file:
  file.write(workdir.name + '\\n')
def stop(*_):
  (workdir / 'checkpoints' / '5').mkdir(parents=True, exist_ok=True)
  sys.exit(75)
signal.signal(signal.SIGTERM, stop)
if 'crash' in what:
  raise RuntimeError('out of luck')
if 'fault' in what:
  print('hello\\nerror: the data is not there\\nwant it')
  sys.exit(2)
while 'wait' in what and not (workdir.parent / 'go').exists():
  time.sleep(.02)
(workdir / 'final.json').write_text(json.dumps({
    'step': 7, 'seconds': 3.5, 'num_params': 11, 'exaflops': 2e-6,
    'metrics': {'val/top1': 1 - rate, 'val/top1@ema': rate}}))
(workdir / 'evaluate.json').write_text(json.dumps({'top1': rate + config['seed'] / 100}))
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
  if 'real' not in request.node.name:
    (tmp_path / 'stand_in.py').write_text(STAND_IN)
    monkeypatch.setattr(study_runs, 'CHILD', (str(tmp_path / 'stand_in.py'),))


def config(what: str = '', rate: float = .5, seed: int = 0, **more: object) -> schema.Config:
  return schema.Config(name=f'a {what}', seed=seed, length='3 steps', image_px=(32, 32),
                       optimizer=schema.AdamW(lr=rate),
                       model=schema.ViT(patch=8, width=32, depth=2, heads=2, mlp=schema.Mlp(48)),
                       data=schema.Data(num_examples=100, num_classes=7), **more)  # type: ignore[arg-type]


def start(workdir: pathlib.Path, runs: dict[str, schema.Config] | schema.Study, processes: int = 1) -> int:
  found = runs if isinstance(runs, schema.Study) else schema.Study('mine', runs)
  return job.run(found, workdir, processes=processes, dry_run=False, topology='')


def order(workdir: pathlib.Path) -> list[str]:
  return (workdir / 'runs' / 'order').read_text().split()


def table(workdir: pathlib.Path) -> list[dict[str, str]]:
  with open(workdir / 'table.csv', newline='') as file:
    return list(csv.DictReader(file))


def test_runs_start_in_order_and_end_in_a_table(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert start(tmp_path, {'b': config(), 'a': config(rate=.25), 'c=1': config(rate=.75)}) == 0
  assert order(tmp_path) == ['b', 'a', 'c=1']
  rows = table(tmp_path)
  assert [(row['run'], row['headline']) for row in rows] == [('b', '0.5'), ('a', '0.25'), ('c=1', '0.75')]
  assert rows[1]['val/top1'] == '0.75' and rows[1]['parameters'] == '11' and rows[1]['exaFLOPs'] == '2e-06'
  page = (tmp_path / 'table.html').read_text()
  assert 'data:image/png;base64,' in page and 'c=1' in page and 'http' not in page and 'Not in this table' not in page
  assert (tmp_path / 'figure.png').read_bytes().startswith(b'\x89PNG')
  assert files.load(str(tmp_path / 'runs' / 'a' / 'config.json'), []) == config(rate=.25)
  said = capsys.readouterr().out
  assert '[2/3] a: started' in said and '[2/3] a: 25.00%, 4 s' in said and '3 of 3 runs are finished. Table: ' in said


def test_finished_runs_are_not_repeated(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert start(tmp_path, {'a': config()}) == 0 and start(tmp_path, {'a': config(), 'b': config()}) == 0
  said = capsys.readouterr().out
  assert order(tmp_path) == ['a', 'b'] and '2 runs in' in said and '1 of them finished' in said


@pytest.mark.parametrize('code', [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_an_error_and_the_study_does_not_wait_forever(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
  def refuse(*_: object) -> None:
    raise OSError(code, os.strerror(code))

  monkeypatch.setattr(study_runs.files.fcntl, 'flock', refuse)
  with pytest.raises(UserError, match=rf'--workdir={tmp_path}: expected a file system with locks \(flock\), got '
                     f'"{os.strerror(code)}"'):
    study_runs.begin(study_runs.Task('a', config(), tmp_path), {})


def test_a_started_run_is_resumed_where_only_files_open_for_writing_can_be_locked(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """NFS makes `flock` a lock of bytes, which needs a file that is open for writing."""
  lock = study_runs.files.fcntl.flock

  def as_on_nfs(file: IO[str], operation: int) -> None:
    if not file.writable():
      raise OSError(9, 'Bad file descriptor')
    lock(file, operation)

  monkeypatch.setattr(study_runs.files.fcntl, 'flock', as_on_nfs)
  monkeypatch.setattr(study_runs, 'CHILD', ('-c', 'pass'))
  (tmp_path / '.lock').write_text('7')
  process = study_runs.begin(study_runs.Task('a', config(), tmp_path), dict(os.environ))
  assert process is not None
  while process.poll() is None:
    time.sleep(.01)
  assert process.poll() == 0 and (tmp_path / '.lock').read_text() == '7'


def test_a_failed_run_whose_output_was_removed_has_not_diverged(tmp_path: pathlib.Path) -> None:
  (tmp_path / study_runs.FAILED).write_text('2\n')
  task = study_runs.Task('a', config(), tmp_path)
  assert task.failure == 2 and not task.has_diverged


def test_a_failed_run_leaves_the_others_going_and_is_tried_again(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert start(tmp_path, {'a': config('fault'), 'b': config('crash'), 'c': config()}) == 2
  said = capsys.readouterr().out
  assert '[1/3] a: failed with exit status 2; the other runs continue.\nerror: the data is not there\nwant it\n' in said
  assert 'hello' not in said and 'RuntimeError: out of luck' in said
  assert '1 of 3 runs are finished, 2 failed: a, b. Table: ' in said
  assert [row['run'] for row in table(tmp_path)] == ['c']
  page = (tmp_path / 'table.html').read_text()
  assert 'Not in this table' in page and 'the data is not there' in page
  assert start(tmp_path, {'a': config(), 'b': config('crash'), 'c': config()}) == 70
  assert order(tmp_path) == ['a', 'b', 'c', 'a', 'b'] and [r['run'] for r in table(tmp_path)] == ['a', 'c']


def test_a_run_that_was_made_with_other_settings_is_refused(tmp_path: pathlib.Path) -> None:
  assert start(tmp_path, {'a': config()}) == 0
  with pytest.raises(UserError, match='got .*/a with others:\n  optimizer.lr: 0.5 -> 0.25\nUse'):
    start(tmp_path, {'a': config(rate=.25)})


def test_settings_that_an_older_run_did_not_have_are_no_difference(tmp_path: pathlib.Path) -> None:
  assert start(tmp_path, {'a': config()}) == 0
  path = tmp_path / 'runs' / 'a' / 'config.json'
  saved = json.loads(path.read_text())
  del saved['train']['log_every']
  path.write_text(json.dumps(saved))
  assert start(tmp_path, {'a': config()}) == 0


def test_the_layout_that_a_run_chose_on_its_devices_is_no_difference(tmp_path: pathlib.Path) -> None:
  assert start(tmp_path, {'a': config()}) == 0
  path = tmp_path / 'runs' / 'a' / 'config.json'
  saved = json.loads(path.read_text())
  assert (saved['mesh']['fsdp'], saved['model']['remat']) == (0, 'auto')
  saved['mesh'] |= {'fsdp': 1, 'tensor': 1, 'chosen': ['mesh.fsdp', 'mesh.tensor', 'model.remat'],
                    'chosen_for': '1 x cpu'}
  saved['model']['remat'] = 'none'
  path.write_text(json.dumps(saved))
  assert start(tmp_path, {'a': config()}) == 0
  saved['mesh']['chosen'] = ['mesh.fsdp', 'mesh.tensor']
  path.write_text(json.dumps(saved))
  with pytest.raises(UserError, match='model.remat: none -> auto'):
    start(tmp_path, {'a': config()})


def chosen(results: schema.Results) -> dict[str, schema.Config]:
  best = studies.best(results, ['low', 'high'])
  return {f'final_{best}_{seed}': dataclasses.replace(results[best].config, seed=seed) for seed in range(3)}


def test_later_runs_follow_from_the_results_of_the_first(tmp_path: pathlib.Path) -> None:
  def summed(results: schema.Results) -> list[schema.Row]:
    found = studies.spread(results, [name for name in results if name.startswith('final_high')])
    return [{'what': 'final', 'mean': found.mean, 'std': found.std, 'runs': found.num}]

  two = schema.Study('two', {'low': config(rate=.1), 'high': config(rate=.9)}, then=(chosen,), table=summed,
                     figures=(schema.Figure('runs', 'mean', error='std'),))
  assert start(tmp_path, two) == 0
  assert order(tmp_path) == ['low', 'high', 'final_high_0', 'final_high_1', 'final_high_2']
  row, = table(tmp_path)
  assert float(row['mean']) == pytest.approx(.91) and float(row['std']) == pytest.approx(.01) and row['runs'] == '3'
  assert (tmp_path / 'figure.png').exists()


def test_the_best_moment_of_a_run_is_found_in_its_record(tmp_path: pathlib.Path) -> None:
  watched = config(evals={'val': schema.TopK()}, train=schema.Train(early_stop=schema.EarlyStop('val/top1')))
  for name, one in {'a': watched, 'b': config()}.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / 'final.json').write_text(json.dumps({
        'step': 7, 'seconds': 3.5, 'num_params': 11, 'exaflops': 2e-6, 'metrics': {'val/top1': .3}}))
    (tmp_path / name / 'evaluate.json').write_text('{"top1": 0.3}')
    lines = [{'step': 2, 'val/top1': .2}, {'step': 4, 'val/top1': .5}, {'step': 4, 'shots/5shot': .1},
             {'step': 6, 'val/top1': .5}, {'step': 6, 'shots/5shot': .9}, {'step': 7, 'train/loss': 1.}]
    (tmp_path / name / 'metrics.jsonl').write_text(''.join(json.dumps(line | {'time_s': 1.}) + '\n' for line in lines))
    best = study_runs.Task(name, one, tmp_path / name).result().best
    assert best == ({'step': 4, 'time_s': 1., 'val/top1': .5, 'shots/5shot': .1} if name == 'a' else {})


def test_curves_are_drawn_and_not_in_the_table(tmp_path: pathlib.Path) -> None:
  def curves(results: schema.Results) -> list[schema.Row]:
    return [{'steps': x, 'headline': x / 9, 'run': 'law'} for x in (1, 9)]

  figures = (schema.Figure('steps', 'headline', series='run', log_x=True),)
  runs = {'a': config(), 'b': config(rate=.25)}
  assert start(tmp_path / 'one', schema.Study('mine', runs, figures=figures, curves=curves)) == 0
  assert start(tmp_path / 'two', schema.Study('mine', runs, figures=figures)) == 0
  assert len(table(tmp_path / 'one')) == 2
  pictures = {(tmp_path / name / 'figure.png').read_bytes() for name in ('one', 'two')}
  assert len(pictures) == 2 and all(one.startswith(b'\x89PNG') for one in pictures)


def test_a_figure_of_runs_that_have_all_diverged_is_drawn() -> None:
  figures = (schema.Figure('size', 'loss', log_x=True, log_y=True),)
  for lost in (math.nan, math.inf):
    drawn = study_table.draw_figure([{'size': 1, 'loss': lost}, {'size': 2, 'loss': lost}], figures)
    assert drawn == study_table.draw_figure([], figures) and drawn.startswith(b'\x89PNG')


def test_a_stage_without_results_to_choose_by_is_reported(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  failing = schema.Study('two', {'low': config('fault'), 'high': config('crash')}, then=(chosen,))
  assert start(tmp_path, failing) == 2
  assert 'expected at least one finished run with an evaluation among low, high, got none.' in capsys.readouterr().out
  assert 'expected at least one finished run with an evaluation' in (tmp_path / 'table.html').read_text()


@pytest.mark.slow(reason='3 s: starts programs')
def test_runs_go_side_by_side(tmp_path: pathlib.Path) -> None:
  runs = {name: config('wait') for name in 'abc'}
  process = in_a_process(tmp_path, runs, 2)
  wait_for(lambda: len(order(tmp_path)) == 2, process)
  time.sleep(.4)
  assert sorted(order(tmp_path)) == ['a', 'b']
  (tmp_path / 'runs' / 'go').touch()
  assert process.wait(60) == 0 and sorted(order(tmp_path)) == ['a', 'b', 'c']


@pytest.mark.slow(reason='6 s: two programs are started')
def test_two_processes_share_the_runs_of_a_study(tmp_path: pathlib.Path) -> None:
  runs = {name: config('wait') for name in 'ab'}
  first = in_a_process(tmp_path, runs, 1)
  wait_for(lambda: order(tmp_path) == ['a'], first)
  second = in_a_process(tmp_path, runs, 1)
  wait_for(lambda: order(tmp_path) == ['a', 'b'], second)
  (tmp_path / 'runs' / 'go').touch()
  assert first.wait(60) == 0 and second.wait(60) == 0 and order(tmp_path) == ['a', 'b']
  assert [row['run'] for row in table(tmp_path)] == ['a', 'b']


@pytest.mark.slow(reason='2 s each: starts a program')
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_is_passed_on_and_the_study_goes_on_later(
    tmp_path: pathlib.Path, number: signal.Signals) -> None:
  runs = {name: config('wait') for name in 'ab'}
  process = in_a_process(tmp_path, runs, 1)
  wait_for(lambda: order(tmp_path) == ['a'], process)
  process.send_signal(number)
  assert process.wait(60) == 75 and (tmp_path / 'runs' / 'a' / 'checkpoints' / '5').is_dir()
  (tmp_path / 'runs' / 'go').touch()
  assert start(tmp_path, runs) == 0 and order(tmp_path) == ['a', 'a', 'b']


@pytest.mark.slow(reason='3 s: starts a program')
def test_a_run_that_somebody_is_at_is_waited_for(tmp_path: pathlib.Path) -> None:
  runs = {'a': config(), 'b': config()}
  with run_directory.locked(tmp_path / 'runs' / 'a'):
    process = in_a_process(tmp_path, runs, 2)
    wait_for(lambda: order(tmp_path) == ['b'], process)
    time.sleep(.3)
    assert order(tmp_path) == ['b'] and process.poll() is None
  assert process.wait(60) == 0 and order(tmp_path) == ['b', 'a']


def in_a_process(workdir: pathlib.Path, runs: dict[str, schema.Config], processes: int) -> subprocess.Popen[bytes]:
  """A study in a process of its own, with the stand-in for the train job."""
  (workdir / 'runs').mkdir(exist_ok=True)
  (workdir / 'runs' / 'order').touch()
  configs = {name: engine.to_json(one) for name, one in runs.items()}
  code = (f'import sys; sys.path.insert(0, {str(ROOT)!r})\n'
          'from vit_jax.config import engine, schema\nfrom vit_jax.study import job, runs as study_runs\n'
          'import pathlib\n'
          f'study_runs.CHILD = ({str(workdir / "stand_in.py")!r},)\n'
          f'runs = {{name: engine.from_json(text) for name, text in {configs!r}.items()}}\n'
          f'sys.exit(job.run(schema.Study("mine", runs), pathlib.Path({str(workdir)!r}), processes={processes!r}, '
          'dry_run=False, topology=""))\n')
  return subprocess.Popen([sys.executable, '-c', code], env=os.environ | {'JAX_PLATFORMS': 'cpu'})


def wait_for(condition: object, process: subprocess.Popen[bytes]) -> None:
  for _ in range(1200):
    if condition():  # type: ignore[operator]
      return
    assert process.poll() is None, 'the study ended early'
    time.sleep(.05)
  raise AssertionError('not in a minute')


def test_a_run_is_asked_to_stop_when_its_study_is_killed(tmp_path: pathlib.Path) -> None:
  code = (f'import os, sys, time; sys.path.insert(0, {str(ROOT)!r})\n'
          'from vit_jax.study import child\nchild.end_with_parent(os.getppid())\n'
          f'open({str(tmp_path / "up")!r}, "w").close()\ntime.sleep(60)')
  outer = f'import subprocess, sys; subprocess.Popen([sys.executable, "-c", {code!r}]).wait()'
  parent = subprocess.Popen([sys.executable, '-c', outer], start_new_session=True)
  wait_for((tmp_path / 'up').exists, parent)
  child = subprocess.run(['pgrep', '-P', str(parent.pid)], capture_output=True, text=True).stdout.strip()
  parent.kill()
  parent.wait()
  for _ in range(100):
    state = pathlib.Path(f'/proc/{child}/stat')
    if not state.exists() or state.read_text().split()[2] == 'Z':
      return
    time.sleep(.05)
  raise AssertionError('the run outlived its study')


def test_a_study_that_is_gone_before_its_run_begins_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
  sent = []
  monkeypatch.setattr(os, 'kill', lambda pid, number: sent.append((pid, number)))
  study_child.end_with_parent(os.getppid())
  assert sent == []
  study_child.end_with_parent(os.getppid() + 1)
  assert sent == [(os.getpid(), signal.SIGTERM)]


@pytest.mark.parametrize(('runs', 'said'), [
    ({}, 'expected a study whose runs have names of letters, .* got no runs'),
    ({'a/b': config(), 'fine': config(), '.x': config()}, r"whose runs have names of letters, .* got 'a/b', '\.x'\."),
    ({'a': config(batch_size=0), 'b': config()}, 'problems:\n  batch_size: expected at least 1, got 0. \\(of a\\)'),
    ({'a': config(batch_size=0), 'b': config(batch_size=0)}, 'expected at least 1, got 0. \\(of all runs\\)'),
])
def test_a_study_that_makes_no_sense_is_refused_before_a_run(
    tmp_path: pathlib.Path, runs: dict[str, schema.Config], said: str) -> None:
  with pytest.raises(UserError, match=said):
    start(tmp_path, runs)
  assert not (tmp_path / 'runs').exists()


def test_missing_data_are_named_before_the_first_run_and_not_for_runs_that_are_finished(tmp_path: pathlib.Path) -> None:
  def of(where: str) -> schema.Config:
    return dataclasses.replace(config(), data=schema.Data(source=f'folder:{where}'))
  with pytest.raises(UserError) as caught:
    start(tmp_path / 'study', {'a': of('PATH'), 'b': of(f'{tmp_path}/none')})
  lines = str(caught.value).splitlines()
  assert 'expected a study whose data are on this machine, got problems:' in lines[0] and len(lines) == 3
  assert 'got the placeholder folder:PATH' in lines[1] and lines[1].endswith('(of a)')
  assert f'folder:{tmp_path}/none: expected a folder of images, got no folder' in lines[2] and '(of b)' in lines[2]
  assert not (tmp_path / 'study').exists()
  job.check_places({'a': of('PATH'), 'c': config()})  # one of them can run
  (tmp_path / 'photos').mkdir()
  assert start(tmp_path / 'study', {'a': of(f'{tmp_path}/photos')}) == 0
  (tmp_path / 'photos').rmdir()
  assert start(tmp_path / 'study', {'a': of(f'{tmp_path}/photos')}) == 0


@pytest.mark.parametrize(('flags', 'said'), [
    ({'topology': 'v3:4x4'}, '--topology: expected --dry_run as well, got --topology=v3:4x4 alone'),
])
def test_flags_that_do_not_go_together_are_refused(tmp_path: pathlib.Path, flags: dict[str, str], said: str) -> None:
  given = {'workdir': tmp_path} | flags
  with pytest.raises(UserError, match=said):
    job.run(schema.Study('mine', {'a': config()}), **given)  # type: ignore[arg-type]


def test_a_process_among_several_starts_no_study(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  for name, value in (('COORDINATOR', 'here:1'), ('NUM_PROCESSES', '2'), ('PROCESS_ID', '1')):
    monkeypatch.setenv(f'VIT_JAX_{name}', value)
  with pytest.raises(UserError, match='got process 1 of 2 .* Set VIT_JAX_DISTRIBUTED=off'):
    start(tmp_path, {'a': config()})


def test_a_dry_run_tells_runs_parameters_flops_and_hours_and_starts_nothing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  two = schema.Study('two', {'low': config(rate=.1), 'high': config(rate=.9)}, then=(chosen,))
  assert job.run(two, None, dry_run=True, topology='v3:4x4') == 0
  said = capsys.readouterr().out
  # 16 patches of 8 px and a class token; blocks of width 32 with 48 hidden units; 7 classes.
  params = 192 * 32 + 32 + 32 + 17 * 32 + 2 * (4 * 33 * 32 + 33 * 48 + 49 * 32 + 4 * 32) + 64 + 33 * 7
  flops = 6 * (16 * 192 * 32 + 2 * (17 * 4 * 32**2 + 2 * 17**2 * 32 + 2 * 17 * 32 * 48) + 32 * 7)
  found = {line.split()[0]: line.split()[1:] for line in said.splitlines()[2:-1]}
  assert list(found) == ['low', 'high', 'final_low_0', 'final_low_1', 'final_low_2']
  exaflops, hours = flops * 3 * 128 / 1e18, flops * 3 * 128 / (32 * 61.5e12 * .4) / 3600
  assert found['high'] == [f'{params:,}', f'{flops / 1e9:.3g}', '3', f'{exaflops:.3g}', f'{hours:.3g}']
  assert f'about {5 * hours:.3g} hours are left' in said and '40% of the peak of v3:4x4' in said
  assert start(tmp_path, two) == 0 and capsys.readouterr()
  assert job.run(two, tmp_path, dry_run=True, topology='') == 0
  said = capsys.readouterr().out
  assert sum(line.endswith(' done') for line in said.splitlines()[1:]) == 5
  assert 'final_high_2' in said and 'about 0 hours are left' in said
  assert '0.571 TFLOP/s: 5 finished runs' in said and order(tmp_path)[2:] == ['final_high_0', 'final_high_1',
                                                                                'final_high_2']


def test_hours_on_a_processor_without_a_known_peak_come_from_a_matrix_product() -> None:
  flops_s, what, number = estimate.probe()
  assert flops_s > 1e8 and what == 'a matrix product on 8 cpu' and number == 8


def test_overrides_are_for_every_run_also_for_later_ones(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'mine.py'
  path.write_text('from vit_jax.config import schema as s\n'
                  'def later(results):\n  return {"c": s.Config(model=s.Mixer())}\n'
                  'def get_config():\n'
                  '  return s.Study("x", {"a": s.Config(), "b": s.Config(model=s.Mixer())}, (later,))\n')
  found = files.load_study(str(path), ['batch_size=24', 'model.patch=4'])
  assert [c.batch_size for c in (*found.runs.values(), *found.then[0]({}).values())] == [24, 24, 24]
  assert found.then[0]({})['c'].model.patch == 4
  with pytest.raises(UserError) as error:
    files.load_study(str(path), ['model.heads=2', 'sed=1'])
  assert 'config.model.heads: expected the name of a setting' in str(error.value) and '(of b)' in str(error.value)
  assert re.search(r'config.sed: expected the name of a setting. Did you mean config.seed\?$', str(error.value),
                   re.MULTILINE)
  with pytest.raises(UserError, match='a study of several. Use vit-jax study'):
    files.load(str(path), [])


def test_a_config_of_one_run_is_a_study_of_one() -> None:
  found = files.load_study('digits', ['seed=3'])
  assert found.runs['run'].seed == 3 and found.name == 'digits' and not found.then


def test_figures_of_columns_that_are_not_there_are_refused(tmp_path: pathlib.Path) -> None:
  odd = schema.Study('x', {}, figures=(schema.Figure('run', 'top1', series='model', log_y=True),))
  result = schema.Result(config(), 'x', 1, 1., 1, 1., {'val/top1': .5}, .5)
  with pytest.raises(UserError, match='expected columns of its table, run, headline, .*got model, top1'):
    study_table.make_rows(odd, {'a': result})


def test_the_best_of_results_and_their_spread() -> None:
  results = {name: schema.Result(config(), 'x', 1, 1., 1, 1., {}, score)
             for name, score in (('a', .5), ('b', None), ('c', .75), ('d', float('nan')), ('e', .75))}
  assert studies.best(results, 'abcdef') == 'c'
  with pytest.raises(UserError, match='at least one finished run with an evaluation among b, d, x, got none'):
    studies.best(results, 'bdx')
  assert studies.spread(results, 'ac') == (.625, pytest.approx(.1767767), 2)
  assert studies.spread(results, 'b').num == 0


def test_results_that_cannot_be_read_are_said(tmp_path: pathlib.Path) -> None:
  assert start(tmp_path, {'a': config()}) == 0
  (tmp_path / 'runs' / 'a' / 'final.json').write_text('{"step": 3}')
  with pytest.raises(UserError, match='final.json: expected the field seconds, got .*. Restore'):
    start(tmp_path, {'a': config()})


REAL = """
import dataclasses
from vit_jax.config import schema as s
from vit_jax.recipes import studies

def one(rate):
  return s.Config(length='12 steps', batch_size=40, image_px=(16, 16), optimizer=s.AdamW(lr=rate),
    data=s.Data(source='digits', recipe=s.Recipe(crop=s.Crop.RESIZE)),
    model=s.ViT(patch=4, width=16, depth=1, heads=2, mlp=s.Mlp(16)),
    evals={'test': s.TopK(every='9 steps', batch_size=80)},
    checkpoints=s.Checkpoints(every='4 steps'))

def get_config():
  return s.Study('real', {f'rate{rate}': one(rate) for rate in (.001,)}, then=(
    lambda results: {'final': dataclasses.replace(results[studies.best(results, results)].config, seed=1)},))
"""


@pytest.mark.slow(reason='two real runs one after the other, of which one is killed: about a minute')
def test_a_real_study_survives_a_kill(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'real.py').write_text(REAL)
  command = [sys.executable, '-m', 'vit_jax.main', 'study', f'--config={tmp_path / "real.py"}',
             f'--workdir={tmp_path / "w"}', '--config.batch_size=48']
  environ = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {'PYTHONPATH': str(ROOT)}
  first = subprocess.Popen(command, env=environ)
  wait_for((tmp_path / 'w' / 'runs' / 'rate0.001' / 'checkpoints').is_dir, first)
  first.kill()
  first.wait()
  again = subprocess.run(command, env=environ, capture_output=True, text=True)
  assert again.returncode == 0, again.stdout + again.stderr
  rows = table(tmp_path / 'w')
  assert [row['run'] for row in rows] == ['rate0.001', 'final'] and rows[0]['steps'] == '12'
  final = json.loads((tmp_path / 'w' / 'runs' / 'final' / 'final.json').read_text())
  assert float(rows[1]['test/top1']) == final['metrics']['test/top1'] and final['exaflops'] > 0
  saved = engine.read_file(tmp_path / 'w' / 'runs' / 'final' / 'config.json')
  assert saved.batch_size == 48 and saved.seed == 1


def test_the_study_job_is_on_the_command_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'real.py').write_text(REAL)
  assert main.run(['study', f'--config={tmp_path / "real.py"}', '--dry_run', '--topology=cpu:8']) == 0
  assert 'rate0.001' in (said := capsys.readouterr().out) and 'final' in said
  monkeypatch.chdir(tmp_path)
  assert main.run(['study', f'--config={tmp_path / "real.py"}']) == 0
  assert (tmp_path / 'runs' / 'real' / 'table.csv').is_file()


def test_tasks_of_a_cluster_share_the_runs_by_their_index(tmp_path: pathlib.Path) -> None:
  study = schema.Study('mine', {name: config() for name in 'abcde'})
  assert job.run(study, tmp_path, share=(1, 2)) == 0 and order(tmp_path) == ['b', 'd']
  assert job.run(study, tmp_path, share=(0, 2)) == 0 and order(tmp_path) == ['b', 'd', 'a', 'c', 'e']
  assert [row['run'] for row in table(tmp_path)] == ['a', 'b', 'c', 'd', 'e']


def test_a_later_stage_waits_for_the_runs_of_other_tasks(tmp_path: pathlib.Path) -> None:
  def chosen(results: schema.Results) -> dict[str, schema.Config]:
    best = max(results, key=lambda name: results[name].headline or 0)
    return {f'{best}-{seed}': config(seed=seed) for seed in (1, 2)}

  study = schema.Study('two', {'low': config(rate=.1), 'wait': config('wait', rate=.9), 'bad': config('fault')},
                       then=(chosen,))
  statuses: dict[int, int] = {}
  tasks = [threading.Thread(target=lambda i=i: statuses.update(
      {i: job.Coordinator(study, tmp_path, 1, dict(os.environ), (i, 2)).run()})) for i in range(2)]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(job.signal, 'signal', lambda *_: None)  # handlers are set by the main thread alone
    for task in tasks:
      task.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / 'runs' / 'order').exists() or len(order(tmp_path)) < 3:
      assert time.monotonic() < deadline
      time.sleep(.05)
    assert set(order(tmp_path)) == {'low', 'wait', 'bad'}  # the first task has nothing left, and waits
    (tmp_path / 'runs' / 'go').touch()
    for task in tasks:
      task.join(120)
  assert statuses == {0: 2, 1: 0} and set(order(tmp_path)[3:]) == {'wait-1', 'wait-2'}


def test_a_share_that_is_none_is_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['study', '--config=finetune_sweep:B/16,own', f'--workdir={tmp_path}', '--share=3/3']) == 2
  assert '--share: expected a task and the number of tasks, such as 0/8' in capsys.readouterr().err
