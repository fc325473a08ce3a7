"""The command line: what is accepted, and what a mistake reads like."""
from __future__ import annotations

import dataclasses
import pathlib
import signal
import subprocess
import sys

import pytest

from vit_jax import dispatch, main
from vit_jax.config import files, json_files
from vit_jax.core.errors import UserError


def test_the_job_is_a_flag_or_the_first_word_and_defaults_to_train() -> None:
  want = main.Command('train', {'config': 'a', 'workdir': 'b'}, [])
  for words in (['--config=a', '--workdir=b'], ['train', '--config', 'a', '--workdir', 'b'],
                ['--job=train', '-config=a', '--workdir=b']):
    assert main.parse(words) == want


def test_overrides_are_collected() -> None:
  got = main.parse(['--config=a', '--workdir=b', '--config.x.y=1=2', '--config.z', '3'])
  assert got.overrides == ['x.y=1=2', 'z=3']


@pytest.mark.parametrize(('words', 'said'), [
    (['--confg=a'], ['--confg: no such flag; did you mean --config?', '--job=train needs --workdir']),
    (['--job=trian'], ['--job=trian: no such job; did you mean train?; there are: train, evaluate']),
    (['evaluat'], ["'evaluat' is neither a job nor a flag; did you mean evaluate?"]),
    (['--lr', '3e-4'], ['--lr: no such flag; the setting of the config is --config.optimizer.lr\n']),
    (['--config=digits', '--batch-size=4'], ['--batch-size: no such flag; the setting of the config is --config.batch_'
                                             'size or --config.evals.test.batch_size']),
    (['--epochs=3', '--warmpu=2'], ['--config.length\n', '--config.optimizer.schedule.warmup']),
    (['--config=digits', '--config.optimizer.rl=3', '--config.seed=x'],
     ['--job=train needs --workdir', 'config.optimizer.rl: expected the name of a setting',
      "config.seed: expected a whole number, got 'x'."]),
    (['--config=digitz'],
     ['needs --workdir', "--config: expected the name of a config or the path of a Python file, got 'digitz'."]),
    (['list', '--workdir=x'], ['--workdir is not for --job=list, which takes: no flags']),
    (['report', '--workdir=x', '--config.a=1'], ['--config.a=1 is not for --job=report']),
    (['predict', '--weights=x', 'a.jpg', '--top=0'], ["--top: expected a whole number 1 to 2147483647, got '0'."]),
    (['average', '--workdir=x', '--to=y', '--last=-1'], ['--last: expected a whole number 2 to', "got '-1'."]),
    (['average', '--workdir=x', '--to=y', '--steps=1,²'], ['--steps: expected whole numbers with commas, each']),
    (['prepare', '--data=x', '--to=y', '--shards=0', '--quality=101', '--seed=' + '9' * 5000, '--short_px=1e3'],
     ['--shards: expected a whole number 1 to 100000', '--quality: expected a whole number 1 to 100,', '--seed: exp',
      "--short_px: expected a whole number 1 to 65535, got '1e3'."]),
    (['bench', '--config=digits', '--px=64,x', '--turns=nan'], ['--px: expected whole numbers', '--turns: expected']),
    (['study', '--config=digits', '--processes=0'], ['--processes: expected a whole number 1 to 1024']),
    (['report', '--workdir=a', '--workdir=b'], ["--workdir: expected one value, got 'a' and 'b'."]),
    (['report', '--workdir=a', '--to='], ['--to: expected a value, got none. Set --to=VALUE.']),
    (['--config', '--workdir=x'], ['--config: expected a value, got none. Set --config=VALUE.']),
])
def test_all_mistakes_are_said_at_once(words: list[str], said: list[str]) -> None:
  with pytest.raises(UserError) as error:
    main.parse(words)
  for part in said:
    assert part in str(error.value), part


def test_help_names_every_job_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['train', '--help']) == 0
  text = capsys.readouterr().out
  assert all(f'  {name} ' in text for name in main.JOBS) and all(f'--{name} ' in text for name in main.FLAGS)


@pytest.mark.parametrize(('workdirs', 'said'), [
    ('/tmp,/tmp', 'one page of several runs belongs to none of them; say where to write it: --to=FILE.html'),
    ('/tmp,/nothing/here', '--workdir=/nothing/here is no directory')])
def test_a_report_of_several_runs_wants_a_place(workdirs: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['report', f'--workdir={workdirs}']) == 2
  assert said in capsys.readouterr().err


def test_a_mistake_is_one_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['--config=digit', '--workdir=x']) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: --config: expected the name of a config') and 'Traceback' not in error


def test_list_prints_the_configs(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['list']) == 0
  assert 'digits' in capsys.readouterr().out


def test_every_job_has_a_function_and_the_other_way_round() -> None:
  assert main.JOBS.keys() == dispatch.RUN.keys()


def test_the_config_of_a_run_is_its_own_unless_another_is_given(tmp_path: pathlib.Path) -> None:
  own = files.load('digits', ['batch_size=24', 'optimizer.schedule.decay=linear'])
  (tmp_path / 'config.json').write_text(json_files.to_json(own))
  given = main.parse(['evaluate', f'--workdir={tmp_path}', '--config.seed=7'])
  assert dispatch.load_config(given) == dataclasses.replace(own, seed=7)
  given = main.parse(['evaluate', f'--workdir={tmp_path}', '--config=digits'])
  assert dispatch.load_config(given) == files.load('digits', [])


def test_a_directory_without_a_run_needs_a_config(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='holds no run, as there is no config.json.*or --config=NAME as well'):
    dispatch.load_config(main.parse(['average', f'--workdir={tmp_path}', '--to=x']))


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
  """Makes `list` end in an exception."""
  def job(command: main.Command) -> int:
    raise error
  monkeypatch.setitem(dispatch.RUN, 'list', job)


@pytest.mark.parametrize(('error', 'status', 'said'), [
    (KeyError('x'), 70, "error: unforeseen KeyError: 'x'."), (KeyboardInterrupt(), 130, 'Interrupted.'),
    (MemoryError(), 2, 'error: expected enough memory')])
def test_no_exception_of_a_job_reaches_a_person_as_a_traceback(
    error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path))
  fail(monkeypatch, error)
  assert main.run(['list']) == status
  shown = capsys.readouterr().err
  assert shown.startswith(said) and shown.count('\n') == 1


def test_one_of_several_processes_leaves_with_the_status_of_its_failure(
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


def test_a_reader_that_has_enough_ends_the_program_quietly() -> None:
  done = piped('--help', '| true')
  assert done.returncode in (0, 141) and done.stderr == ''


@pytest.mark.skipif(not pathlib.Path('/dev/full').exists(), reason='a device that is always full, of Linux')
def test_a_full_disk_behind_standard_output_is_one_message() -> None:
  done = piped('--help', '> /dev/full')
  assert done.returncode == 2 and done.stderr.count('\n') == 1 and 'No space left on device' in done.stderr


def test_help_names_every_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
  main.run(['--help'])
  shown = capsys.readouterr().out
  assert all(f'{status} ' in shown for status in (0, 2, 70, 75, 130)) and 'VIT_JAX_TRACEBACK=1' in shown


WAITS = """
import sys, time
from vit_jax import dispatch, main

def job(command):
  try:
    print('begun', flush=True)
    time.sleep(60)
  finally:
    print('closing', flush=True)
    time.sleep({closing})

dispatch.RUN['list'] = job
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
