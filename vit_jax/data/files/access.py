"""Access to local data: paths on this machine."""
from __future__ import annotations

import os
import pathlib
import shlex

from vit_jax.core import address
from vit_jax.core.errors import UserError
from vit_jax.data import storage


def resolve(where: str | os.PathLike[str], setting: str) -> str:
  """Returns the absolute path; `~` is the home directory.

  Args:
    where: the path as given.
    setting: the setting or flag that gives it.

  Raises:
    UserError: it is an address such as `gs://...`.
  """
  text = os.fspath(where)
  address.check(text, setting)
  if '://' in text:
    raise UserError(f'{setting}: expected a folder of this machine, got the address {text}. {_advise_mount(text)}')
  return os.path.abspath(os.path.expanduser(text))


def locate(where: str | os.PathLike[str], setting: str) -> str:
  """Returns the absolute path, or the address of a folder in object storage that is read directly.

  Raises:
    UserError: it is an address of another kind.
  """
  text = os.fspath(where)
  if not storage.is_address(text):
    return resolve(text, setting)
  if not storage.split(text)[1]:
    raise UserError(f'{setting}: expected an address such as {text.partition("://")[0]}://BUCKET/FOLDER, got {text}. '
                    'Correct the address.')
  return text.rstrip('/')


def _advise_mount(address: str) -> str:
  """Returns the commands that bring data in object storage to a folder; prepared datasets are read directly."""
  scheme, _, rest = address.partition('://')
  bucket, _, path = rest.strip('/').partition('/')
  whole, path, folder = shlex.quote(address.rstrip('/')), shlex.quote(path), '/data'
  match scheme:
    case 'gs':
      only = f'--only-dir={path} ' if path != "''" else ''
      mount = (f'gcsfuse -o ro --implicit-dirs --cache-dir=/cache --file-cache-max-size-mb=-1 '
               f'--file-cache-cache-file-for-range-read --file-cache-enable-parallel-downloads '
               f'--metadata-cache-ttl-secs=-1 {only}{bucket} {folder}')
      copy = f'gcloud storage rsync --recursive {whole} {folder}'
    case 's3':
      only = f'--prefix={path}/ ' if path != "''" else ''
      mount = f'mount-s3 --read-only --cache=/cache {only}{bucket} {folder}'
      copy = f'aws s3 sync {whole} {folder}'
    case _:
      return 'Copy it to a folder, and give the path of the folder.'
  return (f'Mount it with a cache of complete files, or copy it, and give the folder {folder}:\n  {mount}\n  {copy}\n'
          '  launch/tpu_pod.sh does either on every host: --data=gs://BUCKET/FOLDER --data_mode=mount or copy.\n'
          '  array_record:gs://BUCKET/FOLDER, which vit-jax prepare writes, needs neither, nor do wds: and tfrecord:.')


def cache_folder(name: str) -> pathlib.Path:
  """Returns the folder for files of this kind in the user's cache: below $XDG_CACHE_HOME, or ~/.cache."""
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'vit_jax' / name
