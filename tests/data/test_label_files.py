"""Folders whose label files give each image any number of classes."""
from __future__ import annotations

import errno
import json
import os
import pathlib
import pickle

import numpy as np
import pytest
import single

from tests.data.images import encode, random_image
from vit_jax import main
from vit_jax.config import schema
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Shard
from vit_jax.data import loader, opening, prepare
from vit_jax.data.formats import label_paths
from vit_jax.data.source import Source, read_one
from vit_jax.data.user_files import OWN
from vit_jax.jobs import report

LABELS = [('cat', 'sofa'), ('dog',), (), ('cat', 'dog', 'sofa'), ('sofa',), ('dog', 'cat'), ('cat',)]
NAMES = ('cat', 'dog', 'sofa')


def make(root: pathlib.Path, file: str, *, labels: list[tuple[str, ...]] = LABELS, start: int = 0) -> pathlib.Path:
  """Writes images and a label file of one form."""
  (root / 'some').mkdir(parents=True, exist_ok=True)
  lines = []
  for i, names in enumerate(labels, start):
    (root / f'some/{i}.png').write_bytes(encode(random_image(i), '.png'))
    cells = [f'some/{i}.png', *names]
    lines.append(json.dumps({'image': cells[0], 'labels': cells[1:]}) if file.endswith('.jsonl') else
                 ('\t' if file.endswith('.tsv') else ',').join(cells))
  (root / file).write_text('\n'.join(lines) + '\n')
  return root


def open_all(root: pathlib.Path, **fields: object) -> opening.Sources:
  data = schema.Data(source=f'folder:{root}', **({'max_labels': 3} | fields))
  return opening.open_sources(data, image_px=(8, 8))


def listed(source: Source) -> dict[str, tuple[str, ...]]:
  """Class names by file name."""
  return {pathlib.Path(source.describe(i)).stem: tuple(source.class_names[c] for c in read_one(source, i).labels or ())
          for i in range(len(source))}


@pytest.mark.parametrize('ending', ['csv', 'tsv', 'jsonl'])
def test_every_form_gives_the_same_images_and_labels(tmp_path: pathlib.Path, ending: str) -> None:
  make(make(tmp_path, f'labels_train.{ending}'), f'labels_test.{ending}', labels=LABELS[:2], start=7)
  opened = open_all(tmp_path)
  assert opened.class_names == NAMES and opened.train.most_labels == 3
  assert listed(opened.train) == {str(i): names for i, names in enumerate(LABELS)}
  assert listed(opened.eval) == {'7': LABELS[0], '8': LABELS[1]}
  for i in range(7):
    record = read_one(opened.train, i)
    assert record.labels == opened.train.labels(i)
  copy = pickle.loads(pickle.dumps(opened.train))
  assert read_one(copy, 3) == read_one(opened.train, 3) and copy.digest == opened.train.digest


def test_a_header_and_empty_cells_are_skipped(tmp_path: pathlib.Path) -> None:
  make(tmp_path, 'labels.csv')
  text = (tmp_path / 'labels.csv').read_text()
  (tmp_path / 'labels.csv').write_text('image,labels\n' + text.replace('2.png', '2.png,,'))
  opened = open_all(tmp_path, holdout=.3)
  assert (len(opened.train), len(opened.eval)) == (5, 2)
  assert listed(opened.train) | listed(opened.eval) == {str(i): names for i, names in enumerate(LABELS)}


@pytest.mark.parametrize(('change', 'said'), [
    (lambda root: (root / 'some/1.png').unlink(), "got line 2: 'some/1.png', which does not exist"),
    (lambda root: (root / 'labels_train.csv').write_text('some/0.png,cat\nsome/0.png,dog\n'),
     "got line 2: 'some/0.png' twice"),
    (lambda root: (root / 'labels_train.csv').write_text('some/0.png\n'), 'expected at least one class, got none'),
    (lambda root: ((root / 'labels_train.csv').write_text('lost/1.png,cat\n'), (root / 'cat.png').write_bytes(b'x')),
     'some/1.png is there. Write paths relative to '),
    (lambda root: (root / 'labels_train.csv').write_text('cat,some/0.png\n'), 'Another cell of these lines is the pa'),
    (lambda root: (root / 'labels_test.csv').write_text('some/1.png,cow\n'),
     'labels_test.csv: expected the classes of labels_train.csv, which defines them, got 1 others: cow. Correct their '
     'names, or add them to labels_train.csv.'),
    (lambda root: (root / 'labels_train.tsv').write_text(''), 'labels_train.csv, labels_train.tsv. Remove'),
    (lambda root: ((root / 'labels_train.csv').unlink(), (root / 'labels_train.jsonl').write_text('{"image": 3}')),
     'labels_train.jsonl, line 1: expected the field labels, got image. Write lines')])
