"""Makes `golden_torchvision.npz`: what torchvision computes with the weights of `drawn.py`.

Run where PyTorch and torchvision are:  python tests/weights/make_golden_torchvision.py
Made with torch 2.13 and torchvision 0.28. For a network without and one with a hidden layer in its head the file has
the names and shapes of its tensors, and its outputs for one image.
"""
from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import torch
from torchvision.models.vision_transformer import VisionTransformer

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import drawn  # noqa: E402


def main() -> None:
  held: dict[str, np.ndarray] = {}
  for name, hidden in (('plain', None), ('hidden', 12)):
    model = VisionTransformer(16, 8, 2, 2, 16, 24, num_classes=5, representation_size=hidden)
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    model.load_state_dict({key: torch.from_numpy(np.asarray(drawn.tensor(key, tuple(shape))))
                           for key, shape in shapes.items()})
    image = torch.from_numpy(drawn.image(16, 1)).permute(0, 3, 1, 2)
    with torch.no_grad():
      held[f'{name}/logits'] = model.eval()(image).numpy()
    held[f'{name}/shapes'] = np.array(json.dumps(shapes))
  np.savez_compressed(HERE / 'golden_torchvision.npz', **held)


if __name__ == '__main__':
  main()
