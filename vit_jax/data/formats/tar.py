"""`wds:PATH`: tar files as `webdataset` writes them, read at random by an index of their members.

PATH is a pattern such as `DIR/imagenet1k-{split}-*.tar` or `gs://BUCKET/{000..999}.tar`, or a folder of tar files
(`shards.py`); a file `_info.json` in a folder lists the files of each split, as timm writes it. The order of the
examples is the stored one, file by file, so another distribution of the same examples over files has the same order.

An example consists of consecutive members of a file with the same key: the path up to the first dot of the base name.
The rest of the name is the extension, such as `jpg` and `cls` of `n01/7.jpg` and `n01/7.cls`. A label is a whole number
in the member `.cls`, or a number, a name, or a list of them in a field of `.json`. Captions are the lines of `.txt`, or
a text or a list of texts in a field of `.json`.

`opening.py` calls `opener`; `indexed.py` calls the methods of `TarSource` and says in which order. The scan for
the index reads POSIX (ustar and pax) and GNU archives: `_members` reads headers, `_examples` groups members by key, and
only labels and JSON are read besides. `tarfile` is not used: it is three times slower, and takes a damaged header for
the end of the archive.
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
_INDEX_TYPES = {'offset': 'int64', 'size': 'uint32', 'name': index.BYTES, 'caption_offset': 'int64',
                'caption_size': 'int64', index.LABEL: index.BYTES}
_BLOCK_BYTES = 512  # of a header; the data of a member are padded to a multiple of it
_MAX_EXTENDED_BYTES = _MAX_PADDING_BYTES = 2**20  # of an extended header, and of zeros after the end of the archive
_MAX_LABEL_BYTES, _MAX_JSON_BYTES = 64, 2**20
_DESCRIBED_MEMBERS, _DESCRIBED_EXTENSIONS, _DESCRIBED_BYTES = 10_000, 20, 2**12  # read for a message, at most
_LAST_EXAMPLES = 100  # of the last file, in which a label is searched
_INTEGER = re.compile(rb'\s*-?\d{1,18}\s*')  # such as `7` and the end of a line
_END = bytes(_BLOCK_BYTES)  # an archive ends with blocks of zeros
_NAME, _SIZE, _CHECKSUM = slice(0, 100), slice(124, 136), slice(148, 156)  # fields of a header
_TYPE, _MAGIC, _PREFIX = slice(156, 157), slice(257, 263), slice(345, 500)
_FILE_TYPES, _SPARSE = (b'0', b'\0', b'7'), b'S'
_LONG_NAME, _PAX = b'L', b'x'  # extended headers of the next member, by GNU and POSIX
_LONG_LINK, _PAX_DEFAULTS, _FOLDER = b'K', b'g', b'5'  # ignored; the first two may be among extended headers
_COUNTED_TYPES = {b'1': 'hard links', b'2': 'symbolic links', b'3': 'devices', b'4': 'devices', b'6': 'pipes'}
_DATASET_AGAIN = 'Copy the dataset again, or give a pattern of tar files.'


class Columns(NamedTuple):
  """The extensions of the members with image, label and captions.

  The key of an index contains the representation of this tuple, so its names cannot change.

  image: such as `jpg`; '' = the only image of each example.
  label: `cls`, a whole number; `json/FIELD`, whole numbers or names; or '', if there are no labels.
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
    for path, described, count in zip(files.paths, files.counts, counts, strict=False):
      if count != described:
        raise UserError(f'{path}: expected {described:,} images, as its description says, got {count:,}. '
                        f'{_DATASET_AGAIN}')
    return rows

  @staticmethod
  def label_place(label: str) -> str:
    member, _, field = label.partition('/')
    return f'the field {field} of .json' if field else f'.{member}'

  @staticmethod
  def contents(paths: Sequence[str]) -> str:
    first_members = _first_members(paths[0])
    described = [_describe_member(extension, name, content) for extension, (name, content) in first_members.items()]
    text = f'The archive has {", ".join(described)}.' if described else ''
    last_parts = {extension: extension.rpartition('.')[2] for extension in first_members}  # `jpg` of `left.jpg`
    images = [name for extension, (name, _) in first_members.items() if last_parts[extension].encode() in EXTENSIONS]
    labels = [content for extension, (_, content) in first_members.items() if last_parts[extension] == 'cls']
    image, label = images[0] if images else '', labels[0] if labels else b''
    if label and not label.strip().isdigit():
      return f'{text} A label in .cls is a whole number; a name belongs into a field of .json.'
    if label:
      return (f'{text} A label belongs to the image beside it with the same name up to the first dot, such as '
              f'{documents.shown(image.partition(".")[0])}.cls. Write the members of an example one after the '
              'other (tar --sort=name).')
    if '/' in image and len(first_members) == 1:
      return f'{text} Names of folders are not read as labels: unpack the archive, and name its folder, folder:PATH.'
    return text

  @staticmethod
  def choose(paths: Sequence[str], data: schema.Data) -> Columns:
    """Returns which members have image and label: by the settings, or by the first example that has a label.

    Searches all examples of the first file, and the first `_LAST_EXAMPLES` of the last one. If none has a label, the
    images count as unlabeled.

    Raises:
      UserError: `data.label_column` or `data.caption_column` has another form, or the file is damaged.
    """
    caption = data.caption_column or 'txt'
    for setting, value, usual in (('caption_column', caption, 'txt'), ('label_column', data.label_column, 'cls')):
      member, _, field = value.partition('/')
      if value and (not member or (member == 'json') is not bool(field)):
        raise UserError(f'data.{setting}: expected an extension such as {usual}, or json/FIELD, got {value!r}. Set one '
                        'of these forms.')
    if data.label_column:
      return Columns(data.image_column, data.label_column, caption)
    in_json = Columns(data.image_column, 'json/label', caption)
    for path in dict.fromkeys((paths[0], paths[-1])):
      most = None if path == paths[0] else _LAST_EXAMPLES  # None = all
      with _open_archive(path) as window:
        for example in itertools.islice(_examples(path, window, in_json, Counts()), most):
          if b'cls' in example.extensions:
            return Columns(data.image_column, 'cls', caption)
          if example.label is not None:
            return in_json
    warn_once(f'{paths[0]} has no .cls beside an image and no field `label` in .json: its images have no labels, '
              f'and get the class {UNLABELED[0]!r}. {TarSource.contents(paths)}')
    return Columns(data.image_column, caption=caption)

  def identity(self) -> Iterator[HostArray]:
    yield from (self._index['size'], self._index['name'], self._index.ends('name'),
                *self.label_arrays())

  def image(self, row: int, stored: bytes) -> bytes:
    if len(stored) < self._index['size'][row]:
      raise BadImage(f'the image is truncated: {self.path(row)} ends in it')
    return stored

  def captions(self, row: int) -> tuple[str, ...]:
    """Returns the texts beside an image that are not empty: the lines of a member, or those in a field of `.json`.

    Raises:
      BadImage: they are missing, truncated, larger than 1 MiB, not UTF-8, or not JSON.
      OSError: its file cannot be read.
    """
    offset, size = int(self._index['caption_offset'][row]), int(self._index['caption_size'][row])
    if not 0 <= size <= stored.MOST_BYTES:
      raise BadImage('the example: expected a text of at most 1 MiB beside the image, got '
                     + (f'{size:,} bytes' if size > 0 else 'none'))
    content = storage.read(self.path(row), offset, size)
    _, *field = self._columns.caption.split('/')
    values: list[Any] | None = None
    if len(content) == size:
      with contextlib.suppress(ValueError, RecursionError):  # no UTF-8, or no JSON
        values = (stored.field(documents.parse(content, nan=True), field) if field else
                  user_files.split_lines(content.decode()))
    if values is None:
      raise BadImage('the example: expected a complete text in UTF-8 beside the image, got a damaged one')
    return stored.texts(values, f'.{self._columns.caption}')

  def describe(self, row: int) -> str:
    return os.path.join(self.path(row), os.fsdecode(self._index.get('name', row)))


