"""launch/tpu_pod.sh and what it runs on the hosts, against a gcloud that runs the hosts' part on this machine."""
from __future__ import annotations

import os
import shlex
import signal
import subprocess

import pytest
from launch.machines import BASH, CURL, GCLOUD, HANGS_S, NOTE, ROOT, Machines

ACTIVE = 'WAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE\n'
WHERE = ('--name=pod', '--type=v3-32', '--zone=here', '--poll_s=0')
# An environment that needs no install.
SETUP = ('mkdir -p vit_jax/.venv/bin; printf "#!/bin/sh\\nexit 0\\n" > vit_jax/.venv/bin/python; '
         'chmod +x vit_jax/.venv/bin/python')


@pytest.fixture
def pod(machines: Machines) -> Machines:
  machines.add('gcloud', GCLOUD)
  machines.add('curl', CURL)
  machines.add('gcsfuse', NOTE)
  machines.add('sudo', 'exit 1')
  (machines.folder / 'new').write_text(ACTIVE)
  return machines


def program(pod: Machines, body: str) -> str:
  """A command for the hosts; `$run` is how often this host has run it, also on slices before."""
  pod.add('program', f'echo x >> "$FAKE/runs$INDEX"; run=$(wc -l < "$FAKE/runs$INDEX"); {body}')
  return str(pod.folder / 'bin' / 'program')


def launch(pod: Machines, body: str, *flags: str, arguments: tuple[str, ...] = ()) -> tuple[int, str, str]:
  found = pod.run('tpu_pod.sh', *WHERE, f'--setup={SETUP}', '--workdir=gs://b/runs/x', *flags, '--',
                  program(pod, body), *arguments)
  return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize(('given', 'near'), [
    ('v5e-16', 'v5litepod-16'), ('v5lite-4', 'v5litepod-4'), ('V6E-8', 'v6e-8'), ('trillium-256', 'v6e-256'),
    ('v3-100', 'v3-128'), ('v2-64', 'v2-32'), ('v4-12', 'v4-16'), ('v5p-1', 'v5p-8'), ('v5litepod', 'v5litepod-8')])
def test_a_type_that_the_api_does_not_have_gets_the_nearest_one(pod: Machines, given: str, near: str) -> None:
  words = ('--name=x', '--zone=z', '--workdir=gs://b/r', '--dry_run', '--no_check', '--', 'true')
  found = pod.run('tpu_pod.sh', f'--type={given}', *words)
  assert found.returncode == 2 and f'--type={given}: expected a type of the Cloud TPU API.' in found.stderr
  assert f'Did you mean --type={near}?' in found.stderr
  assert 'Did you mean' not in pod.run('tpu_pod.sh', f'--type={near}', *words).stderr


def test_a_run_is_requested_started_on_all_hosts_shown_fetched_and_its_slice_deleted(pod: Machines) -> None:
  body = ('echo "host $VIT_JAX_PROCESS_ID of $VIT_JAX_NUM_PROCESSES at $VIT_JAX_COORDINATOR: $*; A=$A; '
          'cache $XDG_CACHE_HOME"')
  status, out, err = launch(pod, body, '--env=A=x y', '--spot', arguments=('two words', '$3'))
  assert status == 0, err
  run = f'{pod.folder}/host0/vit_jax_job/workdir'
  assert f'host 0 of 2 at 10.0.0.1:8476: two words $3 --workdir={run}; A=x y; cache {run}/.cache' in out
  assert 'host 1' not in out  # the output of one host is enough
  assert pod.calls[1] == ('compute tpus queued-resources create pod --zone=here --node-id=pod '
                          '--accelerator-type=v3-32 --runtime-version=tpu-ubuntu2204-base --spot')
  assert pod.count('--metadata-cache-ttl-secs=0') == 2 and pod.count('--only-dir=runs/x') == 2
  assert pod.count('storage rsync --recursive --exclude=^(checkpoints|\\.cache)/.* gs://b/runs/x runs/pod') == 1
  assert pod.count('queued-resources delete') == 1 and 'delete' in pod.calls[-1]


