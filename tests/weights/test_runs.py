"""Hostile run directories: arrays that are larger than their description are refused before they are read."""
from __future__ import annotations

import logging
import pathlib
import shutil

import loaded
import numpy as np
import orbax.checkpoint as ocp
import pytest

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.weights import runs


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
  found = loaded.weights('vit')
  config = schema.Config(model=found.model, head=found.head, image_px=loaded.PX)
  runs.write(tmp_path, config, found.params, {}, class_names=found.class_names, image_px=loaded.PX)
  return tmp_path


def test_a_run_with_larger_arrays_than_its_description_is_refused_before_they_are_read(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  assert runs.read(run, view='').step == 0
  params, folder = loaded.weights('vit').params, run / 'checkpoints' / '0' / 'params'
  shutil.rmtree(folder)
  large = {**params, 'head': {**params['head'], 'kernel': np.zeros((1 << 10, 1 << 10), np.float32)}}
  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(folder, large)
  assert sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) < 1 << 20  # 4 MiB once expanded
  monkeypatch.setattr(ocp.PyTreeCheckpointer, 'restore', lambda *_, **__: pytest.fail('an array was read'))
  with pytest.raises(UserError, match=r'params holds other arrays than its description: float32\[1024, 1024\]'):
    runs.read(run, view='')


def test_a_run_that_does_not_fit_in_memory_is_refused(run: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(runs, '_memory_bytes', lambda: 1000)
  with pytest.raises(UserError, match='expected arrays that fit in the 0.0 GiB of memory of this machine, got'):
    runs.read(run, view='')


def test_nothing_is_logged_while_a_run_is_read(run: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  for path in run.rglob('_CHECKPOINT_METADATA'):  # which items that are saved during training lack
    path.unlink()
  with caplog.at_level(logging.WARNING, 'absl'):
    runs.read(run, view='')
    assert not caplog.records and logging.getLogger('absl').level == logging.WARNING
