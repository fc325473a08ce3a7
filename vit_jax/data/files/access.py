"""Access to local data: paths on this machine, and errors of the operating system, which must stop a run.

An error of the operating system says nothing about an image, so the image does not count as bad.
"""
from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shlex
import socket
from collections.abc import Iterator
from typing import IO

from vit_jax.core import address, os_errors
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data.files import remote

ADVICE = {
    errno.EMFILE: 'This process has too many open files. Raise the limit: ulimit -n 65536',
    errno.ENFILE: 'The machine has too many open files. End other programs, or raise fs.file-max',
    errno.ENOSPC: 'The disk is full. Free some space',
    errno.EDQUOT: 'Your disk quota is exceeded. Free some space',
    errno.EIO: 'The disk or the network returned an error. Look at the system log (dmesg), and copy the data elsewhere',
    errno.ESTALE: 'The network file system has lost the file. Mount it again',
    errno.EACCES: 'Permission is denied. Change the permissions (chmod), or run as another user',
    errno.EPERM: 'Permission is denied. Change the permissions (chmod), or run as another user',
    errno.ENOMEM: 'There is not enough memory. Lower data.workers, data.threads or batch_size',
    errno.ENOENT: 'It does not exist, or not any more. Restore it, or start again, which lists the files again',
    errno.ELOOP: 'It is a symbolic link to itself. Remove it',
    errno.ENOTCONN: 'The network file system is not connected. Mount it again',
    errno.ETIMEDOUT: 'The network file system does not respond. Mount it again',
}
"""What to do, by error number."""
_OTHERWISE = 'The data are not damaged, but cannot be read now'


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
  if not remote.is_address(text):
    return resolve(text, setting)
  if not remote.split(text)[1]:
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


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """Yields a file that becomes `path` when it is complete; several processes and hosts may do so at the same time.

  Raises:
    OSError: it cannot be written.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f'{path.name}.{socket.gethostname()}-{os.getpid()}.part')
  try:
    with open(part, 'wb') as file:
      yield file
    part.replace(path)
  finally:
    with contextlib.suppress(OSError):
      part.unlink(missing_ok=True)


def unreadable(error: OSError | MemoryError, what: str) -> UserError | TemporaryError:
  """Returns the error that stops a run which could not read `what`: temporary if a later try may succeed."""
  number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno
  reason = os.strerror(number) if number else str(error)
  path = str(getattr(error, 'filename', None) or '')
  where = f' ({path})' if path and path not in what else ''
  advice = ADVICE.get(number or 0, _OTHERWISE)
  return os_errors.kind(error)(f'{what}{where}: expected to read it, got "{reason}". {advice}; then run the same '
                               'command again, which resumes. No image was skipped because of this.')


def find_system_error(text: str) -> OSError | None:
  """Returns the error of the operating system that is mentioned in a library's message."""
  return next((OSError(number, os.strerror(number)) for number in ADVICE if os.strerror(number) in text), None)
