"""The same images in files of every format that a source reads, written without the program."""
from __future__ import annotations

import io
import json
import pathlib
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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


def members(found: Iterable[Example]) -> list[tuple[str, bytes]]:
  """The members of an archive of these examples, with labels as a number, by name, and as a list, and a caption."""
  made = []
  for key, image, label in found:
    content = {'label': NAMES[label], 'both': [NAMES[label], NAMES[0]], 'deep': {'er': label}}
    made += [(f'{key}.cls', str(label).encode()), (f'{key}.json', json.dumps(content).encode()), (f'{key}.png', image),
             (f'{key}.txt', f'an image of {NAMES[label]}, é'.encode())]
  return made


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


def write_tars(folder: pathlib.Path, split: str, found: Sequence[Example], num: int = 3) -> None:
  """Writes so many archives, with about as many examples each."""
  folder.mkdir(parents=True, exist_ok=True)
  for number in range(num):
    own = found[number * len(found) // num:(number + 1) * len(found) // num]
    (folder / f'set-{split}-{number:03d}.tar').write_bytes(tar(members(own)))
