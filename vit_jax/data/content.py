"""Compares the data of a source with the data of an earlier time, more closely than by the `digest` of the source.

The `digest` of a source is quick to compute: from names, numbers, sizes, labels and the checksums that a format has. A
run does not resume if the digest has changed. But the digest stays the same if an image is replaced by another image of
the same size. This module has two further comparisons:

- `Content` is computed from every byte of every image, and shows what has changed. `replay` calls `read`, and then
  `differences` with the content that the record of the run has.
- `Written` is computed from the sizes and times of files. A run calls `describe_files` when it starts, and
  `changed_files` when it resumes. A change only causes a warning, because a mere copy of the data may have other times.
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

MAX_CLASSES = 1_000
"""With more classes than this, `Content.classes` is empty, so that the record of a run stays small."""
MIN_LOGGED_EXAMPLES = 10_000  # with so many examples or more, `read` takes long and logs that it starts
MAX_CHECKED = 1_000
"""The largest number of images whose files are compared; these images are evenly spaced over the source."""
_NUM_CLASS_DIGITS = 4  # hexadecimal digits for each class in `Content.classes`
_MAX_NAMED_FILES = 5  # names of newer files in a message
log = logging.getLogger('vit_jax.data')


class Content(NamedTuple):
  """SHA-256 digests of a source, in hexadecimal digits; independent of the paths and the format of the files.

  examples: the number of examples.
  images: digest of the stored bytes of all images; independent of the order of the images.
  labels: digest of the class names, and of each image with its class names and its mask; independent of the order.
  order: digest of the images in the order of the source.
  classes: for each class the first four digits of the digest of the images of the class, separated by spaces.
  """
  examples: int
  images: str
  labels: str
  order: str
  classes: str


def read(source: Source) -> Content:
  """Reads every image of a source and returns its digests, in constant memory.

  Raises UserError if an image is damaged or cannot be read.
  """
  if len(source) >= MIN_LOGGED_EXAMPLES:
    log.info('Reading %s images of %s, to compare their content.', f'{len(source):,}', source.name)
  class_names, order = source.class_names, hashlib.sha256()
  # A sum of the digests of single images does not depend on the order of the images.
  images_sum, class_sums = 0, [0] * len(class_names)
  labels_sum = _digest_number(repr(class_names).encode())
  for row in range(len(source)):
    try:
      record = failures.retried(lambda: read_one(source, row), lambda: f'reading {source.describe(row)}')  # noqa: B023
    except (BadImage, OSError) as error:
      raise reading_error(error, source, row, expected='an image') from error
    stored = record.image
    content = stored if isinstance(stored, bytes) else repr(stored.shape).encode() + stored.tobytes()
    image_digest = hashlib.sha256(content).digest()
    order.update(image_digest)
    images_sum += _digest_number(image_digest)
    names = [class_names[label] for label in record.labels]
    labels_sum += _digest_number(image_digest + repr(names).encode() + (record.mask or b''))
    for label in record.labels:
      class_sums[label] += _digest_number(image_digest)
  classes = ''
  if len(class_names) <= MAX_CLASSES:
    classes = ' '.join(_hexadecimal(class_sum)[:_NUM_CLASS_DIGITS] for class_sum in class_sums)
  return Content(len(source), _hexadecimal(images_sum), _hexadecimal(labels_sum), order.hexdigest(), classes)


def _digest_number(content: bytes) -> int:
  """Returns the SHA-256 digest of bytes as an integer."""
  return int.from_bytes(hashlib.sha256(content).digest(), 'big')


def _hexadecimal(total: int) -> str:
  """Returns a sum of SHA-256 digests modulo 2^256, in hexadecimal digits."""
  return f'{total % 2**256:064x}'


def differences(before: Content, now: Content, class_names: tuple[str, ...]) -> list[str]:
  """Returns the differences, each as a phrase for a message; [] if the contents are equal.

  Args:
    before, now: the recorded content of the source, and the present content.
    class_names: the present class names of the source.
  """
  if before == now:
    return []
  lines = []
  if before.examples != now.examples:
    lines.append(f'{now.examples:,} images in place of {before.examples:,}')
  in_classes = _describe_changed_classes(before, now, class_names)
  if before.images != now.images:
    lines.append(f'other images{in_classes}')
  elif before.labels != now.labels:
    lines.append(f'the same images with other labels{in_classes}')
  elif before.order != now.order:
    lines.append('the same images and labels in another order')
  return lines or ['other digests of the classes; the record itself was changed']


def _describe_changed_classes(before: Content, now: Content, names: tuple[str, ...]) -> str:
  """Returns the end of a message with the classes whose images differ; '' if the record does not show these classes."""
  digests_before, digests_now = before.classes.split(), now.classes.split()
  changed = [name for old, new, name in zip(digests_before, digests_now, names, strict=False) if old != new]
  if len(digests_before) != len(names) or not changed:
    return ''
  return f', in class{"es" * (len(changed) > 1)} {documents.listed(changed, 4)}'


class Written(NamedTuple):
  """The digest of the sizes and modification times of a source's files, and the newest time (0 = no files)."""
  digest: str
  newest_ns: int


def file_paths(source: Source) -> list[str]:
  """Returns the paths of the local files of up to `MAX_CHECKED` evenly spaced images of a source, each once."""
  if not len(source):
    return []
  paths: dict[str, None] = {}  # a set that keeps the order
  for row in np.unique(np.linspace(0, len(source) - 1, MAX_CHECKED).astype(np.int64)).tolist():
    stored, stored_row = find_origin(source, row)
    find_path: Callable[[int], str] | None = getattr(stored, 'path', None)
    if find_path is not None:  # the source stores images in files
      paths[find_path(stored_row)] = None
  return [path for path in paths if not storage.is_address(path)]


def describe_files(source: Source) -> Written:
  """Returns the sizes and times of the files of a source, for `changed_files`."""
  stamps = [stamp for _, stamp in _stamps(source)]
  digest = hashlib.sha256(repr(stamps).encode()).hexdigest()[:32]
  return Written(digest, max((time_ns for _, time_ns in stamps), default=0))


def _stamps(source: Source) -> Iterator[tuple[str, tuple[int, int]]]:
  """Yields the path of each file with (size in bytes, modification time in ns); skips files that are missing."""
  for path in file_paths(source):
    if os.path.exists(path):
      size, time_ns, *_ = storage.stamps([path])[0]
      yield path, (int(str(size)), int(str(time_ns)))


def changed_files(saved: Mapping[str, Any], sources: Mapping[str, Source]) -> list[str]:
  """Returns a line for each source whose files were written, or copied, since the run started.

  `saved` and `sources` have the same keys, such as `train`. The values of `saved` are `Written` as lists from JSON.
  """
  lines = []
  for name, source in sources.items():
    if name not in saved or list(describe_files(source)) == saved[name]:
      continue
    newer = [os.path.basename(path) for path, (_, time_ns) in _stamps(source) if time_ns > saved[name][1]]
    change = (f'newer files, {len(newer):,}: {documents.listed(newer, _MAX_NAMED_FILES)}' if newer else
              'files with other sizes or times, such as copies')
    lines.append(f'  {name} ({source.name}): {change}')
  return lines
