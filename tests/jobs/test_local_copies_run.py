"""A run with copies on a local disk, by its settings alone."""
from __future__ import annotations

import pathlib

import pytest
import runs

from vit_jax import main
from vit_jax.train import checkpoint


@pytest.mark.usefixtures('one_device', 'no_charts')
def test_the_settings_of_a_run_say_when_and_where(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """Two runs of a few steps; the first one ends without a checkpoint of its end, as by a kill."""
  monkeypatch.chdir(tmp_path)
  disk = tmp_path / 'disk'
  line = ['train', '--config=digits', *runs.TINY, '--config.length=12 steps', '--config.checkpoints.every=100 steps',
          '--config.checkpoints.local=5 steps', f'--config.checkpoints.local_dir={disk}', '--workdir=run']
  with monkeypatch.context() as killed:
    killed.setattr(checkpoint.Checkpointer, 'save', lambda *args, **more: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert main.run(line) == 130
  assert sorted(str(path.relative_to(path.parents[1])) for path in disk.rglob('*.own')) == ['10/0.own', '5/0.own']
  assert main.run(line) == 0
  assert runs.events(tmp_path / 'run', 'start')[-1]['resumed_from'] == 10
  assert [one['step'] for one in runs.events(tmp_path / 'run', 'local_checkpoint')] == [5, 10]
  assert not list(disk.iterdir())