@pytest.mark.slow(reason='5 s: three starts')
def test_a_preempted_slice_is_requested_again_and_75_starts_the_job_again(pod: Machines) -> None:
  # Once preempted, a host does nothing more: the first one is the last to end, and the state changes in one step.
  preempted = ('if [ "$INDEX" = 0 ]; then until [ -e "$FAKE/host1/vit_jax_job/status" ]; do sleep .05; done; '
               'echo SUSPENDED > "$FAKE/next"; mv "$FAKE/next" "$FAKE/states"; fi; exit 143')
  status, out, err = launch(pod, f'case $run in 1) {preempted} ;; 2) echo saved; exit 75 ;; 3) echo all done ;; esac')
  assert status == 0, err
  assert 'preempted; requesting it again' in err
  assert 'the program stopped, or the environment failed; starting it again (failure 1 of at most 3' in err
  assert out.count('saved\n') == 1 and out.count('all done\n') == 1
  assert pod.count('queued-resources create') == 2
  assert (pod.folder / 'runs0').read_text().count('x') == 3 == (pod.folder / 'runs1').read_text().count('x')


def test_status_2_stops_with_the_message_and_keeps_the_slice(pod: Machines) -> None:
  status, out, err = launch(pod, '[ "$INDEX" = 0 ] || exit 75; echo "error: no such setting" >&2; exit 2')
  assert status == 2 and 'error: no such setting' in out
  assert 'something that you must change, see above. The same command line with it fixed runs on the same slice' in err
  assert 'slice pod is left, and paid for: 16 chips, so every hour costs 16 chip-hours. Delete it: ' in err
  assert 'bash launch/tpu_pod.sh --name=pod --zone=here --delete' in err
  assert pod.count('delete') == 0 and (pod.folder / 'runs0').read_text().count('x') == 1


@pytest.mark.slow(reason='3 s: two starts')
def test_a_program_that_keeps_failing_is_given_up(pod: Machines) -> None:
  status, _, err = launch(pod, 'exit 41', '--max_failures=1')
  assert status == 41 and 'failed with status 41 (failure 2 of at most 1 in a row)' in err
  assert (pod.folder / 'runs0').read_text().count('x') == 2


@pytest.mark.slow(reason='1 s')
def test_a_slice_that_is_there_is_reused_and_left(pod: Machines) -> None:
  (pod.folder / 'states').write_text('ACTIVE\n')
  for host in ('host0', 'host1'):
    (pod.folder / host).mkdir()
  status, _, err = launch(pod, 'true')
  assert status == 0 and 'slice pod is left, and paid for' in err
  assert pod.count('create') == 0 and pod.count('delete') == 0


def test_a_request_that_keeps_failing_is_told_with_its_state(pod: Machines) -> None:
  (pod.folder / 'new').write_text('FAILED\n')
  status, _, err = launch(pod, 'true', '--max_failures=1')
  assert status == 2 and 'the request failed 2 times' in err
  assert pod.count('queued-resources create') == 2


@pytest.mark.slow(reason='1 s')
def test_a_slice_of_no_known_state_is_waited_for_and_not_requested_again(pod: Machines) -> None:
  (pod.folder / 'states').write_text('\nACTIVE\n')
  for host in ('host0', 'host1'):
    (pod.folder / host).mkdir()
  status, _, err = launch(pod, 'true')
  assert status == 0 and 'slice pod: of no known state' in err
  assert pod.count('create') == 0


@pytest.mark.parametrize(('name', 'text', 'message'), [
  ('refuse', '', 'the request was refused; see above'),
  ('broken', 'ERROR: PERMISSION_DENIED', 'the queue cannot be read: ERROR: PERMISSION_DENIED'),
])
def test_refusals_are_told(pod: Machines, name: str, text: str, message: str) -> None:
  (pod.folder / name).write_text(text)
  status, _, err = launch(pod, 'true')
  assert status == 2 and message in err, err


