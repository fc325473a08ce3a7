"""XLA's switches: that they exist, and what is set where."""
from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types

import pytest

from vit_jax import main
from vit_jax.parallel import hardware, xla_flags


def start_jax(flags: str) -> subprocess.CompletedProcess[str]:
  """A process that compiles with these switches. XLA reads those of GPUs on any machine."""
  return subprocess.run([sys.executable, '-c', 'import jax; print(jax.jit(lambda x: x + 1)(1))'], capture_output=True,
                        text=True, check=False, env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags})


@pytest.mark.slow(reason='3 s: starts programs')
def test_xla_knows_every_switch_of_the_table_and_no_other() -> None:
  flags = [text for one in xla_flags.SETS.values() if one.platform != 'tpu' for text in one.flags]
  known = ' '.join([*dict.fromkeys(flags), *xla_flags.PORTABLE])
  done = start_jax(known)
  assert done.returncode == 0 and done.stdout == '2\n', done.stderr
  broken = start_jax(known.replace('triton_gemm', 'tryton_gemm'))
  assert broken.returncode != 0 and 'Unknown flag' in broken.stderr and 'tryton_gemm' in broken.stderr


def test_what_is_on_by_itself_has_a_known_effect() -> None:
  assert all(text.startswith('--xla_') and '=' in text for one in xla_flags.SETS.values() for text in one.flags)
  assert all(one.purpose and one.effect and (one.flags or one.variables) for one in xla_flags.SETS.values())
  on = [name for name, one in xla_flags.SETS.items() if one.default]
  assert on == ['whole_kernels', 'cublas'] and all(xla_flags.SETS[name].effect != 'not measured' for name in on)


@pytest.mark.parametrize('own', ['', '--a=1', ' --a=1  --b="2 3"'])
def test_default_flags_are_added_to_the_flags_of_the_user(own: str) -> None:
  environ = {'LIBTPU_INIT_ARGS': own, 'XLA_FLAGS': own} if own else {}
  for platform in ('tpu', 'cpu', 'tpu', 'cpu'):  # a process of a process adds nothing again
    xla_flags.choose(environ, platform)
  default = '--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000'
  assert environ.pop('LIBTPU_INIT_ARGS') == f'{default} {own.strip()}'.strip() and xla_flags.defaults('tpu') == default
  assert environ == ({'XLA_FLAGS': own} if own else {})  # no flag of a CPU is set by default
  xla_flags.choose(environ, 'gpu')
  xla_flags.choose(environ, 'gpu')
  assert environ == {'XLA_FLAGS': f'{xla_flags.defaults("gpu")} {own.strip()}'.strip()}


def test_the_user_changes_a_default_flag_by_setting_it() -> None:
  environ = {'LIBTPU_INIT_ARGS': '--a=1 --xla_jf_spmd_threshold_for_windowed_einsum_mib=7'}
  xla_flags.choose(environ, 'tpu')
  assert environ == {'LIBTPU_INIT_ARGS': '--a=1 --xla_jf_spmd_threshold_for_windowed_einsum_mib=7'}


def test_the_table_is_printed_and_the_switches_of_a_platform_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
  xla_flags.main([])
  text = capsys.readouterr().out
  for one in xla_flags.SETS.values():
    assert all(shown in text for shown in (one.purpose, one.source, one.effect, *one.flags, *one.variables))
  assert 'whole_kernels: tpu, set by default\n  LIBTPU_INIT_ARGS: --xla_jf' in text and 'gpu\n  XLA_FLAGS: --' in text
  xla_flags.main(['gpu'])
  assert capsys.readouterr().out.splitlines() == [
      name for name, one in xla_flags.SETS.items() if one.platform == 'gpu']
  with pytest.raises(SystemExit, match='name: expected one of tpu, gpu, cpu, whole_kernels, .*, got nvidia'):
    xla_flags.main(['nvidia'])


