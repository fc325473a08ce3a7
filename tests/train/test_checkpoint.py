"""Checkpoints: what is read back is what was written, or it is not read."""
from __future__ import annotations

import errno
import os
import pathlib
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import buckets
import fakes
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import programs
import pytest

from vit_jax.config import schema
from vit_jax.core import reports, trees
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.objectives.ema import Ema, Growing
from vit_jax.objectives.supervised import Supervised
from vit_jax.record import run_directory, storage
from vit_jax.train import checkpoint
from vit_jax.train.state import TrainState
from vit_jax.train.step import Program

DATA = programs.batch()


def program(settings: str = 'one', *, classes: int = 7, ema: bool = True) -> Program:
  task = Supervised(fakes.PlainNet(), fakes.LinearHead(), num_classes=classes, loss=schema.Loss.SOFTMAX,
                    label_smoothing=0.)
  return programs.build(Ema(task, Growing(.9)) if ema else task, fakes.normalize, programs.MESHES[settings],
                        like=DATA, optimizer=schema.AdamW(weight_decay_mask=('.*/kernel',)))


@pytest.fixture(scope='module')
def one() -> Program:
  return program()


@pytest.fixture
def open_folder(tmp_path: pathlib.Path) -> Iterator[object]:
  opened = []

  def opener(**keep: object) -> checkpoint.Checkpointer:
    opened.append(checkpoint.Checkpointer(tmp_path / 'checkpoints', keep=checkpoint.Keep(**{'latest': 3, **keep})))
    return opened[-1]

  yield opener
  for checkpointer in opened:
    checkpointer.close()


def save(checkpointer: checkpoint.Checkpointer, built: Program, steps: list[int], **metrics: list[float]) -> list[str]:
  digests = []
  for i, step in enumerate(steps):
    state = built.init_fn()
    state = state._replace(step=jnp.int32(step), params=jax.tree.map(lambda x, step=step: x + step, state.params))
    digests.append(checkpointer.save(state, {'name': 'x', 'data': {'seed': step}},
                                     {k: v[i] for k, v in metrics.items()}))
  checkpointer.wait()
  return digests


def at(built: Program, step: int) -> TrainState:
  return built.init_fn()._replace(step=jnp.int32(step))


def test_what_was_saved_comes_back_bit_for_bit(one: Program, open_folder: object) -> None:
  checkpointer = open_folder()
  digest = save(checkpointer, one, [3, 7])[-1]
  got = open_folder().restore(one.placed_state)
  want = one.init_fn()
  want = want._replace(params=jax.tree.map(lambda x: x + 7, want.params))
  assert int(got.state.step) == 7 and got.about['data'] == {'seed': 7} and got.about['name'] == 'x'
  assert trees.digest(got.state.params) == digest == trees.digest(want.params)
  assert trees.digest((got.state.opt, got.state.extra)) == trees.digest((want.opt, want.extra))


def test_a_save_is_announced_with_its_digest_before_anything_is_written(one: Program, open_folder: object) -> None:
  checkpointer, seen = open_folder(), []
  digest = checkpointer.save(at(one, 4), {}, {},
                             announce=lambda found: seen.append((found, checkpointer.folder.exists())))
  assert seen == [(digest, False)]
  checkpointer.wait()


@pytest.mark.parametrize('remote', [False, True])
def test_a_run_that_was_replaced_commits_no_checkpoint_and_removes_none(
    one: Program, remote: bool, bucket: buckets.Server, tmp_path: pathlib.Path) -> None:
  """Another run takes over while arrays are written, after everything else has been checked."""
  workdir: Any = storage.open_path('gs://mine/run') if remote else tmp_path
  with run_directory.Owner(workdir):
    checkpointer = checkpoint.Checkpointer(workdir / 'checkpoints', keep=checkpoint.Keep(1))
    save(checkpointer, one, [1])
    (workdir / run_directory.OWNER_FILE).write_text('{"host": "elsewhere", "pid": 7, "token": "x"}')
    checkpointer.save(at(one, 2), {}, {})
    with pytest.raises(run_directory.Replaced, match='process 7 on elsewhere'):
      checkpointer.wait()
    assert checkpointer.reader.steps() == [1]
    checkpointer.close()


def test_an_empty_folder_restores_nothing(one: Program, open_folder: object) -> None:
  assert open_folder().restore(one.placed_state) is None


def test_a_state_without_extra_is_saved_without_it(open_folder: object) -> None:
  plain = program(ema=False)
  checkpointer = open_folder()
  save(checkpointer, plain, [1])
  assert not (checkpointer.folder / '1' / 'extra').exists()
  assert checkpointer.restore(plain.placed_state).state.extra == {}


