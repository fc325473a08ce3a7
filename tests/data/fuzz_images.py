"""Mutated image files, each decoded to `[H, W, 3]` uint8 or refused with a reason, under a limit of memory.

`python -m tests.data.fuzz_images NUM SEED` prints a line of JSON: how many were decoded and refused, by format, the
slowest decoding, and the most memory in MiB. The limit, 2 GiB above what the program takes before, is the kernel's: a
decoder that asks for more fails, and with it the test.
"""
from __future__ import annotations

import collections
import io
import json
import resource
import struct
import sys
import time

import numpy as np
from PIL import Image

from tests import fuzzing
from vit_jax.config.schema import Interpolation, Recipe
from vit_jax.data.image import decode, geometry, headers
from vit_jax.data.image.headers import BadImage, DecodeOptions

SLOWEST_S = 20.
NUMBERS = (0, 1, 2**15, 30_000, 2**24, 2**31 - 1, 2**32 - 1)


def originals() -> dict[str, bytes]:
  """Files of every format and of many kinds, by name; the format is the part before the blank."""
  rng = np.random.default_rng(0)
  image = np.asarray(Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).resize((80, 60)))
  colors, deep = Image.fromarray(image), Image.fromarray(image[..., 0].astype(np.uint16) * 257)
  exif = Image.Exif()
  exif[headers.ORIENTATION], exif[271] = 6, 'maker'
  alpha = colors.copy()
  alpha.putalpha(128)
  kinds = {
      'JPEG plain': (colors, {}), 'JPEG progressive': (colors, {'progressive': True}), 'JPEG EXIF': (colors, {
          'exif': exif}), 'JPEG CMYK': (colors.convert('CMYK'), {}), 'JPEG gray': (colors.convert('L'), {}),
      'PNG plain': (colors, {}), 'PNG 16 bit': (deep, {}), 'PNG palette': (colors.convert('P'), {'transparency': 3}),
      'PNG alpha': (alpha, {'exif': exif}), 'PNG 1 bit': (colors.convert('1'), {}),
      'WEBP lossy': (colors, {'exif': exif}), 'WEBP lossless': (alpha, {'lossless': True}),
      'BMP plain': (colors, {}), 'BMP palette': (colors.convert('P'), {}), 'BMP 1 bit': (colors.convert('1'), {}),
      'GIF plain': (colors.convert('P'), {}), 'GIF animated': (colors.convert('P'), {
          'save_all': True, 'append_images': [colors.rotate(9).convert('P')]}),
      'TIFF plain': (colors, {'exif': exif}), 'TIFF deflate': (colors, {'compression': 'tiff_deflate'}),
      'TIFF LZW': (deep, {'compression': 'tiff_lzw'}), 'TIFF JPEG': (colors, {'compression': 'jpeg'}),
      'TIFF CMYK': (colors.convert('CMYK'), {}), 'AVIF plain': (colors, {}), 'JPEG2000 plain': (colors, {}),
      'PPM plain': (colors, {})}
  found = {}
  for name, (one, options) in kinds.items():
    out = io.BytesIO()
    one.save(out, name.split()[0], **options)
    found[name] = out.getvalue()
  return found


def mutate(encoded: bytes, rng: np.random.Generator) -> bytes:
  """A file with one to four changes: bits, bytes, runs, cuts, and numbers that are large, mostly near the beginning."""
  content = bytearray(encoded)
  for _ in range(int(rng.integers(1, 5))):
    reach = len(content) if rng.random() < .4 else min(len(content), 120)
    place = int(rng.integers(0, max(1, reach)))
    match int(rng.integers(0, 7)):
      case 0:
        content[place:place + 1] = bytes([content[place] ^ 1 << int(rng.integers(8))]) if content else b''
      case 1:
        content[place:place + 1] = rng.bytes(1)
      case 2:
        content[place:place + 4] = struct.pack('>I', int(rng.choice(NUMBERS)))
      case 3:
        content[place:place + 4] = struct.pack('<I', int(rng.choice(NUMBERS)))
      case 4:
        content[place:place + int(rng.integers(1, 40))] = b''
      case 5:
        content[place:place] = content[place:place + int(rng.integers(1, 200))]
      case _:
        content = content[:max(1, int(rng.integers(1, len(content) + 1)))] if rng.random() < .3 else content
  return right_checksums(bytes(content)) if rng.random() < .5 else bytes(content)


def right_checksums(content: bytes) -> bytes:
  """A PNG file with the checksums that its chunks should have, so that damage reaches the decoder."""
  import zlib
  place, fixed = 8, bytearray(content)
  while content.startswith(b'\x89PNG') and place + 12 <= len(content):
    end = place + 8 + int.from_bytes(content[place:place + 4], 'big')
    if end + 4 > len(content):
      break
    fixed[end:end + 4] = struct.pack('>I', zlib.crc32(content[place + 4:end]))
    place = end + 4
  return bytes(fixed)


def run(num: int, seed: int) -> dict[str, object]:
  """Decodes `num` mutated files; raises on anything but an image or a refusal with a reason."""
  rng, files = np.random.default_rng(seed), originals()
  decoded: collections.Counter[str] = collections.Counter()
  refused: collections.Counter[str] = collections.Counter()
  slowest_s, names = 0., sorted(files)
  for number in range(num):
    name = names[number % len(names)]
    encoded, began_s = mutate(files[name], rng), time.monotonic()
    how = DecodeOptions(upright=number % 2 == 0)
    try:
      image = decode.decode(encoded, how)
      assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3 and image.size, (number, image.shape)
      recipe = Recipe(eval_resize_px=256, antialias=number % 3 == 0, interpolation=list(Interpolation)[number % 2])
      crop, _ = geometry.fit(image, recipe=recipe, image_px=(224, 224))
      assert crop.shape == (224, 224, 3)
      decoded[name.split()[0]] += 1
    except BadImage as error:
      assert str(error).strip(), number
      refused[name.split()[0]] += 1
    slowest_s = max(slowest_s, time.monotonic() - began_s)
    assert slowest_s < SLOWEST_S, f'number {number}, {name}, took {slowest_s:.1f} s'
  most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
  return {'decoded': decoded, 'refused': refused, 'slowest_s': round(slowest_s, 2), 'most_mib': most_mib}


def main(arguments: list[str]) -> None:
  num, seed = map(int, arguments)
  run(5, seed)  # what is imported late
  fuzzing.limit_memory()
  print(json.dumps(run(num, seed)))


if __name__ == '__main__':
  main(sys.argv[1:])