def test_the_variables_of_sets_are_printed_with_those_of_the_user(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XLA_FLAGS', '--own=1')
  monkeypatch.setenv('NCCL_PROTO', 'LL')
  monkeypatch.delenv('NCCL_NVLS_ENABLE', raising=False)
  monkeypatch.delenv('CUDA_DEVICE_MAX_CONNECTIONS', raising=False)
  xla_flags.main(['cublas', 'nccl'])
  assert sorted(capsys.readouterr().out.splitlines()) == [
      'CUDA_DEVICE_MAX_CONNECTIONS=1', 'NCCL_NVLS_ENABLE=1', f'XLA_FLAGS={xla_flags.defaults("gpu")} --own=1']


def test_of_two_sets_the_earlier_one_and_before_it_the_user_decides() -> None:
  environ = {'XLA_FLAGS': '--xla_gpu_enable_triton_gemm=true'}
  xla_flags.choose(environ, 'gpu', ['no_graphs', 'maxtext_node'])
  flags = environ['XLA_FLAGS'].split()
  names = [xla_flags.name_of(text) for text in flags]
  assert len(names) == len(set(names)) and '--xla_gpu_enable_triton_gemm=true' in flags
  assert '--xla_gpu_enable_command_buffer=' in flags
  environ = {}
  xla_flags.choose(environ, 'gpu', ['few_graphs', 'no_graphs'])
  assert environ == {'XLA_FLAGS': f'{xla_flags.defaults("gpu")} --xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL'}


@pytest.mark.parametrize(('topology', 'kind', 'refused'), [
    ('v5e:4x4', '', 'v5e'), ('', 'v5litepod-16', 'v5e'), ('v4-32', 'v6e-8', 'v4'), ('tpu7x:2x2x1', '', 'tpu7x'),
    ('v6e:4x4', 'v5litepod-16', ''), ('trillium-16', '', ''), ('', 'v6e-8', ''), ('h200:8', '', ''), ('', '', '')])
def test_flags_for_other_tpus_are_refused_by_topology_or_machine(
    topology: str, kind: str, refused: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  """On v5e the flags of SparseCores are harmful: gathers that run beside products would wait."""
  environ = {'JAX_PLATFORMS': 'cpu', 'TPU_ACCELERATOR_TYPE': kind}
  monkeypatch.setattr(os, 'environ', environ)
  monkeypatch.setattr(hardware.choose, '__defaults__', (environ,))
  monkeypatch.setattr(importlib, 'import_module', lambda name: types.SimpleNamespace(run=lambda **given: 0))
  words = ['plan', f'--topology={topology}'] if topology else ['train']
  assert main.run([*words, '--config=digits', '--flags=scatter_layout,sparsecore']) == (2 if refused else 0)
  error = capsys.readouterr().err
  assert ('sparse_core' in environ.get('LIBTPU_INIT_ARGS', '')) is not bool(refused)
  if refused:
    assert f'--flags: expected sets of flags for {refused}, got sparsecore, which is for v5p and v6e.' in error


def test_a_job_sets_the_flags_that_the_command_line_names_before_jax_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  environ = {'JAX_PLATFORMS': 'cpu'}
  monkeypatch.setattr(os, 'environ', environ)
  monkeypatch.setattr(hardware.choose, '__defaults__', (environ,))
  job = types.SimpleNamespace(run=lambda **given: 'flags' in given)
  monkeypatch.setattr(importlib, 'import_module', lambda name: job)
  assert main.parse(['train', '--config=digits', '--flags=cublas,user_buffers']).run(main.parse) is False
  assert environ == {'JAX_PLATFORMS': 'cpu', 'NCCL_NVLS_ENABLE': '1', 'XLA_FLAGS':
                     f'--xla_gpu_enable_nccl_user_buffers=true {xla_flags.defaults("gpu")}'}
  assert main.run(['train', '--config=digits', '--flags=overlpa']) == 2
  assert 'Did you mean overlap?' in capsys.readouterr().err