def test_a_problem_is_named(tmp_path: pathlib.Path, change: object, said: str) -> None:
  make(make(tmp_path, 'labels_train.csv'), 'labels_test.csv', labels=LABELS[:2])
  change(tmp_path)  # type: ignore[operator]
  with pytest.raises(UserError) as error:
    open_all(tmp_path)
  assert said in str(error.value)


def test_without_a_training_file_the_file_that_defines_the_classes_is_named(tmp_path: pathlib.Path) -> None:
  make(make(tmp_path, 'labels_val.csv'), 'labels_test.csv', labels=LABELS[:1])
  with pytest.raises(UserError, match='labels_val.csv: expected the classes of labels_test.csv, which defines them'):
    open_all(tmp_path, train_split='val')


@pytest.mark.parametrize(('error', 'kind', 'said'), [
    (errno.EACCES, UserError, "line 2: 'some/1.png', which cannot be read: \"Permission denied\""),
    (errno.EIO, TemporaryError, 'some/1.png: expected to read it, got "Input/output error"')])
def test_an_image_that_the_system_cannot_read_is_not_called_missing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: int, kind: type[Exception], said: str) -> None:
  make(tmp_path, 'labels.csv')
  look = os.lstat

  def fail(path: str, **rest: object) -> os.stat_result:
    if str(path).endswith('1.png'):
      raise OSError(error, os.strerror(error), path)
    return look(path, **rest)  # type: ignore[arg-type]

  monkeypatch.setattr(os, 'lstat', fail)
  with pytest.raises(kind, match=said):
    open_all(tmp_path)


def test_the_digest_depends_on_the_classes(tmp_path: pathlib.Path) -> None:
  """The same test images with another class in the training file, which renumbers the labels."""
  opened = [open_all(make(make(tmp_path / end, 'labels_train.csv', labels=[*LABELS, (end,)]), 'labels_test.csv',
                          labels=LABELS[:2], start=20)).eval for end in ('bird', 'wolf')]
  assert opened[0].digest != opened[1].digest


@pytest.mark.parametrize('room', [0, 2])
def test_too_little_room_for_the_labels_says_how_much_is_needed(tmp_path: pathlib.Path, room: int) -> None:
  with pytest.raises(UserError, match=f'data.max_labels: expected at least 3, .*, got {room}. Set it, and'):
    open_all(make(tmp_path, 'labels.csv'), max_labels=room)


@pytest.mark.parametrize('in_memory', [False, True])
def test_batches_list_the_labels_of_each_image(tmp_path: pathlib.Path, in_memory: bool) -> None:
  make(tmp_path, 'labels_train.csv')
  source = open_all(tmp_path, eval_split='train').train
  recipe = schema.Recipe(crop=schema.Crop.RESIZE, flip=False)
  common = {'recipe': recipe, 'image_px': (8, 8), 'batch_size': 4, 'shard': Shard((0,), 1), 'threads': 1,
            'in_memory': in_memory, 'max_labels': 3}
  training = loader.train_loader(source, seed=0, workers=0, max_bad_images=0, **common)  # type: ignore[arg-type]
  evaluation = loader.eval_loader(source, **common)  # type: ignore[arg-type]
  batches = [next(training.batches(0)), *evaluation.batches()]
  for batch in batches:
    for row in np.flatnonzero(batch.get('mask', np.ones(4))).tolist():
      expected = read_one(source, int(batch['index'][row])).labels or ()
      assert batch['label_list'][row].tolist() == [*expected, *[-1] * (3 - len(expected))]
      assert batch['label'][row] == (*expected, -1)[0]
  assert len(batches) == 3 and batches[0]['label_list'].dtype == np.int32
  training.close()
  evaluation.close()


