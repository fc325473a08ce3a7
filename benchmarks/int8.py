"""Accuracy and time of ONNX files in float32, dynamic int8 and static int8, on one thread of onnxruntime.

Run: python -m benchmarks.int8 --weights=FILE --float32=A.onnx --int8=B.onnx --data=FOLDER [--turns=9]

The files are those of `vit-jax export --from_pixels`, without and with `--quantize=int8`. FOLDER has a folder of
images for each class, named by WordNet id. onnxruntime makes the dynamic files here, with kernels of 8 and of 7 bits.
A turn times each file on the same 8 images, one after the other; times are medians of processor time.
"""
from __future__ import annotations

import argparse
import pathlib
import platform
import tempfile
import time
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime import quantization

import vit_jax
from vit_jax.core.types import HostArray
from vit_jax.data.labels import imagenet

IMAGES = 8  # of a turn


def read(weights: str, folder: pathlib.Path) -> tuple[HostArray, HostArray]:
  """Returns images `[N, H, W, 3]` u8, prepared as the weights require, and their classes."""
  model, known = vit_jax.load(weights), imagenet.by_count(1000)
  assert known is not None
  index = {line.split()[0]: number for number, line in enumerate(known.lines())}
  paths = sorted(folder.glob('*/*'))
  return (np.stack([model.prepare(str(path)) for path in paths]),
          np.array([index[path.parent.name] for path in paths]))


def session(path: pathlib.Path) -> Any:
  """Returns a session on one thread."""
  options = onnxruntime.SessionOptions()
  options.intra_op_num_threads = options.inter_op_num_threads = 1
  return onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])


def predict(run: Any, images: HostArray) -> HostArray:
  """Returns logits, of one image at a time."""
  return np.concatenate([run.run(None, {'image': image[None]})[0] for image in images])


def main() -> None:
  """Prints a table in Markdown."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name in ('weights', 'float32', 'int8', 'data'):
    parser.add_argument(f'--{name}', required=True)
  parser.add_argument('--turns', type=int, default=9)
  args = parser.parse_args()
  images, labels = read(args.weights, pathlib.Path(args.data))
  with tempfile.TemporaryDirectory() as folder:
    files = {'float32': pathlib.Path(args.float32), 'static int8': pathlib.Path(args.int8)}
    for bits in (8, 7):
      files[f'dynamic int8, {bits} bits'] = path = pathlib.Path(folder) / f'{bits}.onnx'
      quantization.quantize_dynamic(args.float32, path, per_channel=True, reduce_range=bits == 7,
                                    op_types_to_quantize=['MatMul'], extra_options={'MatMulConstBOnly': True})
    runs = {name: session(path) for name, path in files.items()}
    sizes = {name: path.stat().st_size / 1e6 for name, path in files.items()}
  classes = {name: predict(run, images).argmax(-1) for name, run in runs.items()}
  times: dict[str, list[float]] = {name: [] for name in runs}
  for _ in range(args.turns):
    for name, run in runs.items():
      start = time.process_time()
      predict(run, images[:IMAGES])
      times[name].append((time.process_time() - start) / IMAGES * 1e3)
  print(f'onnxruntime {onnxruntime.__version__}, {platform.processor() or platform.machine()}, {len(images)} images\n')
  print('| file | MB | top-1 | as float32 | ms an image | × float32 |\n|---|---|---|---|---|---|')
  for name in files:
    ratio = np.median(np.divide(times['float32'], times[name]))
    spread = f'{np.median(times[name]):.1f} ({min(times[name]):.1f} – {max(times[name]):.1f})'
    print(f'| {name} | {sizes[name]:.1f} | {(classes[name] == labels).mean():.1%} | '
          f'{(classes[name] == classes["float32"]).mean():.1%} | {spread} | {ratio:.2f}× |')


if __name__ == '__main__':
  main()
