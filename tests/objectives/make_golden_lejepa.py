"""Makes `golden_lejepa.json`: statistics and losses of stable-pretraining's LeJEPA, for `test_lejepa.py`.

Run where PyTorch is, with the unpacked package (made with stable-pretraining 0.1.8, torch 2.13):
  python tests/objectives/make_golden_lejepa.py PACKAGE
Its classes are run on the embeddings below, in float64, for the directions that they draw at step 0.
"""
from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
NUM, GLOBAL, VIEWS, WIDTH, DIRECTIONS, WEIGHT = 6, 2, 5, 4, 7, .02
GRIDS = {'stable-pretraining': (3., 17), 'paper': (5., 9)}
"""End and points of the grid; the paper's has 17 points of which 9 are not negative."""


def embeddings() -> np.ndarray:
  """Embeddings `[NUM, VIEWS, WIDTH]`, whose distribution is not normal."""
  rng = np.random.default_rng(0)
  return .3 + rng.uniform(-1., 1., (NUM, 1, WIDTH)) + .2 * rng.normal(size=(NUM, VIEWS, WIDTH))


def main(package: pathlib.Path) -> None:
  import torch
  import torch.distributed
  sys.path.insert(0, str(HERE.parent))
  from taken import taken
  file, known = package / 'stable_pretraining' / 'methods' / 'lejepa.py', {'torch': torch, 'nn': torch.nn}
  torch.set_default_dtype(torch.float64)
  found: dict[str, Any] = {}
  for name, (t_max, points) in GRIDS.items():
    make = taken(file, 'EppsPulley', 'SlicedEppsPulley', **known)
    sliced, z = make(DIRECTIONS, t_max, points), torch.from_numpy(embeddings()).transpose(0, 1)
    method = taken(file, 'LeJEPA', Module=object, SlicedEppsPulley=make, Optional=dict, LeJEPAOutput=dict, **known)
    z = z.clone().requires_grad_()
    loss, invariance, sigreg = method._compute_loss(z, GLOBAL, sliced, WEIGHT)  # type: ignore[attr-defined]
    loss.backward()
    draw = torch.randn(WIDTH, DIRECTIONS, generator=torch.Generator().manual_seed(0))
    found[name] = {'loss': loss.item(), 'invariance': invariance.item(), 'sigreg': sigreg.item(),
                   'directions': (draw / draw.norm(p=2, dim=0)).tolist(),
                   'gradient': z.grad.transpose(0, 1).tolist()}  # type: ignore[union-attr]
  (HERE / 'golden_lejepa.json').write_text(json.dumps(found) + '\n')


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
