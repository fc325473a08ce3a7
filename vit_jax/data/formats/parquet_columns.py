"""Chooses the columns of Parquet files that have images, labels and captions.

`parquet.py` calls `choose_columns` with the metadata of the first file. Then `parquet_files.scan` calls `check_columns`
for each file, since all files must have the same columns. `describe_columns` is for messages. This module uses the
names and types of columns, never their values, and reads no files.

In this module, `metadata` is a `pyarrow.parquet.FileMetaData`, `schema` a `pyarrow.Schema` with a `pyarrow.Field` for
each column, and `column_type` the `pyarrow.DataType` of a column.

The package `datasets` describes each column in the metadata of a file, under the key `huggingface`, as JSON such as
`{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}}}`. In this module, the `feature` of
a column is the description of this column in the JSON, such as `{"_type": "ClassLabel", …}`.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.core import documents, lazy
from vit_jax.core.errors import UserError
from vit_jax.data.text import stored

if TYPE_CHECKING:
  import pyarrow as pa
else:
  pa = lazy.Module('pyarrow')

_IMAGE_NAMES = ('image', 'img', 'jpg', 'jpeg', 'png', 'webp')
_LABEL_NAMES = ('label', 'labels', 'cls')
_LISTED_COLUMNS = 20  # in a message


class Columns(NamedTuple):
  """The columns that are read. The key of an index contains the `repr` of this tuple, so no field may be renamed.

  image: the column with the images.
  leaf: the column with the bytes of the images, such as `image.bytes`; '' if `image` has paths of files.
  path: the column with the names or paths of the images, such as `image.path`; '' = none.
  label: the column with the labels; '' = none.
  types: the types of the image and the label column, which are the same in all files.
  names: the names of the classes, if the label column is a `ClassLabel` of Hugging Face; else ().
  caption: the column with captions, which are texts or lists of texts; '' = none.
  """
  image: str
  leaf: str
  path: str
  label: str
  types: tuple[str, str]
  names: tuple[str, ...] = ()
  caption: str = ''


def choose_columns(path: str, metadata: Any, *, image: str, label: str, caption: str) -> Columns:
  """Returns the columns with image, label and caption: those that the settings name, else by names and types.

  The image column is the one whose feature is `Image`; else the first of `_IMAGE_NAMES`; else the only one with bytes.
  The label column is the first of `_LABEL_NAMES` with labels; else the only one whose feature is `ClassLabel`. The
  caption column is the first of `caption`, `captions`, `text` and `texts` that has texts. Raises UserError if there is
  no such column, or several columns could be meant.

  Args:
    path: path of the file, for messages.
    metadata: metadata of the file.
    image, label, caption: the columns that the settings name; '' = not set.
  """
  schema = metadata.schema.to_arrow_schema()
  features = _read_features(metadata)
  image_field = _choose_image(path, schema, features, requested=image)
  leaf, names = _find_leaves(image_field, path)
  label, label_type = _choose_label(path, schema, features, requested=label)
  return Columns(image_field.name, leaf, names, label, (str(image_field.type), label_type),
                 _class_names(features.get(label)), _choose_caption(path, schema, requested=caption, label=label))


def _choose_image(path: str, schema: Any, features: dict[str, Any], *, requested: str) -> Any:
  """Returns the field with the images; `requested` is the column that the settings name. Raises as `choose_columns`."""
  by_feature = [name for name in schema.names if features.get(name, {}).get('_type') == 'Image']
  by_name = [name for name in _IMAGE_NAMES if name in schema.names][:1]
  by_bytes = [field.name for field in schema if _is_bytes(field.type) or (
      pa.types.is_struct(field.type) and field.type.get_field_index('bytes') >= 0)]
  usual = by_feature or by_name or by_bytes
  name = requested or _pick_single(usual, setting='data.image_column', path=path, what='images')
  if not name:
    raise UserError(f'{path}: expected a column of images, as bytes, as a struct with bytes, or as paths, got the '
                    f'columns {describe_columns(schema)}. Set data.image_column, if one of them has images.')
  return _find_field(schema, name, setting='data.image_column', path=path)


def _find_leaves(field: Any, path: str) -> tuple[str, str]:
  """Returns `leaf` and `path` of `Columns` for the image column. Raises UserError if the column has no images."""
  if _is_bytes(field.type):
    return field.name, ''
  if is_text(field.type):
    return '', field.name
  type_by_part = {part.name: part.type for part in field.type} if pa.types.is_struct(field.type) else {}
  if 'bytes' in type_by_part and _is_bytes(type_by_part['bytes']):
    has_path = 'path' in type_by_part and is_text(type_by_part['path'])
    return f'{field.name}.bytes', f'{field.name}.path' if has_path else ''
  raise UserError(f'data.image_column: expected a column of bytes, of structs with bytes, or of paths in {path}, got '
                  f'{field.name!r} of the type {field.type}. Set another column.')


def _choose_label(path: str, schema: Any, features: dict[str, Any], *, requested: str) -> tuple[str, str]:
  """Returns the name and the type of the column with the labels; ('', '') = none. Raises as `choose_columns`."""
  by_name = [name for name in _LABEL_NAMES  # `_find_field` refuses a name of several columns
             if _has_column(schema, name, _is_label) or schema.names.count(name) > 1]
  by_feature = [name for name in schema.names if _class_names(features.get(name))]
  label = requested or (by_name[0] if by_name else
                    _pick_single(by_feature, setting='data.label_column', path=path, what='labels'))
  if not label:
    return '', ''
  column_type = _find_field(schema, label, setting='data.label_column', path=path).type
  if not _is_label(column_type):
    raise UserError(f'data.label_column: expected a column of whole numbers, texts, or lists of them in {path}, got '
                    f'{label!r} of the type {column_type}. Set another column.')
  return label, str(column_type)


def _choose_caption(path: str, schema: Any, *, requested: str, label: str) -> str:
  """Returns the column with the captions, which is not that with the labels; '' = none. Raises as `choose_columns`."""
  if not requested:
    return next((name for name in stored.NAMES if name != label and _has_column(schema, name, _is_caption)), '')
  column_type = _find_field(schema, requested, setting='data.caption_column', path=path).type
  if not _is_caption(column_type):
    raise UserError(f'data.caption_column: expected a column of texts, or of lists of them, in {path}, got '
                    f'{requested!r} of the type {column_type}. Set another column.')
  return requested


def check_columns(path: str, metadata: Any, columns: Columns) -> None:
  """Raises UserError if the columns of a file differ from those of the first file."""
  schema = metadata.schema.to_arrow_schema()
  for name, expected in zip((columns.image, columns.label), columns.types, strict=True):
    number = schema.get_field_index(name)
    stored_type = str(schema.field(number).type) if number >= 0 else ''
    if name and stored_type != expected:
      raise UserError(f'{path}: expected the column {name!r} of the type {expected}, as the first file has it, got '
                      f'{stored_type or f"the columns {describe_columns(schema)}"}. Leave it out of the pattern, or '
                      'write it again.')
  if columns.caption and not _has_column(schema, columns.caption, _is_caption):
    raise UserError(f'{path}: expected captions in the column {columns.caption!r}, as the first file has them, got the '
                    f'columns {describe_columns(schema)}. Leave it out of the pattern, or write it again.')
  names = _class_names(_read_features(metadata).get(columns.label))
  if columns.label and names != columns.names:
    raise UserError(f'{path}: expected the {len(columns.names):,} class names of the first file for the column '
                    f'{columns.label!r}, got {len(names):,} others. Leave the file out of the pattern.')


def describe_columns(schema: Any) -> str:
  """Returns the names and types of columns for a message."""
  return documents.listed([f'{field.name} ({field.type})' for field in schema], _LISTED_COLUMNS)


def _pick_single(names: Sequence[str], *, setting: str, path: str, what: str) -> str:
  """Returns the only one of the names of columns, or '' if there is none. Raises UserError if there are several."""
  if len(names) > 1:
    raise UserError(f'{setting}: expected the name of the column with {what} of {path}, as several could be meant: '
                    f"{documents.listed(list(names), _LISTED_COLUMNS)}, got ''. Set it.")
  return names[0] if names else ''


def _find_field(schema: Any, name: str, *, setting: str, path: str) -> Any:
  """Returns the field of a column. Raises UserError, which names the setting, if none or several have the name."""
  number = schema.get_field_index(name)  # -1 if no column or several columns have this name
  if number < 0:
    raise UserError(f'{setting}: expected one column of {path}, {describe_columns(schema)}, got {name!r}. Correct it.')
  return schema.field(number)


def _has_column(schema: Any, name: str, fits: Callable[[Any], bool]) -> bool:
  """Returns whether exactly one column has this name, and `fits` returns True for the type of the column."""
  number = schema.get_field_index(name)
  return number >= 0 and fits(schema.field(number).type)


def is_text(column_type: Any) -> bool:
  """Returns whether an Arrow type is text."""
  return bool(pa.types.is_string(column_type) or pa.types.is_large_string(column_type))


def is_list(column_type: Any) -> bool:
  """Returns whether an Arrow type is a list of any length."""
  return bool(pa.types.is_list(column_type) or pa.types.is_large_list(column_type))


def _is_bytes(column_type: Any) -> bool:
  return bool(pa.types.is_binary(column_type) or pa.types.is_large_binary(column_type))


def _is_caption(column_type: Any) -> bool:
  """Returns whether a type is text or a list of texts."""
  return is_text(column_type.value_type if is_list(column_type) else column_type)


def _is_label(column_type: Any) -> bool:
  """Returns whether a type is whole numbers or text, or a list or a dictionary of one of these two types."""
  if is_list(column_type) or pa.types.is_dictionary(column_type):
    column_type = column_type.value_type
  return bool(pa.types.is_integer(column_type) or pa.types.is_boolean(column_type) or is_text(column_type))


def _read_features(metadata: Any) -> dict[str, Any]:
  """Returns the feature of each column by name; {} if the file has none, or if they are damaged."""
  feature_by_name = {}
  try:
    for name, feature in documents.parse((metadata.metadata or {})[b'huggingface'])['info']['features'].items():
      if isinstance(feature, list) and feature:  # a column of lists, whose feature is written as `[feature]`
        feature = feature[0]
      if isinstance(feature, dict):
        feature_by_name[name] = feature
    return feature_by_name
  except (KeyError, TypeError, ValueError, AttributeError):
    return {}


def _class_names(feature: Any) -> tuple[str, ...]:
  """Returns the names of the classes if a feature is a `ClassLabel`, or a list of `ClassLabel`; else ().

  Returns () also if two classes have the same name: the numbers of the labels then have no names.
  """
  while isinstance(feature, dict) and isinstance(feature.get('feature'), dict):  # a list describes its elements
    feature = feature['feature']
  names = feature.get('names') if isinstance(feature, dict) and feature.get('_type') == 'ClassLabel' else None
  if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
    return ()
  return tuple(names) if len(set(names)) == len(names) else ()
