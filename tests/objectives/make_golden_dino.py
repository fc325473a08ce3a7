"""Makes `golden_dino.json`: losses and centers of DINO's own loss over three steps, for `test_dino.py`.

Run where PyTorch is, with a checkout of facebookresearch/dino (made with 7c446df, torch 2.15):
  python tests/objectives/make_golden_dino.py CHECKOUT
Its class DINOLoss is run on the outputs below, in float32, one step an epoch.
"""
from __future__ import annotations

import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
NUM, GLOBAL, LOCAL, PROTOTYPES, STEPS = 6, 2, 3, 11, 3
SCALE = .7  # of the teacher's outputs


def outputs(step: int) -> np.ndarray:
  """Outputs of the student `[NUM, GLOBAL + LOCAL, PROTOTYPES]`; the teacher's are SCALE times those of large crops."""
  return np.random.default_rng(step).normal(size=(NUM, GLOBAL + LOCAL, PROTOTYPES)).astype(np.float32)


def main(checkout: pathlib.Path) -> None:
  import torch
  import torch.distributed
  import torch.nn.functional
  sys.path.insert(0, str(HERE.parent))
  from taken import taken
  torch.distributed.init_process_group('gloo', init_method='tcp://127.0.0.1:29501', rank=0, world_size=1)
  make = taken(checkout / 'main_dino.py', 'DINOLoss', torch=torch, nn=torch.nn, np=np, F=torch.nn.functional,
               dist=torch.distributed)
  loss, found = make(PROTOTYPES, GLOBAL + LOCAL, .04, .07, STEPS, 10), []
  for step in range(STEPS):
    student = torch.from_numpy(outputs(step)).transpose(0, 1).reshape(-1, PROTOTYPES)  # one crop after the other
    value = loss(student, SCALE * student[:GLOBAL * NUM], step).item()
    found.append({'loss': value, 'center': loss.center[0].tolist(), 'temperature': loss.teacher_temp_schedule[step]})
  (HERE / 'golden_dino.json').write_text(json.dumps(found) + '\n')


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
