"""Images with other channels than RGB: what is read of a file, how it is resized, and what is refused."""
from __future__ import annotations

import collections
import io
import itertools
import pathlib

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax.config import schema
from vit_jax.config.schema import Geometry, Interpolation
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray, Shard
from vit_jax.data import loader, opening
from vit_jax.data.device.prepare import normalize
from vit_jax.data.image import channels, decode, geometry, resample
from vit_jax.data.image import transform as transforms
from vit_jax.data.image.decode import Window
from vit_jax.data.image.headers import AS_STORED, BadImage, DecodeOptions
from vit_jax.data.source import Record, take

RNG = np.random.default_rng(0)
BANDS = RNG.integers(0, 65_536, (20, 30, 5), np.uint16)
MEAN = tuple(float(x) for x in range(1, 6))


def npy(array: HostArray) -> bytes:
  out = io.BytesIO()
  np.save(out, array)
  return out.getvalue()


def pillow(array: HostArray, kind: str, **options: object) -> bytes:
  out = io.BytesIO()
  Image.fromarray(array).save(out, kind, **options)
  return out.getvalue()


def tiff(array: HostArray, **options: object) -> bytes:
  out = io.BytesIO()
  pytest.importorskip('tifffile').imwrite(out, array, photometric='minisblack', **options)
  return out.getvalue()


def recipe(**fields: object) -> schema.Recipe:
  return schema.Recipe(**{'mean': MEAN, 'std': MEAN, **fields})  # type: ignore[arg-type]


def test_every_bit_of_every_channel_is_read() -> None:
  for file in (npy(BANDS), npy(np.moveaxis(BANDS, 2, 0)), npy(np.asfortranarray(BANDS)),
               npy(BANDS.astype('>u2')), npy(BANDS.astype(np.float64)), tiff(BANDS, planarconfig='contig'),
               tiff(np.moveaxis(BANDS, 2, 0)), tiff(np.moveaxis(BANDS, 2, 0), planarconfig='separate'),
               tiff(np.moveaxis(BANDS, 2, 0), compression='zlib')):
    found = channels.read(file, 5, AS_STORED)
    assert found.dtype == np.float32 and (found == BANDS).all()
  np.testing.assert_array_equal(channels.read(BANDS, 5, AS_STORED), BANDS)


def test_one_channel_is_read_from_every_format() -> None:
  gray, small = BANDS[..., 0], (BANDS[..., :1] >> 8).astype(np.uint8)
  for file in (npy(gray), npy(gray[..., None]), pillow(gray, 'PNG'), pillow(gray, 'TIFF'),
               pillow(gray, 'TIFF', compression='tiff_lzw'), pillow(gray, 'PPM')):
    np.testing.assert_array_equal(channels.read(file, 1, AS_STORED), gray[..., None])
  floats = RNG.standard_normal((20, 30)).astype(np.float32)
  np.testing.assert_array_equal(channels.read(pillow(floats, 'TIFF'), 1, AS_STORED)[..., 0], floats)
  np.testing.assert_array_equal(channels.read(pillow(small[..., 0], 'PNG'), 1, AS_STORED), small)
  assert channels.read(pillow(small[..., 0], 'JPEG'), 1, AS_STORED).shape == (20, 30, 1)
  rgba = RNG.integers(0, 256, (6, 7, 4), np.uint8)
  np.testing.assert_array_equal(channels.read(pillow(rgba, 'PNG'), 4, AS_STORED), rgba)


def rgb_files(image: HostArray) -> dict[str, bytes]:
  """An RGB image of 16 bits in every format that can have it."""
  write = pytest.importorskip('tifffile').imwrite

  def of_tiff(array: HostArray, **options: object) -> bytes:
    write(out := io.BytesIO(), array, photometric='rgb', **options)
    return out.getvalue()
  planes = np.moveaxis(image, 2, 0)
  return {'png': cv2.imencode('.png', image[..., ::-1])[1].tobytes(), 'tiff': of_tiff(image),
          'big endian': of_tiff(image, byteorder='>'), 'zlib': of_tiff(image, compression='zlib'),
          'zlib planes': of_tiff(planes, planarconfig='separate', compression='zlib'),
          'planes': of_tiff(planes, planarconfig='separate')}


