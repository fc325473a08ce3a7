"""benchmarks/gpu_check.sh, against a GPU and a Python that note what they are asked."""
from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import tarfile

import pytest
from launch.machines import BASH, HANGS_S, NOTE, ROOT, Machines

from vit_jax.config import files
from vit_jax.jobs import build

PYTHON = r"""
printf '%s | %s | %s | %s\n' "$*" "${PIP_NO_INDEX-}${PIP_FIND_LINKS-}" "${XLA_FLAGS-}" \
  "${VIT_JAX_TEST_PLATFORM-}" >> "$FAKE/calls"
case "$*" in
  *"print(sys.executable)"*) echo "$0" ;;
  "-m venv"*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  *"import jax"*) exit "${NO_GPU:-0}" ;;
  *"xla_flags gpu") printf '%s\n' one two ;;
  *"xla_flags one") printf '%s\n' "XLA_FLAGS=${XLA_FLAGS-} --one=1" NCCL=1 ;;
  *"xla_flags two") echo 'A=b c' ;;
  *xla_flags) echo 'all sets' ;;
  "-m pytest"*) if [ -n "${WRONG-}" ] && [ "${XLA_FLAGS-}" != "${XLA_FLAGS#*--one=1}" ]; then exit 1; fi ;;
  *models=B/16*attention.kernel=cudnn*--to=*/bench*) echo 'broken'; exit "${BREAKS:-0}" ;;
esac"""


@pytest.fixture
def gpu(machines: Machines) -> Machines:
  machines.add('nvidia-smi', NOTE)
  machines.add('some-python', PYTHON)
  machines.env |= {'PYTHON': str(machines.folder / 'bin' / 'some-python')}
  machines.env.pop('XLA_FLAGS', None)
  return machines


