"""Named sets of XLA flags and environment variables, with their purpose, source, and known effect.

`hardware.choose` calls `choose` before jax starts. Only sets whose effect is known are on by default; other sets are
chosen by name, `vit-jax train --flags=overlap,nccl`. Flags that the user sets in the environment have precedence:
`LIBTPU_INIT_ARGS='--c=3'` keeps the flags of the sets and adds `--c=3`, which replaces a flag `--c` of the sets.

    python -m vit_jax.parallel.xla_flags                 # prints the table
    python -m vit_jax.parallel.xla_flags gpu             # the names of the sets for a platform
    python -m vit_jax.parallel.xla_flags overlap nccl    # the variables that these sets change, as NAME=VALUE

`benchmarks/gpu_check.sh` tests and times the sets of GPUs one by one. XLA aborts at its start because of an unknown
flag; the tests try all flags for GPUs and CPUs. This module does not import jax.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from typing import NamedTuple

VARIABLES = {'tpu': 'LIBTPU_INIT_ARGS', 'gpu': 'XLA_FLAGS', 'cpu': 'XLA_FLAGS'}
"""The environment variable from which jax reads the flags of each platform."""


class FlagSet(NamedTuple):
  """Flags and environment variables for one platform that belong together.

  platform: tpu, gpu or cpu.
  flags: texts such as `--name=value`.
  purpose: the effect of the flags on a program, a phrase with a verb.
  effect: the measured result, with the hardware and versions.
  source: the publication of the values; '' = none.
  variables: values of further environment variables, by name.
  default: whether the set is on even if no one names it.
  chips: the TPUs that the set is for; () = all devices of the platform.
  """
  platform: str
  flags: tuple[str, ...]
  purpose: str
  effect: str = 'not measured'
  source: str = ''
  variables: Mapping[str, str] = {}
  default: bool = False
  chips: tuple[str, ...] = ()


_PIPELINED = tuple(f'--xla_gpu_enable_pipelined_{kind}=true' for kind in ('all_gather', 'reduce_scatter', 'all_reduce'))
_MAXTEXT = (
    '--xla_gpu_enable_latency_hiding_scheduler=true', '--xla_gpu_enable_triton_gemm=false',
    '--xla_gpu_enable_command_buffer=', '--xla_gpu_enable_highest_priority_async_stream=true', *_PIPELINED,
    '--xla_gpu_enable_while_loop_double_buffering=true', '--xla_gpu_enable_all_gather_combine_by_dim=false',
    '--xla_gpu_enable_reduce_scatter_combine_by_dim=false', '--xla_disable_hlo_passes=rematerialization',
    '--xla_gpu_all_gather_combine_threshold_bytes=134217728')
_TOOLBOX = 'JAX-Toolbox, docs/GPU_performance.md (November 2026)'
_MAXTEXT_GPU = 'MaxText, src/maxtext/configs/gpu/a3/llama_2_7b'
_MAXTEXT_TPU = 'MaxText, benchmarks/xla_flags_library.py'

SETS = {
    'whole_kernels': FlagSet(
        'tpu', ('--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000',),
        'gathers a sharded kernel before the product that needs it, instead of splitting the product into one '
        'part for each device and summing the results in memory, as the compiler does if fsdp spans all devices',
        'a step of L/16, 64 images a device, fsdp=16 on v5e:4x4: 393 ms, 823 without (cycles of libtpu 0.0.52, '
        'not measured on a TPU)', default=True),
    'sparsecore': FlagSet(
        'tpu', ('--xla_tpu_enable_sparse_core_collective_offload_all_gather=true',
                '--xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true',
                '--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true',
                '--xla_tpu_use_tc_device_shape_on_sc=true', '--xla_sc_enable_instruction_fusion=false',
                '--xla_sc_disjoint_spmem=false', '--xla_sc_disable_megacore_partitioning=true',
                '--xla_tpu_enable_async_collective_fusion_fuse_all_gather=false'),
        'v6e and v5p: sends kernels and gradients by the SparseCores while products run. On v5e it is harmful: gathers '
        'that run beside products there wait; v3 and v4 have no use of it',
        'in a step of L/16, fsdp=8 on v6e:4x4, all 40 collectives above 64 KiB run beside the TensorCore, none without '
        '(compiled with libtpu 0.0.52, not measured on a TPU)', _MAXTEXT_TPU, chips=('v5p', 'v6e')),
    'scatter_layout': FlagSet(
        'tpu', ('--xla_tpu_use_minor_sharding_for_major_trivial_input=true',
                '--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1',
                '--xla_tpu_assign_all_reduce_scatter_layout=true'),
        'lays gradients out so that more of their sums are reduce-scatters',
        'a step of 2 layers of L/16, fsdp=8: of the gradients 33 MiB are scattered and 36 summed whole, 17 and 66 '
        'without (compiled for v5e and v6e with libtpu 0.0.52, not measured on a TPU)', _MAXTEXT_TPU),
    'deterministic': FlagSet(
        'gpu', ('--xla_gpu_deterministic_ops=true',),
        'gives the same bits each time a program runs: XLA neither chooses kernels by timing them nor adds in an order '
        'that varies. A run can continue bit for bit on a GPU only with it',
        'on an H200 (jax 0.11.2) three runs of configs/digits.py, one of which was killed, had the same digest, and '
        'three without it had three; on an H100 a run that continued from a checkpoint had that of two whole runs; a '
        'step of L/16, 128 images, took 3 % longer in another process, on the H200',
        'XLA, xla/debug_options_flags.cc'),
    'latency_hiding': FlagSet(
        'gpu', ('--xla_gpu_enable_latency_hiding_scheduler=true',),
        'sends gradients and sharded kernels between GPUs while products run; no effect on one GPU',
        source='JAX-Toolbox, docs/getting-started/environment-variables.md: the setting of its images'),
    'overlap': FlagSet(
        'gpu', ('--xla_gpu_enable_latency_hiding_scheduler=true', *_PIPELINED,
                '--xla_gpu_enable_while_loop_double_buffering=true'),
        'as latency_hiding, and moves collectives over the border of an iteration of scanned blocks and microbatches',
        source=_TOOLBOX),
    'combine': FlagSet(
        'gpu', ('--xla_gpu_all_reduce_combine_threshold_bytes=134217728',),
        'reduces up to 128 MiB of gradients in one call; no effect on one GPU', source=f'{_MAXTEXT_GPU}/1vm.sh'),
    'cublas': FlagSet(
        'gpu', ('--xla_gpu_enable_triton_gemm=false', '--xla_allow_excess_precision=false',
                '--xla_gpu_dot_merger_threshold_mb=0'),
        'uses cuBLAS for all products, which adds biases and residuals and computes GELU within them; keeps the '
        'gradient of GELU in bfloat16, as it is traced; and leaves query, key and value products of their own',
        'a step of B/16, 128 images, on an H200: 32.1 ms and 54 GiB of memory traffic, 37.0 and 68 without (compiled '
        'with jax 0.10.2, estimated, not measured on a GPU)',
        f'{_MAXTEXT_GPU}/1vm.sh (the first flag)', default=True),
    'no_graphs': FlagSet('gpu', ('--xla_gpu_enable_command_buffer=',),
                         'launches kernels one by one, not as CUDA graphs', source=f'{_MAXTEXT_GPU}/1vm.sh'),
    'few_graphs': FlagSet('gpu', ('--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL',),
                          'CUDA graphs of fusions and custom calls alone, for B200', source=_TOOLBOX),
    'nccl': FlagSet(
        'gpu', (), 'sums by the switches of NVLink 4 (H100 and later), which takes memory of the GPU, and starts '
        'kernels in one queue, so that collectives are not late; not for B200. No effect on one GPU', source=_TOOLBOX,
        variables={'NCCL_NVLS_ENABLE': '1', 'CUDA_DEVICE_MAX_CONNECTIONS': '1', 'NCCL_PROTO': 'SIMPLE,LL,LL128'}),
    'user_buffers': FlagSet(
        'gpu', ('--xla_gpu_enable_nccl_user_buffers=true',),
        'sends arrays from where they are, without copies, in a pool of memory of its own', source=_TOOLBOX,
        variables={'NCCL_NVLS_ENABLE': '1'}),
    'maxtext_node': FlagSet(
        'gpu', (*_MAXTEXT, '--xla_gpu_all_reduce_combine_threshold_bytes=134217728',
                '--xla_gpu_reduce_scatter_combine_threshold_bytes=67108864'),
        'all that MaxText sets for Llama 2 7B with fsdp on 8 H100', source=f'{_MAXTEXT_GPU}/1vm.sh'),
    'maxtext_nodes': FlagSet(
        'gpu', (*_MAXTEXT, '--xla_gpu_all_reduce_combine_threshold_bytes=1073741824',
                '--xla_gpu_reduce_scatter_combine_threshold_bytes=134217728'),
        'all that MaxText sets for Llama 2 7B with fsdp within and data between 16 nodes of 8 H100',
        source=f'{_MAXTEXT_GPU}/16vm.sh'),
}
"""The sets by name. No set is for CPUs: no tried flag made a step faster. Flags that XLA no longer has are left out."""
PORTABLE = ('--xla_cpu_enable_platform_dependent_math=false', '--xla_cpu_max_isa=AVX2')
"""Flags of `train.portable`: functions such as exp by formulas of XLA, and vectors of the same length for all sums."""


def defaults(platform: str) -> str:
  """Returns the default flags of a platform, separated by spaces."""
  flag_sets = [flag_set for flag_set in SETS.values() if flag_set.default and flag_set.platform == platform]
  return ' '.join(flag for flag_set in flag_sets for flag in flag_set.flags)


def merged(platform: str, user_flags: str) -> str:
  """Returns the default flags of a platform that the user does not set, and then the user's flags."""
  return join(defaults(platform).split(), user_flags)


