"""A tf.data loader for comparison, in a process of its own; `loaders.py` runs it with a Python that has TensorFlow.

  python loader_tf.py SETTINGS

It writes the images of a folder into a TFRecord, then reads lines with a number of batches and answers each with its
processor seconds so far and the shape of a batch. Imports nothing of this package.
"""
from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

# Other files in this folder may have the names of modules of Python.
sys.path[:] = [path for path in sys.path if os.path.abspath(path or '.') != os.path.dirname(os.path.abspath(__file__))]


def dataset(tf: Any, s: dict[str, Any]) -> Any:
  """Returns endless batches `[B, H, W, 3] u8`: random crops of 5 to 100 %, resized and flipped at random."""
  with tf.io.TFRecordWriter(s['record']) as writer:
    for path in s['files']:
      with open(path, 'rb') as f:
        writer.write(f.read())

  def prepare(data: Any) -> Any:
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(data), tf.zeros([0, 0, 4], tf.float32), area_range=(0.05, 1.),
        aspect_ratio_range=(3 / 4, 4 / 3), min_object_covered=0, use_image_if_no_bounding_boxes=True)
    window = tf.stack([begin[0], begin[1], size[0], size[1]])
    image = tf.image.decode_and_crop_jpeg(data, window, channels=3, dct_method=s['dct'])
    image = tf.image.random_flip_left_right(tf.image.resize(image, s['image_px']))
    return tf.cast(image, tf.uint8)

  options = tf.data.Options()
  options.threading.private_threadpool_size = 1
  found = tf.data.TFRecordDataset(s['record']).shuffle(len(s['files'])).repeat().map(prepare, num_parallel_calls=1)
  return found.batch(s['batch'], drop_remainder=True).prefetch(1).with_options(options)


def main(s: dict[str, Any]) -> None:
  """Answers requests until the pipe is closed."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  try:
    import tensorflow as tf
  except ImportError as error:
    print(json.dumps({'error': f'a Python without TensorFlow ({error}).'}), flush=True)
    return
  tf.config.threading.set_intra_op_parallelism_threads(1)
  batches = dataset(tf, s).as_numpy_iterator()
  print(json.dumps({'label': f'tf.data {tf.__version__}, {s["dct"] or "its fast transform"}'}), flush=True)
  for line in sys.stdin:
    for _ in range(int(line)):
      batch = next(batches)
    print(json.dumps({'processor_s': time.process_time(), 'shape': list(batch.shape)}), flush=True)


if __name__ == '__main__':
  main(json.loads(sys.argv[1]))
