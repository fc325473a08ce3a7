"""What the host does for an image beside decoding it: reading, parsing, the random generator, the row of the batch.

  python -m tests.loader_overhead [CHECKOUT ...]

Images of 600 bytes are read in the order of training, by a transform that decodes nothing, in batches of 256, from
ArrayRecord shards of 1,000 and of 125,000 records and from a TFRecord file. Printed for this checkout and each other
one: microseconds of processor time for an image, median and smallest of the turns. The checkouts are interleaved, each
turn in a process of its own. Not a test.
"""
from __future__ import annotations

import json
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np

BATCH, BATCHES, IMAGE_BYTES, TURNS = 256, 8, 600, 7
NUM = 125_000
SETS = {'array_record, 125 shards of 1,000': 1_000, 'array_record, 1 shard of 125,000': NUM, 'tfrecord': 0}


def write(folder: pathlib.Path) -> None:
  """Writes the records of each set."""
  from array_record.python import array_record_module

  from vit_jax.data.formats import example, tfrecord
  mask, rng = tfrecord.mask, np.random.default_rng(0)
  made = [example.serialize({'image': rng.bytes(IMAGE_BYTES), 'label': i % 1_000, 'name': b'n0144/%08d.jpg' % i})
          for i in range(NUM)]
  for size in filter(None, SETS.values()):
    for start in range(0, NUM, size):
      writer = array_record_module.ArrayRecordWriter(str(folder / f'{size}-{start // size}'), 'group_size:1')
      for record in made[start:start + size]:
        writer.write(record)
      writer.close()
  with open(folder / 'tfrecord', 'wb') as file:
    for record in made:
      head = struct.pack('<Q', len(record))
      file.write(head + mask(head) + record + mask(record))


def measure(folder: pathlib.Path) -> dict[str, float]:
  """Returns microseconds for an image, by set; runs in a process whose PYTHONPATH selects the checkout."""
  from vit_jax.core.types import Shard
  from vit_jax.data import loader, order
  from vit_jax.data.formats import array_record, tfds, tfrecord
  from vit_jax.data.image import transform
  image, box = np.zeros((2, 2, 3), np.uint8), np.zeros(4, np.float32)
  found = {}
  for name, size in SETS.items():
    if size:
      shards = [array_record.Shard(f'{size}-{i}', size, 0, '') for i in range(NUM // size)]
      source = array_record.PreparedSource(folder, shards, name=name, class_names=('a',))
    else:
      source = object.__new__(tfds.TfdsSource)
      source._columns, source.name = tfds.Columns('image', 'label', ('a',)), name
      source._records = tfrecord.TfRecords([str(folder / 'tfrecord')], [NUM])
    kind = loader.BatchKind(lambda record, _: {'image': image, 'box': box, 'label': np.int32(record.label)},
                       transform.eval_shapes((2, 2)))
    make = loader.Train(source, (kind,), order.Shuffled(NUM, 0), 0, BATCH, Shard((0,), 1))
    for number in range(BATCHES):  # opens all files, and has the records in the system's memory
      make(number)
    began = time.process_time()
    for number in range(BATCHES):
      make(number)
    found[name] = (time.process_time() - began) / BATCH / BATCHES * 1e6
  return found


def main(checkouts: list[str]) -> None:
  """Prints the table."""
  here = str(pathlib.Path(__file__).parent.parent)
  with tempfile.TemporaryDirectory() as folder:
    write(pathlib.Path(folder))
    taken: dict[str, list[dict[str, float]]] = {path: [] for path in [here, *map(os.path.abspath, checkouts)]}
    for _ in range(TURNS):
      for path, turns in taken.items():
        child = subprocess.run([sys.executable, __file__, '--in', folder], env={**os.environ, 'PYTHONPATH': path,
                               'XDG_CACHE_HOME': folder, 'JAX_PLATFORMS': 'cpu'}, check=True, capture_output=True)
        turns.append(json.loads(child.stdout.splitlines()[-1]))
  for name in SETS:
    for path, turns in taken.items():
      values = [turn[name] for turn in turns]
      print(f'{name:36} {path:24} {statistics.median(values):6.1f} us, at least {min(values):6.1f}')


if __name__ == '__main__':
  if sys.argv[1:2] == ['--in']:
    print(json.dumps(measure(pathlib.Path(sys.argv[2]))))
  else:
    main(sys.argv[1:])
