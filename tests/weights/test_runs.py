"""Hostile run directories: arrays that are larger than their description are refused before they are read."""
from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import shutil

import loaded
import numpy as np
import orbax.checkpoint as ocp
import pytest

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.jobs import report
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
  monkeypatch.setattr(runs.os, 'sysconf', lambda _: 30)  # pages, and bytes of one
  with pytest.raises(UserError, match='expected arrays that fit in the 0.0 GiB of memory of this machine, got'):
    runs.read(run, view='')


def test_nothing_is_logged_while_a_run_is_read(run: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  for path in run.rglob('_CHECKPOINT_METADATA'):  # which items that are saved during training lack
    path.unlink()
  with caplog.at_level(logging.WARNING, 'absl'):
    runs.read(run, view='')
    assert not caplog.records and logging.getLogger('absl').level == logging.WARNING


@pytest.mark.parametrize(('execution', 'chosen', 'expected'), [
    ('unrolled', ('model.execution',), 'auto'), ('scan', ('model.execution',), 'scan'), ('unrolled', (), 'unrolled')])
def test_how_blocks_are_run_is_open_again_if_they_were_unrolled_for_training(
    tmp_path: pathlib.Path, execution: str, chosen: tuple[str, ...], expected: str) -> None:
  found = loaded.weights('vit')
  model = dataclasses.replace(found.model, execution=schema.Execution(execution))  # type: ignore[call-arg]
  config = schema.Config(model=model, head=found.head, image_px=loaded.PX, mesh=schema.Mesh(chosen=chosen))
  runs.write(tmp_path, config, found.params, {}, class_names=found.class_names, image_px=loaded.PX)
  assert runs.read(tmp_path, view='').config.model.execution is schema.Execution(expected)


def test_weights_of_a_run_that_keeps_its_best_checkpoint_are_the_best_ones(tmp_path: pathlib.Path,
                                                                           caplog: pytest.LogCaptureFixture) -> None:
  found = loaded.weights('vit')

  def write(keep_best: str) -> pathlib.Path:
    """A run with checkpoints of steps 5, 6 and 7, whose biases of the head are the step."""
    run = tmp_path / (keep_best.replace('/', '_') or 'last')
    config = schema.Config(model=found.model, head=found.head, image_px=loaded.PX,
                           checkpoints=schema.Checkpoints(keep_best=keep_best))
    for step in (5, 6, 7):
      head = {**found.params['head'], 'bias': np.full(loaded.CLASSES, step, np.float32)}
      runs.write(tmp_path / str(step), config, {**found.params, 'head': head}, {}, class_names=found.class_names,
                 image_px=loaded.PX)
      shutil.copytree(tmp_path / str(step) / 'checkpoints' / '0', run / 'checkpoints' / str(step))
      shutil.move(tmp_path / str(step) / 'config.json', run / 'config.json')
      shutil.rmtree(tmp_path / str(step))
    rows = [{'step': 4, 'val/top1': .99, 'val/nll': .01}, {'step': 5, 'val/top1': .5, 'val/nll': .2},
            {'step': 6, 'val/top1': .7, 'val/nll': .3}, {'step': 7, 'val/top1': .6, 'val/nll': 'nan'}]
    (run / 'metrics.jsonl').write_text(''.join(f'{json.dumps({**row, "time_s": 0.})}\n' for row in rows))
    return run

  def step_of(path: pathlib.Path) -> int:
    return int(runs.read(path, view='').params['head']['bias'][0])

  with caplog.at_level(logging.INFO, 'vit_jax.weights'):
    assert step_of(write('')) == 7 and not caplog.text
    best = write('val/top1')
    assert step_of(best) == 6  # step 4 has no checkpoint any more
    assert 'the weights are those of step 6, the best val/top1 (0.7), not of the last step 7' in caplog.text
  assert step_of(write('val/nll')) == 5  # lower is better, and not a number is not
  assert step_of(best / 'checkpoints' / '7') == 7
  caplog.clear()
  (best / 'checkpoints' / '6' / 'meta' / 'metadata').write_text('{')
  with caplog.at_level(logging.INFO, 'vit_jax.weights'):
    assert step_of(best) == 7  # the best one is damaged
  assert 'Checkpoint 6' in caplog.messages[0] and 'metadata is not what was saved there: ' in caplog.messages[0]
  assert caplog.messages[1].endswith('the weights are those of step 7, the best val/top1 (0.6) of the whole '
                                     'checkpoints, without the damaged checkpoint 6.') and len(caplog.messages) == 2
  page = pathlib.Path(report.write_report(best)).read_text()
  assert 'its weights are those of step 7, the best val/top1 (0.6) of the whole' in page
  assert 'those of step 6' not in page
  (best / 'metrics.jsonl').unlink()
  assert step_of(best) == 7
