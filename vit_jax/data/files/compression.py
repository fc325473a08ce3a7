"""Recognizes compressed files, which cannot be read at random."""
from __future__ import annotations

_MAGIC = {b'\x1f\x8b': 'gzip', b'\x28\xb5\x2f\xfd': 'Zstandard', b'BZh': 'bzip2', b'\xfd7zXZ': 'xz',
          **{b'\x78' + level: 'zlib' for level in (b'\x01', b'\x5e', b'\x9c', b'\xda')}}


def describe(start: bytes) -> str:
  """Returns what a message says of a file that begins in another way than expected; '' if it is not compressed."""
  kind = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), '')
  return f'a file compressed by {kind}, which cannot be read at random: decompress it' if kind else ''