@pytest.mark.slow(reason='4 s: two slices')
def test_mounted_data_take_the_place_of_a_word_and_nothing_else_is_added(pod: Machines) -> None:
  assert launch(pod, 'echo "$*" > "$FAKE/got"', '--data=gs://b/tfds/', arguments=('--config.data.data_dir={data}',)
                )[0] == 0
  data = f'{pod.folder}/host1/vit_jax_job/data'
  assert (pod.folder / 'got').read_text().startswith(f'--config.data.data_dir={data} --workdir=')
  mount = next(call for call in pod.calls if call.startswith('gcsfuse') and '--only-dir=tfds' in call)
  assert '-o ro' in mount and '--file-cache-enable-parallel-downloads' in mount and mount.split()[-2] == 'b'
  assert launch(pod, 'echo "$*" > "$FAKE/got"', '--data=gs://b', arguments=('--config.data.source=folder:{data}',)
                )[0] == 0
  assert f'--config.data.source=folder:{data} ' in (pod.folder / 'got').read_text()


@pytest.mark.slow(reason='2 s')
def test_data_that_do_not_fit_are_not_copied(pod: Machines) -> None:
  pod.add('gcloud', 'if [ "$1 $2" = "storage du" ]; then echo 1430000000000000 gs://b; exit; fi' + GCLOUD)
  status, out, _ = launch(pod, 'true', '--data=gs://b', '--data_mode=copy', arguments=('{data}',))
  assert status == 2 and 'holds 1363754272 MB' in out and 'Use --data_mode=mount, or a larger disk' in out


@pytest.mark.slow(reason='2 s')
def test_copied_data_are_where_the_command_is_told(pod: Machines) -> None:
  pod.add('gcloud', 'if [ "$1 $2" = "storage du" ]; then echo 1048576 gs://b; exit; fi' + GCLOUD)
  assert launch(pod, 'echo "$*" > "$FAKE/got"', '--data=gs://b/d', '--data_mode=copy',
                f'--cache_dir={pod.folder}/cache', arguments=('--data={data}',))[0] == 0
  assert f'--data={pod.folder}/cache/copy' in (pod.folder / 'got').read_text()
  assert pod.count(f'storage rsync --recursive gs://b/d {pod.folder}/cache/copy') == 2


def test_a_dry_run_prints_every_command_and_runs_none(pod: Machines) -> None:
  found = pod.run('tpu_pod.sh', *WHERE, '--workdir=gs://b/r', '--dry_run', '--', 'python', '-c', "print('a b')")
  assert found.returncode == 0 and pod.calls == []
  lines = found.stdout.splitlines()
  for words in ('describe', 'create', 'tar -czf', 'scp', 'mv vit_jax.new vit_jax', 'tpu_worker.sh setup',
                'tpu_worker.sh start', 'tpu_worker.sh follow', 'tpu_worker.sh status', 'storage rsync', 'delete'):
    assert any(words in line for line in lines), words
  start = next(line for line in lines if 'tpu_worker.sh start' in line)
  command = next(word for word in shlex.split(start) if word.startswith('--command=')).removeprefix('--command=')
  assert shlex.split(command)[-3:] == ['python', '-c', "print('a b')"]  # whole, through two shells


def test_all_that_is_wrong_is_said_at_once(pod: Machines) -> None:
  found = pod.run('tpu_pod.sh', '--type=v9-8', '--zone=z', '--workdir=/tmp/x', '--data=here', '--data_mode=lend',
                  '--poll_s=often', '--slices=two', '--price=much')
  assert found.returncode == 2 and pod.calls == []
  for message in ('--name is missing', 'expected a command after --, got none', '--workdir: expected gs://',
                  '--data: expected gs://…, got here', '--data_mode: expected mount or copy, got lend',
                  'expected numbers', '--slices: expected a whole number, got two',
                  '--price: expected a number, got much',
                  '--type=v9-8: expected a type with a known image. Set --runtime=VERSION'):
    assert message in found.stderr, message
  assert '--nmae=x: no such flag' in pod.run('tpu_pod.sh', '--nmae=x').stderr
  assert 'vit_l16_jft.py' in pod.run('tpu_pod.sh', '--help').stdout