def test_a_prepared_set_keeps_all_labels(tmp_path: pathlib.Path) -> None:
  pytest.importorskip('array_record')
  source = open_all(make(tmp_path / 'from', 'labels_train.csv'), eval_split='train').train
  settings = prepare.Settings(short_px=0, quality=90, num_shards=1, seed=0)
  prepare.write({'train': source}, tmp_path / 'to', settings, name_of=str, run=prepare.LocalRunner())
  data = schema.Data(source=f'array_record:{tmp_path / "to"}', eval_split='train', max_labels=3)
  again = opening.open_sources(data, image_px=(8, 8)).train
  assert sorted(read_one(again, i)[1:] for i in range(7)) == sorted(read_one(source, i)[1:] for i in range(7))
  assert again.most_labels == 3 and again.class_names == NAMES


def test_classes_in_another_order_renumber_every_label(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'classes.txt').write_text('sofa\nbird\ndog\ncat\n')
  make(tmp_path / 'set', 'labels_train.csv')
  source = open_all(tmp_path / 'set', eval_split='train[:3]', classes=str(tmp_path / 'classes.txt'))
  assert listed(source.train) == {str(i): names for i, names in enumerate(LABELS)}
  assert source.class_names == ('sofa', 'bird', 'dog', 'cat') and source.eval.most_labels == 3


TINY = ('--config.model.depth=1', '--config.model.width=16', '--config.model.heads=2', '--config.model.mlp.hidden=16',
        '--config.model.patch=8', '--config.image_px=16,16', '--config.batch_size=8', '--config.length=2 steps',
        '--config.data.recipe.eval_resize_px=16', '--config.data.recipe.mixup=.2', '--config.optimizer.lr=1e-3',
        '--config.train.log_every=1 steps', '--config.train.progress=false')


@pytest.mark.slow(reason='about 10 s: compiles a training step and an evaluation')
def test_a_folder_with_a_label_file_is_trained_and_any_label_is_right(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(report, 'write_report', lambda workdir: '')
  make(make(tmp_path / 'set', 'labels_train.csv', labels=LABELS * 2), 'labels_test.csv', start=20)
  given = ['--job=train', '--config=from_folder', f'--config.data.source=folder:{tmp_path / "set"}',
           f'--workdir={tmp_path / "run"}', *TINY]
  with single.one_device():
    assert main.run(given) == 2
    assert main.run([*given, '--config.data.max_labels=3', '--config.objective.loss=sigmoid']) == 0
  assert 'data.max_labels: expected at least 3, the largest number of labels of an image of' in capsys.readouterr().err
  final = json.loads((tmp_path / 'run/final.json').read_text())
  assert final['num_examples'] == {'test': 6}  # one of the seven has no label
  found = np.load(tmp_path / 'run/predictions.npz')
  test = open_all(tmp_path / 'set').eval
  hits = [int(top[0]) in test.labels(int(i)) for i, top in zip(found['index'], found['top'], strict=True)]
  evaluated = json.loads((tmp_path / 'run/evaluate.json').read_text())
  assert evaluated['top1'] == pytest.approx(np.mean(hits))
  np.testing.assert_array_equal(found['label'] == found['top'][:, 0], hits)


def test_a_folder_is_listed_once_for_paths_without_extensions(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  for folder in range(70):
    (tmp_path / str(folder)).mkdir()
    (tmp_path / str(folder) / 'a.jpg').touch()
  listed, listdir = list[str](), os.listdir
  monkeypatch.setattr(os, 'listdir', lambda path: listed.append(path) or listdir(path))  # type: ignore[func-returns-value]
  paths = label_paths.ImagePaths(str(tmp_path), OWN)
  for folder in [*range(70)] * 2:
    assert paths.find(f'{folder}/a') == label_paths.ImageFile(f'{folder}/a.jpg', 0)
  assert len(listed) == 71
