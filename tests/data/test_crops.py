"""Random crops are those of the programs that recipes are from."""
from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.data import make_tensorflow_crops as made
from vit_jax.config import check, files, schema
from vit_jax.config.schema import CropSampler
from vit_jax.data.image import crops, decode

GOLDEN = np.load(pathlib.Path(__file__).with_name('tensorflow_crops.npz'))
NUM_DRAWS = 8_000  # our own
PLAIN: dict[str, Any] = {'tries': 100, 'covered': 0.}
_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85  # of Philox 4x32 (Salmon et al. 2011, section 5)
_MASK = 0xFFFFFFFF


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, int, int, int]:
  """Ten rounds of Philox 4x32."""
  (a, b, c, d), (k, m) = counter, key
  for _ in range(10):
    high, low = _M0 * a, _M1 * c
    a, b, c, d = low >> 32 ^ b ^ k, low & _MASK, high >> 32 ^ d ^ m, high & _MASK
    k, m = k + _W0 & _MASK, m + _W1 & _MASK
  return a, b, c, d


class TensorflowDraws:
  """The numbers that TensorFlow's stateless operations draw with a seed, by the methods of a NumPy generator."""

  def __init__(self, seed: tuple[int, int]) -> None:
    mixed = philox((seed[0], 0, seed[1], 0), (0x3EC8F720, 0x02461E29))  # its scrambling of seeds
    self._words = self._generate(mixed)

  def _generate(self, mixed: tuple[int, ...]) -> Iterator[int]:
    for count in itertools.count():
      yield from philox((count, 0, *mixed[2:]), (mixed[0], mixed[1]))

  def random(self, dtype: type) -> np.float32:
    return np.float32((next(self._words) & 0x7FFFFF) / 2**23)

  def integers(self, num: int) -> int:
    if not num & num - 1:
      return next(self._words) & num - 1
    skewed = _MASK % num + 1
    return next(word for word in self._words if word >= skewed) % num


@pytest.mark.parametrize('number', range(len(made.CASES)))
def test_with_tensorflow_s_numbers_every_window_is_tensorflow_s(number: int) -> None:
  height, width, area, aspect, *others = made.CASES[number]
  tries, covered = others or (100, 0.)
  for seed, expected in enumerate(GOLDEN['windows'][number].tolist()):
    window = crops.tensorflow_crop((height, width), rng=TensorflowDraws((number, seed)),  # type: ignore[arg-type]
                                   area=area, aspect=aspect, tries=tries, covered=covered)
    assert list(window) == expected, seed


@pytest.fixture(scope='module')
def drawn() -> dict[CropSampler, np.ndarray]:
  """Statistics `[4, S]` of windows by either sampler."""
  found = {}
  for sampler, num in ((CropSampler.TENSORFLOW, NUM_DRAWS), (CropSampler.TORCHVISION, 4_000)):
    rng = np.random.default_rng(5)
    found[sampler] = made.statistics(np.array([
        crops.sample(sampler, made.SIZE, rng=rng, area=made.AREA, aspect=made.ASPECT, **PLAIN) for _ in range(num)]))
  return found


@pytest.mark.parametrize(('row', 'name'), [*enumerate(['area', 'aspect ratio', 'top', 'left'])])
def test_area_aspect_and_place_are_distributed_as_tensorflow_s(
    row: int, name: str, drawn: dict[CropSampler, np.ndarray]) -> None:
  ours, thresholds, theirs = drawn[CropSampler.TENSORFLOW][row], GOLDEN['thresholds'][row], GOLDEN['shares'][row]
  shares = (ours[None] <= thresholds[:, None]).mean(-1)
  # The difference of two shares p of m and n draws has the deviation sqrt(p (1 - p) (1 / m + 1 / n)); 76 are compared.
  tolerance = 4 * np.sqrt(theirs * (1 - theirs) * (1 / NUM_DRAWS + 1 / made.DRAWS))
  assert (np.abs(shares - theirs) < tolerance).all(), name


