"""The same images in files of every format that a source reads, written without the program."""
from __future__ import annotations

import io
import json
import pathlib
import struct
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import google_crc32c

from tests.data.images import encode, random_image

NAMES = ('ant', 'bee', 'cow')


class Example(NamedTuple):
  """An image file with its class."""
  key: str
  image: bytes
  label: int


def examples(num: int, *, first: int = 0) -> list[Example]:
  """Images of all classes, in an order that is not that of the classes."""
  return [Example(f'{i:06d}', encode(random_image(i)), i * 5 % 7 % len(NAMES)) for i in range(first, first + num)]


def members(found: Iterable[Example], names: Sequence[str] = NAMES) -> list[tuple[str, bytes]]:
  """The members of an archive of these examples, with labels as a number, by name, and as a list, and a caption."""
  made = []
  for key, image, label in found:
    content = {'label': names[label], 'both': [names[label], names[0]], 'deep': {'er': label}}
    made += [(f'{key}.cls', str(label).encode()), (f'{key}.json', json.dumps(content).encode()),
             (f'{key}.{extension(image)}', image), (f'{key}.txt', f'an image of {names[label]}, é'.encode())]
  return made


def extension(image: bytes) -> str:
  return 'jpg' if image.startswith(b'\xff\xd8') else 'png'


def renamed(archive: bytes, name_of: Callable[[str], str]) -> bytes:
  """An archive with other names of its members."""
  with tarfile.open(fileobj=io.BytesIO(archive)) as stored:
    return tar([(name_of(one.name), stored.extractfile(one).read()) for one in stored])  # type: ignore[union-attr]


def tar(found: Sequence[tuple[str, bytes]], kind: int = tarfile.USTAR_FORMAT, links: Mapping[str, bytes] = {},
        ) -> bytes:
  """An archive of these members, and of links (their type by name) at its end."""
  made = io.BytesIO()
  with tarfile.open(fileobj=made, mode='w', format=kind) as archive:
    for name, content in found:
      info = tarfile.TarInfo(name)
      info.size = len(content)
      archive.addfile(info, io.BytesIO(content))
    for name, link in links.items():
      info = tarfile.TarInfo(name)
      info.type, info.linkname = link, found[0][0]
      archive.addfile(info)
  return made.getvalue()


def write_tars(folder: pathlib.Path, split: str, found: Sequence[Example], num: int = 3,
               names: Sequence[str] = NAMES, *, texts: Mapping[int, bytes] | None = None) -> None:
  """Writes so many archives, with about as many examples each; `texts` are the captions of some, by their number."""
  changed = {f'{found[i].key}.txt': content for i, content in (texts or {}).items()}
  folder.mkdir(parents=True, exist_ok=True)
  for number in range(num):
    own = found[number * len(found) // num:(number + 1) * len(found) // num]
    content = [(name, changed.get(name, content)) for name, content in members(own, names)]
    (folder / f'set-{split}-{number:03d}.tar').write_bytes(tar(content))


def varint(number: int) -> bytes:
  """A number as protobuf stores it: seven bits in each byte, the last ones first; negative ones in 64 bits."""
  number, found = number % 2**64, bytearray()
  while number > 127:
    found.append(number & 127 | 128)
    number >>= 7
  return bytes([*found, number])


def field(content: bytes, number: int = 1) -> bytes:
  """A field of a message that has a length."""
  return varint(number << 3 | 2) + varint(len(content)) + content


def tf_example(features: Mapping[str, object]) -> bytes:
  """A `tf.train.Example`: bytes, texts, numbers, or lists of one of them by name."""
  entries = []
  for name, value in features.items():
    values = value if isinstance(value, list) else [value]
    if values and isinstance(values[0], float):
      content = field(field(struct.pack(f'<{len(values)}f', *values)), 2)
    elif values and isinstance(values[0], int):
      content = field(field(b''.join(map(varint, values))), 3)
    else:
      content = field(b''.join(field(v.encode() if isinstance(v, str) else v) for v in values), 1)
    entries.append(field(field(name.encode()) + field(content, 2)))
  return field(b''.join(entries))


def tfrecord(found: Iterable[bytes]) -> bytes:
  """A TFRecord file of these records."""
  def masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack('<I', ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
  return b''.join(head + masked(head) + one + masked(one) for one in found
                  for head in (struct.pack('<Q', len(one)),))


def imagenet_features(example: Example, names: Sequence[str] = NAMES) -> dict[str, object]:
  """What the usual records of ImageNet have of an image; their classes begin at 1."""
  return {'image/height': 8, 'image/width': 7, 'image/colorspace': 'RGB', 'image/channels': 3,
          'image/class/label': example.label + 1, 'image/class/synset': f'n0000000{example.label}',
          'image/class/text': names[example.label], 'image/object/bbox/xmin': [.25, .5], 'image/format': 'PNG',
          'image/object/bbox/label': [], 'image/filename': f'{example.key}.{extension(example.image)}',
          'image/encoded': example.image}


def write_tfrecords(folder: pathlib.Path, split: str, found: Sequence[Example], num: int = 3,
                    names: Sequence[str] = NAMES) -> None:
  """Writes so many TFRecord files, with about as many examples each, with the features of ImageNet."""
  folder.mkdir(parents=True, exist_ok=True)
  for number in range(num):
    own = found[number * len(found) // num:(number + 1) * len(found) // num]
    (folder / f'{split}-{number:05d}-of-{num:05d}').write_bytes(
        tfrecord(tf_example(imagenet_features(one, names)) for one in own))
