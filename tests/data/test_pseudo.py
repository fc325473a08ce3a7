"""Pictures that a teacher has labeled: which are taken, and what a batch has of them."""
from __future__ import annotations

import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, Shard
from vit_jax.data import answers, loader, opening
from vit_jax.data.device.prepare import prepare_train
from vit_jax.data.formats import pseudo
from vit_jax.data.source import first_label, read_one

CLASSES = 10
RECIPE = schema.Recipe(crop=schema.Crop.RESIZE, flip=False)


def by_hand(classes: np.ndarray, scores: np.ndarray, threshold: float, per_class: int) -> list[int]:
  """The rule, one picture after the other."""
  taken: list[int] = []
  for c in sorted(set(classes.tolist())):
    sure = [i for i in range(len(classes)) if classes[i] == c and scores[i] >= threshold and scores[i] > 0]
    sure.sort(key=lambda i: (-float(scores[i]), i))
    taken += [sure[k % len(sure[:per_class])] for k in range(per_class)] if per_class and sure else sure
  return sorted(taken)


@pytest.mark.parametrize('per_class', [0, 1, 7, 40])
@pytest.mark.parametrize('threshold', [0., .3, .81])
def test_the_sure_ones_are_taken_and_classes_are_alike(threshold: float, per_class: int) -> None:
  rng = np.random.default_rng(per_class)
  classes = rng.choice(6, 137, p=[.5, .3, .1, .06, .04, 0.]).astype(np.uint16)
  scores = np.round(rng.uniform(0, 1, 137), 2).astype(np.float16)  # with equals
  scores[5] = 0.
  rows = pseudo.select(classes, scores, threshold=threshold, per_class=per_class)
  assert rows.tolist() == by_hand(classes, scores, threshold, per_class)
  assert 5 not in rows
  if per_class:
    counts = np.bincount(classes[rows], minlength=6)
    assert set(counts.tolist()) <= {0, per_class} and counts[5] == 0


def test_none_is_sure_enough() -> None:
  assert not len(pseudo.select(np.zeros(4, np.uint16), np.full(4, .2, np.float16), threshold=.3, per_class=5))


def write_answers(folder: pathlib.Path, *, top: int = 3, teacher: str = 'runs/teacher', are_readable: bool = True,
                  **made: object) -> tuple[np.ndarray, np.ndarray]:
  """Answers about the test split of the digits, whatever the pictures are."""
  source = opening.open_split(schema.Data(source='digits'), 'test', image_px=(8, 8))
  rng = np.random.default_rng(3)
  scores = np.sort(rng.dirichlet(np.full(CLASSES, .3), len(source)))[:, ::-1][:, :top].astype(np.float16) * are_readable
  classes = np.argsort(rng.uniform(size=(len(source), CLASSES)))[:, :top]
  info = answers.Info(source.name, source.digest, len(source), (1, 1), top, CLASSES, 100, {'teacher': teacher, **made},
                         answers.PROBABILITIES)
  answers.write(folder, info, lambda rows: (classes[rows.start:rows.stop, None, None],
                                               scores[rows.start:rows.stop, None, None]), setting='--to')
  return classes, scores


def data(folder: pathlib.Path, **settings: object) -> schema.Data:
  given = {'source': 'digits', 'split': 'test', 'teacher': 'runs/teacher', 'labels': str(folder), 'top': 3,
           'threshold': .6, 'per_class': 9, 'share': .25} | settings
  return schema.Data(source='digits', recipe=RECIPE, pseudo=schema.Pseudo(**given))  # type: ignore[arg-type]


def batches(source: pseudo.PseudoLabeled, num: int) -> list[Batch]:
  soft = loader.train_loader(source, recipe=RECIPE, image_px=(8, 8), batch_size=50, seed=0, shard=Shard((0,), 1),
                             workers=0, threads=1, in_memory=True, max_bad_images=0, extra=source.extra())
  assert soft.info.digest == source.digest
  stream = soft.batches(0)
  found = [next(stream) for _ in range(num)]
  soft.close()
  return found


def test_a_batch_has_the_share_and_the_targets_of_both_kinds(tmp_path: pathlib.Path) -> None:
  classes, scores = write_answers(tmp_path / 'labels')
  opened = opening.open_sources(data(tmp_path / 'labels'), image_px=(8, 8))
  train, test = opened.train, opened.eval
  rows = pseudo.select(classes[:, 0], scores[:, 0], threshold=.6, per_class=9)
  assert isinstance(train, pseudo.PseudoLabeled) and len(train) == 1437 + len(rows) and len(rows) % 9 == 0
  prepare = jax.jit(prepare_train(RECIPE, num_classes=CLASSES, on_device_geometry=True, soft_labels=True))
  num_taught = 0
  for batch in batches(train, 20):
    done = prepare({name: jnp.asarray(value) for name, value in batch.items()}, jax.random.key(0), jnp.asarray(0))
    assert not {'token_labels', 'token_scores'} & done.keys()
    for row, index in enumerate(batch['index'].tolist()):
      want = np.zeros(CLASSES)
      if index < 1437:
        want[first_label(train, index)] = 1.
      else:
        num_taught += 1
        place = rows[index - 1437]
        np.add.at(want, classes[place], scores[place].astype(np.float64))
        assert (read_one(train, index).image == read_one(test, place).image).all()
        assert first_label(train, index) == classes[place, 0]
        assert train.describe(index) == test.describe(int(place))
      np.testing.assert_allclose(done['labels'][row], want / want.sum(), atol=1e-3)
  assert num_taught == 250  # a round of 1,000 has its share exactly


