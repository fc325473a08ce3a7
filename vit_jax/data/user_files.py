"""Files that a person names: their paths, the image files of a folder, and which links and sizes are allowed.

The opener of a format, or a job, that gets a path from a person calls the functions of this module in this order:
`resolve` or `locate` returns an absolute path; `Finder` lists the image files of a folder, and `check_inside` checks
any other file in the folder; `read_image` or `read_lines` reads a file.

A data folder may come from anybody, so nothing outside of the folder is read: links and listed paths that lead out of
the folder are refused, unless a setting allows links. A file that is too large is refused before it is read
(`core/documents.py`). This module does not deal with splits or classes.
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

MAX_IMAGE_MIB = 512      # 3 bytes for each of `headers.MAX_PIXELS` pixels
MAX_LABELS_BYTES = 2**30  # size of a label file: 14 million images with 70 bytes each
FOLLOW = 'set data.follow_links=true (prepare, predict and inspect: --follow_links)'  # advice to allow links
EXTENSIONS = tuple(extension for kind in headers.FORMATS.values() for extension in kind.extensions)
ARRAY = '.npy'  # extension of files with arrays, which are images if `data.channels` is not 3
UNREAD = tuple(extension for kind in headers.UNREAD.values() for extension in kind.extensions)  # not supported
# By scheme: templates of the commands that mount and copy a bucket, and of the option that mounts a folder in it.
_MOUNT_BY_SCHEME = {
    'gs': 'gcsfuse -o ro --implicit-dirs --cache-dir=/cache --file-cache-max-size-mb=-1 '
          '--file-cache-cache-file-for-range-read --file-cache-enable-parallel-downloads --metadata-cache-ttl-secs=-1 '
          '{only}{bucket} /data',
    's3': 'mount-s3 --read-only --cache=/cache {only}{bucket} /data'}
_FOLDER_OPTION_BY_SCHEME = {'gs': '--only-dir={} ', 's3': '--prefix={}/ '}
_COPY_BY_SCHEME = {'gs': 'gcloud storage rsync --recursive {} /data', 's3': 'aws s3 sync {} /data'}
_MAX_NAME_BYTES = 255  # length of the name of a file or folder on Linux
# Keys of `Finder.ignored` for entries that are not counted by their extension.
_BROKEN_LINK, _OUTSIDE_LINK = 'broken or circular links', 'links out of the folder'
_SECOND_LINK, _NO_EXTENSION = 'links to a folder that another link leads to', 'without an extension'
_MAX_DEPTH = 100  # folders inside of one another
_MAX_NAMED_KINDS = 6  # kinds of ignored files that a message names


class Rules(NamedTuple):
  """Which files of a folder are read.

  follow_links: whether links are followed to files outside of the folder.
  max_bytes: the largest size of an image or mask.
  arrays: whether `.npy` files are images, too.
  """
  follow_links: bool = False
  max_bytes: int = MAX_IMAGE_MIB * 2**20
  arrays: bool = False

  @classmethod
  def of(cls, data: schema.Data) -> Rules:
    """Returns the rules for the settings `data` of a run."""
    return cls(data.follow_links, data.max_file_mib * 2**20, data.channels != RGB)


OWN = Rules()  # the rules for a person's own folder when no setting changes them


def expand_home(path: str | os.PathLike[str]) -> str:
  """Returns the path; `~` at the start is the home directory, unless a file with the name of the path exists."""
  name = os.fspath(path)
  return name if os.path.lexists(name) else os.path.expanduser(name)


def resolve(where: str | os.PathLike[str], setting: str) -> str:
  """Returns the absolute path of `where`, the value of a setting or flag; `~` at the start is the home directory.

  Raises UserError if `where` is an address such as `gs://...`.
  """
  text = os.fspath(where)
  address.check(text, setting)
  if '://' in text:
    raise UserError(f'{setting}: expected a folder of this machine, got the address {text}. {_advise_mount(text)}')
  return os.path.abspath(os.path.expanduser(text))


def locate(where: str | os.PathLike[str], setting: str) -> str:
  """Returns the absolute path as `resolve`, or `where` if it is the address of a folder in object storage.

  Raises UserError if `where` is an address of another kind.
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
  if scheme not in _MOUNT_BY_SCHEME:
    return 'Copy it to a folder, and give the path of the folder.'
  folder_option = _FOLDER_OPTION_BY_SCHEME[scheme].format(shlex.quote(path)) if path else ''
  mount = _MOUNT_BY_SCHEME[scheme].format(bucket=bucket, only=folder_option)
  copy = _COPY_BY_SCHEME[scheme].format(shlex.quote(folder_address.rstrip('/')))
  return (f'Mount it with a cache of complete files, or copy it, and give the folder /data:\n  {mount}\n  {copy}\n'
          '  launch/tpu_pod.sh does either on every host: --data=gs://BUCKET/FOLDER --data_mode=mount or copy.\n'
          '  array_record:gs://BUCKET/FOLDER, which vit-jax prepare writes, needs neither, nor do wds: and tfrecord:.')


