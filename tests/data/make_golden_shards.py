"""Writes `golden_shards.npz`: the same images as files that the packages `webdataset` and `tensorflow` have written.

  python -m tests.data.make_golden_shards      with webdataset, tensorflow, opencv-python-headless and google-crc32c
"""
from __future__ import annotations

import pathlib
import tempfile

import numpy as np

from tests.data import packed

NUM, SHARDS = 9, 3


def features(example: packed.Example) -> dict[str, object]:
  """Those of ImageNet, as TensorFlow writes them."""
  import tensorflow as tf
  found = {}
  for name, value in packed.imagenet_features(example).items():
    values = value if isinstance(value, list) else [value]
    if values and isinstance(values[0], float):
      found[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
    elif values and isinstance(values[0], int):
      found[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    else:
      texts = [one.encode() if isinstance(one, str) else one for one in values]
      found[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=texts))
  return found


def main() -> None:
  import tensorflow as tf
  import webdataset
  found = packed.examples(NUM)
  with tempfile.TemporaryDirectory() as folder:
    with webdataset.ShardWriter(f'{folder}/set-train-%03d.tar', maxcount=NUM // SHARDS) as writer:
      for key, image, label in found:
        writer.write({'__key__': key, 'png': image, 'cls': label, 'json': {'label': packed.NAMES[label]},
                      'txt': f'an image of {packed.NAMES[label]}'})
    for number in range(SHARDS):
      with tf.io.TFRecordWriter(f'{folder}/train-{number:05d}-of-{SHARDS:05d}') as writer:
        for example in found[number * NUM // SHARDS:(number + 1) * NUM // SHARDS]:
          message = tf.train.Example(features=tf.train.Features(feature=features(example)))
          writer.write(message.SerializeToString())
    with tf.io.TFRecordWriter(f'{folder}/train.gz', 'GZIP') as writer:
      writer.write(b'x' * 100)
    content = {path.name: np.frombuffer(path.read_bytes(), np.uint8) for path in pathlib.Path(folder).iterdir()}
  np.savez_compressed(pathlib.Path(__file__).with_name('golden_shards.npz'), **content)


if __name__ == '__main__':
  main()
