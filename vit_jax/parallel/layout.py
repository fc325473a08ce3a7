"""Layout of a run on its hardware: device axes, microbatches, rematerialization, and how the blocks are run.

A setting that is `auto` (0 for a number) is chosen here. `choose` is a pure function of the config, the hardware and
the run's sizes. Its rules, in order:

1.  Settings with a value keep it. Only `mesh.fsdp`, `mesh.tensor`, `train.accumulate`, `model.remat`,
    `model.execution`, `model.attention.kernel` and `model.mlp.kernel` can be; `mesh.data` takes the remaining devices.
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
settings are chosen anew. Knows no devices, and imports no jax.
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
A_NODE = 8
"""GPUs that NVLink joins, at most."""
NODE_STATE = GIB
"""Bytes of state and gradients from which GPUs of one node divide them."""
_JOINED = re.compile(r'\b(h100|h200)\b(?!.*(pcie|nvl))', re.IGNORECASE)
"""Names of GPUs of which NVLink joins all of a node: the SXM cards, as jax and plans name them."""
MOST_UNROLLED = 32
ACCUMULATE = (1, 2, 4, 8, 16, 32, 64)
AUTO: dict[str, Any] = {'mesh.fsdp': 0, 'mesh.tensor': 0, 'train.accumulate': 0, 'model.remat': Remat.AUTO,
                        'model.execution': Execution.AUTO, 'model.attention.kernel': AttentionKernel.AUTO,
                        'model.mlp.kernel': MlpKernel.AUTO}
"""Settings that can be chosen, and their values that ask for it."""
XLA: dict[str, Any] = {'model.attention.kernel': AttentionKernel.XLA, 'model.mlp.kernel': MlpKernel.XLA}

# Relative times of a step: L/16, 32 images a device on v3, cycles of the compiler (libtpu 0.0.51).
REMAT_TIME = {Remat.NONE: .98, Remat.NAMES: 1., Remat.QKV: 1.08, Remat.MLP: 1.16, Remat.FULL: 1.16}
EXECUTION_TIME = {Execution.UNROLLED: 1., Execution.SCAN: 1.14}
MICROBATCH_TIME = .02
"""A further microbatch: its share of fixed work."""
SECOND_PASS_TIME = 1 / 3
"""The further forward pass of microbatches whose examples are compared (`train/grad_cache.py`)."""
GATHER_TOKENS = 1_000
"""Tokens of a device, forward and backward, that take as long as gathering kernels twice and scattering their gradient.

Both are proportional to the parameters: 6 FLOPs for each token, 6 bytes in bfloat16. At 60 % of the peak, and without
overlap, it is 200 (v2), 500 (v3), 1,200 (v5e), 1,600 (v4) and 2,800 (v6e) by the figures of `plan/topologies.py`.
"""


class Hardware(NamedTuple):
  """The devices that a run is laid out for.

  memory_gib: of one of them that a program may use, 0 = not known.
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
  """What a run needs, in bytes over all devices.

  state: parameters, optimizer state, averages, teachers.
  gradients: of all parameters.
  activations: of one image, for a model with given `remat`.
  """
  state: int
  gradients: int
  activations: Callable[[schema.Model], float]


class Layout(NamedTuple):
  """A config without auto settings; `text` says what was chosen and why; `fits`: by arithmetic."""
  config: schema.Config
  text: str
  fits: bool = True


class _Way(NamedTuple):
  """One way to run, with its relative time and the bytes that it needs on a device."""
  config: schema.Config
  time: float
  need: float


def auto(config: schema.Config) -> list[str]:
  """Returns the names of the settings that are to be chosen."""
  return [name for name, value in AUTO.items() if _value(config, name) == value]


def _value(settings: Any, name: str) -> Any:
  """The value of a setting by its dotted name; None if the settings do not have it."""
  first, _, rest = name.partition('.')
  if first not in (field.name for field in dataclasses.fields(settings)):
    return None
  value = getattr(settings, first)
  return _value(value, rest) if rest else value