def opener(where: str, data: schema.Data, image_px: tuple[int, int], *,
           order: Sequence[str] = ()) -> Callable[[str], Source]:
  """Opens the splits of tar files.

  `data.label_column` is `cls` or `json/FIELD`, `data.image_column` the extension of the images, `data.caption_column`
  that of captions or `json/FIELD`.

  Raises:
    UserError: there are no such files, they are compressed, or (when opening) damaged.
  """
  del image_px
  return indexed.opener(TarSource, find(where, Rules.of(data)), data, name=f'wds:{where}', order=order)


def find(where: str, rules: Rules) -> Listed:
  """Returns the files that `_info.json` in a folder lists, if it exists; else those that `shards.find` returns."""
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
    file = f'{path}/{name}'
    listed = _read_info(file, path, rules, exists) if exists(file) else None
    if listed:
      return listed
  return shards.find(where, '.tar', kind='wds', rules=rules)


def _read_info(file: str, folder: str, rules: Rules, exists: Callable[[str], bool]) -> Listed | None:
  """Returns the files that `_info.json` lists; None if it describes something else. `exists` tells if a file exists.

  It has the form `{"splits": {"train": {"filenames": ["0.tar", "1.tar"], "shard_lengths": [100, 90]}}}`.

  Raises:
    UserError: it is damaged, or a file that it lists does not exist or is outside of the folder.
  """
  by_split: dict[str, Files] = {}
  expected = 'the files of each split'
  text = storage.read_text(file, file, expected=expected, advice=_DATASET_AGAIN)
  described = documents.field(text, file, expected=expected, advice=_DATASET_AGAIN).optional('splits')
  if described is None:
    return None
  for split, entry in described.fields():
    if (names := entry.optional('filenames')) is None:
      return None
    paths = [os.path.join(folder, name.text()) for name in names.items() if user_files.is_below(name.text())]
    lengths = entry.optional('shard_lengths')
    counts = tuple(number.whole(0, 2**40) for number in lengths.items()) if lengths else ()
    if not paths or len(paths) != len(names.list()) or len(counts) not in (0, len(paths)):
      raise entry.error('files in this folder, and the number of examples of each')
    for path in paths:
      if not exists(path):
        raise UserError(f'{file}: expected the file {path}, got none. {_DATASET_AGAIN}')
      if not storage.is_address(path):
        user_files.check_inside(path, folder, rules)
    by_split[split] = Files(tuple(paths), counts)
  return Listed(folder, by_split) if by_split else None


