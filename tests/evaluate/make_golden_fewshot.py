"""Makes `golden_fewshot.json`: few-shot accuracies and images of big_vision's program, for `test_fewshot.py`.

Run where TensorFlow, JAX and what big_vision imports are, with a checkout of it:
  PYTHONPATH=big_vision python tests/evaluate/make_golden_fewshot.py
Made with big_vision 0127fb6, tensorflow 2.21.0 and jax on a CPU. Its evaluator computes the accuracies of features
that it is given; one class has fewer examples than shots. The images are those of its operations
`resize(32)|central_crop(28)`, in proportion to its `resize(256)|central_crop(224)`.
"""
from __future__ import annotations

import json
import pathlib

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
NUM, WIDTH, SHOTS, SEEDS = (90, 60), (20, 3), (1, 5, 10), 3  # training and test examples; wide and narrow features
CLASSES, PENALTY = 4, 64.
SIZES = ((40, 61), (50, 33), (28, 29))  # of images, height and width


def split(which: int, width: int) -> tuple[np.ndarray, np.ndarray]:
  """Features and labels; the last class has 7 training examples."""
  rng = np.random.default_rng(10 + which)
  label = np.arange(NUM[which]) % (CLASSES - 1)
  label[5:NUM[which]:13] = CLASSES - 1
  label = rng.permutation(label)
  centers = np.random.default_rng(99).normal(size=(CLASSES, width))
  return (centers[label] + 1.5 * rng.normal(size=(NUM[which], width))).astype(np.float32), label.astype(np.int32)


def image(number: int) -> np.ndarray:
  """Noise of large grains, `[H, W, 3] u8`."""
  height, width = SIZES[number]
  coarse = np.random.default_rng(number).integers(0, 256, (height // 3 + 1, width // 3 + 1, 3), dtype=np.uint8)
  return coarse.repeat(3, 0).repeat(3, 1)[:height, :width]


def accuracies(width: int) -> dict[str, list[float]]:
  import jax
  from big_vision.evaluators.fewshot_lsr import Evaluator
  evaluator = Evaluator(lambda *_: None, 8, {}, SHOTS, PENALTY, 'decode', 'decode', (), devices=jax.devices())
  evaluator._repr['golden'] = (*split(0, width), *split(1, width), CLASSES)
  found: dict[str, list[float]] = {}
  for seed in range(SEEDS):
    for shots, value in evaluator.compute_fewshot_metrics(None, seed, 'golden', '', '').items():
      found.setdefault(str(shots), []).append(round(float(value) * NUM[1]) / NUM[1])
  return found


def pixels(number: int) -> list[int]:
  import big_vision.pp.builder as builder
  import big_vision.pp.ops_image  # noqa: F401  (its operations)
  done = builder.get_preprocess_fn('resize(32)|central_crop(28)', log_data=False)({'image': image(number)})
  return np.asarray(done['image']).ravel().tolist()


def main() -> None:
  found = {'accuracy': {str(width): accuracies(width) for width in WIDTH},
           'pixels': [pixels(number) for number in range(len(SIZES))]}
  (HERE / 'golden_fewshot.json').write_text(json.dumps(found) + '\n')


if __name__ == '__main__':
  main()
