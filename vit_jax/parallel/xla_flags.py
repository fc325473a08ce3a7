"""XLA flags by platform: their purpose, and their known effect.

Only a flag whose effect is known is set by default; the others are set by the user in the variable that jax reads at
its start: `XLA_FLAGS='--a=1 --b=2' vit-jax train …`. The default flags are added to the user's own, except a flag that
the user sets: `LIBTPU_INIT_ARGS='--c=3'` keeps the defaults and adds `--c=3`. `python -m vit_jax.parallel.xla_flags`
prints the table, and with the name of a platform its flags alone; `launch/gpu_check.sh` times the flags of GPUs one by
one.

XLA aborts at its start if it does not know a flag; the tests try all of them. Imports no jax.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable, MutableMapping
from typing import NamedTuple

VARIABLES = {'tpu': 'LIBTPU_INIT_ARGS', 'gpu': 'XLA_FLAGS', 'cpu': 'XLA_FLAGS'}
"""The variables from which jax reads the flags of a platform."""


class Flag(NamedTuple):
  """A flag. `effect`: what was measured, and where; `default`: set unless the user sets this flag."""
  text: str
  purpose: str
  effect: str
  default: bool = False


# None for CPUs: no flag that was tried made a step faster.
FLAGS = {
    'tpu': (
        Flag('--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000',
             'gathers a sharded kernel before the product that needs it, instead of splitting the product into one '
             'part for each device and summing the results in memory, as the compiler does if fsdp spans all devices',
             'a step of L/16, 64 images a device, fsdp=16 on v5e:4x4: 393 ms, 823 without (cycles of libtpu 0.0.52, '
             'not measured on a TPU)', default=True),
    ),
    'gpu': (
        Flag('--xla_gpu_enable_latency_hiding_scheduler=true',
             'sends gradients and sharded kernels between GPUs while products run; no effect on one GPU',
             'not measured'),
        Flag('--xla_gpu_all_reduce_combine_threshold_bytes=134217728',
             'reduces up to 128 MiB of gradients in one call; no effect on one GPU', 'not measured'),
        Flag('--xla_gpu_enable_triton_gemm=false', 'uses cuBLAS for all products', 'not measured'),
        Flag('--xla_gpu_enable_command_buffer=', 'launches kernels one by one, not as CUDA graphs', 'not measured'),
    ),
    'cpu': (),
}


PORTABLE = ('--xla_cpu_enable_platform_dependent_math=false', '--xla_cpu_max_isa=AVX2')
"""Flags of `train.portable`: exp, tanh and the like by formulas of XLA, and vectors of one length for all sums."""


def defaults(platform: str) -> str:
  """Returns the default flags of a platform, in the form of its variable."""
  return ' '.join(flag.text for flag in FLAGS[platform] if flag.default)


def merged(platform: str, own: str) -> str:
  """Returns the user's `own` flags of a platform after the default ones that the user does not set."""
  return join([flag.text for flag in FLAGS[platform] if flag.default], own)


def join(flags: Iterable[str], own: str) -> str:
  """Returns the user's `own` flags after those of `flags` that the user does not set."""
  names = {name_of(text) for text in own.split()}
  return ' '.join([*(text for text in flags if name_of(text) not in names), *filter(None, [own.strip()])])


def name_of(text: str) -> str:
  """Returns the name of a flag, with its dashes."""
  return text.partition('=')[0]


def choose(environ: MutableMapping[str, str], platform: str) -> None:
  """Adds the default flags of a platform to its variable; call it before jax starts."""
  if defaults(platform):
    environ[VARIABLES[platform]] = merged(platform, environ.get(VARIABLES[platform], ''))


def table() -> str:
  """Returns all flags with their purposes and effects."""
  return '\n\n'.join(
      f'{platform}, {VARIABLES[platform]}{", set by default" * flag.default}:\n  {flag.text}\n'
      f'  {flag.purpose}\n  effect: {flag.effect}' for platform, flags in FLAGS.items() for flag in flags)


def main(arguments: list[str]) -> None:
  """Prints the table, or one line for each flag of a platform."""
  if arguments and arguments[0] not in FLAGS:
    sys.exit(f'platform: expected one of {", ".join(FLAGS)}, got {arguments[0]}.')
  print('\n'.join(flag.text for flag in FLAGS[arguments[0]]) if arguments else table())


if __name__ == '__main__':
  main(sys.argv[1:])
