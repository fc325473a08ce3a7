"""A run with the plain forms in place of all fast ones: the same losses for 200 steps."""
from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

from vit_jax import main
from vit_jax.models.kernels import attend, dense, depthwise, norm_act
from vit_jax.record import writer

PLAIN = {id(attend.attend): attend.plain_attend, id(dense.dense): dense.plain_dense,
         id(norm_act.gelu): norm_act.plain_gelu, id(norm_act.layer_norm): norm_act.plain_layer_norm,
         id(depthwise.depthwise): depthwise.plain_depthwise}


def losses(workdir: pathlib.Path, *overrides: str) -> np.ndarray:
  status = main.run(['--job=train', '--config=digits', '--config.length=200 steps', '--config.train.log_every=1 steps',
                     '--config.evals.test.every=100 %', '--config.checkpoints.every=100 %', f'--workdir={workdir}',
                     *overrides])
  assert status == 0
  return np.array([row['train/loss'] for row in writer.read(workdir).rows if 'train/loss' in row])


def replace_forms(monkeypatch: pytest.MonkeyPatch) -> int:
  """Puts the plain form wherever a module of the project holds a fast one; how many places these are."""
  places = [(module, name, PLAIN[id(value)]) for module in list(sys.modules.values())
            if getattr(module, '__name__', '').startswith('vit_jax.')
            for name, value in vars(module).items() if id(value) in PLAIN]
  for module, name, plain in places:
    monkeypatch.setattr(module, name, plain)
  return len(places)


@pytest.mark.slow(reason='two runs of 200 steps: a minute')
@pytest.mark.parametrize('dtype, early, late', [('float32', 5e-6, 2e-4), ('bfloat16', 5e-3, 5e-2)])
def test_the_losses_of_200_steps_are_those_of_the_plain_forms(
    dtype: str, early: float, late: float, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  fast = losses(tmp_path / 'fast', f'--config.model.dtype={dtype}')
  assert replace_forms(monkeypatch) >= 6
  plain = losses(tmp_path / 'plain', f'--config.model.dtype={dtype}')
  # Rounding that differs leads runs apart, in bf16 soon: later on the means of 20 steps are compared.
  gap, means = np.abs(fast - plain), np.abs((fast - plain).reshape(10, 20).mean(1))
  print(f'{dtype}: {gap[:20].max():.1e} in 20 steps, {means.max():.1e} between means of 20; '
        f'losses {plain[0]:.3f} to {plain[-20:].mean():.3f}')
  assert len(gap) == 200 and plain[-20:].mean() < .8 * plain[0]
  assert gap[:20].max() < early and means.max() < late
