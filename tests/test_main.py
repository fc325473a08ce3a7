"""The command line: what is accepted, the help of each job, and the messages of mistakes."""
from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import runs

from vit_jax import commands, flag_kinds, main
from vit_jax.commands import JOBS, Command
from vit_jax.config import engine, files
from vit_jax.core.errors import UserError
from vit_jax.weights import peft, saving
from vit_jax.weights.hints import Reading

ROOT = pathlib.Path(__file__).parents[1]


def test_the_job_is_a_flag_or_the_first_word_and_defaults_to_train() -> None:
  expected = Command('train', {'config': 'digits', 'workdir': pathlib.Path('/b'), 'until': '', 'flags': [],
                               'allow_code': False})
  for words in (['--config=digits', '--workdir=/b'], ['train', '--config', 'digits', '--workdir', '/b'],
                ['--job=train', '-config=digits', '--workdir=/b'],
                ['--config=digits', '--workdir=/b', '--job', 'train']):
    assert main.parse(words) == expected


def test_overrides_are_collected() -> None:
  got = main.parse(['--config=a', '--workdir=b', '--config.x.y=1=2', '--config.z', '3'])
  assert got.overrides == ('x.y=1=2', 'z=3')


def test_jobs_get_values_of_the_type_of_each_flag() -> None:
  got = main.parse(['plan', '--config=digits', '--topology=cpu:1', '--flags=cublas', '--search', '--to=out'])
  assert got.values == {'config': 'digits', 'topology': 'cpu:1', 'workdir': None, 'slices': 0, 'quick': False,
                        'search': True, 'flags': ['cublas'], 'to': pathlib.Path('out').absolute(),
                        'price': 0., 'allow_code': False}
  got = main.parse(['inspect', 'a.jpg', '--to=x', '--weights=w', 'b', '--discard=.9'])
  assert got.files == ('a.jpg', 'b') and got.values['discard'] == 0.9 and got.values['workdir'] is None


@pytest.mark.parametrize(('words', 'said'), [
    (['--confg=a'], ['--confg: expected a known flag, got --confg. Did you mean --config?\nSee vit-jax']),
    (['--job=trian'], ['--job: expected one of train, finetune, pretrain, evaluate', 'got trian. Did you mean train?']),
    (['--job=train', '--job=plan'], ['--job: expected one job, got train and plan.']),
    (['train', 'digits'], ["a flag such as --config=digits, got 'digits'. Did you mean --conf"]),
    (['finetune:B/16,own'], ["got 'finetune:B/16,own'. Did you mean --config=finetune:B/16,own?"]),
    (['--lr', '3e-4'], ['--lr: expected a known flag, got --lr. Did you mean the setting '
                        '--config.optimizer.lr?\n']),
    (['--config=digits', '--batch-size=4'], ['the setting --config.batch_size or --config.evals.test.batch_size?']),
    (['--epochs=3', '--warmpu=2', '--bs=4'],
     ['--config.length?\n', '--config.batch_size?\n', '--config.optimizer.schedule.warmup']),
    (['--config=digits', '--config.optimizer.rl=3', '--config.seed=x', '--workdir='],
     ['--workdir: expected a directory on this machine or on gs://, got none. Set --workdir=DIR: dir',
      'config.optimizer.rl: expected the name of a setting', "config.seed: expected a whole number, got 'x'."]),
    (['--config=digitz', '--top=3'],
     ["--config: expected the name of a config or the path of a Python file, got 'digitz'.",
      '--top: expected a flag of this job, got one of predict. Remove it, or run one of these.']),
    (['report', '--workdir=x', '--config.a=1'], ['--config.a=1: expected no override, as vit-jax report takes no c']),
    (['predict', '--weights=x', 'a.jpg', '--top=0'], ["--top: expected a whole number, at least 1, got '0'."]),
    (['predict', '--weights=x', 'a.jpg', '--json=1'], ["--json: expected no value, got '1'. Set --json alone."]),
    (['predict', '--weights=x', '--view='], ['--view: expected ', 'command line: expected FILES and folders, got non']),
    (['average', '--workdir=x', '--to=y', '--last=-1'], ['--last: expected a whole number, at least 2, got', "'-1'"]),
    (['average', '--workdir=x', '--to=y', '--steps=1,²'], ['--steps: expected whole numbers with commas, each at']),
    (['prepare', '--data=x', '--to=s3://b', '--shards=0', '--quality=101', '--seed=' + '9' * 5000, '--short_px=1e3'],
     ['--shards: expected a whole number, 1 to 100,000', '--quality: expected a whole number, 1 to 100,', '--seed: exp',
      "--short_px: expected a whole number, 1 to 65,535, got '1e3'."]),
    (['inspect', '--to=x', '--discard=1'], ["--discard: expected a number, 0 to below 1, got '1'."]),
    (['prepare', '--data=x', '--to=y', '--runner=DirektRunner'],
     ['--runner: expected one of DirectRunner, DataflowRunner, ', "got 'DirektRunner'. Did you mean DirectRunner?"]),
    (['study', '--config=digits', '--processes=0'], ['--processes: expected a whole number, 1 to 1,024']),
    (['report', '--workdir=a', '--workdir=b'], ["--workdir: expected one value, got 'a' and 'b'."]),
    (['report', '--workdir=a', '--to='], ['--to: expected a file, got none. Set --to=FILE: ']),
    (['--config', '--workdir=x'], ['name or path of a config, got none. Set --config=NAME: name or path']),
])
def test_all_mistakes_are_listed_together(words: list[str], said: list[str]) -> None:
  with pytest.raises(UserError) as error:
    main.parse(words)
  for part in said:
    assert part in str(error.value), part