def join(flags: Iterable[str], user_flags: str) -> str:
  """Returns those of `flags` that the user does not set, and then the user's flags, separated by spaces."""
  user_names = {name_of(flag) for flag in user_flags.split()}
  kept = [flag for flag in flags if name_of(flag) not in user_names]
  return ' '.join([*kept, user_flags.strip()]).strip()


def name_of(flag: str) -> str:
  """Returns the name of a flag, with its dashes: `--name` of `--name=value`."""
  return flag.partition('=')[0]


def choose(environ: MutableMapping[str, str], platform: str, names: Iterable[str] = ()) -> None:
  """Adds the sets of these names and the default flags of a platform to an environment; call it before jax starts.

  A flag that the environment already has stays, so an earlier set precedes a later set. A set for another platform is
  added too, but jax does not use it.
  """
  for name in names:
    flag_set = SETS[name]
    for variable, value in flag_set.variables.items():
      environ.setdefault(variable, value)
    if flag_set.flags:
      variable = VARIABLES[flag_set.platform]
      environ[variable] = join(flag_set.flags, environ.get(variable, ''))
  if defaults(platform):
    environ[VARIABLES[platform]] = merged(platform, environ.get(VARIABLES[platform], ''))


def has(environ: Mapping[str, str], name: str) -> bool:
  """Returns whether the environment has all flags of the set `name`."""
  flag_set = SETS[name]
  return set(flag_set.flags) <= set(environ.get(VARIABLES[flag_set.platform], '').split())


