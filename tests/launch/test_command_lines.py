"""Every command line that a person may copy: the page, usage texts, the help, and the docstrings of configs.

They are read from the files. Each runs through the real program: its flags, its config with overrides, and the checks
of settings; those of launchers also through their scripts on machines that are not there, up to the data or the first
step.
"""
from __future__ import annotations

import ast
import contextlib
import os
import pathlib
import re
import shlex
import signal
import socket
import sys
from collections.abc import Iterator

import pytest
import runs
from launch.machines import CURL, GCLOUD, NOTE, ROOT, Machines
from launch.test_tpu_pod import ACTIVE

from vit_jax import check, commands, main
from vit_jax.config import check as settings
from vit_jax.config import schema as s
from vit_jax.core.errors import UserError

PROGRAM = re.compile(r'(?:python -m vit_jax\.main|(?<![\w/.=-])vit-jax) +(.*)')
LAUNCHER = re.compile(r'bash launch/(?:tpu_pod|gke|gpu_slurm|local_processes)\.sh .* -- '
                      r'(?:python -m vit_jax\.main|vit-jax)(?: train)? --')
CONTINUED = re.compile(r"\n +(?=(?:--[\w.]+=(?:'[^']*'|\S+) *)+$)", re.MULTILINE)
PLACEHOLDERS = ('JOB', 'PATH', 'VALUE', '…')


def joined(text: str) -> Iterator[str]:
  """Lines with their continuations, marked by a backslash, in one."""
  yield from re.sub(r'\\\n\s*', '', text).splitlines()


def texts() -> dict[str, str]:
  """What a person reads, by where it is."""
  found = {path.name: path.read_text() for path in (ROOT / 'launch').glob('*.*')
           if path.suffix in ('.sh', '.md', '.yaml')}
  # A docstring continues a command on an indented line that has nothing but flags.
  found |= {f'configs/{path.name}': CONTINUED.sub(' ', ast.get_docstring(ast.parse(path.read_text())) or '')
            for path in (ROOT / 'configs').glob('*.py')}
  return found | {'--help': main.help_text(), **{f'{job} --help': main.help_text([job]) for job in commands.JOBS}}


def program_lines() -> dict[str, str]:
  """Where a command of this program is, by the command."""
  found: dict[str, str] = {}
  for where, text in texts().items():
    for line in joined(text):
      match = PROGRAM.search(line)
      command = re.split(r'`|  +#|\s{3,}|;| for | at ', match[1])[0].rstrip(' .,"') if match else ''
      if '--' in command and not any(re.search(rf'(?<![\w:]){word}(?!\w)', command) for word in PLACEHOLDERS):
        found.setdefault(command, where)
  return found


def launcher_lines() -> list[str]:
  """Complete commands of launchers that train, once each; also of pages whose other commands run in another test."""
  pages = [path.read_text() for path in [ROOT / 'README.md', *sorted(ROOT.glob('docs/**/*.md'))]]
  lines = [line.strip(' #`.') for text in [*texts().values(), *pages] for line in joined(text)]
  return list(dict.fromkeys(line for line in lines if LAUNCHER.search(line) and '…' not in line))


def test_lines_are_found_in_every_kind_of_text() -> None:
  places = set(program_lines().values())
  assert len(program_lines()) > 50 and {'README.md', 'configs/vit_l16_jft.py', '--help', 'gke.sh'} <= places
  assert len(launcher_lines()) >= 5
  assert {match[1] for line in launcher_lines() if (match := re.search(r'launch/(\w+)\.sh', line))} == {
      'tpu_pod', 'gke', 'gpu_slurm', 'local_processes'}


@pytest.mark.slow(reason='8 s: each config is read and checked')
def test_every_command_line_is_understood_and_its_settings_go_together() -> None:
  wrong = []
  for line, where in program_lines().items():
    try:
      command = main.parse(shlex.split(line))
      has_config = 'config' in commands.JOBS[command.job].flags and command.values['config']
      config = commands.load_config(command)[0] if has_config else None
      for one in config.runs.values() if isinstance(config, s.Study) else [config] if config else []:
        settings.check(one)
    except (UserError, ValueError) as error:
      wrong.append(f'{where}: {line}: {error}')
  assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize('line', [line for line in launcher_lines() if 'tpu_pod' in line or '--xpk' in line])
def test_commands_for_hosts_name_their_data(line: str) -> None:
  data = re.search(r' --data=(\S+)', line)
  words = ['check', '--elsewhere', f'--line={line.split(" -- ", 1)[1]}', *([f'--data={data[1]}'] if data else [])]
  assert main.run(words) == 0


SHARED = NOTE + r"""
case "${@: -1}" in  # the run directory is one bucket for both hosts
  *workdir) mkdir -p "$FAKE/bucket"; rmdir "${@: -1}"; ln -s "$FAKE/bucket" "${@: -1}" ;;
esac"""


