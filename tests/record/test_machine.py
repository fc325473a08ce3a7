"""The description of a machine, and which differences change the bits of a run."""
from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import pytest

from vit_jax.record import machine

CHILD = """
import jax
from vit_jax.record import machine
before = machine.cpu_threads()
jax.devices()
print(before, machine.running_threads())
"""
CPU: dict[str, Any] = {'device_kind': 'cpu', 'cpu_threads': 2, 'cores': 2, 'cpu_model': 'A', 'cpu_isa': 'AVX2',
                       'XLA_FLAGS': '', 'ONEDNN_MAX_CPU_ISA': '', 'versions': {'jax': '1', 'numpy': '1'}}


@pytest.mark.skipif(not pathlib.Path('/proc/self/task').exists(), reason='threads are counted as Linux lists them')
def test_the_pool_has_the_size_that_the_environment_gives() -> None:
  environ = {name: value for name, value in os.environ.items() if name not in ('XLA_FLAGS', *machine.POOL_VARIABLES)}
  done = subprocess.run([sys.executable, '-c', CHILD], env=environ | {'NPROC': '3', 'PJRT_NPROC': 'x'},
                        capture_output=True, text=True, check=True)
  assert done.stdout.split() == ['3', '3']


@pytest.mark.parametrize(('variables', 'expected'), [
    ({}, ('', 0)), ({'NPROC': '3'}, ('NPROC', 3)), ({'NPROC': '3', 'PJRT_NPROC': '5'}, ('PJRT_NPROC', 5)),
    ({'NPROC': '3', 'PJRT_NPROC': 'many'}, ('NPROC', 3)), ({'PJRT_NPROC': '0'}, ('', 0))])
def test_the_first_variable_that_is_a_number_gives_the_size(
    variables: dict[str, str], expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
  for name in machine.POOL_VARIABLES:
    monkeypatch.delenv(name, raising=False)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  assert machine.given_threads() == expected


def test_a_description_is_json_and_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('ONEDNN_MAX_CPU_ISA', 'AVX2')
  found = machine.describe()
  assert json.loads(json.dumps(found)) == found and found['ONEDNN_MAX_CPU_ISA'] == 'AVX2'
  assert found['device_kind'] == jax.devices()[0].device_kind and found['versions']['jax'] == jax.__version__
  assert found['cpu_threads'] >= 1 and found['cores'] == machine.cores() >= 1


def test_the_processor_is_the_first_one_of_the_list(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  file = tmp_path / 'cpuinfo'
  file.write_text('processor : 0\nmodel name\t: CPU 1 @ 2 GHz\nflags\t\t: fpu avx avx2 avx512f avx512_vnni\n'
                  'processor : 1\nmodel name\t: CPU 2\nflags\t\t: fpu\n')
  monkeypatch.setattr(machine, 'CPUINFO', file)
  assert (machine.cpu_model(), machine.cpu_isa()) == ('CPU 1 @ 2 GHz', 'AVX512_VNNI')
  file.write_text('Features\t: fp asimd evtstrm sve\n')
  assert machine.cpu_isa() == 'SVE'
  file.unlink()
  assert machine.cpu_isa() == ''


def test_differences_are_what_changes_the_bits_on_a_cpu() -> None:
  now = CPU | {'cpu_threads': 4, 'cores': 8, 'cpu_isa': 'AVX512', 'versions': {'jax': '2', 'numpy': '2'}}
  assert machine.differences(CPU, now) == {'cpu_threads': (2, 4), 'cpu_isa': ('AVX2', 'AVX512'), 'jax': ('1', '2')}
  assert machine.differences({}, now) == {} == machine.differences(CPU, CPU | {'cores': 8})


def test_on_accelerators_the_processor_does_not_change_the_bits() -> None:
  before, now = CPU | {'device_kind': 'TPU v4'}, CPU | {'device_kind': 'TPU v4', 'cpu_threads': 8, 'cpu_model': 'B'}
  assert machine.differences(before, now) == {}
  assert machine.differences(before, CPU) == {'device_kind': ('TPU v4', 'cpu')}


class Device:
  def __init__(self, stats: dict[str, int] | None) -> None:
    self._stats = stats

  def memory_stats(self) -> dict[str, int] | None:
    return self._stats


def test_an_accelerator_counts_its_own_memory_and_else_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(jax, 'local_devices', lambda: [Device({'bytes_in_use': 3 * 2**29})])
  assert machine.used_memory_gib() == 1.5
  monkeypatch.setattr(jax, 'local_devices', lambda: [Device(None)])
  assert .05 < (machine.used_memory_gib() or 0.) < 64.  # this process has jax in it
  monkeypatch.setattr(machine, 'STATM', machine.pathlib.Path('/nowhere'))
  assert machine.used_memory_gib() is None
