"""Copies on a local disk: what is restored bit for bit, and what is not used. See also tests/test_lost_hosts.py."""
from __future__ import annotations

import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.parallel import mesh as meshes
from vit_jax.train import checkpoint
from vit_jax.train.local_copies import LocalCopies
from vit_jax.train.state import TrainState


def state(step: int, *, width: int = 8) -> TrainState:
  mesh = meshes.make(schema.Mesh(data=2, fsdp=4))
  rng = np.random.default_rng(step)
  kernel = rng.standard_normal((width, 3), np.float32)
  kernel[0] = -0., np.nan, np.inf
  split, whole = NamedSharding(mesh, PartitionSpec('fsdp')), NamedSharding(mesh, PartitionSpec())
  return TrainState(
      jax.device_put(np.int32(step), whole),
      {'a': jax.device_put(kernel, split), 'b': jax.device_put(rng.standard_normal(5).astype(jnp.bfloat16), whole)},
      ({'mu': jax.device_put(kernel * 2, split)}, jax.device_put(np.bool_(True), whole)), {})


def shardings(of: TrainState) -> TrainState:
  return jax.tree.map(lambda x: x.sharding, of)


def restore(copies: LocalCopies, like: TrainState, newer_than: int = -1) -> Any:
  return copies.restore(like, shardings(like), newer_than=newer_than)


def begun(tmp_path: pathlib.Path) -> LocalCopies:
  """Copies of a run that has begun."""
  (tmp_path / 'run').mkdir(exist_ok=True)
  copies = LocalCopies(tmp_path / 'run', str(tmp_path / 'disk'))
  restore(copies, state(0))
  return copies


def save(copies: LocalCopies, *steps: int) -> None:
  for step in steps:
    copies.save(step, state(step), data={'step': step}, meta={'name': 'x'})
  copies.wait()


def files(tmp_path: pathlib.Path) -> list[str]:
  return sorted('/'.join(path.parts[-2:]) for path in (tmp_path / 'disk').rglob('*') if path.is_file())


def test_the_newest_copy_is_restored_bit_for_bit_and_two_are_kept(tmp_path: pathlib.Path) -> None:
  save(begun(tmp_path), 4, 8, 12)
  assert files(tmp_path) == ['12/0.own', '12/0.own.json', '8/0.own', '8/0.own.json']
  found = restore(LocalCopies(tmp_path / 'run', str(tmp_path / 'disk')), state(0))
  assert found.is_local and found.data == {'step': 12} and found.meta['name'] == 'x'
  want = state(12)
  assert found.meta['digests']['params'] == trees.digest(want.params)
  for got, array in zip(jax.tree.leaves(found.state), jax.tree.leaves(want), strict=True):
    assert got.sharding == array.sharding and got.dtype == array.dtype
    assert np.asarray(got).tobytes() == np.asarray(array).tobytes()


def test_a_copy_is_used_only_if_it_is_newer_than_the_checkpoints(tmp_path: pathlib.Path) -> None:
  save(begun(tmp_path), 4)
  assert restore(begun_again := LocalCopies(tmp_path / 'run', str(tmp_path / 'disk')), state(0), 3).data == {'step': 4}
  assert restore(begun_again, state(0), 4) is None and not files(tmp_path)


@pytest.mark.parametrize('harm', ['flip', 'cut', 'manifest', 'no manifest', 'step'])
def test_a_damaged_copy_is_not_used_but_the_one_before(harm: str, tmp_path: pathlib.Path,
                                                       caplog: pytest.LogCaptureFixture) -> None:
  save(begun(tmp_path), 4, 8)
  path = next((tmp_path / 'disk').rglob('8/0.own'))
  manifest = path.with_name('0.own.json')
  content = bytearray(path.read_bytes())
  match harm:
    case 'flip':
      content[-1] ^= 1
      path.write_bytes(content)
    case 'cut':
      path.write_bytes(content[:-1])
    case 'manifest':
      manifest.write_text(manifest.read_text().replace('"name": "x"', '"name": "y"'))
    case 'no manifest':
      manifest.unlink()
    case 'step':
      path.parent.rename(path.parent.with_name('9'))
  found = restore(LocalCopies(tmp_path / 'run', str(tmp_path / 'disk')), state(0))
  assert found.data == {'step': 4}
  assert ('0.own is not used: its digest is not the one that was written' in caplog.text) == (harm == 'flip')
  assert {name.split('/')[0] for name in files(tmp_path)} == {'4'}  # nothing that later copies could be mixed with


