"""Which columns of Parquet files have images and labels: by settings, by their types, and by their metadata.

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
  """Which columns are read.

  image: the column with the images.
  leaf: that of their bytes, such as `image.bytes`; '' if the column has paths of files.
  path: the column with their names or paths, such as `image.path`; '' = none.
  label: the column with the labels; '' = none.
  types: of the image and the label column, which all files must have.
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


def choose(path: str, found: Any, image: str, label: str, caption: str = '') -> Columns:
  """Returns which columns have image and label, by these settings, or by their names and types.

  Images are in the column of the type `Image` that the package `datasets` describes in the metadata, or in one named
  `image`, or in the only one with bytes; labels in `label`, or in the only one of type `ClassLabel`; captions in
  `caption`, `captions`, `text` or `texts`, if it has texts.

  Args:
    path: of the file.
    found: its `pyarrow.parquet.FileMetaData`.
    image, label, caption: names of columns; '' = to be found.

  Raises:
    UserError: there is no such column, or several could be meant.
  """
  schema, features = found.schema.to_arrow_schema(), _features(found)
  image = image or _only('data.image_column', path, _image_candidates(schema, features), 'images')
  if not image:
    raise UserError(f'{path}: expected a column of images, as bytes, as a struct with bytes, or as paths, got the '
                    f'columns {types(schema)}. Set data.image_column, if one of them has images.')
  own = _field(schema, image, 'data.image_column', path)
  leaf, names = _image_columns(own, path)
  if not label:
    label = next((one for one in _LABEL_NAMES if one in schema.names), '') or _only(
        'data.label_column', path, [one for one in schema.names if _class_names(features.get(one))], 'labels')
  kind = _field(schema, label, 'data.label_column', path).type if label else ''
  if kind and not _is_label(kind):
    raise UserError(f'data.label_column: expected a column of whole numbers, texts, or lists of them in {path}, got '
                    f'{label!r} of the type {kind}. Set another column.')
  if caption and not _are_texts(_field(schema, caption, 'data.caption_column', path).type):
    raise UserError(f'data.caption_column: expected a column of texts, or of lists of them, in {path}, got {caption!r} '
                    f'of the type {schema.field(caption).type}. Set another column.')
  caption = caption or next((one for one in stored.NAMES if one in schema.names and one != label
                             and _are_texts(schema.field(one).type)), '')
  return Columns(image, leaf, names, label, (str(own.type), str(kind)), _class_names(features.get(label)), caption)


def check(path: str, found: Any, columns: Columns) -> None:
  """Raises UserError if the columns of a file are not those of the first one."""
  schema = found.schema.to_arrow_schema()
  for name, kind in zip((columns.image, columns.label), columns.types, strict=True):
    place = schema.get_field_index(name) if name else -1
    own = str(schema.field(place).type) if place >= 0 else ''
    if name and own != kind:
      raise UserError(f'{path}: expected the column {name!r} of the type {kind}, as the first file has it, got '
                      f'{own or f"the columns {types(schema)}"}. Leave it out of the pattern, or write it again.')
  if columns.caption and (columns.caption not in schema.names or not _are_texts(schema.field(columns.caption).type)):
    raise UserError(f'{path}: expected captions in the column {columns.caption!r}, as the first file has them, got the '
                    f'columns {types(schema)}. Leave it out of the pattern, or write it again.')
  if columns.label and (names := _class_names(_features(found).get(columns.label))) != columns.names:
    raise UserError(f'{path}: expected the {len(columns.names):,} class names of the first file for the column '
                    f'{columns.label!r}, got {len(names):,} others. Leave the file out of the pattern.')


def _image_candidates(schema: Any, features: Mapping[str, Any]) -> list[str]:
  """Returns the columns that may have images, as far as the first rule that finds some says."""
  import pyarrow as pa
  by_type = [one for one in schema.names if (features.get(one) or {}).get('_type') == 'Image']
  by_name = [one for one in _IMAGE_NAMES if one in schema.names][:1]
  by_bytes = [one.name for one in schema if _is_bytes(one.type) or (
      pa.types.is_struct(one.type) and one.type.get_field_index('bytes') >= 0)]
  return by_type or by_name or by_bytes


def _only(setting: str, path: str, found: Sequence[str], what: str) -> str:
  if len(found) > 1:
    raise UserError(f'{setting}: expected the name of the column with {what} of {path}, as several could be meant: '
                    f"{documents.listed(list(found), _SHOWN)}, got ''. Set it.")
  return next(iter(found), '')


def _field(schema: Any, name: str, setting: str, path: str) -> Any:
  place = schema.get_field_index(name)
  if place < 0:
    raise UserError(f'{setting}: expected one column of {path}, {types(schema)}, got {name!r}. Correct it.')
  return schema.field(place)


def _image_columns(field: Any, path: str) -> tuple[str, str]:
  """Returns the columns with the bytes and with the names of images. Raises UserError if it is of another type."""
  import pyarrow as pa
  if _is_bytes(field.type):
    return field.name, ''
  if is_text(field.type):
    return '', field.name
  if pa.types.is_struct(field.type) and (place := field.type.get_field_index('bytes')) >= 0 and _is_bytes(
      field.type.field(place).type):
    named = field.type.get_field_index('path')
    has_path = named >= 0 and is_text(field.type.field(named).type)
    return f'{field.name}.bytes', f'{field.name}.path' if has_path else ''
  raise UserError(f'data.image_column: expected a column of bytes, of structs with bytes, or of paths in {path}, got '
                  f'{field.name!r} of the type {field.type}. Set another column.')


def _is_bytes(kind: Any) -> bool:
  import pyarrow as pa
  return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def is_text(kind: Any) -> bool:
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
  """Returns columns with their types, as messages show them."""
  return documents.listed([f'{one.name} ({one.type})' for one in schema], _SHOWN)


def _features(found: Any) -> dict[str, Any]:
  """Returns the types of columns that the package `datasets` describes in the metadata of a file; {} if it does not."""
  try:
    features = documents.parse((found.metadata or {})[b'huggingface'])['info']['features']
    return {name: one for name, one in features.items() if isinstance(one, dict)} | {
        name: one[0] for name, one in features.items() if isinstance(one, list) and one and isinstance(one[0], dict)}
  except (KeyError, TypeError, ValueError, AttributeError):
    return {}


def _class_names(feature: Any) -> tuple[str, ...]:
  """Returns the names of classes that a `ClassLabel`, or a list of them, has; () if it is of another type."""
  while isinstance(feature, dict) and isinstance(feature.get('feature'), dict):
    feature = feature['feature']
  names = feature.get('names') if isinstance(feature, dict) and feature.get('_type') == 'ClassLabel' else None
  is_list = isinstance(names, list) and all(isinstance(one, str) for one in names)
  return tuple(names) if is_list and names and len(set(names)) == len(names) else ()
