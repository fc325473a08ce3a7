"""Classes of the data as places in a longer list."""
from __future__ import annotations

import pathlib

import numpy as np
import pytest

from tests.data import images
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.labels import classes
from vit_jax.data.source import first_label, read_one

LINES = ('n01440764 tench, Tinca tinca', 'n01443537 goldfish, Carassius auratus', 'n02012849 crane',
         'n03126707 crane', 'n04243546 slot, one-armed bandit')


@pytest.mark.parametrize(('own', 'places'), [
    (['n01443537', 'n04243546'], (1, 4)), (['goldfish, Carassius auratus', 'N01440764'], (1, 0)),
    (['n02012849 crane', 'n03126707'], (2, 3)), (['slot,_one-armed_bandit'], (4,))])
def test_a_class_is_a_whole_line_its_first_word_or_what_follows(own: list[str], places: tuple[int, ...]) -> None:
  assert classes.match(own, LINES, where='x') == places


def test_what_is_not_there_or_could_be_several_is_listed() -> None:
  says = (r"expected classes of x, got 1 of 3 that are not there: cat; 1 that match several: crane. "
          r"It has 5 lines such as 'n01440764 tench")
  with pytest.raises(UserError, match=says):
    classes.match(['cat', 'crane', 'n01440764'], LINES, where='x')


def write(folder: pathlib.Path, *names: str) -> None:
  for split in ('train', 'test'):
    for i, name in enumerate(names):
      (folder / split / name).mkdir(parents=True)
      (folder / split / name / 'a.png').write_bytes(images.encode(images.random_image(i)))


def test_a_folder_with_some_of_the_classes_has_labels_of_all(tmp_path: pathlib.Path) -> None:
  write(tmp_path / 'set', 'n04243546', 'n01443537')
  (tmp_path / 'words.txt').write_text('# in the order of the outputs\n\n' + '\n'.join(LINES) + '\n')
  data = schema.Data(source=f'folder:{tmp_path / "set"}', classes=str(tmp_path / 'words.txt'))
  found = opening.open_sources(data, image_px=(12, 12))
  assert found.class_names == LINES and found.eval.class_names == LINES
  assert sorted(first_label(found.eval, i) for i in range(2)) == [1, 4]
  for i in range(2):
    assert read_one(found.train, i).label == first_label(found.train, i)
    assert ('n01443537' in found.train.describe(i)) == (first_label(found.train, i) == 1)
  plain = opening.open_sources(schema.Data(source=data.source), image_px=(12, 12))
  assert plain.train.digest != found.train.digest


def test_each_source_of_a_mixture_goes_by_the_list(tmp_path: pathlib.Path) -> None:
  write(tmp_path / 'a', 'n04243546')
  write(tmp_path / 'b', 'n01443537')
  (tmp_path / 'words.txt').write_text('\n'.join(LINES))
  data = schema.Data(source=f'mix:0.5*folder:{tmp_path / "a"},0.5*folder:{tmp_path / "b"}',
                     classes=str(tmp_path / 'words.txt'))
  found = opening.open_sources(data, image_px=(12, 12))
  assert found.class_names == LINES
  np.testing.assert_array_equal([first_label(found.train, i) for i in range(2)], [4, 1])


def test_a_list_may_have_a_name_twice_which_no_folder_has(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'list.txt').write_text('tench\ncrane\ncat\ncrane\n')
  names = classes.read(str(tmp_path / 'list.txt'))
  assert names == ('tench', 'crane', 'cat', 'crane')
  assert classes.match(['cat', 'tench'], names, where='x') == (2, 0)
  with pytest.raises(UserError, match='1 that match several: crane. .* Of lines that are alike, make each one diff'):
    classes.match(['cat', 'crane'], names, where='x')
  with pytest.raises(UserError, match=r"got 'crane', the name of 2: 1 \(crane\), 3 \(crane\)"):
    classes.find(names, 'crane', num_classes=4)


def test_lines_end_where_editors_end_them(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'list.txt').write_bytes('a\u2028b\r\nc\rd'.encode())
  assert classes.read(str(tmp_path / 'list.txt')) == ('a\u2028b', 'c', 'd')


@pytest.mark.parametrize(('text', 'says'), [
    (None, 'expected a text file, got "No such file'),
    ('\n# nothing\n', 'expected one line for each class, .*, got no class')])
def test_a_file_that_is_no_list_is_refused(text: str | None, says: str, tmp_path: pathlib.Path) -> None:
  if text is not None:
    (tmp_path / 'words.txt').write_text(text)
  with pytest.raises(UserError, match=f'data.classes=.*{says}'):
    classes.read(str(tmp_path / 'words.txt'))


@pytest.mark.parametrize(('named', 'number'), [
    (1, 1), ('1', 1), ('n01443537', 1), ('Tench', 0), ('tinca TINCA', 0), ('slot', 4), ('one-armed_bandit', 4),
    ('n03126707 crane', 3)])
def test_one_class_is_found_by_number_line_synset_and_synonym(named: int | str, number: int) -> None:
  assert classes.find(LINES, named, num_classes=5) == number


def test_the_whole_line_goes_before_its_parts() -> None:
  assert classes.find(('n02123045 tabby, tabby cat', 'tabby'), 'tabby', num_classes=2) == 1


@pytest.mark.parametrize(('names', 'named', 'says'), [
    (LINES, 'crane', r"got 'crane', the name of 2: 2 \(n02012849 crane\), 3 \(n03126707 crane\)\.$"),
    (LINES, 'tinch', "expected a number or the name of one class, got 'tinch', the name of none. Did you mean tench"),
    (('cat', 'red boat'), 'zebra', "got 'zebra', the name of none. Known: cat, red boat.$"),
    (LINES, 5, 'class: expected 0 to 4, as the network has 5 classes, got 5'),
    (LINES, -1, 'class: expected 0 to 4, .*, got -1'),
    ((), 'tench', 'These weights have no class names; set them with classes=FILE')])
def test_no_class_and_several_are_refused(names: tuple[str, ...], named: int | str, says: str) -> None:
  with pytest.raises(UserError, match=says):
    classes.find(names, named, num_classes=5)