def put(config: schema.Config, values: Mapping[str, Any]) -> schema.Config:
  """Returns the config with other values for settings such as `mesh.fsdp`.

  Those that its model does not have are left out.
  """
  changed: schema.Config = schema.replaced(config, {
      name: value for name, value in values.items() if _value(config, name) is not None})
  return changed


def _fill(config: schema.Config, values: Mapping[str, Any]) -> schema.Config:
  """Returns the config with these values where it is auto."""
  return put(config, {name: values[name] for name in auto(config)})


def plain(config: schema.Config) -> schema.Config:
  """Returns the config with rule 2 for everything that is auto."""
  return _fill(config, {'mesh.fsdp': 1, 'mesh.tensor': 1, 'train.accumulate': 1, 'model.remat': Remat.NONE,
                        'model.execution': _execution(config.model), **XLA})


def _kernels(config: schema.Config, hardware: Hardware) -> kernels.Choice:
  """Rule 8."""
  return kernels.choose(config.model, platform=hardware.platform, name=hardware.name, capability=hardware.capability,
                        is_native=_is_native(config), num_tokens=_num_tokens(config))


def _num_tokens(config: schema.Config) -> int:
  """Returns the tokens of an image of the size of the config; 0 if the network is no Vision Transformer."""
  model = config.model
  if not isinstance(model, schema.ViT):
    return 0
  return math.prod(side // model.patch for side in config.image_px) + model.num_extra


def _is_native(config: schema.Config) -> bool:
  return bool(config.data.recipe.native_lengths)


def _unused(config: schema.Config, hardware: Hardware) -> dict[str, str]:
  """Returns the kernels of the config in whose place XLA computes on this hardware, and why."""
  model, found = config.model, dict[str, str]()
  if not isinstance(model, schema.ViT):
    return found
  if (attention := model.attention.kernel).platform:
    found[f'attention.kernel={attention.value}'] = kernels.attention_problem(
        model, attention, platform=hardware.platform, name=hardware.name,
        capability=hardware.capability or math.inf, is_native=_is_native(config),
        num_tokens=_num_tokens(config))
  if model.mlp.kernel is MlpKernel.FUSED:
    found['mlp.kernel=fused'] = kernels.mlp_problem(model, hardware.name)
  return {name: why for name, why in found.items() if why}


def _execution(model: schema.Model) -> Execution:
  """Rule 5."""
  is_long = getattr(model, 'depth', 0) > MOST_UNROLLED or getattr(model, 'unroll', 1) > 1
  return Execution.SCAN if is_long else Execution.UNROLLED


def reopen(config: schema.Config, hardware: Hardware, overridden: Collection[str] = ()) -> schema.Config:
  """Returns the config with the settings that were chosen for other hardware as auto again.

  The `overridden` ones stay.
  """
  return config if str(hardware) == config.mesh.chosen_for else unchosen(config, overridden)


def unchosen(config: schema.Config, overridden: Collection[str] = ()) -> schema.Config:
  """Returns the config with all settings that were chosen for hardware as auto again; `overridden` ones stay."""
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
    config: checked.
    hardware: to lay it out for.
    sizes: of the run; None = not known, as on CPUs, where they are not needed.
  """
  names = auto(config)
  if not names:
    why = 'as it was chosen before' if config.mesh.chosen else 'as set in the config'
    return Layout(config, _with_unused(f'Layout for {hardware}: {_shown(config, hardware)}; {why}.', config, hardware))
  if hardware.platform == 'cpu' or not hardware.memory_gib or sizes is None:
    config = plain(config)
    why = ('on CPUs a setting left open splits no parameter and recomputes nothing' if hardware.platform == 'cpu' else
           'memory of a device not known')
    text = _with_unused(f'Layout for {hardware}: {_shown(config, hardware)}; {why}.', config, hardware)
    return Layout(_recorded(config, names, hardware), text)
  way = _search(config, hardware, sizes)
  found = _answer(way, names, hardware, sizes)
  return found if found.fits else found._replace(text=f'{found.text}\n{_advice(config, hardware, sizes)}')


def _search(config: schema.Config, hardware: Hardware, sizes: Sizes) -> _Way:
  """Returns the way of rules 3 to 8: the fastest that fits, or else the one that needs the least memory."""
  in_slice, needed = hardware.num_devices // hardware.slices, -(-hardware.num_devices // config.batch_size)
  tensor = config.mesh.tensor or next(t for t in (*range(needed, in_slice + 1), 1) if in_slice % t == 0)
  possible = fsdp_sizes(config, hardware, tensor)
  preferred = next((f for f in possible if (sizes.state + sizes.gradients) / f / tensor
                    <= STATE_SHARE * hardware.memory_gib * GIB), possible[-1])
  if _divides_a_node(hardware, sizes) and hardware.num_devices in possible:
    preferred = hardware.num_devices
  together = [[f] for f in possible if f >= preferred]
  if _sums_whole(preferred, hardware):
    together = [[*(f for f in possible if 1 < f < preferred)][-1:] + [preferred]]
  tried: list[_Way] = []
  for some in together:
    ways = sorted((way for fsdp in some for way in _ways(config, hardware, sizes, fsdp, tensor)),
                  key=lambda way: (way.time, way.need))
    if found := next((way for way in ways if _fits(way, hardware)), None):
      return found
    tried += ways
  return min(tried, key=lambda way: way.need)


def _divides_a_node(hardware: Hardware, sizes: Sizes) -> bool:
  """Returns whether the GPUs of one node divide the state of a run although each could hold it."""
  is_joined = hardware.platform == 'gpu' and hardware.slices == 1 and bool(_JOINED.search(hardware.name))
  return is_joined and 1 < hardware.num_devices <= A_NODE and sizes.state + sizes.gradients >= NODE_STATE


def _sums_whole(fsdp: int, hardware: Hardware) -> bool:
  """Returns whether the compiler sums gradients whole: that of TPUs, if `fsdp` has all devices (libtpu 0.0.52)."""
  return hardware.platform == 'tpu' and fsdp == hardware.num_devices


def _fits(way: _Way, hardware: Hardware) -> bool:
  return way.need <= USABLE * hardware.memory_gib * GIB


def _advice(config: schema.Config, hardware: Hardware, sizes: Sizes) -> str:
  """Returns what to do about a run that does not fit, with the smallest number of such devices that do."""
  found = next((n for n in _larger_counts(config, hardware)
                if _fits(_search(config, more := hardware._replace(num_devices=n), sizes), more)), 0)
  devices = f'{found:,} x {hardware.name}' if found else 'more devices'
  return (f'  No layout needs less than {USABLE:.0%} of the memory. Use {devices}, a smaller batch_size or a smaller '
          'model.')


def _larger_counts(config: schema.Config, hardware: Hardware) -> Iterator[int]:
  """Yields larger numbers of such devices, over which the batch and the axes of the mesh divide.

  Where it is not known how many there are in a slice, and for GPUs, they are multiples of as many as a node can have.
  """
  mesh, have = config.mesh, hardware.num_devices
  fixed = math.prod(size for size in (mesh.data, mesh.fsdp, mesh.tensor) if size > 0)
  if min(mesh.data, mesh.fsdp, mesh.tensor) > 0 or hardware.platform == 'tpu' and not hardware.counts:
    return
  node = math.gcd(have, FIRST_FSDP)
  counts = [n * hardware.slices for n in hardware.counts] or range(node, config.batch_size + 1, node)
  yield from (n for n in counts if n > have and n % fixed == 0 and config.batch_size % n == 0)


def _recorded(config: schema.Config, names: Collection[str], hardware: Hardware) -> schema.Config:
  return put(config, {'mesh.chosen': tuple(names), 'mesh.chosen_for': str(hardware)})


def fsdp_sizes(config: schema.Config, hardware: Hardware, tensor: int) -> list[int]:
  """Returns sizes of `fsdp` in ascending order: what the config says, else those of rule 4."""
  in_slice = hardware.num_devices // hardware.slices // max(1, tensor)
  if config.mesh.fsdp == -1:
    return [max(1, in_slice // max(1, config.mesh.data))]
  if config.mesh.fsdp:
    return [config.mesh.fsdp]
  if config.mesh.data != -1:
    return [max(1, in_slice * hardware.slices // config.mesh.data)]
  width = getattr(config.model, 'width', 0) if hasattr(config.model, 'depth') else 0  # of convolutions each has its own
  sizes = [f for f in range(2, in_slice + 1) if in_slice % f == 0 and width % f == 0]
  first = min(FIRST_FSDP, in_slice)
  if _sums_whole(first, hardware):
    first = max(2, first // 2)
  return [1, *([f for f in sizes if f >= first] or sizes)]


def _ways(config: schema.Config, hardware: Hardware, sizes: Sizes, fsdp: int, tensor: int) -> Iterator[_Way]:
  """Returns every pair of rule 6 that the config allows; the plainest is always one of them."""
  shards = max(1, hardware.num_devices // tensor)
  counts = (config.train.accumulate,) if config.train.accumulate else ACCUMULATE
  remats = tuple(REMAT_TIME) if config.model.remat is Remat.AUTO else (config.model.remat,)
  chosen = _kernels(config, hardware)
  for accumulate, remat in itertools.product(counts, remats):
    one = _fill(config, {'mesh.fsdp': fsdp, 'mesh.tensor': tensor, 'train.accumulate': accumulate,
                         'model.remat': remat, 'model.execution': _execution(config.model),
                         'model.attention.kernel': chosen.attention, 'model.mlp.kernel': chosen.mlp})
    is_first = (accumulate, remat) == (counts[0], remats[0])
    batch_size = nearest_batch(config.batch_size, shards * accumulate)
    one_batch = put(one, {'batch_size': batch_size}) if config.batch_size % shards else one
    if is_first or (_may_accumulate(config, shards, accumulate) and not any(check.combinations(one_batch))):
      images = batch_size // (shards * accumulate)
      need = (sizes.state + sizes.gradients) / fsdp / tensor + images * sizes.activations(one.model) / tensor
      time = REMAT_TIME[remat] * (1 + MICROBATCH_TIME * (accumulate - 1))
      time += SECOND_PASS_TIME * (accumulate > 1 and config.objective.compares_examples)
      sent = (fsdp > 1) * (4 / 3 if _sums_whole(fsdp, hardware) else 1)
      yield _Way(one, time + accumulate * _gather_time(config, shards) * sent, need)


def _gather_time(config: schema.Config, shards: int) -> float:
  """Returns what the kernels of one microbatch cost to gather, as a part of the computation of a step."""
  if not isinstance(config.model, schema.ViT | schema.Mixer):
    return 0.
  tokens = math.prod(side // config.model.patch for side in config.image_px)
  return GATHER_TOKENS * shards / (tokens * config.batch_size)


def _may_accumulate(config: schema.Config, shards: int, accumulate: int) -> bool:
  """Returns whether so many microbatches divide the batch, and give the result of one.

  `check` knows the models for which. A batch that no number of them divides has to be changed in any case.
  """
  mixes = config.train.sam.rho or getattr(config.objective, 'mix_token', False)
  rest = config.batch_size % (shards * accumulate)
  is_divided = config.batch_size >= shards * accumulate if config.batch_size % shards else not rest
  return accumulate == 1 or (is_divided and not mixes)


def nearest_batch(batch_size: int, parts: int) -> int:
  """Returns the multiple of `parts`, at least one, that is nearest to a batch size; of two the smaller one."""
  return max(1, (2 * batch_size + parts - 1) // (2 * parts)) * parts


def _answer(way: _Way, names: Collection[str], hardware: Hardware, sizes: Sizes) -> Layout:
  """Returns the layout, with lines on what was chosen and why."""
  config, have = way.config, hardware.memory_gib
  state, share = (sizes.state + sizes.gradients) / GIB, config.mesh.fsdp * config.mesh.tensor
  given = [name for name in AUTO if name not in names and _value(config, name) not in (None, *XLA.values())]
  lines = [f'Layout for {hardware}: {_shown(config, hardware)}.'
           + f' Set in the config: {", ".join(given)}.' * bool(given),
           f'  State and gradients take {state / share:.2f} GiB a device'
           + f' ({state:.2f} GiB if replicated)' * (share > 1)
           + f', with activations {way.need / GIB:.2f} of {have:.2f} GiB, by arithmetic.']
  if estimated := _estimated(config, names, hardware, sizes):
    lines.append(f'  Chosen by estimates of the compiler, which no GPU has timed: {", ".join(estimated)}.')
  found = _kernels(config, hardware)
  for name, why in {'attention.kernel': found.why_attention, 'mlp.kernel': found.why_mlp}.items():
    if why and f'model.{name}' in names:
      lines.append(f'  {name}=xla was chosen: {why}.')
  text = _with_unused('\n'.join(lines), config, hardware)
  return Layout(_recorded(config, names, hardware), text, _fits(way, hardware))


def _estimated(config: schema.Config, names: Collection[str], hardware: Hardware, sizes: Sizes) -> list[str]:
  """Returns what is chosen on GPUs by the compiler's estimates alone."""
  if hardware.platform != 'gpu' or not isinstance(config.model, schema.ViT):
    return []
  is_divided = 'mesh.fsdp' in names and config.mesh.fsdp > 1 and _divides_a_node(hardware, sizes)
  rows = ['blocks on joined rows'] * kernels.may_join_rows(config.model)
  return [*rows, 'the XLA flags cublas', *[f'fsdp={config.mesh.fsdp}'] * is_divided]


def _with_unused(text: str, config: schema.Config, hardware: Hardware) -> str:
  """Returns a text with a line for each kernel of the config that is not used, and for products that gain nothing."""
  lines = [f'  {name} has no effect, and XLA computes in its place: {why}.'
           for name, why in _unused(config, hardware).items()]
  how = getattr(config.model, 'quantize', schema.Quantize.NONE)
  if slow := kernels.quantize_problem(how, platform=hardware.platform, name=hardware.name,
                                      capability=hardware.capability):
    lines.append(f'  model.quantize={how.value} makes no step faster here: {slow}.')
  return '\n'.join([text, *lines])


def dtype_text(model: schema.Model) -> str:
  """Returns the compute dtype of a network, and that of the products of its blocks if they are quantized."""
  dtype, how = getattr(model, 'dtype', schema.DType.F32), getattr(model, 'quantize', schema.Quantize.NONE)
  return dtype.value + f' (products of blocks in {how.value})' * (how is not schema.Quantize.NONE)


def _shown(config: schema.Config, hardware: Hardware) -> str:
  """Formats the layout in a line: axes, dtype, images of a device, and how the blocks are run."""
  mesh, model = config.mesh, config.model
  split = max(1, mesh.fsdp) * max(1, mesh.tensor)
  data = mesh.data if mesh.data != -1 else max(1, hardware.num_devices // split)
  images = config.batch_size / max(1, data) / max(1, mesh.fsdp) / max(1, config.train.accumulate)
  run = f', {model.execution.value}' if hasattr(model, 'execution') else ''
  if isinstance(model, schema.ViT):
    is_set = {f'attention.kernel={model.attention.kernel.value}': bool(model.attention.kernel.platform),
              'mlp.kernel=fused': model.mlp.kernel is MlpKernel.FUSED}
    unused = _unused(config, hardware)
    run += ''.join(f', {name}' for name, is_on in is_set.items() if is_on and name not in unused)
  return (f'data={data} fsdp={mesh.fsdp} tensor={mesh.tensor}, remat={model.remat.value}{run}, '
          f'{dtype_text(model)}, accumulate={config.train.accumulate} '
          f'({images:g} images a device and microbatch)')
