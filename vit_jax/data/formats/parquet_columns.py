"""Chooses the columns of Parquet files that have images, labels and captions: by settings, names, types and metadata.

`parquet.py` calls `choose` for the first file, and `parquet_files.scan` calls `check` for each file. This module sees
only metadata, and reads no file.

The package `datasets` describes the types of columns in the metadata of a file, under the key `huggingface`, as JSON:
`{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}}}`.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.data.text import stored

_IMAGE_NAMES = ('image', 'img', 'jpg', 'jpeg', 'png', 'webp')
_LABEL_NAMES = ('label', 'labels', 'cls')
_SHOWN = 20


class Columns(NamedTuple):
  """The columns that are read.

  image: the column with the images.
  leaf: the column with their bytes, such as `image.bytes`; '' if `image` has paths of files.
  path: the column with their names or paths, such as `image.path`; '' = none.
  label: the column with the labels; '' = none.
  types: of the image and the label column; all files must have the same ones.
  names: of the classes, if the labels are numbers of classes with names (`ClassLabel` of Hugging Face).
  caption: the column with captions, texts or lists of texts; '' = none.
  """
  image: str
  leaf: str
  path: str
  label: str
  types: tuple[str, str]
  names: tuple[str, ...] = ()
  caption: str = ''


def choose(path: str, footer: Any, image: str, label: str, caption: str = '') -> Columns:
  """Returns the columns with image, label and caption, by these settings, or by names and types.

  Images are in the column of the type `Image` that the package `datasets` describes in the metadata, or in one named
  `image`, or in the only one with bytes; labels in `label`, or in the only one of type `ClassLabel`; captions in
  `caption`, `captions`, `text` or `texts`, if it has texts.

  Args:
    path: of the file.
    footer: its `pyarrow.parquet.FileMetaData`.
    image, label, caption: names of columns; '' = chosen here.

  Raises:
    UserError: there is no such column, or several could be meant.
  """
  schema, features = footer.schema.to_arrow_schema(), _features(footer)
  image = image or _only('data.image_column', path, _image_candidates(schema, features), 'images')
  if not image:
    raise UserError(f'{path}: expected a column of images, as bytes, as a struct with bytes, or as paths, got the '
                    f'columns {types(schema)}. Set data.image_column, if one of them has images.')
  image_field = _field(schema, image, 'data.image_column', path)
  leaf, names = _image_columns(image_field, path)
  if not label:
    label = next((name for name in _LABEL_NAMES if name in schema.names), '') or _only(
        'data.label_column', path, [name for name in schema.names if _class_names(features.get(name))], 'labels')
  kind = _field(schema, label, 'data.label_column', path).type if label else ''
  if kind and not _is_label(kind):
    raise UserError(f'data.label_column: expected a column of whole numbers, texts, or lists of them in {path}, got '
                    f'{label!r} of the type {kind}. Set another column.')
  if caption and not _are_texts(_field(schema, caption, 'data.caption_column', path).type):
    raise UserError(f'data.caption_column: expected a column of texts, or of lists of them, in {path}, got {caption!r} '
                    f'of the type {schema.field(caption).type}. Set another column.')
  caption = caption or next((name for name in stored.NAMES if name in schema.names and name != label
                             and _are_texts(schema.field(name).type)), '')
  return Columns(image, leaf, names, label, (str(image_field.type), str(kind)), _class_names(features.get(label)),
                 caption)


def check(path: str, footer: Any, columns: Columns) -> None:
  """Raises UserError if the columns of a file differ from those of the first file."""
  schema = footer.schema.to_arrow_schema()
  for name, expected in zip((columns.image, columns.label), columns.types, strict=True):
    number = schema.get_field_index(name) if name else -1
    got = str(schema.field(number).type) if number >= 0 else ''
    if name and got != expected:
      raise UserError(f'{path}: expected the column {name!r} of the type {expected}, as the first file has it, got '
                      f'{got or f"the columns {types(schema)}"}. Leave it out of the pattern, or write it again.')
  if columns.caption and (columns.caption not in schema.names or not _are_texts(schema.field(columns.caption).type)):
    raise UserError(f'{path}: expected captions in the column {columns.caption!r}, as the first file has them, got the '
                    f'columns {types(schema)}. Leave it out of the pattern, or write it again.')
  if columns.label and (names := _class_names(_features(footer).get(columns.label))) != columns.names:
    raise UserError(f'{path}: expected the {len(columns.names):,} class names of the first file for the column '
                    f'{columns.label!r}, got {len(names):,} others. Leave the file out of the pattern.')


def _image_candidates(schema: Any, features: Mapping[str, Any]) -> list[str]:
  """Returns the columns that may have images: by type if any has that of images, else by name, else by bytes."""
  import pyarrow as pa
  by_type = [name for name in schema.names if (features.get(name) or {}).get('_type') == 'Image']
  by_name = [name for name in _IMAGE_NAMES if name in schema.names][:1]
  by_bytes = [field.name for field in schema if _is_bytes(field.type) or (
      pa.types.is_struct(field.type) and field.type.get_field_index('bytes') >= 0)]
  return by_type or by_name or by_bytes


def _only(setting: str, path: str, names: Sequence[str], what: str) -> str:
  """Returns the only name, or '' if there is none. Raises UserError if there are several."""
  if len(names) > 1:
    raise UserError(f'{setting}: expected the name of the column with {what} of {path}, as several could be meant: '
                    f"{documents.listed(list(names), _SHOWN)}, got ''. Set it.")
  return next(iter(names), '')


def _field(schema: Any, name: str, setting: str, path: str) -> Any:
  number = schema.get_field_index(name)
  if number < 0:
    raise UserError(f'{setting}: expected one column of {path}, {types(schema)}, got {name!r}. Correct it.')
  return schema.field(number)


def _image_columns(field: Any, path: str) -> tuple[str, str]:
  """Returns the columns with the bytes and with the names of images. Raises UserError if the type has neither."""
  import pyarrow as pa
  if _is_bytes(field.type):
    return field.name, ''
  if is_text(field.type):
    return '', field.name
  if pa.types.is_struct(field.type) and (number := field.type.get_field_index('bytes')) >= 0 and _is_bytes(
      field.type.field(number).type):
    path_number = field.type.get_field_index('path')
    has_path = path_number >= 0 and is_text(field.type.field(path_number).type)
    return f'{field.name}.bytes', f'{field.name}.path' if has_path else ''
  raise UserError(f'data.image_column: expected a column of bytes, of structs with bytes, or of paths in {path}, got '
                  f'{field.name!r} of the type {field.type}. Set another column.')


def _is_bytes(kind: Any) -> bool:
  import pyarrow as pa
  return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def is_text(kind: Any) -> bool:
  """Returns whether an Arrow type is that of texts."""
  import pyarrow as pa
  return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _are_texts(kind: Any) -> bool:
  import pyarrow as pa
  return is_text(kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind)


def _is_label(kind: Any) -> bool:
  import pyarrow as pa
  if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_dictionary(kind):
    kind = kind.value_type
  return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind))


def types(schema: Any) -> str:
  """Returns the names and types of columns for a message."""
  return documents.listed([f'{field.name} ({field.type})' for field in schema], _SHOWN)


def _features(footer: Any) -> dict[str, Any]:
  """Returns the types of columns that the package `datasets` describes in the metadata of a file; {} if there are none.

  A list of a type has the type itself.
  """
  try:
    features = documents.parse((footer.metadata or {})[b'huggingface'])['info']['features']
    kinds = {name: kind[0] if isinstance(kind, list) and kind else kind for name, kind in features.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, dict)}
  except (KeyError, TypeError, ValueError, AttributeError):
    return {}


def _class_names(feature: Any) -> tuple[str, ...]:
  """Returns the names of classes that a `ClassLabel`, or a list of them, has; () if it is of another type."""
  while isinstance(feature, dict) and isinstance(feature.get('feature'), dict):
    feature = feature['feature']
  names = feature.get('names') if isinstance(feature, dict) and feature.get('_type') == 'ClassLabel' else None
  is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
  return tuple(names) if is_list and names and len(set(names)) == len(names) else ()
