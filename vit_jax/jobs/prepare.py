"""`--job=prepare`: writes a folder of images or a TFDS set as ArrayRecord shards, which `array_record:DIR` reads."""
from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Mapping

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data.source import Source
from vit_jax.data.sources import local_paths, opening, shards, tfds, tfds_build
from vit_jax.record import progress

NUMBERS = {'short_px': 0, 'shards': 0, 'quality': 90, 'seed': 0}
"""Flags that are whole numbers, with their defaults."""
SPLITS = 'train,test'
_ANY_PX = (32, 32)  # of sources that are made to size; files have their own


def run(flags: Mapping[str, str], *, build: Callable[..., None] = tfds_build.build_apart) -> int:
  """Writes the set.

  Args:
    flags: `data` and `to`; optional `short_px shards quality seed splits data_dir`, as text.
    build: makes a TFDS set that is not there.

  Returns:
    The exit status.

  Raises:
    UserError: a flag that makes no sense, no such data, or something else in the way.
  """
  numbers = _numbers(flags)
  settings = shards.Settings(short_px=numbers['short_px'], quality=numbers['quality'], num_shards=numbers['shards'],
                             seed=numbers['seed'])
  name, folder = flags['data'], pathlib.Path(local_paths.resolve(flags['to'], '--to'))
  data = schema.Data(source=name, data_dir=flags.get('data_dir', ''))
  kind, _, where = name.partition(':')
  if kind == 'tfds' and not _is_there(where, data.data_dir):
    build(where, data_dir=tfds.data_folder(data.data_dir))
  splits = _open(data, flags.get('splits') or SPLITS)
  done = write(splits, folder, settings, root=local_paths.resolve(where, '--data') if kind == 'folder' else '')
  counts = ', '.join(f'{split} {len(source):,}' for split, source in splits.items())
  print(f'{"Written" if done else "There already"}: {folder} ({counts} images). '
        f'Use it by --config.data.source=array_record:{folder}')
  return 0


def write(splits: Mapping[str, Source], folder: pathlib.Path, settings: shards.Settings, *, root: str) -> bool:
  """Writes the splits with a progress bar; names of examples are given relative to `root`."""
  total, done, started_s = sum(len(s) for s in splits.values()), 0, time.monotonic()
  with progress.Progress(total, start=0, shown=True) as bar:
    def count(num: int) -> None:
      nonlocal done
      done += num
      bar.update(done, {'train/images_per_s': done / max(1e-9, time.monotonic() - started_s)})
    return shards.write(splits, folder, settings, name_of=lambda name: name.removeprefix(root).lstrip('/'),
                        on_written=count)


def _numbers(flags: Mapping[str, str]) -> dict[str, int]:
  found, faults = dict(NUMBERS), []
  for name in NUMBERS:
    text = flags.get(name, '')
    if text and not text.isdecimal():
      faults.append(f'--{name}={text} is no whole number; want one such as {NUMBERS[name] or 384}')
    elif text:
      found[name] = int(text)
  if not faults and not 1 <= found['quality'] <= 100:
    faults.append(f'--quality={found["quality"]} is no quality of JPEG files; want 1 to 100')
  if flags.get('quality') and not found['short_px']:
    faults.append(f'--quality={found["quality"]} is for pictures that are shrunk, others keep their bytes; want '
                  '--short_px=N too, or no --quality')
  if faults:
    raise UserError('\n'.join(faults))
  return found


def _is_there(name: str, data_dir: str) -> bool:
  try:
    tfds.find(name, data_dir=data_dir)
  except UserError as error:
    if 'is not prepared' in str(error):
      return False
    raise
  return True


def _open(data: schema.Data, names: str) -> dict[str, Source]:
  """The splits to write, by the names that they have in their source."""
  if not data.source.startswith(('folder:', 'tfds:')):
    raise UserError(f'--data={data.source} is not something to prepare; want folder:PATH or tfds:NAME')
  if odd := set(names) & set('[]+'):
    raise UserError(f'--splits={names} has {" ".join(sorted(odd))}, but takes whole splits by name; want {SPLITS}, and '
                    'slices when the set is read: data.train_split=train[:98%]')
  opened = [opening.open_split(data, name.strip(), image_px=_ANY_PX) for name in names.split(',')]
  return {source.name.rpartition('/')[2]: source for source in opened}