def test_of_three_channels_of_16_bits_the_upper_8_are_read_or_the_file_is_refused() -> None:
  image = BANDS[..., :3]
  for name, file in rgb_files(image).items():
    if name == 'planes':
      with pytest.raises(BadImage, match='a TIFF of 3 planes with 16 bits: expected channels that are stored together'):
        decode.decode(file)
    else:
      np.testing.assert_array_equal(decode.decode(file), image >> 8, name)
  eight = io.BytesIO()
  pytest.importorskip('tifffile').imwrite(eight, np.moveaxis((image >> 8).astype(np.uint8), 2, 0), photometric='rgb',
                                          planarconfig='separate')
  np.testing.assert_array_equal(decode.decode(eight.getvalue()), image >> 8)


def test_training_with_three_channels_sees_images_of_16_bits_as_those_of_their_upper_8(tmp_path: pathlib.Path) -> None:
  for index in range(16):
    image = RNG.integers(0, 65_536, (12, 10, 3), np.uint16)
    files = {'deep': rgb_files(image)[('png', 'tiff')[index % 2]],
             'flat': cv2.imencode('.png', (image >> 8).astype(np.uint8)[..., ::-1])[1].tobytes()}
    for kind, file in files.items():
      extension = 'tif' if file == files['deep'] and index % 2 else 'png'
      path = tmp_path / kind / 'train' / f'class{index % 3}' / f'{index:02d}.{extension}'
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(file)
  found = []
  for kind in ('deep', 'flat'):
    source = opening.open_split(schema.Data(source=f'folder:{tmp_path}/{kind}'), 'train', image_px=(8, 8))
    in_order = take(source, sorted(range(16), key=lambda i: pathlib.Path(source.describe(i)).stem), name='images')
    made = loader.train_loader(in_order, recipe=schema.Recipe(flip=True), image_px=(8, 8), batch_size=8, seed=0,
                               shard=Shard((0,), 1), workers=0, threads=1, in_memory=False, max_bad_images=0)
    found.append([{k: np.array(v) for k, v in b.items()} for b in itertools.islice(made.batches(0), 4)])
    made.close()
  for one, other in zip(*found, strict=True):
    assert one['image'].dtype == np.uint8 and one.keys() == other.keys()
    for name in one:
      np.testing.assert_array_equal(one[name], other[name])


def lying(array: HostArray) -> bytes:
  """A .npy file whose header has 1,000 times as many rows."""
  content = npy(array)
  old = f'({array.shape[0]}, '.encode()
  return content.replace(old, old[:-2] + b'000, ', 1).replace(b'   \n', b'\n', 1)


@pytest.mark.parametrize(('file', 'said'), [
    (npy(BANDS[..., :3]), r'channels: expected 5 \(data.channels\), got pixels of the shape \(20, 30, 3\)'),
    (pillow(BANDS[..., :3].astype(np.uint8), 'PNG'), 'channels: expected 5'),
    (npy(BANDS)[:-9], 'not a complete .npy file: uint16'), (lying(BANDS), 'not a complete .npy file: uint16'),
    (npy(BANDS[None]), 'the .npy file: expected an array'), (npy(np.array([[{}]])), 'it holds Python objects'),
    (npy(np.full((4, 4, 5), np.nan)), 'pixels: expected finite numbers'),
    (npy(np.zeros((4, 4, 5), complex)), 'pixels: expected integers or floating-point'),
    (npy(np.zeros((0, 4, 5))), 'pixels: expected at least 1 x 1 px'), (b'\x93NUMPY\1\0', 'not a complete .npy file'),
    (b'II*\0damaged', 'not a complete TIFF image'), (b'', 'the file is empty'), (b'text', 'not an image')])
def test_other_files_are_bad_images(file: bytes, said: str) -> None:
  pytest.importorskip('tifffile')
  with pytest.raises(BadImage, match=said):
    channels.read(file, 5, AS_STORED)