def check(gpu: Machines, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
  return gpu.run('../benchmarks/gpu_check.sh', 'out', f'--python={gpu.env["PYTHON"]}', *arguments, **env)


def test_all_is_timed_after_the_tests_each_part_with_its_log(gpu: Machines) -> None:
  torch = f'--torch={gpu.env["PYTHON"]}'
  found = check(gpu, torch, '--turns=3', '--batch_sizes=8,4,2')
  assert found.returncode == 0, found.stdout + found.stderr
  lines = (gpu.folder / 'out' / 'summary.txt').read_text().splitlines()
  parts = [line.split()[-1] for line in lines]
  assert parts[:3] == ['machine', 'tests', 'bench-S_16-xla'] and all(line.startswith('ok') for line in lines)
  assert len(parts) == 2 + 6 + 6 + 6 and len(set(parts)) == len(parts)
  out = sorted(path.name for path in (gpu.folder / 'out').iterdir())
  assert out == sorted(['machine.txt', 'summary.txt', 'flags.txt', *(f'{part}.log' for part in parts[1:])])
  tests, *of_flags = [call for call in gpu.calls if '-m pytest' in call]
  assert 'tests/test_gpu.py' in tests and tests.endswith('| cuda,cpu') and len(of_flags) == 2
  (bench,) = [call for call in gpu.calls if '--to=' in call and 'bench-L_16-cudnn' in call]
  same = '--config=bench:bf16 --models=L/16 --turns=3 --config.model.attention.kernel=cudnn --config.batch_size=2 '
  assert bench.startswith(f'-m benchmarks.bench {same}') and gpu.count(f'-m benchmarks.bench {same}') == 2
  assert f'--against=timm={gpu.env["PYTHON"]},timm-compiled={gpu.env["PYTHON"]}' in bench
  assert gpu.count('--search') == 6 and gpu.count('search-B_16-xla --search') == 1


def test_what_is_timed_needs_no_package_that_decodes_images(gpu: Machines) -> None:
  """OpenCV alone is larger than all wheels that travel together may be."""
  assert check(gpu, '--only=bench', '--models=S/16', '--batch_sizes=8').returncode == 0
  for call in (call for call in gpu.calls if 'benchmarks.bench' in call):
    overrides = re.findall(r'--config\.(\S+=\S+)', call.partition('--to=')[0])
    config = files.load('bench:bf16', overrides)
    assert build.open_data(config).in_memory, overrides


def test_layers_and_switches_are_timed_one_by_one_beside_those_that_a_person_has_set(gpu: Machines) -> None:
  assert check(gpu, '--only=switches', XLA_FLAGS='--own=1').returncode == 0
  timed = [call.split(' | ') for call in gpu.calls if 'benchmarks.bench' in call]
  assert [call[2] for call in timed] == ['--own=1'] * 4
  assert [call[0].partition('--flags=')[2].strip() for call in timed] == ['', '', 'one', 'two']
  assert ['execution=scan' in call[0] for call in timed] == [False, True, False, False]
  assert all('--models=B/16' in call[0] and 'attention.kernel=cudnn' in call[0] for call in timed)
  tested = [call.split(' | ') for call in gpu.calls if '-m pytest' in call]
  assert [call[2] for call in tested] == ['--own=1 --one=1', '--own=1']
  assert all('-k steps or training' in call[0] for call in tested)
  assert (gpu.folder / 'out' / 'flags.txt').read_text() == 'all sets\n'


def test_flags_with_which_training_goes_wrong_are_not_timed(gpu: Machines) -> None:
  assert check(gpu, '--only=switches', WRONG='1').returncode == 1
  lines = (gpu.folder / 'out' / 'summary.txt').read_text().splitlines()
  assert [line.split()[-1] for line in lines if line.startswith('failed')] == ['tests-one']
  assert not gpu.count('--flags=one') and gpu.count('--flags=two') == 1


def test_a_part_that_fails_is_reported_and_the_others_continue(gpu: Machines) -> None:
  found = check(gpu, '--only=bench', BREAKS='2')
  assert found.returncode == 1 and 'Failed parts: 1' in found.stdout
  lines = (gpu.folder / 'out' / 'summary.txt').read_text().splitlines()
  assert [line.split()[-1] for line in lines if line.startswith('failed')] == ['bench-B_16-cudnn']
  assert lines[-1].endswith('bench-L_16-cudnn')
  assert (gpu.folder / 'out' / 'bench-B_16-cudnn.log').read_text() == 'broken\n'


def test_without_a_network_all_comes_from_a_folder_of_wheels(gpu: Machines) -> None:
  root, wheels = gpu.folder / 'root', gpu.folder / 'my wheels'
  wheels.mkdir()
  shutil.copytree(ROOT / 'launch', root / 'launch')
  (root / 'benchmarks').mkdir()
  shutil.copy(ROOT / 'benchmarks' / 'gpu_check.sh', root / 'benchmarks')
  for name in ('setup.py', 'pyproject.toml'):
    shutil.copy(ROOT / name, root)
  found = subprocess.run([BASH, str(root / 'benchmarks' / 'gpu_check.sh'), '--only=tests', '--extra=gpu12',
                          f'--wheels={wheels}'], env=gpu.env, text=True, capture_output=True, check=False,
                         timeout=HANGS_S, cwd=gpu.folder)
  assert found.returncode == 0, found.stdout + found.stderr
  (install,) = [call for call in gpu.calls if 'pip install' in call]
  assert f'--editable {root}[gpu12,test] | 1{wheels} |' in install
  assert pathlib.Path(gpu.folder, 'runs', 'gpu', 'summary.txt').exists()


def test_quick_runs_the_tests_and_steps_of_two_networks_and_makes_one_archive(gpu: Machines) -> None:
  (gpu.folder / 'wheels').mkdir()
  (gpu.folder / 'wheels' / 'a.whl').touch()
  found = check(gpu, '--quick', f'--wheels={gpu.folder / "wheels"}')
  assert found.returncode == 0, found.stdout + found.stderr
  assert [line.split()[-1] for line in (gpu.folder / 'out' / 'summary.txt').read_text().splitlines()] == [
      'machine', 'tests', 'steps']
  (tests,) = [call for call in gpu.calls if '-m pytest' in call]
  assert tests.endswith('| cuda,cpu') and 'test_golden' not in tests
  (steps,) = [call for call in gpu.calls if '-m benchmarks.steps' in call]
  kernels = [f':attention.kernel={kernel}' for kernel in ('cudnn', 'xla')]
  rows = [f'L/16:128{kernel}:execution=scan' for kernel in kernels] + [f'B/16:128{kernel}' for kernel in kernels]
  assert f'--rows={",".join(rows)} ' in steps and '--against=timm-compiled=' in steps
  (install,) = [call for call in gpu.calls if 'pip install' in call]
  assert '--no-index --no-deps' in install and f'--target {gpu.folder}/out/packages' in install
  with tarfile.open(gpu.folder / 'out.tar.gz') as archive:
    assert {'out/summary.txt', 'out/tests.log', 'out/machine.txt'} <= set(archive.getnames())


def test_a_rehearsal_needs_no_gpu(gpu: Machines) -> None:
  (gpu.folder / 'bin' / 'nvidia-smi').unlink()
  assert check(gpu, '--rehearse').returncode == 0
  assert gpu.count('--px=32') == 4 and not gpu.count('attention.kernel=cudnn')
  assert gpu.count('--rows=S/16:4:attention.kernel=xla:depth=2,Ti/16:4:attention.kernel=xla:depth=2') == 1
  assert gpu.count('--flags=one') == gpu.count('--flags=two') == 1
  assert all(call.endswith('| cpu') for call in gpu.calls if '-m pytest' in call)


@pytest.mark.parametrize('arguments, said', [
    (['--modles=S/16'], '--modles=S/16: no such flag; see --help'),
    (['--models=S/16'], '--models has 1 networks, but --batch_sizes 3'),
    (['--only=tests,all'], '--only: expected some of tests,bench,search,switches, got all'),
    (['--wheels=/none'], '--wheels=/none: no such folder')])
def test_mistakes_are_reported_before_anything_is_done(gpu: Machines, arguments: list[str], said: str) -> None:
  found = check(gpu, *arguments)
  assert found.returncode == 2 and said in found.stderr and gpu.calls == []


def test_a_machine_without_a_gpu_is_reported(gpu: Machines) -> None:
  found = check(gpu, NO_GPU='1')
  assert found.returncode == 2 and 'jax sees no GPU here' in found.stderr
  assert not [call for call in gpu.calls if '-m pytest' in call]
  gpu.add('nvidia-smi', 'exit 1')
  (gpu.folder / 'bin' / 'nvidia-smi').unlink()
  if not shutil.which('nvidia-smi'):
    assert 'nvidia-smi: expected a machine with an NVIDIA GPU' in check(gpu).stderr
