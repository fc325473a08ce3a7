"""Files of a person: which of them a folder may lead to, and how large each kind may be.

A data folder may come from anybody, so nothing outside of it is read: links and listed paths that lead out of it are
refused, unless a setting allows links. Sizes are compared before a file is read (`core/documents.py`).
"""
from __future__ import annotations

import io
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema.data import RGB
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.data.image.headers import BadImage

IMAGE_MIB = 512        # 3 bytes for each of `headers.MAX_PIXELS` pixels
LABELS_BYTES = 2**30   # label files: 14 million images with 70 bytes each
FOLLOW = 'set data.follow_links=true (prepare, predict and inspect: --follow_links)'
"""How links that lead out of a folder are allowed."""
_NAME_BYTES = 255


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


def expanded(path: str | os.PathLike[str]) -> str:
  """Returns a path that a person names: `~` at its start is the home directory, unless there is such a file."""
  name = os.fspath(path)
  return name if os.path.lexists(name) else os.path.expanduser(name)


def read_image(path: str | os.PathLike[str], max_bytes: int = IMAGE_MIB * 2**20) -> bytes:
  """Returns the content of an image file.

  Raises:
    BadImage: it is larger than `max_bytes`.
    OSError: it cannot be read.
  """
  try:
    return documents.read_bytes(path, max_bytes)
  except documents.TooLarge as error:
    raise BadImage(f'the file has {error.found}: expected at most {max_bytes:,}. Shrink the image, or in a '
                   'config raise data.max_file_mib') from None


def read_lines(path: str | os.PathLike[str], what: str, *, max_bytes: int = LABELS_BYTES,
               expected: str = 'a text file', advice: str = 'Check the path.') -> Iterator[str]:
  """Yields the lines of a text file with their ends, without reading all of it into memory.

  The arguments are those of `documents.read_text`.

  Raises:
    UserError: as `documents.read_text`; also, it is not an ordinary file.
  """
  with documents.explained(what, max_bytes=max_bytes, expected=expected, advice=advice):
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
      raise UserError(f'{what}: expected {expected}, got something that is not a file. {advice}')
    if found.st_size > max_bytes:
      raise documents.TooLarge(path, found.st_size, max_bytes)
    try:
      with open(path, encoding='utf-8-sig', newline='') as file:
        yield from file
    except UnicodeDecodeError:  # whose place is relative to a block of the file
      documents.read_bytes(path, max_bytes).decode('utf-8-sig')
      raise


def split_lines(text: str) -> list[str]:
  """Returns the lines of a text as editors count them; other separators, such as U+2028, are part of a line."""
  return [line.rstrip('\n') for line in io.StringIO(text, newline=None)]
