"""Chooses the layout of a run on its hardware: device axes, microbatches, rematerialization, and how blocks are run.

A setting that is `auto` (0 for a number) is chosen here. `choose` is a pure function of the config, the hardware and
the run's sizes. Its rules, in order:

1.  Settings with a value keep it. Only `mesh.fsdp`, `mesh.tensor`, `train.accumulate`, `model.remat`,
    `model.execution`, `model.attention.kernel` and `model.mlp.kernel` can be `auto`; `mesh.data` takes the remaining
    devices.
2.  On CPUs, and where the memory of a device is not known, no parameter is split and nothing is recomputed: all
    devices share the batch, everything is saved, and there is one microbatch.
3.  `tensor` is 1. If a step has fewer images than there are devices, it is the smallest size that leaves one image for
    each place along `data` and `fsdp`.
4.  `fsdp` is 1 if state (parameters, optimizer state, averages, teachers) and gradients take at most 1/8 of a device's
    memory. Otherwise it is the smallest size with which the share of one device is that small. Sizes are the divisors
    of the devices of one slice that divide the width of the model: those from 8 (the devices of one host or node) on,
    such as 8, 16, 32 of 32 devices and 12 of 12; smaller ones, 2 and 4 of 12 devices for a width of 1,024, only where
    there is no other. On TPUs `fsdp` has at most half of the devices of a single slice where that is not slower: over
    all of them the compiler sums gradients whole, which sends twice as much as scattering them, and counts as a third
    more than the gathers of rule 6. On GPUs that NVLink joins in one node, H100 or H200, `fsdp` has all of them from
    1 GiB of state and gradients on: the work of the optimizer is divided, so that by the compiler's estimate a step is
    5 % (B/16, L/16) shorter, and 2 % for smaller networks, which keep 1. No such node has timed it.
5.  Blocks are unrolled, which is faster by about an eighth, up to 32 of them; more are scanned, because an unrolled
    program takes 3 to 6 times as long to compile.
6.  `remat` and `accumulate` are the fastest pair, by the relative times below, with which state, gradients and
    activations take at most 90 % of the memory. With `fsdp`, each microbatch gathers all kernels anew, which counts as
    the time of `GATHER_TOKENS` further tokens on every device. Accumulation is considered only where it does not change
    results (no BatchNorm, SAM, or objective that mixes the images of a batch). A batch that does not divide over the
    devices counts as the nearest one that does, which the error of the run then names.
7.  If no pair fits, the next size of `fsdp` is tried. If nothing fits at all, the layout that needs the least memory is
    used, with a warning that names the smallest number of such devices that fits.
8.  `attention.kernel` is `fused` on TPUs from v4 on, for models that it is for (BENCHMARKS.md has the times), and
    `cudnn` on GPUs whose compute capability is known, from 8.0 on, for models that it is for (bfloat16, heads of 8, 16,
    … 128 channels, 256 from 9.0 on, no relative positions, no dropout of weights); `xla` elsewhere, for training on
    images at their own aspect, whose padding needs a mask, and in place of `cudnn` for numbers of tokens at which its
    gradient can be NaN. `mlp.kernel` is `fused` on v6e, unless `model.quantize` is set
    (`parallel/kernels.py`). The forms differ by their rounding.

So a run that fits on one device as it is written runs as it is written. What was chosen is saved in `config.json` with
the hardware (`mesh.chosen`, `mesh.chosen_for`): on the same hardware a resumed run keeps it, on other hardware these
settings are chosen again (`reopen`, `keep`). This module knows no devices, and imports no jax.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from vit_jax.config import check, schema
from vit_jax.config.schema import AttentionKernel, Execution, MlpKernel, Remat
from vit_jax.parallel import kernels

GIB = 2**30
STATE_SHARE = 1 / 8
"""Part of a device's memory up to which its state is not split further."""
USABLE = .9
"""Part of a device's memory that a layout may fill by arithmetic."""
FIRST_FSDP = 8
"""The smallest size of `fsdp` above 1, if the devices of a slice allow it."""
A_NODE = 8
"""The largest number of GPUs that NVLink joins."""
NODE_STATE = GIB
"""GPUs of one node divide state and gradients from this number of bytes on."""
_NVLINK_GPUS = re.compile(r'\b(h100|h200)\b(?!.*(pcie|nvl))', re.IGNORECASE)
"""Names of GPUs of which NVLink joins all of a node: the SXM cards, such as 'h200' and 'NVIDIA H100 80GB HBM3'."""
MOST_UNROLLED = 32
"""Networks with more blocks are scanned."""
ACCUMULATE = (1, 2, 4, 8, 16, 32, 64)
AUTO: dict[str, Any] = {'mesh.fsdp': 0, 'mesh.tensor': 0, 'train.accumulate': 0, 'model.remat': Remat.AUTO,
                        'model.execution': Execution.AUTO, 'model.attention.kernel': AttentionKernel.AUTO,
                        'model.mlp.kernel': MlpKernel.AUTO}
