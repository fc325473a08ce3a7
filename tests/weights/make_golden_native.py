"""Writes `golden_native.npz`: weights of a small NaFlex network of SigLIP 2, and what transformers computes with them.

Needs torch and transformers: `python tests/weights/make_golden_native.py`.
"""
from __future__ import annotations

import pathlib

import numpy as np
import torch
import transformers

GRIDS = ((4, 4), (2, 7), (7, 2), (1, 16), (3, 5))
NUM, PATCH = 16, 4
SETTINGS = {'hidden_size': 16, 'intermediate_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2,
            'num_patches': NUM, 'patch_size': PATCH}


def main() -> None:
  torch.manual_seed(0)
  model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**SETTINGS)).eval()
  mask = torch.tensor([[number < h * w for number in range(NUM)] for h, w in GRIDS])
  patches = torch.randn(len(GRIDS), NUM, 3 * PATCH ** 2) * mask[..., None]
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.normal_(0., .3)
    found = model(pixel_values=patches, pixel_attention_mask=mask.int(), spatial_shapes=torch.tensor(GRIDS))
  tensors = {f'weights/{name}': x.numpy() for name, x in model.state_dict().items()}
  np.savez_compressed(pathlib.Path(__file__).with_name('golden_native.npz'), patches=patches.numpy(),
                      grid=np.array(GRIDS, np.int32), pooled=found.pooler_output.numpy(), **tensors)


if __name__ == '__main__':
  main()