def test_a_misspelled_job_is_the_only_problem() -> None:
  with pytest.raises(UserError) as error:
    main.parse(['evaluat', '--bach=4'])
  assert str(error.value) == ('command line: expected a job such as train or a flag such as --config=digits, got '
                              "'evaluat'. Did you mean evaluate?")


@pytest.mark.parametrize('words', [['--config', '--workdir=x'], ['--confg=digits'], ['predict', '--weights', 'a.jpg']])
def test_a_flag_with_another_problem_is_not_reported_as_missing(words: list[str]) -> None:
  with pytest.raises(UserError) as error:
    main.parse(words)
  assert ' job needs ' not in str(error.value)


def test_help_lists_the_jobs_and_every_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['--help']) == 0
  shown = capsys.readouterr().out
  assert all(f'  {name} ' in shown for name in JOBS) and 'vit-jax train --config=digits' in shown
  assert all(f'{status} ' in shown for status in (0, 2, 70, 75, 130)) and 'VIT_JAX_TRACEBACK=1' in shown


def test_without_a_word_the_help_is_shown_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run([]) == 2
  shown = capsys.readouterr()
  assert shown.err.startswith(main.help_text()) and 'error: expected a job, got none.' in shown.err and not shown.out


@pytest.mark.parametrize('name', list(JOBS))
def test_the_help_of_a_job_shows_its_flags_and_no_others(name: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run([name, '--help']) == 0
  shown = capsys.readouterr().out
  assert main.run([f'--job={name}', '-h']) == 0 and capsys.readouterr().out == shown
  lines = [line.split()[0] for line in shown.splitlines() if line.startswith('  --')]
  listed = {word.lstrip('-') for word in lines if not word.startswith('--config.')}
  assert listed == set(JOBS[name].flags)
  assert ('--config.NAME=VALUE' in shown) == JOBS[name].has_settings


def test_the_help_of_a_job_shows_types_limits_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
  main.run(['predict', '--help'])
  shown = ' '.join(capsys.readouterr().out.split())
  assert '--top N classes per image (at least 1; default: 5)' in shown
  assert '--view NAME which weights of a run: student, ema or teacher; or which network of a file w' in shown
  assert 'usage: vit-jax predict --weights=TEXT [--flag=VALUE …] FILES and folders' in shown


@pytest.mark.parametrize('name', list(JOBS))
def test_every_job_takes_the_flags_of_its_entry(name: str) -> None:
  job = JOBS[name]
  parameters = inspect.signature(importlib.import_module(f'vit_jax.{job.module}').run).parameters
  own = set(parameters) - {'files', 'source', 'changes', 'overridden', 'read_line', 'reading'}
  own |= set(Reading._fields) if 'reading' in parameters else set()
  assert set(job.flags) - {'flags', 'allow_code'} <= own  # these take effect before the job is imported
  assert all(parameters[one].default is not inspect.Parameter.empty for one in own - set(job.flags))
  assert ('files' in parameters) == bool(job.files)


def test_the_formats_of_convert_are_those_that_can_be_written() -> None:
  kind = JOBS['convert'].flags['family'].kind
  assert kind is not None and kind.choices == (*saving.FORMATS, peft.FAMILY)


@pytest.mark.parametrize(('workdirs', 'said'), [
    ('/tmp,/tmp', '--to: expected a path for the page of several runs, got none. Set --to=FILE.html.'),
    ('/tmp,/nothing/here', '--workdir: expected directories of runs, got /nothing/here, which does not exist.')])
def test_a_report_of_several_runs_needs_a_path(workdirs: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['report', f'--workdir={workdirs}']) == 2
  assert said in capsys.readouterr().err


def test_names_may_have_commas_inside_of_quotes() -> None:
  assert flag_kinds.NAMES.convert('cat, red boat,') == ['cat', 'red boat']
  assert flag_kinds.NAMES.convert('"tench, Tinca tinca", goldfish') == ['tench, Tinca tinca', 'goldfish']
  with pytest.raises(ValueError, match='end of data'):
    flag_kinds.NAMES.convert('"tench, goldfish')


@pytest.mark.parametrize(('kind', 'text'), [
    ('DIRECTORIES', 'a,'), ('DIRECTORIES', ''), ('PATHS', 'a=b,a=c'), ('PATHS', 'a=')])
def test_paths_that_are_empty_or_named_twice_are_refused(kind: str, text: str) -> None:
  with pytest.raises(ValueError, match='^'):
    getattr(flag_kinds, kind).convert(text)


@pytest.mark.parametrize('text', [',', ' ', '"",'])
def test_names_without_a_name_are_not_the_default(text: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['predict', '--weights=x', f'--names={text}', 'a.jpg']) == 2
  assert f'--names: expected names with commas, got {text!r}.' in capsys.readouterr().err


def test_a_mistake_is_one_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['--config=digit', '--workdir=x']) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: --config: expected the name of a config') and 'Traceback' not in error


