"""Compares complete data loaders, image files to batches, beside tf.data.

  python -m benchmarks.loaders FOLDER [--shards=DIR] [--tensorflow=PYTHON]

FOLDER is a folder of JPEG files; `--shards` is the same set, written by `vit-jax prepare`; PYTHON is an interpreter
with TensorFlow. Every loader is a process of its own with one thread, and makes batches of 64 images: a random crop of
5 to 100 %, resized to 224 px (bilinear, no antialiasing), flipped at random, as uint8. The loaders take turns of
192 images. All processor seconds of a process count, also those between its turns, in which it fills its buffer.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import host_images
from benchmarks.pipe import JsonProcess
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.data import loader
from vit_jax.data.image import jpeg, opencv

BATCH, BATCHES, ROUNDS = 64, 3, 9
ACCURATE = 'INTEGER_ACCURATE'
CHILD = pathlib.Path(__file__).with_name('loader_tf.py')


class LoaderProcess:
  """A loader in a process of its own. `label` is its name."""

  def __init__(self, command: Sequence[str], settings: dict[str, Any]) -> None:
    name = '--tensorflow' if 'record' in settings else 'loaders'
    self._pipe = JsonProcess([*command, json.dumps(settings)], name=name, expected='a Python with TensorFlow')
    self.label: str = self._pipe.ready['label']
    self._spent_s = self._ask()

  def turn(self) -> float:
    """Makes `BATCHES` batches; returns images per processor second since the last turn."""
    spent_s, before_s = self._ask(), self._spent_s
    self._spent_s = spent_s
    return BATCH * BATCHES / max(1e-9, spent_s - before_s)

  def _ask(self) -> float:
    answer = self._pipe.ask(BATCHES)
    assert answer['shape'] == [BATCH, *host_images.IMAGE_PX, 3], answer
    return float(answer['processor_s'])

  def close(self) -> None:
    """Ends the process."""
    self._pipe.close()


def serve(settings: dict[str, Any]) -> None:
  """Answers the requests of `LoaderProcess` with a loader of this package."""
  opencv.quieten()
  decode = schema.Decode(settings['decode'])
  made = loader.train_loader(
      host_images.open_set(settings['dataset']), recipe=schema.Recipe(), image_px=host_images.IMAGE_PX,
      batch_size=BATCH, seed=0, shard=Shard((0,), 1), workers=0, threads=1, in_memory=False, max_bad_images=0,
      decode=decode)
  batches = made.batches(0)
  print(json.dumps({'label': f'vit_jax, {settings["kind"]}, decode={decode.value}'}), flush=True)
  for line in sys.stdin:
    for _ in range(int(line)):
      batch = next(batches)
    print(json.dumps({'processor_s': time.process_time(), 'shape': list(batch['image'].shape)}), flush=True)
  made.close()


def start(folder: str, *, shards: str, python: str, record: str) -> list[LoaderProcess]:
  """Starts the loaders; tf.data comes first if there is a Python for it.

  Raises:
    UserError: a dataset cannot be opened, or the Python has no TensorFlow.
  """
  host_images.open_set(folder)
  found = []
  if python:
    files = sorted(str(path) for path in pathlib.Path(folder).rglob('*') if path.suffix.lower() in ('.jpg', '.jpeg'))
    for dct in ('', ACCURATE):
      settings = {'files': files, 'record': record, 'dct': dct, 'batch': BATCH, 'image_px': host_images.IMAGE_PX}
      found.append(LoaderProcess([python, str(CHILD)], settings))
  for kind, where in (('files', folder), ('shards', shards)):
    for decode in schema.Decode if where else ():
      if decode is not schema.Decode.CROP or jpeg.is_installed():
        settings = {'dataset': where, 'kind': kind, 'decode': decode.value}
        found.append(LoaderProcess([sys.executable, '-m', 'benchmarks.loaders', '--serve'], settings))
  return found


def measure(loaders: Sequence[LoaderProcess], *, rounds: int) -> dict[str, host_images.Speed]:
  """Returns the speed of each loader; `ratio` is relative to the first, by round."""
  rates: dict[str, list[float]] = {one.label: [] for one in loaders}
  for _ in range(rounds):
    for one in loaders:
      rates[one.label].append(one.turn())
  first = rates[loaders[0].label]
  return {name: host_images.speed(found, first) for name, found in rates.items()}


def main(arguments: Sequence[str]) -> int:
  """Prints a table."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.loaders', description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('folder')
  parser.add_argument('--shards', default='', help='the same images, written by vit-jax prepare')
  parser.add_argument('--tensorflow', default='', metavar='PYTHON', help='an interpreter with TensorFlow')
  given = parser.parse_args(arguments)
  loaders: list[LoaderProcess] = []
  try:
    with tempfile.TemporaryDirectory() as to:
      loaders = start(given.folder, shards=given.shards, python=given.tensorflow, record=f'{to}/images.tfrecord')
      speeds = measure(loaders, rounds=ROUNDS)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  finally:
    for one in loaders:
      one.close()
  print(f'{"images/s and core, to 224 px":<46}{"median":>8}{"min":>8}{"max":>8}{"ratio":>8}')
  print('\n'.join(f'{name:<46}{s.median:>8,.0f}{s.smallest:>8,.0f}{s.largest:>8,.0f}{s.ratio:>8.2f}'
                  for name, s in speeds.items()))
  return 0


if __name__ == '__main__':
  if sys.argv[1:2] == ['--serve']:
    serve(json.loads(sys.argv[2]))
  else:
    sys.exit(main(sys.argv[1:]))