def test_large_images_are_refused_before_memory_is_taken() -> None:
  few = DecodeOptions(max_pixels=599)
  for file in (npy(BANDS), tiff(np.moveaxis(BANDS, 2, 0))):
    with pytest.raises(BadImage, match='expected at most 599 pixels'):
      channels.read(file, 5, few)
  for kind in ('PNG', 'TIFF'):
    with pytest.raises(BadImage, match='expected at most 599 pixels'):
      channels.read(pillow(BANDS[..., 0], kind), 1, few)


@pytest.mark.filterwarnings('ignore::UserWarning')  # of Pillow, about tags of damaged files
def test_damaged_files_raise_nothing_but_bad_image() -> None:
  rng, ends = np.random.default_rng(1), collections.Counter[str]()
  for file in (npy(BANDS), tiff(np.moveaxis(BANDS, 2, 0)), pillow(BANDS[..., 0], 'TIFF'), pillow(BANDS[..., 0], 'PNG')):
    for _ in range(100):
      mutated = bytearray(file[:int(rng.integers(1, len(file) + 1))])
      for place in rng.integers(0, min(len(mutated), 200), 3):
        mutated[place] = rng.integers(256)
      for num in (1, 5):
        try:
          assert channels.read(bytes(mutated), num, DecodeOptions(max_pixels=10_000)).shape[2] == num
          ends['read'] += 1
        except BadImage:
          ends['refused'] += 1
  assert ends['read'] > 10 and ends['refused'] > 400


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
  file = tiff(np.moveaxis(BANDS, 2, 0))
  monkeypatch.setitem(__import__('sys').modules, 'tifffile', None)
  with pytest.raises(UserError, match='TIFF files of 5 channels: expected the Python package tifffile'):
    channels.read(file, 5, AS_STORED)
  assert channels.read(pillow(BANDS[..., 0], 'TIFF'), 1, AS_STORED).shape == (20, 30, 1)


def test_too_little_memory_is_not_taken_for_damage(monkeypatch: pytest.MonkeyPatch) -> None:
  file, error = pillow(BANDS[..., 0], 'PNG'), cv2.error('no memory')
  error.code = cv2.Error.StsNoMem

  def fail(*_: object) -> None:
    raise error
  monkeypatch.setattr(cv2, 'imdecode', fail)
  with pytest.raises(MemoryError, match='30 x 20 px'):
    channels.read(file, 1, AS_STORED)