def test_list_prints_the_configs(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['list']) == 0
  assert 'digits' in capsys.readouterr().out


def test_the_config_of_a_run_is_its_own_unless_another_is_given(tmp_path: pathlib.Path) -> None:
  own = files.load('digits', ['batch_size=24', 'optimizer.schedule.decay=linear'])
  (tmp_path / 'config.json').write_text(engine.to_json(own))
  given = main.parse(['evaluate', f'--workdir={tmp_path}', '--config.seed=7'])
  assert commands.load_config(given) == (dataclasses.replace(own, seed=7), str(tmp_path / 'config.json'))
  given = main.parse(['evaluate', f'--workdir={tmp_path}', '--config=digits'])
  assert commands.load_config(given) == (files.load('digits', []), '--config=digits')


def test_a_directory_without_a_run_needs_a_config(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='expected the directory of a run, got .*, which has no config.json. Pass'):
    commands.load_config(main.parse(['average', f'--workdir={tmp_path}', '--to=x']))


def test_training_without_a_directory_names_the_missing_data_and_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'kept').mkdir()
  assert main.run([f'--config={pathlib.Path(main.__file__).parents[1] / "configs" / "vit_l16_jft.py"}']) == 2
  error = capsys.readouterr().err
  assert ('Config vit_l16_jft trains on data.source=folder:JFT-300M. JFT is internal to Google. The configs '
          'vit_l16_i21k and vit_b16_i21k') in error
  assert 'The jobs plan and check need no data.' in error
  assert 'try --config=digits' in error and [p.name for p in tmp_path.iterdir()] == ['kept']


def test_missing_data_is_reported_before_devices_are_initialized(tmp_path: pathlib.Path) -> None:
  code = ('import sys; from vit_jax import main; status = main.run(sys.argv[1:]); '
          'from jax._src import xla_bridge; print(status, len(xla_bridge._backends))')
  done = subprocess.run([sys.executable, '-c', code, '--config=vit_l16_jft', f'--workdir={tmp_path}/a'],
                        capture_output=True, text=True, cwd=pathlib.Path(main.__file__).parents[1])
  assert done.stdout.split() == ['2', '0'], done.stderr


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
  """Makes `list` end in an exception."""
  def run(**_: object) -> int:
    raise error
  monkeypatch.setattr('vit_jax.jobs.listing.run', run)


@pytest.mark.parametrize(('error', 'status', 'said'), [
    (KeyError('x'), 70, "error: unforeseen KeyError: 'x'."), (KeyboardInterrupt(), 130, 'Interrupted.'),
    (MemoryError(), 2, 'error: expected enough memory')])
def test_every_exception_of_a_job_becomes_one_message(
    error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path))
  fail(monkeypatch, error)
  assert main.run(['list']) == status
  shown = capsys.readouterr().err
  assert shown.startswith(said) and shown.count('\n') == 1


def test_a_failed_process_of_several_exits_with_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  left = []
  monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path))
  monkeypatch.setattr('vit_jax.parallel.hosts.leave', left.append)
  fail(monkeypatch, KeyError())
  main.run(['list'])
  assert left == [70]


