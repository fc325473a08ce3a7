"""Whether a source has the same data as before, which its `digest` alone does not show.

The `digest` of a source is its identity at a glance: names, numbers, sizes, labels and the checksums that a format has.
A resumed run is refused if it changes. An image that was replaced by another one of the same size does not change it:

- `Content` is computed from every byte of every image, and shows what has changed. `replay` calls `read`, and
  `differences` with the content in the record.
- `Written` is computed from the sizes and times of files. A run calls `describe_files` when it starts, and
  `changed_files` when it resumes. As copies of the data may have other times, too, a change is a warning.
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
LOGGED_EXAMPLES = 10_000
MOST_CHECKED = 1_000
"""Images whose files are compared; those of a folder are evenly spaced over it."""
_DIGITS = 4  # hexadecimal digits of each class
_SHOWN = 5  # files in a message
log = logging.getLogger('vit_jax.data')


class Content(NamedTuple):
  """Digests of a source; they do not depend on where its files are or how they are packed.

  examples: their number.
  images: of the stored bytes of all images, in any order.
  labels: of each image with its classes by name, or with its mask, in any order; and of the names of the classes.
  order: of the images in their order, in which training draws them.
  classes: four hexadecimal digits for the images of each class, in the order of the classes.
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
  images, labels, by_class = 0, _number(repr(names).encode()), [0] * len(names)  # sums do not depend on the order
  for row in range(len(source)):
    try:
      record = failures.retried(lambda: read_one(source, row), lambda: f'reading {source.describe(row)}')  # noqa: B023
    except (BadImage, OSError) as error:
      raise reading_error(error, source, row, expected='an image') from error
    stored = record.image
    image = hashlib.sha256(stored if isinstance(stored, bytes) else
                           repr(stored.shape).encode() + stored.tobytes()).digest()
    order.update(image)
    images += _number(image)
    labels += _number(image + repr([names[label] for label in record.labels]).encode() + (record.mask or b''))
    for label in record.labels:
      by_class[label] += _number(image)
  return Content(len(source), _hexadecimal(images), _hexadecimal(labels), order.hexdigest(), ' '.join(
      _hexadecimal(images)[:_DIGITS] for images in by_class) if len(names) <= MOST_CLASSES else '')


def _number(content: bytes) -> int:
  return int.from_bytes(hashlib.sha256(content).digest(), 'big')


def _hexadecimal(total: int) -> str:
  """Returns a sum of SHA-256 digests modulo 2^256, in hexadecimal digits."""
  return f'{total % 2**256:064x}'


def differences(before: Content, now: Content, class_names: tuple[str, ...]) -> list[str]:
  """Returns what differs, in words; [] if nothing does.

  Args:
    before, now: of the two sources.
    class_names: of `now`.
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
  """Returns which classes have other images, for a message; '' if the record does not say it."""
  pairs = list(zip(before.classes.split(), now.classes.split(), names, strict=False))
  changed = [name for old, new, name in pairs if old != new]
  if not changed or len(before.classes.split()) != len(names):
    return ''
  return f', in class{"es" * (len(changed) > 1)} {documents.listed(changed, 4)}'


class Written(NamedTuple):
  """The files of a source: the digest of their sizes and times, and the time of the newest one."""
  digest: str
  newest_ns: int


def file_paths(source: Source) -> list[str]:
  """Returns the local files with evenly spaced images of a source; [] if its images are in no files."""
  paths: dict[str, None] = {}
  rows = np.unique(np.linspace(0, len(source) - 1, MOST_CHECKED).astype(np.int64))
  for row in rows.tolist() if len(source) else ():
    stored, stored_row = find_origin(source, row)
    path: Callable[[int], str] | None = getattr(stored, 'path', None)
    if path is not None:
      paths[path(stored_row)] = None
  return [path for path in paths if not storage.is_address(path)]


def describe_files(source: Source) -> Written:
  """Returns when the files of a source were written."""
  stamps = list(_stamps(source))
  text = repr([stamp for _, stamp in stamps])
  return Written(hashlib.sha256(text.encode()).hexdigest()[:32], max((time for _, (_, time) in stamps), default=0))


def _stamps(source: Source) -> Iterator[tuple[str, tuple[int, int]]]:
  """Yields path, size and time of the files; those that are gone are reported when they are read."""
  for path in file_paths(source):
    if os.path.exists(path):
      size, time_ns, *_ = storage.stamps([path])[0]
      yield path, (int(str(size)), int(str(time_ns)))


def changed_files(saved: Mapping[str, Any], sources: Mapping[str, Source]) -> list[str]:
  """Returns a line for each source whose files were written, or copied, since they were described in `saved`."""
  lines = []
  for name, source in sources.items():
    if name not in saved or list(describe_files(source)) == saved[name]:
      continue
    newer = [os.path.basename(path) for path, (_, time_ns) in _stamps(source) if time_ns > saved[name][1]]
    what = (f'newer files, {len(newer):,}: {documents.listed(newer, _SHOWN)}' if newer else
            'files with other sizes or times, such as copies')
    lines.append(f'  {name} ({source.name}): {what}')
  return lines
