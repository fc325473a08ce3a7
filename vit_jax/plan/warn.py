"""Finds warnings of a plan whose parameters are split over `fsdp`, or whose devices send more than they have to.

`table` calls `find`. FSDP gathers every kernel before it is used, twice a microbatch (forward and backward), and sums
its gradient with a reduce-scatter; `data` adds an all-reduce of the part of one device. Around a ring each of them
sends `(n - 1) / n` of the array. A compiled program that sends much more does something else, and a plan without a
warning is one in which the compiler did what the layout asks for.
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
"""A plan has a warning if its devices send more than this multiple of the bytes that the layout needs."""
GATHERS, SUMS = 2, 1
"""Collectives of a kernel in a microbatch: a gather for the forward and the backward pass, a sum of its gradient."""
SUM_BYTES = 4
"""Bytes of an element of a gradient that is summed over `data`: compilers may sum in float32."""
_MAX_SHOWN = 3  # parameters that a warning names


def find(plan: plans.Plan) -> list[str]:
  """Returns the warnings of a plan, in full sentences; none if it is not compiled or does not fit."""
  return [*_row_problems(plan), *_gather_problems(plan), *_whole_sum_problems(plan), *_excess_problems(plan)]


def ideal_bytes(plan: plans.Plan) -> int:
  """Returns the bytes of kernels and gradients in the compute dtype that a device has to send in one step.

  With `tensor`, each block also sums its activations over that axis: twice forward, twice backward, and twice more
  where they are computed again.
  """
  mesh, config = plan.parts.mesh.shape, plan.parts.config
  item_bytes = 2 if config.model.dtype is not schema.DType.F32 else 4
  total = 0.
  for _, leaf, spec in _leaves(plan):
    fsdp = _num_parts(spec, 'fsdp', mesh['fsdp'])
    num_bytes = math.prod(leaf.shape) * item_bytes / _num_parts(spec, 'tensor', mesh['tensor'])
    total += (GATHERS + SUMS) * num_bytes * _sent_share(fsdp)
    num_replicas = mesh['data'] * mesh['fsdp'] // fsdp  # devices that hold the same part
    total += 2 * num_bytes / fsdp * _sent_share(num_replicas)
  if mesh['tensor'] > 1 and isinstance(config.model, schema.ViT | schema.Mixer):
    tokens = math.prod(side // config.model.patch for side in config.image_px) + 1
    sums = config.model.depth * (4 if config.model.remat.saves_everything else 6)
    total += sums * 2 * _sent_share(mesh['tensor']) * plan.rows * tokens * config.model.width * item_bytes
  return round(config.microbatches * total)


def _sent_share(num_devices: int) -> float:
  """Returns the share of an array that each device sends around a ring."""
  return (num_devices - 1) / num_devices


def _leaves(plan: plans.Plan) -> Iterator[tuple[str, jax.ShapeDtypeStruct, jax.sharding.PartitionSpec]]:
  """Yields name, shape and spec of each parameter."""
  program = plan.parts.program
  leaves = trees.flatten(program.abstract_state.params)
  for (name, leaf), placed in zip(leaves.items(), jax.tree.leaves(program.shardings.params), strict=True):
    yield name, leaf, placed.spec


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str | None, ...]:
  """Returns the mesh axes of one dimension of a spec, `'fsdp'` or `('fsdp', 'tensor')`."""
  return entry if isinstance(entry, tuple) else (entry,)


def _num_parts(spec: jax.sharding.PartitionSpec, axis: str, size: int) -> int:
  """Returns the number of parts into which a mesh axis of this size cuts a parameter; 1 = it does not cut it."""
  return size if any(axis in _axes(entry) for entry in spec) else 1


def _row_problems(plan: plans.Plan) -> Iterator[str]:
  """Yields a problem if shards of large parameters are not complete tiles of a TPU."""
  fsdp = plan.parts.mesh.shape['fsdp']
  if plan.chip.platform != 'tpu' or fsdp == 1:
    return
  rows_by_name = _shard_rows(plan)
  texts = [f'{name} ({rows})' for name, rows in rows_by_name.items() if rows % TILE_ROWS]
  if not texts:
    return
  smaller = [size for size in range(fsdp // 2, 1, -1) if fsdp % size == 0 and all(
      rows * (fsdp // size) % TILE_ROWS == 0 for rows in rows_by_name.values())]
  advice = f'Set {_smaller_fsdp(smaller[0])}.' if smaller else 'Set a smaller mesh.fsdp.'
  yield (f'mesh.fsdp={fsdp} splits {len(texts)} large parameters into shards whose number of rows is not a multiple '
         f'of {TILE_ROWS}: {documents.joined(texts, _MAX_SHOWN)}. The TPU compiler pads them to complete tiles, and '
         f'moves rows between neighbors after each sum. {advice}')


def _smaller_fsdp(fsdp: int) -> str:
  """Returns the flags for another `fsdp`; the other devices go to `data`."""
  return f'--config.mesh.fsdp={fsdp} --config.mesh.data=-1'


def _shard_rows(plan: plans.Plan) -> dict[str, int]:
  """Returns the rows of a shard of each large parameter along the dimension that `fsdp` splits.

  The compiler keeps the entries of a head together, so a shard of two heads of 64 has 128 rows.
  """
  mesh, model = plan.parts.mesh.shape, plan.parts.config.model
  rows_by_name = {}
  for name, leaf, spec in _leaves(plan):
    for i, (entry, size) in enumerate(zip(spec, leaf.shape, strict=False)):
      if 'fsdp' not in _axes(entry) or trees.num_bytes(leaf) <= plans.LARGE_BYTES:
        continue
      if isinstance(model, schema.ViT) and leaf.shape[i:i + 2] == (model.heads, model.width // model.heads):
        size *= leaf.shape[i + 1]
      rows_by_name[name] = size // math.prod(mesh[axis] for axis in _axes(entry) if axis)
  return rows_by_name


def _gather_problems(plan: plans.Plan) -> Iterator[str]:
  """Yields a problem if a program with sharded parameters gathers none."""
  fsdp, report = plan.parts.mesh.shape['fsdp'], plan.report
  if plan.answer is None or report.overflow or fsdp == 1:
    return
  calls = {collective.kind: collective.calls for collective in report.costs.collectives}
  if calls.get('all-gather') or calls.get('collective-permute'):
    return
  text = (f'mesh.fsdp={fsdp}, but the compiled step gathers no parameter: it has {calls.get("all-reduce", 0):,} '
          'all-reduces. ')
  if fsdp == plan.subject.topology.num_devices and fsdp > 2:
    yield (f'{text}If fsdp is over all devices of a slice, a TPU compiler may write each shard into an array of zeros '
           f'and sum these arrays, which sends twice as much as gathering. Set {_smaller_fsdp(fsdp // 2)}.')
  else:
    yield f'{text}Its kernels are not exchanged, or its activations are split in another way than planned.'


def _whole_sum_problems(plan: plans.Plan) -> Iterator[str]:
  """Yields a problem if a program that gathers kernels sums their gradients whole, and not by parts."""
  mesh, topology = plan.parts.mesh.shape, plan.subject.topology
  num_bytes = {collective.kind: collective.num_bytes for collective in plan.report.costs.collectives}
  gathers = 'all-gather' in num_bytes or 'collective-permute' in num_bytes
  if mesh['fsdp'] == 1 or mesh['tensor'] > 1 or 'all-reduce' not in num_bytes or not gathers:
    return
  needed_bytes = plan.parts.config.microbatches * sum(
      math.prod(leaf.shape) * SUM_BYTES / _num_parts(spec, 'fsdp', mesh['fsdp']) for _, leaf, spec in _leaves(plan))
  if num_bytes['all-reduce'] <= needed_bytes + plans.LARGE_BYTES:
    return
  flags = 'sparsecore' if topology.kind in xla_flags.SETS['sparsecore'].chips else 'scatter_layout'
  options = []
  if plan.chip.platform == 'tpu' and mesh['fsdp'] == topology.num_devices // topology.slices:
    options.append(f'set {_smaller_fsdp(mesh["fsdp"] // 2)}')
  if not xla_flags.has(os.environ, flags):
    options.append(f'compare --flags={flags}')
  advice = ', or '.join(options)
  yield (f'Gradients are summed whole: all-reduces of {num_bytes["all-reduce"] / 2**20:,.0f} MiB, of which this layout '
         f'needs {needed_bytes / 2**20:,.0f} MiB. A reduce-scatter over mesh.fsdp={mesh["fsdp"]} would send half as '
         'much. ' + (f'{advice[0].upper()}{advice[1:]}.' if advice else f'--flags={flags} is set and leaves these.'))


def _excess_problems(plan: plans.Plan) -> Iterator[str]:
  """Yields a problem if a program sends much more than its layout needs."""
  if plan.answer is None or plan.report.overflow:
    return
  sent_bytes, needed_bytes = plan.sent_bytes(), ideal_bytes(plan)
  if sent_bytes > EXCESS * needed_bytes + plans.LARGE_BYTES:
    yield (f'A device sends {sent_bytes / 1e9:,.2f} GB in a step, {sent_bytes / max(needed_bytes, 1):.1f} times the '
           f'{needed_bytes / 1e9:,.2f} GB that this layout needs (two gathers of each kernel and one reduce-scatter of '
           'its gradient in a microbatch, and the all-reduce over data). See the table of collectives.')