@pytest.fixture
def pod(machines: Machines) -> Iterator[Machines]:
  """Two hosts on this machine, whose environment is the Python of these tests."""
  machines.add('gcloud', GCLOUD)
  machines.add('curl', CURL)
  for name in ('sudo', 'sbatch', 'kubectl', 'xpk'):
    machines.add(name, NOTE)
  machines.add('gcsfuse', SHARED)
  machines.add('python', f'exec {sys.executable} "$@"')
  machines.add('venv-python', f'case "$*" in "-m pip"*) exit 0 ;; esac\nexec {sys.executable} "$@"')
  (machines.folder / 'new').write_text(ACTIVE)
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    machines.env['VIT_JAX_PORT'] = str(free.getsockname()[1])
  machines.env |= {'JAX_PLATFORMS': 'cpu', 'ADDRESS': '127.0.0.1', 'JAX_CPU_COLLECTIVES_IMPLEMENTATION': 'gloo',
                   'PYTHONPATH': str(ROOT), 'XLA_FLAGS': '--xla_backend_optimization_level=0'}  # a device on each host
  yield machines
  for path in machines.folder.glob('host*/vit_jax_job/pid'):  # jobs that a test which failed has left
    with contextlib.suppress(ProcessLookupError):
      os.killpg(int(path.read_text()), signal.SIGKILL)


SETUP = 'mkdir -p vit_jax/.venv/bin; cp "$FAKE/bin/venv-python" vit_jax/.venv/bin/python'


@pytest.mark.slow(reason='20 to 60 s: a check with arrays in shapes, then two programs that import jax, for each line')
@pytest.mark.parametrize('line', launcher_lines())
def test_every_line_of_a_launcher_passes_its_check_and_starts(pod: Machines, line: str) -> None:
  words = shlex.split(line)
  script = pathlib.Path(words[1]).name
  if script == 'tpu_pod.sh' and 'array_record:{data}' not in line:
    words.insert(2, '--dry_run')  # TFDS takes long to import
  if script == 'local_processes.sh':
    words += ['--config.length=1 steps', f'--config.name={pod.folder.name}', f'--workdir={pod.folder}/run']
    words = [word for word in words if word != '--workdir=runs/two']
  extra = [f'--setup={SETUP}', '--poll_s=0'] if script == 'tpu_pod.sh' else []
  found = pod.run(script, *extra, *words[2:])
  text = found.stdout + found.stderr
  if script == 'tpu_pod.sh' and '--dry_run' not in words:  # up to the data, which the stand-in does not have
    assert found.returncode == 2 and 'expected a prepared dataset, got no info.json' in text, text
    assert f'{pod.folder}/host0/vit_jax_job/data' in text and 'chip-hours. Delete it: bash launch/tpu_pod.sh' in text
  elif script == 'gpu_slurm.sh':  # the data must be on the file system that this machine shares
    assert found.returncode == 2 and 'expected a prepared dataset, got no info.json' in text and not pod.calls, text
  else:
    assert found.returncode == 0, text


@pytest.mark.slow(reason='40 s: two programs that compile and train')
def test_a_pod_runs_the_real_program_to_the_end_of_its_steps(pod: Machines) -> None:
  found = pod.run('tpu_pod.sh', '--name=pod', '--type=v3-32', '--zone=here', '--poll_s=0', '--workdir=gs://b/r',
                  f'--setup={SETUP}', '--', 'python', '-m', 'vit_jax.main', '--config=digits',
                  *(word for word in runs.TINY if 'batch_size' not in word), '--config.length=2 steps',
                  '--config.batch_size=64', '--config.evals.test.batch_size=64')
  assert found.returncode == 0, found.stdout + found.stderr
  assert 'Checked the train command of digits' in found.stderr and 'Layout for 32 x v3' in found.stderr
  assert 'process 0 of 2' in found.stdout and 'test/top1' in found.stdout


@pytest.mark.slow(reason='10 s: a check with arrays in shapes')
def test_what_can_be_refused_is_refused_before_a_slice_is_requested(pod: Machines) -> None:
  found = pod.run('tpu_pod.sh', '--name=pod', '--type=v3-512', '--zone=here', '--workdir=gs://b/r', '--data=gs://b/t',
                  '--', 'python', '-m', 'vit_jax.main', '--config=vit_l16_jft', '--config.batch_size=1000')
  assert found.returncode == 2 and not pod.calls
  assert 'Add --config.data.source=folder:{data} to the command.' in found.stderr
  assert 'the command has problems, see above; nothing was requested' in found.stderr
  found = pod.run('tpu_pod.sh', '--name=pod', '--type=v3-512', '--zone=here', '--workdir=gs://b/r', '--',
                  'python', '-m', 'vit_jax.main', '--config=vit_l16_jft', '--config.batch_size=1000',
                  '--config.data.source=array_record:/data/jft')
  assert found.returncode == 2 and not pod.calls
  assert 'batch_size: expected a multiple of 512 batch shards' in found.stderr


def test_lines_of_the_help_and_of_launchers_are_understood() -> None:
  for line, where in program_lines().items():
    if not where.startswith('configs/'):
      assert main.parse(shlex.split(line)).job in commands.JOBS, line


def test_check_reads_the_lines_of_launchers() -> None:
  for line in launcher_lines():
    assert check.read(line.split(' -- ', 1)[1]).job == 'train'