@pytest.mark.parametrize('size', [(8, 11), (7, 45), (40, 60), (20, 9), (1, 1)])
@pytest.mark.parametrize('interpolation', [Interpolation.BILINEAR, Interpolation.BICUBIC])
def test_antialiased_pixels_are_those_of_pillow(size: tuple[int, int], interpolation: Interpolation) -> None:
  image = BANDS.astype(np.float32)
  how = geometry.pillow_filter(interpolation)
  wanted = np.stack([np.asarray(Image.fromarray(image[..., c]).resize(size[::-1], how)) for c in range(5)], -1)
  window = Window(size[0] // 3, size[1] // 4, -(-size[0] // 2), -(-size[1] // 2))
  found = resample.resize_float(image, size, window, interpolation=interpolation, antialias=True)
  # Sums of at most 90 products of f32, in another order.
  np.testing.assert_allclose(found, window.cut(wanted), atol=90 * 65_536 * 2**-24, rtol=0)


@pytest.mark.parametrize('size', [(8, 11), (40, 60), (20, 9)])
@pytest.mark.parametrize(('interpolation', 'flag'), [
    (Interpolation.BILINEAR, cv2.INTER_LINEAR), (Interpolation.BICUBIC, cv2.INTER_CUBIC)])
def test_pixels_without_antialias_are_those_of_opencv(size: tuple[int, int], interpolation: Interpolation,
                                                      flag: int) -> None:
  image = BANDS[..., :4].astype(np.float32)
  wanted = cv2.resize(image, size[::-1], interpolation=flag)
  found = resample.resize_float(image, size, Window(0, 0, *size), interpolation=interpolation, antialias=False)
  np.testing.assert_allclose(found, wanted, atol=.5)  # OpenCV's coordinates are f32: 1e-6 of a step of 65,536


def test_the_mean_over_an_area_is_exact() -> None:
  found = resample.resize_float(BANDS.astype(np.float32), (10, 10), Window(0, 0, 10, 10),
                                interpolation=Interpolation.AREA, antialias=False)
  wanted = BANDS.reshape(10, 2, 10, 3, 5).mean((1, 3))
  np.testing.assert_allclose(found, wanted, rtol=1e-6)
  same = geometry.resize_part(BANDS.astype(np.float32), (20, 30), Window(2, 3, 4, 5), antialias=False,
                              interpolation=Interpolation.AREA)
  np.testing.assert_array_equal(same, BANDS[2:6, 3:8])


@pytest.mark.parametrize('geometry_of', list(Geometry))
def test_evaluation_shows_the_part_of_the_image_that_rgb_images_show(geometry_of: Geometry) -> None:
  how = recipe(eval_resize_px=16, eval_geometry=geometry_of)
  example = transforms.eval_transform(how, (12, 14))(Record(npy(BANDS), (3,)))
  gray = np.repeat((BANDS[..., :1] >> 8).astype(np.uint8), 3, axis=2)
  rgb = schema.Recipe(eval_resize_px=16, eval_geometry=geometry_of)
  like = transforms.eval_transform(rgb, (12, 14))(Record(gray, (3,)))
  np.testing.assert_array_equal(example['box'], like['box'])
  assert example['image'].dtype == np.float32 and example['image'].shape == (12, 14, 5)  # type: ignore[union-attr]
  assert abs(example['image'][..., 0] / 256 - like['image'][..., 0]).max() < 2  # of truncated levels


def test_training_crops_and_flips_as_rgb_images_are() -> None:
  how = {'crop_area': (.3, .9), 'flip': True, 'shift_px': 2}
  gray = np.repeat((BANDS[..., :1] >> 8).astype(np.uint8), 3, axis=2)
  flipped = 0
  for seed in range(8):
    rngs = [np.random.Generator(np.random.Philox(key=seed)) for _ in range(2)]
    one = transforms.train_transform(recipe(**how), (12, 14))(Record(npy(BANDS), (3,)), rngs[0])
    like = transforms.train_transform(schema.Recipe(**how), (12, 14))(Record(gray, (3,)), rngs[1])
    np.testing.assert_array_equal(one['box'], like['box'])
    assert abs(one['image'][..., 0] / 256 - like['image'][..., 0]).max() < 2
    flipped += int(one['box'][1] > one['box'][3])
  assert 0 < flipped < 8


def test_normalization_has_the_units_of_the_image() -> None:
  image = BANDS[None].astype(np.float32)
  found = np.asarray(normalize(image, recipe(std=(2., 3., 4., 5., 6.))))
  np.testing.assert_allclose(found, (image - np.arange(1, 6)) / np.arange(2, 7), rtol=1e-6)


def test_statistics_are_those_of_all_pixels() -> None:
  images = [BANDS, BANDS[:7] // 3]
  mean, std = channels.statistics(sum(channels.sums(image.astype(np.float32)) for image in images))
  pixels = np.concatenate([image.reshape(-1, 5) for image in images]).astype(np.float64)
  np.testing.assert_allclose(mean, pixels.mean(0), rtol=1e-12)
  np.testing.assert_allclose(std, pixels.std(0), rtol=1e-9)


@pytest.mark.parametrize(('code', 'name'), [(5, 'LZW'), (7, 'JPEG'), (50_000, 'ZSTD')])
def test_a_compression_that_needs_another_package_is_named_and_is_no_damage(code: int, name: str) -> None:
  tifffile = pytest.importorskip('tifffile')
  try:
    import imagecodecs  # noqa: F401
    pytest.skip('imagecodecs is installed')
  except ImportError:
    out = io.BytesIO()
  tifffile.imwrite(out, np.zeros((8, 8, 5), np.uint8), photometric='minisblack', planarconfig='contig')
  with tifffile.TiffFile(io.BytesIO(out.getvalue())) as file:
    place = file.pages[0].tags['Compression'].valueoffset
  content = bytearray(out.getvalue())
  content[place:place + 2] = code.to_bytes(2, 'little')
  with pytest.raises(UserError, match=f'TIFF files of 5 channels: expected no compression, or .*, got {name}. Write'):
    channels.read(bytes(content), 5, AS_STORED)
