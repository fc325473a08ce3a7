"""Label maps on disk: exact class ids, whole or not at all, and nothing computed twice."""
from __future__ import annotations

import io
import json
import pathlib

import numpy as np
import pytest

from tests import fuzzing
from vit_jax.core.errors import UserError
from vit_jax.data import answers
from vit_jax.data.user_files import Rules


def info(num_classes: int = 21_843, **fields: object) -> answers.Info:
  made = {'weights': 't.npz'}
  found = answers.Info('folder:x/train', 'abc', 11, (2, 3), 2, num_classes, 4, made, answers.PROBABILITIES)
  return found._replace(**fields)


def compute(rows: range) -> tuple[np.ndarray, np.ndarray]:
  """Classes and probabilities that tell which example and position they are of."""
  rng = np.random.default_rng(0)
  classes = rng.integers(0, 21_843, (11, 2, 3, 2))[rows.start:rows.stop]
  return classes, np.random.default_rng(1).uniform(0, 1, (11, 2, 3, 2))[rows.start:rows.stop]


def test_what_is_written_is_read_and_ids_are_exact(tmp_path: pathlib.Path) -> None:
  assert answers.write(tmp_path / 'maps', info(), compute, setting='--to')
  maps = answers.Answers(tmp_path / 'maps')
  assert maps.info == info()
  rows = np.array([10, 0, 3, 4, 10])
  labels, scores = maps.read(rows)
  want, probabilities = compute(range(11))
  np.testing.assert_array_equal(labels, want[rows].reshape(5, 6, 2))
  np.testing.assert_allclose(scores, probabilities[rows].reshape(5, 6, 2), rtol=5e-4)
  assert labels.max() > 2048 and (labels % 2 == 1).any()  # as f16 they would all be even or rounded
  assert np.load(tmp_path / 'maps' / 'classes-00000.npy').dtype == np.uint16
  assert not answers.write(tmp_path / 'maps', info(), compute, setting='--to')


def test_more_classes_than_16_bits_are_exact_too(tmp_path: pathlib.Path) -> None:
  answers.write(tmp_path / 'maps', info(100_000), lambda rows: (
      np.full((len(rows), 2, 3, 2), 99_999), np.ones((len(rows), 2, 3, 2))), setting='--to')
  assert (answers.Answers(tmp_path / 'maps').read(np.array([7]))[0] == 99_999).all()


def test_a_writer_that_was_killed_goes_on(tmp_path: pathlib.Path) -> None:
  asked: list[range] = []

  def failing(rows: range) -> tuple[np.ndarray, np.ndarray]:
    asked.append(rows)
    if len(asked) == 2:
      raise KeyboardInterrupt
    return compute(rows)

  with pytest.raises(KeyboardInterrupt):
    answers.write(tmp_path / 'maps', info(), failing, setting='--to')
  assert not (tmp_path / 'maps').exists()
  with pytest.raises(UserError, match='expected label maps, got no info.json. .*vit-jax prepare'):
    answers.Answers(next(tmp_path.glob('maps.*.part')))
  answers.write(tmp_path / 'maps', info(), failing, setting='--to')
  assert asked == [range(4), range(4, 8), range(4, 8), range(8, 11)]
  labels, _ = answers.Answers(tmp_path / 'maps').read(np.arange(11))
  np.testing.assert_array_equal(labels, compute(range(11))[0].reshape(11, 6, 2))


def test_other_maps_than_begun_are_left_alone(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'maps.part').mkdir()
  (tmp_path / 'maps.part' / 'plan.json').write_text('{}')
  (tmp_path / 'maps.part' / 'scores-00000.npy').write_bytes(b'old')
  answers.write(tmp_path / 'maps', info(), compute, setting='--to')
  assert answers.Answers(tmp_path / 'maps').read(np.array([0]))[0].shape == (1, 6, 2)
  assert (tmp_path / 'maps.part' / 'scores-00000.npy').read_bytes() == b'old'