def cache_folder(name: str) -> pathlib.Path:
  """Returns the folder `vit_jax/NAME` in the user's cache, $XDG_CACHE_HOME or ~/.cache. The folder may not exist."""
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'vit_jax' / name


def leads_out(path: str, base: str) -> bool:
  """Returns whether `path`, with all links resolved, is outside of the folder `base`, which has no links."""
  resolved = os.path.realpath(path)
  return resolved != base and not resolved.startswith(os.path.join(base, ''))


def check_inside(path: str, root: str, rules: Rules) -> None:
  """Raises UserError if `path`, below `root`, leads out of `root` by a link, and the rules do not allow this."""
  base = os.path.realpath(root)
  if not rules.follow_links and leads_out(path, base):
    raise UserError(f'{path}: expected a file or folder inside of {base}, got a link to {os.path.realpath(path)}. '
                    f'Copy it there, or {FOLLOW}.')


def is_below(path: str) -> bool:
  """Returns whether a path in a list file stays below the folder of the file, apart from links, and can exist.

  Such a path is relative and has no `..`, no null character and no name of more than 255 bytes.
  """
  parts = pathlib.PurePath(path).parts
  if not parts or os.path.isabs(path) or '..' in parts or '\0' in path:
    return False
  return all(len(part.encode(errors='surrogatepass')) <= _MAX_NAME_BYTES for part in parts)


def read_image(path: str | os.PathLike[str], max_bytes: int = MAX_IMAGE_MIB * 2**20) -> bytes:
  """Returns the content of an image file.

  Raises BadImage if the file is larger than `max_bytes`, and OSError if the file cannot be read.
  """
  try:
    return documents.read_bytes(path, max_bytes)
  except documents.TooLarge as error:
    raise BadImage(f'the file has {error.found}: expected at most {max_bytes:,}. Shrink the image, or in a '
                   'config raise data.max_file_mib') from None


def read_lines(path: str | os.PathLike[str], subject: str, *, expected: str = 'a text file',
               advice: str = 'Check the path.') -> Iterator[str]:
  """Yields the lines of a label file including line ends, without reading the complete file into memory.

  The arguments and errors are those of `documents.read_text`, with three differences: a `~` stays as it is, the file
  may have `MAX_LABELS_BYTES`, and a failing storage is not read again.
  """
  with documents.explained(path, subject, max_bytes=MAX_LABELS_BYTES, expected=expected, advice=advice):
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
      raise UserError(f'{subject}: expected {expected}, got something that is not a file. {advice}')
    if status.st_size > MAX_LABELS_BYTES:
      raise documents.TooLarge(path, status.st_size, MAX_LABELS_BYTES)
    try:
      with open(path, encoding='utf-8-sig', newline='') as file:
        yield from file
    except UnicodeDecodeError:  # has the position in a block; decoding the complete file has the position in the file
      documents.read_bytes(path, MAX_LABELS_BYTES).decode('utf-8-sig')
      raise


def split_lines(text: str) -> list[str]:
  """Returns the lines of a text as editors count them; a line may contain other separators, such as U+2028."""
  return [line.rstrip('\n') for line in io.StringIO(text, newline=None)]


def sha256(path: str | os.PathLike[str]) -> str:
  """Returns the SHA-256 of a file, in hexadecimal digits."""
  with open(path, 'rb', buffering=0, opener=documents.open_regular) as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


class Folder(NamedTuple):
  """A folder that `Finder.walk` is reading.

  path: path relative to the root, with forward slashes.
  time_ns: modification time of the folder.
  files: name and size in bytes of each image file; they can be read until the next folder is taken.
  """
  path: str
  time_ns: int
  files: Iterator[tuple[bytes, int]]


