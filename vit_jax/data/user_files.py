"""Files that a person names: their paths, the image files of a folder, and which links and sizes are allowed.

The opener of a format, or a job, that gets a path from a person calls these functions in this order:
`resolve` or `locate` returns an absolute path; `Finder` lists the image files of a folder, and `check_inside` checks
any other file in it; `read_image` or `read_lines` reads a file.

A data folder may come from anybody, so nothing outside of it is read: links and listed paths that lead out of it are
refused, unless a setting allows links. A file that is too large is refused before it is read (`core/documents.py`).
This module does not deal with splits or classes.
"""
from __future__ import annotations

import collections
import hashlib
import io
import logging
import os
import pathlib
import shlex
import stat
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema.data import RGB
from vit_jax.core import address, documents, failures
from vit_jax.core.errors import UserError
from vit_jax.data import storage
from vit_jax.data.image import headers
from vit_jax.data.image.headers import BadImage

log = logging.getLogger('vit_jax.data')

IMAGE_MIB = 512        # 3 bytes for each of `headers.MAX_PIXELS` pixels
LABELS_BYTES = 2**30   # label files: 14 million images with 70 bytes each
FOLLOW = 'set data.follow_links=true (prepare, predict and inspect: --follow_links)'
"""Advice in messages: how a person allows links that lead out of a folder."""
EXTENSIONS = tuple(extension for kind in headers.FORMATS.values() for extension in kind.extensions)
ARRAY = '.npy'
"""Extension of arrays, which are images if `data.channels` is not 3."""
UNREAD = tuple(extension for kind in headers.UNREAD.values() for extension in kind.extensions)
"""Extensions of images that are not supported."""
_MOUNTS = {
    'gs': ('gcsfuse -o ro --implicit-dirs --cache-dir=/cache --file-cache-max-size-mb=-1 '
           '--file-cache-cache-file-for-range-read --file-cache-enable-parallel-downloads '
           '--metadata-cache-ttl-secs=-1 {only}{bucket} /data', '--only-dir={} ',
           'gcloud storage rsync --recursive {} /data'),
    's3': ('mount-s3 --read-only --cache=/cache {only}{bucket} /data', '--prefix={}/ ', 'aws s3 sync {} /data')}
"""For each scheme: the command that mounts a bucket, its option for a folder, and the command that copies a folder."""
_NAME_BYTES = 255  # of a file or folder on Linux
# Keys of `Finder.ignored` for entries that are not counted by their extension.
_BROKEN_LINK, _OUTSIDE_LINK = 'broken or circular links', 'links out of the folder'
_SECOND_LINK, _NO_EXTENSION = 'links to a folder that another link leads to', 'without an extension'
_MOST_FOLDERS = 100  # inside of one another
_MOST_KINDS = 6  # of ignored files in a message


class Rules(NamedTuple):
  """Which files of a folder are read.

  follow_links: whether links are followed to files outside of the folder.
  max_bytes: the largest size of an image or mask.
  arrays: whether `.npy` files are images, too.
  """
  follow_links: bool = False
  max_bytes: int = IMAGE_MIB * 2**20
  arrays: bool = False

  @classmethod
  def of(cls, data: schema.Data) -> Rules:
    """Returns the rules that the settings of the data state."""
    return cls(data.follow_links, data.max_file_mib * 2**20, data.channels != RGB)


OWN = Rules()
"""The default rules: those for a folder of one's own, if no setting changes them."""


# Paths.

def expanded(path: str | os.PathLike[str]) -> str:
  """Returns a path that a person names: `~` at its start is the home directory, unless there is such a file."""
  name = os.fspath(path)
  return name if os.path.lexists(name) else os.path.expanduser(name)


def resolve(where: str | os.PathLike[str], setting: str) -> str:
  """Returns the absolute path; `~` is the home directory.

  Args:
    where: the path as given.
    setting: the setting or flag that gives it.

  Raises:
    UserError: it is an address such as `gs://...`.
  """
  text = os.fspath(where)
  address.check(text, setting)
  if '://' in text:
    raise UserError(f'{setting}: expected a folder of this machine, got the address {text}. {_advise_mount(text)}')
  return os.path.abspath(os.path.expanduser(text))


def locate(where: str | os.PathLike[str], setting: str) -> str:
  """Returns the absolute path, or the address of a folder in object storage that is read directly.

  Raises:
    UserError: it is an address of another kind.
  """
  text = os.fspath(where)
  if not storage.is_address(text):
    return resolve(text, setting)
  if not storage.split(text)[1]:
    raise UserError(f'{setting}: expected an address such as {text.partition("://")[0]}://BUCKET/FOLDER, got {text}. '
                    'Correct the address.')
  return text.rstrip('/')


