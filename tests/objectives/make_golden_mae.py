"""Makes `golden_mae.json`: the loss of MAE's own program for given reconstructions, for `test_mae.py`.

Run where PyTorch is, with a checkout of facebookresearch/mae (made with efb2a80, torch 2.15):
  python tests/objectives/make_golden_mae.py CHECKOUT
Its methods patchify and forward_loss of models_mae.py are run on the arrays below, with and without normalized pixels.
"""
from __future__ import annotations

import json
import pathlib
import sys
import types

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
NUM, SIDE, PATCH, HIDDEN = 3, 24, 6, .75


def given() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Images `[B, H, W, 3]`, reconstructions `[B, N, P * P * 3]` and noise `[B, N]`, whose smallest stay visible."""
  rng, num_patches = np.random.default_rng(7), (SIDE // PATCH) ** 2
  image, predicted, noise = (rng.normal(size=size) for size in (
      (NUM, SIDE, SIDE, 3), (NUM, num_patches, PATCH * PATCH * 3), (NUM, num_patches)))
  return image.astype(np.float32), predicted.astype(np.float32), noise.astype(np.float32)


def main(checkout: pathlib.Path) -> None:
  import torch
  sys.path.insert(0, str(HERE.parent))
  from taken import taken
  model = taken(checkout / 'models_mae.py', 'MaskedAutoencoderViT', torch=torch, nn=torch.nn)
  image, predicted, noise = given()
  rank = noise.argsort(1).argsort(1)
  mask = torch.from_numpy((rank >= int(noise.shape[1] * (1 - HIDDEN))).astype(np.float32))  # as random_masking has it
  found = {}
  for normalized in (True, False):
    self = types.SimpleNamespace(patch_embed=types.SimpleNamespace(patch_size=(PATCH, PATCH)), norm_pix_loss=normalized)
    self.patchify = lambda x, self=self: model.patchify(self, x)
    pixels = torch.from_numpy(image).permute(0, 3, 1, 2)
    found[str(normalized)] = model.forward_loss(self, pixels, torch.from_numpy(predicted), mask).item()
  (HERE / 'golden_mae.json').write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
