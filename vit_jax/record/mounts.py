"""The file system of a path, from the kernel's table of mounts.

Two properties of a file system decide how a run directory is kept there:

- Whether other hosts can write to it, too. File locks then do not suffice, since they hold for one host or one mount.
- Whether appended data survives. FUSE mounts of object storage (gcsfuse, s3fs, Mountpoint, blobfuse) upload a file when
  it is closed or synced; of a file that stays open, nothing is kept when the host is lost, and each sync uploads the
  whole file again.

Both are found by the type of the file system, so that a person who mounts a bucket has nothing to set. Where there is
no table (other systems than Linux), every path counts as one on a local disk.
"""
from __future__ import annotations

import os
import re

TABLE = '/proc/self/mountinfo'
_NETWORK = ('nfs', 'nfs4', 'lustre', 'ceph', 'gpfs', 'beegfs', 'glusterfs', 'cifs', 'smb3', 'wekafs', 'panfs', 'pvfs2',
            'afs', 'ocfs2', 'gfs2', '9p', 'virtiofs', 'vboxsf')
_LOCAL_FUSE = ('fuseblk', 'fuse.fuse-overlayfs', 'fuse.mergerfs', 'fuse.bindfs', 'fuse.gocryptfs', 'fuse.encfs')
_ESCAPE = re.compile(r'\\([0-7]{3})')


def kind(path: str | os.PathLike[str]) -> str:
  """Returns the type of the file system of a path, such as `ext4`, `nfs4` or `fuse.gcsfuse`; '' if it is not known.

  The path need not exist.
  """
  place, longest, found = os.path.realpath(path), -1, ''
  try:
    with open(TABLE, encoding='utf-8', errors='surrogateescape') as file:
      lines = file.read().splitlines()
  except OSError:
    return ''
  for line in lines:
    left, _, right = line.partition(' - ')
    fields = left.split(' ')
    if len(fields) < 5 or not right:
      continue
    folder = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
    is_inside = place == folder or place.startswith(folder.rstrip('/') + '/')
    if is_inside and len(folder) >= longest:  # the last of several mounts at one place covers the others
      longest, found = len(folder), right.split(' ')[0]
  return found


def is_shared(path: str | os.PathLike[str]) -> bool:
  """Returns whether other hosts may write to the file system of a path."""
  return (found := kind(path)) in _NETWORK or _is_bucket(found)


def can_append(path: str | os.PathLike[str]) -> bool:
  """Returns whether the file system of a path keeps what is appended to a file that stays open."""
  return not _is_bucket(kind(path))


def _is_bucket(found: str) -> bool:
  """Whether a file system may be a mount of object storage: any in user space that is not known to be local."""
  return found.startswith('fuse') and found not in _LOCAL_FUSE
