"""The runs of the ViT paper's Table 3, cell by cell."""
from __future__ import annotations

import pytest

from vit_jax.config import files
from vit_jax.config import schema as s

# Epochs, base learning rate, decay of it, weight decay, dropout (arXiv 2010.11929, Table 3); loss and bias of the head.
TABLE3 = {
    'vit_b16_jft': (7, 8e-4, s.Decay.LINEAR, .1, 0., s.Loss.SIGMOID, -10.),
    'vit_l16_jft': (14, 4e-4, s.Decay.LINEAR, .1, 0., s.Loss.SIGMOID, -10.),
    'vit_h14_jft': (14, 3e-4, s.Decay.LINEAR, .1, 0., s.Loss.SIGMOID, -10.),
    'vit_b16_i21k': (90, 1e-3, s.Decay.LINEAR, .03, .1, s.Loss.SIGMOID, -10.),
    'vit_l16_i21k': (90, 1e-3, s.Decay.LINEAR, .03, .1, s.Loss.SIGMOID, -10.),
    'vit_b16_i1k': (300, 3e-3, s.Decay.COSINE, .3, .1, s.Loss.SOFTMAX, 0.),
    'vit_l16_i1k': (300, 3e-3, s.Decay.COSINE, .3, .1, s.Loss.SOFTMAX, 0.),
}


@pytest.mark.parametrize('name', TABLE3)
def test_a_run_is_what_table_3_says(name: str) -> None:
  epochs, lr, decay, weight_decay, dropout, loss, bias = TABLE3[name]
  c = files.load(name, [])
  assert (c.name, c.length, c.batch_size, c.image_px) == (name, f'{epochs} epochs', 4096, (224, 224))
  assert isinstance(c.optimizer, s.AdamW) and isinstance(c.model, s.ViT) and isinstance(c.objective, s.Supervised)
  assert (c.optimizer.lr, c.optimizer.weight_decay, c.optimizer.clip_norm) == (lr, weight_decay, 1.)
  assert (c.optimizer.schedule.decay, c.optimizer.schedule.warmup) == (decay, '10_000 steps')
  assert (c.model.dropout, c.objective.loss, c.head.bias_init) == (dropout, loss, bias)
  width, depth, patch = {'b16': (768, 12, 16), 'l16': (1024, 24, 16), 'h14': (1280, 32, 14)}[name.split('_')[1]]
  assert (c.model.width, c.model.depth, c.model.patch) == (width, depth, patch)
  assert c.head.pre_logits == (width if 'i21k' in name else 0)


@pytest.mark.parametrize(('name', 'mesh', 'fsdp', 'accumulate'), [
    ('vit_l16_jft', 'v5e:16x16', 16, 1), ('vit_b16_i1k', 'v3-8', 1, 8), ('vit_l16_i21k', 'v3:2x2', 8, 16)])
def test_a_run_is_laid_out_for_a_slice_by_its_name(name: str, mesh: str, fsdp: int, accumulate: int) -> None:
  c = files.load(f'{name}:mesh={mesh}', [])
  assert (c.mesh.fsdp, c.train.accumulate) == (fsdp, accumulate) and isinstance(c.model, s.ViT)
  assert (c.model.dtype, c.model.execution, c.model.remat) == (s.DType.BF16, s.Execution.SCAN, s.Remat.NAMES)
