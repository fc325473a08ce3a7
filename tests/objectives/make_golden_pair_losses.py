"""Losses and gradients of open_clip's `SigLipLoss` and `ClipLoss`: python tests/objectives/make_golden_pair_losses.py

Needs torch and open_clip_torch. The file was made with torch 2.13.0 and open_clip_torch 3.3.0, in float64, of one
process; two processes (gloo) are compared with one, and their difference is printed.
"""
from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import sys
from typing import Any

import numpy as np

FILE = pathlib.Path(__file__).with_name('golden_pair_losses.json')
B, E, SCALE, BIAS = 8, 5, 7., -3.


def vectors() -> tuple[np.ndarray, np.ndarray]:
  """Unit vectors of images and texts, `[8, 5]` f64."""
  rng = np.random.default_rng(7)
  found = rng.normal(size=(2, B, E)).round(3)
  return tuple(found / np.linalg.norm(found, axis=-1, keepdims=True))  # type: ignore[return-value]


def losses() -> Any:
  """The module of open_clip with its losses, without the rest of the package."""
  folder = pathlib.Path(str(importlib.util.find_spec('open_clip').submodule_search_locations[0]))  # type: ignore
  spec = importlib.util.spec_from_file_location('open_clip_loss', folder / 'loss.py')
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def measure(name: str, rank: int = 0, world: int = 1) -> dict[str, Any]:
  """Loss and gradients of one process, which has its part of the rows."""
  import torch
  rows = slice(rank * B // world, (rank + 1) * B // world)
  image, text = (torch.tensor(x[rows], requires_grad=True) for x in vectors())
  scale, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (SCALE, BIAS))
  if name == 'sigmoid':
    value = losses().SigLipLoss(rank=rank, world_size=world)(image, text, scale, bias)
  else:
    value = losses().ClipLoss(rank=rank, world_size=world, local_loss=world > 1, gather_with_grad=world > 1)(
        image, text, scale)
  value.backward()
  found = {'loss': value.item(), 'image': image.grad.tolist(), 'text': text.grad.tolist(), 'scale': scale.grad.item()}
  return found | ({'bias': bias.grad.item()} if name == 'sigmoid' else {})


def child(rank: int, port: str, queue: Any) -> None:
  import torch.distributed as dist
  os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}
  dist.init_process_group('gloo', rank=rank, world_size=2)
  queue.put((rank, {name: measure(name, rank, 2) for name in ('sigmoid', 'softmax')}))
  dist.destroy_process_group()


def main() -> None:
  import torch.multiprocessing as mp
  found = {name: measure(name) for name in ('sigmoid', 'softmax')}
  FILE.write_text(json.dumps(found) + '\n')
  queue = mp.get_context('spawn').SimpleQueue()
  mp.spawn(child, ('29531', queue), nprocs=2)
  parts = dict(queue.get() for _ in range(2))
  for name, one in found.items():
    value = np.mean([parts[rank][name]['loss'] for rank in (0, 1)])  # each has the mean over its rows
    image = np.concatenate([parts[rank][name]['image'] for rank in (0, 1)]) / 2
    print(f'{name}: two processes, difference of the loss {abs(value - one["loss"]):.2e}, of the gradient of images '
          f'{np.abs(image - one["image"]).max():.2e}')


if __name__ == '__main__':
  sys.exit(main())