def test_a_state_with_another_digest_is_not_used(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  copies = begun(tmp_path)
  copies.save(4, state(4), data={}, meta={})
  copies.wait()
  path = next((tmp_path / 'disk').rglob('4/0.own.json'))
  record = json.loads(path.read_text())
  record['body']['meta']['digests']['opt'] = '0' * 64
  path.write_text(json.dumps(checkpoint.checkpoint_files.seal(record['body'])))
  assert restore(LocalCopies(tmp_path / 'run', str(tmp_path / 'disk')), state(0)) is None
  assert 'local copies of step 4 are not used: the digest of opt' in caplog.text


def test_copies_of_another_run_or_another_network_are_not_used(tmp_path: pathlib.Path) -> None:
  save(begun(tmp_path), 4)
  assert restore(LocalCopies(tmp_path / 'run', str(tmp_path / 'disk')), state(0, width=16)) is None
  save(begun(tmp_path), 4)
  (tmp_path / 'run' / 'local.json').unlink()  # as with the run directory
  assert restore(LocalCopies(tmp_path / 'run', str(tmp_path / 'disk')), state(0)) is None


def test_copies_of_a_host_that_was_away_are_not_used_after_the_run_has_continued_without_them(
    tmp_path: pathlib.Path) -> None:
  """The record of the run no longer has the steps up to that copy: another start has repeated them, maybe not all."""
  save(begun(tmp_path), 4)
  (tmp_path / 'disk').rename(tmp_path / 'away')
  begun(tmp_path)
  shutil.copytree(tmp_path / 'away', tmp_path / 'disk', dirs_exist_ok=True)
  assert restore(LocalCopies(tmp_path / 'run', str(tmp_path / 'disk')), state(0)) is None


def test_without_a_folder_copies_are_among_the_temporary_files_of_this_user(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'temporary'))
  (tmp_path / 'run').mkdir()
  copies = LocalCopies(tmp_path / 'run')
  restore(copies, state(0))
  save(copies, 4)
  found, = (tmp_path / 'temporary').rglob('0.own')
  assert found.relative_to(tmp_path / 'temporary').parts[0] == f'vit_jax_local_{os.getuid()}'
  assert found.parent.stat().st_mode & 0o77 == 0


def test_a_full_disk_is_a_warning(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  copies = begun(tmp_path)
  (tmp_path / 'disk').write_text('no folder')
  save(copies, 4)
  assert 'A local copy could not be written to' in caplog.text


def test_the_end_of_a_run_removes_its_copies(tmp_path: pathlib.Path) -> None:
  copies = begun(tmp_path)
  save(copies, 4, 8)
  copies.discard()
  assert not list((tmp_path / 'disk').iterdir())


def test_a_checkpointer_restores_whichever_is_newer(tmp_path: pathlib.Path) -> None:
  def opened() -> checkpoint.Checkpointer:
    return checkpoint.Checkpointer(tmp_path / 'run' / 'checkpoints', keep=checkpoint.Keep(2),
                                   local=LocalCopies(tmp_path / 'run', str(tmp_path / 'disk')))

  like = state(0)
  one = opened()
  assert one.restore(like, shardings(like)) is None
  one.save(3, state(3), data={'step': 3}, meta={}, metrics={})
  one.save_local(5, state(5), data={'step': 5}, meta={})
  one.wait()
  one.close()
  two = opened()
  found = two.restore(like, shardings(like))
  assert found and found.is_local and int(found.state.step) == 5 and found.data == {'step': 5}
  two.save(6, state(6), data={'step': 6}, meta={}, metrics={})
  two.wait()
  two.close()
  three = opened()
  found = three.restore(like, shardings(like))
  assert found and not found.is_local and int(found.state.step) == 6
  three.close()
