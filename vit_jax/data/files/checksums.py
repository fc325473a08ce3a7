"""SHA-256 checksums of files."""
from __future__ import annotations

import hashlib
import os

from vit_jax.core import documents

_BLOCK_BYTES = 2**22


def sha256(path: str | os.PathLike[str]) -> str:
  """Returns the SHA-256 of a file, in hexadecimal digits."""
  found = hashlib.sha256()
  with open(path, 'rb', buffering=0, opener=documents.open_regular) as file:
    while block := file.read(_BLOCK_BYTES):
      found.update(block)
  return found.hexdigest()
