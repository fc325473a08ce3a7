"""Makes `golden_mixing.npz`: how timm mixes the batches of single devices, and whom DeiT's sampler deals copies to.

Run where timm and a checkout of facebookresearch/deit are:
  PYTHONPATH=DEIT python tests/data/make_golden_mixing.py
Made with timm 1.0.31 and deit 7e160fe, torch 2.15; to be renewed when a number is changed here.

  cutmix []         share of NUM batches that timm's Mixup(0.8, 1.0) mixes by cutmix
  mixup, boxes [9]  deciles of the weight of the own label in batches with mixup, and in those with cutmix
  rows [STEPS, B]   index of the example in each row of the first steps, device after device, by RASampler
"""
from __future__ import annotations

import pathlib

import numpy as np

FILE = pathlib.Path(__file__).with_name('golden_mixing.npz')
NUM, PX = 20_000, 24
DEVICES, PER_DEVICE, STEPS, REPEATS, EXAMPLES = 8, 16, 3, 3, 512


def mixing() -> tuple[float, np.ndarray, np.ndarray]:
  import torch
  from timm.data import Mixup
  np.random.seed(0)  # noqa: NPY002 (what timm draws from)
  mixer = Mixup(.8, 1., label_smoothing=0., num_classes=2)
  pairs = torch.stack([torch.zeros(3, PX, PX), torch.ones(3, PX, PX)])
  weights: dict[bool, list[float]] = {True: [], False: []}
  for _ in range(NUM):
    images, labels = mixer(pairs.clone(), torch.tensor([0, 1]))
    is_box = bool(((images[0] == 0) | (images[0] == 1)).all())
    weights[is_box].append(float(labels[0, 0]))
  deciles = [np.quantile(weights[is_box], np.arange(1, 10) / 10) for is_box in (False, True)]
  return len(weights[True]) / NUM, deciles[0], deciles[1]


def rows() -> np.ndarray:
  import samplers
  dealt = [list(samplers.RASampler(range(EXAMPLES), DEVICES, rank, shuffle=False, num_repeats=REPEATS))
           for rank in range(DEVICES)]
  return np.array([[dealt[rank][step * PER_DEVICE + slot] for rank in range(DEVICES) for slot in range(PER_DEVICE)]
                   for step in range(STEPS)])


def main() -> None:
  cutmix, mixup, boxes = mixing()
  np.savez_compressed(FILE, cutmix=cutmix, mixup=mixup, boxes=boxes, rows=rows().astype(np.int16))


if __name__ == '__main__':
  main()
