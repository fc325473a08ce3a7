"""Makes `golden_positions.npz`: positions that PyTorch resizes, by the calls of timm, DeiT and DINO.

Run where PyTorch is:  python tests/models/make_golden_positions.py
Made with torch 2.13.0; to be renewed when a grid is added here. The calls are those of timm 1.0.31
(`resample_abs_pos_embed`), deit 7e160fe (`main.py`) and dino 7c446df (`interpolate_pos_encoding`), and of transformers
5.23 for TIPSv2 (bilinear, antialiased); the Perception Encoder has the bilinear one.
For each convention and each of GRIDS: `drawn(old)` on the new grid, `[h * w, WIDTH]` f32.
"""
from __future__ import annotations

import pathlib

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
WIDTH = 3
GRIDS = (((14, 14), (6, 6)), ((14, 14), (7, 9)), ((7, 7), (16, 16)), ((16, 16), (15, 16)), ((5, 9), (8, 3)))


def drawn(grid: tuple[int, int]) -> np.ndarray:
  """Positions `[h * w, WIDTH]` f32 without a pattern, the same everywhere: multiples of 1/512 in [-1, 1)."""
  places = np.arange(grid[0] * grid[1] * WIDTH, dtype=np.int64)
  return ((places * places * 37 + places * 101) % 1021 / 512 - 1).astype(np.float32).reshape(-1, WIDTH)


def main() -> None:
  import torch
  from torch.nn import functional

  found = {}
  for number, (old, new) in enumerate(GRIDS):
    table = torch.from_numpy(drawn(old)).reshape(1, *old, WIDTH).permute(0, 3, 1, 2)
    factors = tuple((n + .1) / o for o, n in zip(old, new, strict=True))
    resized = {'bicubic': functional.interpolate(table, size=new, mode='bicubic', align_corners=False),
               'bicubic_antialias': functional.interpolate(table, size=new, mode='bicubic', antialias=True),
               'bicubic_offset': functional.interpolate(table, scale_factor=factors, mode='bicubic'),
               'bilinear': functional.interpolate(table, size=new, mode='bilinear', align_corners=False),
               'bilinear_antialias': functional.interpolate(table, size=new, mode='bilinear', antialias=True)}
    for how, one in resized.items():
      assert one.shape[2:] == new, (how, one.shape)
      found[f'{how} {number}'] = one.permute(0, 2, 3, 1).reshape(-1, WIDTH).numpy()
  np.savez_compressed(HERE / 'golden_positions.npz', **found)


if __name__ == '__main__':
  main()