def piped(words: str, reader: str) -> subprocess.CompletedProcess[str]:
  """The program with its standard output in a pipe."""
  return subprocess.run(['bash', '-c', f'set -o pipefail; {sys.executable} -u -m vit_jax.main {words} {reader}'],
                        capture_output=True, text=True, cwd=pathlib.Path(main.__file__).parents[1])


def test_a_closed_standard_output_ends_the_program_silently() -> None:
  done = piped('--help', '| true')
  assert done.returncode in (0, 141) and done.stderr == ''


@pytest.mark.skipif(not pathlib.Path('/dev/full').exists(), reason='a device that is always full, of Linux')
def test_a_full_disk_behind_standard_output_is_one_message() -> None:
  done = piped('--help', '> /dev/full')
  assert done.returncode == 75 and done.stderr.count('\n') == 1 and 'No space left on device' in done.stderr


WAITS = """
import sys, time
from vit_jax import main
from vit_jax.jobs import listing

def run(**_):
  try:
    print('begun', flush=True)
    time.sleep(60)
  finally:
    print('closing', flush=True)
    time.sleep({closing})

listing.run = run
sys.argv = ['vit-jax', 'list']
main.program()
"""


@pytest.mark.parametrize(('times', 'closing'), [(1, 0), (2, 60)])
def test_ctrl_c_ends_a_job_with_a_line_and_a_second_one_does_not_wait(times: int, closing: int) -> None:
  process = subprocess.Popen([sys.executable, '-c', WAITS.format(closing=closing)], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, cwd=pathlib.Path(main.__file__).parents[1])
  assert process.stdout is not None
  for line in ('begun\n', 'closing\n')[:times]:
    assert process.stdout.readline() == line
    process.send_signal(signal.SIGINT)
  _, error = process.communicate(timeout=30)
  assert (process.returncode, error) == (130, 'Interrupted.\n')


PLACES = """
import atexit, sys, threading, time
from vit_jax import main
from vit_jax.jobs import listing

def place():
  import jax, numpy as np
  while True:
    jax.block_until_ready(jax.device_put(np.zeros((8, 1 << 16), np.float32)))

def run(**_):
  threading.Thread(target=place, daemon=True).start()
  time.sleep(1.5)
  atexit.register(print, 'closed', end='')
  return 3

listing.run = run
sys.argv = ['vit-jax', 'list']
main.program()
"""


@pytest.mark.slow(reason='starts a program that imports jax: 4 s')
def test_a_thread_inside_a_library_does_not_abort_the_end_of_the_program() -> None:
  done = subprocess.run([sys.executable, '-c', PLACES], capture_output=True, text=True,
                        cwd=pathlib.Path(main.__file__).parents[1], env=os.environ | {'JAX_PLATFORMS': 'cpu'})
  assert (done.returncode, done.stdout, done.stderr) == (3, 'closed', '')


WORKERS = """
import operator, sys, time
from vit_jax import main
from vit_jax.data import workers
from vit_jax.jobs import listing

def run(**_):
  batches = workers.batches(operator.neg, range(100), workers.Workers(1, 2))
  try:
    next(batches)
  finally:
    time.sleep(60)

listing.run = run
if __name__ == '__main__':
  sys.argv = ['vit-jax', 'list']
  main.program()
"""


def spawned(parent: int) -> list[str]:
  """Ids of the loader processes of a process."""
  found = subprocess.run(['pgrep', '-P', str(parent), '-f', 'spawn_main'], capture_output=True, text=True)
  return found.stdout.split()


@pytest.mark.skipif(not shutil.which('pgrep'), reason='lists processes with pgrep')
@pytest.mark.slow(reason='starts a program and its loader processes: 6 s')
def test_ctrl_c_while_loader_processes_start_prints_no_traceback(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'job.py').write_text(WORKERS)
  process = subprocess.Popen([sys.executable, 'job.py'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             cwd=tmp_path, start_new_session=True)
  while len(spawned(process.pid)) < 2:
    assert process.poll() is None
    time.sleep(0.02)
  time.sleep(0.3)  # they import
  for _ in range(2):
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.5)
  _, error = process.communicate(timeout=30)
  assert (process.returncode, error) == (130, 'Interrupted.\n')


def test_quiet_and_verbose_belong_to_every_job(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['list', '-q']) == 0 and 'digits' in capsys.readouterr().out
  assert main.run(['-v', 'evaluat']) == 2
  assert 'Traceback' in (said := capsys.readouterr().err) and 'Did you mean evaluate?' in said
  assert main.run(['evaluat']) == 2 and 'Traceback' not in capsys.readouterr().err
  assert main.run(['train', '-q', '-v']) == 2 and '-q, -v: expected one of them' in capsys.readouterr().err


