"""When the files of a source were written: what tells whether a resumed run reads the same data.

The `digest` of a source has names, sizes, labels and the checksums that a format has; a run is refused if it changes.
An image that was replaced by another one of the same size changes only the time of its file. As copies of the data may
have other times, too, a change of these is a warning.
"""
from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.core import documents
from vit_jax.data import storage
from vit_jax.data.source import Source, find_origin

MOST_CHECKED = 1_000
"""Images whose files are compared; those of a folder are evenly spaced over it."""
_SHOWN = 5


class Written(NamedTuple):
  """The files of a source: the digest of their sizes and times, and the time of the newest one."""
  digest: str
  newest_ns: int


def paths(source: Source) -> list[str]:
  """Returns the local files with evenly spaced images of a source; [] if its images are in no files."""
  found: dict[str, None] = {}
  indexes = np.unique(np.linspace(0, len(source) - 1, MOST_CHECKED).astype(np.int64))
  for index in indexes.tolist() if len(source) else ():
    stored, place = find_origin(source, index)
    path: Callable[[int], str] | None = getattr(stored, 'path', None)
    if path is not None:
      found[path(place)] = None
  return [path for path in found if not storage.is_address(path)]


def describe(source: Source) -> Written:
  """Returns when the files of a source were written."""
  stamps = list(_stamps(source))
  text = repr([stamp for _, stamp in stamps])
  return Written(hashlib.sha256(text.encode()).hexdigest()[:32], max((time for _, (_, time) in stamps), default=0))


def _stamps(source: Source) -> Iterator[tuple[str, tuple[int, int]]]:
  """Yields path, size and time of the files; those that are gone are reported when they are read."""
  for path in paths(source):
    if os.path.exists(path):
      size, time_ns, *_ = storage.stamps([path])[0]
      yield path, (int(str(size)), int(str(time_ns)))


def changes(saved: Mapping[str, Any], sources: Mapping[str, Source]) -> list[str]:
  """Returns a line for each source whose files were written, or copied, since they were described in `saved`."""
  lines = []
  for name, source in sources.items():
    if name not in saved or list(describe(source)) == saved[name]:
      continue
    newer = [os.path.basename(path) for path, (_, time_ns) in _stamps(source) if time_ns > saved[name][1]]
    what = (f'newer files, {len(newer):,}: {documents.listed(newer, _SHOWN)}' if newer else
            'files with other sizes or times, such as copies')
    lines.append(f'  {name} ({source.name}): {what}')
  return lines