def _advise_mount(folder_address: str) -> str:
  """Returns advice for a message: commands that mount or copy an address, such as `gs://BUCKET/PATH`, to a folder."""
  scheme, _, bucket_path = folder_address.partition('://')
  bucket, _, path = bucket_path.strip('/').partition('/')
  if scheme not in _MOUNTS:
    return 'Copy it to a folder, and give the path of the folder.'
  mount, folder_option, copy = _MOUNTS[scheme]
  mount = mount.format(bucket=bucket, only=folder_option.format(shlex.quote(path)) if path else '')
  copy = copy.format(shlex.quote(folder_address.rstrip('/')))
  return (f'Mount it with a cache of complete files, or copy it, and give the folder /data:\n  {mount}\n  {copy}\n'
          '  launch/tpu_pod.sh does either on every host: --data=gs://BUCKET/FOLDER --data_mode=mount or copy.\n'
          '  array_record:gs://BUCKET/FOLDER, which vit-jax prepare writes, needs neither, nor do wds: and tfrecord:.')


def cache_folder(name: str) -> pathlib.Path:
  """Returns the folder `vit_jax/NAME` of the user's cache, which is $XDG_CACHE_HOME or ~/.cache; may not exist."""
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'vit_jax' / name


# Links.

def leads_out(path: str, base: str) -> bool:
  """Returns whether `path`, with all links resolved, is outside of the folder `base`, a path without links."""
  resolved = os.path.realpath(path)
  return resolved != base and not resolved.startswith(os.path.join(base, ''))


def check_inside(path: str, root: str, rules: Rules) -> None:
  """Raises UserError if a file or folder below `root` leads out of it by a link, which the rules do not allow."""
  base = os.path.realpath(root)
  if not rules.follow_links and leads_out(path, base):
    raise UserError(f'{path}: expected a file or folder inside of {base}, got a link to {os.path.realpath(path)}. '
                    f'Copy it there, or {FOLLOW}.')


def is_below(path: str) -> bool:
  """Returns whether a path in a list file stays below its folder, apart from links: it is relative and has no `..`.

  Also False for a path that no file can have, with a null character or a name of more than 255 bytes.
  """
  parts = pathlib.PurePath(path).parts
  return (bool(parts) and not os.path.isabs(path) and '..' not in parts and '\0' not in path
          and all(len(part.encode(errors='surrogatepass')) <= _NAME_BYTES for part in parts))


# Content.

def read_image(path: str | os.PathLike[str], max_bytes: int = IMAGE_MIB * 2**20) -> bytes:
  """Returns the content of an image file.

  Raises:
    BadImage: it is larger than `max_bytes`.
    OSError: it cannot be read.
  """
  try:
    return documents.read_bytes(path, max_bytes)
  except documents.TooLarge as error:
    raise BadImage(f'the file has {error.found}: expected at most {max_bytes:,}. Shrink the image, or in a '
                   'config raise data.max_file_mib') from None


def read_lines(path: str | os.PathLike[str], what: str, *, expected: str = 'a text file',
               advice: str = 'Check the path.') -> Iterator[str]:
  """Yields the lines of a label file with their ends, without reading all of it into memory.

  The arguments are those of `documents.read_text`.

  Raises:
    UserError: as `documents.read_text`; also, it is not an ordinary file, or has more than `LABELS_BYTES`.
  """
  with documents.explained(what, max_bytes=LABELS_BYTES, expected=expected, advice=advice):
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
      raise UserError(f'{what}: expected {expected}, got something that is not a file. {advice}')
    if status.st_size > LABELS_BYTES:
      raise documents.TooLarge(path, status.st_size, LABELS_BYTES)
    try:
      with open(path, encoding='utf-8-sig', newline='') as file:
        yield from file
    except UnicodeDecodeError:  # of a block of the file; decoding the complete file raises it with the right position
      documents.read_bytes(path, LABELS_BYTES).decode('utf-8-sig')
      raise


def split_lines(text: str) -> list[str]:
  """Returns the lines of a text as editors count them; other separators, such as U+2028, are part of a line."""
  return [line.rstrip('\n') for line in io.StringIO(text, newline=None)]


def sha256(path: str | os.PathLike[str]) -> str:
  """Returns the SHA-256 of a file, in hexadecimal digits."""
  with open(path, 'rb', buffering=0, opener=documents.open_regular) as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


# The image files of a folder.

class Folder(NamedTuple):
  """A folder that is being read.

  path: relative to the root, with forward slashes.
  time_ns: its modification time.
  files: name and size in bytes of each image file; must be consumed before the next folder is read.
  """
  path: str
  time_ns: int
  files: Iterator[tuple[bytes, int]]


