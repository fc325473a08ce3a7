"""launch/gke.sh: manifests and XPK commands are checked, then submitted; and what the image is built from."""
from __future__ import annotations

import pytest
from jobs.test_check import written
from launch.machines import NOTE, ROOT, Machines

XPK = ('--xpk', '--cluster=c', '--name=w', '--type=v5litepod-16', '--image=i')


@pytest.fixture
def gke(machines: Machines) -> Machines:
  for name in ('kubectl', 'xpk'):
    machines.add(name, NOTE)
  return machines


def test_a_sound_manifest_is_applied_and_one_with_problems_is_not(gke: Machines) -> None:
  path = written(gke.folder)
  found = gke.run('gke.sh', '--no_check', path)
  assert found.returncode == 0 and gke.calls == [f'kubectl apply -f {path}'], found.stderr
  path = written(gke.folder, ('gke-tpu-topology: 4x4', 'gke-tpu-topology: 4x8'))
  found = gke.run('gke.sh', path)
  assert found.returncode == 2 and len(gke.calls) == 1
  assert 'parallelism and completions: expected 8' in found.stderr and 'nothing was submitted' in found.stderr


def test_a_command_becomes_a_workload_that_restarts_on_all_but_invalid_input(gke: Machines) -> None:
  found = gke.run('gke.sh', *XPK, '--slices=2', '--storage=data', '--zone=z', '--', 'python', 'x y')
  assert found.returncode == 0, found.stderr
  (call,) = gke.calls
  assert call.startswith('xpk workload create --cluster=c --zone=z --workload=w --tpu-type=v5litepod-16 --num-slices=2 '
                         '--docker-image=i --storage=data --max-restarts=100 --restart-on-exit-codes=1,70,75 ')
  assert call.endswith('--command=python x\\ y ')
  gke.run('gke.sh', *XPK, '--', 'python', '--workdir=/runs/s16')
  assert gke.calls[-1].endswith('--command=env XDG_CACHE_HOME=/runs/.cache HF_HOME=/tmp/huggingface '
                                'python --workdir=/runs/s16 ')


def test_a_command_of_this_program_is_checked_before_it_is_submitted(gke: Machines) -> None:
  found = gke.run('gke.sh', *XPK, '--', 'python', '-m', 'vit_jax.main', '--config=digits', '--config.seeed=1')
  assert found.returncode == 2 and gke.calls == []
  assert 'seeed' in found.stderr and 'the command has problems, see above; nothing was submitted' in found.stderr


@pytest.mark.parametrize(('arguments', 'message'), [
  ((), 'expected the path of a manifest, or --xpk'), (('--xpk', '--slices=x'), '--slices: expected a whole number'),
  (('--xpk',), '--cluster is missing'), (('--zoen=x',), '--zoen=x: no such flag')])
def test_mistakes_are_reported(gke: Machines, arguments: tuple[str, ...], message: str) -> None:
  found = gke.run('gke.sh', *arguments)
  assert found.returncode == 2 and message in found.stderr and gke.calls == []


def test_the_build_context_has_what_the_image_copies_and_no_other_folder() -> None:
  lines = [line for line in (ROOT / '.dockerignore').read_text().splitlines() if line and not line.startswith('#')]
  assert lines[0] == '*'
  kept = {line[1:] for line in lines if line.startswith('!')}
  copied = {name for line in (ROOT / 'launch' / 'Dockerfile').read_text().splitlines() if line.startswith('COPY')
            for name in line.split()[1:-1]}
  assert kept == copied
  assert all((ROOT / name).exists() for name in kept)
