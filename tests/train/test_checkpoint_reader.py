"""Reading checkpoints: nothing is written, damage is told from what the system is the reason for."""
from __future__ import annotations

import errno
import json
import os
import pathlib
import resource
import shutil
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest
import saved

from vit_jax.core import failures, trees
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.failures import Damaged
from vit_jax.record import checkpoint_files
from vit_jax.train import checkpoint, checkpoint_reader
from vit_jax.train.state import TrainState
from vit_jax.train.step import Program


@pytest.fixture(scope='module')
def one() -> Program:
  return saved.program()


@pytest.fixture(scope='module')
def written(one: Program, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict[int, str]]:
  folder = tmp_path_factory.mktemp('written') / 'checkpoints'
  return folder, saved.write(folder, one, [1, 2])


@pytest.fixture
def folder(written: tuple[pathlib.Path, dict[int, str]], tmp_path: pathlib.Path) -> pathlib.Path:
  return pathlib.Path(shutil.copytree(written[0], tmp_path / 'run' / 'checkpoints'))


def largest(folder: pathlib.Path) -> pathlib.Path:
  return max((p for p in folder.rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)


def newest(folder: pathlib.Path, one: Program) -> checkpoint_reader.Restored | None:
  return checkpoint_reader.Reader(folder).newest(one.placed_state)


def test_reading_changes_nothing_even_beside_a_save_that_is_under_way(
    folder: pathlib.Path, one: Program, written: tuple[pathlib.Path, dict[int, str]]) -> None:
  saved.half_write(folder)
  largest(folder / '2' / 'params').write_bytes(b'')
  before = saved.snapshot(folder.parent)
  reader = checkpoint_reader.Reader(folder)
  got = reader.newest(one.placed_state)
  assert int(got.state.step) == 1 and trees.digest(got.state.params) == written[1][1]
  assert reader.steps() == [1, 2] and checkpoint_files.read_meta(folder / '2')['name'] == 'x'
  assert int(reader.read(1, one.placed_state).state.step) == 1
  assert saved.snapshot(folder.parent) == before


def test_no_folder_holds_no_checkpoint(tmp_path: pathlib.Path, one: Program) -> None:
  assert newest(tmp_path / 'absent', one) is None and not (tmp_path / 'absent').exists()


def test_a_folder_with_a_number_that_no_step_has_is_no_checkpoint_that_can_be_read(
    folder: pathlib.Path, one: Program, caplog: pytest.LogCaptureFixture) -> None:
  (folder / '20241129120000').mkdir()
  assert int(newest(folder, one).state.step) == 2
  assert 'checkpoint 20241129120000 is damaged: ' in caplog.text


@pytest.mark.parametrize('how', saved.DAMAGES)
def test_an_array_file_that_is_not_what_it_was_falls_back_to_the_checkpoint_before(
    folder: pathlib.Path, one: Program, how: str, caplog: pytest.LogCaptureFixture) -> None:
  saved.DAMAGES[how](largest(folder / '2' / 'params'))
  assert int(newest(folder, one).state.step) == 1
  assert 'checkpoint 2 is damaged: ' in caplog.text and 'set aside' not in caplog.text


def test_each_item_is_verified_while_the_next_is_read(folder: pathlib.Path, one: Program,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
  done: list[str] = []
  read, begin = checkpoint_reader.Reader._read_arrays, trees.begin_digest

  def reading(self: checkpoint_reader.Reader, step: int, name: str, *rest: object) -> object:
    done.append(f'read {name}')
    return read(self, step, name, *rest)  # type: ignore[arg-type]

  def beginning(tree: object) -> Callable[[], str]:
    done.append('begin')
    finish = begin(tree)
    return lambda: (done.append('wait'), finish())[1]  # type: ignore[func-returns-value]

  monkeypatch.setattr(checkpoint_reader.Reader, '_read_arrays', reading)
  monkeypatch.setattr(trees, 'begin_digest', beginning)
  assert newest(folder, one) is not None
  names = [entry.removeprefix('read ') for entry in done if entry.startswith('read')]
  assert done == [entry for name in names for entry in (f'read {name}', 'begin')] + ['wait'] * len(names)
  assert len(names) > 1


def test_items_without_arrays_come_back_with_their_structure(tmp_path: pathlib.Path, one: Program) -> None:
  """An optimizer whose state is empty, such as plain gradient descent, and `extra` with an empty part."""
  def emptied(state: TrainState) -> TrainState:
    return state._replace(opt=(optax.EmptyState(),), extra={'state': {}})

  checkpointer = checkpoint.Checkpointer(tmp_path / 'checkpoints', keep=checkpoint.Keep(1))
  checkpointer.save(emptied(one.init_fn())._replace(step=jnp.int32(3)), {}, {})
  checkpointer.wait()
  checkpointer.close()
  reader = checkpoint_reader.Reader(tmp_path / 'checkpoints')
  found = reader.newest(emptied(one.placed_state))
  assert found is not None
  assert (int(found.state.step), found.state.opt, found.state.extra) == (3, (optax.EmptyState(),), {'state': {}})


def test_processes_agree_on_the_steps_that_the_first_lists(folder: pathlib.Path, one: Program,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
  reader = checkpoint_reader.Reader(folder)
  assert reader.agreed_steps() == [1, 2]
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(reader, 'steps', lambda: [*range(3000)])
  monkeypatch.setattr(checkpoint_reader.multihost_utils, 'broadcast_one_to_all', lambda steps: steps)
  assert reader.agreed_steps() == [*range(3000 - checkpoint_reader.MAX_STEPS, 3000)]
  monkeypatch.setattr(checkpoint_reader.multihost_utils, 'broadcast_one_to_all', lambda steps: [4, 6, -1])
  assert reader.agreed_steps() == [4, 6]


def test_the_order_of_the_data_is_a_file_in_checkpoints_of_earlier_versions(
    folder: pathlib.Path, one: Program, caplog: pytest.LogCaptureFixture) -> None:
  for step in (1, 2):
    meta, data = folder / f'{step}' / checkpoint_files.META, folder / f'{step}' / checkpoint_files.DATA
    body = json.loads(meta.read_text())['body']
    data.parent.mkdir()
    data.write_text(json.dumps(order := body.pop('data')))
    meta.write_text(json.dumps(checkpoint_files.seal({**body, 'data_sha256': checkpoint_files.sha256(order)})))
  assert newest(folder, one).about['data'] == {'seed': 2}
  data.write_text('{"altered": 1}')
  assert int(newest(folder, one).state.step) == 1
  assert 'checkpoint 2 is damaged: the digest of data is not the one that was saved' in caplog.text


def test_a_step_that_is_damaged_or_absent_is_an_error_that_says_which(folder: pathlib.Path, one: Program) -> None:
  largest(folder / '2' / 'opt').unlink()
  reader = checkpoint_reader.Reader(folder)
  with pytest.raises(UserError, match=r'Checkpoint 2 in .* is damaged: '):
    reader.read(2, one.placed_state)
  with pytest.raises(UserError, match='has no checkpoint of step 3; it has: 1, 2'):
    reader.read(3, one.placed_state)


def test_a_checkpoint_that_the_run_removes_meanwhile_is_not_called_damaged(
    folder: pathlib.Path, one: Program, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  """The run saves step 3 and removes step 2 while that is being read."""
  reader = checkpoint_reader.Reader(folder)
  read = reader._load

  def load(step: int, *rest: object) -> object:
    if step == 2:
      shutil.rmtree(folder / '2')
      saved.write(folder, one, [3])
    return read(step, *rest)

  monkeypatch.setattr(reader, '_load', load)
  assert int(reader.newest(one.placed_state).state.step) == 3
  assert not caplog.records


@pytest.mark.parametrize(('error', 'kind'), [
    (PermissionError(errno.EACCES, 'Permission denied'), UserError), (MemoryError('no memory'), UserError),
    (OSError(errno.EIO, 'I/O error'), TemporaryError), (RuntimeError('UNAVAILABLE: no answer'), TemporaryError),
    (RuntimeError('RESOURCE_EXHAUSTED: 9 GiB'), UserError), (OSError(errno.EMFILE, 'Too many open files'), UserError),
    (ValueError("PERMISSION_DENIED: Error opening x [os_error_code='13']"), UserError)])
@pytest.mark.parametrize('is_wrapped', [False, True])
def test_what_says_nothing_of_the_checkpoint_ends_the_job_and_sets_nothing_aside(
    error: Exception, kind: type[Exception], is_wrapped: bool, folder: pathlib.Path, one: Program,
    monkeypatch: pytest.MonkeyPatch) -> None:
  def fail(*_: object, **__: object) -> None:
    if is_wrapped:
      raise Exception('Encountered error while reading array index') from error
    raise error

  monkeypatch.setattr(failures, 'PATIENCE_S', 0.)
  monkeypatch.setattr(checkpoint_reader.ocp.StandardCheckpointHandler, 'restore', fail)
  checkpointer = checkpoint.Checkpointer(folder, keep=checkpoint.Keep(3))
  with pytest.raises(kind, match=r'2/params: expected to read it, got (.|\n)*run the same command again'):
    checkpointer.restore(one.placed_state)
  assert checkpointer.reader.steps() == [1, 2] and not (folder.parent / 'damaged').exists()


def test_too_few_open_files_are_no_damage(folder: pathlib.Path, one: Program) -> None:
  """However many are left, from none on: the newest checkpoint or an error, never the one before."""
  ends = set()
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  free = os.open(os.devnull, os.O_RDONLY)  # the lowest number
  os.close(free)
  highest = max(map(int, os.listdir('/proc/self/fd')))  # files that other tests have left open
  for limit in (*range(free, free + 6), max(free, highest) + 40):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
      ends.add(int(newest(folder, one).state.step))
    except UserError as error:
      ends.add(str(error).partition('. ')[2].partition(' "')[0])
    finally:
      resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  assert ends == {2, 'Raise the limit on open files with'}


def test_one_process_that_fails_makes_all_take_the_checkpoint_before(monkeypatch: pytest.MonkeyPatch) -> None:
  others = [1]
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(checkpoint_reader.multihost_utils, 'process_allgather', lambda own: [int(own), *others])
  with pytest.raises(Damaged, match='another process could not read a/2; see'):
    checkpoint_reader._all_or_none('a/2', lambda: 'whole')
  for others[0], kind in ((2, TemporaryError), (3, UserError)):
    with pytest.raises(kind, match='another process could not read a/2; see'):
      checkpoint_reader._all_or_none('a/2', lambda: 'whole')
  others[0] = 0
  assert checkpoint_reader._all_or_none('a/2', lambda: 'whole') == 'whole'


def test_a_checkpoint_that_a_live_run_removes_meanwhile_is_not_called_damaged(
    folder: pathlib.Path, one: Program, monkeypatch: pytest.MonkeyPatch) -> None:
  reader = checkpoint_reader.Reader(folder)
  check = reader.check_description

  def remove(step: int) -> None:
    check(step)
    shutil.rmtree(folder / str(step))

  monkeypatch.setattr(reader, 'check_description', remove)
  with pytest.raises(checkpoint_reader.Removed, match='expected a checkpoint of step 1, got none any more: the run '
                     r'that is training there removed it\. It has: 2'):
    reader.read(1, one.placed_state)
