"""The program, which also writes what is in its training batches, a line for each row: `$BATCHES/START.PROCESS.txt`."""
from __future__ import annotations

import hashlib
import os
import pathlib
import sys
import time
from collections.abc import Iterator

import numpy as np


def record() -> None:
  """Makes the training loader write number, index and digest of each row of its batches."""
  from vit_jax.data import loader
  inner = loader.TrainLoader.batches
  path = pathlib.Path(os.environ['BATCHES'], f'{time.time():.0f}.{os.environ.get("VIT_JAX_PROCESS_ID", "0")}.txt')

  def batches(self: loader.TrainLoader, start: int) -> Iterator[dict[str, np.ndarray]]:
    for number, batch in enumerate(inner(self, start), start):
      with open(path, 'a') as file:
        for row, index in enumerate(np.asarray(batch['index']).tolist()):
          content = np.asarray(batch['image'][row]).tobytes() + bytes(str(batch['label'][row]), 'ascii')
          file.write(f'{number} {index} {hashlib.sha256(content).hexdigest()}\n')
      yield batch
  loader.TrainLoader.batches = batches  # type: ignore[method-assign]


def read(folder: pathlib.Path) -> dict[int, set[str]]:
  """Index and digest of the rows of each batch by its number; a batch that was made anew with others has them all."""
  found: dict[int, set[str]] = {}
  for path in folder.iterdir():
    for line in path.read_text().splitlines():
      number, _, row = line.partition(' ')
      if len(row.partition(' ')[2]) == 64:  # a kill may leave a part of a line
        found.setdefault(int(number), set()).add(row)
  return found


if __name__ == '__main__':
  record()
  from vit_jax import main
  sys.exit(main.run())