class Finder:
  """Finds image files in and below a folder, in no particular order; counts other files by extension in `ignored`.

  Hidden files are skipped and not counted. Circular links are not followed, nor links that lead out of the folder
  unless the rules allow them.
  """

  def __init__(self, rules: Rules = OWN) -> None:
    self.ignored: collections.Counter[str] = collections.Counter()
    self._rules, self._base = rules, ''  # the root of the walk, without links
    self._linked = set[tuple[int, int]]()  # device and inode of each folder that a link led to

  def find(self, root: str, prefix: str = '') -> Iterator[str]:
    """Yields the paths of the image files in and below `root/prefix`, relative to `root`.

    Raises:
      UserError: as `walk`.
    """
    for folder in self.walk(root, prefix):
      for name, _ in folder.files:
        yield f'{folder.path}/{os.fsdecode(name)}' if folder.path else os.fsdecode(name)

  def walk(self, root: str, prefix: str = '') -> Iterator[Folder]:
    """Yields `root/prefix` and the folders below it, each before its subfolders.

    Raises:
      UserError: a folder cannot be read, also while its files are consumed; or `root/prefix` is outside of `root`.
    """
    self._base, self._linked = os.path.realpath(root), set()
    start = os.path.join(root, prefix)
    check_inside(start, root, self._rules)
    above = [*pathlib.Path(os.path.realpath(start)).parents,
             *(pathlib.Path(root, parent) for parent in pathlib.PurePath(prefix).parents)]
    return self._walk(root, prefix, tuple((status.st_dev, status.st_ino) for status in map(os.stat, above)))

  def _walk(self, root: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Folder]:
    """Yields the folder `root/prefix` and those below it; `above` has device and inode of the folders that it is in."""
    folder = os.path.join(root, prefix) if prefix else root
    if prefix.count('/') >= _MOST_FOLDERS:
      raise UserError(f'{root}: expected at most {_MOST_FOLDERS} folders inside of one another, got more in '
                      f'{prefix[:80]}…. Move the images up.')
    try:
      status = os.stat(folder)
    except OSError as error:
      raise failures.unreadable(error, folder) from error
    identity = status.st_dev, status.st_ino
    if identity in above:  # a link to a parent folder
      self.ignored[_BROKEN_LINK] += 1
      return
    if os.path.islink(folder):
      if identity in self._linked:  # links to links could lead to one folder 2^n times
        self.ignored[_SECOND_LINK] += 1
        return
      self._linked.add(identity)
    below: list[str] = []  # filled while the consumer reads `files`
    yield Folder(prefix, status.st_mtime_ns, self._files(folder, below))
    for name in below:
      yield from self._walk(root, f'{prefix}/{name}' if prefix else name, (*above, identity))

  def _files(self, folder: str, below: list[str]) -> Iterator[tuple[bytes, int]]:
    """Yields the image files of a folder; adds its subfolders to `below`."""
    try:
      with os.scandir(folder) as entries:
        for entry in entries:
          if entry.name.startswith('.'):
            continue
          if not self._rules.follow_links and entry.is_symlink() and leads_out(entry.path, self._base):
            self.ignored[_OUTSIDE_LINK] += 1
          elif is_folder(entry):
            below.append(entry.name)
          elif (size := self._size(entry)) is not None:
            yield os.fsencode(entry.name), size
    except OSError as error:
      raise failures.unreadable(error, folder) from error

  def _size(self, entry: os.DirEntry[str]) -> int | None:
    """Returns the size of an image file in bytes; counts any other file and returns None."""
    extension = os.path.splitext(entry.name)[1].lower()
    try:
      if entry.is_file() and (extension in EXTENSIONS or (self._rules.arrays and extension == ARRAY)):
        return entry.stat().st_size
      is_broken = entry.is_symlink() and not os.path.exists(entry.path)
    except OSError as error:
      if failures.is_temporary(error):  # the image may be complete, so it is not ignored
        raise
      is_broken = True
    self.ignored[_BROKEN_LINK if is_broken else extension or _NO_EXTENSION] += 1
    return None


def is_folder(entry: os.DirEntry[str]) -> bool:
  """Returns whether an entry is a folder or a link to one; a link to itself is not."""
  try:
    return entry.is_dir()
  except OSError as error:
    if failures.is_temporary(error):  # it may be a folder, so it is not ignored
      raise
    return False


def images_in(folder: str) -> Iterator[str]:
  """Yields the names of the image files in a folder, by their extensions; not of those in folders below it."""
  finder = Finder()
  with os.scandir(folder) as entries:
    yield from (entry.name for entry in entries
                if not entry.name.startswith('.') and finder._size(entry) is not None)


def describe_ignored(ignored: Mapping[str, int]) -> str:
  """Returns the ignored files, such as `12 files: .heic (10), .txt (2)`, with advice about images among them; or ''."""
  if not ignored:
    return ''
  kinds = [f'{name} ({count:,})' for name, count in sorted(ignored.items(), key=lambda item: (-item[1], item[0]))]
  num, more = sum(ignored.values()), len(kinds) - _MOST_KINDS
  text = f'{num:,} file{"s" * (num > 1)}: {", ".join(kinds[:_MOST_KINDS])}'
  if more > 0:
    text += f' and {more} more kind{"s" * (more > 1)}'
  if unread := [name for name in UNREAD if name in ignored]:
    text += (f'. {" ".join(unread)} images are not supported. Convert them to JPEG, for example with ImageMagick: '
             "magick mogrify -format jpg '*.heic'")
  if _OUTSIDE_LINK in ignored:
    text += f'. Links out of the folder are not read; {FOLLOW} to read them'
  return text


def report_ignored(ignored: Mapping[str, int], where: str) -> None:
  """Logs the ignored files below a folder, if there are any."""
  if ignored:
    log.warning('%s: ignored %s', where, describe_ignored(ignored))
