"""Warnings of a plan whose parameters are split over `fsdp`, or whose devices send more than they have to.

FSDP gathers every kernel before it is used, twice a microbatch (forward and backward), and sums its gradient with a
reduce-scatter; what is left to `data` is an all-reduce of the part of one device. Around a ring each of them sends
`(n - 1) / n` of the array. A compiled program that sends much more does something else, and a plan without a warning is
one in which the compiler did what the layout asks for.
"""
from __future__ import annotations

import math
import os
from collections.abc import Iterator

import jax

from vit_jax.config import schema
from vit_jax.core import documents, trees
from vit_jax.parallel import xla_flags
from vit_jax.parallel.sharding import TILE_ROWS
from vit_jax.plan import plan as plans

EXCESS = 1.5
"""Bytes sent, as a multiple of the ideal, above which a plan has a warning."""
GATHERS, SUMS = 2, 1  # of a kernel in a microbatch: forward and backward; its gradient
SUM_BYTES = 4
"""Of an element of a gradient that is summed over `data`: in float32, as compilers do where they like."""
_SHOWN = 3  # parameters that a warning names


def find(plan: plans.Plan) -> list[str]:
  """Returns the warnings of a plan, in full sentences; none if it is not compiled or does not fit."""
  return [*_row_problems(plan), *_gather_problems(plan), *_whole_sum_problems(plan), *_excess_problems(plan)]