def _first_members(path: str) -> dict[str, tuple[str, bytes]]:
  """Returns the first member of each extension in an archive: its name, and its content if it is small, else b''."""
  first_members = dict[str, tuple[str, bytes]]()
  with _open_archive(path) as window:
    for member in itertools.islice(_members(path, window, Counts()), _DESCRIBED_MEMBERS):
      _, extension = _split_name(member.name)
      text = extension.decode(errors='replace')
      if text not in first_members and len(first_members) < _DESCRIBED_EXTENSIONS:
        content = window.read(member.offset, member.size) if member.size <= _DESCRIBED_BYTES else b''
        first_members[text] = member.name.decode(errors='replace'), content
  return first_members


def _describe_member(extension: str, name: str, content: bytes) -> str:
  """Returns how a message names a member: with the fields of JSON, or the beginning of a small text."""
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
  """Yields a window of an archive. Raises TemporaryError or UserError if the archive cannot be read."""
  try:
    with contextlib.closing(Window(path)) as window:
      yield window
  except OSError as error:
    raise failures.unreadable(error, f'the tar file {path}') from error


def scan(path: str, ignored: Counts, *, columns: Columns) -> Iterator[tuple[Any, ...]]:
  """Yields the row of each image of an archive, with the columns of `_INDEX_TYPES`.

  Raises:
    OSError, UserError: it is missing, cannot be read, is compressed, damaged or truncated, or has sparse members; or an
      example has several images, and `columns` does not say which one.
  """
  with contextlib.closing(Window(path)) as window:
    for example in _examples(path, window, columns, ignored):
      assert example.image
      name, offset, size = example.image
      _, caption_offset, caption_size = example.caption or Member(b'', 0, -1)  # -1 = there is no caption
      yield offset, min(size, 2**32 - 1), name, caption_offset, caption_size, index.encode(example.label)


class Member(NamedTuple):
  """A file in an archive: its name, and where its bytes are."""
  name: bytes
  offset: int
  size: int


@dataclasses.dataclass(slots=True)
class Example:
  """The consecutive members with one key: image, caption and label, and the extensions of all of them."""
  key: bytes
  extensions: set[bytes] = dataclasses.field(default_factory=set)
  image: Member | None = None
  caption: Member | None = None
  label: Labels = None


def _split_name(name: bytes) -> tuple[bytes, bytes]:
  """Returns the key and the extension in lower case: `a.b/7` and `left.jpg` of `a.b/7.LEFT.jpg`."""
  start = name.rfind(b'/') + 1
  stem, _, extension = name[start:].partition(b'.')
  return name[:start] + stem, extension.lower()


def _examples(path: str, window: Window, columns: Columns, ignored: Counts) -> Iterator[Example]:
  """Yields the examples of an archive that have an image, in order; counts the others in `ignored`."""
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
    if key != example.key or extension in example.extensions:
      ignored['members of the same name as the one before'] += key == example.key
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
  """Yields a complete example if it has an image; else counts it in `ignored`."""
  if example.image:
    yield example
  elif example.extensions:
    ignored['keys without an image'] += 1