def test_what_does_not_fit_is_refused(tmp_path: pathlib.Path) -> None:
  answers.write(tmp_path / 'maps', info(), compute, setting='--to')
  with pytest.raises(UserError, match='^--to=.*maps: expected a new folder, got one with other content'):
    answers.write(tmp_path / 'maps', info(digest='other'), compute, setting='--to')
  (tmp_path / 'other').mkdir()
  (tmp_path / 'other' / 'info.json').write_bytes(b'\xff')
  with pytest.raises(UserError, match='^--to=.*other: expected a new folder, got one with other content'):
    answers.write(tmp_path / 'other', info(), compute, setting='--to')
  maps = answers.Answers(tmp_path / 'maps')
  with pytest.raises(UserError, match=r'expected label maps with digest def, got abc; top 5, got 2'):
    maps.check_matches({'digest': 'def', 'top': 5, 'grid': (2, 3)})
  (tmp_path / 'maps' / 'scores-00001.npy').unlink()
  with pytest.raises(UserError, match='scores-00001.npy: expected to read it, got "No such file'):
    answers.Answers(tmp_path / 'maps')
  content = (tmp_path / 'maps' / 'info.json').read_text()
  for damaged in ('', content[:-20], '[]', content.replace('"grid"', '"g"')):
    (tmp_path / 'maps' / 'info.json').write_text(damaged)
    with pytest.raises(UserError, match='info.json.*: expected .*, got .* damaged: copy it'):
      answers.Answers(tmp_path / 'maps')
  (tmp_path / 'maps' / 'info.json').write_text(content)
  saved = json.loads((tmp_path / 'maps' / 'info.json').read_text())
  (tmp_path / 'maps' / 'info.json').write_text(json.dumps({**saved, 'format': 'another'}))
  with pytest.raises(UserError, match="expected the format 'vit_jax label maps 1', got another one"):
    answers.Answers(tmp_path / 'maps')


def test_hostile_maps_are_refused(tmp_path: pathlib.Path) -> None:
  folder = tmp_path / 'maps'
  answers.write(folder, info(), compute, setting='--to')
  path, content = folder / 'info.json', json.loads((folder / 'info.json').read_text())
  for change, said in (({'grid': [1000, 1000]}, 'a grid of at most 65,536 positions'), ({'grid': [2]}, 'two sides'),
                       ({'grid': 3}, 'grid: expected a list, got 3'), ({'top': 0}, 'top: expected a whole number from'),
                       ({'top': 2.5}, 'top: expected a whole number'), ({'num_examples': 10**15}, 'at most 100,000'),
                       ({'num_examples': -1}, 'num_examples: expected'), ({'made': []}, 'made: expected an object'),
                       ({'scores': 'x'}, "scores: expected logits or probabilities, got 'x'"),
                       ({'source': 'a\0'}, 'source: expected text'), ({'num_classes': 10**12}, 'num_classes: expected'),
                       ({'grid': [3, 2]}, 'classes-00000.npy: expected an array of shape')):
    path.write_text(json.dumps(content | change))
    with pytest.raises(UserError) as error:
      answers.Answers(folder)
    assert said in str(error.value)
    fuzzing.check_message(str(error.value))
  path.write_text(json.dumps(content))
  classes = folder / 'classes-00000.npy'
  whole = classes.read_bytes()
  for damaged in (b'', whole[:30], whole[:-3], b'PK\3\4' + whole, whole.replace(b"'<u2'", b"'|O '")):
    classes.write_bytes(damaged)
    with pytest.raises(UserError) as error:
      answers.Answers(folder)
    fuzzing.check_message(str(error.value))
  np.save(classes, np.full_like(np.load(io.BytesIO(whole)), content['num_classes']))
  with pytest.raises(UserError, match='expected classes below'):
    answers.Answers(folder).read(np.array([0]))
  for number, dtype, said in ((2**32 - 1, 'u4', 'expected classes below 21,843, got 4,294,967,295'),
                              (2**32 + 5, 'u8', 'classes-00000.npy: expected an array of shape .* of uint64')):
    np.save(classes, np.full(np.load(io.BytesIO(whole)).shape, number, dtype))
    with pytest.raises(UserError, match=said):
      answers.Answers(folder).read(np.array([0]))
  classes.write_bytes(whole)
  scores = folder / 'scores-00000.npy'
  np.save(scores, np.full_like(np.load(scores), np.nan))
  with pytest.raises(UserError, match='expected finite scores'):
    answers.Answers(folder).read(np.array([0]))
  with pytest.raises(UserError, match='expected finite scores'):
    answers.Answers(folder).read_most_likely()


def test_maps_are_those_of_their_folder(tmp_path: pathlib.Path) -> None:
  folder = tmp_path / 'maps'
  answers.write(folder, info(), compute, setting='--to')
  (folder / 'classes-00000.npy').rename(tmp_path / 'outside.npy')
  (folder / 'classes-00000.npy').symlink_to(tmp_path / 'outside.npy')
  with pytest.raises(UserError, match=r'classes-00000.npy: expected a file or folder inside of .* got a link to'):
    answers.Answers(folder)
  assert answers.Answers(folder, Rules(follow_links=True)).read(np.array([0]))[0].size
