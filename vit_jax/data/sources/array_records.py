"""Records of ArrayRecord files, one file after the other, in any order; see `open_files.py` for how many are open.

The format keeps a checksum of every record, which the reader compares.
"""
from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from vit_jax.core.errors import UserError
from vit_jax.data.sources import open_files, system_errors
from vit_jax.data.sources.tf_example import BadRecord

# No threads of the reader's own: they would read on from a record, which is of no use in a random order.
_OPTIONS = 'readahead_buffer_size:0,max_parallelism:0'
_BUFFER_BYTES = 32_768
_SHOWN = 160  # letters of a reason


class Records:
  """The records of several files. Pickles small; safe for threads."""

  def __init__(self, paths: Sequence[str], counts: Sequence[int]) -> None:
    """Takes absolute paths, and how many records each file holds. Opens none."""
    self._paths, self._counts = tuple(paths), tuple(counts)
    self._ends = list(itertools.accumulate(counts))

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def __getitem__(self, number: int) -> bytes:
    """A record.

    Raises:
      BadRecord: it is damaged.
      OSError: the system does not let its file be read.
      UserError: the file holds another number of records.
    """
    if not 0 <= number < len(self):
      raise IndexError(f'{number} is not in {len(self):,} records')
    file = bisect.bisect_right(self._ends, number)
    path, place = self._paths[file], number - (self._ends[file] - self._counts[file])
    try:
      opener = functools.partial(_open, path, self._counts[file])
      with open_files.pool().use(('array_record', path), opener, _close) as reader:
        found: bytes = reader.read([place])[0]
        return found
    except (RuntimeError, IndexError) as error:
      if of_system := system_errors.find(str(error)):
        of_system.filename = path
        raise of_system from error
      raise BadRecord(f'record {place} of {path} is damaged: {str(error)[:_SHOWN]}') from error


def _open(path: str, count: int) -> Any:
  from array_record.python import array_record_module
  with open(path, 'rb'):  # the reader's own errors have no number
    pass
  reader = array_record_module.ArrayRecordReader(path, options=_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES)
  if (found := reader.num_records()) not in (0, count):  # none can be counted in a file that is cut short
    reader.close()
    raise UserError(f'{path}: expected {count:,} records, got {found:,}. Copy or prepare the set again')
  return reader


def _close(reader: Any) -> None:
  reader.close()
