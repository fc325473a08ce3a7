"""Checkpoints of a tiny state on disk, and every way in which a file of one may be damaged."""
from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable

import fakes
import jax
import jax.numpy as jnp
import programs

from vit_jax.config import schema
from vit_jax.objectives.ema import Ema, Growing
from vit_jax.objectives.supervised import Supervised
from vit_jax.train import checkpoint
from vit_jax.train.step import Program

KEEP = checkpoint.Keep(3, best='test/top1')


def program(settings: str = 'one') -> Program:
  """A linear network with a moving average, whose state has every kind of item."""
  task = Supervised(fakes.PlainNet(), fakes.LinearHead(), num_classes=7, loss=schema.Loss.SOFTMAX, label_smoothing=0.)
  return programs.build(Ema(task, Growing(.9)), fakes.normalize, programs.MESHES[settings], like=programs.batch(),
                        optimizer=schema.AdamW(weight_decay_mask=('.*/kernel',)))


def write(folder: pathlib.Path, built: Program, steps: list[int]) -> dict[int, str]:
  """Saves a state for each step, another one each; digests of the parameters by step."""
  checkpointer = checkpoint.Checkpointer(folder, keep=KEEP)
  digests = {}
  for step in steps:
    state = built.init_fn()
    state = state._replace(step=jnp.int32(step), params=jax.tree.map(lambda x, step=step: x + step, state.params))
    digests[step] = checkpointer.save(state, {'name': 'x', 'data': {'seed': step}}, {'test/top1': step / 100})
  checkpointer.wait()
  checkpointer.close()
  return digests


def half_write(folder: pathlib.Path) -> None:
  """What a save that is under way, or was killed, looks like."""
  half = folder / '99.orbax-checkpoint-tmp' / 'params'
  half.mkdir(parents=True)
  (half / 'manifest.ocdbt').write_bytes(b'abc')


def snapshot(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
  """Size and time of change of everything in a folder, by name."""
  found = {path: path.stat() for path in folder.rglob('*')}
  return {str(path.relative_to(folder)): (stat.st_size if path.is_file() else -1, stat.st_mtime_ns)
          for path, stat in found.items()}


def halve(path: pathlib.Path) -> None:
  path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def empty(path: pathlib.Path) -> None:
  path.write_bytes(b'')


def zero(path: pathlib.Path) -> None:
  path.write_bytes(bytes(path.stat().st_size))


def flip(path: pathlib.Path) -> None:
  raw = bytearray(path.read_bytes())
  raw[len(raw) // 3] ^= 0x10
  path.write_bytes(raw)


def turn_into_folder(path: pathlib.Path) -> None:
  path.unlink()
  path.mkdir()


def turn_into_list(path: pathlib.Path) -> None:
  path.write_bytes(b'[]')


def nest(path: pathlib.Path) -> None:
  path.write_bytes(b'[' * 100_000)


def restore(whole: pathlib.Path, path: pathlib.Path) -> None:
  """Puts a file back as it was."""
  if path.is_dir():
    shutil.rmtree(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  shutil.copyfile(whole, path)


DAMAGES: dict[str, Callable[[pathlib.Path], None]] = {
    'half': halve, 'empty': empty, 'absent': pathlib.Path.unlink, 'zeros': zero, 'flipped': flip,
    'folder': turn_into_folder, 'list': turn_into_list, 'nested': nest}
"""By name; a file is never empty before."""
