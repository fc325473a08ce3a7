"""Copies of the state on the local disks of the hosts, from which a run resumes after a host was lost and replaced.

At each interval of `checkpoints.local`, a process writes all pieces of the state that its devices hold to its disk. It
also sends the pieces that no other process holds to the next process, which writes them to its own disk. Every piece is
then on the disks of two hosts, so that the loss of any one of them, with its disk, loses nothing. Where parameters are
replicated over hosts, nothing has to be sent.

A file is `DIR/RUN/STEP/OWNER.KIND`: its pieces in the order of `local_layout.Layout`, and beside it a manifest with the
step, the layout, and the SHA-256 of the file. The manifest is written last, so a file without one is incomplete. `RUN`
is random, and stands in `local.json` of the run directory. To restore, the processes compare which complete files they
have; of the newest step of which all pieces exist on some host, each process reads its files, and what is missing is
sent through the mesh. The digests of the state are verified as those of a checkpoint are.

Orbax's `experimental.emergency` (0.12) is not used. With one replica of the state it saves nothing locally. With
several, the first keeps no local copy, so that with two of them the loss of a host of the second leaves none. Hosts
that lack a copy get it as a sum with zeros, which turns -0.0 into 0.0.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pathlib
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.os_errors import Damaged
from vit_jax.core.types import Array, HostArray
from vit_jax.record import checkpoint_files, run_directory, storage
from vit_jax.train import local_layout
from vit_jax.train.checkpoint_reader import ITEMS, Restored
from vit_jax.train.local_layout import KINDS, ONLY, OWN, Layout, Piece
from vit_jax.train.state import TrainState

VERSION = 1
NAME = 'local.json'
"""File of the run directory with the id of the run."""
KEPT = 2
"""Steps whose files stay, as another host may not have completed the newest one."""
MOST_FILES = 64  # that processes tell each other of
log = logging.getLogger('vit_jax.train')

File = tuple[int, str]
"""The owner of the pieces of a file, and its kind."""


class _Content(NamedTuple):
  """A file that was read: its manifest, and its pieces."""
  body: dict[str, Any]
  pieces: dict[Piece, HostArray]


class LocalCopies:
  """The copies of one run. Every process creates one and calls the same methods; `restore` comes first.

  Args:
    workdir: of the run.
    folder: on the local disk of each host; '' = `vit_jax_local_UID` in the folder for temporary files.
  """

  def __init__(self, workdir: storage.Path, folder: str = '') -> None:
    self._workdir = workdir
    default = pathlib.Path(tempfile.gettempdir(), f'vit_jax_local_{os.getuid()}')
    self._root = (pathlib.Path(folder).expanduser() if folder else default).absolute()
    self._base = self._root
    self._layout: Layout | None = None
    self._thread: threading.Thread | None = None

  def restore(self, abstract: TrainState, shardings: TrainState, *, newer_than: int) -> Restored | None:
    """Restores the newest complete copy after step `newer_than`; None if there is none.

    Files that later copies must not be mixed with are removed: those of later steps, or else all. A copy that is
    damaged on one host is not used by any.

    Raises:
      UserError: the hosts have different numbers of devices.
    """
    self._layout = layout = Layout(abstract, shardings)
    if len(layout.processes) > 1 and not layout.devices_of_each:
      raise UserError("checkpoints.local: expected hosts with equal numbers of devices, got different ones. Set "
                      "--config.checkpoints.local=''.")
    self._base = self._root / self._find_id()
    refused: set[tuple[int, File]] = set()
    while True:
      files = _exchanged([one for one in self._list() if one not in refused])
      step = _newest(layout, files, newer_than)
      if step is None:
        self._remove(self._steps())
        with contextlib.suppress(OSError):  # another process of this host has files there
          self._base.rmdir()
        self._base = self._root / self._find_id(is_new=True)  # hosts that are away may have copies of lost steps
        return None
      own = files[step].get(jax.process_index(), [])
      read = {file: self._read(step, file) for file in own}
      bad = {(step, file) for file, content in read.items() if content is None}
      if any(_gathered(len(bad))):
        refused |= bad
        continue
      found = self._assemble(layout, files[step], {f: c for f, c in read.items() if c}, abstract, step, shardings)
      if found:
        self._remove([one for one in self._steps() if one > step])
        return found
      refused |= {(step, file) for file in own}

  def save(self, step: int, state: TrainState, *, data: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Copies the pieces of a state to the host and to the next process, and starts to write them.

    Waits for the writing of the copy before. An error of the local disk is a warning: the run continues.
    """
    layout = self._layout
    assert layout is not None
    self.wait()
    items = {name: getattr(state, name) for name in ITEMS if jax.tree.leaves(getattr(state, name))}
    started = {name: trees.begin_digest(item) for name, item in items.items()}
    arrays = [array for name in ITEMS for array in jax.tree.leaves(getattr(state, name))]
    own = _own_pieces(layout, arrays)
    for array in own.values():
      array.copy_to_host_async()
    sends = local_layout.shifted(layout) if len(layout.processes) > 1 else []
    held = {(device, piece): shard for device, piece, shard in _shards(layout, arrays)} if sends else {}
    received = local_layout.send(layout, sends, held) if sends else {}
    contents: dict[File, dict[Piece, HostArray]] = {(jax.process_index(), OWN): _on_host(own)}
    if received:
      contents[self._before(layout), ONLY] = _on_host({piece: array for (_, piece), array in received.items()})
    body = {**meta, 'digests': {name: finish() for name, finish in started.items()}}
    self._thread = threading.Thread(target=self._write, args=(step, contents, body, dict(data)), name='local copy',
                                    daemon=True)
    self._thread.start()

  def wait(self) -> None:
    """Waits until the last copy is written."""
    if self._thread is not None:
      self._thread.join()

  def discard(self) -> None:
    """Removes all copies of this run, which has a checkpoint of its end."""
    self.wait()
    self._remove(self._steps())
    with contextlib.suppress(OSError):  # another process of this host has files there
      self._base.rmdir()

  def _find_id(self, *, is_new: bool = False) -> str:
    """Returns the id of the run's copies, which process 0 reads or creates."""
    found = np.zeros(16, np.uint8)
    if jax.process_index() == 0:
      path = self._workdir / NAME
      number = uuid.uuid4()
      try:
        if not is_new:
          number = uuid.UUID(json.loads(storage.read_text(path))['id'])
      except (FileNotFoundError, ValueError, KeyError, TypeError):
        is_new = True
      if is_new:
        run_directory.write_json(path, {'id': number.hex})
      found = np.frombuffer(number.bytes, np.uint8)
    if jax.process_count() > 1:
      found = np.asarray(multihost_utils.broadcast_one_to_all(found))
    return found.tobytes().hex()

  def _before(self, layout: Layout) -> int:
    """Returns the process that sends to this one."""
    return layout.processes[layout.processes.index(jax.process_index()) - 1]

  def _path(self, step: int, file: File) -> pathlib.Path:
    return self._base / str(step) / f'{file[0]}.{file[1]}'

  def _list(self) -> list[tuple[int, File]]:
    """Returns the files on this host that are complete and of this layout, by step."""
    found = []
    for path in self._base.glob('*/*.json'):
      owner, _, kind = path.stem.partition('.')
      if not (checkpoint_files.is_step(path.parent.name) and owner.isdecimal() and kind in KINDS):
        continue
      step, file = int(path.parent.name), (int(owner), kind)
      with contextlib.suppress(Damaged, UserError, OSError):
        body = self._manifest(step, file)
        if self._path(step, file).stat().st_size == body['bytes']:
          found.append((step, file))
    return sorted(found, reverse=True)[:MOST_FILES]

  def _manifest(self, step: int, file: File) -> dict[str, Any]:
    """Returns the verified manifest of a file. Raises Damaged if it is not one of this step and layout."""
    assert self._layout is not None
    if file not in self._layout.pieces:
      raise Damaged('it is of a run with more hosts')
    path = self._path(step, file)
    record = checkpoint_files.read_json(path.with_name(f'{path.name}.json'))
    body = record.get('body')
    if not isinstance(body, dict) or checkpoint_files.sha256(body) != record.get('sha256'):
      raise Damaged('its manifest is not the one that was written')
    if (body['version'], body['step'], body['layout'], body['bytes']) != (
        VERSION, step, self._layout.digest(), self._layout.num_bytes(*file)):
      raise Damaged('it is of another run, or of other devices')
    return body

  def _read(self, step: int, file: File) -> _Content | None:
    """Reads and verifies a file; None if it is damaged or cannot be read, with a warning."""
    assert self._layout is not None
    try:
      body = self._manifest(step, file)
      content = np.fromfile(self._path(step, file), np.uint8)
      if hashlib.sha256(content.data).hexdigest() != body['sha256']:
        raise Damaged('its digest is not the one that was written')
    except (Damaged, UserError, OSError) as error:
      log.warning('The local copy %s is not used: %s', self._path(step, file), error)
      return None
    pieces, start = {}, 0
    for piece in self._layout.pieces[file]:
      leaf = self._layout.leaves[piece.leaf]
      end = start + leaf.num_bytes(piece.key)
      pieces[piece] = content[start:end].view(leaf.dtype).reshape(leaf.size(piece.key))
      start = end
    return _Content(body, pieces)

  def _assemble(self, layout: Layout, files: Mapping[int, Iterable[File]], read: Mapping[File, _Content],
                abstract: TrainState, step: int, shardings: TrainState) -> Restored | None:
    """Returns the state from the pieces on all hosts; None if its digests are not those that were saved."""
    here = {piece: array for content in read.values() for piece, array in content.pieces.items()}
    held: dict[tuple[jax.Device, Piece], Array | HostArray] = {}
    for turn in local_layout.missing(layout, files):
      values = {(layout.devices[one.source], one.piece): jax.device_put(here[one.piece], layout.devices[one.source])
                for one in turn if layout.devices[one.source].process_index == jax.process_index()}
      held |= local_layout.send(layout, turn, values)
    arrays = [local_layout.assemble(leaf, {
        device: here[piece] if (piece := Piece(number, key)) in here else held[device, piece]
        for device, key in leaf.places.items() if device.process_index == jax.process_index()})
        for number, leaf in enumerate(layout.leaves)]
    body = _common(read)
    items, start = {}, 0
    for name in ITEMS:
      leaves, structure = jax.tree.flatten(getattr(abstract, name))
      items[name] = jax.tree.unflatten(structure, arrays[start:start + len(leaves)])
      start += len(leaves)
    for name, finish in {name: trees.begin_digest(items[name]) for name in body['meta']['digests']}.items():
      if finish() != body['meta']['digests'][name]:
        log.warning('The local copies of step %s are not used: the digest of %s is not the one that was saved.',
                    f'{step:,}', name)
        return None
    count = jax.device_put(np.asarray(step, np.int32), shardings.step)
    return Restored(TrainState(step=count, **items), body['data'], body['meta'], is_local=True)

  def _write(self, step: int, contents: Mapping[File, Mapping[Piece, HostArray]], meta: Mapping[str, Any],
             data: Mapping[str, Any]) -> None:
    """Writes files and their manifests, and removes old steps; in a thread."""
    assert self._layout is not None
    try:
      for file, pieces in contents.items():
        path = self._path(step, file)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        sha256, part = hashlib.sha256(), path.with_name(f'{path.name}.{os.getpid()}.part')
        with open(part, 'wb') as opened:
          for piece in self._layout.pieces[file]:
            content = np.ascontiguousarray(pieces[piece]).reshape(-1).view(np.uint8).data
            sha256.update(content)
            opened.write(content)
          opened.flush()
          os.fsync(opened.fileno())
        part.replace(path)
        body = {'version': VERSION, 'step': step, 'layout': self._layout.digest(), 'meta': meta, 'data': data,
                'bytes': self._layout.num_bytes(*file), 'sha256': sha256.hexdigest()}
        storage.write_bytes(path.with_name(f'{path.name}.json'), json.dumps(checkpoint_files.seal(body)).encode())
      self._remove(self._steps()[:-KEPT])
    except OSError as error:
      log.warning('A local copy could not be written to %s: %s. The run continues; a lost host costs the work since '
                  'the last checkpoint.', self._base, error)

  def _steps(self) -> list[int]:
    return sorted(int(path.name) for path in self._base.glob('*') if checkpoint_files.is_step(path.name))

  def _remove(self, steps: Iterable[int]) -> None:
    """Removes the files of these steps on this host."""
    for step in steps:
      shutil.rmtree(self._base / str(step), ignore_errors=True)


