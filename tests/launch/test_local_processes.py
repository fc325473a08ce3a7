"""launch/local_processes.sh: N processes as one, ended together, nothing left behind."""
from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from launch.machines import BASH, HANGS_S, ROOT

SCRIPT = str(ROOT / 'launch' / 'local_processes.sh')


def run(count: int, body: str, **env: str) -> subprocess.CompletedProcess[str]:
  """Runs bash code in so many processes; `$i` is the number of the process."""
  return subprocess.run([BASH, SCRIPT, str(count), '3', '--', BASH, '-c', f'i=$VIT_JAX_PROCESS_ID; {body}'],
                        env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=HANGS_S)


def is_alive(pid: str) -> bool:
  try:
    return pathlib.Path(f'/proc/{int(pid)}/stat').read_text().split()[2] != 'Z'
  except FileNotFoundError:
    return False


def test_each_process_gets_its_number_and_its_lines_are_marked() -> None:
  found = run(2, 'echo "$i of $VIT_JAX_NUM_PROCESSES at $VIT_JAX_COORDINATOR"; printf "%s" "$XLA_FLAGS" >&2')
  assert found.returncode == 0 and found.stderr == ''
  lines = found.stdout.splitlines()
  ports = {int(re.fullmatch(rf'\[{i}\] {i} of 2 at 127\.0\.0\.1:(\d+)', line)[1])  # type: ignore[index]
           for i in (0, 1) for line in lines if line.startswith(f'[{i}] {i} of')}
  assert len(ports) == 1 and 20_000 <= ports.pop() < 32_000
  assert sum('device_count=3' in line for line in lines) == 2  # also a last line without an end


def test_logs_go_to_files_when_asked(tmp_path: pathlib.Path) -> None:
  found = run(2, 'echo "i am $i"', LOG_DIR=str(tmp_path / 'logs'))
  assert found.stdout == '' and (tmp_path / 'logs' / '1.log').read_text() == 'i am 1\n'


def test_when_one_fails_the_others_are_ended_with_all_they_started(tmp_path: pathlib.Path) -> None:
  began = time.monotonic()
  found = run(3, f'if [ $i = 1 ]; then sleep .3; exit 41; fi; trap "" TERM; sleep 200 & '
              f'echo $! $$ > {tmp_path}/$i; wait; wait', GRACE_S='1')
  assert found.returncode == 41 and time.monotonic() - began < 100
  assert 'process 1 ended with status 41' in found.stderr and 'process 2 did not end in time; killed' in found.stderr
  assert 'Killed' not in found.stderr
  pids = [pid for i in (0, 2) for pid in (tmp_path / str(i)).read_text().split()]
  assert len(pids) == 4 and not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize(('statuses', 'worst'), [
  ('0 0', 0), ('0 75', 75), ('75 0', 75), ('2 0', 2), ('0 3', 3),
])
def test_the_status_is_the_worst(statuses: str, worst: int) -> None:
  assert run(2, f'all=({statuses}); exit ${{all[i]}}').returncode == worst


@pytest.mark.parametrize(('statuses', 'found'), [
  ((75, 137), 137), ((70, 134), 134), ((2, 75), 2), ((2, 139), 2), ((0, 75), 75), ((75, 75), 75), ((0, 70), 70)])
@pytest.mark.parametrize('first', [0, 1])
def test_the_status_is_that_of_the_one_rule_whichever_process_ended_first(
    statuses: tuple[int, int], found: int, first: int, tmp_path: pathlib.Path) -> None:
  judged = subprocess.run([BASH, '-c', f'source {ROOT}/launch/statuses.sh; judge {statuses[0]} {statuses[1]}'],
                          capture_output=True, text=True, check=True).stdout
  body = (f'all=({statuses[0]} {statuses[1]}); trap "exit ${{all[i]}}" TERM; '
          f'if [ $i = {first} ]; then until [ -e {tmp_path}/other ]; do sleep .02; done; '
          f'else touch {tmp_path}/other; for n in {{1..10}}; do sleep .05; done; fi; exit ${{all[i]}}')
  assert run(2, body).returncode == found == int(judged.split()[1])


