"""launch/gpu_slurm.sh, against a Slurm that notes what it is asked."""
from __future__ import annotations

import shutil
import signal
import subprocess

import pytest
from launch.machines import BASH, HANGS_S, NOTE, ROOT, Machines

JOB = {'SLURM_JOB_ID': '12345', 'SLURM_JOB_NODELIST': 'gpu[07-09]', 'SLURM_JOB_NUM_NODES': '3'}
SRUN = NOTE + r'''
echo "$VIT_JAX_COORDINATOR $VIT_JAX_NUM_PROCESSES ${VIT_JAX_PROCESS_ID-none}" >> "$FAKE/told"
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"'''


@pytest.fixture
def slurm(machines: Machines) -> Machines:
  machines.add('sbatch', NOTE)
  machines.add('srun', SRUN)
  machines.add('scontrol', NOTE + '\nif [ "$1" = show ]; then printf "%s\\n" gpu07 gpu08 gpu09; fi')
  return machines


def test_submitting_asks_for_one_process_a_node_a_warning_and_another_turn(slurm: Machines) -> None:
  logs = slurm.folder / 'my logs'
  found = slurm.run('gpu_slurm.sh', '--nodes=3', '--gpus=8', '--time=1:00:00', '--sbatch_flag=--mem=0',
                    f'--logs={logs}', '--', 'python', '-c', 'print(1, 2)')
  assert found.returncode == 0, found.stderr
  assert logs.is_dir()  # Slurm does not make it
  assert slurm.calls == [
    'sbatch --job-name=vit_jax --nodes=3 --ntasks-per-node=1 --gpus-per-node=8 --requeue --open-mode=append '
    f'--signal=B:USR1@120 --chdir={ROOT} --output={logs}/%x-%j.log --time=1:00:00 --mem=0 --exclusive '
    f'{ROOT}/launch/gpu_slurm.sh -- python -c print(1, 2)']


def test_a_dry_run_prints_and_submits_nothing(slurm: Machines) -> None:
  found = slurm.run('gpu_slurm.sh', '--nodes=1', '--gpus=2', '--cpus=6', '--dry_run', '--', 'echo', 'a b')
  assert found.returncode == 0 and slurm.calls == []
  assert '--cpus-per-task=6' in found.stdout and '-- echo a\\ b' in found.stdout


EXAMPLE = ('--nodes=1', '--gpus=2', '--', 'python', '-m', 'vit_jax.main', '--config=vit_l16_jft',
           '--config.data.source=array_record:/shared/jft', '--workdir=/shared/runs/l16')


@pytest.mark.skipif(shutil.which('sbatch') is not None, reason='this machine has Slurm')
def test_without_slurm_a_command_is_checked_or_printed_and_else_the_way_is_named(machines: Machines) -> None:
  found = machines.run('gpu_slurm.sh', *EXAMPLE)
  assert found.returncode == 2 and found.stderr.startswith('error: sbatch: expected a login node of a Slurm cluster')
  assert 'Add --check to check the command here, or --dry_run' in found.stderr and not found.stdout
  found = machines.run('gpu_slurm.sh', '--check', *EXAMPLE)
  assert found.returncode == 0 and 'Checked the train command of vit_l16_jft: no problems found.' in found.stderr
  assert not found.stdout and 'Layout for 2 x gpu' in found.stderr
  assert machines.run('gpu_slurm.sh', '--check', *EXAMPLE, '--config.seeed=1').returncode == 2
  found = machines.run('gpu_slurm.sh', '--dry_run', '--no_check', *EXAMPLE)
  assert found.stdout.startswith('sbatch --job-name=vit_jax')


def test_where_slurm_is_the_data_must_be_here(slurm: Machines) -> None:
  found = slurm.run('gpu_slurm.sh', '--check', *EXAMPLE)
  assert found.returncode == 2 and 'expected a prepared dataset' in found.stderr and slurm.calls == []