@pytest.mark.parametrize('closed', ['>&-', '2>&-', '<&- >&- 2>&-'])
def test_closed_standard_streams_are_no_error(closed: str, tmp_path: pathlib.Path) -> None:
  """As in cron jobs; a file that is opened next must not get the number of standard output."""
  code = ('import os, sys; from vit_jax import main; main.open_streams(); file = open("kept.txt", "w"); '
          'assert file.fileno() > 2; os.write(1, b"lost"); os.write(2, b"lost"); print(1); print(2, file=sys.stderr)')
  done = subprocess.run(['bash', '-c', f'exec "$0" -c \'{code}\' {closed}', sys.executable], cwd=tmp_path)
  assert done.returncode == 0 and not (tmp_path / 'kept.txt').read_bytes()


@pytest.mark.parametrize(('words', 'status'), [('list', 0), ('--help', 0), ('settings digits', 0), ('nope', 2)])
@pytest.mark.parametrize('closed', ['>&-', '2>&-', '>&- 2>&-'])
def test_jobs_run_with_closed_streams(words: str, status: int, closed: str) -> None:
  done = subprocess.run(['bash', '-c', f'exec "$0" -m vit_jax.main {words} {closed}', sys.executable],
                        capture_output=True, text=True, cwd=ROOT)
  assert done.returncode == status and 'Traceback' not in done.stderr


@pytest.mark.slow(reason='10 s: two processes that train and evaluate')
def test_training_and_evaluation_run_with_closed_streams(tmp_path: pathlib.Path) -> None:
  for words in ([*runs.TINY, '--config=digits', '--config.length=2 steps'], ['--job=evaluate']):
    line = ' '.join(map(shlex.quote, [*words, f'--workdir={tmp_path / "run"}']))
    done = subprocess.run(['bash', '-c', f'exec "$0" -m vit_jax.main {line} <&- >&- 2>&-', sys.executable], cwd=ROOT,
                          env=runs.environment())
    assert done.returncode == 0
  assert json.loads((tmp_path / 'run' / 'evaluate.json').read_text())['step'] == 2


@pytest.mark.parametrize('flag', ['train --workdir', 'prepare --to', 'inspect --to'])
def test_a_directory_that_is_written_has_a_name_in_utf_8(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
  job, name = flag.split()
  assert main.run([job, f'{name}={os.fsdecode(bytes([0x63, 0xe9]))}']) == 2
  said = capsys.readouterr().err
  assert f'error: {name}: expected a path in UTF-8' in said and 'got c\\xe9. Choose' in said


@pytest.mark.parametrize('flag', ['train --workdir', 'report --workdir', 'prepare --to', 'convert --to',
                                  'predict --classes', 'evaluate --embedded'])
def test_the_home_directory_of_nobody_is_an_error(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
  job, name = flag.split()
  assert main.run([job, f'{name}=~no_such_user/runs']) == 2
  said = capsys.readouterr().err
  assert f'error: {name}: expected' in said and "got '~no_such_user/runs', whose home directory is not known." in said


SHARDS = [f'wds:/data/v2/train-{number:03}.tar' for number in range(6)]


@pytest.mark.parametrize(('words', 'said'), [
    ([f'--config.data.source={one}' for one in SHARDS],
     f"--config.data.source: expected one value, got '{SHARDS[0]}' and '{SHARDS[1]}' and '{SHARDS[2]}' and 3 more. "
     'Set one, and quote a range in braces.'),
    (['--config.data.source=folder:a', '--config.data.source=folder:b'],
     "--config.data.source: expected one value, got 'folder:a' and 'folder:b'. Set"),
    (['--workdir=runs/1', '--workdir=runs/2'], "--workdir: expected one value, got 'runs/1' and 'runs/2'. Set one, and "
     'quote a range in braces.')])
def test_one_of_several_paths_is_not_taken_silently(words: list[str], said: str) -> None:
  with pytest.raises(UserError) as error:
    main.parse(['--config=from_folder', *words])
  assert said in str(error.value)


def test_the_last_of_several_values_is_taken_and_both_are_named(caplog: pytest.LogCaptureFixture) -> None:
  words = [f'--config.{one}' for one in ('length=1 steps', 'seed=3', 'length=2 steps', 'seed=3')]
  assert main.parse(['--config=digits', *words]).overrides[2] == 'length=2 steps'
  assert [record.message for record in caplog.records] == [
      "--config.length: got '1 steps' and '2 steps'. The last one is used."]
