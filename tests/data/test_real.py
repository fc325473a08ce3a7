"""ReaL labels: read, counted, found by an image's number, and scored."""
from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from tests.data.pictures import encode, picture
from vit_jax.config import schema
from vit_jax.core.types import UserError
from vit_jax.data import real, sources, subset

RNG = np.random.default_rng(0)
SIZES = RNG.permutation(np.repeat([0, 1, 2, 9], [3_000, 40_000, 6_999, 1]))
LISTS = [RNG.integers(0, 1000, size).tolist() for size in SIZES]


@pytest.fixture(scope='module')
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
  path = tmp_path_factory.mktemp('real') / 'real.json'
  path.write_text(json.dumps(LISTS))
  return str(path)


def test_what_a_file_holds_is_counted(path: str) -> None:
  assert real.count(real.read(path)) == (47_000, 3_000, 40_000 + 2 * 6_999 + 9, 9)


def test_a_score_is_exact(path: str) -> None:
  labels = real.read(path)
  guess = np.array([one[-1] if one else 7 for one in labels])
  assert real.score(guess, labels) == 1.
  scored = np.flatnonzero(SIZES)
  wrong = scored[:4_700]
  for i in wrong:
    guess[i] = next(c for c in range(1000) if c not in labels[i])
  assert real.score(guess, labels) == .9


def validation(folder: pathlib.Path, numbers: list[int], name: str = 'ILSVRC2012_val_{:08}.JPEG') -> sources.Source:
  for i, number in enumerate(numbers):
    place = folder / 'val' / f'n{i % 2}' / name.format(number)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(encode(picture(i), '.jpg'))
  return sources.open_split(schema.Data(source=f'folder:{folder}'), 'val', image_px=(8, 8))


def test_images_are_found_by_their_number_in_any_order_and_part(path: str, tmp_path: pathlib.Path) -> None:
  numbers = [1, 50_000, 293, 7, 48_000]
  source = validation(tmp_path, numbers)
  want = {f'ILSVRC2012_val_{n:08}.JPEG': tuple(LISTS[n - 1]) for n in numbers}
  found = real.of_source(source, path)
  assert found == tuple(want[pathlib.Path(source.describe(i)).name] for i in range(5))
  part = subset.Subset(source, [3, 1], name='two')
  assert real.of_source(part, path) == (found[3], found[1])
  half = sources.open_split(schema.Data(source=f'folder:{tmp_path}'), 'val[2:]', image_px=(8, 8))
  assert real.of_source(half, path) == found[2:]


@pytest.mark.parametrize('name', ['cat{}.jpg', 'ILSVRC2012_val_{:08}.JPEG'])
def test_an_image_without_a_number_is_named(path: str, name: str, tmp_path: pathlib.Path) -> None:
  source = validation(tmp_path, [50_001], name)
  with pytest.raises(UserError, match=r'50001.* is no validation image of ILSVRC 2012, so .*real.json has no labels'):
    real.of_source(source, path)


class Stored:
  """A source with features, as those of TFDS are."""
  name, class_names, digest = 'stored', ('a',), ''

  def __init__(self, features: list[dict[str, object]]) -> None:
    self.all = features

  def __len__(self) -> int:
    return len(self.all)

  def features(self, index: int) -> dict[str, object]:
    return self.all[index]


def test_sets_of_tfds_know_file_names_and_perhaps_labels(path: str) -> None:
  source = Stored([{'file_name': b'ILSVRC2012_val_00000293.JPEG', 'real_label': np.array([3, 5])},
                   {'file_name': b'ILSVRC2012_val_00000007.JPEG', 'real_label': np.array([], np.int64)}])
  assert real.of_source(source, '') == ((3, 5), ())
  assert real.of_source(subset.Subset(source, [1], name='one'), path) == (tuple(LISTS[6]),)


def test_a_source_without_such_labels_is_refused(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='has no feature real_label; want tfds:imagenet2012_real, or evals'):
    real.of_source(validation(tmp_path, [1]), '')


@pytest.mark.parametrize(('content', 'message'), [
    ('[[1], [2]]', 'holds 2 entries; want a list of 50,000 lists of classes from 0 to 999'),
    ('{"a": 1}', 'holds a dict; want a list'), ('[[1], ', 'cannot be read .*want real.json of the authors'),
    (json.dumps([[1000]] * 50_000), 'holds 50,000 entries; want')])
def test_a_file_of_something_else_is_refused(content: str, message: str, tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'real.json'
  path.write_text(content)
  with pytest.raises(UserError, match=message):
    real.read(str(path))


def test_a_file_that_is_not_there_is_refused() -> None:
  with pytest.raises(UserError, match='/nowhere/real.json cannot be read'):
    real.read('/nowhere/real.json')
