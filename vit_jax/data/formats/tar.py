"""`wds:PATH`: tar files as `webdataset` writes them, read at random by an index of their members.

PATH is a pattern such as `DIR/imagenet1k-{split}-*.tar` or `gs://BUCKET/{000..999}.tar`, or a folder of tar files
(`shards.py`). A file `_info.json` in the folder may list the files of each split, as timm writes it. The examples have
the order in which they are stored, file by file, so it does not matter how many examples each file has.

An example consists of consecutive members of an archive with the same key: the path of the member up to the first dot
of its base name. The rest of the name is the extension: `n01/7.jpg` and `n01/7.cls` have the key `n01/7` and the
extensions `jpg` and `cls`. A label is a whole number in the member `.cls`, or a number, a name, or a list of them in a
field of `.json`. Captions are the lines of `.txt`, or a text or a list of texts in a field of `.json`.

`opening.py` calls `opener`. `indexed.py` calls the methods of `TarSource`, and documents their order. `scan`, for the
index, reads POSIX (ustar and pax) and GNU archives: `_members` reads headers, `_examples` groups members by key, and
`_read_label` reads labels. Images are skipped. The module `tarfile` is not used, as it is three times slower, and
takes a damaged header for the end of the archive.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import index, storage, user_files
from vit_jax.data.formats import indexed, shards
from vit_jax.data.formats.indexed import IndexedSource
from vit_jax.data.formats.shards import Files, Listed
from vit_jax.data.image import headers
from vit_jax.data.image.headers import BadImage
from vit_jax.data.index import Counts, Index, Labels
from vit_jax.data.source import UNLABELED, Source, warn_once
from vit_jax.data.storage import Window
from vit_jax.data.text import stored
from vit_jax.data.user_files import Rules

EXTENSIONS = frozenset(extension[1:].encode() for form in headers.FORMATS.values() for extension in form.extensions)
"""Extensions of members that are images."""
_INFO_NAMES = ('_info.json', 'info.json')
# Columns of the index: span and name of the image, span of the captions (caption_size -1 = no captions), and labels.
_INDEX_TYPES = {'offset': 'int64', 'size': 'uint32', 'name': index.BYTES, 'caption_offset': 'int64',
                'caption_size': 'int64', index.LABEL: index.BYTES}
_BLOCK_BYTES = 512  # of a header; the data of a member are padded to a multiple of 512 bytes
_MAX_EXTENDED_BYTES = _MAX_PADDING_BYTES = 2**20  # of an extended header, and of zeros after the end of the archive
_MAX_LABEL_BYTES, _MAX_JSON_BYTES = 64, 2**20
# A message describes at most so many members and extensions, and the content of members of at most so many bytes.
_MAX_DESCRIBED_MEMBERS, _MAX_DESCRIBED_EXTENSIONS, _MAX_DESCRIBED_BYTES = 10_000, 20, 2**12
_MAX_LAST_EXAMPLES = 100  # examples of the last file in which a label is searched
_INTEGER = re.compile(rb'\s*-?\d{1,18}\s*')  # such as `7` and the end of a line
_END = bytes(_BLOCK_BYTES)  # a block of zeros, with which an archive ends
_NAME, _SIZE, _CHECKSUM = slice(0, 100), slice(124, 136), slice(148, 156)  # positions of the fields of a header
_TYPE, _MAGIC, _PREFIX = slice(156, 157), slice(257, 263), slice(345, 500)
# Values of the field `_TYPE`:
_FILE_TYPES, _SPARSE = (b'0', b'\0', b'7'), b'S'
_LONG_NAME, _PAX = b'L', b'x'  # GNU and POSIX: extended headers, with fields for the next member
_LONG_LINK, _PAX_DEFAULTS, _FOLDER = b'K', b'g', b'5'  # ignored; the first two may stand among extended headers
_COUNTED_TYPES = {b'1': 'hard links', b'2': 'symbolic links', b'3': 'devices', b'4': 'devices', b'6': 'pipes'}
_DATASET_AGAIN = 'Copy the dataset again, or give a pattern of tar files.'


class Columns(NamedTuple):
  """The extensions of the members with image, label and captions.

  The key of an index contains the `repr` of this tuple, so no field may be renamed.

  image: the extension of the image, such as `jpg`; '' = each example has only one image, whatever its extension.
  label: `cls` for a whole number; `json/FIELD` for whole numbers or names; '' = there are no labels.
  caption: `txt` or another extension, or `json/FIELD`; captions may be missing.
  """
  image: str = ''
  label: str = ''
  caption: str = 'txt'


class TarSource(IndexedSource):
  """The examples of tar files."""

  @staticmethod
  def load(files: Files, columns: Columns) -> Index:
    images = f'.{columns.image}' if columns.image else 'an extension of images, such as .jpg'
    rows = index.load(files.paths, functools.partial(scan, columns=columns), f'tar 2 {columns}', _INDEX_TYPES,
                      format_name='tar', expected=f'members with {images}',
                      advice='Set data.image_column, or correct the pattern.')
    counts = np.bincount(rows['file'], minlength=len(files.paths)).tolist()
    for path, expected, count in zip(files.paths, files.counts, counts, strict=False):  # `files.counts` may be empty
      if count != expected:
        raise UserError(f'{path}: expected {expected:,} images, as its description says, got {count:,}. '
                        f'{_DATASET_AGAIN}')
    return rows

  @staticmethod
  def label_place(label: str) -> str:
    member, _, field = label.partition('/')
    return f'the field {field} of .json' if field else f'.{member}'

  @staticmethod
  def contents(paths: Sequence[str]) -> str:
    member_by_extension = _read_first_members(paths[0])
    members = [_describe_member(extension, *member) for extension, member in member_by_extension.items()]
    text = f'The archive has {", ".join(members)}.' if members else ''
    last_parts = {extension: extension.rpartition('.')[2] for extension in member_by_extension}  # `jpg` of `left.jpg`
    image_names = [name for extension, (name, _) in member_by_extension.items()
                   if last_parts[extension].encode() in EXTENSIONS]
    labels = [content for extension, (_, content) in member_by_extension.items() if last_parts[extension] == 'cls']
    image_name = image_names[0] if image_names else ''
    label = labels[0] if labels else b''
    if label and not label.strip().isdigit():
      return f'{text} A label in .cls is a whole number; a name belongs into a field of .json.'
    if label:
      return (f'{text} A label belongs to the image beside it with the same name up to the first dot, such as '
              f'{documents.shown(image_name.partition(".")[0])}.cls. Write the members of an example one after the '
              'other (tar --sort=name).')
    if '/' in image_name and len(member_by_extension) == 1:
      return f'{text} Names of folders are not read as labels: unpack the archive, and name its folder, folder:PATH.'
    return text

  @staticmethod
  def choose(paths: Sequence[str], data: schema.Data) -> Columns:
    """Returns which members have image and label: by the settings, or by the first example that has a label.

    Searches all examples of the first file, and the first `_MAX_LAST_EXAMPLES` of the last file. Warns if none of these
    examples has a label. Raises UserError if one of the settings has another form, or a file is damaged.
    """
    caption = data.caption_column or 'txt'
    for setting, value, usual in (('caption_column', caption, 'txt'), ('label_column', data.label_column, 'cls')):
      extension, _, field = value.partition('/')
      is_json, has_field = extension == 'json', bool(field)
      if value and (not extension or is_json != has_field):
        raise UserError(f'data.{setting}: expected an extension such as {usual}, or json/FIELD, got {value!r}. Set one '
                        'of these forms.')
    if data.label_column:
      return Columns(data.image_column, data.label_column, caption)
    json_columns = Columns(data.image_column, 'json/label', caption)
    for path in dict.fromkeys((paths[0], paths[-1])):
      limit = None if path == paths[0] else _MAX_LAST_EXAMPLES  # None = all examples
      with _open_archive(path) as window:
        for example in itertools.islice(_examples(path, window, json_columns, Counts()), limit):
          if b'cls' in example.extensions:
            return Columns(data.image_column, 'cls', caption)
          if example.label is not None:
            return json_columns
    warn_once(f'{paths[0]} has no .cls beside an image and no field `label` in .json: its images have no labels, '
              f'and get the class {UNLABELED[0]!r}. {TarSource.contents(paths)}')
    return Columns(data.image_column, caption=caption)

  def identity(self) -> Iterator[HostArray]:
    yield from (self._index['size'], self._index['name'], self._index.ends('name'),
                *self.label_arrays())

  def image(self, row: int, content: bytes) -> bytes:
    if len(content) < self._index['size'][row]:
      raise BadImage(f'the image is truncated: {self.path(row)} ends in it')
    return content

  def captions(self, row: int) -> tuple[str, ...]:
    """Returns the captions of an image that are not empty: the lines of a member, or the texts in a field of `.json`.

    Raises BadImage if the captions are missing, truncated, larger than 1 MiB, not UTF-8, or not JSON.
    """
    offset, size = int(self._index['caption_offset'][row]), int(self._index['caption_size'][row])
    if not 0 <= size <= stored.MAX_BYTES:
      raise BadImage('the example: expected a text of at most 1 MiB beside the image, got '
                     + (f'{size:,} bytes' if size > 0 else 'none'))
    content = storage.read(self.path(row), offset, size)
    _, *field = self._columns.caption.split('/')
    texts: list[Any] | None = None
    if len(content) == size:
      with contextlib.suppress(ValueError, RecursionError):  # no UTF-8, or no JSON
        texts = (stored.field(documents.parse(content, nan=True), field) if field else
                 user_files.split_lines(content.decode()))
    if texts is None:
      raise BadImage('the example: expected a complete text in UTF-8 beside the image, got a damaged one')
    return stored.texts(texts, f'.{self._columns.caption}')

  def describe(self, row: int) -> str:
    return os.path.join(self.path(row), os.fsdecode(self._index.get('name', row)))


def opener(where: str, data: schema.Data, image_px: tuple[int, int], *,
           order: Sequence[str] = ()) -> Callable[[str], Source]:
  """Returns the function that opens a split of tar files, given the name of the split.

  `data` has in `image_column`, `label_column` and `caption_column` what `Columns` defines, or ''; and `order` lists the
  classes of a run that resumes. Raises UserError if there are no such files, or they are compressed.
  """
  del image_px
  return indexed.opener(TarSource, find(where, Rules.of(data)), data, name=f'wds:{where}', order=order)


def find(where: str, rules: Rules) -> Listed:
  """Returns the files that `_info.json` in a folder lists, if it exists; else the files that `shards.find` returns."""
  path = user_files.locate(where, 'wds:PATH')
  exists: Callable[[str], bool] = os.path.isfile
  if storage.is_address(path):
    is_pattern = shards.folder_of(path) != path
    try:
      addresses = set() if is_pattern else {f'{path}/{name}' for name in storage.list_names(path)}
    except OSError as error:
      raise failures.unreadable(error, f'wds:{where}') from error
    exists = addresses.__contains__
  for name in _INFO_NAMES:
    info_path = f'{path}/{name}'
    listed = _read_info(info_path, path, rules, exists) if exists(info_path) else None
    if listed:
      return listed
  return shards.find(where, '.tar', prefix='wds', rules=rules)


def _read_info(info_path: str, folder: str, rules: Rules, exists: Callable[[str], bool]) -> Listed | None:
  """Returns the files that `_info.json` lists; None if `_info.json` describes something else.

  It has the form `{"splits": {"train": {"filenames": ["0.tar", "1.tar"], "shard_lengths": [100, 90]}}}`. `exists` maps
  a path to whether the file exists. Raises UserError if `_info.json` is damaged, or lists a file that does not exist or
  is outside of the folder.
  """
  files_by_split: dict[str, Files] = {}
  expected = 'the files of each split'
  text = storage.read_text(info_path, info_path, expected=expected, advice=_DATASET_AGAIN)
  splits = documents.field(text, info_path, expected=expected, advice=_DATASET_AGAIN).optional('splits')
  if splits is None:
    return None
  for split, entry in splits.fields():
    names, lengths = entry.optional('filenames'), entry.optional('shard_lengths')
    if names is None:
      return None
    paths = [os.path.join(folder, name.text()) for name in names.elements() if user_files.is_below(name.text())]
    counts = tuple(length.whole(0, 2**40) for length in lengths.elements()) if lengths else ()
    if not paths or len(paths) != len(names.list()) or len(counts) not in (0, len(paths)):
      raise entry.error('files in this folder, and the number of examples of each')
    for path in paths:
      if not exists(path):
        raise UserError(f'{info_path}: expected the file {path}, got none. {_DATASET_AGAIN}')
      if not storage.is_address(path):
        user_files.check_inside(path, folder, rules)
    files_by_split[split] = Files(tuple(paths), counts)
  return Listed(folder, files_by_split) if files_by_split else None


def _read_first_members(path: str) -> dict[str, tuple[str, bytes]]:
  """Returns the first member by extension: the name of the member, and its content, or b'' if it is large."""
  member_by_extension = dict[str, tuple[str, bytes]]()
  with _open_archive(path) as window:
    for member in itertools.islice(_members(path, window, Counts()), _MAX_DESCRIBED_MEMBERS):
      extension = _split_name(member.name)[1].decode(errors='replace')
      if extension not in member_by_extension and len(member_by_extension) < _MAX_DESCRIBED_EXTENSIONS:
        content = window.read(member.offset, member.size) if member.size <= _MAX_DESCRIBED_BYTES else b''
        member_by_extension[extension] = member.name.decode(errors='replace'), content
  return member_by_extension


def _describe_member(extension: str, name: str, content: bytes) -> str:
  """Returns how a message describes a member: its name with the fields of JSON, or with the beginning of a text."""
  if extension.endswith('json'):
    with contextlib.suppress(ValueError, RecursionError):
      value = documents.parse(content, nan=True)
      fields = documents.listed(list(value), 10) if isinstance(value, dict) else 'no object'
      return f'{documents.shown(name)} (fields: {fields})'
  with contextlib.suppress(UnicodeDecodeError):
    if content and documents.is_clean(text := content.decode().strip()):
      return f'{documents.shown(name)} ({documents.describe(text)})'
  return documents.shown(name)


@contextlib.contextmanager
def _open_archive(path: str) -> Iterator[Window]:
  """Opens an archive for the `with` statement. Raises TemporaryError or UserError if the archive cannot be read."""
  try:
    with contextlib.closing(Window(path)) as window:
      yield window
  except OSError as error:
    raise failures.unreadable(error, f'the tar file {path}') from error


def scan(path: str, ignored: Counts, *, columns: Columns) -> Iterator[tuple[Any, ...]]:
  """Yields the row of each image of an archive, with the columns of `_INDEX_TYPES`. Counts in `ignored` what it skips.

  Raises OSError or UserError if the archive is missing, cannot be read, is compressed, damaged or truncated, or has
  sparse members; or if an example has several images, and `columns` does not name the extension of one of them.
  """
  with contextlib.closing(Window(path)) as window:
    for example in _examples(path, window, columns, ignored):
      assert example.image
      name, offset, size = example.image
      _, caption_offset, caption_size = example.caption or Member(b'', 0, -1)  # -1 = there is no caption
      yield offset, min(size, 2**32 - 1), name, caption_offset, caption_size, index.encode(example.label)


class Member(NamedTuple):
  """A file in an archive: its name, and the offset and the number of its bytes."""
  name: bytes
  offset: int
  size: int


@dataclasses.dataclass(slots=True)
class Example:
  """The consecutive members with one key: image, caption and label, and the extensions of all these members."""
  key: bytes
  extensions: set[bytes] = dataclasses.field(default_factory=set)
  image: Member | None = None
  caption: Member | None = None
  label: Labels = None


def _split_name(name: bytes) -> tuple[bytes, bytes]:
  """Returns the key and the extension of a member: `a.b/7` and, in lower case, `left.jpg` of `a.b/7.LEFT.jpg`."""
  start = name.rfind(b'/') + 1
  stem, _, extension = name[start:].partition(b'.')
  return name[:start] + stem, extension.lower()


def _examples(path: str, window: Window, columns: Columns, ignored: Counts) -> Iterator[Example]:
  """Yields the examples of an archive that have an image, in order; counts in `ignored` what it skips."""
  image_extensions = {columns.image.lower().encode()} if columns.image else EXTENSIONS
  label_extension, caption_extension = (text.partition('/')[0].encode() for text in (columns.label, columns.caption))
  label_field = columns.label.partition('/')[2]
  example = Example(b'')  # no member has this key
  for member in _members(path, window, ignored):
    key, extension = _split_name(member.name)
    if key.endswith(b'/') or not key:  # a hidden file, such as `a/.jpg`
      continue
    if len(key) == len(member.name) or (member.name.startswith(b'__') and member.name.endswith(b'__')):
      ignored['members without an extension'] += 1
      continue
    if key != example.key or extension in example.extensions:  # the next example begins
      if key == example.key:
        ignored['members of the same name as the one before'] += 1
      yield from _with_image(example, ignored)
      example = Example(key)
    example.extensions.add(extension)
    if extension == caption_extension:
      example.caption = member
    if extension == label_extension:
      example.label = _read_label(window, member, label_field)
    elif extension in image_extensions:
      if example.image:
        raise UserError(f'{path}: expected one image for each key, got {example.image.name.decode(errors="replace")!r} '
                        f'and {member.name.decode(errors="replace")!r}. Set data.image_column to the extension of the '
                        'images, such as jpg.')
      example.image = member
  yield from _with_image(example, ignored)


def _with_image(example: Example, ignored: Counts) -> Iterator[Example]:
  """Yields an example, whose members are complete, if it has an image; else counts it in `ignored`."""
  if example.image:
    yield example
  elif example.extensions:
    ignored['keys without an image'] += 1


def _read_label(window: Window, member: Member, field: str) -> Labels:
  """Returns the label in a member, or a tuple of labels for a list; None if the label is missing or damaged.

  `field` is the path of the JSON field with the label, such as `label` or `info/label`; '' = the member is a number.
  """
  is_small = member.size <= (_MAX_JSON_BYTES if field else _MAX_LABEL_BYTES)
  content = window.read(member.offset, member.size) if is_small else b''
  if not field:
    return int(content) if _INTEGER.fullmatch(content) else None
  try:
    value: Any = documents.parse(content, nan=True)
  except (ValueError, RecursionError):
    return None
  for part in field.split('/'):
    value = value.get(part) if isinstance(value, dict) else None
  if isinstance(value, list):  # each label of the list is returned once
    return tuple(dict.fromkeys(value)) if all(map(_is_label, value)) else None
  return value if _is_label(value) else None


def _is_label(value: object) -> bool:
  return isinstance(value, str) or (type(value) is int and abs(value) < 2**62)


def _members(path: str, window: Window, ignored: Counts) -> Iterator[Member]:
  """Yields the ordinary files of an archive; counts links and devices in `ignored`. Raises UserError for damage."""
  offset = 0  # of the next header
  extended = dict[str, bytes]()  # fields of extended headers, which are for the next member
  while (header := window.read(offset, _BLOCK_BYTES)) != _END:
    if len(header) < _BLOCK_BYTES:
      raise _damaged(path, window, offset, 'one without an end')
    member_type, size, start = header[_TYPE], _parse_number(header[_SIZE]), offset + _BLOCK_BYTES
    if not _has_checksum(header) or size is None or size < 0:
      raise _damaged(path, window, offset, 'one that is damaged' if offset else
                     storage.describe_compression(header) or 'no header')
    if member_type not in _COUNTED_TYPES and not window.holds(start + size):
      raise _damaged(path, window, offset, 'one that is truncated')
    if member_type in (_PAX, _LONG_NAME):
      extended |= _parse_extended(path, window, start, size, member_type)
    elif member_type == _SPARSE or any(name.startswith('GNU.sparse') for name in extended):
      raise UserError(f'{path}: expected members that are stored completely, got the sparse file '
                      f'{_parse_name(header).decode(errors="replace")[:80]!r}. Write the archive without --sparse.')
    elif member_type not in (_LONG_LINK, _PAX_DEFAULTS, _FOLDER):
      if 'size' in extended:
        size = _parse_number(extended['size'], 10)
      name = extended.get('path') or _parse_name(header)
      if size is None or size < 0:
        raise _damaged(path, window, offset, 'one that is damaged')
      if member_type in _COUNTED_TYPES:
        ignored[_COUNTED_TYPES[member_type]] += 1
        size = 0  # a link has no data, whatever size its header has
      elif member_type in _FILE_TYPES and not name.endswith(b'/'):  # else a folder or an unknown type
        if not window.holds(start + size):
          raise _damaged(path, window, offset, 'one that is truncated')
        yield Member(name, start, size)
    if member_type not in (_PAX, _LONG_NAME, _LONG_LINK, _PAX_DEFAULTS):
      extended = {}
    num_blocks = -(-size // _BLOCK_BYTES)  # rounded up
    offset = start + num_blocks * _BLOCK_BYTES
  padding = window.read(offset, _MAX_PADDING_BYTES + 1)  # programs that unpack archives ignore these bytes, too
  if len(padding) > _MAX_PADDING_BYTES or padding.strip(b'\0'):
    raise _damaged(path, window, offset, 'more bytes behind the end of the archive, perhaps another one (join archives '
                   'with tar -A)')


def _parse_extended(path: str, window: Window, offset: int, size: int, header_type: bytes) -> dict[str, bytes]:
  """Returns the fields `path`, `size` and those of sparse files of an extended header. Raises UserError if damaged."""
  content = window.read(offset, size) if size <= _MAX_EXTENDED_BYTES else b''
  if len(content) < size or size > _MAX_EXTENDED_BYTES:
    raise _damaged(path, window, offset, 'one that is truncated, or has a name of more than 1 MiB')
  if header_type == _LONG_NAME:
    return {'path': content.rstrip(b'\0')}
  fields, start = dict[str, bytes](), 0
  while start < len(content):  # a field is a line `LENGTH NAME=VALUE`; LENGTH is the number of bytes of the line
    digits = content[start:start + 8].partition(b' ')[0]
    length = _parse_number(digits, 10) if len(digits) < 8 else None  # 7 digits suffice for 1 MiB
    end = start + (length or 0)
    if not length or length <= len(digits) + 1 or end > len(content) or content[end - 1:end] != b'\n':
      raise _damaged(path, window, offset, 'one with a damaged extended header')
    name, _, value = content[start + len(digits) + 1:end - 1].partition(b'=')
    if name in (b'path', b'size') or name.startswith(b'GNU.sparse'):
      fields[name.decode(errors='replace')] = value
    start = end
  return fields


def _damaged(path: str, window: Window, offset: int, got: str) -> UserError:
  return UserError(f'{path}: expected a complete tar archive, got {got}, {window.place(offset)}. Copy it again, or '
                   'leave it out of the pattern.')


def _has_checksum(header: bytes) -> bool:
  """Returns whether the checksum of a header is correct: the sum of its bytes, with blanks in place of the checksum."""
  checksum, blanks = _parse_number(header[_CHECKSUM]), 8 * ord(' ')
  if checksum == sum(header) - sum(header[_CHECKSUM]) + blanks:
    return True
  signed = np.frombuffer(header, np.int8)  # some old programs sum signed bytes
  return checksum == int(signed.sum(dtype=np.int64)) - int(signed[_CHECKSUM].sum(dtype=np.int64)) + blanks


def _parse_number(field: bytes, base: int = 8) -> int | None:
  """Returns the number in a field: digits, or the byte 128 and then a large number as bytes; None if it is damaged."""
  if field[:1] == b'\x80':
    return int.from_bytes(field[1:], 'big')
  try:
    return int(field.strip(b' \0') or b'0', base)
  except ValueError:
    return None


def _parse_name(header: bytes) -> bytes:
  """Returns the name in a header. In POSIX archives, the field `_PREFIX` has the first folders of a long name."""
  name = header[_NAME].partition(b'\0')[0]
  prefix = header[_PREFIX].partition(b'\0')[0] if header[_MAGIC] == b'ustar\0' else b''
  return prefix + b'/' + name if prefix else name