def _own_pieces(layout: Layout, arrays: Iterable[Array]) -> dict[Piece, Array]:
  """Returns the different pieces on the devices of this process."""
  return {piece: shard for _, piece, shard in _shards(layout, arrays)}


def _shards(layout: Layout, arrays: Iterable[Array]) -> Iterable[tuple[jax.Device, Piece, Array]]:
  """Yields the pieces on the devices of this process."""
  for number, (leaf, array) in enumerate(zip(layout.leaves, arrays, strict=True)):
    for shard in array.addressable_shards:
      yield shard.device, Piece(number, leaf.places[shard.device]), shard.data


def _on_host(pieces: Mapping[Piece, Array]) -> dict[Piece, HostArray]:
  """Returns copies: on CPUs, NumPy would share the memory, which the next step writes to."""
  return {piece: np.array(array) if array.device.platform == 'cpu' else np.asarray(array)  # type: ignore[union-attr]
          for piece, array in pieces.items()}


def _newest(layout: Layout, files: Mapping[int, Mapping[int, list[File]]], newer_than: int) -> int | None:
  """Returns the newest step of which all pieces exist."""
  return next((step for step in sorted(files, reverse=True)
               if step > newer_than and layout.is_complete(files[step])), None)


def _exchanged(own: Iterable[tuple[int, File]]) -> dict[int, dict[int, list[File]]]:
  """Returns the files that all processes have: by step, and then by process."""
  padded = np.full((MOST_FILES, 3), -1, np.int32)
  for row, (step, (owner, kind)) in enumerate(own):
    padded[row] = step, owner, KINDS.index(kind)
  every = np.asarray(multihost_utils.process_allgather(padded)).reshape(-1, MOST_FILES, 3)
  found: dict[int, dict[int, list[File]]] = {}
  for process, rows in enumerate(every.tolist()):
    for step, owner, kind in rows:
      if step >= 0:
        found.setdefault(step, {}).setdefault(process, []).append((owner, KINDS[kind]))
  return found


def _gathered(number: int) -> list[int]:
  """Returns the numbers of all processes."""
  return [int(one) for one in np.asarray(multihost_utils.process_allgather(np.int32(number))).reshape(-1)]


def _common(read: Mapping[File, _Content]) -> dict[str, Any]:
  """Returns `meta` and `data`, which are the same in all manifests of a step, from process 0 or whoever has files."""
  texts = sorted(json.dumps({'meta': one.body['meta'], 'data': one.body['data']}) for one in read.values())
  own = texts[0].encode() if texts else b''
  sizes = _gathered(len(own))
  owner = next(process for process, size in enumerate(sizes) if size)
  sent = np.zeros(sizes[owner], np.uint8)
  if jax.process_index() == owner:
    sent = np.frombuffer(own, np.uint8)
  if jax.process_count() > 1:
    sent = np.asarray(multihost_utils.broadcast_one_to_all(sent, is_source=jax.process_index() == owner))
  return dict(json.loads(sent.tobytes()))
