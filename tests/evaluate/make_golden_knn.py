"""Makes `golden_knn.json`: accuracies of DINO's own k-NN classifier, for `test_knn.py`.

Run where PyTorch is, with a checkout of facebookresearch/dino (made with 7c446df, torch 2.15):
  python tests/evaluate/make_golden_knn.py CHECKOUT
Its function knn_classifier of eval_knn.py is run on the features below, normalized as its main function does.
"""
from __future__ import annotations

import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
CLASSES, NEIGHBORS, TEMPERATURE = 9, (5, 20, 60), .07
NUM = (150, 200)  # training and test examples; the program takes 100 parts of these


def split(which: int) -> tuple[np.ndarray, np.ndarray]:
  """Features `[N, 16]` and labels of overlapping classes."""
  rng = np.random.default_rng(which)
  centers, label = np.random.default_rng(9).normal(size=(CLASSES, 16)), rng.integers(0, CLASSES, NUM[which])
  return (centers[label] + 1.8 * rng.normal(size=(NUM[which], 16))).astype(np.float32), label.astype(np.int32)


def main(checkout: pathlib.Path) -> None:
  import torch
  sys.path.insert(0, str(HERE.parent))
  from taken import taken
  classify = taken(checkout / 'eval_knn.py', 'knn_classifier', torch=torch)
  (train, label), (test, answer) = ((torch.nn.functional.normalize(torch.from_numpy(x)), torch.from_numpy(y).long())
                                    for x, y in map(split, (0, 1)))
  found = {}
  for k in NEIGHBORS:
    top1, top5 = classify(train, label, test, answer, k, TEMPERATURE, num_classes=CLASSES)
    found |= {f'top1_k{k}': top1 / 100, f'top5_k{k}': top5 / 100}
  (HERE / 'golden_knn.json').write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
