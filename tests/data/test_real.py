"""ReaL labels: read, counted, found by an image's number, and scored."""
from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import opening
from vit_jax.data.labels import real
from vit_jax.data.source import Source, take

RNG = np.random.default_rng(0)
SIZES = RNG.permutation(np.repeat([0, 1, 2, 9], [3_000, 40_000, 6_999, 1]))


@functools.cache
def lists() -> list[list[int]]:
  every, ends = RNG.integers(0, 1000, SIZES.sum()).tolist(), np.cumsum(SIZES).tolist()
  return [every[end - size:end] for end, size in zip(ends, SIZES.tolist(), strict=True)]


@pytest.fixture(scope='module')
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
  path = tmp_path_factory.mktemp('real') / 'real.json'
  path.write_text(json.dumps(lists()))
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


def write_guesses(folder: pathlib.Path, guess: np.ndarray) -> pathlib.Path:
  """A line an image, in an order of no meaning."""
  order = np.random.default_rng(1).permutation(len(guess))
  path = folder / 'guesses.txt'
  path.write_text('\n'.join(f'val/ILSVRC2012_val_{i + 1:08}.JPEG {guess[i]}' for i in order))
  return path


def test_a_file_of_guesses_with_a_known_score_gets_exactly_it(
    path: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  guess = np.array([one[-1] if one else 7 for one in lists()])
  guess[np.flatnonzero(SIZES)[:4_700]] = [
      next(c for c in range(1000) if c not in lists()[i]) for i in np.flatnonzero(SIZES)[:4_700]]
  assert real.main([path, str(write_guesses(tmp_path, guess))]) == 0
  assert capsys.readouterr().out == (
      'ReaL top-1 0.900000: 47,000 images scored by 54,007 labels, 3,000 without labels\n')


@pytest.mark.parametrize(('text', 'message'), [
    ('ILSVRC2012_val_00000001.JPEG 65\ncat.jpg 7', 'line 2: expected an image and its class, from 0 to 999'),
    ('ILSVRC2012_val_00000001.JPEG 1000', 'expected an image and its class'),
    ('ILSVRC2012_val_00050001.JPEG 1', 'expected an image and its class'),
    ('ILSVRC2012_val_00000007.JPEG,1\nILSVRC2012_val_00000007.JPEG,2',
     'line 2: expected one line for each image, got a second one for 00000007'),
    ('ILSVRC2012_val_00000001.JPEG 1', 'got none for 49,999, such as ILSVRC2012_val_00000002')])
def test_a_file_that_does_not_guess_each_image_once_is_refused(
    text: str, message: str, path: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'guesses.txt').write_text(text)
  assert real.main([path, str(tmp_path / 'guesses.txt')]) == 2
  assert message in capsys.readouterr().err
  assert real.main([path]) == 2 and 'expected two files' in capsys.readouterr().err


def test_storage_that_fails_may_be_tried_again(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  def fail(*_: object, **__: object) -> str:
    raise TemporaryError('guesses.txt: expected to read it, got "Stale file handle".')
  monkeypatch.setattr(real.documents, 'read_text', fail)
  assert real.main([path, 'guesses.txt']) == 75
  assert capsys.readouterr().err == 'error: guesses.txt: expected to read it, got "Stale file handle".\n'


@pytest.mark.skipif('REAL_JSON' not in os.environ, reason='REAL_JSON does not say where real.json of the authors is')
def test_the_authors_file_has_the_known_counts_and_scores_itself(tmp_path: pathlib.Path) -> None:
  path = os.environ['REAL_JSON']
  labels = real.read(path)
  assert real.count(labels) == (46_837, 3_163, 57_553, 9)
  guess = write_guesses(tmp_path, np.array([one[0] if one else 0 for one in labels]))
  done = subprocess.run([sys.executable, '-m', 'vit_jax.data.labels.real', path, str(guess)], capture_output=True,
                        text=True)
  assert done.stdout == 'ReaL top-1 1.000000: 46,837 images scored by 57,553 labels, 3,163 have none\n', done.stderr


def validation(folder: pathlib.Path, numbers: list[int], name: str = 'ILSVRC2012_val_{:08}.JPEG') -> Source:
  for i, number in enumerate(numbers):
    place = folder / 'val' / f'n{i % 2}' / name.format(number)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(encode(random_image(i), '.jpg'))
  return opening.open_split(schema.Data(source=f'folder:{folder}'), 'val', image_px=(8, 8))


def test_images_are_found_by_their_number_in_any_order_and_part(path: str, tmp_path: pathlib.Path) -> None:
  numbers = [1, 50_000, 293, 7, 48_000]
  source = validation(tmp_path, numbers)
  want = {f'ILSVRC2012_val_{n:08}.JPEG': tuple(lists()[n - 1]) for n in numbers}
  found = real.of_source(source, path)
  assert found == tuple(want[pathlib.Path(source.describe(i)).name] for i in range(5))
  part = take(source, [3, 1], name='two')
  assert real.of_source(part, path) == (found[3], found[1])
  half = opening.open_split(schema.Data(source=f'folder:{tmp_path}'), 'val[2:]', image_px=(8, 8))
  assert real.of_source(half, path) == found[2:]


@pytest.mark.parametrize('name', ['cat{}.jpg', 'ILSVRC2012_val_{:08}.JPEG'])
def test_an_image_without_a_number_is_named(path: str, name: str, tmp_path: pathlib.Path) -> None:
  source = validation(tmp_path, [50_001], name)
  with pytest.raises(UserError, match=r'expected validation images of ILSVRC 2012.*50001.*real.json has no labels'):
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
  source = Stored([{'file_name': [b'ILSVRC2012_val_00000293.JPEG'], 'real_label': [3, 5]},
                   {'file_name': [b'ILSVRC2012_val_00000007.JPEG'], 'real_label': []}])
  assert real.of_source(source, '') == ((3, 5), ())
  assert real.of_source(take(source, [1], name='one'), path) == (tuple(lists()[6]),)


def test_a_source_without_such_labels_is_refused(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='expected the feature real_label, which it does not have'):
    real.of_source(validation(tmp_path, [1]), '')


@pytest.mark.parametrize(('content', 'message'), [
    ('[[1], [2]]', 'expected a list of 50,000 lists of classes from 0 to 999, got 2 entries'),
    ('{"a": 1}', 'classes from 0 to 999, got an object'),
    ('[[1], ', 'expected real.json of the authors of ImageNet-ReaL, got no JSON at line'),
    (json.dumps([[1000]] * 50_000), 'classes from 0 to 999, got 50,000 entries')])
def test_a_file_of_something_else_is_refused(content: str, message: str, tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'real.json'
  path.write_text(content)
  with pytest.raises(UserError, match=message):
    real.read(str(path))


def test_a_file_that_is_not_there_is_refused() -> None:
  with pytest.raises(UserError, match='/nowhere/real.json: expected real.json of the authors'):
    real.read('/nowhere/real.json')