class Finder:
  """Finds image files in and below a folder, in no particular order; counts other files by extension in `ignored`.

  Hidden files are skipped and not counted. Circular links are not followed. Links that lead out of the folder are only
  followed if the rules allow this.
  """

  def __init__(self, rules: Rules = OWN) -> None:
    self.ignored: collections.Counter[str] = collections.Counter()
    self._rules, self._base = rules, ''  # the root of the walk, without links
    self._linked = set[tuple[int, int]]()  # device and inode of each folder that a link led to

  def find(self, root: str, prefix: str = '') -> Iterator[str]:
    """Yields the paths of the image files in and below `root/prefix`, relative to `root`. Raises as `walk` does."""
    for folder in self.walk(root, prefix):
      for name, _ in folder.files:
        yield f'{folder.path}/{os.fsdecode(name)}' if folder.path else os.fsdecode(name)

  def walk(self, root: str, prefix: str = '') -> Iterator[Folder]:
    """Yields `root/prefix` and all folders below it, each folder before its subfolders.

    Raises UserError if `root/prefix` is outside of `root`, or if a folder cannot be read, even while `files` are read.
    """
    self._base, self._linked = os.path.realpath(root), set()
    start = os.path.join(root, prefix)
    check_inside(start, root, self._rules)
    # By the real path, and by the path as written, since a link may lead to a folder of either.
    above = [*pathlib.Path(os.path.realpath(start)).parents,
             *(pathlib.Path(root, parent) for parent in pathlib.PurePath(prefix).parents)]
    return self._walk(root, prefix, tuple((status.st_dev, status.st_ino) for status in map(_stat, above)))

  def _walk(self, root: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Folder]:
    """Yields `root/prefix` and all folders below it; `above` has device and inode of each folder around it."""
    folder = os.path.join(root, prefix) if prefix else root
    if prefix.count('/') >= _MAX_DEPTH:
      raise UserError(f'{root}: expected at most {_MAX_DEPTH} folders inside of one another, got more in '
                      f'{prefix[:80]}…. Move the images up.')
    status = _stat(folder)
    identity = status.st_dev, status.st_ino
    if identity in above:  # a link to a parent folder
      self.ignored[_BROKEN_LINK] += 1
      return
    if os.path.islink(folder):
      if identity in self._linked:  # nested links could lead to the same folder 2^n times
        self.ignored[_SECOND_LINK] += 1
        return
      self._linked.add(identity)
    subfolders: list[str] = []  # complete when all files are read
    files = self._scan(folder, subfolders)
    yield Folder(prefix, status.st_mtime_ns, files)
    collections.deque(files, maxlen=0)  # reads the files that the caller has not read
    for name in subfolders:
      yield from self._walk(root, f'{prefix}/{name}' if prefix else name, (*above, identity))

  def _scan(self, folder: str, subfolders: list[str]) -> Iterator[tuple[bytes, int]]:
    """Yields name and size of the image files of a folder; adds the other folders in it to `subfolders`."""
    try:
      with os.scandir(folder) as entries:
        for entry in entries:
          if entry.name.startswith('.'):
            continue
          if not self._rules.follow_links and entry.is_symlink() and leads_out(entry.path, self._base):
            self.ignored[_OUTSIDE_LINK] += 1
          elif is_folder(entry):
            subfolders.append(entry.name)
          else:
            size = self.measure_or_count(entry)
            if size is not None:
              yield os.fsencode(entry.name), size
    except OSError as error:
      raise failures.unreadable(error, folder) from error

  def measure_or_count(self, entry: os.DirEntry[str]) -> int | None:
    """Returns the size of an image file in bytes; counts any other file in `ignored` and returns None."""
    extension = os.path.splitext(entry.name)[1].lower()
    try:
      if entry.is_file() and (extension in EXTENSIONS or (self._rules.arrays and extension == ARRAY)):
        return entry.stat().st_size
      is_broken = entry.is_symlink() and not os.path.exists(entry.path)
    except OSError as error:
      if failures.is_temporary(error):  # the image may exist, so it is not ignored
        raise
      is_broken = True
    self.ignored[_BROKEN_LINK if is_broken else (extension or _NO_EXTENSION)] += 1
    return None


def _stat(folder: str | os.PathLike[str]) -> os.stat_result:
  try:
    return os.stat(folder)
  except OSError as error:
    raise failures.unreadable(error, os.fspath(folder)) from error


def is_folder(entry: os.DirEntry[str]) -> bool:
  """Returns whether an entry is a folder or a link to a folder; False for a link to itself."""
  try:
    return entry.is_dir()
  except OSError as error:
    if failures.is_temporary(error):  # the entry may be a folder, so it is not ignored
      raise
    return False


def images_in(folder: str) -> Iterator[str]:
  """Yields the names of the files in a folder with the extension of an image; does not read subfolders."""
  finder = Finder()
  with os.scandir(folder) as entries:
    for entry in entries:
      if not entry.name.startswith('.') and finder.measure_or_count(entry) is not None:
        yield entry.name


def describe_ignored(ignored: Mapping[str, int]) -> str:
  """Returns a text such as `12 files: .heic (10), .txt (2)`, with advice about ignored images; '' without files."""
  if not ignored:
    return ''
  counts = sorted(ignored.items(), key=lambda item: (-item[1], item[0]))
  kinds = [f'{documents.shown(name)} ({count:,})' for name, count in counts]
  num_files, num_unnamed = sum(ignored.values()), len(kinds) - _MAX_NAMED_KINDS
  text = f'{num_files:,} file{"s" * (num_files > 1)}: {", ".join(kinds[:_MAX_NAMED_KINDS])}'
  if num_unnamed > 0:
    text += f' and {num_unnamed} more kind{"s" * (num_unnamed > 1)}'
  if unread := [name for name in UNREAD if name in ignored]:
    text += (f'. {" ".join(unread)} images are not supported. Convert them to JPEG, for example with ImageMagick: '
             f"magick mogrify -format jpg '*{unread[0]}'")
  if _OUTSIDE_LINK in ignored:
    text += f'. Links out of the folder are not read; {FOLLOW} to read them'
  return text


def report_ignored(ignored: Mapping[str, int], where: str) -> None:
  """Logs the ignored files below a folder, if there are any."""
  if ignored:
    log.warning('%s: ignored %s', where, describe_ignored(ignored))
