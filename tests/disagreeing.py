"""A process of two that restore the same checkpoints, each of which finds another one damaged.

  python disagreeing.py CHECKPOINTS DAMAGED_OF_0 DAMAGED_OF_1

A process cannot read its damaged step, as where a host has an old copy of a file of a network folder. It then saves the
restored state as the next step, and prints the steps that it restored and listed with the digests of the parameters.
"""
from __future__ import annotations

import logging
import pathlib
import sys
from typing import Any

import jax
import saved

from vit_jax.core import trees
from vit_jax.core.failures import Damaged
from vit_jax.parallel import hosts
from vit_jax.train import checkpoint, checkpoint_reader


def main(folder: pathlib.Path, *damaged: str) -> None:
  """Restores and saves in the folder; `damaged` has the step of each process."""
  hosts.initialize()
  logging.basicConfig(format='%(message)s', stream=sys.stdout)
  mine = int(damaged[jax.process_index()])
  read = checkpoint_reader.Reader._read_arrays

  def failing(reader: checkpoint_reader.Reader, step: int, *args: Any) -> Any:
    if step == mine:
      raise Damaged(f'process {jax.process_index()} has another file')
    return read(reader, step, *args)

  checkpoint_reader.Reader._read_arrays = failing  # type: ignore[method-assign]
  program = saved.program('fsdp=8')
  checkpointer = checkpoint.Checkpointer(folder, keep=saved.KEEP)
  restored = checkpointer.restore(program.placed_state)
  assert restored is not None
  state, before = restored.state, int(restored.state.step)
  digest = checkpointer.save(state._replace(step=state.step + 10), {'name': 'x', 'data': {}}, {})
  checkpointer.wait()
  print(f'restored {before}, has {checkpointer.reader.steps()}, {trees.digest(state.params)}, saved {digest}',
        flush=True)
  checkpointer.close()


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
