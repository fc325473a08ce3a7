"""Parts of a JPEG, decoded alone: the pixels and the messages of the whole picture."""
from __future__ import annotations

import itertools
import pathlib

import cv2
import numpy as np
import pytest

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.data import loader, opening
from vit_jax.data.formats import builtin
from vit_jax.data.image import crops, decode, headers, jpeg
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Record

END = b'\xff\xd9'
SAME = (schema.Decode.FULL, schema.Decode.CROP, schema.Decode.AUTO)
needs_codec = pytest.mark.skipif(not jpeg.is_installed(), reason='nvImageCodec is not installed: the extra `crop`')


def coded(size: tuple[int, int], *flags: int, ending: str = '.jpg', channels: int = 3) -> bytes:
  """A picture of smooth noise, `size` (height, width)."""
  rng = np.random.default_rng(0)
  image = cv2.resize(rng.integers(0, 256, (9, 11, channels), np.uint8), size[::-1], interpolation=cv2.INTER_CUBIC)
  return cv2.imencode(ending, image, flags)[1].tobytes()


FILES = {
    'usual': coded((203, 309)), 'fine colors': coded((97, 131), cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x111111),
    'progressive': coded((150, 214), cv2.IMWRITE_JPEG_PROGRESSIVE, 1), 'gray': coded((64, 81), channels=1),
    'restarts': coded((120, 77), cv2.IMWRITE_JPEG_RST_INTERVAL, 3), 'PNG': coded((40, 51), ending='.png')}


@needs_codec
@pytest.mark.parametrize('name', FILES)
def test_a_part_has_the_pixels_of_the_whole(name: str) -> None:
  whole, rng = decode.decode(FILES[name]), np.random.default_rng(1)
  opened = jpeg.open_partial(FILES[name])
  assert opened.size == whole.shape[:2]
  assert isinstance(opened, jpeg.PartialJpeg) == (name != 'PNG')
  for _ in range(25):
    height, width = (int(rng.integers(1, side + 1)) for side in opened.size)
    top, left = int(rng.integers(0, opened.size[0] - height + 1)), int(rng.integers(0, opened.size[1] - width + 1))
    window = decode.Window(top, left, height, width)
    np.testing.assert_array_equal(opened.cut(window), window.cut(whole))


@needs_codec
def test_single_columns_and_rows_have_the_pixels_of_the_whole() -> None:
  encoded = coded((33, 20), cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x221111)  # colors at half of the size
  whole, opened = decode.decode(encoded), jpeg.open_partial(encoded)
  for place in range(20):
    for window in (decode.Window(5, place, 19, 1), decode.Window(place, 0, 1, 20), decode.Window(place, place, 1, 1)):
      np.testing.assert_array_equal(opened.cut(window), window.cut(whole), err_msg=str(window))


@needs_codec
@pytest.mark.parametrize('orientation', range(1, 9))
def test_a_part_of_an_image_that_is_turned_has_the_pixels_of_the_whole(orientation: int) -> None:
  encoded = headers.write_orientation(FILES['usual'], orientation)
  for how in (headers.DecodeOptions(), headers.DecodeOptions(upright=True)):
    whole, opened, rng = decode.decode(encoded, how), jpeg.open_partial(encoded, how), np.random.default_rng(2)
    assert isinstance(opened, jpeg.PartialJpeg) and opened.size == whole.shape[:2]
    assert opened.size == ((309, 203) if how.upright and orientation > 4 else (203, 309))
    for _ in range(9):
      window = crops.inception_crop(opened.size, rng=rng, area=(.05, 1.), aspect=(.75, 4 / 3))
      np.testing.assert_array_equal(opened.cut(window), window.cut(whole))


@needs_codec
def test_a_part_of_too_large_an_image_is_refused_in_the_same_words() -> None:
  for opener in (jpeg.open_partial, decode.open_image):
    with pytest.raises(headers.BadImage, match='309 x 203 px: expected at most 50,000 pixels, got 62,727'):
      opener(FILES['usual'], headers.DecodeOptions(max_pixels=50_000))


@needs_codec
@pytest.mark.parametrize('recipe', [schema.Recipe(crop_sampler=sampler) for sampler in schema.CropSampler] + [
    schema.Recipe(crop=schema.Crop.WINDOW, crop_area=(.05, .9))])
def test_a_recipe_gives_the_same_example(recipe: schema.Recipe) -> None:
  record = Record(FILES['usual'], (3,))
  want, *others = (transforms.train_transform(recipe, (32, 48), decode=decode) for decode in SAME)
  for seed in range(9):
    first = want(record, np.random.default_rng(seed))
    for got in others:
      second = got(record, np.random.default_rng(seed))
      for name in first:
        np.testing.assert_array_equal(first[name], second[name])


@needs_codec
@pytest.mark.parametrize('damaged', [b'', b'hello' * 30, FILES['usual'][:700], FILES['usual'][:300] + END,
                                     FILES['usual'][:2] + b'\xff\xda' + END])
