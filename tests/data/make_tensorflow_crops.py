"""Makes `tensorflow_crops.npz`: windows that TensorFlow's crop sampler draws, for `test_crops.py`.

Run where TensorFlow is:  python tests/data/make_tensorflow_crops.py
Made with tensorflow 2.15.1 and 2.21.0, which give the same arrays (the last three cases with 2.21.0). The operation is
called as vision_transformer and big_vision call it: `min_object_covered=0`, no boxes, the image in their place; for the
last three cases as noisystudent calls it: with the image as a box, of which a part has to be covered.

Keys:
  windows        [K, S, 4] i16: top, left, height, width for the cases of `CASES`, from the stateless operation with
                 seeds (k, s)
  thresholds     [4, Q] f32: for area, width / height, top and left (these two as fractions of the room that the crop
                 leaves) the values at which the distribution is compared
  shares         [4, Q] f64: the part of `DRAWS` draws from an image of `SIZE` that are at most that value
  mean_area      [] f64
"""
from __future__ import annotations

import pathlib

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
CASES = [  # height, width, area, aspect, and if not 100 and 0, the attempts and the part that is covered at least
    (375, 500, (.05, 1.), (.75, 1.33)), (500, 375, (.05, 1.), (.75, 1.33)), (224, 224, (.05, 1.), (.75, 1.33)),
    (333, 500, (.08, 1.), (.75, 4 / 3)), (37, 41, (.05, 1.), (.75, 1.33)), (7, 5, (.05, 1.), (.75, 1.33)),
    (64, 1000, (.05, 1.), (.75, 1.33)), (1200, 90, (.3, 1.), (.75, 1.33)), (60, 1000, (.9, 1.), (.75, 1.33)),
    (1, 1, (.05, 1.), (.75, 1.33)), (2, 3, (.5, .6), (.9, 1.1)), (2333, 3500, (.25, .35), (.5, 2.)),
    (375, 500, (.08, 1.), (.75, 4 / 3), 10, .1), (60, 700, (.05, .3), (.75, 4 / 3), 10, .1),
    (9, 7, (.08, .5), (.75, 4 / 3), 3, .25)]  # the first two as noisystudent calls it
SEEDS = 150
SIZE, AREA, ASPECT, DRAWS = (375, 500), (.05, 1.), (.75, 1.33), 50_000


def statistics(windows: np.ndarray) -> np.ndarray:
  """Area, width / height, top and left of windows `[S, 4]` of an image of `SIZE`: `[4, S]`."""
  top, left, height, width = windows.astype(np.float64).T
  room_y, room_x = np.maximum(SIZE[0] - height, 1), np.maximum(SIZE[1] - width, 1)
  return np.stack([height * width / (SIZE[0] * SIZE[1]), width / height, top / room_y, left / room_x])


def main() -> None:
  import tensorflow as tf

  @tf.function
  def one(size: tf.Tensor, seed: tf.Tensor, area: tf.Tensor, aspect: tf.Tensor, tries: int = 100,
          covered: float = 0.) -> tf.Tensor:
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        size, tf.constant([[[0., 0., 1., 1.]]]) if covered else tf.zeros([1, 0, 4]), seed, min_object_covered=covered,
        area_range=area, aspect_ratio_range=aspect, max_attempts=tries, use_image_if_no_bounding_boxes=True)
    return tf.concat([begin[:2], extent[:2]], 0)

  def draw(case: tuple, seeds: np.ndarray) -> np.ndarray:
    height, width, *rest = case
    dataset = tf.data.Dataset.from_tensor_slices(seeds).map(lambda seed: one.python_function(
        tf.constant([height, width, 3]), seed, *rest))
    return np.stack(list(dataset.as_numpy_iterator()))

  windows = [draw(case, np.array([(k, s) for s in range(SEEDS)], np.int64)) for k, case in enumerate(CASES)]
  many = statistics(draw((*SIZE, AREA, ASPECT), np.array([(-1, s) for s in range(DRAWS)], np.int64)))
  thresholds = np.quantile(many, np.linspace(.05, .95, 19), axis=1).T.astype(np.float32)
  shares = (many[:, None] <= thresholds[:, :, None]).mean(-1)
  np.savez_compressed(HERE / 'tensorflow_crops.npz', windows=np.stack(windows).astype(np.int16), thresholds=thresholds,
                      shares=shares, mean_area=many[0].mean().round(6))
  print(f'tensorflow {tf.__version__}: mean area {many[0].mean():.4f}, median {np.median(many[0]):.4f}')


if __name__ == '__main__':
  main()
