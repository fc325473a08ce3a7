"""Whether a source has the same data as before, which its `digest` alone does not show.

The `digest` of a source is quick to compute: from names, numbers, sizes, labels and the checksums that a format has. A
run does not resume if it has changed. But it stays the same if an image is replaced by another one of the same size.
This module has two further comparisons:

- `Content` is computed from every byte of every image, and shows what has changed. `replay` calls `read`, and then
  `differences` with the content that the record of the run has.
- `Written` is computed from the sizes and times of files. A run calls `describe_files` when it starts, and
  `changed_files` when it resumes. A change is only a warning, as mere copies of the data may have other times.
"""
from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.core import documents, failures
from vit_jax.data import storage
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Source, find_origin, read_one, reading_error

MOST_CLASSES = 1_000
"""`Content.classes` is empty above this number of classes, so that a record of it stays small."""
LOGGED_EXAMPLES = 10_000  # from here on, `read` logs that it starts, as it takes long
MOST_CHECKED = 1_000
"""The largest number of images whose files are compared; they are evenly spaced over the source."""
_CLASS_DIGITS = 4  # hexadecimal digits for each class in `Content.classes`
_MOST_NEWER = 5  # files in a message
log = logging.getLogger('vit_jax.data')


class Content(NamedTuple):
  """SHA-256 digests of a source, in hexadecimal digits; they do not depend on the paths or the format of its files.

  examples: the number of examples.
  images: digest of the stored bytes of all images, whatever their order.
  labels: digest of the class names, and of each image with the names of its classes and its mask, whatever their order.
  order: digest of the images in the order of the source.
  classes: for each class the first four digits of the digest of its images, separated by spaces.
  """
  examples: int
  images: str
  labels: str
  order: str
  classes: str


def read(source: Source) -> Content:
  """Reads every image of a source and returns its digests, in constant memory.

  Raises:
    UserError: an image is damaged or cannot be read.
  """
  if len(source) >= LOGGED_EXAMPLES:
    log.info('Reading %s images of %s, to compare their content.', f'{len(source):,}', source.name)
  names, order = source.class_names, hashlib.sha256()
  # Sums of the digests of single images do not depend on the order of the images.
  images, labels, by_class = 0, _number(repr(names).encode()), [0] * len(names)
  for row in range(len(source)):
    try:
      record = failures.retried(lambda: read_one(source, row), lambda: f'reading {source.describe(row)}')  # noqa: B023
    except (BadImage, OSError) as error:
      raise reading_error(error, source, row, expected='an image') from error
    stored = record.image
    content = stored if isinstance(stored, bytes) else repr(stored.shape).encode() + stored.tobytes()
    image_digest = hashlib.sha256(content).digest()
    order.update(image_digest)
    images += _number(image_digest)
    labels += _number(image_digest + repr([names[label] for label in record.labels]).encode() + (record.mask or b''))
    for label in record.labels:
      by_class[label] += _number(image_digest)
  classes = ''
  if len(names) <= MOST_CLASSES:
    classes = ' '.join(_hexadecimal(total)[:_CLASS_DIGITS] for total in by_class)
  return Content(len(source), _hexadecimal(images), _hexadecimal(labels), order.hexdigest(), classes)


def _number(content: bytes) -> int:
  """Returns the SHA-256 digest as an integer, for sums."""
  return int.from_bytes(hashlib.sha256(content).digest(), 'big')


def _hexadecimal(total: int) -> str:
  """Returns a sum of SHA-256 digests modulo 2^256, in hexadecimal digits."""
  return f'{total % 2**256:064x}'


def differences(before: Content, now: Content, class_names: tuple[str, ...]) -> list[str]:
  """Returns what differs, in words for a message; [] if nothing does.

  Args:
    before, now: content of the source when it was recorded, and at present.
    class_names: the present ones.
  """
  if before == now:
    return []
  lines = []
  if before.examples != now.examples:
    lines.append(f'{now.examples:,} images in place of {before.examples:,}')
  where = _changed_classes(before, now, class_names)
  if before.images != now.images:
    lines.append(f'other images{where}')
  elif before.labels != now.labels:
    lines.append(f'the same images with other labels{where}')
  elif before.order != now.order:
    lines.append('the same images and labels in another order')
  return lines or ['other digests of the classes; the record itself was changed']


def _changed_classes(before: Content, now: Content, names: tuple[str, ...]) -> str:
  """Returns the end of a message: which classes have other images; '' if the record has no digests of these classes."""
  pairs = list(zip(before.classes.split(), now.classes.split(), names, strict=False))
  changed = [name for old, new, name in pairs if old != new]
  if not changed or len(before.classes.split()) != len(names):
    return ''
  return f', in class{"es" * (len(changed) > 1)} {documents.listed(changed, 4)}'


class Written(NamedTuple):
  """The digest of the sizes and modification times of a source's files, and the time of the newest one (0 without)."""
  digest: str
  newest_ns: int


def file_paths(source: Source) -> list[str]:
  """Returns the paths of the local files of up to `MOST_CHECKED` evenly spaced images of a source, each once."""
  paths: dict[str, None] = {}  # a set that keeps the order
  rows = np.unique(np.linspace(0, len(source) - 1, MOST_CHECKED).astype(np.int64))
  for row in rows.tolist() if len(source) else ():
    stored, stored_row = find_origin(source, row)
    find_path: Callable[[int], str] | None = getattr(stored, 'path', None)
    if find_path is not None:  # None for images that are in no files
      paths[find_path(stored_row)] = None
  return [path for path in paths if not storage.is_address(path)]


def describe_files(source: Source) -> Written:
  """Returns the sizes and times of the files of a source, for `changed_files`."""
  stamps = list(_stamps(source))
  text = repr([stamp for _, stamp in stamps])
  return Written(hashlib.sha256(text.encode()).hexdigest()[:32], max((time for _, (_, time) in stamps), default=0))


def _stamps(source: Source) -> Iterator[tuple[str, tuple[int, int]]]:
  """Yields path, size in bytes and time in ns of each file; missing files are left out, as reading reports them."""
  for path in file_paths(source):
    if os.path.exists(path):
      size, time_ns, *_ = storage.stamps([path])[0]
      yield path, (int(str(size)), int(str(time_ns)))


def changed_files(saved: Mapping[str, Any], sources: Mapping[str, Source]) -> list[str]:
  """Returns a line for each source whose files were written, or copied, since the run started.

  `saved` has `Written` as a list of JSON by the keys of `sources`, such as `train`.
  """
  lines = []
  for name, source in sources.items():
    if name not in saved or list(describe_files(source)) == saved[name]:
      continue
    newer = [os.path.basename(path) for path, (_, time_ns) in _stamps(source) if time_ns > saved[name][1]]
    what = (f'newer files, {len(newer):,}: {documents.listed(newer, _MOST_NEWER)}' if newer else
            'files with other sizes or times, such as copies')
    lines.append(f'  {name} ({source.name}): {what}')
  return lines
