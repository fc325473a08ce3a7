"""XLA's switches: that they exist, and what is set where."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vit_jax.parallel import xla_flags


def start_jax(flags: str) -> subprocess.CompletedProcess[str]:
  """A process that compiles with these switches. XLA reads those of GPUs on any machine."""
  return subprocess.run([sys.executable, '-c', 'import jax; print(jax.jit(lambda x: x + 1)(1))'], capture_output=True,
                        text=True, check=False, env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags})


@pytest.mark.slow(reason='3 s: starts programs')
def test_xla_knows_every_switch_of_the_table_and_no_other() -> None:
  flags = [flag.text for platform in ('gpu', 'cpu') for flag in xla_flags.FLAGS[platform]]
  known = ' '.join([*flags, *xla_flags.PORTABLE])
  done = start_jax(known)
  assert done.returncode == 0 and done.stdout == '2\n', done.stderr
  broken = start_jax(known.replace('triton_gemm', 'tryton_gemm'))
  assert broken.returncode != 0 and 'Unknown flag' in broken.stderr and 'tryton_gemm' in broken.stderr


def test_what_is_on_by_itself_has_a_known_effect() -> None:
  flags = [flag for each in xla_flags.FLAGS.values() for flag in each]
  assert all(flag.text.startswith('--xla_') and '=' in flag.text and flag.purpose and flag.effect for flag in flags)
  assert not [flag.text for flag in flags if flag.default and flag.effect == 'not measured']


@pytest.mark.parametrize('own', ['', '--a=1', ' --a=1  --b="2 3"'])
def test_default_flags_are_added_to_the_flags_of_the_user(own: str) -> None:
  environ = {'LIBTPU_INIT_ARGS': own, 'XLA_FLAGS': own} if own else {}
  for platform in (*xla_flags.FLAGS, *xla_flags.FLAGS):  # a process of a process adds nothing again
    xla_flags.choose(environ, platform)
  default = '--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000'
  assert environ.pop('LIBTPU_INIT_ARGS') == f'{default} {own.strip()}'.strip() and xla_flags.defaults('tpu') == default
  assert environ == ({'XLA_FLAGS': own} if own else {})  # no flag of other platforms is set by default


def test_the_user_changes_a_default_flag_by_setting_it() -> None:
  environ = {'LIBTPU_INIT_ARGS': '--a=1 --xla_jf_spmd_threshold_for_windowed_einsum_mib=7'}
  xla_flags.choose(environ, 'tpu')
  assert environ == {'LIBTPU_INIT_ARGS': '--a=1 --xla_jf_spmd_threshold_for_windowed_einsum_mib=7'}


def test_the_table_is_printed_and_the_switches_of_a_platform_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
  xla_flags.main([])
  text = capsys.readouterr().out
  assert all(flag.text in text and flag.effect in text for each in xla_flags.FLAGS.values() for flag in each)
  assert 'tpu, LIBTPU_INIT_ARGS, set by default:' in text and 'gpu, XLA_FLAGS:' in text
  xla_flags.main(['gpu'])
  assert capsys.readouterr().out.splitlines() == [flag.text for flag in xla_flags.FLAGS['gpu']]
  with pytest.raises(SystemExit, match='platform: expected one of tpu, gpu, cpu, got nvidia'):
    xla_flags.main(['nvidia'])
