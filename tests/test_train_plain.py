"""The run that is read from top to bottom ends with the bits of `vit-jax train`, also after it is resumed."""
from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import runs

CONFIG = """
from configs import digits


def get_config():
  config = digits.get_config()
  config.length, config.batch_size, config.checkpoints.every, config.train.portable = '12 steps', 40, '5 steps', True
  config.model.width, config.model.heads, config.model.mlp.hidden, config.model.depth = 16, 2, 16, 2
  config.data.workers, config.data.threads = 0, 2
  return config
"""


def test_it_is_short() -> None:
  lines = (runs.ROOT / 'vit_jax' / 'train_plain.py').read_text().splitlines()
  assert len(lines) <= 150


@pytest.mark.slow(reason='30 s: three processes')
def test_the_plain_run_ends_with_the_parameters_of_train(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'tiny.py').write_text(CONFIG)
  done = runs.command('train', f'--config={tmp_path}/tiny.py', f'--workdir={tmp_path}/train')
  assert done.returncode == 0, done.stderr[-3000:]
  for _ in range(2):  # the second start resumes at step 10
    plain = subprocess.run([sys.executable, '-m', 'vit_jax.train_plain', f'{tmp_path}/tiny.py', f'{tmp_path}/plain'],
                           env=runs.environment(), capture_output=True, text=True, check=False, timeout=300)
    assert plain.returncode == 0, plain.stderr[-3000:]
    expected, found = runs.final(tmp_path / 'train'), json.loads((tmp_path / 'plain' / 'plain.json').read_text())
    assert found['params_digest'] == expected['params_digest'] and found['step'] == expected['step']
    assert found['top1@ema'] == expected['metrics']['test/top1@ema']
    assert found['top1@student'] == expected['metrics']['test/top1']
