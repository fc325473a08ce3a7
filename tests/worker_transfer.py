"""What it costs to hand over an image of 224 px from a loader process: processor time of both processes.

  python -m tests.worker_transfer [CHECKOUT ...]

One loader process with one thread fills batches of 256 with one image, decoding nothing. Printed for this checkout and
each other one: microseconds of processor time for an image, of the loader process and of the one that takes the
batches and reads a byte of every page; median of the turns, which are interleaved, each with new processes. Not a
test.
"""
from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

BATCH, BATCHES, WARM, TURNS, PX = 256, 40, 12, 5, 224


class Images:
  """A source of one image; also its transform."""
  name, digest, class_names = 'images', '', ('a',)

  def __init__(self) -> None:
    self.image, self.box = np.full((PX, PX, 3), 7, np.uint8), np.zeros(4, np.float32)

  def __len__(self) -> int:
    return 10**6

  def read(self, rows: Sequence[int]) -> Iterator[int]:
    return iter(rows)

  def __call__(self, record: int, rng: np.random.Generator) -> dict[str, object]:
    return {'image': self.image, 'box': self.box, 'label': np.int32(0)}


def ticks(path: pathlib.Path) -> int:
  """Returns the processor time of a process."""
  return sum(map(int, path.read_text().rpartition(')')[2].split()[11:13]))


def spent() -> tuple[float, float]:
  """Returns the seconds of the loader process, and of this one."""
  tick = os.sysconf('SC_CLK_TCK')
  children = [pid for task in pathlib.Path('/proc/self/task').glob('*/children') for pid in task.read_text().split()]
  return sum(ticks(pathlib.Path(f'/proc/{pid}/stat')) for pid in children) / tick, time.process_time()


def measure() -> list[float]:
  """Returns microseconds for an image; runs in a process whose PYTHONPATH selects the checkout."""
  from vit_jax.core.types import Shard
  from vit_jax.data import loader, order, workers
  from vit_jax.data.image import transform
  shapes, images = transform.eval_shapes((PX, PX)), Images()
  kind = loader.BatchKind(images, shapes)
  make = loader.Train(images, (kind,), order.Shuffled(len(images), 0), 0, BATCH, Shard((0,), 1))
  stream = workers.batches(make, range(10**6), workers.Workers(1, 1, BATCH * PX * PX * 3))
  for number, batch in enumerate(stream):
    assert batch['image'].reshape(-1)[::4096].sum(dtype=np.int64) == 7 * (BATCH * PX * PX * 3 // 4096)
    if number == WARM:
      began = spent()
    if number == WARM + BATCHES:
      return [(now - then) / BATCH / BATCHES * 1e6 for now, then in zip(spent(), began, strict=True)]
  raise AssertionError


def main(checkouts: list[str]) -> None:
  """Prints the table."""
  here = str(pathlib.Path(__file__).parent.parent)
  taken: dict[str, list[list[float]]] = {path: [] for path in [here, *map(os.path.abspath, checkouts)]}
  for _ in range(TURNS):
    for path, turns in taken.items():
      child = subprocess.run([sys.executable, __file__, '--in'], check=True, capture_output=True,
                             env={**os.environ, 'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'})
      turns.append(json.loads(child.stdout.splitlines()[-1]))
  for path, turns in taken.items():
    loader, taker = (statistics.median(turn[i] for turn in turns) for i in (0, 1))
    print(f'{path:24} loader process {loader:6.1f} us, the other {taker:6.1f} us')


if __name__ == '__main__':
  if sys.argv[1:2] == ['--in']:
    print(json.dumps(measure()), flush=True)
    os._exit(0)
  else:
    main(sys.argv[1:])