@pytest.mark.slow(reason='2 s')
def test_another_job_on_the_slice_is_not_disturbed_and_the_same_one_is_taken_up(pod: Machines) -> None:
  assert launch(pod, 'true', '--keep')[0] == 0
  for host in ('host0', 'host1'):
    job = pod.folder / host / 'vit_jax_job'
    (job / 'status').unlink()
    (job / 'pid').write_text('1' if host == 'host0' else '999999999')
    (job / 'spec').write_text('other')
  found = launch(pod, 'true')
  assert found[0] == 2 and 'another job runs on pod; end it with --stop' in found[2]


@pytest.mark.slow(reason='2 s')
def test_stopping_reaches_the_program_which_saves_and_is_not_started_again(pod: Machines) -> None:
  body = ('trap "echo saving; exit 75" TERM; if [ "$INDEX" = 0 ]; then '
          f'(sleep .3; bash {ROOT}/launch/tpu_pod.sh --name=pod --zone=here --stop) & fi; while :; do sleep .1; done')
  status, out, err = launch(pod, body)
  assert status == 75 and 'saving\n' in out and 'stopped by --stop; slice pod is left' in err
  assert (pod.folder / 'runs0').read_text().count('x') == 1 and pod.count('delete') == 0


def test_a_person_may_leave_the_job_goes_on_and_is_taken_up_again(pod: Machines) -> None:
  body = 'echo begun; while [ ! -e "$FAKE/go" ]; do sleep .05; done; echo done'
  command = [BASH, str(ROOT / 'launch' / 'tpu_pod.sh'), *WHERE, f'--setup={SETUP}', '--workdir=gs://b/r', '--',
             program(pod, body)]
  with subprocess.Popen(command, env=pod.env, cwd=pod.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                        text=True, start_new_session=True) as first:
    assert first.stdout is not None
    while first.stdout.readline() != 'begun\n':
      pass
    os.killpg(first.pid, signal.SIGINT)  # as Ctrl-C does
    _, err = first.communicate(timeout=HANGS_S)
  assert first.returncode == 130 and 'the job continues' in err
  with subprocess.Popen(command, env=pod.env, cwd=pod.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                        text=True) as second:
    assert second.stdout is not None
    first_line = second.stdout.readline()  # its output is shown from the beginning
    (pod.folder / 'go').touch()
    out, err = second.communicate(timeout=HANGS_S)
  assert second.returncode == 0 and (first_line, out) == ('begun\n', 'done\n') and 'the job runs already' in err
  assert (pod.folder / 'runs0').read_text().count('x') == 1


@pytest.mark.slow(reason='2 s: four hosts; one slice is above, and what several print is in test_command_lines.py')
def test_several_slices_are_one_request_and_one_run_and_their_cost_is_told(pod: Machines) -> None:
  body = 'echo "$VIT_JAX_COORDINATOR $VIT_JAX_NUM_PROCESSES" > "$FAKE/place$VIT_JAX_PROCESS_ID"'
  status, _, err = launch(pod, body, '--slices=2', '--keep', '--price=1.5')
  assert status == 0, err
  places = [(pod.folder / f'place{i}').read_text() for i in range(4)]
  assert places == ['10.0.0.1:8476 4\n'] * 4
  assert pod.calls[1] == ('compute tpus queued-resources create pod --zone=here --node-count=2 --node-prefix=pod '
                          '--accelerator-type=v3-32 --runtime-version=tpu-ubuntu2204-base')
  assert pod.count('queued-resources scp') == 1 and pod.count('--node=all --worker=all') > 3
  assert pod.count('tpu-vm describe pod-0') == pod.count('tpu-vm describe pod-1') == 1
  assert '32 chips, so every hour costs 32 chip-hours, 48.00 USD at --price=1.5' in err


def test_data_without_their_word_are_refused_for_any_program(pod: Machines) -> None:
  status, _, err = launch(pod, 'true', '--data=gs://b/d')
  assert status == 2 and pod.calls == []
  assert '--data: expected the word {data} in the command, for its folder on the hosts, got none' in err


