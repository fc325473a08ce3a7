"""Makes `golden_axial.npz`: what the program of Axial-DeepLab computes with the weights of `weights/drawn.py`.

Run where PyTorch is:  python tests/models/rivals/make_golden_axial.py CHECKOUT
where CHECKOUT holds csrhddlam/axial-deeplab@79088ed. Made with torch 2.13. The network has the program's blocks for
images of 64 px: its own constructor fixes the sides of the maps for 224 px. The file holds the last map of two images
in evaluation and in training.
"""
from __future__ import annotations

import pathlib
import sys

import numpy as np
import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / 'weights'))
import drawn  # noqa: E402

LAYERS, SHARE, HEADS, SIDE = (1, 2, 1, 1), .25, 4, 16


def network(axialnet: object) -> torch.nn.Module:
  """The program's network with the sides of the maps of 64 px."""
  net = axialnet.AxialAttentionNet(axialnet.AxialBlock, LAYERS, s=SHARE, groups=HEADS)  # type: ignore[attr-defined]
  net.inplanes = int(64 * SHARE)
  for i, units in enumerate(LAYERS):
    side = SIDE if i < 2 else SIDE // 2 ** (i - 1)
    stage = net._make_layer(axialnet.AxialBlock, int(128 * SHARE) * 2 ** i, units,  # type: ignore[attr-defined]
                            stride=2 if i else 1, kernel_size=side)
    setattr(net, f'layer{i + 1}', stage)
  return net


def main(checkout: str) -> None:
  sys.path.insert(0, f'{checkout}/lib')  # lib/__init__.py imports datasets, which are not needed
  from models import axialnet
  net = network(axialnet)
  with torch.no_grad():  # in float64: BatchNorm over 8 values makes 4e-4 of the rounding errors of f32
    for name, old in net.state_dict().items():
      if old.dtype == torch.float32:
        old.copy_(torch.from_numpy(np.asarray(drawn.tensor(name, tuple(old.shape)))))
    net.double()
    image = torch.from_numpy(drawn.image(64)).permute(0, 3, 1, 2).contiguous().double()
    found = {}
    for mode in ('eval', 'train'):
      net.train(mode == 'train')
      x = net.maxpool(net.relu(net.bn1(net.conv1(image))))
      for i in range(4):
        x = getattr(net, f'layer{i + 1}')(x)
      found[mode] = x.permute(0, 2, 3, 1).numpy().astype(np.float32)
  np.savez_compressed(HERE / 'golden_axial.npz', **found)
  print({name: (x.shape, float(np.abs(x).mean()), float(np.abs(x).max())) for name, x in found.items()})


if __name__ == '__main__':
  main(sys.argv[1])