"""The settings that can be chosen, with the value that stands for `auto`."""
XLA: dict[str, Any] = {'model.attention.kernel': AttentionKernel.XLA, 'model.mlp.kernel': MlpKernel.XLA}

# Relative times of a step: L/16, 32 images a device on v3, cycles of the compiler (libtpu 0.0.51).
REMAT_TIME = {Remat.NONE: .98, Remat.NAMES: 1., Remat.QKV: 1.08, Remat.MLP: 1.16, Remat.FULL: 1.16}
EXECUTION_TIME = {Execution.UNROLLED: 1., Execution.SCAN: 1.14}
MICROBATCH_TIME = .02
"""The time of the fixed work of a further microbatch."""
SECOND_PASS_TIME = 1 / 3
"""The time of the further forward pass of microbatches whose examples are compared (`train/grad_cache.py`)."""
GATHER_TOKENS = 1_000
"""Tokens of a device, forward and backward, that take as long as gathering kernels twice and scattering their gradient.

Both are proportional to the parameters: 6 FLOPs for each token, 6 bytes in bfloat16. At 60 % of the peak, and without
overlap, it is 200 (v2), 500 (v3), 1,200 (v5e), 1,600 (v4) and 2,800 (v6e) by the figures of `plan/topologies.py`.
"""


class Hardware(NamedTuple):
  """The devices that a run is laid out for.

  memory_gib: memory of one device that a program may use; 0 = not known.
  counts: numbers of such devices that there are in one slice; () = not known.
  capability: the compute capability of a GPU, such as 9.0; 0 = not known.
  """
  name: str
  platform: str
  num_devices: int
  memory_gib: float
  slices: int = 1
  counts: tuple[int, ...] = ()
  capability: float = 0.

  def __str__(self) -> str:
    return f'{self.num_devices} x {self.name}' + (f' in {self.slices} slices' if self.slices > 1 else '')


class Sizes(NamedTuple):
  """The memory that a run needs, in bytes over all devices.

  state: parameters, optimizer state, averages, teachers.
  gradients: gradients of all parameters.
  activations: returns the bytes of one image, for a model with a value of `remat`.
  """
  state: int
  gradients: int
  activations: Callable[[schema.Model], float]


class Layout(NamedTuple):
  """A config without auto settings, a text about the choice and its reasons, and whether it fits by arithmetic."""
  config: schema.Config
  text: str
  fits: bool = True


class _Option(NamedTuple):
  """One way to run: a config, its relative time, and the bytes that it needs on a device."""
  config: schema.Config
  time: float
  num_bytes: float

  def fits(self, hardware: Hardware) -> bool:
    return self.num_bytes <= USABLE * hardware.memory_gib * GIB


def auto(config: schema.Config) -> list[str]:
  """Returns the names of the settings that are to be chosen."""
  return [name for name, value in AUTO.items() if _value(config, name) == value]


def _value(settings: Any, name: str) -> Any:
  """Returns the value of a setting by its dotted name; None if the settings have no such field."""
  first, _, rest = name.partition('.')
  if first not in (field.name for field in dataclasses.fields(settings)):
    return None
  value = getattr(settings, first)
  return _value(value, rest) if rest else value


def put(config: schema.Config, values: Mapping[str, Any]) -> schema.Config:
  """Returns the config with other values for settings such as `mesh.fsdp`; unknown settings are ignored."""
  changed: schema.Config = schema.replaced(config, {
      name: value for name, value in values.items() if _value(config, name) is not None})
  return changed


