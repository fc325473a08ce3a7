"""Makes `attention.npz`: the attention that transformers returns with the weights of `weights/drawn.py`.

Run where PyTorch and transformers are:  python tests/inspect/make_attention.py
Made with torch 2.13, transformers 5.23. Holds, for each network, `[L, B, A, M, M]`, f32.
"""
from __future__ import annotations

import pathlib
import sys

import numpy as np
import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / 'weights'))
import make_golden  # noqa: E402

NAMES = ('hf_vit', 'hf_deit', 'hf_dinov2_registers')


def main() -> None:
  held = {}
  for name in NAMES:
    model = make_golden.hf_models()[name]
    make_golden.fill(model)
    model.set_attn_implementation('eager')
    with torch.no_grad():
      found = model(make_golden.images(32), output_attentions=True).attentions
    held[name] = np.stack([one.numpy() for one in found])
    print(name, held[name].shape)
  np.savez_compressed(HERE / 'attention.npz', **held)
  print((HERE / 'attention.npz').stat().st_size, 'bytes')


if __name__ == '__main__':
  main()