@pytest.mark.parametrize('settings', ['data=2,fsdp=2,tensor=2', 'fsdp=8'])
def test_a_checkpoint_restores_onto_another_mesh(one: Program, open_folder: object, settings: str) -> None:
  digest = save(open_folder(), one, [2])[0]
  other = program(settings)
  state = open_folder().restore(other.placed_state).state
  assert trees.digest(state.params) == digest
  assert state.params['backbone']['kernel'].sharding == other.shardings.params['backbone']['kernel']


def damage(path: pathlib.Path, position: int) -> None:
  raw = bytearray(path.read_bytes())
  raw[position] ^= 0x10
  path.write_bytes(raw)


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(p for p in folder.rglob('*') if p.is_file() and p.stat().st_size)


def flips() -> list[tuple[int, float]]:
  rng = random.Random(0)
  return [(rng.randrange(10 ** 6), rng.random()) for _ in range(40)]


@pytest.mark.slow(reason='4 s: a restore for each byte; tests/train/test_checkpoint_reader.py has damaged files')
def test_no_flipped_byte_is_read_as_if_it_were_whole(one: Program, open_folder: object) -> None:
  """One byte anywhere in the newest checkpoint: it restores right, or the one before does; never wrong."""
  digests = dict(zip([1, 2], save(open_folder(), one, [1, 2]), strict=True))
  folder = open_folder().folder
  whole = {p: p.read_bytes() for p in files_of(folder / '2')}
  skipped = 0
  for which, where in flips():
    path = list(whole)[which % len(whole)]
    damage(path, int(where * len(whole[path])))
    checkpointer = open_folder()
    state = checkpointer.restore(one.placed_state).state
    assert trees.digest(state.params) == digests[int(state.step)], path
    checkpointer.close()
    skipped += int(state.step) == 1
    for name, raw in whole.items():
      name.parent.mkdir(parents=True, exist_ok=True)
      name.write_bytes(raw)
  assert skipped >= 5  # the rest hit bytes that carry nothing