def ideal_bytes(plan: plans.Plan) -> int:
  """Returns the bytes that a device has to send in one step with this layout.

  They are those of kernels and gradients in the compute dtype.

  With `tensor`, each block also sums its activations over that axis: twice forward, twice backward, and twice more
  where they are computed again.
  """
  mesh, config = plan.parts.mesh, plan.parts.config
  item = 2 if config.model.dtype is not schema.DType.F32 else 4
  total = 0.
  for _, leaf, spec in _leaves(plan):
    fsdp, tensor = (_places(spec, axis, mesh.shape[axis]) for axis in ('fsdp', 'tensor'))
    size = math.prod(leaf.shape) * item / tensor
    total += (GATHERS + SUMS) * size * _share(fsdp)
    rest = mesh.shape['data'] * mesh.shape['fsdp'] // fsdp  # devices that hold the same part
    total += 2 * size / fsdp * _share(rest)
  if mesh.shape['tensor'] > 1 and isinstance(config.model, schema.ViT | schema.Mixer):
    tokens = math.prod(side // config.model.patch for side in config.image_px) + 1
    sums = config.model.depth * (4 if config.model.remat.saves_everything else 6)
    total += sums * 2 * _share(mesh.shape['tensor']) * plan.rows * tokens * config.model.width * item
  return round(config.microbatches * total)


def _share(places: int) -> float:
  return (places - 1) / places


def _leaves(plan: plans.Plan) -> Iterator[tuple[str, jax.ShapeDtypeStruct, jax.sharding.PartitionSpec]]:
  program = plan.parts.program
  named = trees.flatten(program.abstract_state.params)
  for (name, leaf), placed in zip(named.items(), jax.tree.leaves(program.shardings.params), strict=True):
    yield name, leaf, placed.spec


def _places(spec: jax.sharding.PartitionSpec, axis: str, size: int) -> int:
  """Returns the number of parts into which a mesh axis of this size cuts a parameter.

  It is 1 if the axis is not in the spec.
  """
  return size if any(axis in (entry if isinstance(entry, tuple) else (entry,)) for entry in spec) else 1


def _row_problems(plan: plans.Plan) -> Iterator[str]:
  """Shards that are no whole tiles of a TPU."""
  fsdp = plan.parts.mesh.shape['fsdp']
  if plan.subject.topology.chip.platform != 'tpu' or fsdp == 1:
    return
  found = {name: rows for name, rows in _rows(plan).items() if rows % TILE_ROWS}
  if found:
    named = documents.joined([f'{name} ({rows})' for name, rows in found.items()], _SHOWN)
    yield (f'mesh.fsdp={fsdp} splits {len(found)} large parameters into shards whose number of rows is not a multiple '
           f'of {TILE_ROWS}: {named}. The TPU compiler pads them to complete tiles, and moves rows between '
           f'neighbors after each sum. {_advice(plan)}')


def _rows(plan: plans.Plan) -> dict[str, int]:
  """Returns the rows of a shard of each large parameter along the dimension that `fsdp` splits.

  A head counts all its entries.

  The compiler keeps the entries of a head together, so a shard of two heads of 64 is 128 entries wide.
  """
  mesh, found = plan.parts.mesh, {}
  for name, leaf, spec in _leaves(plan):
    for i, (entry, size) in enumerate(zip(spec, leaf.shape, strict=False)):
      axes = entry if isinstance(entry, tuple) else (entry,)
      if 'fsdp' in axes and trees.num_bytes(leaf) > plans.LARGE_BYTES:
        found[name] = size * _entries(plan, leaf.shape[i:]) // math.prod(mesh.shape[axis] for axis in axes if axis)
  return found


def _entries(plan: plans.Plan, shape: tuple[int, ...]) -> int:
  """Returns the size of a head if the first dimensions of `shape` are heads and their entries; else 1."""
  model = plan.parts.config.model
  if isinstance(model, schema.ViT) and shape[:2] == (model.heads, model.width // model.heads):
    return shape[1]
  return 1


def _advice(plan: plans.Plan) -> str:
  """Returns the largest smaller `fsdp` of complete tiles; the rest of the devices goes to `data`."""
  fsdp, rows = plan.parts.mesh.shape['fsdp'], _rows(plan).values()
  better = next((f for f in range(fsdp // 2, 1, -1) if fsdp % f == 0
                 and all(size * (fsdp // f) % TILE_ROWS == 0 for size in rows)), 0)
  return f'Set --config.mesh.fsdp={better} --config.mesh.data=-1.' if better else 'Set a smaller mesh.fsdp.'


def _gather_problems(plan: plans.Plan) -> Iterator[str]:
  """Yields a problem if a program with sharded parameters gathers none."""
  is_sharded = plan.parts.mesh.shape['fsdp'] > 1
  if plan.answer is None or plan.answer.overflow or not is_sharded:
    return
  kinds = {row.kind: row.calls for row in plan.answer.costs.collectives}
  if kinds.get('all-gather') or kinds.get('collective-permute'):
    return
  shape = plan.parts.mesh.shape
  text = (f'mesh.fsdp={shape["fsdp"]}, but the compiled step gathers no parameter: it has '
          f'{kinds.get("all-reduce", 0):,} all-reduces. ')
  if shape['fsdp'] == plan.subject.topology.num_devices and shape['fsdp'] > 2:
    yield (f'{text}If fsdp is over all devices of a slice, a TPU compiler may write each shard into an array of zeros '
           'and sum these arrays, which sends twice as much as gathering. Set '
           f'--config.mesh.fsdp={shape["fsdp"] // 2} --config.mesh.data=-1.')
  else:
    yield f'{text}Its kernels are not exchanged, or its activations are split in another way than planned.'


def _whole_sum_problems(plan: plans.Plan) -> Iterator[str]:
  """Yields a problem if a program that gathers kernels sums their gradients whole, and not by parts."""
  mesh, chip = plan.parts.mesh.shape, plan.subject.topology
  rows = {row.kind: row for row in plan.answer.costs.collectives} if plan.answer else {}
  if mesh['fsdp'] == 1 or 'all-reduce' not in rows or not {'all-gather', 'collective-permute'} & rows.keys():
    return
  needed = sum(math.prod(leaf.shape) * SUM_BYTES / _places(spec, 'fsdp', mesh['fsdp']) / _places(
      spec, 'tensor', mesh['tensor']) for _, leaf, spec in _leaves(plan)) * plan.parts.config.microbatches
  found = rows['all-reduce'].num_bytes
  if mesh['tensor'] > 1 or found <= needed + plans.LARGE_BYTES:
    return
  flags = 'sparsecore' if chip.kind in xla_flags.SETS['sparsecore'].chips else 'scatter_layout'
  is_all = mesh['fsdp'] == chip.num_devices // chip.slices and chip.chip.platform == 'tpu'
  smaller = f'Set --config.mesh.fsdp={mesh["fsdp"] // 2} --config.mesh.data=-1' if is_all else ''
  compare = '' if xla_flags.has(os.environ, flags) else f'compare --flags={flags}'
  advice = ', or '.join(filter(None, (smaller, compare)))
  yield (f'Gradients are summed whole: all-reduces of {found / 2**20:,.0f} MiB, of which this layout needs '
         f'{needed / 2**20:,.0f} MiB. A reduce-scatter over mesh.fsdp={mesh["fsdp"]} would send half as much. '
         + (f'{advice[0].upper()}{advice[1:]}.' if advice else f'--flags={flags} is set and leaves these.'))


def _excess_problems(plan: plans.Plan) -> Iterator[str]:
  """Yields a problem if a program sends much more than its layout needs."""
  if plan.answer is None or plan.answer.overflow:
    return
  sent, ideal = plan.sent_bytes(), ideal_bytes(plan)
  if sent > EXCESS * ideal + plans.LARGE_BYTES:
    yield (f'A device sends {sent / 1e9:,.2f} GB in a step, {sent / max(ideal, 1):.1f} times the {ideal / 1e9:,.2f} GB '
           'that this layout needs (two gathers of each kernel and one reduce-scatter of its gradient in a microbatch, '
           'and the all-reduce over data). See the table of collectives.')
