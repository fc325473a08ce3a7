"""Sources by name: digits, synthetic, slices, and what is refused."""
from __future__ import annotations

import inspect
import pathlib
import pickle
import sys

import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.core import implementation
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Record, Rows, first_label, read_one


def open_all(**fields: object) -> opening.Sources:
  return opening.open_sources(schema.Data(**fields), image_px=(6, 9))


def test_digits_are_split_in_proportion_and_never_shared() -> None:
  opened = open_all(source='digits')
  assert (len(opened.train), len(opened.eval), len(opened.class_names)) == (1437, 360, 10)
  labels = [np.array([first_label(s, i) for i in range(len(s))]) for s in (opened.train, opened.eval)]
  counts = [np.bincount(x, minlength=10) for x in labels]
  assert np.abs(counts[1] - .2 * (counts[0] + counts[1])).max() <= 1
  pictures = [{record.image.tobytes() for record in s.read(range(len(s)))} for s in (opened.train, opened.eval)]
  assert not pictures[0] & pictures[1]


def test_digits_fill_the_range_of_gray_levels() -> None:
  record = read_one(open_all(source='digits').train, 0)
  assert record.image.shape == (8, 8, 1) and record.image.dtype == np.uint8
  assert record.image.max() == 255 and record.image.min() == 0


def test_synthetic_data_have_the_sizes_asked_for() -> None:
  opened = open_all(source='synthetic', num_examples=303_000_000, num_classes=18_291)
  assert (len(opened.train), len(opened.eval), len(opened.class_names)) == (303_000_000, 1000, 18_291)
  record = read_one(opened.train, 302_999_999)
  assert record.image.shape == (6, 9, 3) and record.label == 302_999_999 % 18_291
  np.testing.assert_array_equal(record.image, read_one(opened.train, 302_999_999).image)
  assert len(open_all(source='synthetic').train) == 1000


def test_slices_are_parts_in_the_same_order() -> None:
  whole = open_all(source='synthetic', num_examples=37, num_classes=7).train
  opened = open_all(source='synthetic', num_examples=37, num_classes=7, train_split='train[5:8]+test[-2:]',
                    eval_split='train[50%:]')
  assert [first_label(opened.train, i) for i in range(5)] == [first_label(whole, i) for i in (5, 6, 7, 35, 36)]
  assert opened.train.describe(1) == 'synthetic/train[6]'
  assert opened.train.describe(3) == 'synthetic/test[35]'
  assert read_one(opened.train, 0).label == 5 and opened.train.name == 'synthetic/train[5:8]+test[-2:]'
  assert len(opened.eval) == 18
  with pytest.raises(IndexError, match='expected an index below 5, got 5'):
    read_one(opened.train, 5)


def test_another_set_has_another_digest() -> None:
  digests = [open_all(source='synthetic', num_examples=n, num_classes=c, train_split=s).train.digest
             for n in (30, 37) for c in (5, 7) for s in ('train', 'train[:9]', 'train[9:18]')]
  assert len(set(digests)) == 12


@pytest.mark.parametrize('source', ['digits', 'synthetic'])
def test_sources_pickle_small(source: str) -> None:
  train = open_all(source=source, train_split='train[:800]').train
  copy = pickle.loads(pickle.dumps(train))
  np.testing.assert_array_equal(read_one(copy, 7).image, read_one(train, 7).image)
  assert copy.digest == train.digest and len(pickle.dumps(train)) < 120_000


def test_a_split_can_be_opened_alone() -> None:
  assert len(opening.open_split(schema.Data(), 'test[:100]', image_px=(8, 8))) == 100
  with pytest.raises(UserError, match="split of digits: expected one of test, train, got 'tets'. Did you mean test"):
    opening.open_split(schema.Data(), 'tets', image_px=(8, 8))


@pytest.mark.parametrize('source', ['imagenet', 'digits:3', 'folder:', 'tfds', ''])
def test_an_unknown_source_lists_the_known_ones(source: str) -> None:
  with pytest.raises(UserError, match='data.source: expected one of digits, synthetic, folder:PATH, tfds:NAME'):
    open_all(source=source)


@pytest.mark.parametrize('name', opening.KINDS)
def test_every_kind_is_a_function_with_one_contract(name: str) -> None:
  opener = implementation.load(opening.KINDS[name].opener)
  assert [*inspect.signature(opener).parameters][:3] == ['where', 'data', 'image_px']


def test_a_source_of_a_persons_own_module_is_opened_by_its_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / 'two_tone.py').write_text(
      'import numpy as np\n'
      'from vit_jax.data.formats.builtin import Arrays\n'
      'def opener(where, data, image_px):\n'
      '  image = np.full((int(where), *image_px, 3), data.holdout_seed, np.uint8)\n'
      '  return lambda split: Arrays(image, np.arange(int(where)) % 2, name=f"two_tone:{where}/{split}",\n'
      '                              class_names=("0", "1"))\n')
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', [*sys.path])
  monkeypatch.setattr(implementation, '_trusted_folders', [])
  monkeypatch.setattr(implementation, '_command_line_modules', set())
  with pytest.raises(UserError, match='got one of the current folder, .*, which was not run'):
    open_all(source='two_tone:20')
  implementation.note_command_line('data.source=two_tone:20')  # as the command line does
  opened = open_all(source='two_tone:20', holdout_seed=7, train_split='train[:75%]')
  assert (len(opened.train), len(opened.eval), opened.class_names) == (15, 20, ('0', '1'))
  record = read_one(opened.train, 3)
  assert record.label == 1 and (record.image == 7).all() and record.image.shape == (6, 9, 3)
  mixed = open_all(source='mix:0.5*two_tone:20,0.5*two_tone:30')
  assert len(mixed.train) == 50


@pytest.mark.parametrize(('source', 'said'), [
    ('foldr:/x', 'Did you mean folder:PATH? foldr: expected a Python module, got none. It was looked for among the '),
    ('no_such_module:x', "got 'no_such_module:x'. no_such_module: expected a Python module, got none."),
    ('jax:x', "got 'jax:x'. jax: expected 'opener' in this module"),
    ('antigravity:x', "'antigravity': expected the name of a Python module, and not of one that Python itself has."),
    ('a b:x', "'a b': expected the name of a Python module"),
    ('x' * 300 + ':x', f"'{'x' * 60}': expected the name of a Python module")])
def test_a_kind_that_is_no_module_with_an_opener_is_refused(source: str, said: str) -> None:
  with pytest.raises(UserError, match='data.source: expected one of digits, ') as error:
    open_all(source=source)
  assert said in str(error.value)


def test_a_number_of_classes_that_is_not_the_sources_is_refused() -> None:
  with pytest.raises(UserError, match='data.num_classes: expected 10, the number of classes of digits/train, got 7'):
    open_all(source='digits', num_classes=7)


class DamagedFirst(Rows):
  """Three images of class b; the record of the first one is damaged."""
  name, digest, class_names = 'own/train', 'digest', ('a', 'b')

  def __len__(self) -> int:
    return 3

  def labels(self, row: int) -> tuple[int, ...]:
    if row == 0:
      raise BadImage('damaged')
    return (1,)

  def example(self, row: int) -> Record:
    return Record(b'', self.labels(row))


def test_images_of_one_class_are_refused_also_if_the_first_image_is_damaged() -> None:
  with pytest.raises(UserError, match="expected images of at least two classes for k-NN, .* all have the class 'b'"):
    opening.check_learnable(DamagedFirst(), learner='k-NN')
