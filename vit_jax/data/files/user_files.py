"""Files of a person: which of them a folder may lead to, and how large each kind may be.

A data folder may come from anybody, so nothing outside of it is read: links and listed paths that lead out of it are
refused, unless a setting allows links. Sizes are compared before a file is read: a sparse file of 20 GB takes no space
on a disk, and would take 20 GB of memory.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import IO, NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema.data import RGB
from vit_jax.core import os_errors
from vit_jax.core.errors import UserError
from vit_jax.data.image.headers import BadImage

IMAGE_MIB = 512        # 3 bytes for each of `headers.MAX_PIXELS` pixels
TEXT_BYTES = 2**26     # class lists and descriptions: a million classes of 64 bytes
LABELS_BYTES = 2**30   # label files: 14 million images with 70 bytes each
FOLLOW = 'set data.follow_links=true (prepare, predict and inspect: --follow_links)'
"""How links that lead out of a folder are allowed."""
_BLOCK_BYTES, _NAME_BYTES = 2**22, 255


class Rules(NamedTuple):
  """Which files of a folder are read.

  follow_links: also files outside of the folder to which links in it lead.
  max_bytes: of an image or mask.
  arrays: files `.npy` are images, too.
  """
  follow_links: bool = False
  max_bytes: int = IMAGE_MIB * 2**20
  arrays: bool = False

  @classmethod
  def of(cls, data: schema.Data) -> Rules:
    """Returns the rules that the settings of the data state."""
    return cls(data.follow_links, data.max_file_mib * 2**20, data.channels != RGB)


OWN = Rules()
"""Those of a folder whose data ask for nothing else."""


class TooLarge(ValueError):
  """A file is larger than its kind may be; `size` in bytes, at least."""

  def __init__(self, size: int) -> None:
    super().__init__(f'{size:,} bytes')
    self.size = size


def leads_out(path: str, base: str) -> bool:
  """Returns whether `path`, with all links resolved, is outside of `base`, which has none."""
  found = os.path.realpath(path)
  return found != base and not found.startswith(os.path.join(base, ''))


def outside(path: str, root: str) -> UserError:
  """Returns the error about a folder or file of a data folder that is outside of it."""
  return UserError(f'{path}: expected a file or folder inside of {os.path.realpath(root)}, got a link to '
                   f'{os.path.realpath(path)}. Copy it there, or {FOLLOW}.')


def check_inside(path: str, root: str, rules: Rules) -> None:
  """Raises UserError if a file or folder below `root` leads out of it by a link, which the rules do not allow."""
  if not rules.follow_links and leads_out(path, os.path.realpath(root)):
    raise outside(path, root)


def is_below(path: str) -> bool:
  """Returns whether a listed path is relative and has no `..`, so that without links it leads into its folder.

  The names in it are not longer than a file system allows.
  """
  parts = pathlib.PurePath(path).parts
  return (bool(parts) and not os.path.isabs(path) and '..' not in parts and '\0' not in path
          and all(len(part.encode(errors='surrogatepass')) <= _NAME_BYTES for part in parts))


def read(path: str | os.PathLike[str], max_bytes: int) -> bytes:
  """Returns the content of a file, or of a pipe.

  Raises:
    TooLarge: it has more than `max_bytes`.
    OSError: it cannot be read.
  """
  with open(path, 'rb') as file:
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
      return _read_stream(file, max_bytes)
    if found.st_size > max_bytes:
      raise TooLarge(found.st_size)
    return file.read()


def _read_stream(file: IO[bytes], max_bytes: int) -> bytes:
  """Returns what a pipe or a device gives, whose size is not known before."""
  parts, size = [], 0
  while part := file.read(_BLOCK_BYTES):
    parts.append(part)
    size += len(part)
    if size > max_bytes:
      raise TooLarge(size)
  return b''.join(parts)


def read_image(path: str | os.PathLike[str], max_bytes: int = IMAGE_MIB * 2**20) -> bytes:
  """Returns the content of an image file.

  Raises:
    BadImage: it is larger than `max_bytes`.
    OSError: it cannot be read.
  """
  try:
    return read(path, max_bytes)
  except TooLarge as error:
    raise BadImage(f'the file has {error}: expected at most {max_bytes:,}. Shrink the image, or in a '
                   'config raise data.max_file_mib') from None


def read_text(path: str | os.PathLike[str], what: str, *, max_bytes: int = TEXT_BYTES, expected: str = 'a text file',
              advice: str = 'Check the path.') -> str:
  """Returns the text of a file in UTF-8, with or without a byte order mark.

  Args:
    path: of the file; `~` is the home directory.
    what: begins the message: the setting with the path, or the path.
    max_bytes: the largest size.
    expected, advice: for the message.

  Raises:
    UserError: it cannot be read, is too large, or is not text in UTF-8.
  """
  with explained(what, max_bytes=max_bytes, expected=expected, advice=advice):
    return read(os.path.expanduser(path), max_bytes).decode('utf-8-sig')


def read_lines(path: str | os.PathLike[str], what: str, *, max_bytes: int = LABELS_BYTES,
               expected: str = 'a text file', advice: str = 'Check the path.') -> Iterator[str]:
  """Yields the lines of such a file with their ends, without reading all of it into memory; arguments as `read_text`.

  Raises:
    UserError: as `read_text`; also, it is not an ordinary file.
  """
  with explained(what, max_bytes=max_bytes, expected=expected, advice=advice):
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
      raise UserError(f'{what}: expected {expected}, got something that is not a file. {advice}')
    if found.st_size > max_bytes:
      raise TooLarge(found.st_size)
    try:
      with open(path, encoding='utf-8-sig', newline='') as file:
        yield from file
    except UnicodeDecodeError:  # whose place is relative to a block of the file
      read(path, max_bytes).decode('utf-8-sig')
      raise


@contextlib.contextmanager
def explained(what: str, *, max_bytes: int, expected: str, advice: str) -> Iterator[None]:
  """Raises UserError, or TemporaryError, in place of the errors of reading a text; arguments as `read_text`."""
  def error(got: str) -> UserError:
    return UserError(f'{what}: expected {expected}, got {got}. {advice}')
  try:
    yield
  except TooLarge as large:
    raise error(f'a file of {large}; at most {max_bytes:,} are read') from None
  except UnicodeDecodeError as wrong:
    line = wrong.object.count(b'\n', 0, wrong.start) + 1
    raise error(f'byte 0x{wrong.object[wrong.start]:02x} in line {line:,}, which is not UTF-8') from None
  except OSError as failed:
    raise os_errors.kind(failed)(str(error(f'"{failed.strerror or failed}"'))) from failed
  except UserError:
    raise
  except ValueError:  # of `open`, for a path with a zero byte
    raise error('a path with a zero byte') from None