def test_what_is_no_picture_is_refused_in_the_same_words(damaged: bytes) -> None:
  def words(open_picture: object) -> str:
    with pytest.raises(headers.BadImage) as found:
      open_picture(damaged).cut(decode.Window(0, 0, 5, 5))  # type: ignore[operator]
    return str(found.value)

  assert words(jpeg.open_partial) == words(decode.open_image)


def test_arrays_need_no_decoder() -> None:
  image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
  np.testing.assert_array_equal(jpeg.open_partial(image).cut(decode.Window(1, 0, 1, 2)), image[1:, :2])


def test_without_the_package_a_run_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(jpeg, '_PACKAGE', 'nowhere.codec')
  with pytest.raises(UserError, match=r"no GPU needed\), got none. Run: pip install 'nvidia"):
    loader.train_loader(builtin.open_digits('train'), recipe=schema.Recipe(), image_px=(8, 8), batch_size=8, seed=0,
                        shard=Shard((0,), 1), workers=0, threads=1, in_memory=False, max_bad_images=1,
                        decode=schema.Decode.CROP)


@needs_codec
def test_auto_decodes_parts_where_they_have_the_pixels_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  jpeg._check_pixels.cache_clear()
  assert isinstance(jpeg.open_fastest(FILES['usual']), jpeg.PartialJpeg)
  assert isinstance(jpeg.open_fastest(FILES['PNG']), decode.DecodedImage) and not caplog.records
  for crop, opener in ((schema.Crop.INCEPTION, jpeg.open_fastest), (schema.Crop.RESIZE, decode.open_image)):
    made = transforms.train_transform(schema.Recipe(crop=crop), (8, 8), decode=schema.Decode.AUTO)
    assert isinstance(made, transforms.TrainTransform) and made.open_image is opener
  exact, last = jpeg.PartialJpeg.cut, decode.Window(47, 1, 28, 17)
  monkeypatch.setattr(jpeg.PartialJpeg, 'cut', lambda self, window: exact(self, window) ^ (window == last))
  jpeg._check_pixels.cache_clear()
  for _ in range(2):
    assert isinstance(jpeg.open_fastest(FILES['usual']), decode.DecodedImage)
  warning, = caplog.messages
  assert 'nvImageCodec does not give the pixels of OpenCV here (4:2:0, 4:2:2, 4:4:4, progressive, gray)' in warning
  jpeg._check_pixels.cache_clear()


def test_auto_decodes_the_whole_where_there_is_no_package(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setattr(jpeg, '_PACKAGE', 'nowhere.codec')
  jpeg._check_pixels.cache_clear()
  assert isinstance(jpeg.open_fastest(FILES['usual']), decode.DecodedImage) and not caplog.records
  jpeg._check_pixels.cache_clear()


@needs_codec
def test_a_package_that_cannot_be_loaded_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  def fail() -> None:
    raise ImportError('libjpeg.so: cannot open shared object file')
  monkeypatch.setattr(jpeg, '_load_codec', fail)
  jpeg._check_pixels.cache_clear()
  assert isinstance(jpeg.open_fastest(FILES['usual']), decode.DecodedImage)
  assert '(ImportError: libjpeg.so: cannot open shared object file)' in caplog.text
  jpeg._check_pixels.cache_clear()


@pytest.mark.parametrize('recipe, why', [
    (schema.Recipe(crop=schema.Crop.RESIZE), 'expected auto or full with data.recipe.crop=resize, which does not crop'),
    (schema.Recipe(views=schema.Views(on=True)), 'expected auto or full with data.recipe.views.on=True, which takes')])
def test_decoding_the_crop_is_refused_for_recipes_without_a_single_crop(recipe: schema.Recipe, why: str) -> None:
  config = schema.Config(data=schema.Data(recipe=recipe, decode=schema.Decode.CROP))
  with pytest.raises(UserError, match=why):
    check.check(config)


@needs_codec
@pytest.mark.parametrize('workers', [0, pytest.param(1, marks=pytest.mark.slow(reason='starts a process, 5 s'))])
def test_a_loader_with_several_threads_gives_the_same_batches(workers: int, tmp_path: pathlib.Path) -> None:
  for split in ('train', 'test'):
    (tmp_path / split / 'one').mkdir(parents=True)
    for i in range(13):
      (tmp_path / split / 'one' / f'{i}.jpg').write_bytes(coded((40 + 7 * i, 90 - 3 * i)))
  source = opening.open_split(schema.Data(source=f'folder:{tmp_path}'), 'train', image_px=(16, 24))
  made = [loader.train_loader(source, recipe=schema.Recipe(), image_px=(16, 24), batch_size=4, seed=0,
                              shard=Shard((0,), 1), workers=workers, threads=3, in_memory=False, max_bad_images=0,
                              decode=decode) for decode in SAME]
  first, *others = (list(itertools.islice(one.batches(0), 5)) for one in made)
  for one in made:
    one.close()
  for second in others:
    for a, b in zip(first, second, strict=True):
      assert a.keys() == b.keys()
      for name in a:
        np.testing.assert_array_equal(a[name], b[name])
