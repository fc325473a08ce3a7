"""Runs that continue on fewer or more slices than they began on (`mesh.slices=0`), with the results of the first start.

The layout is chosen for the slices of the first start, and every later start keeps it. On fewer slices each microbatch
is computed in several parts, so that a device holds no more images at once than before: on 1 of 2 slices in 2 parts. On
more slices the microbatches stay, and a device holds fewer images of each. The batches stay, so that losses differ only
by the rounding of sums, and by what the network draws, such as masks of dropout: each part draws its own. At each start
a job calls `first_hardware`, lays the run out for it, and calls `fit`. This module imports no jax.
"""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.core.errors import TemporaryError
from vit_jax.parallel import layout


def first_hardware(config: schema.Config, before: schema.Config | None, now: layout.Hardware) -> layout.Hardware:
  """Returns the hardware of the first start of a run: `now` for a new run, and on devices or slices of another kind.

  Args:
    config: the config of this start.
    before: the config that the run has saved; None for a new run.
    now: the hardware of this start.
  """
  if config.mesh.slices or before is None or not before.mesh.chosen_slices:
    return now
  first = on_slices(now, before.mesh.chosen_slices)
  return first if before.mesh.chosen_for == str(first) else now


def on_slices(hardware: layout.Hardware, slices: int) -> layout.Hardware:
  """Returns so many of the slices of which `hardware` consists."""
  return hardware._replace(num_devices=hardware.num_devices // hardware.slices * slices, slices=slices)


def fit(config: schema.Config, first: layout.Hardware, now: layout.Hardware) -> schema.Config:
  """Returns a config that is laid out for `first`, with the parts of each microbatch on `now`.

  Raises:
    TemporaryError: the batch does not divide over these slices. With others the same command resumes, so that a
      launcher starts it again.
  """
  if config.mesh.slices:
    return layout.put(config, {'mesh.chosen_slices': 0, 'mesh.chosen_parts': 1})
  parts = _find_parts(config, first, now)
  if not parts:
    fitting = [slices for slices in range(1, max(first.slices, now.slices) + 1)
               if _find_parts(config, first, on_slices(now, slices))]
    raise TemporaryError(
        f'mesh.slices: expected {" or ".join(map(str, fitting))} slices, over which batch_size={config.batch_size:,} '
        f'divides, got {now.slices}; the run began on {first.slices}. Start it on so many slices; it resumes from its '
        'last checkpoint.')
  return layout.put(config, {'mesh.chosen_for': str(first), 'mesh.chosen_slices': first.slices,
                             'mesh.chosen_parts': parts})


def _find_parts(config: schema.Config, first: layout.Hardware, now: layout.Hardware) -> int:
  """Returns the smallest number of parts with which a device holds no more images than at the first start; 0 = none."""
  if now == first:  # a batch that does not fit there is an error of the config
    return 1
  rows, rest = divmod(config.batch_size, now.num_devices // max(1, config.mesh.tensor) * config.train.microbatches)
  if rest:
    return 0
  fewest = -(-first.num_devices // now.num_devices)
  return next((parts for parts in range(fewest, rows + 1) if rows % parts == 0), 0)


def describe(config: schema.Config, slices: int) -> dict[str, int]:
  """Returns slices and microbatches of a start, for the record; {} for a run with a fixed number of slices."""
  first = config.mesh.chosen_slices
  return {'slices': slices, 'first_slices': first, 'microbatches': config.microbatches} if first else {}


def text(slices: int, first_slices: int, microbatches: int) -> str:
  """Returns the result of `describe` in words, such as `1 of 2 slices, 2 microbatches`."""
  shown = f'{slices} slices' if slices > 1 else '1 slice'
  if slices < first_slices:
    shown = f'{slices} of {first_slices} slices'
  elif slices > first_slices:
    shown += f' ({first_slices} at first)'
  return f'{shown}, {microbatches} microbatches' if microbatches > 1 else f'{shown}, 1 microbatch'