def test_a_damaged_checkpoint_is_set_aside_with_a_message_and_its_step_can_be_saved_again(
    one: Program, open_folder: object, caplog: pytest.LogCaptureFixture) -> None:
  save(open_folder(), one, [1, 2])
  folder = open_folder().folder
  largest = max(files_of(folder / '2' / 'params'), key=lambda p: p.stat().st_size)
  damage(largest, largest.stat().st_size // 2)
  checkpointer = open_folder()
  assert int(checkpointer.restore(one.placed_state).state.step) == 1
  assert 'checkpoint 2 is damaged and set aside' in caplog.text and (folder.parent / 'damaged' / '2').is_dir()
  save(checkpointer, one, [2])
  assert checkpointer.reader.steps() == [1, 2]


def test_half_written_checkpoints_are_removed_when_a_run_begins(one: Program, open_folder: object) -> None:
  save(open_folder(), one, [1])
  folder = open_folder().folder
  half = folder / '2.orbax-checkpoint-tmp'
  half.mkdir()
  (half / 'params').mkdir()
  checkpointer = open_folder()
  assert checkpointer.reader.steps() == [1] and half.exists()
  checkpointer.restore(one.placed_state)
  for _ in range(100):  # removed in the background
    if not half.exists():
      return
    time.sleep(.1)
  raise AssertionError(f'{half} was left')


@pytest.mark.parametrize('step', [1, 2])
def test_a_damaged_description_of_orbax_is_set_aside_and_saving_goes_on(
    one: Program, open_folder: object, step: int, caplog: pytest.LogCaptureFixture) -> None:
  """Of the newest checkpoint, and of one before it, which only Orbax's manager reads."""
  save(open_folder(), one, [1, 2])
  checkpointer = open_folder()
  (checkpointer.folder / f'{step}' / '_CHECKPOINT_METADATA').write_text('[]')
  assert int(checkpointer.restore(one.placed_state).state.step) == 3 - step
  assert f'checkpoint {step} is damaged and set aside' in caplog.text
  save(checkpointer, one, [3])
  assert checkpointer.reader.steps() == [3 - step, 3]


def test_all_damaged_is_an_error_that_says_where_they_are(one: Program, open_folder: object) -> None:
  save(open_folder(), one, [1])
  for path in files_of(open_folder().folder / '1'):
    path.write_bytes(b'')
  with pytest.raises(UserError, match=r'damaged ones only:\n  1: (.|\n)*moved to .*damaged.*To begin from nothing'):
    open_folder().restore(one.placed_state)


def test_another_model_is_an_error_that_lists_shapes(one: Program, open_folder: object) -> None:
  save(open_folder(), one, [1])
  other = program(classes=9)
  with pytest.raises(UserError, match=r'another model(.|\n)*params/head/bias: float32\[7\] in the checkpoint, '
                                      r'float32\[9\] by the config'):
    open_folder().restore(other.placed_state)


def test_latest_every_and_best_are_kept(one: Program, open_folder: object) -> None:
  checkpointer = open_folder(latest=2, every=4, best='test/top1')
  save(checkpointer, one, [1, 2, 3, 4, 5, 6, 7], **{'test/top1': [.1, .9, .3, .4, .5, .6, float('nan')]})
  assert checkpointer.reader.steps() == [2, 4, 6, 7]


def test_the_best_nll_is_the_lowest(one: Program, open_folder: object) -> None:
  checkpointer = open_folder(latest=1, best='test/nll@ema')
  save(checkpointer, one, [1, 2, 3], **{'test/nll@ema': [3., 1., 2.]})
  assert checkpointer.reader.steps() == [2, 3]


@pytest.mark.skipif(os.geteuid() != 0 or not hasattr(os, 'fork'), reason='needs a process of its own with a file limit')
def test_a_full_disk_stops_with_a_clear_error_and_leaves_older_checkpoints(
    one: Program, open_folder: object, monkeypatch: pytest.MonkeyPatch) -> None:
  import resource
  checkpointer = open_folder()
  save(checkpointer, one, [1])
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
  try:
    with pytest.raises(UserError, match=r'could not be written(.|\n)*Free some space(.|\n)*steps on disk: 1'):
      save(checkpointer, one, [2])
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert int(open_folder().restore(one.placed_state).state.step) == 1


def test_a_save_that_fails_in_the_background_is_noticed_by_the_next_look(
    one: Program, open_folder: object, tmp_path: pathlib.Path) -> None:
  checkpointer = open_folder()
  save(checkpointer, one, [1])
  checkpointer.save(at(one, 2), {}, {})
  with pytest.raises(UserError, match=r'could not be written(.|\n)*steps on disk: 1\)'):
    for _ in range(100):
      shutil.rmtree(tmp_path / 'checkpoints' / '2.orbax-checkpoint-tmp', ignore_errors=True)
      checkpointer.check()
      time.sleep(.05)


def test_a_save_that_fails_here_is_noticed_while_other_processes_do_not_come(
    one: Program, open_folder: object, monkeypatch: pytest.MonkeyPatch) -> None:
  """Orbax's threads of the other processes wait at an earlier barrier, for this save."""
  failed, ended = threading.Event(), threading.Event()

  def barrier(*, key: str, timeout_ms: int) -> None:
    if failed.is_set():
      ended.wait(timeout_ms / 1000)

  class Failing:
    def result(self, timeout: float | None = None) -> None:
      failed.set()
      raise OSError(errno.EIO, 'Input/output error')

  async def fail(*_: object, **__: object) -> list[Failing]:
    return [Failing()]

  for module in (ocp.multihost, sys.modules[ocp.multihost.get_barrier_sync_fn.__module__]):
    monkeypatch.setattr(module, 'get_barrier_sync_fn', lambda **_: barrier)
  checkpointer = open_folder()
  save(checkpointer, one, [1])
  monkeypatch.setattr(ocp.JsonCheckpointHandler, 'async_save', fail)
  checkpointer.save(at(one, 2), {}, {})
  try:
    with pytest.raises(TemporaryError, match=r'could not be written(.|\n)*Input/output error(.|\n)*on disk: 1\)'):
      for _ in range(100):
        checkpointer.check()
        time.sleep(.05)
  finally:
    ended.set()


@pytest.mark.parametrize(('error', 'status'), [
    (OSError(errno.EIO, 'Input/output error'), 75), (OSError(errno.ENOSPC, 'No space left on device'), 75),
    (OSError(errno.EROFS, 'Read-only file system'), 2), (PermissionError(errno.EACCES, 'Permission denied'), 2),
    (ValueError("UNAVAILABLE: Error writing x [os_error_code='5']"), 75),
    (ValueError('UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:58502'), 75),
    (type('JaxRuntimeError', (RuntimeError,), {})('DEADLINE_EXCEEDED: Barrier timed out. Id: save:2'), 75),
    (type('JaxRuntimeError', (RuntimeError,), {})('INVALID_ARGUMENT: expected 7 buffers, got 6'), 70),
    (type('JaxRuntimeError', (RuntimeError,), {})('INTERNAL: stream did not block'), 70),
    (AttributeError("'NoneType' object has no attribute 'save'"), 70)], ids=str)
def test_a_save_that_fails_has_the_status_of_its_cause(
    error: Exception, status: int, one: Program, open_folder: object, monkeypatch: pytest.MonkeyPatch) -> None:
  checkpointer = open_folder()
  save(checkpointer, one, [1])

  def fail(*_: object, **__: object) -> None:
    raise error
  monkeypatch.setattr(checkpointer._open_once(), 'save', fail)
  with pytest.raises(Exception) as found:
    save(checkpointer, one, [2])
  failure = reports.explain(found.value, environ={'XDG_STATE_HOME': '/dev/null'})
  assert failure.status == status
  assert status == 70 or 'could not be written' in failure.message and 'steps on disk: 1' in failure.message
