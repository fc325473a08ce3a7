"""A run with `model.quantize`: its losses for 200 steps, and accuracy, near those of the compute dtype."""
from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from vit_jax import main
from vit_jax.record import reader


def run(workdir: pathlib.Path, quantize: str) -> tuple[np.ndarray, float]:
  """The loss of each step, and the share of test images that the weights classify correctly."""
  assert main.run(['--job=train', '--config=digits', '--config.length=200 steps', '--config.train.log_every=1 steps',
                   '--config.evals.test.every=100 %', '--config.checkpoints.every=100 %', f'--workdir={workdir}',
                   '--config.train.ema=0', f'--config.model.quantize={quantize}']) == 0
  losses = np.array([row['train/loss'] for row in reader.read(workdir).rows if 'train/loss' in row])
  return losses, json.loads((workdir / 'final.json').read_text())['metrics']['test/top1']


@pytest.mark.slow(reason='two runs of 200 steps: a minute')
def test_a_run_of_digits_in_int8_learns_as_with_float32(tmp_path: pathlib.Path) -> None:
  plain, top1 = run(tmp_path / 'none', 'none')
  losses, own = run(tmp_path / 'int8', 'int8')
  gap, means = np.abs(losses - plain), np.abs((losses - plain).reshape(10, 20).mean(1))
  print(f'{gap[:20].max():.1e} in 20 steps, {means.max():.1e} between means of 20, top-1 {own:.4f} and {top1:.4f}')
  assert 1e-5 < gap[:20].max() < .01, 'it is not the run with float32, and near it'
  assert means.max() < .1 and abs(own - top1) < .04  # 14 of 360 images