@pytest.mark.parametrize(('arguments', 'message'), [
  (['--nodes=1', '--', 'true'], 'expected whole numbers: --nodes=N --gpus=G'),
  (['--nodes=two', '--gpus=1', '--', 'true'], 'expected whole numbers: --nodes=N --gpus=G'),
  (['--nodes=1', '--gpus=1'], 'expected a command after --, got none'),
  (['--node=1'], '--node=1: no such flag; see --help'),
])
def test_mistakes_are_reported(slurm: Machines, arguments: list[str], message: str) -> None:
  found = slurm.run('gpu_slurm.sh', *arguments)
  assert found.returncode == 2 and message in found.stderr and slurm.calls == []


@pytest.mark.parametrize(('status', 'requeued', 'said'), [
  (0, 0, ''), (2, 0, 'A process reports something that you must change'),
  *((status, 1, f'Ended with status {status}: the program stopped, failed, or lost a host or its storage; queued again')
    for status in (70, 75, 134, 137, 139)),
])
def test_the_job_runs_on_all_nodes_and_is_queued_again_unless_it_is_done_or_a_person_must_act(
    slurm: Machines, status: int, requeued: int, said: str) -> None:
  found = slurm.run('gpu_slurm.sh', '--', BASH, '-c', f'echo "$0"; exit {status}', 'a b', **JOB)
  assert found.returncode == status and 'a b\n' in found.stdout and said in found.stdout
  assert (slurm.folder / 'told').read_text() == 'gpu07:32345 3 none\n'.replace('32345', str(20000 + 12345 % 12000))
  assert slurm.count('srun --ntasks=3 --ntasks-per-node=1 --kill-on-bad-exit=1') == 1
  assert slurm.count('scontrol requeue 12345') == requeued


@pytest.mark.parametrize('number', [signal.SIGUSR1, signal.SIGTERM])
def test_a_warning_of_slurm_reaches_the_program_which_saves(slurm: Machines, number: signal.Signals) -> None:
  body = 'trap "sleep .2; echo saved; exit 75" TERM; echo ready; while :; do sleep .05; done'
  with subprocess.Popen([BASH, str(ROOT / 'launch' / 'gpu_slurm.sh'), '--', BASH, '-c', body],
                        env=slurm.env | JOB, stdout=subprocess.PIPE, text=True, cwd=slurm.folder) as job:
    assert job.stdout is not None
    while job.stdout.readline() != 'ready\n':
      pass
    job.send_signal(number)
    out, _ = job.communicate(timeout=HANGS_S)
  assert job.returncode == 75 and 'saved\n' in out
  assert slurm.count('scontrol requeue 12345') == 1


SEVERAL = r'''
while [ "${1#--}" != "$1" ]; do shift; done
worst=0
for rank in 0 1 2; do
  SLURM_PROCID=$rank "$@"; status=$?
  if [ "$status" -gt "$worst" ]; then worst=$status; fi
done
exit "$worst"'''


@pytest.mark.parametrize(('statuses', 'ended', 'requeued'), [
  ('75 2 134', 2, 0), ('75 134 75', 134, 1), ('0 75 75', 75, 1), ('0 0 0', 0, 0), ('70 75 75', 70, 1)])
def test_the_statuses_of_all_processes_decide(slurm: Machines, statuses: str, ended: int, requeued: int) -> None:
  slurm.add('srun', SEVERAL)
  found = slurm.run('gpu_slurm.sh', '--', BASH, '-c', f'all=({statuses}); exit ${{all[SLURM_PROCID]}}', **JOB)
  assert found.returncode == ended and slurm.count('scontrol requeue') == requeued, found.stdout


def test_failures_in_a_row_are_counted_over_the_starts_of_a_job(slurm: Machines) -> None:
  workdir = slurm.folder / 'run'
  words = ('--max_failures=1', '--', BASH, '-c', 'exit 75', 'x', f'--workdir={workdir}')
  for step, requeued in ((0, 1), (20, 2), (20, 3), (20, 3)):
    if step:
      (workdir / 'checkpoints' / str(step)).mkdir(parents=True, exist_ok=True)
    found = slurm.run('gpu_slurm.sh', *words, **JOB)
    assert found.returncode == 75 and slurm.count('scontrol requeue') == requeued, (step, found.stdout)
  assert 'Ended with status 75 too often; not queued again' in found.stdout
