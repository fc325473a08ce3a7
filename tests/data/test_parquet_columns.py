"""The columns of Parquet files that are chosen for images, labels and captions."""
from __future__ import annotations

from typing import Any

import pytest

from tests.data.parquets import pa
from vit_jax.core.errors import UserError
from vit_jax.data.formats import parquet_columns
from vit_jax.data.formats.parquet_columns import Columns


class Metadata:
  """The part of `pyarrow.parquet.FileMetaData` that is read here."""
  metadata = None

  def __init__(self, *fields: tuple[str, Any]) -> None:
    self.schema, self._fields = self, fields

  def to_arrow_schema(self) -> Any:
    return pa.schema(self._fields)


IMAGE, TEXT, LABEL = ('image', pa.binary()), ('text', pa.string()), ('label', pa.int64())


def choose(*fields: tuple[str, Any], label: str = '') -> Columns:
  return parquet_columns.choose_columns('a.parquet', Metadata(*fields), image='', label=label, caption='')


def test_a_column_that_has_the_name_of_labels_and_another_type_is_not_chosen() -> None:
  scores = ('label', pa.float64())
  found = choose(IMAGE, scores, TEXT)
  assert (found.label, found.caption) == ('', 'text')
  assert choose(IMAGE, scores, ('cls', pa.int64())).label == 'cls'
  with pytest.raises(UserError, match="data.label_column: expected .* got 'label' of the type double. Set another"):
    choose(IMAGE, scores, label='label')


def test_of_two_columns_with_one_name_none_is_chosen_for_captions_and_labels_are_refused() -> None:
  assert choose(IMAGE, TEXT, TEXT).caption == ''
  assert choose(IMAGE, TEXT, TEXT, ('texts', pa.list_(pa.string()))).caption == 'texts'
  with pytest.raises(UserError, match="data.label_column: expected one column of a.parquet, .* got 'label'"):
    choose(IMAGE, LABEL, LABEL)
  with pytest.raises(UserError, match="b.parquet: expected captions in the column 'text', .* got the columns image"):
    parquet_columns.check_columns('b.parquet', Metadata(IMAGE, TEXT, TEXT), choose(IMAGE, TEXT))
