"""Errors of the operating system while data are read: they say nothing of an image, so they stop the run."""
from __future__ import annotations

import errno
import os

from vit_jax.core.errors import UserError

ADVICE = {
    errno.EMFILE: 'This process has too many files open. Raise the limit: ulimit -n 65536',
    errno.ENFILE: 'The machine has too many files open. End other programs, or raise fs.file-max',
    errno.ENOSPC: 'The disk is full. Free some space',
    errno.EDQUOT: 'Your quota is used up. Free some space',
    errno.EIO: 'The disk or the network does not give the bytes. Look at the system log (dmesg), and copy the data '
               'elsewhere',
    errno.ESTALE: 'The network file system has lost the file. Mount it again',
    errno.EACCES: 'You may not read it. Change its permissions (chmod), or run as another user',
    errno.EPERM: 'You may not read it. Change its permissions (chmod), or run as another user',
    errno.ENOMEM: 'There is not enough memory. Lower data.workers, data.threads or batch_size',
    errno.ENOENT: 'It is not there, or not any more. Put it back, or start again, which lists the files anew',
    errno.ELOOP: 'It is a symbolic link that leads to itself. Remove it',
    errno.ENOTCONN: 'The network file system is not connected. Mount it again',
    errno.ETIMEDOUT: 'The network file system does not answer. Mount it again',
}
"""What to do, by error number."""
_OTHERWISE = 'The data are not damaged, but cannot be read now'


def stop(error: OSError | MemoryError, what: str) -> UserError:
  """The error that a run stops with; `what` was to be read."""
  number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno
  reason = os.strerror(number) if number else str(error)
  path = str(getattr(error, 'filename', None) or '')
  where = f' ({path})' if path and path not in what else ''
  return UserError(f'{what}{where}: expected to read it, got "{reason}". {ADVICE.get(number or 0, _OTHERWISE)}; '
                   'the same command then goes on. No image was left out for this')


def find(text: str) -> OSError | None:
  """The error of the system that a library's message holds, by its words."""
  return next((OSError(number, os.strerror(number)) for number in ADVICE if os.strerror(number) in text), None)
