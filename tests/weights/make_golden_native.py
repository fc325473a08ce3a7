"""Writes `golden_native.npz`: weights of small networks for images at their own aspect, and what others compute.

These are the NaFlex network of SigLIP 2 in transformers, and NaFlexViTs of timm. Needs torch, timm and
transformers: `python tests/weights/make_golden_native.py`.
"""
from __future__ import annotations

import pathlib

import numpy as np
import torch
import transformers
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

GRIDS = ((4, 4), (2, 7), (7, 2), (1, 16), (3, 5))
NUM, PATCH = 16, 4
SETTINGS = {'hidden_size': 16, 'intermediate_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2,
            'num_patches': NUM, 'patch_size': PATCH}
OF_TIMM = {'gap': {'global_pool': 'avg', 'reg_tokens': 4, 'fc_norm': True, 'init_values': 1e-5},
           'siglip': {'act_layer': 'gelu_tanh', 'global_pool': 'map', 'pos_embed_interp_mode': 'bilinear'}}
OF_TIMM['par'] = OF_TIMM['gap'] | {'pos_embed_ar_preserving': True}


def timm_answers(patches: torch.Tensor, mask: torch.Tensor) -> dict[str, np.ndarray]:
  """Returns weights and logits of timm's networks, by name."""
  coordinates = torch.zeros(*mask.shape, 2, dtype=torch.long)
  for image, (h, w) in enumerate(GRIDS):
    coordinates[image, :h * w] = torch.tensor([divmod(number, w) for number in range(h * w)])
  found = {}
  for name, settings in OF_TIMM.items():
    model = NaFlexVit(NaFlexVitCfg(patch_size=PATCH, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2.,
                                   pos_embed_grid_size=(4, 4), **settings), num_classes=3).eval()
    for parameter in model.parameters():
      parameter.normal_(0., .3)
    logits = model({'patches': patches, 'patch_coord': coordinates, 'patch_valid': mask})
    found |= {f'{name}/logits': logits.numpy(),
              **{f'{name}/weights/{tensor}': x.numpy() for tensor, x in model.state_dict().items()}}
  return found


def main() -> None:
  torch.manual_seed(0)
  model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**SETTINGS)).eval()
  mask = torch.tensor([[number < h * w for number in range(NUM)] for h, w in GRIDS])
  patches = torch.randn(len(GRIDS), NUM, 3 * PATCH ** 2) * mask[..., None]
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.normal_(0., .3)
    timm = timm_answers(patches, mask)
    found = model(pixel_values=patches, pixel_attention_mask=mask.int(), spatial_shapes=torch.tensor(GRIDS))
  tensors = {f'weights/{name}': x.numpy() for name, x in model.state_dict().items()}
  np.savez_compressed(pathlib.Path(__file__).with_name('golden_native.npz'), patches=patches.numpy(),
                      grid=np.array(GRIDS, np.int32), pooled=found.pooler_output.numpy(), **tensors, **timm)


if __name__ == '__main__':
  main()
