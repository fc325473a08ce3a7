"""Makes `golden_schedules.json`: learning rates of the authors' programs at every update, for `test_schedules.py`.

Run where PyTorch and timm are, with the folder that has the checkouts of the programs:
  python tests/optim/make_golden_schedules.py SRC
Made with timm 1.0.31, dino 7c446df, mae efb2a80, big_vision 0127fb6, vision_transformer c6de1e5 and big_transfer
140de6e. The functions that make the rates are run as they stand in the programs' files, with NumPy for JAX; the loops
around timm's scheduler are those of deit main.py (7e160fe) and TokenLabeling main.py (9dbfd59).
"""
from __future__ import annotations

import json
import math
import pathlib
import sys
import types

import numpy as np
import torch
from timm.scheduler import CosineLRScheduler

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from taken import taken  # noqa: E402

EPOCHS, STEPS, WARMUP, PEAK, END, START = 40, 10, 5, 2., .1, .01
TOTAL = EPOCHS * STEPS


def timm_epochs(*, is_late: bool, epochs: int = EPOCHS, cooldown: int = 0) -> list[float]:
  """The rate of each epoch: DeiT's loop steps the scheduler with the number of the epoch that has ended."""
  optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
  scheduler = CosineLRScheduler(optimizer, t_initial=epochs, lr_min=END, warmup_t=WARMUP, warmup_lr_init=START)
  rates = []
  for epoch in range(epochs + cooldown):
    rates.append(optimizer.param_groups[0]['lr'])
    scheduler.step(epoch if is_late else epoch + 1)
  return rates


def main(src: pathlib.Path) -> None:
  found: dict[str, list[float]] = {
      'deit': timm_epochs(is_late=True),
      'token_label': timm_epochs(is_late=False, epochs=EPOCHS - 3, cooldown=3),
      'dino': taken(src / 'dino/utils.py', 'cosine_scheduler', np=np)(PEAK, END, EPOCHS, STEPS, WARMUP).tolist()}
  loss = taken(src / 'dino/main_dino.py', 'DINOLoss', torch=torch, nn=torch.nn, np=np)
  found['dino_temperature'] = loss(4, 10, .03, .07, 30, EPOCHS).teacher_temp_schedule.tolist()
  adjust = taken(src / 'mae/util/lr_sched.py', 'adjust_learning_rate', math=math)
  args = types.SimpleNamespace(lr=PEAK, min_lr=END, warmup_epochs=WARMUP, epochs=EPOCHS)
  optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
  found['mae'] = [adjust(optimizer, step / STEPS, args) for step in range(TOTAL)]
  make = taken(src / 'big_vision/big_vision/utils.py', 'steps', 'create_learning_rate_schedule', jnp=np)
  for decay, more in (('cosine', {}), ('linear', {'end': END}), ('rsqrt', {'timescale': 25, 'cooldown_steps': 60})):
    rate = make(TOTAL, base=PEAK, decay_type=decay, warmup_steps=WARMUP * STEPS, **more)
    found[f'big_vision_{decay}'] = [float(rate(step)) for step in range(TOTAL)]
  rate = taken(src / 'vision_transformer/vit_jax/utils.py', 'create_learning_rate_schedule', jnp=np)(
      TOTAL, PEAK, 'cosine', WARMUP * STEPS)
  found['vision_transformer'] = [float(rate(step)) for step in range(TOTAL)]
  rate = taken(src / 'big_transfer/bit_hyperrule.py', 'get_schedule', 'get_lr')
  found['big_transfer'] = [rate(step, 1_000, PEAK) for step in range(500)]
  (HERE / 'golden_schedules.json').write_text(json.dumps(
      {name: [float(f'{rate:.7g}') for rate in rates] for name, rates in found.items()}) + '\n')


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