def _fill(config: schema.Config, values: Mapping[str, Any]) -> schema.Config:
  """Returns the config with these values for the settings that are auto."""
  return put(config, {name: values[name] for name in auto(config)})


def plain(config: schema.Config) -> schema.Config:
  """Returns the config with rule 2 for everything that is auto."""
  return _fill(config, {'mesh.fsdp': 1, 'mesh.tensor': 1, 'train.accumulate': 1, 'model.remat': Remat.NONE,
                        'model.execution': _execution(config.model), **XLA})


def _kernels(config: schema.Config, hardware: Hardware) -> kernels.Choice:
  """Returns the kernels that rule 8 chooses."""
  return kernels.choose(config.model, platform=hardware.platform, name=hardware.name, capability=hardware.capability,
                        is_native=bool(config.data.recipe.native_lengths), num_tokens=_num_tokens(config))


def _num_tokens(config: schema.Config) -> int:
  """Returns the tokens of an image of the size of the config; 0 if the network is no Vision Transformer."""
  model = config.model
  if not isinstance(model, schema.ViT):
    return 0
  return math.prod(side // model.patch for side in config.image_px) + model.num_extra


def _unused_kernels(config: schema.Config, hardware: Hardware) -> dict[str, str]:
  """Returns why XLA computes in place of kernels of the config, by names such as `attention.kernel=fused`."""
  model = config.model
  if not isinstance(model, schema.ViT):
    return {}
  problems = {}
  attention = model.attention.kernel
  if attention.platform:
    problems[f'attention.kernel={attention.value}'] = kernels.attention_problem(
        model, attention, platform=hardware.platform, name=hardware.name, capability=hardware.capability or math.inf,
        is_native=bool(config.data.recipe.native_lengths), num_tokens=_num_tokens(config))
  if model.mlp.kernel is MlpKernel.FUSED:
    problems['mlp.kernel=fused'] = kernels.mlp_problem(model, hardware.name)
  return {name: problem for name, problem in problems.items() if problem}


def _execution(model: schema.Model) -> Execution:
  """Returns how rule 5 runs the blocks."""
  is_long = getattr(model, 'depth', 0) > MOST_UNROLLED or getattr(model, 'unroll', 1) > 1
  return Execution.SCAN if is_long else Execution.UNROLLED


def reopen(config: schema.Config, hardware: Hardware, overridden: Collection[str] = ()) -> schema.Config:
  """Returns the config with the settings auto again that were chosen for other hardware; `overridden` ones stay."""
  return config if str(hardware) == config.mesh.chosen_for else unchosen(config, overridden)


def unchosen(config: schema.Config, overridden: Collection[str] = ()) -> schema.Config:
  """Returns the config with all settings auto again that were chosen for hardware; `overridden` ones stay."""
  again = {name: AUTO[name] for name in config.mesh.chosen if name in AUTO and name not in overridden}
  return put(config, {**again, 'mesh.chosen': (), 'mesh.chosen_for': '', 'mesh.chosen_slices': 0,
                      'mesh.chosen_parts': 1})


def with_open_execution(config: schema.Config) -> schema.Config:
  """Returns the config with `model.execution` auto again if it was chosen to be unrolled, for the backward pass."""
  is_open = 'model.execution' in config.mesh.chosen and _value(config, 'model.execution') is Execution.UNROLLED
  return put(config, {'model.execution': Execution.AUTO}) if is_open else config


def keep(config: schema.Config, before: schema.Config, hardware: Hardware) -> schema.Config:
  """Returns the config with what the run's saved config `before` chose on the same hardware for such a step."""
  names = auto(config)
  is_same = (str(hardware) == before.mesh.chosen_for and before.batch_size == config.batch_size
             and type(before.model) is type(config.model)
             and {*before.mesh.chosen, *XLA} == {*names, *XLA})  # kernels were not chosen by default before
  if not is_same:
    return config
  return put(config, {name: _value(before, name) for name in (*names, 'mesh.chosen', 'mesh.chosen_for')})


def choose(config: schema.Config, hardware: Hardware, sizes: Sizes | None) -> Layout:
  """Returns the config with all its auto settings chosen by the rules above.

  Args:
    config: a checked config.
    hardware: the devices of the run.
    sizes: the memory that the run needs; None = not known, as on CPUs, where it does not matter.
  """
  names = auto(config)
  if not names:
    reason = 'as it was chosen before' if config.mesh.chosen else 'as set in the config'
    return Layout(config, _explain(config, hardware, f'; {reason}.'))
  if hardware.platform == 'cpu' or not hardware.memory_gib or sizes is None:
    config = plain(config)
    reason = 'memory of a device not known'
    if hardware.platform == 'cpu':
      reason = 'on CPUs a setting left open splits no parameter and recomputes nothing'
    return Layout(_record_choice(config, names, hardware), _explain(config, hardware, f'; {reason}.'))
  option = _search(config, hardware, sizes)
  text = _explain(option.config, hardware, _explain_choice(option, names, hardware, sizes))
  fits = option.fits(hardware)
  if not fits:
    text += f'\n{_advice(config, hardware, sizes)}'
  return Layout(_record_choice(option.config, names, hardware), text, fits)


def _record_choice(config: schema.Config, names: Collection[str], hardware: Hardware) -> schema.Config:
  """Returns the config with the names of the settings that were chosen, and the hardware."""
  return put(config, {'mesh.chosen': tuple(names), 'mesh.chosen_for': str(hardware)})


def _search(config: schema.Config, hardware: Hardware, sizes: Sizes) -> _Option:
  """Returns the option of rules 3 to 8: the fastest that fits, or else the one that needs the least memory."""
  devices_in_slice = hardware.num_devices // hardware.slices
  tensor = config.mesh.tensor
  if not tensor:
    least = -(-hardware.num_devices // config.batch_size)  # places along `tensor` that share an image
    tensor = next((size for size in range(least, devices_in_slice + 1) if devices_in_slice % size == 0), 1)
  possible = fsdp_sizes(config, hardware, tensor)
  most_bytes = STATE_SHARE * hardware.memory_gib * GIB
  preferred = next((fsdp for fsdp in possible if (sizes.state + sizes.gradients) / fsdp / tensor <= most_bytes),
                   possible[-1])
  if _divides_a_node(hardware, sizes) and hardware.num_devices in possible:
    preferred = hardware.num_devices
  groups = [[fsdp] for fsdp in possible if fsdp >= preferred]  # the sizes of a group are compared by their time
  if _sums_whole(preferred, hardware):
    next_smaller = [fsdp for fsdp in possible if 1 < fsdp < preferred][-1:]
    groups = [[*next_smaller, preferred]]
  tried: list[_Option] = []
  for group in groups:
    options = [option for fsdp in group for option in _options(config, hardware, sizes, fsdp, tensor)]
    fitting = [option for option in options if option.fits(hardware)]
    if fitting:
      return min(fitting, key=lambda option: (option.time, option.num_bytes))
    tried += sorted(options, key=lambda option: (option.time, option.num_bytes))
  return min(tried, key=lambda option: option.num_bytes)


def _divides_a_node(hardware: Hardware, sizes: Sizes) -> bool:
  """Returns whether the GPUs of one node divide the state of a run although each could hold it."""
  is_joined = hardware.platform == 'gpu' and hardware.slices == 1 and bool(_NVLINK_GPUS.search(hardware.name))
  return is_joined and 1 < hardware.num_devices <= A_NODE and sizes.state + sizes.gradients >= NODE_STATE


def _sums_whole(fsdp: int, hardware: Hardware) -> bool:
  """Returns whether the compiler sums gradients whole: that of TPUs, if `fsdp` has all devices (libtpu 0.0.52)."""
  return hardware.platform == 'tpu' and fsdp == hardware.num_devices


def _advice(config: schema.Config, hardware: Hardware, sizes: Sizes) -> str:
  """Returns advice for a run that does not fit, with the smallest number of such devices on which it does."""
  devices = 'more devices'
  for num_devices in _larger_counts(config, hardware):
    larger = hardware._replace(num_devices=num_devices)
    if _search(config, larger, sizes).fits(larger):
      devices = f'{num_devices:,} x {hardware.name}'
      break
  return (f'  No layout needs less than {USABLE:.0%} of the memory. Use {devices}, a smaller batch_size or a smaller '
          'model.')


def _larger_counts(config: schema.Config, hardware: Hardware) -> Iterator[int]:
  """Yields larger numbers of such devices, over which the batch and the axes of the mesh divide.

  For GPUs, and TPUs whose slices are not known, these are multiples of as many as a node can have.
  """
  mesh = config.mesh
  if min(mesh.data, mesh.fsdp, mesh.tensor) > 0 or (hardware.platform == 'tpu' and not hardware.counts):
    return
  fixed = math.prod(size for size in (mesh.data, mesh.fsdp, mesh.tensor) if size > 0)
  node = math.gcd(hardware.num_devices, FIRST_FSDP)
  counts = [count * hardware.slices for count in hardware.counts] or range(node, config.batch_size + 1, node)
  for count in counts:
    if count > hardware.num_devices and count % fixed == 0 and config.batch_size % count == 0:
      yield count


def fsdp_sizes(config: schema.Config, hardware: Hardware, tensor: int) -> list[int]:
  """Returns sizes of `fsdp` in ascending order: what the config says, else those of rule 4."""
  devices_in_slice = hardware.num_devices // hardware.slices // max(1, tensor)
  if config.mesh.fsdp == -1:
    return [max(1, devices_in_slice // max(1, config.mesh.data))]
  if config.mesh.fsdp:
    return [config.mesh.fsdp]
  if config.mesh.data != -1:
    return [max(1, devices_in_slice * hardware.slices // config.mesh.data)]
  width = getattr(config.model, 'width', 0) if hasattr(config.model, 'depth') else 0  # 0 = convolutions differ
  sizes = [size for size in range(2, devices_in_slice + 1) if devices_in_slice % size == 0 and width % size == 0]
  first = min(FIRST_FSDP, devices_in_slice)
  if _sums_whole(first, hardware):
    first = max(2, first // 2)
  return [1, *([size for size in sizes if size >= first] or sizes)]


def _options(config: schema.Config, hardware: Hardware, sizes: Sizes, fsdp: int, tensor: int) -> Iterator[_Option]:
  """Yields an option for every pair of rule 6 that the config allows; the first pair is always one of them."""
  shards = max(1, hardware.num_devices // tensor)
  counts = (config.train.accumulate,) if config.train.accumulate else ACCUMULATE
  remats = tuple(REMAT_TIME) if config.model.remat is Remat.AUTO else (config.model.remat,)
  chosen_kernels = _kernels(config, hardware)
  gather_time = _gather_time(config, shards) if fsdp > 1 else 0.
  sending = 4 / 3 if _sums_whole(fsdp, hardware) else 1
  for accumulate, remat in itertools.product(counts, remats):
    filled = _fill(config, {
        'mesh.fsdp': fsdp, 'mesh.tensor': tensor, 'train.accumulate': accumulate, 'model.remat': remat,
        'model.execution': _execution(config.model), 'model.attention.kernel': chosen_kernels.attention,
        'model.mlp.kernel': chosen_kernels.mlp})
    batch_size = nearest_batch(config.batch_size, shards * accumulate)
    divisible = put(filled, {'batch_size': batch_size}) if config.batch_size % shards else filled
    is_first = (accumulate, remat) == (counts[0], remats[0])
    if is_first or (_may_accumulate(config, shards, accumulate) and not any(check.combinations(divisible))):
      images = batch_size // (shards * accumulate)
      num_bytes = (sizes.state + sizes.gradients) / fsdp / tensor + images * sizes.activations(filled.model) / tensor
      time = REMAT_TIME[remat] * (1 + MICROBATCH_TIME * (accumulate - 1))
      if accumulate > 1 and config.objective.compares_examples:
        time += SECOND_PASS_TIME
      yield _Option(filled, time + accumulate * gather_time * sending, num_bytes)


def _gather_time(config: schema.Config, shards: int) -> float:
  """Returns the time to gather the kernels of one microbatch, as a part of the computation of a step."""
  if not isinstance(config.model, schema.ViT | schema.Mixer):
    return 0.
  tokens = math.prod(side // config.model.patch for side in config.image_px)
  return GATHER_TOKENS * shards / (tokens * config.batch_size)


def _may_accumulate(config: schema.Config, shards: int, accumulate: int) -> bool:
  """Returns whether so many microbatches divide the batch, and give the result of one.

  `check.combinations` knows the models for which they do. A batch that does not divide over the devices has to be
  changed in any case, so it only has to be large enough.
  """
  if accumulate == 1:
    return True
  if config.train.sam.rho or getattr(config.objective, 'mix_token', False):
    return False
  num_parts = shards * accumulate
  return config.batch_size >= num_parts if config.batch_size % shards else config.batch_size % num_parts == 0


def nearest_batch(batch_size: int, parts: int) -> int:
  """Returns the multiple of `parts`, at least one, that is nearest to a batch size; of two the smaller one."""
  return max(1, (2 * batch_size + parts - 1) // (2 * parts)) * parts


def _explain_choice(option: _Option, names: Collection[str], hardware: Hardware, sizes: Sizes) -> str:
  """Returns the rest of the first line about a chosen layout, and lines on its memory and its kernels."""
  config = option.config
  set_names = [name for name in AUTO if name not in names and _value(config, name) not in (None, *XLA.values())]
  state_gib, num_parts = (sizes.state + sizes.gradients) / GIB, config.mesh.fsdp * config.mesh.tensor
  lines = [f'. Set in the config: {", ".join(set_names)}.' if set_names else '.',
           f'  State and gradients take {state_gib / num_parts:.2f} GiB a device'
           + (f' ({state_gib:.2f} GiB if replicated)' if num_parts > 1 else '')
           + f', with activations {option.num_bytes / GIB:.2f} of {hardware.memory_gib:.2f} GiB, by arithmetic.']
  if hardware.platform == 'gpu' and isinstance(config.model, schema.ViT):
    estimated = ['blocks on joined rows'] if kernels.may_join_rows(config.model) else []
    estimated.append('the XLA flags cublas')
    if 'mesh.fsdp' in names and config.mesh.fsdp > 1 and _divides_a_node(hardware, sizes):
      estimated.append(f'fsdp={config.mesh.fsdp}')
    lines.append(f'  Chosen by estimates of the compiler, which no GPU has timed: {", ".join(estimated)}.')
  choice = _kernels(config, hardware)
  for name, reason in {'attention.kernel': choice.why_attention, 'mlp.kernel': choice.why_mlp}.items():
    if reason and f'model.{name}' in names:
      lines.append(f'  {name}=xla was chosen: {reason}.')
  return '\n'.join(lines)


def _explain(config: schema.Config, hardware: Hardware, reasons: str) -> str:
  """Returns the text of a layout: axes, dtype, images of a device, how blocks are run, `reasons`, unused settings."""
  mesh, model = config.mesh, config.model
  data = mesh.data
  if data == -1:
    data = max(1, hardware.num_devices // (max(1, mesh.fsdp) * max(1, mesh.tensor)))
  images = config.batch_size / max(1, data) / max(1, mesh.fsdp) / max(1, config.train.accumulate)
  run = f', {model.execution.value}' if hasattr(model, 'execution') else ''
  unused = _unused_kernels(config, hardware)
  if isinstance(model, schema.ViT):
    used = [f'attention.kernel={model.attention.kernel.value}'] if model.attention.kernel.platform else []
    used += ['mlp.kernel=fused'] if model.mlp.kernel is MlpKernel.FUSED else []
    run += ''.join(f', {name}' for name in used if name not in unused)
  lines = [f'Layout for {hardware}: data={data} fsdp={mesh.fsdp} tensor={mesh.tensor}, remat={model.remat.value}'
           f'{run}, {dtype_text(model)}, accumulate={config.train.accumulate} ({images:g} images a device and '
           f'microbatch){reasons}',
           *(f'  {name} has no effect, and XLA computes in its place: {reason}.' for name, reason in unused.items())]
  quantize = getattr(model, 'quantize', schema.Quantize.NONE)
  if problem := kernels.quantize_problem(quantize, platform=hardware.platform, name=hardware.name,
                                         capability=hardware.capability):
    lines.append(f'  model.quantize={quantize.value} makes no step faster here: {problem}.')
  return '\n'.join(lines)


def dtype_text(model: schema.Model) -> str:
  """Returns the compute dtype of a network, and that of the products of its blocks if they are quantized."""
  dtype, quantize = getattr(model, 'dtype', schema.DType.F32), getattr(model, 'quantize', schema.Quantize.NONE)
  return dtype.value + (f' (products of blocks in {quantize.value})' if quantize is not schema.Quantize.NONE else '')