@pytest.mark.slow(reason='1 s')
def test_hosts_with_an_old_python_get_a_new_one_beside_it(pod: Machines) -> None:
  pod.add('python3', NOTE + '\ncase "$*" in *"python find"*) echo "$FAKE/bin/new" ;; esac')
  pod.env['PYTHON'] = '/no/such/python'
  assert launch(pod, 'true')[0] == 0
  assert pod.count('python3 -m pip install --quiet --user uv') == 2
  assert pod.count('python3 -m uv python install --quiet 3.12') == 2


@pytest.mark.slow(reason='2 s')
def test_hosts_that_wait_for_one_that_ended_are_ended_too(pod: Machines) -> None:
  body = 'if [ $run -gt 1 ]; then exit 0; fi; [ "$INDEX" = 1 ] || exit 134; while true; do sleep .05; done'
  pod.env['VIT_JAX_WAIT_S'] = '1'
  status, _, err = launch(pod, body)
  assert status == 0 and 'some hosts ended, others did not; ended them' in err
  assert (pod.folder / 'runs1').read_text().count('x') == 2


def test_one_host_with_status_2_ends_the_run_with_its_message_whatever_the_others_report(pod: Machines) -> None:
  status, _, err = launch(pod, '[ "$INDEX" = 0 ] && exit 134; echo "error: no such file" >&2; exit 2')
  assert status == 2 and ': error: no such file\n' in err and 'something that you must change, see above' in err
  assert (pod.folder / 'runs0').read_text().count('x') == 1


@pytest.mark.slow(reason='4 s: three starts')
@pytest.mark.parametrize(('first', 'second'), [(134, 75), (75, 137), (70, 75)])
def test_a_lost_host_starts_all_again_up_to_the_limit(pod: Machines, first: int, second: int) -> None:
  status, _, err = launch(pod, f'[ "$INDEX" = 0 ] && exit {first}; exit {second}', '--max_failures=2')
  failure = first if first != 75 else second
  assert status == failure and f'failed with status {failure} (failure 3 of at most 2 in a row)' in err
  assert (pod.folder / 'runs0').read_text().count('x') == 3 == (pod.folder / 'runs1').read_text().count('x')


@pytest.mark.slow(reason='5 s: four starts')
def test_failures_are_not_in_a_row_when_the_run_has_saved_between_them(pod: Machines) -> None:
  body = 'mkdir -p "$HOME/vit_jax_job/workdir/checkpoints/$((run < 4 ? run * 5 : 15))"; [ $run = 6 ] || exit 75'
  status, _, err = launch(pod, body, '--max_failures=2')
  assert status == 0 and err.count('after it had saved step') >= 1, err
  assert 'failure 2 of at most 2 in a row' in err and (pod.folder / 'runs0').read_text().count('x') == 6


@pytest.mark.slow(reason='2 s')
def test_a_service_that_does_not_answer_is_asked_again(pod: Machines) -> None:
  once = 'case "$4" in describe|create) if [ ! -e "$FAKE/no$4" ]; then touch "$FAKE/no$4"; ' \
         'echo "ERROR: UNAVAILABLE: try later" >&2; exit 1; fi ;; esac'
  pod.add('gcloud', once + GCLOUD)
  status, _, err = launch(pod, 'true')
  assert status == 0, err
  (pod.folder / 'broken').write_text('ERROR: UNAVAILABLE: try later')
  assert launch(pod, 'true', '--max_failures=1')[0] == 75


@pytest.mark.slow(reason='2 s')
def test_a_run_that_cannot_be_fetched_does_not_keep_its_slice(pod: Machines) -> None:
  pod.add('gcloud', 'if [ "$1 $2" = "storage rsync" ]; then exit 1; fi' + GCLOUD)
  status, _, err = launch(pod, 'true', '--max_failures=1')
  assert status == 75 and 'could not be fetched' in err and pod.count('queued-resources delete') == 1
