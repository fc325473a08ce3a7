"""Reading Parquet files: what fails in storage is no damage."""
from __future__ import annotations

import errno
import pathlib

import pytest

from tests.data import parquets
from tests.data.parquets import pq
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import storage
from vit_jax.data.formats import parquet_columns, parquet_files
from vit_jax.data.index import Counts


@pytest.mark.parametrize(('raised', 'expected'), [
    (OSError('gs://b/x: HTTP response code: 503'), TemporaryError),
    (OSError('gs://b/x: HTTP response code: 400'), UserError),
    (OSError(errno.EIO, 'Input/output error'), TemporaryError),
    (TemporaryError('gs://b/x: down'), TemporaryError)])
def test_storage_that_fails_while_labels_are_read_is_no_damaged_file(
    raised: Exception, expected: type[Exception], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  path = str(tmp_path / 'a.parquet')
  pq.write_table(parquets.table(parquets.large(3)), path)
  columns = parquet_columns.choose_columns(path, parquet_files.read_metadata(path), image='', label='', caption='')
  read, calls = storage.read, list[int]()

  def read_once(path: str, offset: int, size: int) -> bytes:
    calls.append(offset)
    if len(calls) > 1:  # the first one is of the footer
      raise raised
    return read(path, offset, size)

  monkeypatch.setattr(storage, 'read', read_once)
  with pytest.raises(expected) as error:
    list(parquet_files.scan(path, Counts(), columns=columns))
  assert type(error.value) is expected and 'damaged' not in str(error.value) and len(calls) > 1
