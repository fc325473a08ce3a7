"""Makes `golden_finetuning.json`: what timm sees while it fine-tunes a small ViT, for `test_finetune.py`.

Run where PyTorch and timm are:  python tests/jobs/make_golden_finetuning.py
Made with torch 2.13 and timm 1.0.31. The network is `timm_vit` of `tests/weights/make_golden.py` with the weights of
`drawn.py` and a new head of zeros. The optimizer is timm's SGD with momentum 0.9 and gradients clipped at norm 1; the
rates are those of the test. The file has the loss and the norm of the gradient before each of the updates.
"""
from __future__ import annotations

import json
import math
import pathlib
import sys

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / 'weights'))
import drawn  # noqa: E402

STEPS, WARMUP, BATCH, CLASSES, PEAK = 12, 2, 8, 5, .1


def rate(step: int) -> float:
  """Linear warm-up whose first step already moves, then a cosine to 0."""
  if step < WARMUP:
    return PEAK * (step + 1) / (WARMUP + 1)
  return PEAK * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2


def main() -> None:
  torch.set_num_threads(1)
  model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=CLASSES)
  with torch.no_grad():
    for name, old in model.state_dict().items():
      old.copy_(torch.zeros_like(old) if name.startswith('head.') else
                torch.from_numpy(np.asarray(drawn.tensor(name, tuple(old.shape)))))
  optimizer = create_optimizer_v2(model, 'momentum', lr=PEAK, weight_decay=0., momentum=.9)
  model.train()
  rng, losses, norms = np.random.default_rng(0), [], []
  for step in range(STEPS):
    image = rng.integers(0, 256, (BATCH, 32, 32, 3), dtype=np.uint8)
    label = rng.integers(0, CLASSES, BATCH)
    x = torch.from_numpy((image / np.float32(255) - np.float32(.5)) / np.float32(.5)).permute(0, 3, 1, 2).contiguous()
    for group in optimizer.param_groups:
      group['lr'] = rate(step)
    loss = torch.nn.functional.cross_entropy(model(x), torch.from_numpy(label))
    optimizer.zero_grad()
    loss.backward()
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.).item())
    optimizer.step()
    losses.append(loss.item())
  (HERE / 'golden_finetuning.json').write_text(json.dumps({'loss': losses, 'grad_norm': norms}, indent=1) + '\n')


if __name__ == '__main__':
  main()
