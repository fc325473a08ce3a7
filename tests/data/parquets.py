"""Parquet files of images, written without the program, in the layout of the package `datasets` and in others."""
from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.data.images import encode, random_image
from tests.data.packed import NAMES, Example

pa = pytest.importorskip('pyarrow')
pq = pytest.importorskip('pyarrow.parquet')
IMAGE = pa.struct([('bytes', pa.binary()), ('path', pa.string())])


def described(features: Mapping[str, Any]) -> dict[bytes, bytes]:
  """The metadata in which the package `datasets` describes columns."""
  return {b'huggingface': json.dumps({'info': {'features': features}}).encode()}


def class_label(names: Sequence[str]) -> dict[str, Any]:
  return {'names': list(names), '_type': 'ClassLabel'}


def images(found: Sequence[Example]) -> Any:
  """A column of images with their names."""
  return pa.array([{'bytes': e.image, 'path': f'{e.key}.png'} for e in found], IMAGE)


def table(found: Sequence[Example], names: Sequence[str] = NAMES) -> Any:
  """The examples as `datasets` lays them out: bytes and name of the image, and the number of its class."""
  made = pa.table({'image': images(found), 'label': pa.array([e.label for e in found], pa.int64())})
  return made.replace_schema_metadata(described({'image': {'_type': 'Image'}, 'label': class_label(names)}))


def write(folder: pathlib.Path, split: str, found: Sequence[Example], num: int = 3, *, rows: int = 3,
          names: Sequence[str] = NAMES, **options: Any) -> None:
  """Writes so many files, with about as many examples each, in row groups of `rows`."""
  folder.mkdir(parents=True, exist_ok=True)
  for number in range(num):
    own = found[number * len(found) // num:(number + 1) * len(found) // num]
    path = folder / f'{split}-{number:05d}-of-{num:05d}.parquet'
    pq.write_table(table(own, names), path, row_group_size=rows, **options)


def large(num: int) -> list[Example]:
  """Images of about 6 kB."""
  return [Example(f'{i:06d}', encode(random_image(i, height=64, width=64)), i * 5 % 7 % len(NAMES)) for i in range(num)]