def test_the_mean_area_is_tensorflow_s_and_not_torchvision_s(drawn: dict[CropSampler, np.ndarray]) -> None:
  area = drawn[CropSampler.TENSORFLOW][0]
  assert abs(area.mean() - GOLDEN['mean_area']) < 4 * area.std() * np.sqrt(1 / NUM_DRAWS + 1 / made.DRAWS)
  other = drawn[CropSampler.TORCHVISION][0]
  assert abs(other.mean() - 0.416) < 4 * other.std() / np.sqrt(len(other))


def test_a_crop_depends_on_the_generator_alone() -> None:
  def draw(seed: int) -> decode.Window:
    return crops.tensorflow_crop((300, 400), rng=np.random.default_rng(seed), area=(.05, 1.), aspect=(.75, 1.33),
                                 **PLAIN)
  assert draw(3) == draw(3) != draw(4)


def test_where_nothing_fits_the_crop_is_the_whole_image() -> None:
  window = crops.tensorflow_crop((60, 1000), rng=np.random.default_rng(0), area=(.9, 1.), aspect=(.75, 1.33),
                                 **PLAIN)
  assert window == decode.Window(0, 0, 60, 1000)


class Drawn:
  """A generator whose numbers are given."""

  def __init__(self, numbers: list[float]) -> None:
    self._numbers = iter(numbers)

  def uniform(self, low: float, high: float) -> float:
    value = next(self._numbers)
    assert low <= value <= high
    return value

  def integers(self, low: int, high: int) -> int:
    value = int(next(self._numbers))
    assert low <= value < high
    return value


# Image size, drawn area and logarithm of the ratio, window (top, left, height, width): RandomResizedCrop.get_params of
# facebookresearch/mae@efb2a80, util/crop.py, with torch.manual_seed of 0 to 7 (torch 2.13.0), areas of 8 to 100 %.
@pytest.mark.parametrize(('size', 'area', 'log_ratio', 'window'), [
    ((375, 500), .53655606508255, .15432524681091309, (17, 80, 294, 343)),
    ((375, 500), .7770211100578308, -.12697657942771912, (0, 66, 375, 358)),  # its height is cut
    ((500, 333), .645519495010376, -.06846091151237488, (143, 5, 339, 317)),
    ((64, 400), .08392243832349777, -.22694122791290283, (5, 147, 52, 41)),
    ((400, 64), .5948675274848938, .03399968147277832, (271, 0, 121, 64)),  # its width
    ((64, 400), .8438317179679871, -.21512235701084137, (0, 115, 64, 132)),
    ((30, 31), .6064217686653137, .030998066067695618, (3, 4, 23, 24)),
    ((375, 500), .5721287727355957, -.17329782247543335, (14, 89, 357, 300))])
def test_a_clipped_crop_is_that_of_maes_probe(size: tuple[int, int], area: float, log_ratio: float,
                                              window: tuple[int, ...]) -> None:
  draws = Drawn([area, log_ratio, *window[:2]])
  found = crops.sample(CropSampler.CLIPPED, size, rng=draws,  # type: ignore[arg-type]
                       area=(.08, 1.), aspect=(.75, 4 / 3), **PLAIN)
  assert tuple(found) == window


def test_noisy_student_shows_at_least_a_tenth_of_an_image_and_others_less() -> None:
  # google-research/noisystudent@aac52bf, preprocessing.py, lines 84 to 97.
  student = next(iter(files.load_study('noisy_student:imagenet', []).runs.values())).data.recipe
  assert (student.crop_tries, student.crop_covered, student.crop_area) == (10, .1, (.08, 1.))

  def smallest(recipe: schema.Recipe) -> float:
    rng = np.random.default_rng(0)
    areas = [window.height * window.width for window in (crops.draw(recipe, (375, 500), rng) for _ in range(1_500))]
    return min(areas) / (375 * 500)

  assert .1 <= smallest(student) < .11 and smallest(files.load('vit_b16_i1k', []).data.recipe) < .06
  plain = files.load('digits', ['data.recipe.crop_covered=0.1', 'data.recipe.crop_tries=10'])
  assert [text.split(':')[0] for text in check.problems(plain)] == [
      'data.recipe.crop_tries', 'data.recipe.crop_covered']
