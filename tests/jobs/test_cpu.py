"""The bits of a run on CPUs follow from its settings or its record, not from the cores of the machine."""
from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import pytest
import runs

from vit_jax.config import check, files, schema
from vit_jax.core.errors import UserError
from vit_jax.jobs import resume, startup
from vit_jax.record import checkpoint_files, machine

SUMS = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.jobs import startup
from vit_jax.record import machine
startup.start(schema.Train(cpu_threads=int(sys.argv[1])))
draw = np.random.default_rng(0).standard_normal
x, y = (jnp.asarray(draw((2048, width)), jnp.float32) for width in (64, 128))
print(machine.running_threads(), trees.digest(jax.jit(lambda x, y: (x.T @ y, y.sum(0)))(x, y)))
"""
needs_affinity = pytest.mark.skipif(
    not hasattr(os, 'sched_setaffinity') or machine.cores() < 2, reason='needs Linux and two cores')
BEFORE: dict[str, Any] = {'device_kind': 'cpu', 'cpu_threads': 6, 'XLA_FLAGS': ''}


@contextlib.contextmanager
def on_cores(number: int) -> Iterator[None]:
  """What this thread starts meanwhile has so many cores, and no pool of its own."""
  all_cores = os.sched_getaffinity(0)
  with pytest.MonkeyPatch.context() as patch:
    for name in machine.POOL_VARIABLES:
      patch.delenv(name, raising=False)
    os.sched_setaffinity(0, sorted(all_cores)[:number])
    try:
      yield
    finally:
      os.sched_setaffinity(0, all_cores)


@needs_affinity
def test_sums_of_a_fixed_pool_are_the_same_on_one_core_and_on_two() -> None:
  found = []
  for number in (1, 2):
    with on_cores(number):
      found.append(subprocess.run([sys.executable, '-c', SUMS, '3'], capture_output=True, text=True, check=True,
                                  env=runs.environment()).stdout.split())
  assert found[0] == found[1] and found[0][0] == '3'


@needs_affinity
@pytest.mark.slow(reason='25 s: three starts of a run; its parts are tested above and below')
def test_a_run_that_begins_on_one_core_resumes_on_two_bit_for_bit(tmp_path: pathlib.Path) -> None:
  steps = ('--config.length=24 steps', '--config.checkpoints.every=8 steps', '--config.train.cpu_threads=0',
           '--config.batch_size=128')
  whole, split = tmp_path / 'whole', tmp_path / 'split'
  with on_cores(1):
    runs.finish(runs.start(whole, *steps))
    process = runs.start(split, *steps)
    runs.wait_for_checkpoint(process, split)
    runs.kill(process)
  with on_cores(2):
    text = runs.finish(runs.start(split, *steps))
  assert 'XLA runs 1 thread on 2 cores, as before in this run' in text and 'not bit for bit' not in text
  assert runs.final(split)['params_digest'] == runs.final(whole)['params_digest']
  assert [event['machine']['cores'] for event in runs.events(split, 'start')] == [1, 2]


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
  """The environment of a process whose devices are not initialized, on two cores."""
  for name in ('XLA_FLAGS', *machine.POOL_VARIABLES, *startup.PORTABLE_VARIABLES):
    monkeypatch.setenv(name, '')  # so that it is restored at the end
    monkeypatch.delenv(name)
  monkeypatch.setattr(machine, 'running_threads', lambda: 0)
  monkeypatch.setattr(machine, 'cores', lambda: 2)
  return os.environ


@pytest.mark.parametrize(('threads', 'before', 'expected', 'note'), [
    (0, {}, None, ''),
    (2, {}, '2', ''),
    (1, BEFORE, '1', 'info: XLA runs 1 thread on 2 cores, as set by train.cpu_threads=1, so that the bits of the run '
                     'do not depend on the cores. --config.train.cpu_threads=2 is faster, and changes the last bits.'),
    (0, BEFORE, '6', 'info: XLA runs 6 threads on 2 cores, as before in this run, so that the bits of the run do not '
                     'depend on the cores.'),
    (9, {}, '9', 'warning: XLA runs 9 threads on 2 cores, as set by train.cpu_threads=9, so that the bits of the run '
                 'do not depend on the cores. So many threads a core take time; --config.train.cpu_threads=2 is '
                 'faster, and changes the last bits.'),
    (0, BEFORE | {'device_kind': 'TPU v4'}, None, ''),
    (0, BEFORE | {'XLA_FLAGS': '--xla_force_host_platform_device_count=8'}, None, ''),
    (0, {'device_kind': 'cpu'}, None, '')])
def test_the_setting_or_the_record_decides_the_pool(
    threads: int, before: dict[str, Any], expected: str | None, note: str, environ: Mapping[str, str]) -> None:
  notes = startup.fix_cpu(schema.Train(cpu_threads=threads), before)
  assert environ.get('PJRT_NPROC') == expected
  assert [f'{logging.getLevelName(one.level).lower()}: {one.text}' for one in notes] == [note][:bool(note)]


@pytest.mark.parametrize(('name', 'running', 'cause'), [
    ('PJRT_NPROC', 0, 'PJRT_NPROC=4'), ('NPROC', 0, 'NPROC=4'),
    ('', 4, 'the devices of this process, which are initialized')])
def test_a_pool_of_the_user_stays_with_a_warning(
    name: str, running: int, cause: str, environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(machine, 'running_threads', lambda: running)
  if name:
    monkeypatch.setenv(name, '4')
  note, = startup.fix_cpu(schema.Train(cpu_threads=2), {})
  assert note == (logging.WARNING, 'train.cpu_threads: expected 2 threads, as set by train.cpu_threads=2, got 4 by '
                  f'{cause}. The last bits of this run depend on this number.')
  assert environ.get('PJRT_NPROC') == ('4' if name == 'PJRT_NPROC' else None)
  assert startup.fix_cpu(schema.Train(cpu_threads=4), {})[0].level == logging.INFO
  assert not startup.fix_cpu(schema.Train(), {})
  assert not startup.fix_cpu(schema.Train(), BEFORE)  # what resumes is compared with its checkpoint, `warn_of_machine`


def test_simulated_devices_have_threads_enough_whatever_the_setting(
    environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr('jax.config.update', lambda *_: None)
  monkeypatch.setenv('XLA_FLAGS', '--a=1 --xla_force_host_platform_device_count=3')
  monkeypatch.setenv('NPROC', '2')  # two devices would wait for each other
  assert not startup.fix_cpu(schema.Train(cpu_threads=2), {}) and environ['PJRT_NPROC'] == '24'
  monkeypatch.delenv('PJRT_NPROC')
  assert not startup.fix_cpu(schema.Train(cpu_threads=25), {}) and environ['PJRT_NPROC'] == '25'


def test_a_portable_run_is_limited_to_avx2(environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(machine, 'cpu_isa', lambda: 'AVX512')
  monkeypatch.setenv('XLA_FLAGS', '--a=1')
  train = schema.Train(cpu_threads=2, portable=True)
  assert not startup.fix_cpu(train, {}) and not startup.fix_cpu(train, {})  # the second time nothing is added
  assert environ['XLA_FLAGS'] == '--xla_cpu_enable_platform_dependent_math=false --xla_cpu_max_isa=AVX2 --a=1'
  assert environ['ONEDNN_MAX_CPU_ISA'] == environ['DNNL_MAX_CPU_ISA'] == 'AVX2' and environ['PJRT_NPROC'] == '2'
  monkeypatch.setenv('XLA_FLAGS', '--xla_cpu_max_isa=AVX512')
  monkeypatch.setenv('ONEDNN_MAX_CPU_ISA', 'DEFAULT')
  note, = startup.fix_cpu(train, {})
  assert note == (logging.WARNING, 'train.portable: expected AVX2 alone, got --xla_cpu_max_isa=AVX512, '
                  'ONEDNN_MAX_CPU_ISA=DEFAULT. The bits may depend on the processor.')


def test_a_portable_run_needs_avx2_and_two_threads(environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(machine, 'cpu_isa', lambda: 'NEON')
  with pytest.raises(UserError, match='train.portable: expected a processor with AVX2, got .* with NEON. Set --config'):
    startup.fix_cpu(schema.Train(cpu_threads=2, portable=True), {})
  config = files.load('digits', ['train.portable=true', 'train.cpu_threads=1'])
  assert any('train.cpu_threads: expected at least 2 with train.portable=true, got 1. Set' in one
             for one in check.problems(config))


def test_the_machine_before_is_that_of_the_newest_readable_checkpoint(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  assert resume.find_machine(tmp_path) == {}
  for step, threads in ((5, 3), (10, 4)):
    path = tmp_path / 'checkpoints' / str(step) / checkpoint_files.META
    path.parent.mkdir(parents=True)
    body = {'machine': machine.describe() | {'cpu_threads': threads}}
    path.write_text(json.dumps(checkpoint_files.seal(body)))
  assert resume.find_machine(tmp_path)['cpu_threads'] == 4
  path.write_text('damaged')
  found = resume.find_machine(tmp_path)
  assert found['cpu_threads'] == 3
  resume.warn_of_machine({'machine': found | {'cpu_threads': machine.cpu_threads()}})
  resume.warn_of_machine({})
  assert not caplog.text
  resume.warn_of_machine({'machine': found | {'cpu_model': 'Other'}})
  assert 'The run continues, but not bit for bit as on the machine before:\n  cpu_threads: 3 -> ' in caplog.text
  assert f'\n  cpu_model: Other -> {machine.cpu_model() or "none"}\n' in caplog.text


def test_a_resume_on_a_gpu_is_not_exact_without_the_flags_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_deterministic_ops=true --xla_dump_to=x')
  resume.warn_of_machine({})
  assert not caplog.text
  monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_deterministic_ops=false')
  resume.warn_of_machine({})
  assert 'started with --flags=deterministic resumes with the same bits' in caplog.text