def test_what_goes_to_loader_processes_is_small_and_the_digest_tells_labels_apart(tmp_path: pathlib.Path) -> None:
  write_answers(tmp_path / 'labels')
  digests = set()
  for settings in ({}, {'per_class': 5}, {'threshold': .7}, {'share': .5}):
    train = opening.open_sources(data(tmp_path / 'labels', **settings), image_px=(8, 8)).train
    digests.add(train.digest)
    assert pickle.loads(pickle.dumps(train)).digest == train.digest
  assert len(digests) == 4


@pytest.mark.parametrize(('settings', 'said'), [
    ({'labels': '/nowhere'}, r'data.pseudo.labels: expected a folder with labels of a teacher, got /nowhere, whi'),
    ({'teacher': 'runs/other'}, r'expected labels of data.pseudo.teacher=runs/other, got those of runs/teacher'),
    ({'top': 5}, r'expected labels of a teacher with top 5, got 3'),
    ({'split': 'train'}, r'expected labels of a teacher with digest .*num_examples 1437, got 360'),
    ({'threshold': .9999}, r'data.pseudo.threshold: expected at most 0.869, .* of the 360 images .*, got 0.9999')])
def test_labels_that_do_not_fit_are_refused(tmp_path: pathlib.Path, settings: dict[str, object], said: str) -> None:
  write_answers(tmp_path / 'labels')
  with pytest.raises(UserError, match=said):
    opening.open_sources(data(tmp_path / 'labels', **settings), image_px=(8, 8))


@pytest.mark.parametrize(('name', 'said'), [
    ('info.json', 'expected labels of a teacher'), ('scores-00000.npy', 'expected an array of shape')])
def test_damaged_labels_are_not_blamed_on_another_command(name: str, said: str, tmp_path: pathlib.Path) -> None:
  write_answers(tmp_path / 'labels')
  (tmp_path / 'labels' / name).write_bytes(b'{')
  said = f'{name}.*: {said}.*copy it again, or set another folder in data.pseudo.labels'
  with pytest.raises(UserError, match=said) as error:
    opening.open_sources(data(tmp_path / 'labels'), image_px=(8, 8))
  assert 'vit-jax prepare' not in str(error.value)


def test_images_of_which_none_could_be_read_are_not_blamed_on_the_threshold(tmp_path: pathlib.Path) -> None:
  write_answers(tmp_path / 'labels', are_readable=False)
  with pytest.raises(UserError, match='data.pseudo.source: expected images .* got 360 .* of which none could be read'):
    opening.open_sources(data(tmp_path / 'labels'), image_px=(8, 8))


def test_labels_for_other_names_of_classes_are_refused(tmp_path: pathlib.Path) -> None:
  names = opening.open_split(schema.Data(source='digits'), 'train', image_px=(8, 8)).class_names
  for folder, classes in (('same', names), ('other', names[::-1])):
    write_answers(tmp_path / folder, classes=pseudo.classes_digest(classes))
  opening.open_sources(data(tmp_path / 'same'), image_px=(8, 8))
  with pytest.raises(UserError, match='labels for the 10 classes .* got those for other names or another order'):
    opening.open_sources(data(tmp_path / 'other'), image_px=(8, 8))


def test_settings_that_make_no_sense_are_all_told() -> None:
  wrong = schema.Pseudo(source='mix:1*digits,1*digits', top=0, per_class=-1, threshold=1., share=0.)
  config = schema.Config(data=schema.Data(pseudo=wrong), objective=schema.Mae())
  with pytest.raises(UserError) as error:
    check.check(config)
  for said in ('data.pseudo.teacher: expected weights', 'data.pseudo.labels: expected a directory',
               'data.pseudo.source: expected one source beside',
               "'' for objective Mae, which does not learn", 'pseudo.top: expected at least 1',
               'pseudo.per_class: expected at least',
               'pseudo.threshold: expected 0 to below 1', 'pseudo.share: expected more than 0 to below 1'):
    assert said in str(error.value)
  with pytest.raises(UserError, match="data.pseudo.top: expected its default 10 with data.pseudo.source='', got 3"):
    check.check(schema.Config(data=schema.Data(pseudo=schema.Pseudo(top=3))))


def test_the_threshold_that_is_advised_selects_images(tmp_path: pathlib.Path) -> None:
  write_answers(tmp_path / 'labels')
  with pytest.raises(UserError, match=r'expected at most [0-9.]+,') as error:
    opening.open_sources(data(tmp_path / 'labels', threshold=.9999), image_px=(8, 8))
  advised = float(str(error.value).partition('at most ')[2].partition(',')[0])
  assert len(opening.open_sources(data(tmp_path / 'labels', threshold=advised), image_px=(8, 8)).train)