def _read_label(window: Window, member: Member, field: str) -> Labels:
  """Returns the label in a member, or for a list a tuple of labels; None if the member is damaged."""
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
  if isinstance(value, list):
    return tuple(dict.fromkeys(value)) if all(map(_is_label, value)) else None
  return value if _is_label(value) else None


def _is_label(value: object) -> bool:
  return isinstance(value, str) or (type(value) is int and abs(value) < 2**62)


def _members(path: str, window: Window, ignored: Counts) -> Iterator[Member]:
  """Yields the ordinary files of an archive; counts others in `ignored`. Raises UserError if it is damaged."""
  offset, extended = 0, dict[str, bytes]()  # of the next header, and fields of extended headers for the next member
  while (header := window.read(offset, _BLOCK_BYTES)) != _END:
    if len(header) < _BLOCK_BYTES:
      raise _damaged(path, window, offset, 'one without an end')
    kind, size, start = header[_TYPE], _parse_number(header[_SIZE]), offset + _BLOCK_BYTES
    if not _has_checksum(header) or size is None or size < 0:
      raise _damaged(path, window, offset, 'one that is damaged' if offset else
                     storage.describe_compression(header) or 'no header')
    if kind not in _COUNTED_TYPES and not window.holds(start + size):
      raise _damaged(path, window, offset, 'one that is truncated')
    if kind in (_PAX, _LONG_NAME):
      extended |= _parse_extended(path, window, start, size, kind)
    elif kind == _SPARSE or any(name.startswith('GNU.sparse') for name in extended):
      raise UserError(f'{path}: expected members that are stored completely, got the sparse file '
                      f'{_parse_name(header).decode(errors="replace")[:80]!r}. Write the archive without --sparse.')
    elif kind not in (_LONG_LINK, _PAX_DEFAULTS, _FOLDER):
      if 'size' in extended:
        size = _parse_number(extended['size'], 10)
      name = extended.get('path') or _parse_name(header)
      if size is None or size < 0:
        raise _damaged(path, window, offset, 'one that is damaged')
      if kind in _COUNTED_TYPES:
        ignored[_COUNTED_TYPES[kind]] += 1
        size = 0
      elif kind in _FILE_TYPES and not name.endswith(b'/'):
        if not window.holds(start + size):
          raise _damaged(path, window, offset, 'one that is truncated')
        yield Member(name, start, size)
    if kind not in (_PAX, _LONG_NAME, _LONG_LINK, _PAX_DEFAULTS):
      extended = {}
    num_blocks = -(-size // _BLOCK_BYTES)  # rounded up
    offset = start + num_blocks * _BLOCK_BYTES
  padding = window.read(offset, _MAX_PADDING_BYTES + 1)  # other programs do not read it either
  if len(padding) > _MAX_PADDING_BYTES or padding.strip(b'\0'):
    raise _damaged(path, window, offset, 'more bytes behind the end of the archive, perhaps another one (join archives '
                   'with tar -A)')


def _parse_extended(path: str, window: Window, offset: int, size: int, kind: bytes) -> dict[str, bytes]:
  """Returns the fields of an extended header, which are for the next member: `path`, `size`, and of sparse files."""
  content = window.read(offset, size) if size <= _MAX_EXTENDED_BYTES else b''
  if len(content) < size or size > _MAX_EXTENDED_BYTES:
    raise _damaged(path, window, offset, 'one that is truncated, or has a name of more than 1 MiB')
  if kind == _LONG_NAME:
    return {'path': content.rstrip(b'\0')}
  fields, start = dict[str, bytes](), 0
  while start < len(content):  # `LENGTH NAME=VALUE`, and the end of the line; LENGTH is the number of bytes of all
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
  signed = np.frombuffer(header, np.int8)  # as some old programs compute it
  return checksum == int(signed.sum(dtype=np.int64)) - int(signed[_CHECKSUM].sum(dtype=np.int64)) + blanks


def _parse_number(field: bytes, base: int = 8) -> int | None:
  """Returns the value of a field: digits, or for large numbers bytes, of which the first is 128; None if damaged."""
  if field[:1] == b'\x80':
    return int.from_bytes(field[1:], 'big')
  try:
    return int(field.strip(b' \0') or b'0', base)
  except ValueError:
    return None


def _parse_name(header: bytes) -> bytes:
  """Returns the name in a header; POSIX has its first folders in a field of their own."""
  name = header[_NAME].partition(b'\0')[0]
  prefix = header[_PREFIX].partition(b'\0')[0] if header[_MAGIC] == b'ustar\0' else b''
  return prefix + b'/' + name if prefix else name