def main(arguments: list[str]) -> None:
  """Prints the table of all sets, the names of a platform's sets, or the variables that the named sets change."""
  if arguments and arguments[0] in VARIABLES:
    print('\n'.join(name for name, flag_set in SETS.items() if flag_set.platform == arguments[0]))
  elif unknown := [name for name in arguments if name not in SETS]:
    sys.exit(f'name: expected one of {", ".join([*VARIABLES, *SETS])}, got {unknown[0]}.')
  elif arguments:
    environ = dict(os.environ)
    choose(environ, SETS[arguments[0]].platform, arguments)
    print('\n'.join(f'{name}={value}' for name, value in environ.items() if os.environ.get(name) != value))
  else:
    print('\n\n'.join(_describe(name, flag_set) for name, flag_set in SETS.items()))


def _describe(name: str, flag_set: FlagSet) -> str:
  """Returns the lines of a set in the printed table."""
  lines = [f'{name}: {flag_set.platform}' + (', set by default' if flag_set.default else ''),
           *(f'  {VARIABLES[flag_set.platform]}: {flag}' for flag in flag_set.flags),
           *(f'  {variable}={value}' for variable, value in flag_set.variables.items()),
           f'  {flag_set.purpose}']
  if flag_set.source:
    lines.append(f'  source: {flag_set.source}')
  return '\n'.join([*lines, f'  effect: {flag_set.effect}'])


if __name__ == '__main__':
  main(sys.argv[1:])