def test_a_process_that_the_script_ended_does_not_count_but_where_none_ended_by_itself() -> None:
  wait = 'while :; do sleep .05; done'
  assert run(2, f'if [ $i = 0 ]; then exit 75; fi; {wait}').returncode == 75
  assert run(2, f'if [ $i = 0 ]; then exit 75; fi; trap "" TERM; {wait}', GRACE_S='1').returncode == 75
  assert run(2, f'if [ $i = 0 ]; then exit 0; fi; sleep .3; kill -15 $PPID; {wait}').returncode == 143


def test_what_a_person_must_change_outweighs_a_crash() -> None:
  assert run(2, 'if [ $i = 0 ]; then sleep .3; exit 134; fi; trap "exit 2" TERM; while :; do sleep .1; done'
             ).returncode == 2


@pytest.mark.parametrize(('status', 'starts'), [(75, 3), (70, 3), (137, 3), (2, 1), (0, 1)])
def test_all_are_started_again_after_what_may_pass(status: int, starts: int, tmp_path: pathlib.Path) -> None:
  body = f'echo x >> {tmp_path}/$i; if [ $i = 1 ]; then exit {status}; fi; exit 0'
  found = run(2, body, MAX_FAILURES='2')
  assert found.returncode == status and (tmp_path / '1').read_text().count('x') == starts, found.stderr
  assert found.stderr.count('starting all processes again') == starts - 1


def test_a_failure_outweighs_the_exit_status_of_stopped_processes() -> None:
  assert run(2, 'if [ $i = 0 ]; then sleep .2; exit 2; fi; trap "exit 75" TERM; while :; do sleep .1; done'
             ).returncode == 2


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_being_asked_to_stop_reaches_every_process_so_that_it_saves(number: signal.Signals) -> None:
  # Process 1 has nothing to save with: that the others saved counts.
  body = ('i=$VIT_JAX_PROCESS_ID; [ $i = 1 ] || trap "sleep .2; echo saved; exit 75" TERM; echo ready; '
          'while :; do sleep .05; done')
  with subprocess.Popen([BASH, SCRIPT, '3', '1', '--', BASH, '-c', body], stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE, text=True) as process:
    assert process.stdout is not None
    for _ in range(3):
      assert process.stdout.readline().endswith('ready\n')
    process.send_signal(number)
    out, err = process.communicate(timeout=HANGS_S)
  assert process.returncode == 75, err
  assert sorted(out.splitlines()) == ['[0] saved', '[2] saved']
  assert 'asked to stop' in err


def test_what_is_missing_is_told_with_an_example() -> None:
  for arguments in (['2'], ['2', '0', '--', 'true'], ['2', '1', 'true'], ['2', '1', '--']):
    found = subprocess.run([BASH, SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == 2 and 'local_processes.sh 2 4 -- python' in found.stderr, arguments


def test_two_processes_of_two_devices_add_over_all_of_them(tmp_path: pathlib.Path) -> None:
  program = tmp_path / 'program.py'
  program.write_text(
    'from vit_jax.parallel import hosts\n'
    'hosts.initialize()\n'
    'import jax, numpy as np\n'
    'from jax.sharding import Mesh, NamedSharding, PartitionSpec as P\n'
    'mesh = Mesh(np.array(jax.devices()), ("data",))\n'
    'mine = np.arange(2.) + 2 * jax.process_index() + 1\n'
    'x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), mine, (4,))\n'
    'total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(x)\n'
    'print(f"{jax.process_index()} of {jax.process_count()}: {float(total)}", flush=True)\n')
  found = subprocess.run([BASH, SCRIPT, '2', '2', '--', sys.executable, str(program)], capture_output=True, text=True,
                         check=False, timeout=HANGS_S, cwd=ROOT,
                         env={**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''})
  assert found.returncode == 0, found.stdout
  assert '[0] 0 of 2: 10.0' in found.stdout and '[1] 1 of 2: 10.0' in found.stdout
