"""Switches of XLA that are worth knowing, platform by platform: what each is for, and what is known of its effect.

Only one whose effect is known is switched on by itself (`default`); the others are chosen by a person, in the variable
that jax reads at its start: `XLA_FLAGS='--a=1 --b=2' vit-jax train …`. A variable that a person has set, be it to
nothing, is left as it is. `python -m vit_jax.parallel.xla_flags` prints the table, and with a platform behind it the
switches alone; `launch/gpu_check.sh` times those of GPUs one by one.

A program ends at its start with a switch that its XLA does not know; the tests try them. Imports no jax.
"""
from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import NamedTuple

VARIABLES = {'tpu': 'LIBTPU_INIT_ARGS', 'gpu': 'XLA_FLAGS', 'cpu': 'XLA_FLAGS'}
"""Where jax reads the switches of a platform from."""


class Flag(NamedTuple):
  """A switch. `effect` is what was seen, with where; `default`: on, unless the variable is set."""
  text: str
  purpose: str
  effect: str
  default: bool = False


# For CPUs there are none: of all that were tried none made a step faster.
FLAGS = {
    'tpu': (
        Flag('--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000',
             'gathers a sharded kernel before the product that wants it, instead of cutting the product into one part '
             'a device whose results are added up in memory, as the compiler does where fsdp takes all devices',
             'a step of L/16, 64 images a device, fsdp=16 on v5e:4x4: 393 ms, 823 without (cycles of libtpu 0.0.52, '
             'not measured on a TPU)', default=True),
    ),
    'gpu': (
        Flag('--xla_gpu_enable_latency_hiding_scheduler=true',
             'sends gradients and sharded kernels between GPUs while products run; nothing to gain on one',
             'not measured'),
        Flag('--xla_gpu_all_reduce_combine_threshold_bytes=134217728',
             'adds up to 128 MiB of gradients over GPUs in one call; nothing to gain on one', 'not measured'),
        Flag('--xla_gpu_enable_triton_gemm=false', 'leaves all products to cuBLAS', 'not measured'),
        Flag('--xla_gpu_enable_command_buffer=', 'launches kernels one by one, not as CUDA graphs', 'not measured'),
    ),
    'cpu': (),
}


def defaults(platform: str) -> str:
  """The switches that are on for a platform, as its variable holds them."""
  return ' '.join(flag.text for flag in FLAGS[platform] if flag.default)


def choose(environ: MutableMapping[str, str], platform: str) -> None:
  """Sets the variable of a platform to its defaults, if it has some and the variable is not set; before jax starts."""
  if defaults(platform):
    environ.setdefault(VARIABLES[platform], defaults(platform))


def table() -> str:
  """All switches, with what each is for and does."""
  return '\n\n'.join(
      f'{platform}, {VARIABLES[platform]}{", on unless the variable is set" * flag.default}:\n  {flag.text}\n'
      f'  {flag.purpose}\n  effect: {flag.effect}' for platform, flags in FLAGS.items() for flag in flags)


def main(arguments: list[str]) -> None:
  """Prints the table, or a line for each switch of a platform."""
  if arguments and arguments[0] not in FLAGS:
    sys.exit(f'{arguments[0]}: no such platform; want {", ".join(FLAGS)}')
  print('\n'.join(flag.text for flag in FLAGS[arguments[0]]) if arguments else table())


if __name__ == '__main__':
  main(sys.argv[1:])
