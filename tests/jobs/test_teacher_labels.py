"""A round of Noisy Student through the main job: a teacher labels, is stopped, goes on, and a student learns."""
from __future__ import annotations

import dataclasses
import os
import pathlib
import signal

import begun
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import answers, opening
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import read_one
from vit_jax.jobs import teacher_labels, train
from vit_jax.recipes import noisy_student
from vit_jax.record import progress, reader
from vit_jax.weights import inference, loading

pytestmark = pytest.mark.usefixtures('one_device', 'no_page')

MODEL = schema.ViT(patch=4, width=16, depth=1, heads=2, mlp=schema.Mlp(16), pool=schema.Mean())
CONFIG = schema.Config(
    name='tiny', length='2 steps', batch_size=40, image_px=(16, 16), model=MODEL,
    data=schema.Data(source='digits', train_split='train[:137]',
                     recipe=schema.Recipe(crop=schema.Crop.RESIZE, flip=False, mixup=.2)),
    optimizer=schema.AdamW(lr=1e-2, weight_decay=0.), train=schema.Train(log_every='1 steps', progress=False),
    checkpoints=schema.Checkpoints(every='100 %'))
UNLABELED = schema.Pseudo(source='digits', split='test', top=4, threshold=.1, per_class=30, share=.6)
"""360 pictures."""


@pytest.fixture(scope='module')
def teacher(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  return begun.write(CONFIG, tmp_path_factory.mktemp('runs') / 'teacher')


def student(teacher: pathlib.Path) -> schema.Config:
  return noisy_student.taught(CONFIG, str(teacher), UNLABELED, 1)


@pytest.mark.slow(reason='9 s: two programs; tests/data/test_pseudo.py has what a student reads')
def test_a_round_is_stopped_goes_on_and_ends_in_a_student(
    teacher: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(teacher_labels, 'PER_PART', 80)
  update, seen = progress.Progress.update, []

  def stop_at(self: progress.Progress, done: int, values: dict[str, float]) -> None:
    seen.append(done)
    if seen == [40, 80, 120, 160, 200]:  # of the first start
      os.kill(os.getpid(), signal.SIGTERM)
    update(self, done, values)

  monkeypatch.setattr(progress.Progress, 'update', stop_at)
  config = student(teacher)
  labels = pathlib.Path(config.data.pseudo.labels)
  assert labels == teacher / 'pseudo_1'
  assert train.run(config, tmp_path / 'student') == 75
  assert 'Stopped by SIGTERM while the teacher labels images' in capsys.readouterr().out
  assert seen == [40, 80, 120, 160, 200] and not labels.exists()
  assert sorted(p.name for p in labels.parent.glob('pseudo_1.*.part/scores*.npy')) == [
      'scores-00000.npy', 'scores-00001.npy']
  seen.clear()
  assert train.run(config, tmp_path / 'student') == 0
  assert seen[:5] == [200, 240, 280, 320, 360]
  check_labels(teacher, labels)
  rows = reader.read(tmp_path / 'student').rows
  assert [row['step'] for row in rows if 'train/loss' in row] == [1, 2]
  seen.clear()
  assert not teacher_labels.ensure(dataclasses.replace(config, length='3 steps'))
  assert not seen  # nothing is labeled twice


def test_a_folder_with_other_content_is_named_by_its_setting(teacher: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'notes.txt').write_text('mine')
  config = student(teacher)
  pseudo = dataclasses.replace(config.data.pseudo, labels=str(tmp_path))
  with pytest.raises(UserError, match=f'^data.pseudo.labels={tmp_path}: expected a new folder, got one with other con'):
    teacher_labels.ensure(dataclasses.replace(config, data=dataclasses.replace(config.data, pseudo=pseudo)))


def check_labels(teacher: pathlib.Path, labels: pathlib.Path) -> None:
  """The labels are the teacher's own answers to whole pictures, computed one after the other."""
  found, maps = loading.load(str(teacher)), answers.Answers(labels)
  source = opening.open_split(schema.Data(source='digits'), 'test', image_px=(16, 16))
  fit = transforms.eval_transform(inference.eval_recipe(found), (16, 16))
  for place in (0, 79, 80, 359):
    image = (np.asarray(fit(read_one(source, place))['image'], np.float32) / 255 - .5) / .5
    logits = inference.function(found)(inference.parameters(found), jnp.asarray(image)[None]).logits
    assert logits is not None
    odds = np.exp(np.asarray(logits, np.float64)[0])
    classes, scores = maps.read(np.array([place]))
    order = np.argsort(-odds)[:4]
    np.testing.assert_allclose(scores[0, 0], odds[order] / odds.sum(), atol=2e-3)
    np.testing.assert_allclose(odds[classes[0, 0]], odds[order], rtol=1e-3)


def test_several_processes_share_the_parts(tmp_path: pathlib.Path) -> None:
  info = answers.Info('some', 'abc', 11, (1, 1), 2, 11, 2, {'teacher': 't'}, answers.PROBABILITIES)
  asked: dict[int, list[int]] = {0: [], 1: [], 2: []}
  places: list[str] = []

  def compute(process: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
    asked[process].append(rows.start)
    return np.full((len(rows), 1, 1, 2), rows.start), np.ones((len(rows), 1, 1, 2))

  def meet(place: str) -> None:
    places.append(place)
    if place == 'label maps begun':  # the others do their parts before this one goes on
      for process in (1, 2):
        answers.write(tmp_path / 'maps', info, lambda rows: compute(process, rows), setting='--to',  # noqa: B023
                      process=(process, 3))

  assert answers.write(tmp_path / 'maps', info, lambda rows: compute(0, rows), setting='--to', process=(0, 3),
                       barrier=meet)
  assert asked == {0: [0, 6], 1: [2, 8], 2: [4, 10]}
  assert places == [f'label maps {what}' for what in ('checked', 'begun', 'written', 'complete')]
  assert answers.Answers(tmp_path / 'maps').read(np.array([10]))[0].ravel().tolist() == [10, 10]


@pytest.mark.slow(reason='2 s: a teacher is built')
def test_a_teacher_of_other_classes_is_refused(teacher: pathlib.Path, tmp_path: pathlib.Path) -> None:
  config = student(teacher)
  other = dataclasses.replace(config, data=dataclasses.replace(
      config.data, source='synthetic', train_split='train', pseudo=dataclasses.replace(
          config.data.pseudo, labels=str(tmp_path / 'labels'))))
  with pytest.raises(UserError, match='class'):
    teacher_labels.ensure(other)
  assert not teacher_labels.ensure(CONFIG)
